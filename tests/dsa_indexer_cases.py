"""Indexer problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels.dsa_indexer import DSA_INDEXER
from ptxflow.compiler.kernels.dsa_indexer.problem import INPUTS, OUTPUTS
from ptxflow.env.space import Space, enumerate_space

H200, B200 = device("h200"), device("b200")


def definition(heads: int = 64, dim: int = 128, page: int = 64, topk: int = 256) -> dict[str, Any]:
    """A definition as the recorded one, of other constants."""
    consts = {
        "num_index_heads": heads,
        "index_head_dim": dim,
        "page_size": page,
        "topk": topk,
        "kv_cache_num_heads": 1,
        "head_dim_with_scale": dim + 4,
    }
    shapes = [shape for _, shape in (*INPUTS.values(), *OUTPUTS.values())]
    axes = {axis: {"type": "var"} for shape in shapes for axis in shape}
    return {
        "name": f"dsa_topk_indexer_fp8_h{heads}_d{dim}_topk{topk}_ps{page}",
        "op_type": "dsa_paged",
        "axes": axes | {name: {"type": "const", "value": n} for name, n in consts.items()},
        "inputs": {n: {"shape": shape, "dtype": dtype} for n, (dtype, shape) in INPUTS.items()},
        "outputs": {n: {"shape": shape, "dtype": dtype} for n, (dtype, shape) in OUTPUTS.items()},
    }


def problem(batch: int = 64, pages: int = 1024, total: int = 0, **constants: int) -> Problem:
    """Rows of `pages` pages; `total` pages in all, or enough for each row to have its own."""
    axes = {"batch_size": batch, "max_num_pages": pages, "num_pages": total or batch * pages}
    return DSA_INDEXER.problem(definition(**constants), axes)


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(DSA_INDEXER, p, dev)


def strategy(**changes: int | str) -> Strategy:
    base: dict[str, int | str] = {
        "span": 256, "tile": 128, "consumers": 1, "stages": 2, "buffers": 1,
        "ctas": 1, "threads": 256, "loads": 1, "bits": 11, "room": 1, "dependent": 0,
    }  # fmt: skip
    return Strategy("dsa_indexer", tuple((base | changes).items()))


BOTH = (H200, B200)
#: what each device has of its own, and every path through the builders
CASES = [
    (H200, "one page a tile", strategy(tile=64, stages=3)),
    (H200, "two warpgroups", strategy(span=512, tile=256, consumers=2, loads=2, room=2)),
    (H200, "one stage, a cluster, early", strategy(span=128, stages=1, ctas=2, dependent=1)),
    (B200, "two buffers", strategy(span=512, buffers=2, stages=3, room=4, bits=10)),
    (B200, "two warpgroups, a cluster", strategy(tile=256, stages=1, consumers=2, ctas=2, bits=12)),
    (B200, "two blocks of a warpgroup, early", strategy(tile=256, stages=1, dependent=1)),
]
#: choices that are sorted, at a topk above those that are ranked
SORTED = [
    (H200, "sorted, all threads of a CTA", strategy(threads=1024)),
    (H200, "sorted, a cluster, early", strategy(ctas=2, room=2, dependent=1)),
    (B200, "sorted", strategy(threads=512, bits=12, loads=2)),
]
SORTED_IDS = [f"{dev.arch}: {name}" for dev, name, _ in SORTED]
IDS = [f"{dev.arch}: {name}" for dev, name, _ in CASES]
