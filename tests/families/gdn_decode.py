"""gdn_decode: one step of a gated delta net."""

import re
from typing import Any

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.gdn_decode.decisions import step_rows
from tests.given import B200, BOTH, H200, Json, altering, crossed, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Reference, Refused, Row, Run, Same, Sampled, Size

GDN = family("gdn_decode")
NAME = "gdn_decode_qk16_v32_d128_k_last"
strategy = strategies(
    GDN, row_threads=8, vector=4, rows_in_flight=2, warps=4, head_ctas=4, ctas_per_sm=0,
    path="registers", stages=1, reduction="together",
)  # fmt: skip


def definition(
    size: int = 128, queries: int = 16, values: int = 32, dtype: str = "bfloat16"
) -> Json:
    heads = {"num_q_heads": queries, "num_k_heads": queries, "num_v_heads": values}
    return resized(NAME, dtype, head_size=size, **heads)


def problem(
    batch: int = 64, size: int = 128, queries: int = 16, values: int = 32, dtype: str = "bfloat16"
) -> Problem:
    return GDN.problem(definition(size, queries, values, dtype), {"batch_size": batch})


_LOADED: dict[str, int | str] = {"path": "bulk_load", "head_ctas": 1}
_BOTH: dict[str, Any] = {"path": "bulk", "head_ctas": 1}
#: one kernel for every path through the builder
PATHS = {
    "one step": strategy(),
    "one row a lane, narrow vectors": strategy(
        rows_in_flight=1, vector=2, warps=8, reduction="apart"
    ),
    "several steps": strategy(row_threads=16, head_ctas=2, warps=2, rows_in_flight=4),
    "eight rows a lane": strategy(row_threads=32, head_ctas=1, rows_in_flight=8),
    "a CTA strides over parts of heads": strategy(ctas_per_sm=2, head_ctas=2, reduction="apart"),
    "loaded in bulk, once": strategy(path="bulk_load"),
    "loaded in bulk, through a ring": strategy(**_LOADED, stages=2),
    "loaded in bulk, the ring is filled once": strategy(**_LOADED, stages=4, rows_in_flight=2),
    "loaded in bulk, a CTA strides": strategy(
        **_LOADED, stages=3, ctas_per_sm=1, row_threads=32, rows_in_flight=4
    ),
    "both ways in bulk, once": strategy(path="bulk"),
    "both ways in bulk, one stage": strategy(**_BOTH, warps=2, rows_in_flight=1),
    "both ways in bulk, through a ring": strategy(**_BOTH, stages=3, reduction="apart"),
    "both ways in bulk, the ring is filled once": strategy(**_BOTH, stages=4),
    "both ways in bulk, a CTA strides": strategy(
        **_BOTH, stages=2, ctas_per_sm=1, row_threads=16, warps=2
    ),
}
_QUICK = (
    "sm_90a: one step", "sm_90a: several steps", "sm_90a: a CTA strides over parts of heads",
    "sm_90a: loaded in bulk, through a ring", "sm_90a: both ways in bulk, one stage",
)  # fmt: skip
_ONE = {"batch_size": 1}
_bad = altering(definition(), _ONE)


def _refused(sentence: str, size: int = 128, **changes: Any) -> Refused:
    return Refused(problem(64, size), strategy(**changes), sentence)


def _paths(f: Fields, p: Problem, dev: Device) -> Any:
    return [(f.path == path).sum() >= 1000 for path in ("registers", "bulk_load", "bulk")]


def _whole(f: Fields, p: Problem, dev: Device) -> Any:
    """Lanes and CTAs have whole vectors and steps."""
    size = p["head_size"]
    return (size % (f.head_ctas * step_rows(f)) == 0) & (size % (f.row_threads * f.vector) == 0)


def _runs() -> tuple[Run, ...]:
    given = ((False, None), (False, 0.0), (True, None), (True, -0.0), (True, 2.5))
    out = []
    for name, s in PATHS.items():
        if name in list(PATHS)[1:2] + list(PATHS)[3:5]:
            continue
        small = GDN.trial(problem(), s, H200)
        for state, scale in given if name == "one step" else given[:2]:
            out.append(
                Run(
                    f"{name}, {'with' if state else 'without'} a state, scale {scale}",
                    small.problem,
                    s,
                    {"given": state, "scale": scale},
                    blocks=small.blocks,
                    slow=name != "one step" or (scale != 2.5 and state),
                )
            )
    s = strategy(head_ctas=1, warps=1, path="bulk", stages=2)
    return (*out, *(Run(f"batch {n}", problem(n, 32, 1, 2), s) for n in (1, 2, 5)))


ROW = Row(
    GDN,
    cases=tuple(Case(n, d, s, problem(), problem()) for d in BOTH for n, s in PATHS.items()),
    quick={"emulator": _QUICK},
    forced=True,
    sizes=(
        *(Size(problem(n), 5000, near=0.1 if n < 64 else 0.6, spread=0.7, holds=_paths)
          for n in (8, 16, 64)),
        Size(problem(1), near=0.09, spread=0.7),
        *(Size(problem(n, size, *heads), devices=(H200,), holds=_whole, slow=slow)
          for size, n, heads, slow in crossed(
              (8, 16, 24, 40, 64, 120, 128, 136, 160, 256, 272, 320, 512), (1, 7, 1000),
              ((1, 1), (2, 6), (16, 32)))),
    ),
    refused=(
        _refused("lanes take whole vectors of a row", 64, row_threads=32),
        _refused("a lane holds at most 64 elements of a row", 512, row_threads=4),
        _refused("the rows of a step divide those of a head", warps=16, rows_in_flight=4),
        _refused("the CTAs of a head have as many steps each", head_ctas=16),
        _refused("bulk copies leave 16 bytes to a lane", path="bulk", vector=2),
        _refused("a ring is for bulk copies", stages=2),
        _refused("no more stages than its warp has steps", path="bulk", stages=2),
        _refused("are for heads that wider ones do not divide", row_threads=4),
        _refused("are for heads that wider ones do not divide", vector=2),
        _refused("exceed the registers of a thread", row_threads=4, rows_in_flight=8),
        _refused("the rings exceed the shared memory of a CTA", warps=16, rows_in_flight=8,
                 stages=2, **_BOTH),
        _refused("are all resident", ctas_per_sm=8, row_threads=8, warps=8),
        Refused(problem(1), strategy(ctas_per_sm=1), "needs more of them than the first"),
    ),
    bad=(
        Bad(definition(), {}, "axis batch_size is not given"),
        Bad(definition(), {"batch_size": 0}, "positive integer, not 0"),
        Bad(definition(), _ONE | {"head_size": 64}, "head_size is 128 by definition"),
        Bad(definition(), {"batch_size": 2**15}, "17179869184 elements, of at most 2\\^34 - 4"),
        Bad(definition(132), _ONE, "head_size = 132 must be a multiple of 8"),
        Bad(definition(544), _ONE, "at most 512"),
        Bad(definition(168), _ONE, "above 160 of 16"),
        Bad(definition(336), _ONE, "above 320 of 32"),
        Bad(definition(values=24), _ONE, "must divide the value heads"),
        Bad(definition(dtype="float32"), _ONE, "must share one dtype"),
        Bad(resized("gdn_prefill_qk16_v32_d128_k_last"), {}, "a gdn decode has the inputs"),
        _bad("inputs.state.dtype", "bfloat16", "state must be float32"),
        _bad("inputs.a.dtype", "float16", "must share one dtype"),
        _bad("axes.seq_len.value", 2, "seq_len = 1, not 2"),
        _bad("axes.num_k_heads.value", 8, "as many query as key heads"),
        _bad("inputs.v.shape", ["batch_size"], "has the inputs"),
        _bad("outputs", {}, "has the outputs"),
    ),
    ordered=tuple(
        Ordered(f"{d.arch}: {n}", problem(), s, d, least=4 * (s.path != "registers"),
                kept=30 * (d is H200), slow=d is B200 or f"{d.arch}: {n}" not in _QUICK)
        for d in BOTH for n, s in PATHS.items()
    ),
    planted=(
        Planted(
            "decode", problem(), strategy(), given={"scale": None}, trial=True,
            faults={
                "the usual scale": ("0f3DB504F3", "0f3DB60000"),
                "a term of the series": ("0f3EAF1F5E", "0f3EA00000"),
                "the other half of a row": (re.compile(r"(bfly\S+ \S+ \S+) 4, 31"), r"\1 8, 31"),
                "the sign of the change": ("0fBF800000", "0f3F800000"),
                "decay in base 2": (
                    re.compile(r"0fBFB8AA3B(?=[\s\S]*0fBFB8AA3B)"), "0fBF800000"
                ),
                "the values of other rows": (re.compile(r"(%v0,) 16;"), r"\1 0;"),
            },
        ),
    ),
    sampled=tuple(
        Sampled(f"{d.arch}, {size} dims, {q} and {v} heads", problem(n, size, q, v, dtype), d,
                size, 3, slow=size > 24 or (d is H200) == (size > 8))
        for size, q, v, dtype in (
            (8, 2, 4, "bfloat16"), (24, 1, 3, "float16"), (64, 4, 4, "bfloat16"),
            (96, 2, 8, "float16"), (256, 1, 2, "bfloat16"),
        )
        for d, n in ((H200, 600), (B200, 3))
    ),
    runs=_runs(),
    references=(
        Reference("bulk", definition(128, 2, 4), problem(2, 128, 2, 4), strategy(path="bulk"), 0.6),
    ),
    same=(
        Same(strategy(head_ctas=1, warps=1, path="bulk", stages=2),
             tuple(problem(n, 32, 1, 2) for n in (1, 2, 5, 64))),
    ),
)  # fmt: skip
