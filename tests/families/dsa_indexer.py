"""The indexer of sparse attention: scores in float8, and the choice of the highest."""

import re

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels import family
from tests.given import B200, BOTH, H200, Json, altered, crossed, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Run, Same, Sampled, Size

INDEXER = family("dsa_indexer")
NAME = "dsa_topk_indexer_fp8_h64_d128_topk256_ps64"
strategy = strategies(
    INDEXER, span=256, tile=128, consumers=1, stages=2, buffers=1, ctas=1, threads=256, loads=1,
    bits=11, room=1, dependent=0,
)  # fmt: skip


def definition(heads: int = 64, dim: int = 128, page: int = 64, topk: int = 256) -> Json:
    sizes = {"num_index_heads": heads, "index_head_dim": dim, "head_dim_with_scale": dim + 4}
    return resized(NAME, "", page_size=page, topk=topk, **sizes)


def problem(batch: int = 64, pages: int = 1024, total: int = 0, **constants: int) -> Problem:
    """Rows of `pages` pages; `total` pages in all, or enough for each row to have its own."""
    axes = {"batch_size": batch, "max_num_pages": pages, "num_pages": total or batch * pages}
    return INDEXER.problem(definition(**constants), axes)


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
_AXES = {"batch_size": 3, "max_num_pages": 10, "num_pages": 20}
_FREE = frozenset({"fence_mbar_init"})  # of barriers that only threads use
_SMALL = problem(topk=64)


def _bad(message: str, axes: dict[str, int] | None = None, **sizes: int) -> Bad:
    return Bad(definition(**sizes), _AXES | (axes or {}), message)


def _runs() -> tuple[Run, ...]:
    """Sequences of no token, few, a page, more than are chosen and more than are ranked."""
    p, few = problem(5, 11, 60, topk=64), problem(4, 11, 30, topk=32)
    sort = problem(4, 20, 50, topk=1056, heads=16, dim=64)
    lengths = ((0, 5, 64, 300, 700), (64, 65, 1, 699, 0))
    spread = {H200: (1279, 0, 5, 1057), B200: (1056, 0, 1250, 5)}
    return (
        *(Run(f"{d.arch}, lengths {n}", p, strategy(), {"lengths": n}, d, slow=(d is H200) == i)
          for d in BOTH for i, n in enumerate(lengths)),
        *(Run(f"equal scores, {s.ctas} CTAs", few, s, {"lengths": (70, 0, 600, 701)},
              slow=s.ctas == 1)
          for s in (strategy(threads=512, bits=12), strategy(ctas=2, bits=10, room=2, loads=2))),
        # the third has negative scores, the fourth equal ones
        *(Run(f"{d.arch}: {n}", sort, s.replace(span=128, tile=128, stages=1),
              {"lengths": spread[d]}, d, slow=True) for d, n, s in SORTED),
    )  # fmt: skip


ROW = Row(
    INDEXER,
    cases=(
        *(Case(n, d, s, _SMALL, problem(), (int(d is H200),)) for d, n, s in CASES),
        *(Case(n, d, s, problem(topk=2048)) for d, n, s in SORTED),
    ),
    quick={"machine": [*(f"{d.arch}: {n}" for d, n, _ in CASES), "sm_100a: sorted"],
           "emulator": [f"{d.arch}: {n}" for d, n, _ in CASES[:4:3]]},
    slack=1792,
    sizes=(
        *(Size(problem(64, n, topk=k), 1000) for k in (256, 2048) for n in (64, 1024, 2048)),
        *(Size(problem(n, pages), spread=1 / 1.5) for n, pages in ((1, 64), (64, 2048))),
        *(Size(problem(1, 8, heads=h, dim=d, page=p, topk=k), slow=slow)
          for h, (d, p, k), slow in crossed(
              (16, 32, 48, 64), ((64, 32, 32), (128, 128, 1024), (128, 64, 2048)))),
    ),
    refused=(
        Refused(problem(), strategy(span=128, tile=256), "a span is whole tiles"),
        Refused(problem(), strategy(span=128), "no more stages than a span has tiles"),
        Refused(problem(), strategy(tile=64, consumers=2), "consumers share the rows of a tile"),
        Refused(problem(), strategy(buffers=2), "products lie in tensor memory where there is"),
    ),
    bad=(
        _bad("positive integer, not 0", {"batch_size": 0}),
        _bad("24 heads must be a multiple of 16", heads=24),
        _bad("80 heads", heads=80),
        _bad("index_head_dim = 96 must be one of", dim=96),
        _bad("page_size = 16 of", page=16),
        _bad("topk = 100 must be a multiple of 32", topk=100),
        _bad("topk = 2080 must be a multiple of 32, 2048 at most", topk=2080),
        _bad("more than 1048576 tokens", {"max_num_pages": 2**15}),
        _bad("more than 4294967295 scores", {"batch_size": 2**20, "max_num_pages": 64}),
        _bad("the cache has more than", {"num_pages": 2**23}),
        *(Bad(altered(definition(), path, value), _AXES, message) for path, value, message in (
            ("axes.head_dim_with_scale.value", 136, "one key of 128 \\+ 4 bytes"),
            ("inputs.seq_lens.dtype", "int64", "seq_lens must be int32"),
            ("outputs", {}, "an indexer has the outputs"),
        )),
    ),
    ordered=(
        Ordered("sm_90a", _SMALL, strategy(span=512, ctas=2, dependent=1), free=_FREE, slow=True),
        Ordered("sm_100a", _SMALL, strategy(span=768, buffers=2), B200, _FREE, kernels=(0,)),
    ),
    sampled=tuple(
        Sampled(f"{d.arch}, {h} heads of {dim}", problem(heads=h, dim=dim, page=page), d, h,
                slow=h > 16 or d is H200)
        for h, dim, page in ((16, 64, 32), (48, 128, 128)) for d in BOTH
    ),
    runs=_runs(),
    planted=(
        Planted(
            "choice", problem(4, 7, 20, topk=64), strategy(), given={"lengths": (445, 5, 300, 400)},
            faults={name: (re.compile(old), new) for name, (old, new) in {
                "products that are not clipped": (
                    r"max\.f32 ([^,]*, [^,]*), 0f00000000", r"mov.b32 \1"
                ),
                "scales that are left out": (
                    r"mul\.rn\.f32 (%t\d+_0, %products_0_\d), [^;]*", r"mov.b32 \1"
                ),
                "negative keys as they are": (r"shr\.s32 %_s, ([^,]*), 31", r"mov.b32 %_s, 0"),
                "tokens past the end": (
                    r"selp\.b32 (%t4_0, %t4_0), 0, [^;]*", r"mov.b32 \1"
                ),
                "the last of equal tokens": (r"not\.b32 %_low, ([^;]*)", r"mov.b32 %_low, \1"),
                "ranks from the other end": (r"setp\.gt\.u64", "setp.lt.u64"),
            }.items()},
        ),
    ),
    same=tuple(
        Same(strategy(), (problem(5, 11, 60, topk=64), problem(64, 2048, topk=64)), d) for d in BOTH
    ),
)  # fmt: skip
