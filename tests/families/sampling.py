"""Sampling with a top-k filter, a top-p filter or both."""

import re
from typing import Any

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.sampling.decisions import registers
from tests.given import B200, BOTH, H200, Json, altering, crossed, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Same, Size

SAMPLING = family("sampling")
strategy = strategies(
    SAMPLING, ctas=2, threads=256, vector=4, residency="registers", unroll=1, bits=10, copies=1,
    candidates=1024, group=1, resident=1, load_cache="default", load_prefetch=0,
)  # fmt: skip
K, P, EACH = ("top_k",), ("top_p",), ("top_k", "top_p")


def definition(vocab: int, filters: tuple[str, ...] = K) -> Json:
    return resized(f"{'_'.join(filters)}_sampling_from_probs_v128256", vocab_size=vocab)


def problem(vocab: int = 128256, batch: int = 64, filters: tuple[str, ...] = K) -> Problem:
    return SAMPLING.problem(definition(vocab, filters), {"batch_size": batch})


#: one kernel for every path through the builder; with the filters that it is for
PATHS = {
    "a cluster, k": (K, strategy()),
    "a cluster, p": (P, strategy(bits=11)),
    "a cluster, both": (EACH, strategy()),
    "one CTA, both": (EACH, strategy(ctas=1, bits=12, candidates=2048)),
    "copies": (P, strategy(copies=4, vector=2)),
    "copies, both": (EACH, strategy(ctas=1, copies=2, vector=1)),
    "read again": (EACH, strategy(residency="reread", load_cache="no_allocate")),
    "read again, alone": (K, strategy(ctas=1, residency="reread", resident=2, bits=11)),
    "shared": (P, strategy(residency="shared", unroll=4, group=2, load_prefetch=128)),
    "shared, narrow": (K, strategy(residency="shared", vector=1, unroll=4, candidates=2048)),
    "four CTAs, wide": (K, strategy(ctas=4, threads=512, bits=12, candidates=4096)),
}
_QUICK = "sm_90a: a cluster, p", "sm_90a: copies, both", "sm_90a: read again, alone"
_GIVEN = definition(100)
_ONE = {"batch_size": 1}
_bad = altering(_GIVEN, _ONE)
ALONE = strategy(ctas=1)


def _whole(f: Fields, p: Problem, dev: Device) -> Any:
    """A row has whole vectors, and an SM the registers of the blocks that it holds."""
    fits = registers(f, p) * f.threads * f.resident <= dev.registers_per_sm
    return fits & (p["vocab_size"] % f.vector == 0)


def _refused(sentence: str, vocab: int = 128256, **changes: int | str) -> Refused:
    return Refused(problem(vocab), strategy(**changes), sentence)


def _planted(name: str, filters: tuple[str, ...], faults: dict[str, Any]) -> Planted:
    return Planted(name, problem(filters=filters), ALONE, faults, trial=True)


ROW = Row(
    SAMPLING,
    cases=tuple(
        Case(n, d, s, problem(4000, 4, f), problem(filters=f), (0,))
        for d in BOTH for n, (f, s) in PATHS.items()
    ),
    quick={"emulator": _QUICK},
    forced=True,
    largest_feature=10,
    sizes=(
        *(Size(problem(batch=n, filters=f), 5000) for n in (1, 64) for f in (K, P, EACH)),
        *(Size(problem(v, n, f), devices=(H200,), holds=_whole, slow=slow)
          for v, n, f, slow in crossed(
              (1, 2, 3, 5, 1000, 128257, 151936, 262144, 1_000_000), (1, 512), (K, P, EACH))),
    ),
    refused=(
        _refused("the vocabulary is a multiple of the vector", 4001),
        _refused("a lane loads single elements of odd rows alone", 4000, vector=1),
        _refused("half as many CTAs would cover the row", 1000, ctas=8),
        _refused("half as many threads would cover the row", 800, ctas=1, threads=512),
        _refused("a row that stays in registers is loaded whole", 4000, unroll=4),
        _refused("fewer vectors than are unrolled", 4000, residency="reread", unroll=8),
        _refused("a vote decides on a part of the vectors", 1000, group=4),
        _refused("a thread holds more than 64 elements"),
        _refused("row and temporaries exceed the registers", 60_000, threads=512, resident=4),
        _refused("a lane adds up more than", 8000, ctas=8, copies=4),
        _refused("a list has fewer than 16 slots", ctas=8, threads=1024),
        _refused("more than 1024 segments", 4_000_000, residency="reread"),
        _refused("row and histograms exceed the shared memory", residency="shared"),
        _refused("exceed those of an SM", resident=3, threads=1024),
    ),
    bad=(
        Bad(_GIVEN, {}, "axis batch_size is not given"),
        Bad(_GIVEN, {"batch_size": 0}, "positive integer, not 0"),
        Bad(_GIVEN, _ONE | {"vocab_size": 8}, "is 100 by definition, not 8"),
        Bad(definition(2**20), {"batch_size": 2**12}, "at most 4294967295 are counted"),
        _bad("inputs", {"probs": _GIVEN["inputs"]["probs"]}, "takes probs with top_k, top_p or"),
        _bad("inputs.probs.dtype", "float16", "probs must be float32"),
        _bad("inputs.top_k.dtype", "int64", "top_k must be int32"),
        _bad("outputs", {}, "has the outputs"),
    ),
    ordered=tuple(
        # of additions to the same bins none is missed alone
        Ordered(f"{d.arch}: {n}", problem(4000, 4, f), s, d, least=8, kept=12,
                others=lambda node: node.arg.atom != "put_place",
                slow=f"{d.arch}: {n}" not in _QUICK)
        for d in BOTH for n, (f, s) in PATHS.items()
    ),
    planted=(
        _planted("k", K, {
            "a quarter of k": ("%top_k0, 1;\n\tmin.u32", "%top_k0, 4;\n\tmin.u32"),
            "a multiplier of the generator": ("3449720151", "3449720153"),
        }),
        _planted("p", P, {
            "an eighth of p": (re.compile(r"0f4F000000;(\n\tcvt\.rzi)"), r"0f4D800000;\1"),
            "the other side": (re.compile(r"setp\.ge(\.u32 %_k\d+)"), r"setp.lt\1"),
        }),
        _planted("both", EACH, {
            "the share of the filtered": (
                re.compile(r"mul\.hi(\.u32 %r\d+, %\w+), %r\d+;"), r"shr\1, 4;"
            ),
        }),
    ),
    same=(Same(strategy(), tuple(problem(4000, n, EACH) for n in (1, 64)), B200),),
)  # fmt: skip
