"""Baselines of attention: FlashInfer's wrappers and torch's fused attention.

FlashInfer's `plan`, which reads the lengths on the host, is done when a baseline is made: it holds
for every seed, because lengths follow from the axes. What is timed is `run` alone, both outputs,
into memory of its own.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from ptxflow.eval.bench.baselines.baseline import Baseline, Given, Unsupported, computing

WORKSPACE = 128 << 20  # bytes, as FlashInfer advises
LAYOUT = "NHD"  # of a page: slots, heads, dimensions


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """One for all wrappers: they run one after the other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def _lengths(given: Given) -> tuple[Tensor, Tensor]:
    """Queries and keys of each sequence, int32 on the device."""
    t = given.tensors
    keys = t["kv_indptr"].diff()
    if "k_cache" in t or "ckv_cache" in t:
        page = t["k_cache" if "k_cache" in t else "ckv_cache"].shape[1]
        if "kv_last_page_len" in t:
            keys = (keys - 1).clamp(min=0) * page + t["kv_last_page_len"]
        else:
            keys = keys * page
    queries = t["qo_indptr"].diff() if "qo_indptr" in t else torch.ones_like(keys)
    return queries.int(), keys.int()


def _sighted(given: Given) -> Tensor:
    """[rows] bool: the queries that see a key. Of others FlashInfer's lse is finite."""
    queries, keys = (x.long() for x in _lengths(given))
    starts = queries.cumsum(0) - queries
    place = torch.arange(int(queries.sum()), device=keys.device)
    seen = place + 1 + (keys - queries - starts).repeat_interleave(queries)
    return seen > 0


def _outputs(given: Given) -> dict[str, Any]:
    """What a wrapper's run writes, both outputs."""
    out, lse = (torch.zeros_like(given.tensors[n]) for n in given.definition.outputs)
    return {"out": out, "lse": lse, "return_lse": True}


def _last_page(given: Given, page: int) -> Tensor:
    """Tokens in the last page of each sequence, 0 where it has no page."""
    if "kv_last_page_len" in given.tensors:
        return given.tensors["kv_last_page_len"]
    return given.tensors["kv_indptr"].diff().clamp(max=1).int() * page


def _wrapper(given: Given, module: str, name: str, *layout: str, **options: Any) -> Any:
    """One of FlashInfer's wrappers, in the workspace that all share."""
    device = next(iter(given.tensors.values())).device
    return getattr(importlib.import_module(module), name)(_workspace(device), *layout, **options)


def _running(wrapper: Any, given: Given, *tensors: Any) -> Baseline:
    out = _outputs(given)
    return computing(lambda: wrapper.run(*tensors, **out), lambda: _sighted(given))


def gqa_decode(given: Given, tensor_cores: bool) -> Baseline:
    """FlashInfer's paged decoding, on tensor cores (its fa2 prefill) or not."""
    t, q, k = given.tensors, given.tensors["q"], given.tensors["k_cache"]
    name = "BatchDecodeWithPagedKVCacheWrapper"
    wrapper = _wrapper(given, "flashinfer", name, LAYOUT, use_tensor_cores=tensor_cores)
    page, kv_heads, dim = k.shape[1:]
    wrapper.plan(
        t["kv_indptr"], t["kv_indices"], _last_page(given, page), q.shape[1], kv_heads, dim,
        page, q_data_type=q.dtype, kv_data_type=k.dtype, sm_scale=given.scalars["sm_scale"],
    )  # fmt: skip
    return _running(wrapper, given, q, (k, t["v_cache"]))


def paged_prefill(given: Given, backend: str) -> Baseline:
    """FlashInfer's causal prefill over pages, by FlashAttention-2 or 3."""
    t, q, k = given.tensors, given.tensors["q"], given.tensors["k_cache"]
    name = "BatchPrefillWithPagedKVCacheWrapper"
    wrapper = _wrapper(given, "flashinfer", name, LAYOUT, backend=backend)
    page, kv_heads, dim = k.shape[1:]
    wrapper.plan(
        t["qo_indptr"], t["kv_indptr"], t["kv_indices"], _last_page(given, page), q.shape[1],
        kv_heads, dim, page, causal=True, sm_scale=given.scalars["sm_scale"],
        q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return _running(wrapper, given, q, (k, t["v_cache"]))


def ragged_prefill(given: Given, backend: str) -> Baseline:
    """FlashInfer's causal prefill over packed keys and values, by FlashAttention-2 or 3."""
    t, q, k = given.tensors, given.tensors["q"], given.tensors["k"]
    name = "BatchPrefillWithRaggedKVCacheWrapper"
    wrapper = _wrapper(given, "flashinfer", name, LAYOUT, backend=backend)
    wrapper.plan(
        t["qo_indptr"], t["kv_indptr"], q.shape[1], k.shape[1], k.shape[2], causal=True,
        sm_scale=given.scalars["sm_scale"], q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    return _running(wrapper, given, q, k, t["v"])


def mla(given: Given, backend: str) -> Baseline:
    """FlashInfer's MLA, decoding or causal prefill, by its kernels of that name."""
    t, q, cache = given.tensors, given.tensors["q_nope"], given.tensors["ckv_cache"]
    name = "BatchMLAPagedAttentionWrapper"
    wrapper = _wrapper(given, "flashinfer.mla", name, backend=backend)
    one_each = torch.arange(len(t["kv_indptr"]), dtype=torch.int32, device=q.device)
    wrapper.plan(
        t.get("qo_indptr", one_each), t["kv_indptr"], t["kv_indices"], _lengths(given)[1],
        q.shape[1], q.shape[2], t["q_pe"].shape[2], cache.shape[1], "qo_indptr" in t,
        given.scalars["sm_scale"], q.dtype, cache.dtype,
    )  # fmt: skip
    return _running(wrapper, given, q, t["q_pe"], cache, t["kpe_cache"])


def torch_sdpa(given: Given) -> Baseline:
    """torch's fused attention, without lse, where all sequences are new and equally long."""
    q, k, v = (given.tensors[n] for n in "qkv")
    queries, keys = _lengths(given)
    if not (torch.equal(queries, keys) and bool((keys == keys[0]).all()) and int(keys[0])):
        raise Unsupported("it takes sequences of one length, without a prefix")
    count, scale = len(keys), given.scalars["sm_scale"]
    q, k, v = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )

    def outputs() -> tuple[Tensor]:
        return (call().transpose(1, 2).flatten(0, 1),)

    return Baseline(call, outputs)
