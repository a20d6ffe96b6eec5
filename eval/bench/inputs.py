"""Deterministic inputs for every op type: `make_inputs(definition, axes, seed)`.

Values are drawn on the CPU, in fixed chunks that each have a stream of their own, so that they
depend on the definition's input names, the axes and the seed alone: not on the device, the number
of threads or the order of drawing. Index tensors are valid by construction; how long sequences are
follows from the axes (`sequences`), which pages they own from the seed.
"""

import math
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ptxflow.env.tasks import sequences
from ptxflow.env.tasks.definition import Definition, DefinitionError
from ptxflow.env.tasks.sequences import RARE, Ints

CHUNK = 1 << 20  # elements drawn from one stream
DRAWN = 64  # chunks of an input that are drawn; those after them are these again, rotated
ROTATION = 104_729  # elements a repetition; a prime, so no row or page lands on another's place
FP8_MAX = 448.0  # largest float8_e4m3fn
MLA_SCALE = 0.1352337747812271  # recorded with a long-context model; nominally 1/sqrt(192)

Inputs = dict[str, Any]


class Draw:
    """Sources of randomness for one call: a stream per input name, addressed by chunk."""

    def __init__(self, definition: Definition, axes: Mapping[str, int], seed: int):
        if seed < 0:
            raise DefinitionError(f"{definition.name}: a seed must not be negative, not {seed}")
        self.definition, self.axes, self.seed = definition, axes, seed

    def rng(self, name: str, chunk: int = 0) -> np.random.Generator:
        """The stream of a chunk of CHUNK elements of that input."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), chunk])

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an input, with every axis bound."""
        return tuple(self.axes[axis] for axis in self.definition.inputs[name].shape or ())

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.definition.inputs[name].dtype)
        return dtype

    def normal(self, name: str, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        """A tensor of the input's shape and dtype, normal with that mean and deviation."""
        return self.fill(name, lambda rng, n: rng.standard_normal(n, np.float32) * scale + mean)

    def fill(self, name: str, values: Callable[[np.random.Generator, int], Any]) -> torch.Tensor:
        """A tensor of the input's shape and dtype whose chunks are `values(rng, count)`.

        A cache of 65,000 pages took 40 s to draw: beyond DRAWN chunks earlier ones come again.
        """
        out = torch.empty(self.shape(name), dtype=self.dtype(name))
        flat = out.view(-1)

        def chunk(i: int) -> None:
            part = flat[i * CHUNK : (i + 1) * CHUNK]
            drawn = np.asarray(values(self.rng(name, i), part.numel()), np.float32)
            part.copy_(torch.from_numpy(drawn))

        def again(i: int) -> None:
            part, source = flat[i * CHUNK : (i + 1) * CHUNK], flat[i % DRAWN * CHUNK :][:CHUNK]
            begin = i // DRAWN * ROTATION % CHUNK
            count = min(part.numel(), CHUNK - begin)
            part[:count] = source[begin : begin + count]
            part[count:] = source[: part.numel() - count]

        chunks = range(-(-flat.numel() // CHUNK))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(chunk, chunks[:DRAWN]))
            list(pool.map(again, chunks[DRAWN:]))
        return out

    def ints(self, name: str, values: Any) -> torch.Tensor:
        """An integer tensor of the input's dtype; its shape must be the definition's."""
        tensor = torch.as_tensor(np.asarray(values), dtype=self.dtype(name))
        assert tuple(tensor.shape) == self.shape(name), (name, tensor.shape, self.shape(name))
        return tensor

    def fail(self, why: str) -> DefinitionError:
        """An error to raise, which names the definition and its variable axes."""
        axes = ", ".join(f"{n}={self.axes[n]}" for n in self.definition.var_axes)
        return DefinitionError(f"{self.definition.name}: {why} ({axes})")


def _page_ids(d: Draw, name: str, counts: Ints, num_pages: int) -> Ints:
    """Scattered page ids, all different; where the cache is too small for that, sequences share.

    Within a sequence a page occurs once, as in a prefix cache.
    """
    rng = d.rng(name)
    total = int(counts.sum())
    if total <= num_pages:
        return rng.permutation(num_pages)[:total]
    if int(counts.max(initial=0)) > num_pages:
        raise d.fail(f"a sequence needs {counts.max()} pages and the cache has {num_pages}")
    return np.concatenate([rng.permutation(num_pages)[:count] for count in counts])


def _page_table(d: Draw) -> Inputs:
    """kv_indptr, kv_indices and, as the definition asks, kv_last_page_len and qo_indptr.

    Queries are the last tokens of their sequence, so none has more queries than tokens, unless the
    axes leave no choice: then there are rows that see nothing.
    """
    _check_count(d)
    page_size, queries = d.axes["page_size"], "qo_indptr" in d.definition.inputs
    found = sequences.paged_prefill(d.axes) if queries else sequences.decoding(d.axes)
    ids = _page_ids(d, "kv_indices", found.pages, d.axes["num_pages"])
    made: Inputs = {
        "kv_indptr": d.ints("kv_indptr", sequences.indptr(found.pages)),
        "kv_indices": d.ints("kv_indices", ids),
    }
    if queries:
        made["qo_indptr"] = d.ints("qo_indptr", sequences.indptr(found.queries))
    if "kv_last_page_len" in d.definition.inputs:
        last = found.keys - page_size * np.maximum(found.pages - 1, 0)
        made["kv_last_page_len"] = d.ints("kv_last_page_len", last)
    return made


def _check_count(d: Draw) -> None:
    parts = d.axes["len_indptr"] - 1
    if parts < 1:
        raise d.fail("len_indptr is the number of sequences plus one, so at least 2")
    if d.axes.get("batch_size", parts) != parts:
        raise d.fail("len_indptr must be batch_size + 1")


def _gemm(d: Draw) -> Inputs:
    return {"A": d.normal("A"), "B": d.normal("B")}


def _gemm_epilogue(d: Draw) -> Inputs:
    """Weights that keep sums normal, so that gates are neither open nor shut."""
    made = {name: d.normal(name) for name in d.definition.inputs}
    return made | {"B": d.normal("B", 1 / math.sqrt(d.axes["K"]))}


def _rmsnorm(d: Draw) -> Inputs:
    made = {name: d.normal(name) for name in d.definition.inputs if name != "weight"}
    return made | {"weight": d.normal("weight", 0.2, 1.0)}


def _gqa_paged(d: Draw) -> Inputs:
    values = {name: d.normal(name) for name in ("q", "k_cache", "v_cache")}
    scale = 1 / math.sqrt(d.axes["head_dim"])
    return values | _page_table(d) | {"sm_scale": scale}


def _packed(d: Draw) -> Inputs:
    """Where the queries and the keys of each sequence begin."""
    _check_count(d)
    found = sequences.ragged_prefill(d.axes)
    return {
        "qo_indptr": d.ints("qo_indptr", sequences.indptr(found.queries)),
        "kv_indptr": d.ints("kv_indptr", sequences.indptr(found.keys)),
    }


def _gqa_ragged(d: Draw) -> Inputs:
    values = {name: d.normal(name) for name in ("q", "k", "v")}
    return values | _packed(d) | {"sm_scale": 1 / math.sqrt(d.axes["head_dim"])}


def _mla_paged(d: Draw) -> Inputs:
    # A latent key is 576 wide but the scale in use is that of the 192 wide key it stands for: it
    # would put most of the weight on a few tokens, so queries are drawn a third as large.
    values = {name: d.normal(name, 1 / 3) for name in ("q_nope", "q_pe")}
    values |= {name: d.normal(name) for name in ("ckv_cache", "kpe_cache")}
    return values | _page_table(d) | {"sm_scale": MLA_SCALE}


def _dsa_paged(d: Draw) -> Inputs:
    return _sparse_attention(d) if "sparse_indices" in d.definition.inputs else _topk_indexer(d)


def _lists(d: Draw) -> Inputs:
    """Slots of a token are different; every 16th token has padding in places, the 9th all."""
    tokens, topk = d.axes["num_tokens"], d.axes["topk"]
    slots = d.axes["num_pages"] * d.axes["page_size"]
    rng = d.rng("sparse_indices")
    indices = np.full((tokens, topk), -1, np.int64)
    for t in range(tokens):
        n = min(topk, slots)
        if t % RARE == RARE // 2:
            n = 0 if t == RARE // 2 else int(rng.integers(0, n + 1))
        places = np.arange(n) if t % 2 else rng.permutation(topk)[:n]
        indices[t, places] = rng.choice(slots, n, replace=False)
    return {"sparse_indices": d.ints("sparse_indices", indices)}


def _sparse_attention(d: Draw) -> Inputs:
    return {
        "q_nope": d.normal("q_nope", 1 / 3),
        "q_pe": d.normal("q_pe", 1 / 3),
        "ckv_cache": d.normal("ckv_cache"),
        "kpe_cache": d.normal("kpe_cache"),
        **_lists(d),
        "sm_scale": MLA_SCALE,
    }


def _block_table(d: Draw) -> Inputs:
    """Sequences fill their row of block_table to between nothing and all; the first fills it."""
    batch, width, page_size = d.axes["batch_size"], d.axes["max_num_pages"], d.axes["page_size"]
    rng = d.rng("seq_lens")
    lengths = rng.integers(1, width * page_size + 1, batch)
    lengths[RARE // 2 :: RARE] = 0
    lengths[0] = width * page_size - int(rng.integers(0, page_size))
    pages = -(-lengths // page_size)
    ids = np.split(_page_ids(d, "block_table", pages, d.axes["num_pages"]), np.cumsum(pages)[:-1])
    # What lies past a sequence's pages is valid, but wrong.
    table = d.rng("block_table", 1).integers(0, d.axes["num_pages"], (batch, width))
    for row, own in zip(table, ids, strict=True):
        row[: len(own)] = own
    return {"seq_lens": d.ints("seq_lens", lengths), "block_table": d.ints("block_table", table)}


def _topk_indexer(d: Draw) -> Inputs:
    return {
        "q_index_fp8": d.normal("q_index_fp8"),
        "k_index_cache_fp8": _index_cache(d),
        "weights": d.normal("weights"),
        **_block_table(d),
    }


def _index_cache(d: Draw) -> torch.Tensor:
    """Pages of float8 keys followed by their float32 scales, as bytes."""
    pages, page_size = d.axes["num_pages"], d.axes["page_size"]
    rng, dim = d.rng("k_index_cache_fp8"), d.axes["index_head_dim"]
    keys = rng.standard_normal((pages, page_size, dim), np.float32)
    scale = np.abs(keys).max(-1) / FP8_MAX
    values = torch.from_numpy(keys / scale[..., None]).to(torch.float8_e4m3fn)
    parts = [values.view(torch.int8).flatten(1), torch.from_numpy(scale).view(torch.int8)]
    return torch.cat(parts, 1).view(d.shape("k_index_cache_fp8"))


def _gdn(d: Draw) -> Inputs:
    """Keys and queries of unit length, as the models feed: longer ones make the state diverge."""
    size = d.axes["head_size"]
    made: Inputs = {name: d.normal(name) for name in ("q", "k")}
    for name, x in made.items():
        made[name] = torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype)
    made |= {name: d.normal(name) for name in ("v", "a", "b")}
    made["state"] = d.normal("state", 1 / math.sqrt(size))
    made["A_log"] = d.fill("A_log", lambda rng, n: np.log(rng.uniform(1e-2, 2.0, n)))
    made["dt_bias"] = d.normal("dt_bias", 0.5, -1.0)
    made["scale"] = 1 / math.sqrt(size)
    if "cu_seqlens" in d.definition.inputs:
        sizes = sequences.split(d.axes["total_seq_len"], d.axes["num_seqs"], "tokens")
        made["cu_seqlens"] = d.ints("cu_seqlens", sequences.indptr(sizes))
    return made


def _blocks(d: Draw, values: str, scales: str, deviation: float) -> Inputs:
    """float8 values of unit blocks over the whole range, and scales that bring them to normal.

    A scale varies by a factor of two from block to block around `deviation` / 112, as a block's
    largest of 128 x 128 normals, four deviations, is quantised to the largest float8.
    """
    unit = FP8_MAX / 4
    made = d.fill(
        values, lambda rng, n: np.clip(rng.standard_normal(n, np.float32) * unit, -448, 448)
    )
    scale = d.fill(scales, lambda rng, n: rng.uniform(2 / 3, 4 / 3, n) * deviation / unit)
    return {values: made, scales: scale}


def moe_routing(d: Draw) -> Inputs:
    """What says which experts the tokens of MoE choose, and which of them the rank holds.

    The rank is that of the number of tokens: what a kernel takes by value no seed changes.
    """
    experts, local = d.axes["num_experts"], d.axes["num_local_experts"]
    return {
        "routing_logits": d.normal("routing_logits"),
        "routing_bias": d.normal("routing_bias", 0.1),
        "local_expert_offset": d.axes["seq_len"] % (experts // local) * local,
    }


def _moe(d: Draw) -> Inputs:
    hidden, inner = d.axes["hidden_size"], d.axes["intermediate_size"]
    return {
        **moe_routing(d),
        **_blocks(d, "hidden_states", "hidden_states_scale", 1.0),
        **_blocks(d, "gemm1_weights", "gemm1_weights_scale", 1 / math.sqrt(hidden)),
        **_blocks(d, "gemm2_weights", "gemm2_weights_scale", 1 / math.sqrt(inner)),
        "routed_scaling_factor": 2.5,
    }


def _gemm_fp8(d: Draw) -> Inputs:
    """Activations and weights that keep sums normal."""
    scale = 1 / math.sqrt(d.axes["K"])
    return {**_blocks(d, "A", "A_scale", 1.0), **_blocks(d, "B", "B_scale", scale)}


def _logits(d: Draw) -> torch.Tensor:
    """Standard normal in every other row, in those between 4 to 8 times that, by the row.

    A softmax of the first is flat; of the second it is peaked as a language model's: some tokens
    have most of the mass, in a few rows one alone, and the tail is long. Which kind is the first
    depends on the seed. Every 16th row is rounded, so that many tokens are equally probable.
    """
    logits, batch = d.normal("probs"), d.axes["batch_size"]
    scale = d.rng("probs_scale").uniform(4, 8, batch).astype(np.float32)
    scale[(np.arange(batch) + d.seed) % 2 == 0] = 1
    logits *= torch.from_numpy(scale)[:, None]
    logits[RARE // 2 + 2 :: RARE] = logits[RARE // 2 + 2 :: RARE].round()
    return logits


def _sampling(d: Draw) -> Inputs:
    """Flat and peaked rows; every 16th has a k or p that filters nothing or all.

    A few rows of few batches are so special that a single row is never one of them.
    """
    made: Inputs = {"probs": torch.softmax(_logits(d), -1)}
    batch, vocab = d.axes["batch_size"], d.axes["vocab_size"]
    if "top_k" in d.definition.inputs:
        rng = d.rng("top_k")
        k = rng.integers(1, min(100, vocab) + 1, batch)
        rare = slice(RARE // 2, None, RARE)
        k[rare] = rng.choice([-1, 0, 1, vocab, vocab + 1], len(k[rare]))
        made["top_k"] = d.ints("top_k", k)
    if "top_p" in d.definition.inputs:
        rng = d.rng("top_p")
        p = rng.uniform(0.05, 0.98, batch).astype(np.float32)
        rare = slice(RARE // 2 + 1, None, RARE)
        p[rare] = rng.choice([-0.5, 0.0, 1.0, 1.5], len(p[rare]))
        made["top_p"] = torch.from_numpy(p)
    return made


GENERATORS: dict[str, Callable[[Draw], Inputs]] = {
    "gemm": _gemm,
    "gemm_epilogue": _gemm_epilogue,
    "gemm_fp8": _gemm_fp8,
    "rmsnorm": _rmsnorm,
    "gqa_paged": _gqa_paged,
    "gqa_ragged": _gqa_ragged,
    "mla_paged": _mla_paged,
    "dsa_paged": _dsa_paged,
    "gdn": _gdn,
    "moe": _moe,
    "sampling": _sampling,
}


#: by an input that says which work there is: what makes it and those that belong to it
INDICES: dict[str, Callable[[Draw], Inputs]] = {
    "kv_indices": _page_table,
    "kv_indptr": _packed,
    "sparse_indices": _lists,
    "block_table": _block_table,
    "routing_logits": moe_routing,
}


def make_indices(definition: Definition, axes: Mapping[str, int], seed: int) -> Inputs:
    """Of `make_inputs` on the CPU those that say which work there is; empty where axes say it.

    Raises DefinitionError for axes that no valid inputs have.
    """
    bound = definition.bind(axes)
    maker = next((make for name, make in INDICES.items() if name in definition.inputs), None)
    return maker(Draw(definition, bound, seed)) if maker else {}


def make_inputs(
    definition: Definition,
    axes: Mapping[str, int],
    seed: int,
    device: str | torch.device = "cpu",
    scalars: Mapping[str, float] | None = None,
) -> Inputs:
    """The inputs of a definition by name, in its order: tensors on `device`, scalars as numbers.

    `axes` binds the variable axes; `scalars` overrides scalar inputs (a workload's sm_scale).
    Raises DefinitionError for axes that no valid inputs have and for op types without a generator.
    """
    bound = definition.bind(axes)
    if definition.op_type not in GENERATORS:
        known = ", ".join(sorted(GENERATORS))
        raise DefinitionError(
            f"{definition.name}: no input generator for op_type {definition.op_type!r}; "
            f"there are {known}"
        )
    made = GENERATORS[definition.op_type](Draw(definition, bound, seed))
    for name, value in (scalars or {}).items():
        if name not in definition.inputs or definition.inputs[name].shape is not None:
            raise DefinitionError(f"{definition.name}: no scalar input {name!r}")
        made[name] = value
    missing = [name for name in definition.inputs if name not in made]
    if missing:
        raise DefinitionError(
            f"{definition.name}: the {definition.op_type} generator does not make "
            f"{', '.join(missing)}"
        )
    return {
        name: made[name].to(device) if isinstance(made[name], torch.Tensor) else made[name]
        for name in definition.inputs
    }
