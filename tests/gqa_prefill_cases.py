"""gqa_prefill problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.gqa_prefill.problem import INTEGERS, OUTPUTS, PAGED, RAGGED
from ptxflow.env.space import Space, enumerate_space

PREFILL = family("gqa_prefill")
H200, B200 = device("h200"), device("b200")


def definition(
    page: int = 0, heads: int = 32, kv_heads: int = 8, dim: int = 128, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Over packed keys, or over pages of so many tokens."""

    def tensor(name: str, shape: list[str] | None) -> dict[str, Any]:
        wide = "float32" if name in ("sm_scale", "lse") else dtype
        return {"shape": shape, "dtype": "int32" if name in INTEGERS else wide}

    shapes = {n: s for n, s in PAGED.items() if page != 1 or n != "kv_last_page_len"}
    inputs = shapes if page else RAGGED
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    if page:
        sizes["page_size"] = page
    names = {axis for shape in (*inputs.values(), *OUTPUTS.values()) for axis in shape or ()}
    constants = {n: {"type": "const", "value": v} for n, v in sizes.items()}
    return {
        "name": f"gqa_prefill_h{heads}_kv{kv_heads}_d{dim}_ps{page}",
        "op_type": "gqa_paged" if page else "gqa_ragged",
        "axes": {n: constants.get(n, {"type": "var"}) for n in sorted(names)},
        "inputs": {n: tensor(n, s) for n, s in inputs.items()},
        "outputs": {n: tensor(n, s) for n, s in OUTPUTS.items()},
    }


def axes(
    given: dict[str, Any], sequences: int = 4, queries: int = 4096, keys: int = 4096
) -> dict[str, int]:
    """Variable axes of a definition."""
    page = given["axes"].get("page_size", {"value": 1})["value"]
    pages = -(-keys // page)
    values = {
        "len_indptr": sequences + 1,
        "batch_size": sequences,
        "total_q": queries,
        "total_kv": keys,
        "num_kv_indices": pages,
        "num_pages": pages + 8,
    }
    return {n: v for n, v in values.items() if n in given["axes"]}


def problem(
    page: int = 0,
    sequences: int = 4,
    queries: int = 4096,
    keys: int = 4096,
    **sizes: Any,
) -> Problem:
    given = definition(page, **sizes)
    return PREFILL.problem(given, axes(given, sequences, queries, keys))


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(PREFILL, p, dev)


_BASE: dict[str, int | str] = {
    "consumers": 2, "share": 1, "tile_kv": 64, "stages": 2, "overlap": 1, "pin": 0, "turns": 0,
    "order": "heads", "rescale": "always",
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("gqa_prefill", tuple({**_BASE, **changes}.items()))


#: a page size (0: packed keys) and a kernel for every path through the builder
PATHS = {
    "packed keys": (0, strategy()),
    "steps in order": (0, strategy(overlap=0, order="tiles", stages=1)),
    "turns of two, pinned": (0, strategy(turns=1, pin=1)),
    "turns of three": (0, strategy(consumers=3, turns=1, tile_kv=32, stages=3)),
    "one warpgroup, all heads of a group": (0, strategy(consumers=1, share=4, stages=3)),
    "tiles of 176 keys": (0, strategy(tile_kv=176, stages=1, pin=1)),
    "pages of half a tile": (64, strategy(tile_kv=128, share=2)),
    "pages of two tiles": (64, strategy(tile_kv=32, stages=3)),
    "small pages": (8, strategy(tile_kv=32, consumers=1)),
    "scattered tokens": (1, strategy(share=4)),
    "scattered tokens, steps in order": (1, strategy(share=2, overlap=0)),
    "scattered tokens, more of them than lanes": (1, strategy(tile_kv=160, turns=1)),
    "pages that are no part of a tile": (5, strategy(tile_kv=32, stages=4, order="tiles")),
}
IDS = list(PATHS)
#: the same for tcgen05
TMEM_PATHS = {
    "one tile of rows, in turn": (0, strategy(consumers=1, overlap=0, stages=1)),
    "one tile, scores ahead": (0, strategy(consumers=1, stages=3, order="tiles")),
    "two tiles, in turn, lazy": (0, strategy(overlap=0, tile_kv=128, rescale="lazy")),
    "two tiles, scores ahead, lazy": (0, strategy(rescale="lazy", share=2)),
    "pages of half a tile": (64, strategy(tile_kv=128, consumers=1, share=4, rescale="lazy")),
    "pages of two tiles": (64, strategy(tile_kv=32, stages=4)),
    "gathered tokens": (1, strategy(tile_kv=96, consumers=1, rescale="lazy")),
    "gathered parts of pages": (5, strategy(tile_kv=128, overlap=0, stages=1, share=4)),
}
TMEM_IDS = list(TMEM_PATHS)
TMEM_CASES = list(TMEM_PATHS.values())
CASES = list(PATHS.values())
