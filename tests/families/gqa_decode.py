"""gqa_decode: attention of a query a sequence over pages of keys, by warps or warpgroups."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Fields, Problem
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.gqa_decode.decisions import chunk, registers, smem_bytes, threads
from tests.given import B200, BOTH, H200, Json, altering, crossed, resized, strategies
from tests.row import Bad, Case, Ordered, Planted, Reference, Refused, Row, Run, Same, Sampled, Size

DECODE = family("gqa_decode")
strategy = strategies(
    DECODE, mma="sync", gather="cp_async", warps=2, tile=16, tiles=4, heads=1, stages=2,
    arrival="together", order="heads", dependent=1, sum_warps=2, sum_chunks=2, sum_split=0,
)  # fmt: skip


def definition(
    page_size: int = 1, group: int = 4, key_heads: int = 8, size: int = 128, dtype: str = ""
) -> Json:
    name = f"gqa_paged_decode_h32_kv8_d128_ps{64 if page_size > 1 else 1}"
    heads = {"num_qo_heads": group * key_heads, "num_kv_heads": key_heads}
    return resized(name, dtype, page_size=page_size, head_dim=size, **heads)


def axes(batch: int, pages: int) -> dict[str, int]:
    """The variable axes of sequences that have so many pages together."""
    return {
        "batch_size": batch,
        "len_indptr": batch + 1,
        "num_kv_indices": pages,
        "num_pages": pages + 3,
    }


def problem(batch: int = 16, tokens: int = 1024, page_size: int = 1, **shape: Any) -> Problem:
    """Sequences of `tokens` tokens each."""
    pages = batch * -(-tokens // page_size)
    return DECODE.problem(definition(page_size, **shape), axes(batch, pages))


#: one program for every path through the builders
PATHS = {
    "a ring of two": strategy(),
    "a warp alone, values later": strategy(warps=1, arrival="apart", stages=1),
    "one tile": strategy(tiles=1, stages=1, dependent=0),
    "the ring is filled once": strategy(tiles=2, arrival="apart", order="places"),
    "many warps, two key heads": strategy(warps=8, heads=2, stages=1, sum_warps=1),
    "chunks are shared": strategy(sum_split=1, sum_warps=4, sum_chunks=4, dependent=0),
    "wide tiles, long chunks": strategy(tile=64, tiles=64, stages=1, sum_warps=8, sum_chunks=8),
}
_WARPGROUP: dict[str, Any] = {"mma": "async", "warps": 4, "tile": 64}
#: those of a warpgroup, with tokens of a page
GROUP_PATHS = {
    "copied rows": (1, strategy(**_WARPGROUP)),
    "copied rows, values later": (4, strategy(**_WARPGROUP, stages=3, arrival="apart", tiles=8)),
    "one tile": (16, strategy(**_WARPGROUP, tiles=1, stages=1, dependent=0)),
    "wide tiles, two key heads": (1, strategy(**(_WARPGROUP | {"tile": 128}), tiles=2, heads=2)),
    "pages in boxes": (16, strategy(**_WARPGROUP, gather="tma", order="places")),
    "parts of pages, values later": (
        256,
        strategy(**_WARPGROUP, gather="tma", arrival="apart", stages=6, tiles=8),
    ),
}
#: rows that TMA gathers, on sm_100a
GATHERED = {
    "gathered rows": (1, strategy(**_WARPGROUP, gather="tma")),
    "gathered rows, values later": (
        4,
        strategy(**(_WARPGROUP | {"tile": 128}), gather="tma", arrival="apart", tiles=2),
    ),
}
_WHOLE: dict[str, Any] = {
    "tiles": 1, "dependent": 0, "sum_warps": 1, "sum_chunks": 2, "sum_split": 0, "whole": 1,
}  # fmt: skip
#: of the wide space, with pages of 16 tokens
WIDE = {
    "a whole sequence": strategy(**_WHOLE, warps=4, promotion=256),
    "a cluster's whole sequence": strategy(**_WHOLE, cluster=4, order="places"),
    "a cluster's chunk": strategy(tile=48, tiles=3, cluster=2, sum_blocks=2),
    "warps of different heads": strategy(own="heads", tiles=3, sum_blocks=4),
    "a warpgroup's whole sequence": strategy(**(_WARPGROUP | _WHOLE), stages=3, arrival="apart"),
    "warpgroups' whole sequence": strategy(**(_WARPGROUP | _WHOLE), cluster=2, gather="tma"),
    "warpgroups' chunk": strategy(**(_WARPGROUP | {"tile": 192}), tiles=3, cluster=2),
}
GROUPS = [(d, n, page, s) for d in BOTH for n, (page, s) in GROUP_PATHS.items()]
GROUPS += [(B200, n, page, s) for n, (page, s) in GATHERED.items()]
_AXES = axes(16, 1024)
_bad = altering(definition(), _AXES)
_LONG = "many warps, two key heads"


def of_lengths(lengths: Sequence[int], page_size: int = 1, **shape: Any) -> Problem:
    """A problem of sequences of these lengths."""
    pages = sum(-(-n // page_size) for n in lengths)
    shape = {"key_heads": 2, "size": 64} | shape
    return DECODE.problem(definition(page_size, **shape), axes(len(lengths), pages))


def _cases() -> tuple[Case, ...]:
    """Of warps with pages of 1 and 16 tokens; of a warpgroup with heads of both columns, of one
    column with fewer heads than it has room for, and of one full one."""
    out = []
    for d in BOTH:
        for n, s in PATHS.items():
            for page in (1, 16):
                wide = 128 if n == _LONG else 64  # as many dims as its warps add up
                small = problem(64, 4096, page, size=wide) if page == (1, 16)[d is B200] else None
                out.append(Case(f"{n}, pages of {page}", d, s, problem(64, 4096, page), small))
    s = PATHS["wide tiles, long chunks"].replace(tile=16, tiles=4)
    p = problem(64, 4096, 64, size=64, group=8, key_heads=1)
    out += [Case("a CTA sums two sequences", d, s, p, p if d is H200 else None) for d in BOTH]
    p = problem(64, 4096, 16, size=64)
    out += [Case(n, d, s, p, p) for d in BOTH for n, s in WIDE.items()]
    name = "warps of different heads"
    for size, d in ((128, H200), (256, B200)):
        p = problem(64, 4096, 16, size=size, group=11, key_heads=4)
        out.append(Case(f"{name}, 11 of each, {size} dims", d, WIDE[name], p, None))
    for d, n, page, s in GROUPS:
        for group, other in ((1, 5), (4, 8), (9, 16)):
            p, small = (problem(64, 4096, page, size=64, group=g) for g in (group, other))
            seeds = (0,) if other == 8 else (0, 1)
            out.append(Case(f"{n}, groups of {group} and {other}", d, s, p, small, seeds))
    return tuple(out)


def _rows(f: Fields, p: Problem, dev: Device) -> Any:
    """TMA brings boxes, which are whole pages of a tile or a whole tile of a page; or rows."""
    by_tma = (f.mma == "async") & (f.gather == "tma")
    copied = ((f.mma == "async") & (f.gather == "cp_async")).any()
    boxes = by_tma.any() == (p["page_size"] == 16 or dev is B200)
    return boxes & copied & ~((f.mma == "sync") & (f.gather == "tma"))


def _short(f: Fields, p: Problem, dev: Device) -> Any:
    """Sequences that are short have short chunks."""
    one = (f.tiles == 1) & (chunk(f) <= np.where(f.mma == "sync", 64, 128))
    return (chunk(f) <= 48) | one


def _fits(f: Fields, p: Problem, dev: Device) -> Any:
    fits = smem_bytes(f, p, dev) <= dev.smem_per_block
    return fits & (registers(f, p) <= dev.register_share(threads(f, dev)))


def _refused(sentence: str, shape: dict[str, int] | None = None, **changes: Any) -> Refused:
    return Refused(problem(**(shape or {})), strategy(**changes), sentence)


def _runs() -> tuple[Run, ...]:
    """Lengths around tiles and chunks, and more sequences than lanes."""
    out = []
    for n, page, name, slow in crossed(
        ([1], [0, 0, 3], [128, 129, 127, 0, 1], [16, 15, 17, 400]), (1, 16, 64),
        ("a ring of two", "chunks are shared"),
    ):  # fmt: skip
        what = f"{name}, lengths {n}, pages of {page}"
        out.append(Run(what, of_lengths(n, page), PATHS[name], {"lengths": n}, slow=slow))
    for dev in BOTH:
        for name in ("copied rows", "pages in boxes"):
            page, s = GROUP_PATHS[name]
            for i, n in enumerate(([1], [0, 0, 3], [128, 129, 127, 0, 1], [63, 65, 0, 400])):
                for seed in (0, 1):  # with an odd one an empty sequence has a page
                    what = f"{dev.arch}, {name}, lengths {n}, seed {seed}"
                    p, given = of_lengths(n, page), {"lengths": n, "seed": seed}
                    slow = i != 1 or seed != (dev is H200) ^ (name == "copied rows")
                    out.append(Run(what, p, s.replace(tiles=2), given, dev, slow=slow))
    for batch in (33, 130):
        lengths = np.random.default_rng(batch).integers(0, 20, batch).tolist()
        p = of_lengths(lengths, 1, key_heads=1, group=1)
        s = strategy(tiles=1, stages=1, warps=1, order="places")
        out.append(Run(f"{batch} sequences", p, s, {"lengths": lengths}, slow=batch > 33))
    for dev, (name, s), n, slow in crossed(
        BOTH, list(WIDE.items()), ([1], [0, 0, 3], [128, 129, 127, 0, 1], [63, 400, 0, 95])
    ):
        what = f"{dev.arch}, {name}, lengths {n}"
        out.append(Run(what, of_lengths(n, 16), s, {"lengths": n}, dev, slow=slow))
    p, s = problem(3, 50, group=4, key_heads=1, size=64), GROUP_PATHS["copied rows"][1]
    for name, dev, how in (("warps", H200, strategy()), ("wgmma", H200, s), ("tcgen05", B200, s)):
        for x in (1e-3, 30.0):
            out.append(Run(f"{name}, scale {x}", p, how, {"scale": x}, dev, slow=x < 1))
    return tuple(out)


def _sampled() -> tuple[Sampled, ...]:
    out = []
    for size, group, page, dtype in (
        (64, 1, 1, "bfloat16"), (64, 16, 64, "float16"), (128, 3, 16, "bfloat16"),
        (128, 9, 1, "float16"), (256, 2, 16, "float16"), (256, 12, 1, "bfloat16"),
    ):  # fmt: skip
        for dev, tokens in ((H200, 300), (B200, 40)):
            p = problem(4, tokens, page, size=size, group=group, dtype=dtype, key_heads=2)
            name = f"{dev.arch}, {size} dims, groups of {group}"
            out.append(
                Sampled(name, p, dev, size + group, slow=size > 64 or group > 1 or dev is B200)
            )
    return tuple(out)


ROW = Row(
    DECODE,
    cases=_cases(),
    quick={
        "machine": [f"{d.arch}: {n}, pages of {1 if d is H200 else 16}"
                    for d in BOTH for n in PATHS if n not in (_LONG, "wide tiles, long chunks")]
        + [f"{d.arch}: {n}, groups of 1 and 5" for d, n, _, _ in GROUPS
           if "two key heads" not in n] + ["sm_90a: a CTA sums two sequences"]
        + [f"{d.arch}: {n}" for d in BOTH for n in list(WIDE)[d is B200 :: 2]]
        + ["sm_100a: warpgroups' chunk", "sm_90a: warps of different heads, 11 of each, 128 dims",
           "sm_100a: warps of different heads, 11 of each, 256 dims"],
        "emulator": [f"sm_90a: {n}, pages of 1" for n in list(PATHS)[:4]]
        + [f"{d.arch}: one tile, groups of 4 and 8" for d in BOTH]
        + ["sm_100a: gathered rows, values later, groups of 4 and 8",
           "sm_90a: pages in boxes, groups of 4 and 8"],
    },
    sizes=(
        *(Size(problem(n, t, page), 5000, holds=_fits) for page in (1, 64)
          for n, t in ((1, 1024), (16, 64), (64, 1024), (64, 4096))),
        *(Size(problem(64, 4096, page), holds=_rows) for page in (1, 16, 96)),
        Size(problem(1, 48), devices=(H200,), holds=_short),
        Size(problem(1, 64), devices=(H200,), near=0.001, spread=0.7),
        Size(problem(64, 4096), devices=(H200,), near=0.6, spread=0.7),
        *(Size(problem(n, t, page), devices=(H200,))
          for n, t, page in ((1, 8, 1), (64, 8192, 1), (128, 1000, 64))),
        *(Size(problem(4, 100, 1, size=size, group=group, key_heads=heads), devices=(H200,),
               holds=lambda f, p, dev: p["num_kv_heads"] % f.heads == 0, slow=slow)
          for size, group, heads, slow in crossed((64, 128, 256), (1, 3, 8, 9, 16), (1, 3, 4))),
    ),
    refused=(
        _refused("the key heads of a warp divide those of a token", {"key_heads": 3}, heads=2),
        _refused("a step of a warp is of 64 tokens", heads=4, tile=32),
        _refused("every warp has dims to add up for all", {"size": 64}, warps=8),
        _refused("a ring has no more stages than its warp has tiles", stages=6),
        _refused("no longer than the longest sequence", {"batch": 1},
                 tiles=64, warps=4, tile=64, stages=1),
        _refused("the rings exceed the shared memory", tile=64, stages=4, warps=8),
        _refused("exceed the registers of a thread", {"group": 16}, heads=4),
        _refused("several warps share chunks", sum_warps=1, sum_split=1),
        _refused("a warpgroup's, of 64 tokens or more", mma="async", warps=4),
        _refused("a warpgroup's, of 64 tokens or more", mma="async", tile=64),
        _refused("a step of a warp is of 64 tokens", tile=128),
        _refused("for asynchronous MMAs TMA brings whole pages", {"page_size": 16}, gather="tma"),
        _refused("on sm_100a it gathers rows", {"page_size": 1}, **_WARPGROUP, gather="tma"),
        _refused("two stages at least, where there are two tiles", **_WARPGROUP, stages=1),
    ),
    bad=(
        Bad(definition(), {}, "axis batch_size is not given"),
        Bad(definition(), _AXES | {"num_kv_indices": 0}, "positive integer, not 0"),
        Bad(definition(), _AXES | {"head_dim": 64}, "head_dim is 128 by definition"),
        Bad(definition(), _AXES | {"len_indptr": 4}, "len_indptr must be batch_size \\+ 1"),
        Bad(definition(), _AXES | {"num_pages": 2**29}, "the cache has more than 4294967295 rows"),
        Bad(definition(size=96), _AXES, "head_dim = 96 must be one of \\(64, 128, 256\\)"),
        Bad(definition(group=17), _AXES, "must divide 136 query heads, 16 each at most"),
        Bad(definition(dtype="float32"), _AXES, "must share one dtype of float16, bfloat16"),
        _bad("axes.num_kv_heads.value", 5, "5 key heads must divide 32 query heads"),
        _bad("axes.page_size.value", 4, "pages of 4 tokens need kv_last_page_len"),
        _bad("outputs.output.dtype", "float16", "must share one dtype"),
        _bad("inputs.kv_indptr.dtype", "int64", "kv_indptr must be int32, not int64"),
        _bad("outputs.lse.dtype", "float16", "lse must be float32"),
        _bad("inputs.q.shape", ["batch_size"], "a gqa decode has the inputs"),
        _bad("outputs", {}, "a gqa decode has the outputs"),
    ),
    ordered=(
        *(Ordered(name, problem(64, 4096), PATHS[name].replace(dependent=1), least=5, slow=i > 0)
          for i, name in enumerate(("a warp alone, values later", "chunks are shared"))),
        # a fence for TMA, commits and peers, of which wgmma on copied rows has none
        *(Ordered(f"{d.arch}, {name}", problem(64, 4096, GROUP_PATHS[name][0], size=64),
                  GROUP_PATHS[name][1], d, frozenset({"fence_mbar_init"}), kernels=(0,),
                  slow=d is H200 or i > 0)
          for d in BOTH
          for i, name in enumerate(("copied rows, values later", "parts of pages, values later"))),
    ),
    planted=(
        Planted(
            "decode", of_lengths([200, 90]), strategy(), given={"lengths": [200, 90]},
            faults={
                "log2 e": ("1069066811", "1069000000"),
                "a weight too few": (
                    re.compile(r"(%t\d+_0, )%exact0_2;"), r"\g<1>0f00000000;"
                ),
                "sums of an older maximum": (
                    re.compile(r"(sub\S+ \S+) %u0_row_max0, (\S+);"), r"\1 \2, \2;",
                ),
                "the first page for all": (
                    "%page_next_0_0, %page_ahead_0_0", "%page_next_0_0, %page_0_0_0"
                ),
            },
        ),
    ),
    sampled=(
        *_sampled(),
        *(Sampled(f"{d.arch}, {size} dims in boxes, groups of {group}",
                  problem(64, 4096, 64, size=size, group=group, dtype="float16"), d, 0,
                  seeds=(1,), slow=size > 128 or d is H200,
                  where=dict(GROUP_PATHS["pages in boxes"][1].replace(tiles=2).choices))
          for d in BOTH for size, group in ((128, 1), (256, 1), (256, 16))),
    ),
    runs=_runs(),
    references=(
        Reference("a ring of two", definition(16, 4, 2, 64),
                  DECODE.problem(definition(16, 4, 2, 64), axes(3, 9)), strategy()),
    ),
    same=(Same(strategy(), tuple(of_lengths(n) for n in ([1], [300, 4], [5] * 40))),),
)  # fmt: skip
