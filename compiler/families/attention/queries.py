"""Queries packed over sequences, as kernels find them: tiles of queries, none across sequences.

Tile i of sequence b is at place begin(b) // tile + b + i: see `sequences`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import (
    LANE,
    UOp,
    Value,
    frag,
    global_tensor,
    held,
    loop,
    param,
    rectangle,
    slot,
    value,
    var,
)

WORD = 4  # bytes of an index


@dataclass(frozen=True)
class QueryTiles:
    """Tiles of `tile` queries of one sequence; `prefix` keeps registers of two searches apart.

    Tensor: qo_indptr [sequences + 1].
    """

    tile: int
    prefix: str = ""

    def register(self, name: str) -> UOp:
        return frag(f"{self.prefix}q_{name}", 1, "b32")

    @property
    def storage(self) -> tuple[UOp, ...]:
        return tuple(map(self.register, ("start", "before", "which", "begin", "end")))

    def places(self, sequences: str) -> str:
        """The most tiles there can be, as an expression of the launch."""
        return f"total_q // {self.tile} + {sequences}"

    def find(self, place: Value, count: UOp) -> tuple[list[UOp], UOp]:
        """Statements that find the sequence of a place, and the sequence; `count`: of sequences."""
        start, before, which = map(self.register, ("start", "before", "which"))
        base = var(self.prefix + "q_base")
        there = base + LANE
        inside = there < count
        counted = inside & (held(start) // self.tile + there < value(place) + 1)
        body = [
            at.mov(slot(before), 0),
            loop(
                base,
                count,
                _load(start, there, inside),
                at.count_lanes(slot(before), counted),
                step=32,
            ),
            at.copy(slot(which), slot(before)),
        ]
        return body, held(which) - 1

    def lengths(self, sequence: UOp) -> list[UOp]:
        """Statements that load where a sequence's queries begin and end."""
        return [_load(self.register("begin"), sequence), _load(self.register("end"), sequence + 1)]

    @property
    def begin(self) -> UOp:
        """The row of its first query."""
        return held(self.register("begin"))

    @property
    def count(self) -> UOp:
        """How many queries it has."""
        return held(self.register("end")) - self.begin

    def first(self, place: Value, sequence: UOp) -> UOp:
        """The first query of the tile at a place, of its sequence's."""
        return (value(place) - (self.begin // self.tile + sequence)) * self.tile


def _load(register: UOp, index: Value, inside: Value = 1) -> UOp:
    place = rectangle(global_tensor("qo_indptr"), 0, 0, 1, 1)
    return at.ld_global(slot(register), param("qo_indptr"), index, inside, place, element=WORD)
