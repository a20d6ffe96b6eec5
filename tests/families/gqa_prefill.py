"""gqa_prefill: causal attention over packed keys or pages, by wgmma and tcgen05."""

import re
from collections.abc import Sequence
from typing import Any

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.gqa_prefill.decisions import register_limit, registers, row_registers
from tests.given import B200, H200, Json, altered, crossed, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Refused, Row, Run, Same, Sampled, Size

PREFILL = family("gqa_prefill")
strategy = strategies(
    PREFILL, consumers=2, share=1, tile_kv=64, stages=2, overlap=1, pin=0, turns=0, order="heads",
    rescale="always",
)  # fmt: skip


def definition(
    page: int = 0, heads: int = 32, kv_heads: int = 8, dim: int = 128, dtype: str = ""
) -> Json:
    """Over packed keys, or over pages of so many tokens."""
    sizes = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    if not page:
        return resized("gqa_ragged_prefill_causal_h32_kv8_d128", dtype, **sizes)
    name = f"gqa_paged_prefill_causal_h32_kv8_d128_ps{64 if page > 1 else 1}"
    return resized(name, dtype, page_size=page, **sizes)


def axes(
    given: dict[str, Any], sequences: int = 4, queries: int = 4096, keys: int = 4096
) -> dict[str, int]:
    """Variable axes of a definition."""
    page = given["axes"].get("page_size", {"value": 1})["value"]
    pages = -(-keys // page)
    values = {
        "len_indptr": sequences + 1,
        "batch_size": sequences,
        "total_q": queries,
        "total_kv": keys,
        "num_kv_indices": pages,
        "num_pages": pages + 8,
    }
    return {n: v for n, v in values.items() if n in given["axes"]}


def problem(
    page: int = 0, sequences: int = 4, queries: int = 4096, keys: int = 4096, **sizes: Any
) -> Problem:
    given = definition(page, **sizes)
    return PREFILL.problem(given, axes(given, sequences, queries, keys))


#: a page size (0: packed keys) and a kernel for every path through the builder
PATHS = {
    "packed keys": (0, strategy()),
    "steps in order": (0, strategy(overlap=0, order="tiles", stages=1)),
    "turns of two, pinned": (0, strategy(turns=1, pin=1)),
    "turns of three": (0, strategy(consumers=3, turns=1, tile_kv=32, stages=3)),
    "one warpgroup, all heads of a group": (0, strategy(consumers=1, share=4, stages=3)),
    "tiles of 176 keys": (0, strategy(tile_kv=176, stages=1, pin=1)),
    "pages of half a tile": (64, strategy(tile_kv=128, share=2)),
    "pages of two tiles": (64, strategy(tile_kv=32, stages=3)),
    "small pages": (8, strategy(tile_kv=32, consumers=1)),
    "scattered tokens": (1, strategy(share=4)),
    "scattered tokens, steps in order": (1, strategy(share=2, overlap=0)),
    "scattered tokens, more of them than lanes": (1, strategy(tile_kv=160, turns=1)),
    "pages that are no part of a tile": (5, strategy(tile_kv=32, stages=4, order="tiles")),
    "keys in parts": (0, strategy(consumers=1, share=2, tile_kv=32, parts=3, query_box="tile")),
    "three blocks on an SM": (64, strategy(consumers=1, tile_kv=32, resident=3, producer_warps=1)),
}
#: the same for tcgen05
TMEM_PATHS = {
    "one tile of rows, in turn": (0, strategy(consumers=1, overlap=0, stages=1)),
    "one tile, scores ahead": (0, strategy(consumers=1, stages=3, order="tiles")),
    "two tiles, in turn, lazy": (0, strategy(overlap=0, tile_kv=128, rescale="lazy")),
    "two tiles, scores ahead, lazy": (0, strategy(rescale="lazy", share=2)),
    "pages of half a tile": (64, strategy(tile_kv=128, consumers=1, share=4, rescale="lazy")),
    "pages of two tiles": (64, strategy(tile_kv=32, stages=4)),
    "gathered tokens": (1, strategy(tile_kv=96, consumers=1, rescale="lazy")),
    "gathered parts of pages": (5, strategy(tile_kv=128, overlap=0, stages=1, share=4)),
    "keys in parts, two blocks on an SM": (
        0,
        strategy(consumers=1, share=4, tile_kv=32, parts=2, resident=2, query_box="tile"),
    ),
}
_SHORT = (  # seconds of the validator
    "sm_90a: steps in order", "sm_90a: small pages", "sm_90a: tiles of 176 keys",
    "sm_100a: one tile of rows, in turn", "sm_100a: one tile, scores ahead",
)  # fmt: skip
#: what the validator takes for granted, or nothing depends on: ptxas' order, lanes of a warp that
#: meet behind their own stores, turns (they are for speed), the last release of a stage
_FREE = {"warp_sync", "wgmma_fence", "mbar_arrive", "mbar_wait"}


def sized(queries: Sequence[int], keys: Sequence[int], page: int = 0, heads: int = 1) -> Problem:
    """Sequences of these lengths; a cache with a few pages more than they own."""
    own = sum(-(-k // page) for k in keys) * page if page else sum(keys)
    return problem(page, len(keys), sum(queries), own, heads=heads, kv_heads=1, dim=64)


def _bad(path: str, value: object, message: str) -> Bad:
    given = altered(definition(), path, value)
    return Bad(given, axes(given), message)


def _sizes() -> tuple[Size, ...]:
    def fits(f: Fields, p: Problem, dev: Device) -> Any:
        if dev is H200:
            return registers(f, p) <= register_limit(f, dev)
        return row_registers(f) <= register_limit(f, dev)

    pages = (0, 1, 64)
    return (
        *(Size(problem(page, 1, n, n), 500, (H200,), spread=0.9, holds=fits)
          for page in pages for n in (6, 4096)),
        *(Size(problem(page, dim=dim), 60, (B200,), holds=fits)
          for page in pages for dim in (64, 128, 256)),
        *(Size(problem(*of)) for of in ((0, 4, 4096, 4096), (64, 4, 4096, 4096), (1, 4, 64, 4096))),
    )  # fmt: skip


def _runs() -> tuple[Run, ...]:
    """Fewer queries than keys, none that see any, tiles of one row, tails; steep scores."""
    kinds = [
        (0, [1], [1]), (0, [130, 1, 64], [130, 1, 64]), (0, [3, 2, 70], [200, 0, 71]),
        (64, [65, 5, 1], [64, 3, 129]), (64, [40, 2], [0, 2]), (1, [70, 3], [33, 3]),
        (5, [1, 1, 1], [64, 65, 0]),
    ]  # fmt: skip

    def of(keys: list[int], queries: list[int]) -> dict[str, list[int]]:
        return {"lengths": keys, "queries": queries}

    out = []
    shared = strategy(share=2, tile_kv=32, overlap=0)
    for (page, q, k), s, slow in crossed(kinds, (strategy(consumers=1), shared)):
        name, given = f"sm_90a, {q} of {k}, pages of {page}, share {s.share}", of(k, q)
        p = sized(q, k, page, heads=2)
        out.append(Run(name, p, s, given, slow=slow or page == 0, legal=True))
    for (page, q, k), rescale, slow in crossed(
        (kinds[5], kinds[0], kinds[4], kinds[2]), ("always", "lazy")
    ):
        s, given = strategy(consumers=1, tile_kv=32, rescale=rescale), of(k, q)
        name = f"sm_100a, {q} of {k}, pages of {page}, rescaled {rescale}"
        out.append(
            Run(name, sized(q, k, page), s, given, B200, slow=slow or len(q) > 2, legal=True)
        )
    n = [1 + i % 3 for i in range(70)]  # more sequences than a warp has lanes
    s = strategy(consumers=1, share=2, tile_kv=32)
    out.append(Run("70 sequences", sized(n, n, heads=2), s, of(n, n), slow=True))
    paged, packed = (
        problem(*of, heads=4, kv_heads=2, dim=64) for of in ((16, 3, 60, 160), (0, 3, 60, 150))
    )
    for name, dev, p, s in (
        ("pages", H200, paged, strategy()),
        ("packed", H200, packed, strategy(tile_kv=32, consumers=1)),
        ("tcgen05", B200, paged, strategy(consumers=1, overlap=0)),
        ("tcgen05, lazy", B200, packed, strategy(rescale="lazy")),
    ):
        out += [Run(f"{name}, scale {x}", p, s, {"scale": x}, dev, slow=True) for x in (1e-3, 30.0)]
    return tuple(out)


def _sampled() -> tuple[Sampled, ...]:
    out = []
    for dev, shapes in (
        (H200, ((4, 1, 64, 0, "float16"), (14, 2, 64, 16, "bfloat16"), (2, 2, 256, 0, "bfloat16"),
                (16, 1, 128, 1, "float16"), (4, 2, 256, 64, "bfloat16"))),
        (B200, ((2, 2, 128, 0, "bfloat16"), (14, 2, 64, 16, "float16"), (4, 2, 256, 64, "bfloat16"),
                (16, 1, 128, 1, "float16"))),
    ):  # fmt: skip
        for heads, kv_heads, dim, page, dtype in shapes:
            sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
            p = problem(page, 3, 1000, 3000, **sizes, dtype=dtype)
            name = f"{dev.arch}, {heads} and {kv_heads} heads of {dim}, pages of {page}"
            out.append(Sampled(name, p, dev, heads, slow=dim > 64 or heads > 4))
    return tuple(out)


def _planted() -> tuple[Planted, ...]:
    mask = ("setp.gt.s32 %pw, ", "setp.ge.s32 %pw, ")
    p, given = sized([200], [200], heads=2), {"lengths": [200], "queries": [200]}
    hopper: dict[str, tuple[str | re.Pattern[str], str]] = {
        "the mask": mask,
        "the base of the exponential": ("0f3FB8AA3B", "0f3F800000"),
        "the other half of a row": (re.compile(r"(%scale0, %t\d+_)1;"), r"\g<1>0;"),
        "outputs are not rescaled": (
            re.compile(r"(arrive\.shared.*\n\s*)mul\.rn\.f32 %acc0, %acc0, .*;"),
            r"\1",
        ),
        "a group of keys": ("{%packed4, %packed5,", "{%packed0, %packed5,"),
        "the sum of the lanes": ("%row_sum0, 1, 31", "%row_sum0, 4, 31"),
    }
    blackwell: dict[str, tuple[str | re.Pattern[str], str]] = {
        "the mask": mask,
        "an output is not rescaled": (
            re.compile(r"(mul\.rn\.f32 %row_sum0[\s\S]*?wait::ld\S*\s+)mul\S+ (\S+, \S+), \S+;"),
            r"\1mov.b32 \2;",
        ),
        "sums are not rescaled": (re.compile(r"mul\.rn\.f32 %row_sum0, %row_sum0, .*;"), ""),
    }
    rows = ("%v_page_row_0_0, %v_page_row_1_0", "%v_page_row_1_0, %v_page_row_0_0")
    small = strategy(consumers=1, tile_kv=32)
    few = {"lengths": [70], "queries": [70]}
    return (
        Planted("sm_90a", p, small, hopper, given),
        # queries of 16 times the usual size: lazy maxima rise, too
        *(Planted(f"sm_100a, rescaled {how}", sized([200], [200]),
                  small.replace(overlap=0, rescale=how), blackwell, given, B200, slow=how == "lazy")
          for how in ("always", "lazy")),
        Planted("gathered rows", sized([70], [70], 1), small, {"of another tile": rows}, few, B200),
    )  # fmt: skip


ROW = Row(
    PREFILL,
    cases=(
        *(Case(n, H200, s, problem(page), problem(page)) for n, (page, s) in PATHS.items()),
        # schedules by turns
        *(Case(n, B200, s, problem(page, dim=64), problem(page, dim=64), (i % 2,))
          for i, (n, (page, s)) in enumerate(TMEM_PATHS.items())),
    ),
    quick={"machine": _SHORT, "emulator": _SHORT[1:4:2]},
    sizes=_sizes(),
    refused=(
        *(Refused(problem(page), s, sentence) for page, s, sentence in (
            (0, strategy(share=8), "share their keys"),
            (0, strategy(tile_kv=192), "exceed the registers"),
            (0, strategy(stages=4, tile_kv=128), "exceed the shared memory"),
            (0, strategy(turns=1, consumers=1), "take turns"),
            (0, strategy(pin=1, overlap=0), "pinned"),
            (1, strategy(stages=1), "two stages at least"),
            (0, strategy(resident=2), "begins with registers"),
            (1, strategy(consumers=1, producer_warps=1), "one warp brings whole boxes"),
            (0, strategy(query_box="tile"), "no box of its own"),
            (0, strategy(least=4), "counted where keys are in parts"),
            (1, strategy(tile_kv=176), "groups of eight"),
            (0, strategy(rescale="lazy"), "are for wgmma, lazy rescaling for tcgen05"),
        )),
        *(Refused(problem(**sizes), s, sentence, B200) for sizes, s, sentence in (
            ({}, strategy(consumers=3), "one or two tiles"),
            ({}, strategy(tile_kv=176, consumers=1), "keys by 32"),
            ({}, strategy(tile_kv=128), "exceed tensor memory"),
            ({"dim": 256}, strategy(tile_kv=32), "exceed tensor memory"),
            ({}, strategy(tile_kv=160, consumers=1, stages=1), "exceed the registers"),
            ({}, strategy(pin=1), "for wgmma"),
            ({}, strategy(turns=1), "for wgmma"),
            ({"page": 1}, strategy(tile_kv=160, consumers=1), "128 at most"),
        )),
    ),
    bad=(
        *(Bad(given, axes(given), message) for given, message in (
            (definition(heads=30), "8 key heads do not divide 30"),
            (definition(dim=96), "head_dim = 96 must be one of"),
            (definition(dtype="float32"), "must share one dtype"),
        )),
        _bad("inputs.lse", {"shape": [], "dtype": "int32"}, "has the inputs"),
        _bad("outputs", {}, "has the outputs"),
        _bad("inputs.sm_scale.dtype", "float16", "sm_scale must be float32"),
        _bad("inputs.q.dtype", "float16", "must share one dtype"),
        *(Bad(definition(64), axes(definition(64)) | given, message) for given, message in (
            ({"batch_size": 3}, "batch_size = 3 must be len_indptr - 1 = 4"),
            ({"len_indptr": 1}, "leaves no sequence"),
            ({"total_q": 2**20 + 1}, "more than 4294967295 elements"),
        )),
    ),
    ordered=(
        *(Ordered(n, problem(page), s, free=frozenset(_FREE), missed=4, least=20, last_trips=2,
                  slow=n != "steps in order")
          for n, (page, s) in PATHS.items() if n in (
              "turns of two, pinned", "scattered tokens, steps in order", "steps in order")),
        # lanes of a warp that meet behind their own stores, and the last release of a stage
        *(Ordered(n, problem(page, dim=64), s, B200, frozenset({"warp_sync", "tcgen05_commit"}),
                  2, 20, last_trips=3, slow=True)
          for n, (page, s) in TMEM_PATHS.items() if n in (
              "one tile of rows, in turn", "two tiles, scores ahead, lazy", "gathered tokens")),
    ),
    planted=_planted(),
    sampled=_sampled(),
    runs=_runs(),
    same=(Same(strategy(share=2), (problem(64, 1, 17, 64), problem(64, 7, 4096, 8192))),),
)  # fmt: skip
