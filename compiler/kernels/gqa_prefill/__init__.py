"""Causal grouped-query attention of packed queries, over packed keys or over pages."""

from collections.abc import Mapping

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import (
    Choice,
    Family,
    Kernels,
    Problem,
    Size,
    Strategy,
    Trial,
    Trials,
    Trip,
)
from ptxflow.compiler.ir import Statement, program
from ptxflow.compiler.kernels.attention import few, rows_of, sized
from ptxflow.compiler.kernels.gqa_prefill import blackwell, cost, decisions, hopper, merge
from ptxflow.compiler.kernels.gqa_prefill.block import ENTRY
from ptxflow.compiler.kernels.gqa_prefill.epilogue import LINES
from ptxflow.compiler.kernels.gqa_prefill.merge import Merge
from ptxflow.compiler.kernels.gqa_prefill.problem import SCHEMA
from ptxflow.compiler.kernels.gqa_prefill.schedule import PARTIAL
from ptxflow.compiler.kernels.gqa_prefill.wide import WIDE

__all__ = ["ENTRY", "GQA_PREFILL"]


Kernel = blackwell.Kernel | hopper.Kernel


def kernel(p: Problem, s: Strategy, device: Device) -> Kernel:
    return blackwell.Kernel(p, s, device) if device.has_tmem else hopper.Kernel(p, s, device)


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernel, and the one that merges parts of keys."""
    k = kernel(p, s, device)
    return program(k.build(), Merge(p, s, device).build()) if k.cut > 1 else k.build()


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Trip-count classes: no tile of queries; one that sees no key; one step; fewer than the rings
    have stages, as many, and past their second turn. Steps with a tail of keys, which not all
    queries see, and without. Of parts of keys a tile's only one, its last one and its first."""
    k = kernel(p, s, device)
    k.build()  # says which registers hold pages
    stages: int = s.stages
    risings = (
        (0, 1) if s.rescale == decisions.LAZY else (0,)
    )  # whether maxima rise enough to rescale
    out = [_trip(k, 0, 0), _trip(k, 0, 0, queries=k.tokens)]
    for steps in sorted({1, max(stages - 1, 1), stages, stages + 1, 2 * stages + 1}):
        # a tail long enough for two steps to need a mask, however few tokens a tile has
        tail = max(k.tile_kv // 2 + 1, k.tile_kv - k.tokens + 2)
        cases = [(steps, 0)] if steps <= k.least or k.cut == 1 else []
        if k.cut > 1:
            whole = steps >= k.least  # tiles of each part, or of the second of two
            cases += [(steps * k.cut, k.cut - 1), (steps * k.cut, 0)] if whole else []
            cases += [] if whole else [(k.least + steps, 1)]
        for tiles, part in cases:
            tails = (0, tail) if part or tiles == steps else (0,)
            out += [_trip(k, tiles, t, r, part=part) for t in tails for r in risings]
    if k.cut > 1:
        second = Merge(p, s, device)
        out += [_merged(second, n, rows) for n in (1, 2, k.cut) for rows in (1, k.tokens)]
    return out


def _merged(m: Merge, parts: int, queries: int) -> Trip:
    """Some queries of the first tile, whose keys are in so many parts."""
    found = {"start": 0, "after": 1, "q_first": 0, "q_end": queries, "kv_first": 0}
    tokens = parts * m.least * m.tile_kv - 1
    pages = -(-tokens // m.page) if m.page else tokens
    found |= {"kv_end": pages, "last": tokens - (pages - 1) * m.page}
    held = {m.prefix + name: n for name, n in found.items() if name in m.keep.held}
    block = queries // m.tokens * m.units
    values = {"total_q": queries, "sequences": 1, "ctaid": block, **held}
    outputs = (("output", queries, m.share * m.dim), ("lse", queries, m.share))
    name = f"{queries} queries, {parts} parts"
    return Trip(name, tuple(values.items()), outputs if parts > 1 else (), merge.ENTRY)


def _trip(
    k: Kernel, steps: int, tail: int, rises: int = 0, queries: int | None = None, part: int = 0
) -> Trip:
    """A tile of queries over so many tiles of keys, or the part of them, of which the last one
    lacks `tail` rows; of no queries over 0 steps, unless it is said how many."""
    queries = (k.tokens if steps else 0) if queries is None else queries
    keys = steps * k.tile_kv - tail if steps or queries else 1
    block = queries // k.tokens  # the first number comes last
    values = {
        "total_q": queries,
        "sequences": 1,
        "start": 0,
        "after": 1,
        "q_first": 0,
        "q_end": queries,
        "kv_first": 0,
        "kv_end": keys,
        "ctaid": (block * k.cut + part) * k.units
        if k.s.order == decisions.HEADS
        else block + part * (block + 1),
    }
    if k.page:
        values["kv_end"] = -(-keys // k.page)
        values["last"] = keys - (values["kv_end"] - 1) * k.page
        values |= {name: 0 for name in k.keep.held if "page_" in name}
    values |= {"queries_here": queries, "tile_from_here": 0, "unit_here": 0, "part_here": part}
    values |= {name: rises for name in k.keep.held if name.endswith("rises")}
    cut_up = k.cut > 1 and steps > max(-(-steps // k.cut), k.least)
    names = (f"{PARTIAL}", f"{PARTIAL}_lse") if cut_up else ("output", "lse")
    outputs = tuple(zip(names, (queries, queries), (k.share * k.dim, k.share), strict=True))
    blind = " that see no key" if queries and not steps else ""
    name = f"{steps} steps of a tile of queries{blind}" + (", a tail" if tail else "")
    name += ", rising maxima" if rises else ""
    name += f", part {part}" if cut_up else ""
    entry = ENTRY if k.cut > 1 else ""
    return Trip(name, tuple(values.items()), outputs if queries and not part else (), entry)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Three sequences of few heads, with tails, steps with and without a mask, rings past their
    first turn; one has no keys."""
    k = kernel(p, s, device)
    steps = s.stages + 2 if k.cut == 1 else max(s.stages + 2, 2 * k.least + 1)
    tokens = steps * k.tile_kv + k.tile_kv // 2 + 3
    queries = min(2 * k.tokens + 5, tokens - 1)
    group = k.heads // k.kv_heads
    kv_heads = 2 if k.share == group and k.kv_heads > 1 else 1
    heads = kv_heads * k.share * (2 if group > k.share else 1)
    axes = sized(p, 3, queries, *_room(k, tokens))
    return Trial(p.at(num_qo_heads=heads, num_kv_heads=kv_heads, **axes))


def _room(k: Kernel, tokens: int) -> tuple[int, int, int]:
    """Tokens, the fewest pages, and spare ones: two more of a sequence's than they need."""
    return tokens, -(-tokens // k.page) + 2 if k.page else 0, 3


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """Two key heads, or as many as have the same divisions. Few queries beside many keys, of which
    the last ones see one turn of a ring more; sequences of several tiles, one behind a whole tile's
    queries and one a query short of that, of which a tile sees one tile of keys and the next more,
    that or one key; less than a tile's, of which the last sees full tiles of keys, and none, as
    many as make tiles of a query less more; no key at all; many sequences behind one, few of which
    have tokens, and whose look-up takes several steps, one a key short of a tile or page, one of a
    part's keys; sequences whose last rows are those of each store of a warp; a full tile that sees
    one key more than fill a ring; its 32nd turn; all parts. Of some blocks an odd number: of all
    heads."""
    k = kernel(p, s, device)
    group, tile, asked = k.heads // k.kv_heads, k.tile_kv, k.tokens
    shapes = tuple({"num_kv_heads": n, "num_qo_heads": n * group} for n in few(k.kv_heads))

    begun = (0,) if k.cut > 1 else ()  # all of the first launch, as the second reads what it leaves

    def size(count: int, queries: int, tokens: int, some: tuple[int, ...] = ()) -> Size:
        return Size(sized(p, count, queries, *_room(k, tokens)), None, (*begun, *some))

    whole, ring = 2 * asked + 5, s.stages * tile
    short, full = max(1, asked - 1), -(-asked // tile) * tile
    turns, most = -(-2 * asked // ring), max(whole, (2 * s.stages + 3) * tile)
    stores = k.warp_rows // LINES + 1
    rows = max(1, LINES // k.share) * stores * (stores + 1) // 2
    held = whole + ring
    held += max(0, 5 * k.page // 8 - held % max(1, k.page))  # more than half of a last page
    many = [(2, 3) if i % 8 == 1 else (0, i % 8 // 7) for i in range(34)]
    many[30], many[33] = (2, max(tile, k.page) - 1), (2, k.least * tile)
    each = [(asked, 0), (3 * asked - 1, tile + asked - 1), (2 * asked, held), (short, full)]
    page = max(1, k.page)  # of one and a key the first of several tiles sees a key
    each += [(2 * asked + 1, tile + 1), (asked + page, page + 1), (max(1, asked - 4), 0)]
    # the first queries see two tiles of the last part that need a mask
    cut = (k.cut * max(k.least, s.stages + 1) - 1) * tile - asked // 2
    sizes = (
        size(1, whole, -(-most // ring) * ring + 3, (7,)),
        rows_of(p, *each),
        Size(sized(p, 1, 2 * asked, turns * ring + 1), None, (*begun, 7)),
        size(3, 3 * asked + 6, 5),
        rows_of(p, (asked, 0), *many),
        size(stores, rows, 60),
        Size(sized(p, stores, rows, 1)),
        size(1, 2, 34 * s.stages * tile, (1,)),
        *([size(1, whole, whole + cut, (7,))] * (k.cut > 1)),
    )
    return Trials(shapes, sizes)


def revise(choices: Mapping[str, Choice]) -> Mapping[str, Choice] | None:
    """Choices of before there was a `rescale`: outputs then followed every maximum."""
    return {"rescale": decisions.ALWAYS, **choices}


GQA_PREFILL = Family.of(
    SCHEMA,
    ("gqa_paged", "gqa_ragged"),
    decisions,
    cost,
    Kernels(build, trips, lambda p, s, d: kernel(p, s, d).launch(), trial, trials),
    revise=revise,
    accepts=lambda inputs: "qo_indptr" in inputs,
    more=WIDE,
)
