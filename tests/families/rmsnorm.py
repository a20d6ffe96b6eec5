"""RMSNorm, with and without a residual."""

import re
from typing import Any

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.rmsnorm.decisions import registers, threads
from ptxflow.compiler.kernels.rmsnorm.problem import MAX_HIDDEN
from tests.given import B200, BOTH, H200, Json, altering, crossed, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Run, Same, Sampled, Size

RMSNORM = family("rmsnorm")
strategy = strategies(
    RMSNORM, ctas_per_row=1, row_threads=64, rows=2, vector=8, rows_in_flight=1,
    residency="registers", unroll=1, ctas_per_sm=0, load_ahead=0, barrier="cta", weights="late",
    load_cache="default", load_prefetch=0,
)  # fmt: skip


def definition(hidden: int, residual: bool = False, dtype: str = "bfloat16") -> Json:
    return resized(f"{'fused_add_' * residual}rmsnorm_h4096", dtype, hidden_size=hidden)


def problem(
    hidden: int = 4096, batch: int = 4096, residual: bool = False, dtype: str = "bfloat16"
) -> Problem:
    return RMSNORM.problem(definition(hidden, residual, dtype), {"batch_size": batch})


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
_ALL = [(n, hidden, r, s) for n, (hidden, s) in PATHS.items() for r in (False, True)]
_LONG = (  # of many threads: minutes, and the same statements as others
    "all lanes of a CTA, in a loop", "rows in flight, in a loop",
    "ahead, on their own, with a tail", "sums in quads, in flight",
    "three warps share a row, and three rows a CTA", "fourteen warps share a row",
    "seven quads of warps share a row", "eight CTAs share rows in flight, with a tail",
    "four CTAs read a row again", "read again, in a loop, with a tail",
)  # fmt: skip
_ONE = {"batch_size": 1}
_bad = altering(definition(4096), _ONE)


def _meetings(s: Strategy) -> int:
    """Ordering statements: a barrier where warps add up, and what CTAs of a row wait for."""
    if s.ctas_per_row > 1:
        return 4  # arrive and wait for the parts, and before a CTA leaves
    return (s.rows if s.barrier == "row" else 1) * (s.row_threads > 32)


def _whole(f: Fields, p: Problem, dev: Device) -> Any:
    """A CTA has whole warps, a row whole vectors, an SM the registers."""
    n = threads(f)
    fits = (n % 32 == 0) & (n <= 1024) & (registers(f, p) * n <= dev.registers_per_sm)
    return fits & (p["hidden_size"] % f.vector == 0)


def _refused(sentence: str, hidden: int = 4096, batch: int = 4096, **changes: int | str) -> Refused:
    return Refused(problem(hidden, batch), strategy(**changes), sentence)


ROW = Row(
    RMSNORM,
    cases=tuple(
        Case(n + ", residual" * r, d, s, problem(hidden, 4096, r),
             problem(hidden, 2048, r, "bfloat16" if r else "float16"))
        for d in BOTH for n, hidden, r, s in _ALL
    ),
    # a path with a residual, the next without
    quick={"emulator": [f"sm_90a: {n}{', residual' * r}" for i, (n, _, r, _) in enumerate(_ALL)
                        if r == (i // 2 % 2 == 1 and n not in (*_LONG[2:8:5], _LONG[8]))]},
    forced=True,
    sizes=(
        *(Size(problem(h, b, r), least)
          for h, least in ((128, 1000), (512, 3000), (1536, 5000), (4096, 5000), (7168, 5000))
          for b in (128, 4096) for r in (False, True)),
        *(Size(problem(h, b, r), devices=(H200,), holds=_whole, slow=slow)
          for h, b, r, slow in crossed((4, 8, 16, 24, 56, 120, 1000, 1544, 5000, 10280, 65544),
                                       (1, 3, 1000, 16384), (False, True))),
        *(Size(problem(h, b)) for h, b in ((128, 1), (4096, 1), (7168, 16384), (MAX_HIDDEN, 1))),
    ),
    refused=(
        _refused("a CTA has 32 to 1024 threads", row_threads=16, rows=1),
        _refused("in whole warps", row_threads=16, rows=3),
        _refused("the hidden size is a multiple of the vector", 4092),
        _refused("half as many threads would cover the row", row_threads=1024, rows=1),
        _refused("a thread takes at most 256 elements of a row", row_threads=4, rows=8),
        _refused("half as many rows would hold the batch", 4096, 2, rows=8),
        _refused("a row that stays in registers is loaded whole", unroll=2),
        _refused("rows are asked for ahead where a CTA has many", load_ahead=1),
        _refused("a barrier of a row is for several rows", barrier="row", rows=1),
        _refused("and there are 15", 256, barrier="row", rows=16),
        _refused("weights are kept where rows are, and a CTA has many", weights="kept"),
        _refused("rows and weights exceed the registers of a thread", rows_in_flight=4),
        _refused("needs more of them than the first", 512, 64, ctas_per_sm=8),
        _refused("CTAs that share a row have four warps of it each", 4096, 7, ctas_per_row=2),
        _refused("are too few for the SMs", ctas_per_row=2, row_threads=128),
        _refused("strides over the rows shares none", 4096, 7, ctas_per_row=2, ctas_per_sm=1),
        _refused("how caches keep a row matters", load_cache="no_allocate"),
    ),
    bad=(
        Bad(definition(4096), {}, "axis batch_size is not given"),
        Bad(definition(4096), {"batch_size": 0}, "positive integer, not 0"),
        Bad(definition(4096), {"batch_size": True}, "positive integer"),
        Bad(definition(4096), _ONE | {"hidden_size": 8}, "is 4096 by definition, not 8"),
        Bad(definition(4096), {"batch_size": 2**20}, "at most 4294967295 are counted"),
        Bad(definition(4098), _ONE, "must be a multiple of 4"),
        Bad(definition(MAX_HIDDEN + 4), _ONE, "at most 262144"),
        Bad(definition(4096, dtype="float32"), _ONE, "must share one dtype"),
        _bad("inputs.weight.dtype", "float16", "must share one dtype"),
        _bad("inputs.weight.shape", ["batch_size"], "has the inputs"),
        _bad("outputs", {}, "has the outputs"),
        _bad("reference", "", "does not say what EPS is"),
        _bad("reference", "def", "is not Python"),
        _bad("reference", "EPS = 0.0", "not a positive float32"),
    ),
    # on sm_100a the statements are the same
    ordered=tuple(
        Ordered(f"sm_90a: {n}{', residual' * r}", problem(hidden, 4096, r), s,
                least=_meetings(s), kept=149, slow=n in _LONG)
        for n, hidden, r, s in _ALL
    ),
    planted=(
        Planted(
            "512", problem(512, 2048), strategy(), trial=True,
            faults={
                "eps": ("0f3727C5AC", "0f358637BD"),  # 1e-6 for 1e-5
                "another lane": (re.compile(r"(bfly.b32 %t\d+_0, %t\d+_0), 16"), r"\1, 8"),
                "halves swapped": (
                    re.compile(r"(x2.f32 %t\d+_0), (%t\d+_1), (%t\d+_0)"), r"\1, \3, \2",
                ),
                "one of 512 elements more or less": ("0f3B000000", "0f3B010000"),
            },
        ),
    ),
    sampled=tuple(
        Sampled(f"{d.arch}, {h}{', residual' * r}", problem(h, b, r), d, h, 2, seeds=(0, 1),
                slow=h not in (56, 128) or r == (d is H200))
        for h in (128, 512, 1536, 2048, 4096, 7168, 56, 5000) for r in (False, True)
        for d, b in ((H200, 3000), (B200, 5))
    ),
    runs=tuple(
        Run(f"batch {n}", problem(64, n), strategy(row_threads=8, rows=8))
        for n in (1, 2, 3, 7, 8, 9, 16)
    ),
    same=(
        Same(strategy(row_threads=8, rows=8),
             tuple(problem(64, n) for n in (1, 2, 3, 7, 8, 9, 16, 4096))),
    ),
)  # fmt: skip
