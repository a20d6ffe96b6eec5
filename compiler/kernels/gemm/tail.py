"""Tiles behind the last full wave of clusters, which all clusters share along K (stream-K).

Steps of K are counted through these tiles, the last of which is tile 0, and dealt out evenly: to a
cluster those of one tile or of two. Its sums of either are a part, in a workspace; the second
kernel adds up the parts of each tile in order (`combine.py`). No cluster waits for another.
"""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.ir.nodes import CTA_RANK, LANE, UOp, Value
from ptxflow.compiler.tile.tensors import Place, store_global
from ptxflow.compiler.tile.values import Float32, emit

PARTS = "parts"  # the workspace
QUAD = 4  # float32 sums of a lane that one access moves
MOST_K = 1 << 20  # elements, so that steps of K times clusters have 32 bits


def gains(left: Any, clusters: Any) -> Any:
    """Whether sharing the tiles that are left over gains more than it costs: up to three quarters
    of a wave. Numbers may be integers, arrays or values of a kernel."""
    return clusters * 3 >= left * 4


class Tail:
    """The division, from the number of tiles, steps of K of each, and clusters of `ctas`; `most` of
    them share a tile, on average and at most. Where that gains nothing they are computed whole."""

    def __init__(self, tiles: UOp, steps: UOp, clusters: UOp, ctas: int, most: int):
        self.tiles, self.steps, self.clusters, self.ctas = tiles, steps, clusters, ctas
        left = tiles % clusters
        some: UOp = gains(left, clusters)
        self.shared = left * some  # tiles
        self.sharers = (self.shared * most).min(clusters)
        self.all_steps = self.shared * steps
        self.whole = tiles - self.shared

    def first(self, sharer: UOp, of: UOp) -> UOp:
        """Where it begins among all steps, or tiles; of those behind the last sharer the end."""
        return sharer.min(self.sharers) * of // (self.sharers + self.sharers.eq(0))

    def sharer(self, step: UOp) -> UOp:
        """Who has a step, of which there are some."""
        return ((step + 1) * self.sharers - 1) // self.all_steps

    def tile(self, shared: UOp) -> UOp:
        """Among all, the number of a shared one."""
        return self.tiles - 1 - shared

    def row(self, part: UOp) -> UOp:
        """Of the workspace, where a part of this CTA is; the part of a sharer of a shared tile is
        number sharer + tile. The first one is at the end, wherever grids end."""
        row = (self.clusters * 2 - 1 - part) * self.ctas
        return row + CTA_RANK if self.ctas > 1 else row


class Share:
    """What one cluster works on, in turn: whole tiles, then its part of a shared one or two."""

    def __init__(self, tail: Tail, cluster: UOp):
        self.tail, self.cluster = tail, cluster
        self.whole = (tail.whole + tail.clusters - 1 - cluster) // tail.clusters
        # the first shared tile and the last or the one behind it; steps from the first one's start
        self.tile, last = (tail.first(cluster + i, tail.shared) for i in (0, 1))
        self.begin, self.end = (
            tail.first(cluster + i, tail.all_steps) - self.tile * tail.steps for i in (0, 1)
        )
        tiles = last - self.tile
        self.count = self.whole + tiles + (tiles * tail.steps < self.end)

    @property
    def all_steps(self) -> UOp:
        return self.whole * self.tail.steps + self.end - self.begin

    def number(self, turn: UOp) -> UOp:
        """The tile of a turn, among all."""
        own = self.cluster + turn * self.tail.clusters
        shared = self.tail.tile(self.tile + turn - self.whole)
        return own + (turn >= self.whole) * (shared - own)

    def first(self, turn: UOp) -> UOp:
        """Step of K of a turn's tile."""
        return self.begin * turn.eq(self.whole)

    def steps(self, turn: UOp) -> UOp:
        """So many from there on."""
        last = self.whole * self.tail.steps + self.end
        return (last - turn * self.tail.steps).min(self.tail.steps) - self.first(turn)

    def before(self, turn: UOp) -> UOp:
        """Steps of all turns before."""
        return turn * self.tail.steps - self.begin * (self.whole < turn)

    def publish(
        self, turn: UOp, sums: Float32, warps: int, warp: Value, quads: int, first: int = 0
    ) -> None:
        """Some of a lane's sums of a part, from a quad on, to the workspace: see `quad`."""
        row = self.tail.row(self.cluster + self.tile + turn - self.whole)
        for i, held in enumerate(quads_of(sums), first):
            index, place = quad(row, warps, warp, quads, i)
            emit(store_global(PARTS, index, held.slot, place, element=4 * QUAD))


def quad(row: UOp, warps: int, warp: Value, quads: int, number: Value) -> tuple[UOp, Place]:
    """A lane's place, in units of a quad, and what its warp accesses: one of the `quads` of each of
    the `warps` that hold a tile."""
    line = warp * quads + number
    wide = 32 * QUAD
    return (row * (warps * quads) + line) * 32 + LANE, (row, line * wide, 1, wide)


def quads_of(values: Float32) -> list[Float32]:
    return [values[i : i + QUAD] for i in range(0, values.n, QUAD)]
