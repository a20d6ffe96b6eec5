"""torch's and FlashInfer's operators as FlashInfer-Bench Solutions, to be timed beside ours.

FlashInfer's `plan` is not charged: a Solution here plans once for the shapes that it is called
with, and its lengths must stay. Where no library has an operator there is EAGER, operations of
torch one after the other, unless they go token by token.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.baselines import gdn, sparse

HEAD = "import torch\n"
EAGER = "torch_eager"
_WRAPPED = """
planned = {{}}


def run({inputs}, output, lse):
    key = {key}
    if key not in planned:
        space = torch.empty(128 << 20, dtype=torch.uint8, device=kv_indptr.device)
        wrapper = planned[key] = {wrapper}(space, {option})
        wrapper.plan({plan})
    planned[key].run({tensors}, out=output, lse=lse, return_lse=True)
"""
_INDEXED = """

def run({inputs}):
    rows, dim = k_index_cache_fp8.flatten(1), q_index_fp8.shape[-1]
    size = k_index_cache_fp8.shape[1]
    keys = rows[:, : size * dim].view(torch.float8_e4m3fn).unflatten(1, (size, dim))
    scales = rows.view(torch.float32)[:, size * dim // 4 :]
    return index(q_index_fp8, keys, scales, weights, seq_lens, block_table, {count})
"""
_CHUNKED = """
planned = {{}}


def run({inputs}):
    key = q.shape, cu_seqlens.shape
    if key not in planned:
        planned[key] = cu_seqlens.tolist()
    tensors = {{{given}}}
    return prefill(Given(tensors=tensors, scalars=tensors), planned[key])
"""
_WAYS = {way: f"backend={way!r}" for way in ("fa2", "fa3")}
_PAGES = {way: f"'NHD', {option}" for way, option in _WAYS.items()}
_CORES = {"cuda": "'NHD', use_tensor_cores=False", "tensor_cores": "'NHD', use_tensor_cores=True"}
_PAGED = "kv_indptr, kv_indices, {last}, q.shape[1], *k_cache.shape[2:], {page}"
_TYPES = "q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=sm_scale"
_EACH = "torch.arange(len(kv_indptr), device=kv_indptr.device).int()"  # a query each
_LATENT = (
    "kv_indptr, kv_indices, {keys}, *q_nope.shape[1:], q_pe.shape[2], {page}, CAUSAL, sm_scale, "
    "q_nope.dtype, q_nope.dtype"
)
_CACHE, _LATENTS = "q, (k_cache, v_cache)", "q_nope, q_pe, ckv_cache, kpe_cache"
_MLA = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
#: by op type and kind: the wrapper, its options by Solution, what `plan` and `run` are given
WRAPPERS = {
    "gqa_paged decode": (
        "flashinfer.BatchDecodeWithPagedKVCacheWrapper", _CORES, f"{_PAGED}, {_TYPES}", _CACHE,
    ),
    "gqa_paged prefill": (
        "flashinfer.BatchPrefillWithPagedKVCacheWrapper", _PAGES,
        f"qo_indptr, {_PAGED}, causal=True, {_TYPES}", _CACHE,
    ),
    "gqa_ragged prefill": (
        "flashinfer.BatchPrefillWithRaggedKVCacheWrapper", _PAGES,
        f"qo_indptr, kv_indptr, q.shape[1], *k.shape[1:], causal=True, {_TYPES}", "q, k, v",
    ),
    "mla_paged decode": (
        _MLA, _WAYS, f"{_EACH}, {_LATENT.replace('CAUSAL', 'False')}", _LATENTS,
    ),
    "mla_paged prefill": (
        _MLA, _WAYS, f"qo_indptr, {_LATENT.replace('CAUSAL', 'True')}", _LATENTS,
    ),
}  # fmt: skip


def peers(definition: Definition, eps: float | None = None) -> list[dict[str, Any]]:
    """The Solutions of libraries for a definition, as JSON data; `eps` is a norm's."""
    made: dict[str, str] = {}
    inputs = ", ".join(definition.inputs)
    match definition.op_type:
        case "gemm":
            made["torch_mm"] = "\n\ndef run(A, B, C):\n    torch.mm(A, B.T, out=C)\n"
        case "rmsnorm":
            made |= _norms("residual" in definition.inputs, eps)
        case "sampling":
            filters = [name for name in ("top_k", "top_p") if name in definition.inputs]
            order = ', filter_apply_order="top_k_first"' if len(filters) == 2 else ""
            call = f"sampling.{'_'.join(filters)}_sampling_from_probs({inputs}{order})"
            made["flashinfer"] = (
                f"from flashinfer import sampling\n\n\ndef run({inputs}, samples):\n"
                f"    samples.copy_({call})\n"
            )
        case "dsa_paged" if "sparse_indices" in definition.inputs:
            parts = inspect.getsource(sparse.product), inspect.getsource(sparse.attention)
            formula = "\n\n".join(parts)
            made[EAGER] = (
                f"import math\nfrom torch import Tensor\n\n\n{formula}\n\ndef run({inputs}):\n"
                "    caches = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)\n"
                "    return attention(q_nope, q_pe, *caches, sparse_indices, sm_scale)\n"
            )
        case "dsa_paged":
            text = inspect.getsource(sparse.index)
            (count,) = ((tensor.shape or ())[1] for tensor in definition.outputs.values())
            made[EAGER] = f"import math\nfrom torch import Tensor\n\n\n{text}" + _INDEXED.format(
                inputs=inputs, count=definition.const_axes[count]
            )
        case "gdn" if "cu_seqlens" in definition.inputs:
            parts = inspect.getsource(gdn.prefill), inspect.getsource(gdn._chunk)
            formula = "\n\n".join((definition.source.replace("def run", "def by_token"), *parts))
            given = ", ".join(f"{name!r}: {name}" for name in definition.inputs)
            made[EAGER] = (
                "from types import SimpleNamespace as Given\nfrom torch import Tensor\n"
                f"from torch.nn.functional import softplus\n\nCHUNK = {gdn.CHUNK}\n{formula}"
                f"{_CHUNKED.format(inputs=inputs, given=given)}"
            )
        case "moe" | "gdn" if "cu_seqlens" not in definition.inputs:
            made[EAGER] = definition.source
        case _:
            made |= _wrapped(definition)
    return [_solution(definition, name, HEAD + text) for name, text in made.items()]


def _norms(residual: bool, eps: float | None) -> Mapping[str, str]:
    """torch's fused operation, after an addition where there is a residual; FlashInfer's, which
    works in place then and is charged the clones that spare its inputs."""
    names = ["hidden_states", *["residual"] * residual, "weight"]
    define = f"\n\ndef run({', '.join(names)}"
    summed = " + ".join(names[:-1])
    own = (
        f"{define}, output):\n"
        f"    flashinfer.rmsnorm(hidden_states, weight, eps={eps}, out=output)\n"
    )
    if residual:
        own = (
            f"{define}):\n    x = hidden_states.clone()\n"
            f"    flashinfer.fused_add_rmsnorm(x, residual.clone(), weight, eps={eps})\n"
            f"    return x\n"
        )
    rms_norm = f"torch.nn.functional.rms_norm({summed}, weight.shape, weight, {eps})"
    return {
        "torch_rms_norm": f"{define}):\n    return {rms_norm}\n",
        "flashinfer": f"import flashinfer\n{own}",
    }


def _wrapped(definition: Definition) -> Mapping[str, str]:
    """FlashInfer's wrappers of attention; nothing for operators that have none."""
    kind = "prefill" if "qo_indptr" in definition.inputs else "decode"
    known = WRAPPERS.get(f"{definition.op_type} {kind}")
    if known is None:
        return {}
    wrapper, options, plan, tensors = known
    page = definition.const_axes.get("page_size", 1)
    pages = "kv_indptr.diff()"
    last, keys = f"({pages} > 0).int()", f"({pages} * {page}).int()"
    if "kv_last_page_len" in definition.inputs:
        last = "kv_last_page_len"
        keys = f"(({pages} - 1).clamp(min=0) * {page} + {last}).int()"
    shapes = [f"{name}.shape" for name, t in definition.inputs.items() if t.shape is not None]
    return {
        f"flashinfer_{way}": f"import {wrapper.rpartition('.')[0]}\n"
        + _WRAPPED.format(
            inputs=", ".join(definition.inputs), key=", ".join(shapes), wrapper=wrapper,
            option=option, plan=plan.format(last=last, page=page, keys=keys), tensors=tensors,
        )
        for way, option in options.items()
    }  # fmt: skip


def _solution(definition: Definition, name: str, text: str) -> dict[str, Any]:
    return {
        "name": f"{name}_{definition.name}",
        "definition": definition.name,
        "author": name.partition("_")[0],
        "description": "a library's operator, timed beside ours; plans are made once",
        "spec": {
            "language": "python",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["torch"] + ["flashinfer"] * ("flashinfer" in name),
            "destination_passing_style": not text.splitlines()[-1].lstrip().startswith("return"),
        },
        "sources": [{"path": "main.py", "content": text}],
    }
