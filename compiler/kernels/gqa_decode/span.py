"""What first kernels share: which chunk and heads a CTA has, and what it leaves.

Sums end up as an MMA's fragments: a warp of `warps` has every `warps`-th block of 16 dims of a
unit. The only chunk of a sequence goes to the output, others to the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, UOp, const, param, special
from ptxflow.compiler.ir.statements import KernelInfo
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.gqa_decode.decisions import columns_of_warp
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS
from ptxflow.compiler.kernels.gqa_decode.shape import QUAD, QUAD_BYTES, Shape
from ptxflow.compiler.launch import Param
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, Registers, emit, where

ENTRY = "gqa_decode"
CACHES = (("k_cache", "ptr"), ("v_cache", "ptr"))


class Span(Shape):
    """A chunk of a sequence, for some key heads and columns of their query heads."""

    warps: int  # that multiply

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, Registers())
        self.sequences = Sequences(self.page_size, self.chunk, wave=4)
        self.tile, self.tiles = int(s.tile), int(s.tiles)
        self.heads, self.stages = int(s.heads), int(s.stages)
        self.side = int(columns_of_warp(s.fields(), problem))
        self.units = [(h, c) for h in range(self.heads) for c in range(self.side)]
        self.place, share = self._split_ctas()
        sides = self.columns // self.side
        self.head, self.column = share // sides * self.heads, share % sides * self.side
        self.find, self.sequence = self.sequences.find(self.place, param("batch_size"))
        self.tokens = self.sequences.tokens

    # -- the kernel ----------------------------------------------------------------------------

    @property
    def caches(self) -> tuple[tuple[str, str], ...]:
        """Parameters by which keys and values are found."""
        return CACHES

    @property
    def maps(self) -> dict[str, Param]:
        """Tensor maps by parameter."""
        return {}

    @property
    def every_told_row(self) -> list[str]:
        """Registers that hold rows of the caches."""
        return []

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        tables = ["kv_indptr", "kv_indices", *(["kv_last_page_len"] if self.page_size > 1 else [])]
        pointers = (*tables, "sums", "stats", "output", "lse")
        numbers = (("sm_scale", "u32"), ("batch_size", "u32"))
        return (("q", "ptr"), *self.caches, *((t, "ptr") for t in pointers), *numbers)

    def info(self, warps: int, storage: Sequence[UOp]) -> KernelInfo:
        """Of a CTA of so many warps, with storage beside registers."""
        storage = (*storage, *self.sequences.storage, *self.r.storage)
        return KernelInfo(ENTRY, self.device.arch, warps, 1, self.params, storage)

    # -- which chunk ---------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """CTAs of a chunk."""
        return self.key_heads // self.heads * (self.columns // self.side)

    def _split_ctas(self) -> tuple[UOp, UOp]:
        """A CTA's chunk, and which of its parts."""
        if self.s.order == "heads":
            return CTAID // self.parts, CTAID % self.parts
        places = special("ctas") // self.parts
        return CTAID % places, CTAID // places

    def find_span(self) -> list[UOp]:
        """Every warp finds the sequence, and its length."""
        return [
            *([at.grid_launch_dependents()] if self.s.dependent else []),
            *self.find,
            *self.sequences.lengths(self.sequence),
        ]

    @property
    def start(self) -> UOp:
        """The chunk's first token, of the sequence's."""
        return (self.place - self.sequences.first_place(self.sequence)) * self.chunk

    def query_row(self, h: int) -> UOp:
        """The first query head of a key head, of all sequences' query heads."""
        return self.sequence * self.query_heads + (self.head + h) * self.group

    # -- what it leaves ------------------------------------------------------------------------

    def whole(self, u: int, i: int) -> Float32:
        """The sums of all warps, of a warp's i-th block of a unit."""
        raise NotImplementedError

    def all_stats(self, u: int) -> Float32:
        """Maxima and row sums of all warps, two each."""
        raise NotImplementedError

    def add_probs(self, u: int) -> None:
        """Those row sums, where they are to be made."""

    @property
    def mine(self) -> range:
        """Of every unit a warp takes as many blocks, others' in between."""
        return range(self.blocks // self.warps)

    def block(self, i: int) -> UOp:
        return WARP + i * self.warps if self.warps > 1 else const(i)

    def put(self, u: int) -> None:
        """A unit to the output, where the chunk is its sequence's only one, or to the workspace."""
        with where(self.tokens < self.chunk + 1):
            self._put_output(u)
        with where(self.tokens >= self.chunk + 1):
            self._put_sums(u)

    def _put_output(self, u: int) -> None:
        h, c = self.units[u]
        row, column = self.query_row(h), self.column + c
        row_max, row_sum = self.all_stats(u)[:2], self.all_stats(u)[2:]
        self.add_probs(u)
        share = self.share(row_sum, row_max)
        for i in self.mine:
            whole = self.whole(u, i)
            whole *= share
            self.put_output(row, column, self.block(i), whole)
        # one warp says of all units where the last of a key head has fewer heads than the others
        teller = u % self.warps if self.side == 1 or self.group % COLUMNS == 0 else 0
        with where(WARP.eq(teller)):
            self.put_lse(row, column, row_sum, row_max)

    def _put_sums(self, u: int) -> None:
        h, c = self.units[u]
        row = self.unit(self.place, self.head + h, self.column + c)
        for i in self.mine:
            index, place = self.sums_at(row, self.block(i))
            emit(store_global("sums", index, self.whole(u, i).slot, place, element=QUAD_BYTES))
        index, place = self.stats_at(row, LANE)
        with where(WARP.eq(u % self.warps)):
            self.add_probs(u)
            stats = self.all_stats(u).slot
            emit(store_global("stats", index, stats, place, LANE < QUAD, element=QUAD_BYTES))
