"""Causal grouped-query attention of packed queries, over packed keys or over pages."""

from __future__ import annotations

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
from ptxflow.compiler.kernels.attention import few, sized
from ptxflow.compiler.kernels.gqa_prefill import blackwell, cost, decisions, hopper
from ptxflow.compiler.kernels.gqa_prefill.block import ENTRY
from ptxflow.compiler.kernels.gqa_prefill.epilogue import LINES
from ptxflow.compiler.kernels.gqa_prefill.problem import SCHEMA, accepts

__all__ = ["ENTRY", "GQA_PREFILL"]


Kernel = blackwell.Kernel | hopper.Kernel


def kernel(p: Problem, s: Strategy, device: Device) -> Kernel:
    return blackwell.Kernel(p, s, device) if device.has_tmem else hopper.Kernel(p, s, device)


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Trip-count classes: no tile of queries; one that sees no key; one step; fewer than the rings
    have stages, as many, and past their second turn. Steps with a tail of keys, which not all
    queries see, and without."""
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
        out += [_trip(k, steps, t, rises) for t in (0, tail) for rises in risings]
    return out


def _trip(k: Kernel, steps: int, tail: int, rises: int = 0, queries: int | None = None) -> Trip:
    """A tile of queries over so many steps, whose last tile of keys lacks `tail` rows; of none over
    0 steps, unless it is said how many."""
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
        "ctaid": block * k.units if k.s.order == decisions.HEADS else block,
    }
    if k.page:
        values["kv_end"] = -(-keys // k.page)
        values["last"] = keys - (values["kv_end"] - 1) * k.page
        values |= {name: 0 for name in k.keep.held if "page_" in name}
    values |= {"queries_here": queries, "tile_from_here": 0, "unit_here": 0}
    values |= {name: rises for name in k.keep.held if name.endswith("rises")}
    outputs = (("output", queries, k.share * k.dim), ("lse", queries, k.share)) if queries else ()
    blind = " that see no key" if queries and not steps else ""
    name = f"{steps} steps of a tile of queries{blind}" + (", a tail" if tail else "")
    name += ", rising maxima" if rises else ""
    return Trip(name, tuple(values.items()), outputs)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Three sequences of few heads, with tails, steps with and without a mask, rings past their
    first turn; one has no keys."""
    k = kernel(p, s, device)
    tokens = (s.stages + 2) * k.tile_kv + k.tile_kv // 2 + 3
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
    """Two key heads, or as many as have the same divisions. Few queries beside many keys; tiles of
    queries without a key; many sequences, few of which have tokens, and whose look-up takes several
    steps; sequences, with keys and without, whose last rows are those of each store of a warp; a
    full tile that sees one key more than fill a ring; a ring beyond its 32nd turn. Of some blocks
    an odd number, so that they are of all heads.
    """
    k = kernel(p, s, device)
    group, tile = k.heads // k.kv_heads, k.tile_kv
    shapes = tuple({"num_kv_heads": n, "num_qo_heads": n * group} for n in few(k.kv_heads))

    def size(count: int, queries: int, tokens: int, some: tuple[int, ...] = ()) -> Size:
        return Size(sized(p, count, queries, *_room(k, tokens)), None, some)

    whole, ring = 2 * k.tokens + 5, s.stages * tile
    turns = -(-2 * k.tokens // ring)
    stores = k.warp_rows // LINES + 1
    rows = max(1, LINES // k.share) * stores * (stores + 1) // 2
    sizes = (
        size(1, whole, max(whole, (2 * s.stages + 3) * tile) + 7, (7,)),
        Size(sized(p, 1, 2 * k.tokens, turns * ring + 1), None, (7,)),
        size(3, 3 * k.tokens + 6, 5),
        size(35, 8, 8),
        size(stores, rows, 60),
        Size(sized(p, stores, rows, 1)),
        size(1, 2, 34 * s.stages * tile, (1,)),
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
    Kernels(
        lambda p, s, d: kernel(p, s, d).build(),
        trips,
        lambda p, s, d: kernel(p, s, d).launch(),
        trial,
        trials,
    ),
    revise=revise,
    accepts=accepts,
)
