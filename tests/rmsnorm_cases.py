"""RMSNorm problems and strategies that the tests of the compiler share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space

RMSNORM = family("rmsnorm")
H200, B200 = device("h200"), device("b200")


def definition(hidden: int, residual: bool = False, dtype: str = "bfloat16") -> dict[str, Any]:
    rows = {"shape": ["batch_size", "hidden_size"], "dtype": dtype}
    inputs = {"hidden_states": rows, "weight": {"shape": ["hidden_size"], "dtype": dtype}}
    if residual:
        inputs = {"hidden_states": rows, "residual": rows, "weight": inputs["weight"]}
    return {
        "name": f"{'fused_add_' * residual}rmsnorm_h{hidden}",
        "axes": {"batch_size": {"type": "var"}, "hidden_size": {"type": "const", "value": hidden}},
        "inputs": inputs,
        "outputs": {"output": rows},
        "reference": "def run(x):\n    EPS = 1e-5\n",
    }


def problem(
    hidden: int = 4096, batch: int = 4096, residual: bool = False, dtype: str = "bfloat16"
) -> Problem:
    return RMSNORM.problem(definition(hidden, residual, dtype), {"batch_size": batch})


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(RMSNORM, p, dev)


_BASE: dict[str, int | str] = {
    "ctas_per_row": 1, "row_threads": 64, "rows": 2, "vector": 8, "rows_in_flight": 1,
    "residency": "registers", "unroll": 1, "ctas_per_sm": 0, "load_ahead": 0, "barrier": "cta",
    "weights": "late", "load_cache": "default",
    "load_prefetch": 0,
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("rmsnorm", tuple({**_BASE, **changes}.items()))


#: one kernel for every path through the builder; with the hidden size that it is for
PATHS = {
    "warps share a row": (512, strategy()),
    "a warp holds a row": (256, strategy(row_threads=32, rows=4, weights="early")),
    "a warp holds several rows": (64, strategy(row_threads=8, rows=16)),
    "all lanes of a CTA, in a loop": (8192, strategy(row_threads=1024, rows=1, ctas_per_sm=1)),
    "rows in flight, in a loop": (
        512, strategy(rows_in_flight=4, ctas_per_sm=2, weights="kept")
    ),
    "rows are asked for ahead": (512, strategy(ctas_per_sm=2, load_ahead=1, weights="early")),
    "rows meet on their own": (512, strategy(rows=4, barrier="row")),
    "ahead, on their own, with a tail": (
        520, strategy(rows=4, rows_in_flight=2, ctas_per_sm=2, load_ahead=1, barrier="row")
    ),
    "the last vector has a tail": (520, strategy(vector=4)),
    "sums in quads, in flight": (2048, strategy(row_threads=256, rows_in_flight=2)),
    "three warps share a row, and three rows a CTA": (
        1536, strategy(row_threads=96, rows=3, rows_in_flight=3)
    ),
    "fourteen warps share a row": (7168, strategy(row_threads=448, rows=1)),
    "seven quads of warps share a row": (7168, strategy(row_threads=896, rows=1, ctas_per_sm=1)),
    "two CTAs share a row": (4096, strategy(ctas_per_row=2, row_threads=128, rows=1)),
    "eight CTAs share rows in flight, with a tail": (
        9000, strategy(ctas_per_row=8, row_threads=128, rows_in_flight=2)
    ),
    "four CTAs read a row again": (
        8000, strategy(ctas_per_row=4, row_threads=384, rows=1, residency="reread", unroll=2)
    ),
    "read again": (
        1024,
        strategy(residency="reread", unroll=2, load_cache="evict_first", load_prefetch=256),
    ),
    "read again, in a loop, with a tail": (
        1000, strategy(residency="reread", vector=4, unroll=4, ctas_per_sm=4)
    ),
}  # fmt: skip
CASES = [
    (dev, name, hidden, residual, s)
    for dev in (H200, B200)
    for name, (hidden, s) in PATHS.items()
    for residual in (False, True)
]
IDS = [f"{dev.arch}: {name}{', residual' * residual}" for dev, name, _, residual, _ in CASES]
