"""Sparse latent attention problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.dsa_sparse.problem import INPUTS, OTHERS, OUTPUTS
from ptxflow.env.space import Space, enumerate_space

SPARSE = family("dsa_sparse")
H200, B200 = device("h200"), device("b200")


def definition(
    page: int = 1,
    topk: int = 256,
    heads: int = 16,
    latent: int = 512,
    rope: int = 64,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """A definition as those that are recorded, of other constants."""
    consts = {
        "num_qo_heads": heads,
        "head_dim_ckv": latent,
        "head_dim_kpe": rope,
        "page_size": page,
        "topk": topk,
    }

    def tensors(given: dict[str, Any]) -> dict[str, Any]:
        return {n: {"shape": s, "dtype": OTHERS.get(n, dtype)} for n, s in given.items()}

    axes = {axis: {"type": "var"} for shape in INPUTS.values() for axis in shape or ()}
    return {
        "name": f"dsa_h{heads}_ckv{latent}_kpe{rope}_topk{topk}_ps{page}",
        "op_type": "dsa_paged",
        "axes": axes | {name: {"type": "const", "value": n} for name, n in consts.items()},
        "inputs": tensors(INPUTS),
        "outputs": tensors(OUTPUTS),
    }


def problem(page: int = 1, tokens: int = 64, pages: int = 8462, **constants: Any) -> Problem:
    return SPARSE.problem(definition(page, **constants), {"num_tokens": tokens, "num_pages": pages})


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(SPARSE, p, dev)


def strategy(**changes: int | str) -> Strategy:
    usual: dict[str, int | str] = {
        "chunk": 64,
        "tile": 32,
        "warps": 4,
        "stages": 2,
        "scores": "columns",
        "operand": "shared",
        "prefetch": 0,
        "dependent": 0,
        "sum_chunks": 1,
    }
    return Strategy("dsa_sparse", tuple((usual | changes).items()))


#: one kernel for every path through the builder, and the entries of a list
PATHS = {
    "chunks": (strategy(), 256),
    "chunks, the last one short": (strategy(chunk=96, stages=3, dependent=1, sum_chunks=2), 250),
    "chunks, eight warps": (
        strategy(chunk=128, tile=64, warps=8, stages=1, dependent=1, prefetch=256),
        256,
    ),
    "chunks, dims in parts": (
        strategy(chunk=128, scores="dims", operand="registers", stages=4, sum_chunks=2),
        250,
    ),
    "whole lists": (strategy(chunk=0, stages=5), 256),
    "whole lists, eight warps": (
        strategy(chunk=0, tile=64, warps=8, scores="dims", operand="registers", prefetch=128),
        250,
    ),
}
CASES = [(dev, name, s, topk) for dev in (H200, B200) for name, (s, topk) in PATHS.items()]
IDS = [f"{dev.arch}: {name}" for dev, name, _, _ in CASES]
