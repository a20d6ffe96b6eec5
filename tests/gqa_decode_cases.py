"""gqa_decode problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space

DECODE = family("gqa_decode")
H200, B200 = device("h200"), device("b200")


def definition(
    page_size: int = 1, group: int = 4, key_heads: int = 8, size: int = 128, dtype: str = "bfloat16"
) -> dict[str, Any]:
    def tensor(kind: str, *shape: str) -> dict[str, Any]:
        return {"shape": list(shape), "dtype": kind}

    sizes = {"num_qo_heads": group * key_heads, "num_kv_heads": key_heads, "head_dim": size}
    cache = tensor(dtype, "num_pages", "page_size", "num_kv_heads", "head_dim")
    query = tensor(dtype, "batch_size", "num_qo_heads", "head_dim")
    last = {"kv_last_page_len": tensor("int32", "batch_size")} if page_size > 1 else {}
    return {
        "name": f"gqa_paged_decode_h{group * key_heads}_kv{key_heads}_d{size}_ps{page_size}",
        "op_type": "gqa_paged",
        "axes": {a: {"type": "var"} for a in ("batch_size", "num_pages", "len_indptr")}
        | {"num_kv_indices": {"type": "var"}}
        | {n: {"type": "const", "value": v} for n, v in (sizes | {"page_size": page_size}).items()},
        "inputs": {
            "q": query,
            "k_cache": cache,
            "v_cache": cache,
            "kv_indptr": tensor("int32", "len_indptr"),
            "kv_indices": tensor("int32", "num_kv_indices"),
            **last,
            "sm_scale": {"shape": None, "dtype": "float32"},
        },
        "outputs": {"output": query, "lse": tensor("float32", "batch_size", "num_qo_heads")},
    }


def axes(batch: int, pages: int) -> dict[str, int]:
    """The variable axes of sequences that have so many pages together."""
    return {
        "batch_size": batch,
        "len_indptr": batch + 1,
        "num_kv_indices": pages,
        "num_pages": pages + 3,
    }


def problem(batch: int = 16, tokens: int = 1024, page_size: int = 1, **shape: Any) -> Problem:
    """Sequences of `tokens` tokens each."""
    pages = batch * -(-tokens // page_size)
    return DECODE.problem(definition(page_size, **shape), axes(batch, pages))


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(DECODE, p, dev)


_BASE: dict[str, int | str] = {
    "mma": "sync", "gather": "cp_async", "warps": 2, "tile": 16, "tiles": 4, "heads": 1,
    "stages": 2, "arrival": "together",
    "order": "heads", "dependent": 1, "sum_warps": 2, "sum_chunks": 2, "sum_split": 0,
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("gqa_decode", tuple({**_BASE, **changes}.items()))


#: one program for every path through the builders
PATHS = {
    "a ring of two": strategy(),
    "a warp alone, values later": strategy(warps=1, arrival="apart", stages=1),
    "one tile": strategy(tiles=1, stages=1, dependent=0),
    "the ring is filled once": strategy(tiles=2, arrival="apart", order="places"),
    "many warps, two key heads": strategy(warps=8, heads=2, stages=1, sum_warps=1),
    "chunks are shared": strategy(sum_split=1, sum_warps=4, sum_chunks=4, dependent=0),
    "wide tiles, long chunks": strategy(tile=64, tiles=64, stages=1, sum_warps=8, sum_chunks=8),
}
_WARPGROUP: dict[str, int | str] = {"mma": "async", "warps": 4, "tile": 64}
#: those of a warpgroup, with tokens of a page
GROUP_PATHS = {
    "copied rows": (1, strategy(**_WARPGROUP)),
    "copied rows, values later": (4, strategy(**_WARPGROUP, stages=3, arrival="apart", tiles=8)),
    "one tile": (16, strategy(**_WARPGROUP, tiles=1, stages=1, dependent=0)),
    "wide tiles, two key heads": (1, strategy(**(_WARPGROUP | {"tile": 128}), tiles=2, heads=2)),
    "pages in boxes": (16, strategy(**_WARPGROUP, gather="tma", order="places")),
    "parts of pages, values later": (
        256,
        strategy(**_WARPGROUP, gather="tma", arrival="apart", stages=6, tiles=8),
    ),
}
#: rows that TMA gathers, on sm_100a
GATHERED = {
    "gathered rows": (1, strategy(**_WARPGROUP, gather="tma")),
    "gathered rows, values later": (
        4,
        strategy(**(_WARPGROUP | {"tile": 128}), gather="tma", arrival="apart", tiles=2),
    ),
}
GROUP_CASES = [
    *((dev, page, s) for dev in (H200, B200) for page, s in GROUP_PATHS.values()),
    *((B200, page, s) for page, s in GATHERED.values()),
]
GROUP_IDS = [
    *(f"{dev.arch}: {name}" for dev in (H200, B200) for name in GROUP_PATHS),
    *(f"sm_100a: {name}" for name in GATHERED),
]
CASES = [(dev, name, s) for dev in (H200, B200) for name, s in PATHS.items()]
IDS = [f"{dev.arch}: {name}" for dev, name, _ in CASES]
