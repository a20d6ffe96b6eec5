"""Queries packed over sequences, as kernels find them: tiles of queries, none across sequences.

Tile i of sequence b is at place begin(b) // tile + b + i: see `Search`.
"""

from __future__ import annotations

from ptxflow.compiler.ir import UOp, Value, value, value_of
from ptxflow.compiler.kernels.attention.sequences import Search, load_index


class QueryTiles:
    """Tiles of `tile` queries of one sequence; `prefix` keeps registers of two searches apart.

    Tensor: qo_indptr [sequences + 1].
    """

    def __init__(self, tile: int, prefix: str = ""):
        self.tile, self.search = tile, Search("qo_indptr", tile, prefix=prefix + "q_")
        # the registers with where a sequence's queries begin and end
        self._bounds = self.search.register("begin"), self.search.register("end")
        self.storage = (*self.search.storage, *self._bounds)
        self.begin = value_of(self._bounds[0])  # the row of its first query
        self.count = value_of(self._bounds[1]) - self.begin  # how many queries it has

    def places(self, sequences: str) -> str:
        """The most tiles there can be, as an expression of the launch."""
        return f"total_q // {self.tile} + {sequences}"

    def find(self, place: Value, count: UOp) -> tuple[list[UOp], UOp]:
        """Statements that find the sequence of a place, and the sequence; `count`: of sequences."""
        return self.search.find(place, count)

    def lengths(self, sequence: UOp) -> list[UOp]:
        """Statements that load where a sequence's queries begin and end."""
        return [
            load_index(register, "qo_indptr", sequence + i)
            for i, register in enumerate(self._bounds)
        ]

    def first(self, place: Value, sequence: UOp) -> UOp:
        """The first query of the tile at a place, of its sequence's."""
        return (value(place) - self.search.place(self.begin, sequence)) * self.tile
