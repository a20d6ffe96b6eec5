"""MLA: decoding and prefill of latent attention, by mma.sync, wgmma and tcgen05; two families."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxflow.compiler.atoms import atom
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem, Strategy
from ptxflow.compiler.ir import Op, Statement
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.mla.decisions import columns, own, register_limit, registers
from tests.given import B200, BOTH, H200, Json, altered, crossed, resized, strategies, variable
from tests.row import Bad, Case, Ordered, Planted, Reference, Refused, Row, Run, Same, Sampled, Size

DECODE, PREFILL = family("mla_decode"), family("mla_prefill")


def definition(
    prefill: bool = False,
    page: int = 1,
    heads: int = 16,
    latent: int = 512,
    rope: int = 64,
    dtype: str = "",
) -> Json:
    kind = "prefill_causal" if prefill else "decode"
    name = f"mla_paged_{kind}_h16_ckv512_kpe64_ps{64 if page > 1 else 1}"
    sizes = {"num_qo_heads": heads, "head_dim_ckv": latent, "head_dim_kpe": rope}
    return resized(name, dtype, page_size=page, **sizes)


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
    return (PREFILL if prefill else DECODE).problem(given, variable(given, axes))


_TILING: dict[str, int | str] = {
    "tile": 32, "warps": 4, "stages": 2, "scores": "columns", "operand": "shared",
}  # fmt: skip
decode = strategies(DECODE, **{"chunk": 128, **_TILING, "dependent": 0, "sum_chunks": 1})
prefill = strategies(
    PREFILL,
    **{"core": "mma_sync", "queries": 1, **_TILING, "lead": 0, "pieces": 1, "rescale": "always"},
    parts=1, dependent=0, sum_chunks=1,
)  # fmt: skip


def wgmma(**changes: int | str) -> Strategy:
    return prefill(**{"core": "wgmma", "queries": 4, "tile": 64, "warps": 8, **changes})


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
#: on sm_100a; decoding's take it by themselves
TCGEN05 = {
    "tcgen05, chunks of two tiles": decode(tile=64, sum_chunks=2),
    "tcgen05, whole sequences, one stage": decode(chunk=0, tile=64, warps=8, stages=1),
    "tcgen05, four queries": wgmma(),
    "tcgen05, eight parts of a query": wgmma(queries=1, parts=8, dependent=1, sum_chunks=8),
}
_SMALL: dict[str, Any] = {"latent": 64, "rope": 32}
_SCORES: dict[str, Any] = {"latent": 128, "rope": 64}
_FREE = frozenset({"fence_mbar_init"})  # threads arrive and wait behind a barrier
_PLANNED = _FREE | {"cta_sync"}  # the one behind the plan of a CTA orders what the first one does
_AXES = {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 10, "num_pages": 12, "total_q": 6}
_QUICK = (
    "sm_90a: chunks of one tile", "sm_90a: dims and tokens in parts", "sm_90a: whole sequences",
    "sm_100a: chunks, one stage, queries in registers", "sm_90a: a query", "sm_100a: two parts",
    "sm_90a: wgmma, a part of the scores first", "sm_90a: 128 heads, decode",
    "sm_90a: 128 heads, wgmma", "sm_100a: tcgen05, chunks of two tiles",
    "sm_100a: tcgen05, four queries",
)  # fmt: skip
#: of 128 heads each CTA writes its own
SHARED = {
    "decode": decode(chunk=0, warps=8),
    "decode in chunks": decode(warps=8),
    "prefill": prefill(warps=8),
    "prefill in parts": prefill(warps=8, parts=2),
    "wgmma": wgmma(queries=1),
    "wgmma in parts": wgmma(queries=1, parts=4),
}


def _cases(name: str) -> tuple[Case, ...]:
    packed = name == "mla_prefill"
    small, wide = (problem(packed, 16, heads=heads, **_SCORES) for heads in (16, 128))
    ours = [(d, n, s) for d in BOTH for n, s in PATHS.items()]
    ours += [(H200, n, s) for n, s in WGMMA.items()] + [(B200, n, s) for n, s in TCGEN05.items()]
    shared = [(d, n, s) for d in BOTH for n, s in SHARED.items()]
    return (
        *(Case(n, d, s, small, problem(packed, 64 if d is H200 else 1), (int(d is H200),))
          for d, n, s in ours if s.family == name),
        *(Case(f"128 heads, {n}", d, s, wide) for d, n, s in shared if s.family == name),
    )  # fmt: skip


def _writes(node: Statement) -> bool:
    """Whether an instruction writes memory, not registers alone."""
    row = atom(node.arg.atom)
    targets = (row.operand(node, a.operand).src[0] for a in row.accesses if a.mode == "w")
    return any(t.op in (Op.SMEM, Op.GLOBAL) for t in targets)


def _ordered(name: str, s: Strategy, **more: Any) -> Ordered:
    packed = s.family == "mla_prefill"
    more = {"free": _FREE, "others": _writes, **more}
    return Ordered(name, problem(packed, 16, **_SCORES), s, **more)


def of_lengths(p: Problem, lengths: Sequence[int]) -> Problem:
    """The problem with the pages, of a token each, that sequences of these lengths have."""
    return p.at(num_kv_indices=sum(lengths), num_pages=sum(lengths) + 3)


def _sizes(packed: bool) -> tuple[Size, ...]:
    def fits(f: Fields, p: Problem, dev: Device) -> Any:
        by_wgmma = f.core == "wgmma" if packed else f.tile == 0
        alone = by_wgmma & (f.parts == 1) if packed else by_wgmma
        assert alone.sum() == (48 if dev is H200 else 3) * packed
        assert set(np.unique(f.tile)) == {32, 64} and set(np.unique(f.warps)) == {4, 8}
        held = (registers(f, p, dev) <= register_limit(f, dev)) | by_wgmma
        return held & (own(f, p) >= 1) & np.all(columns(f, p) % 16 == 0)

    def loads(most: int) -> Any:
        """Of 64 heads a thread holds four chunks at a time, where eight would spill."""
        return lambda f, p, dev: set(f.sum_chunks) == {1, 2, 4, 8} - {2 * most}

    return (
        Size(problem(packed), 30 if packed else 1000, holds=fits),
        *(Size(problem(heads=h), holds=loads(n)) for h, n in ((32, 8), (64, 4)) if not packed),
        *(Size(problem(packed, 1, n, t, n * 64), spread=0.7, devices=(H200,))
          for n, t in ((1, 1024), (64, 4096))),
        *(Size(problem(packed, page, n, t), devices=(H200,))
          for page, n, t in ((1, 1, 64), (64, 64, 8192), (1, 4, 9), (64, 1, 16384))),
        *(Size(problem(packed, page, 3, 100, 50, heads=h, latent=n, rope=r), devices=(H200,),
               slow=slow)
          for h, page, (n, r), slow in crossed(
              (8, 16, 24, 32, 64, 96, 128), (1, 16), ((64, 32), (256, 64), (512, 128)))),
    )  # fmt: skip


def _refused(s: Strategy, sentence: str, **sizes: int) -> Refused:
    return Refused(problem(s.family == "mla_prefill", **sizes), s, sentence)


def _bad() -> tuple[Bad, ...]:
    def bad(given: Json, message: str, axes: dict[str, int] | None = None) -> Bad:
        return Bad(given, variable(given, _AXES | (axes or {})), message)

    return (
        bad(definition(), "positive integer, not 0", {"batch_size": 0}),
        bad(definition(), "len_indptr must be batch_size \\+ 1", {"len_indptr": 9}),
        bad(definition(heads=12), "12 query heads must be a multiple of 8, of 32 above 64, 128 at"),
        bad(definition(heads=72), "72 query heads"),
        bad(definition(heads=160), "160 query heads"),
        bad(definition(latent=192), "head_dim_ckv = 192 must be one of"),
        bad(definition(rope=16), "head_dim_kpe = 16 of"),
        bad(definition(dtype="float32"), "must share one dtype"),
        bad(definition(), "the cache has more than 67108863 tokens", {"num_pages": 2**26}),
        *(bad(altered(definition(), path, value), message) for path, value, message in (
            ("inputs.kv_indptr.dtype", "int64", "kv_indptr must be int32"),
            ("inputs.sm_scale.dtype", "float16", "sm_scale must be float32"),
            ("inputs.ckv_cache.shape", ["num_pages"], "has the inputs"),
            ("outputs", {}, "has the outputs"),
            ("axes.page_size.value", 4, "need kv_last_page_len"),
        )),
    )  # fmt: skip


def _sampled(packed: bool) -> tuple[Sampled, ...]:
    """On the problem itself: trials have heads of dims of their own."""
    return tuple(
        Sampled(f"{h} heads, {n} and {r} dims", problem(packed, 16, 3, 25, 5, heads=h, latent=n,
                rope=r, dtype=dtype), B200 if packed else H200, h, seeds=(0,), whole=True,
                slow=packed or h > 8)
        for h, n, r, dtype in ((8, 128, 32, "float16"), (32, 512, 128, "bfloat16"),
                               (96, 64, 64, "bfloat16"), (128, 128, 32, "float16"))
    )  # fmt: skip


def _shared_runs(packed: bool) -> list[Run]:
    """128 heads, of which each CTA has 64; some queries see no key."""
    kinds = {
        "decode": (H200, decode(warps=8, chunk=0, stages=1)),
        "decode in chunks": (B200, decode(warps=8, scores="dims", dependent=1, sum_chunks=2)),
        "prefill": (B200, prefill(warps=8)),
        "prefill in parts": (H200, prefill(warps=8, parts=4, sum_chunks=2)),
        "wgmma": (H200, wgmma(queries=1, tile=32)),
        "wgmma in parts": (
            H200, wgmma(queries=1, tile=32, stages=4, lead=3, parts=2, sum_chunks=2)
        ),
        "tcgen05": (B200, wgmma(queries=1)),
        "decode by tcgen05": (B200, decode(tile=64, warps=8, chunk=0)),
    }  # fmt: skip
    p = problem(packed, 1, 3, 40, 5, heads=128, latent=128, rope=64)
    return [
        Run(f"128 heads, {n}", p, s, device=d, slow=True, legal=True)
        for n, (d, s) in kinds.items() if (s.family == "mla_prefill") == packed
    ]  # fmt: skip


def _decode_runs() -> tuple[Run, ...]:
    """Sequences of no token, one, a tile, a chunk, and one more; more of them than lanes."""
    p, s = problem(False, 1, 3, 67, **_SMALL), decode(chunk=64, dependent=1, sum_chunks=2)
    steep = problem(False, 1, 2, 75, **_SCORES)
    lengths = [(1, 200, 0), (33, 128, 40), (0, 0, 201), (64, 64, 73), (129, 1, 71)]
    return (
        *(
            Run(f"lengths {n}", of_lengths(p, n), s, {"lengths": n}, slow=i > 1)
            for i, n in enumerate(lengths)
        ),
        Run("70 sequences", problem(False, 1, 70, 3, **_SMALL), decode(chunk=64), slow=True),
        *(
            Run(f"scale {x}", steep, decode(chunk=64), {"scale": x}, slow=x < 1)
            for x in (1e-3, 30.0)
        ),
        *_shared_runs(False),
    )


#: of wgmma: five queries of three tokens, of which two see none
LENGTHS, QUERIES = (130, 3, 67), (3, 5, 2)
_PIECES = wgmma(tile=32, lead=1, pieces=2)


def _uneven(dtype: str = "") -> Problem:
    p = problem(True, 1, 3, 131, sum(QUERIES), **_SCORES, dtype=dtype)
    return of_lengths(p, LENGTHS)


def _prefill_runs() -> tuple[Run, ...]:
    """Queries see what is before them; parts add up; scores of all scales."""
    out = []
    p = of_lengths(problem(True, 1, 3, 100, 7, latent=128, rope=32), (100,))
    for parts in (1, 2, 8):
        s = prefill(queries=2, warps=8, parts=parts, dependent=int(parts > 2))
        for k, q in (((40, 0, 60), (1, 0, 6)), ((5, 3, 92), (5, 1, 1)), ((70, 20, 10), (3, 2, 2))):
            name, given = f"{parts} parts, {q} of {k}", {"lengths": k, "queries": q}
            out.append(Run(name, p, s, given, slow=parts > 1 or q[0] < 5))
    given = {"lengths": LENGTHS, "queries": QUERIES}
    for parts in (2, 8):
        for dtype in ("bfloat16", "float16"):
            s = _PIECES.replace(parts=parts, sum_chunks=2)
            out.append(Run(f"wgmma, {parts} parts, {dtype}", _uneven(dtype), s, given, slow=True))
    long = problem(True, 1, 35, 20, 40, **_SMALL)
    out.append(Run("35 sequences", long, prefill(parts=2), slow=True))
    steep = problem(True, 1, 3, 40, 11, **_SCORES)
    for name, dev, s in (
        ("mma_sync", H200, prefill(queries=2, warps=8)),
        ("in parts", B200, prefill(queries=2, warps=8, parts=2)),
        ("wgmma", H200, wgmma(tile=32)),
        ("wgmma, in parts", H200, wgmma(tile=32, parts=4, rescale="lazy", pieces=2)),
        ("tcgen05", B200, wgmma(parts=2)),
    ):
        for x in (1e-3, 30.0):
            slow = name != "wgmma" or x < 1
            out.append(Run(f"{name}, scale {x}", steep, s, {"scale": x}, dev, slow=slow))
    return (*out, *_shared_runs(True))


def _references() -> tuple[Reference, ...]:
    """Also with scores so steep that later tiles have maxima far above those before."""
    given = definition(True, 16, **_SCORES)
    p = problem(True, 16, 2, 96, 9, **_SCORES)
    high = problem(True, 16, 2, 160, 6, **_SCORES)
    return (
        Reference("prefill", given, p, prefill(queries=4, warps=8), 0.9),
        Reference("eight parts", given, p, prefill(queries=4, warps=8, parts=8, sum_chunks=4), 0.9,
                  slow=True),
        Reference("wgmma, two parts", given, p, wgmma(tile=32, parts=2, dependent=1), 0.9,
                  slow=True),
        *(Reference(f"wgmma, {parts} parts, rescaled {how}", given, high,
                    _PIECES.replace(rescale=how, parts=parts), steeper=8.0,
                    slow=True)
          for parts in (1, 2) for how in ("always", "lazy")),
    )  # fmt: skip


DECODE_ROW = Row(
    DECODE,
    cases=_cases("mla_decode"),
    quick={"machine": _QUICK, "emulator": _QUICK[:3]},
    slack=1024,
    largest_feature=20,
    sizes=_sizes(False),
    refused=(
        _refused(decode(tile=32, warps=8), "groups of warps share the columns evenly"),
        _refused(decode(chunk=64, tile=64, warps=8, stages=2), "no more stages than a chunk has"),
        _refused(decode(chunk=0, dependent=1), "a second kernel is for sequences in chunks"),
        _refused(decode(tile=64, warps=8, stages=3, chunk=0), "exceed the shared memory of a CTA"),
        _refused(decode(chunk=512), "a chunk has at least a tile", sequences=2, tokens=50),
        *(Refused(problem(heads=64), decode(chunk=256, sum_chunks=8),
                  "second kernel loads at a time exceed the registers", d) for d in BOTH),
    ),
    bad=_bad(),
    ordered=(_ordered("decode", decode(chunk=256, dependent=1), kept=24, slow=True),
             _ordered("decode by tcgen05", decode(chunk=0, tile=64), device=B200),
             _ordered("decode, whole sequences", decode(chunk=0, stages=1), kept=4)),
    planted=(
        Planted(
            "decode", problem(False, 1, 2, 75, **_SMALL), decode(chunk=0),
            {
                "logarithms to base e": ("1069066811", "1065353216"),
                "sums that are not rescaled": (
                    re.compile(r"(sub.* %row_max1, .*\s+)ex2\S+ (\S+_0),"), r"\1mov.b32 \2,"
                ),
                "a token that is not there": ("%score0_0, 0fFF800000", "%score0_0, 0f00000000"),
                "half of the weights": ("%row_sum1, 4, 31", "%row_sum1, 8, 31"),
            },
        ),
    ),
    sampled=_sampled(False),
    runs=_decode_runs(),
    references=(
        Reference("decode", definition(False, 16, **_SCORES), problem(False, 16, 2, 96, **_SCORES),
                  decode(chunk=64, tile=64, warps=8, stages=1), 0.9),
    ),
    same=(Same(decode(chunk=64, dependent=1, sum_chunks=2),
               (problem(False, 1, 3, 67, **_SMALL), problem(False, 1, 64, 4096, **_SMALL))),),
)  # fmt: skip
PREFILL_ROW = Row(
    PREFILL,
    cases=_cases("mla_prefill"),
    quick={"machine": _QUICK, "emulator": _QUICK[4:7]},
    slack=1024,
    forced=True,
    largest_feature=20,
    sizes=_sizes(True),
    refused=(
        _refused(prefill(queries=4, tile=64, warps=8), "sums and queries exceed the registers"),
        _refused(prefill(queries=1, warps=8, scores="dims"), "columns in pairs of them"),
        _refused(wgmma(queries=2), "are the 64 rows of a wgmma"),
        _refused(wgmma(stages=4), "a lane looks up a row at most"),
        _refused(wgmma(stages=1), "two or more stages"),
        _refused(wgmma(operand="registers"), "with wgmma eight warps multiply"),
        *(Refused(problem(True), s, "wgmma is of sm_90a", B200)
          for s in (wgmma(lead=1), wgmma(pieces=2), wgmma(rescale="lazy"))),
        Refused(problem(True), wgmma(queries=3), "are the 64 rows of a wgmma", B200),
        _refused(prefill(lead=1), "with wgmma scores may come before another tile's values"),
        _refused(prefill(parts=4), "at most 16 CTAs for each SM, if tokens are in parts"),
        _refused(prefill(dependent=1), "a second kernel is for tokens in parts"),
        _refused(prefill(parts=2, sum_chunks=4), "loads no more than there are"),
    ),
    bad=tuple(
        Bad(given, variable(given, _AXES), message) for given, message in (
            (definition(True, heads=72), "72 query heads"),
            (definition(True, rope=16), "head_dim_kpe = 16 of"),
        )
    ),
    ordered=(
        _ordered("prefill", prefill(queries=2, warps=8, scores="dims"), kept=24, slow=True),
        _ordered("prefill in parts", kept=24, slow=True, free=_PLANNED, missed=2,
                 s=prefill(queries=2, warps=8, parts=2, dependent=1, sum_chunks=2)),
        # one of all statements alike: how maxima, weights and tiles are handed over and back
        *(Ordered(f"warpgroups, {n} parts", problem(True, 16, **_SCORES),
                  wgmma(tile=32, lead=1, pieces=2, rescale="lazy", parts=n),
                  least=21, once=True, slow=True, **more)
          for n, more in ((1, {"free": _FREE | {"warp_sync"}}),
                          (2, {"free": _PLANNED, "missed": 2}))),
    ),
    planted=(
        # five tiles, in three parts
        Planted(
            "parts", problem(True, 1, 1, 150, 3, **_SMALL), prefill(parts=4, sum_chunks=2),
            {
                "sums under their own maximum": (
                    re.compile(r"(fma.* %c_one0, .*\s+)ex2\S+ (\S+_0),"), r"\1mov.b32 \2,"
                ),
                "a part again": (re.compile(r"(%c_t\d+_2), 0fFF800000"), r"\1, \1"),
                "another's maxima": (
                    "%c_stats0_0_0, %c_stats0_0_1", "%c_stats0_0_1, %c_stats0_0_0"
                ),
            },
        ),
        Planted(
            "wgmma", _uneven(), _PIECES, given={"lengths": LENGTHS, "queries": QUERIES},
            faults={
                "sums that are not rescaled": (
                    re.compile(r"(%r_row_max1, .*\s+)ex2.approx.ftz.f32 (\S+_0)"), r"\1mov.b32 \2"
                ),
                "tokens that are not seen": (
                    "%l_scores0, %l_scores0, 0fFF800000", "%l_scores0, %l_scores0, 0"
                ),
                "half of the weights": ("%l_row_sum0, 1, 31", "0, 1, 31"),
                "another's rows": ("%g_row_of_2_0, %g_row0", "%g_row_of_2_0, %g_row_of_1_0"),
            },
        ),
        Planted(
            "tcgen05", _uneven(), wgmma(), {
                "sums that are not rescaled": (
                    re.compile(r"(sub.* %row_max7, .*\s+)ex2\S+ (\S+_0),"), r"\1mov.b32 \2,"
                ),
                "a token that is not there": ("%score0_0, 0fFF800000", "%score0_0, 0f00000000"),
                "other dims": (re.compile(r"(shl.b32 \S+ \S+), 20;"), r"\1, 19;"),
            },
            {"lengths": LENGTHS, "queries": QUERIES}, B200,
        ),
    ),
    sampled=_sampled(True),
    runs=_prefill_runs(),
    references=_references(),
)  # fmt: skip
