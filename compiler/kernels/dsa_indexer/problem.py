"""Problems of the sparse-attention indexer: the best tokens of each sequence, by float8 keys.

A page of the cache is all its keys, a row of float8 values each, then a float32 scale for each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ptxflow.compiler.atoms.indexing import POSITION_BITS
from ptxflow.compiler.family import Problem, bind_axis

FAMILY = "dsa_indexer"
INPUTS: dict[str, tuple[str, list[str]]] = {
    "q_index_fp8": ("float8_e4m3fn", ["batch_size", "num_index_heads", "index_head_dim"]),
    "k_index_cache_fp8": (
        "int8",
        ["num_pages", "page_size", "kv_cache_num_heads", "head_dim_with_scale"],
    ),
    "weights": ("float32", ["batch_size", "num_index_heads"]),
    "seq_lens": ("int32", ["batch_size"]),
    "block_table": ("int32", ["batch_size", "max_num_pages"]),
}
OUTPUTS = {"topk_indices": ("int32", ["batch_size", "topk"])}
SCALE = 4  # bytes of a key's scale, and of a score
HEADS, MAX_HEADS = 16, 64  # what they are a multiple of, and the most
DIMS, PAGES = (64, 128), (32, 64, 128)
MAX_TOPK = 2048
MAX_BYTES = 2**35  # of the cache: kernels count it by 16 bytes in 31 bits
MAX_SCORES = 2**32 - 1  # kernels count them in 32 bits


def accepts(inputs: Collection[str]) -> bool:
    """Whether a definition of sparse attention asks for indices."""
    return "k_index_cache_fp8" in inputs


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and for shapes that no kernel takes. Work is
    that of sequences that fill their rows of the page table, or share all pages that there are: how
    long each is, only the device knows. FLOPs are 2 for each product of a head and a key.
    """
    name = str(definition.get("name", FAMILY))
    _tensors(name, definition)
    names = dict.fromkeys(axis for _, shape in (*INPUTS.values(), *OUTPUTS.values())
                          for axis in shape)  # fmt: skip
    bound = {axis: bind_axis(name, axis, definition["axes"], axes) for axis in names}
    _refuse(name, bound)
    batch, heads, dim = (bound[a] for a in ("batch_size", "num_index_heads", "index_head_dim"))
    keys = tokens(bound)
    queries = batch * heads * (dim + SCALE)
    tables = 4 * (batch + keys // bound["page_size"] + batch * bound["topk"])
    return Problem(
        family=FAMILY,
        definition=name,
        axes=tuple(bound.items()),
        dtype="float8_e4m3fn",
        flops=2.0 * heads * dim * keys,
        bytes=float(keys * (dim + SCALE) + queries + tables),
    )


def tokens(axes: Mapping[str, int]) -> int:
    """Tokens of all sequences, at the most that there are pages for."""
    pages = min(axes["num_pages"], axes["batch_size"] * axes["max_num_pages"])
    return pages * axes["page_size"]


def page_bytes(axes: Mapping[str, int] | Problem) -> int:
    return axes["page_size"] * (axes["index_head_dim"] + SCALE)


def _tensors(name: str, definition: Mapping[str, Any]) -> None:
    for section, expected in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        given: Mapping[str, Any] = definition.get(section) or {}
        found = {n: (str(spec["dtype"]), spec["shape"]) for n, spec in given.items()}
        if found != expected:
            raise ValueError(f"{name}: an indexer has the {section} {expected}, not {found}")


def _refuse(name: str, bound: Mapping[str, int]) -> None:
    """Raise ValueError for axes that the mathematics or the kernels do not take."""
    heads, dim, page, topk = (
        bound[a] for a in ("num_index_heads", "index_head_dim", "page_size", "topk")
    )
    if heads % HEADS or heads > MAX_HEADS:
        raise ValueError(
            f"{name}: {heads} heads must be a multiple of {HEADS}, {MAX_HEADS} at most"
        )
    if dim not in DIMS or page not in PAGES:
        raise ValueError(
            f"{name}: index_head_dim = {dim} must be one of {DIMS}, page_size = {page} of {PAGES}"
        )
    if bound["head_dim_with_scale"] != dim + SCALE or bound["kv_cache_num_heads"] != 1:
        raise ValueError(
            f"{name}: a token of the cache has one key of {dim} + {SCALE} bytes, not "
            f"{bound['kv_cache_num_heads']} of {bound['head_dim_with_scale']}"
        )
    if topk % 32 or topk > MAX_TOPK:
        raise ValueError(f"{name}: topk = {topk} must be a multiple of 32, {MAX_TOPK} at most")
    row = bound["max_num_pages"] * page
    if row > 1 << POSITION_BITS:
        raise ValueError(f"{name}: a sequence has more than {1 << POSITION_BITS} tokens: {row}")
    if bound["batch_size"] * row > MAX_SCORES or bound["batch_size"] * topk > MAX_SCORES:
        raise ValueError(f"{name}: there are more than {MAX_SCORES} scores")
    if bound["num_pages"] * page_bytes(bound) >= MAX_BYTES:
        raise ValueError(f"{name}: the cache has more than {MAX_BYTES} bytes")
