"""The kernels of sparse latent attention: those of latent attention, over the rows of lists.

Rows that no entry names are zeros in shared memory, whatever the cache holds, and their scores are
minus infinity. The warps that multiply look entries up themselves, while rows are on their way.
"""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.ir import LANE, Body, UOp, value_of
from ptxflow.compiler.kernels.dsa_sparse.lists import LIST, Lists
from ptxflow.compiler.kernels.mla.attend import Attend, Part
from ptxflow.compiler.kernels.mla.combine import Combine, Parts
from ptxflow.compiler.kernels.mla.decisions import MMA_TOKENS
from ptxflow.compiler.kernels.mla.span import Rows, Span
from ptxflow.compiler.tile.tensors import load_global


class AttendToLists(Attend):
    """The first kernel."""

    def rows_of(self, prefix: str) -> Rows:
        return Lists(self)

    @property
    def found_by(self) -> tuple[str, ...]:
        return (LIST,)

    def parts_of_tokens(self) -> list[Part]:
        """L2 brings more than is asked for at a time of latents, which are long."""
        latents, ropes = super().parts_of_tokens()
        return [replace(latents, prefetch=int(self.s.prefetch)), ropes]

    def _look(self, t: UOp, span: Span) -> Body:
        """The entries of a lane's two tokens."""
        out = list[UOp]()
        for half in range(2):
            number = self.row * MMA_TOKENS + 8 * half + (LANE >> 2)
            table, index = self.work.entry(span, self.work.token(span, t, number))
            out.append(load_global(self._entry(half), table, index))
        return out

    def _entry(self, half: int) -> UOp:
        return self.r(f"entry{half}", 1)

    def _counts(self, seen: UOp, half: int) -> UOp:
        lists = Lists(self)
        named = lists.there(value_of(self._entry(half)))
        return named if lists.even else seen & named

    def _leave(self, span: Span) -> None:
        if self.split:
            self._hand_on()
        else:
            self._put(span)


class CombineChunks(Combine):
    """The second kernel."""

    def parts(self) -> tuple[Parts, tuple[UOp, ...], tuple[str, ...]]:
        return Lists(self), (), ()
