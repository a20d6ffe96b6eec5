"""Moves: named changes of some decisions, with the gap that each should close.

A move says in which direction its decisions go from where a strategy is; the others are free, and
the policy draws them given what the move fixes. To add one is to add a row: a name, what it is good
for, its decisions, how strong the evidence is, and which families have it in mind where decisions
of one name mean several things. A row whose decisions a family lacks is passed over there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ptxflow.compiler.family import Choice, Family, Strategy

COMPUTE, MEMORY, LATENCY = AXES = ("compute", "memory", "latency")
MORE, LESS, OTHER = "+", "-", "*"  # later choices of the row, earlier ones, any other


@dataclass(frozen=True)
class Move:
    """`changes` maps decisions to MORE, LESS, OTHER or a choice as text; `strength`, in [0, 1], is
    the evidence that the move helps where its gap is large, before anything was learned."""

    name: str
    axis: str
    changes: Mapping[str, str]
    strength: float
    families: tuple[str, ...] = ()

    def fixed(self, family: Family, strategy: Strategy) -> dict[str, tuple[Choice, ...]]:
        """The choices that the move leaves to its decisions, from a strategy; empty where the
        family has not all of them, or the strategy is at the end of one."""
        if self.families and family.name not in self.families:
            return {}
        choices = {d.name: d.choices for d in family.decisions}
        if not self.changes.keys() <= choices.keys():
            return {}
        now = family.choices(strategy)
        found = {name: directed(choices[name], now[name], to) for name, to in self.changes.items()}
        return found if all(found.values()) else {}


def directed(choices: tuple[Choice, ...], now: Choice, to: str) -> tuple[Choice, ...]:
    """The choices that lie in a direction from the present one, which is not among them."""
    at = choices.index(now)
    if to == MORE:
        return choices[at + 1 :]
    if to == LESS:
        return choices[:at]
    return tuple(c for c in choices if c != now and to in (OTHER, str(c)))


def _row(name: str, axis: str, changes: str, strength: float, families: str = "") -> Move:
    pairs = (part.split(":") for part in changes.split())
    return Move(name, axis, {n: to for n, to in pairs}, strength, tuple(families.split()))


MOVES = (
    # rings and what is in flight
    _row("deeper ring", LATENCY, "num_stages:+", 0.6),
    _row("deeper ring of tiles", LATENCY, "stages:+", 0.6),
    _row("shallower ring, more CTAs", LATENCY, "stages:-", 0.3),
    _row("shallower ring, room for tiles", COMPUTE, "num_stages:-", 0.2),
    _row("deeper rings of experts", LATENCY, "up_stages:+ down_stages:+", 0.4),
    _row("other rings of experts", LATENCY, "up_stages:* down_stages:*", 0.2),
    _row("more rows in flight", MEMORY, "rows_in_flight:+", 0.6),
    _row("fewer rows in flight", LATENCY, "rows_in_flight:-", 0.3),
    _row("longer lag of gathered rows", LATENCY, "lag:*", 0.3),
    _row("unroll further", MEMORY, "unroll:+", 0.4),
    _row("unroll less", LATENCY, "unroll:-", 0.2),
    _row("load ahead", MEMORY, "load_ahead:1", 0.5),
    _row("load on demand", LATENCY, "load_ahead:0", 0.2),
    _row("more loads at a time", MEMORY, "loads:*", 0.3),
    # tiles and how work is parted
    _row("larger tile", COMPUTE, "tile_m:+", 0.4),
    _row("wider tile", COMPUTE, "tile_n:+", 0.5),
    _row("smaller tile", LATENCY, "tile_m:-", 0.4),
    _row("narrower tile", LATENCY, "tile_n:-", 0.5),
    _row("tile of all rows", COMPUTE, "tile_m:* tile_n:* swap:*", 0.4, "gemm"),
    _row("tile the other way", COMPUTE, "tile_m:* tile_n:*", 0.3),
    _row("longer K step", LATENCY, "tile_k:+", 0.4),
    _row("shorter K step", MEMORY, "tile_k:-", 0.3),
    _row("swap operands", COMPUTE, "swap:*", 0.5),
    _row("split K", LATENCY, "split_k:+", 0.5),
    _row("split K less", MEMORY, "split_k:-", 0.4),
    _row("parallel split K", LATENCY, "split_k:1 parallel_k:*", 0.5),
    _row("larger step of keys", COMPUTE, "tile_kv:+", 0.4),
    _row("smaller step of keys", LATENCY, "tile_kv:-", 0.4),
    _row("larger step", COMPUTE, "tile:+", 0.4),
    _row("smaller step", LATENCY, "tile:-", 0.4),
    _row("more tiles a warp", MEMORY, "tiles:+", 0.4),
    _row("fewer tiles a warp", LATENCY, "tiles:-", 0.5),
    _row("longer chunks", MEMORY, "chunk:+", 0.4),
    _row("shorter chunks", LATENCY, "chunk:-", 0.4),
    _row("chunks of whole sequences", LATENCY, "whole:*", 0.4),
    _row("share keys among CTAs", LATENCY, "parts:+", 0.5),
    _row("share keys among fewer", MEMORY, "parts:-", 0.4),
    _row("tiles of keys of a part", LATENCY, "least:*", 0.3),
    _row("longer spans", MEMORY, "span:+", 0.4),
    _row("shorter spans", LATENCY, "span:-", 0.4),
    _row("more queries a CTA", MEMORY, "queries:+", 0.4),
    _row("fewer queries a CTA", LATENCY, "queries:-", 0.4),
    _row("share heads of a group", MEMORY, "share:*", 0.5),
    _row("a box for heads that share", LATENCY, "query_box:*", 0.3),
    _row("what is a warp's own", LATENCY, "own:*", 0.3),
    _row("other heads of a warp", MEMORY, "heads:*", 0.3),
    _row("more rows of an expert", COMPUTE, "tile_t:+", 0.4),
    _row("fewer rows of an expert", LATENCY, "tile_t:-", 0.4),
    _row("larger tiles of weights", MEMORY, "up_tile:* down_tile:*", 0.4),
    _row("other waves of a tile", COMPUTE, "waves:*", 0.2),
    _row("waves of the second product", COMPUTE, "down_waves:*", 0.2),
    _row("rows of tokens copied", COMPUTE, "rows:*", 0.3, "moe"),
    _row("rows of the state", LATENCY, "rows:* row_tiles:*", 0.4, "gdn_prefill"),
    _row("rows of a CTA", LATENCY, "rows:*", 0.4, "rmsnorm"),
    _row("buffers of products", LATENCY, "buffers:*", 0.3),
    # warps, CTAs, clusters
    _row("more consumers", COMPUTE, "consumers:+", 0.4),
    _row("fewer consumers", LATENCY, "consumers:-", 0.3),
    _row("more warps", LATENCY, "warps:+", 0.4),
    _row("fewer warps", MEMORY, "warps:-", 0.3),
    _row("more helper warps", LATENCY, "helpers:*", 0.4),
    _row("other threads of a row", LATENCY, "row_threads:*", 0.5),
    _row("other threads of a CTA", LATENCY, "threads:*", 0.4),
    _row("pair of CTAs", COMPUTE, "cta_group:*", 0.5),
    _row("cluster, multicast", MEMORY, "cluster:*", 0.5),
    _row("more CTAs a row", LATENCY, "ctas_per_row:+", 0.4),
    _row("fewer CTAs a row", MEMORY, "ctas_per_row:-", 0.3),
    _row("more CTAs of a cluster", LATENCY, "ctas:+", 0.4),
    _row("fewer CTAs of a cluster", MEMORY, "ctas:-", 0.3),
    _row("CTAs that share a head", LATENCY, "head_ctas:*", 0.5),
    _row("CTAs that stride", LATENCY, "ctas_per_sm:*", 0.4),
    _row("resident CTAs", LATENCY, "resident:*", 0.3),
    _row("persistent CTAs", LATENCY, "persistent:1", 0.5),
    _row("CTAs of an SM, first product", LATENCY, "up_ctas:*", 0.4),
    _row("CTAs of an SM, second product", LATENCY, "down_ctas:*", 0.4),
    _row("a CTA a tile", LATENCY, "persistent:0", 0.3),
    _row("warp roles", LATENCY, "warp_specialized:*", 0.5),
    _row("register split", COMPUTE, "producer_regs:*", 0.3),
    _row("one warp produces", LATENCY, "producer_warps:*", 0.3),
    # the order of instructions
    _row("other MMA core", COMPUTE, "mma:*", 0.5),
    _row("other matrix core", COMPUTE, "core:*", 0.5),
    _row("pingpong or cooperative", COMPUTE, "schedule:*", 0.5),
    _row("accumulators in turn", LATENCY, "acc_buffers:*", 0.4),
    _row("other epilogue", MEMORY, "epilogue:*", 0.4),
    _row("softmax under the next scores", COMPUTE, "overlap:*", 0.5),
    _row("warpgroups by turns", COMPUTE, "turns:*", 0.4),
    _row("MMAs in flight", COMPUTE, "in_flight:*", 0.4),
    _row("pinned softmax", COMPUTE, "pin:*", 0.2),
    _row("rescale otherwise", COMPUTE, "rescale:*", 0.4),
    _row("lead of scores", COMPUTE, "lead:*", 0.4),
    _row("pieces of weights", COMPUTE, "pieces:*", 0.3),
    _row("what warps part", COMPUTE, "scores:*", 0.3),
    _row("where queries are kept", COMPUTE, "operand:*", 0.3),
    _row("operands of states", COMPUTE, "operands:* solve:*", 0.4),
    _row("precision of the solve", COMPUTE, "solve:*", 0.3),
    _row("precision of operands", COMPUTE, "operands:*", 0.3),
    _row("other solve blocks", LATENCY, "solve_block:*", 0.2),
    _row("state by wgmma", COMPUTE, "products:* rows:* row_tiles:*", 0.5, "gdn_prefill"),
    _row("relate tokens apart", LATENCY, "kernels:*", 0.5, "gdn_prefill"),
    _row("arrival of values", LATENCY, "arrival:*", 0.3),
    _row("reductions together or apart", LATENCY, "reduction:*", 0.3),
    _row("barriers of rows", LATENCY, "barrier:*", 0.3),
    _row("dependent launch", LATENCY, "dependent:*", 0.4),
    _row("earlier launch of the next", LATENCY, "trigger:*", 0.4),
    _row("weights asked for apart", LATENCY, "feeder:*", 0.3),
    _row("weights ahead into L2", MEMORY, "ahead:*", 0.4),
    _row("routing joined or apart", LATENCY, "route:*", 0.4),
    _row("tokens routed by a CTA", LATENCY, "route_tokens:*", 0.3),
    _row("warps that place rows", LATENCY, "place_warps:*", 0.3),
    _row("CTAs that add up a token", LATENCY, "sum_ctas:*", 0.3),
    # memory
    _row("rows by bulk copies", MEMORY, "path:*", 0.4),
    _row("gather otherwise", MEMORY, "gather:*", 0.5),
    _row("wider loads", MEMORY, "vector:+", 0.5),
    _row("narrower loads", LATENCY, "vector:-", 0.2),
    _row("where rows wait", MEMORY, "residency:*", 0.4),
    _row("when weights come", MEMORY, "weights:*", 0.3),
    _row("L2 promotion", MEMORY, "promotion:*", 0.3),
    _row("clusters apart along K", MEMORY, "apart:*", 0.3),
    _row("walk by columns", MEMORY, "walk:*", 0.4),
    _row("even grid", LATENCY, "grid:*", 0.4),
    _row("cache hints", MEMORY, "load_cache:*", 0.3),
    _row("L2 prefetch", MEMORY, "load_prefetch:*", 0.3),
    _row("L2 prefetch of latents", MEMORY, "prefetch:*", 0.3),
    _row("raster of tiles", MEMORY, "raster_group:*", 0.4),
    _row("order of CTAs", MEMORY, "order:*", 0.4),
    _row("precision of partial sums", MEMORY, "partials:*", 0.3),
    # second kernels, histograms
    _row("warps of the second kernel", LATENCY, "sum_warps:*", 0.3),
    _row("loads of the second kernel", LATENCY, "sum_chunks:*", 0.3),
    _row("warps share a block's chunks", LATENCY, "sum_split:*", 0.3),
    _row("blocks of a warp of it", LATENCY, "sum_blocks:*", 0.2),
    _row("digits of a histogram", LATENCY, "bits:*", 0.3),
    _row("copies of a histogram", LATENCY, "copies:*", 0.3),
    _row("room for candidates", LATENCY, "candidates:*", 0.3),
    _row("room for ranked entries", LATENCY, "room:*", 0.3),
    _row("vectors that a vote skips", LATENCY, "group:*", 0.3),
)  # fmt: skip


def applicable(family: Family, strategy: Strategy, axis: str) -> list[Move]:
    """The moves of an axis that change something here, the strongest evidence first."""
    found = [m for m in MOVES if m.axis == axis and m.fixed(family, strategy)]
    return sorted(found, key=lambda m: -m.strength)
