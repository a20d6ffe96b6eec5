"""Latent attention problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Family, Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.mla.problem import CACHES, LAST, QUERIES, SCALE, TABLE
from ptxflow.env.space import Space, enumerate_space

DECODE, PREFILL = family("mla_decode"), family("mla_prefill")
H200, B200 = device("h200"), device("b200")


def definition(
    prefill: bool = False,
    page: int = 1,
    heads: int = 16,
    latent: int = 512,
    rope: int = 64,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """A definition as those that are recorded, of other constants."""
    rows = "total_q" if prefill else "batch_size"
    queries = {
        "q_nope": [rows, "num_qo_heads", "head_dim_ckv"],
        "q_pe": [rows, "num_qo_heads", "head_dim_kpe"],
    }
    last = LAST if page > 1 else {}
    shapes = {**queries, **CACHES, **(QUERIES if prefill else {}), **TABLE, **last, **SCALE}
    kinds = {"sm_scale": "float32", "lse": "float32"}
    kinds |= dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"), "int32")

    def tensors(given: dict[str, Any]) -> dict[str, Any]:
        return {n: {"shape": s, "dtype": kinds.get(n, dtype)} for n, s in given.items()}

    outputs = {
        "output": [rows, "num_qo_heads", "head_dim_ckv"],
        "lse": [rows, "num_qo_heads"],
    }
    consts = {
        "num_qo_heads": heads,
        "head_dim_ckv": latent,
        "head_dim_kpe": rope,
        "page_size": page,
    }
    axes = {axis: {"type": "var"} for shape in shapes.values() for axis in shape or ()}
    return {
        "name": f"mla_h{heads}_ckv{latent}_kpe{rope}_ps{page}",
        "op_type": "mla_paged",
        "axes": axes | {name: {"type": "const", "value": n} for name, n in consts.items()},
        "inputs": tensors(shapes),
        "outputs": tensors(outputs),
    }


def problem(
    prefill: bool = False,
    page: int = 1,
    sequences: int = 16,
    tokens: int = 4096,
    queries: int = 1024,
    **constants: Any,
) -> Problem:
    """Sequences of `tokens` tokens each; `queries` in all, in a prefill."""
    given = definition(prefill, page, **constants)
    pages = sequences * -(-tokens // page)
    axes = {
        "batch_size": sequences,
        "len_indptr": sequences + 1,
        "num_kv_indices": pages,
        "num_pages": pages + 5,
        "total_q": queries,
    }
    family_ = PREFILL if prefill else DECODE
    return family_.problem(given, {n: v for n, v in axes.items() if n in given["axes"]})


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(family(p.family), p, dev)


_TILING: dict[str, int | str] = {
    "tile": 32,
    "warps": 4,
    "stages": 2,
    "scores": "columns",
    "operand": "shared",
}


def decode(**changes: int | str) -> Strategy:
    last = {"dependent": 0, "sum_chunks": 1}
    return Strategy("mla_decode", tuple(({"chunk": 128, **_TILING, **last} | changes).items()))


def prefill(**changes: int | str) -> Strategy:
    first: dict[str, int | str] = {"core": "mma_sync", "queries": 1}
    last: dict[str, int | str] = {"lead": 0, "pieces": 1, "rescale": "always"}
    last |= {"parts": 1, "dependent": 0, "sum_chunks": 1}
    return Strategy("mla_prefill", tuple(({**first, **_TILING, **last} | changes).items()))


def wgmma(**changes: int | str) -> Strategy:
    return prefill(**{"core": "wgmma", "queries": 4, "tile": 64, "warps": 8, **changes})


def family_of(s: Strategy) -> Family:
    return family(s.family)


#: one kernel for every path through the builder
PATHS = {
    "chunks": decode(),
    "chunks, one stage, queries in registers": decode(stages=1, operand="registers"),
    "chunks, eight warps, the second kernel early": decode(
        chunk=256, tile=64, warps=8, stages=2, dependent=1, sum_chunks=4
    ),
    "chunks of one tile": decode(chunk=64, tile=64, stages=1, sum_chunks=2, dependent=1),
    "dims in parts": decode(chunk=192, scores="dims", stages=3, operand="registers"),
    "dims and tokens in parts": decode(chunk=64, tile=64, warps=8, stages=1, scores="dims"),
    "whole sequences": decode(chunk=0, stages=3),
    "whole sequences, eight warps": decode(chunk=0, tile=64, warps=8, operand="registers"),
    "a query": prefill(stages=3),
    "two queries, four groups of warps": prefill(queries=2, warps=8, operand="registers"),
    "three queries": prefill(queries=3, tile=64, warps=8, stages=1),
    "four queries": prefill(queries=4, warps=8),
    "dims and columns in parts": prefill(queries=4, warps=8, scores="dims"),
    "dims in parts, two queries": prefill(
        queries=2, tile=64, warps=8, scores="dims", operand="registers"
    ),
    "two parts": prefill(parts=2, operand="registers"),
    "eight parts of two queries, the second kernel early": prefill(
        queries=2, warps=8, stages=3, parts=8, dependent=1, sum_chunks=4
    ),
    "more parts than tiles": prefill(queries=4, warps=8, stages=1, parts=32, sum_chunks=2),
}
WGMMA = {
    "wgmma, values first": wgmma(),
    "wgmma, short tiles, scores first": wgmma(tile=32, stages=4, lead=3, rescale="lazy"),
    "wgmma, a part of the scores first": wgmma(tile=32, lead=1, pieces=2, rescale="lazy"),
    "wgmma, two parts": wgmma(tile=32, stages=4, lead=2, parts=2, sum_chunks=2),
    "wgmma, eight parts, the second kernel early": wgmma(
        rescale="lazy", pieces=2, parts=8, dependent=1, sum_chunks=8
    ),
}
CASES = [(dev, name, s) for dev in (H200, B200) for name, s in PATHS.items()]
CASES += [(H200, name, s) for name, s in WGMMA.items()]
IDS = [f"{dev.arch}: {name}" for dev, name, _ in CASES]


def problem_of(s: Strategy, page: int = 1) -> Problem:
    return problem(s.family == "mla_prefill", page)
