"""Prefill by wgmma: two warpgroups that multiply, and four warps that copy tokens into a ring."""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, var
from ptxflow.compiler.ir.statements import KernelInfo, Role, loop, role
from ptxflow.compiler.ir.storage import slot
from ptxflow.compiler.kernels.mla.hopper_decisions import (
    CONSUMER_REGS,
    COPIER_REGS,
    COPIERS,
    PARTS,
    WARPS,
)
from ptxflow.compiler.kernels.mla.hopper_group import SIDES, Warpgroup
from ptxflow.compiler.kernels.mla.hopper_parts import GROUP, LINES, Parts
from ptxflow.compiler.kernels.mla.span import Span, Work
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Registers, emit, repeat, traced, where

COPYING = "g_"  # before the registers of the warps that copy


class Hopper(Parts):
    """The kernel."""

    prefixes = (*SIDES, COPYING)

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.sides = [Warpgroup(self, side) for side in range(2)]
        self.r, self.work = Registers(COPYING), Work(self, COPYING)
        copier = WARP - WARPS
        self.mine = copier % self.stages  # the stage that a warp has a part of
        self.share = self.tile * self.stages // COPIERS  # rows
        self.first = copier // self.stages * self.share

    def build(self) -> UOp:
        """The lowered kernel."""
        roles = [at.grid_launch_dependents()] if self.split and self.s.dependent else []
        for number, (name, side) in enumerate(zip(("left", "right"), self.sides, strict=True)):
            find, span = side.work.find()
            multiply = traced(side.multiply, span)
            some = loop(var(f"{side.prefix}some"), self._any(span), multiply)
            spec = Role(name, 4 * number, WARPS // 2, regs=CONSUMER_REGS)
            roles.append(role(spec, *find, some))
        find, span = self.work.find()
        spec = Role("copy", WARPS, COPIERS, regs=COPIER_REGS)
        roles.append(role(spec, *find, traced(self._copy, span)))
        storage = (
            *self.storage,
            *(each for side in self.sides for each in side.storage),
            *self.work.storage,
            *self.r.storage,
        )
        name, arch = self.problem.family, self.device.arch
        return finish(KernelInfo(name, arch, WARPS + COPIERS, 1, self.params, storage), *roles)

    def _any(self, span: Span) -> UOp:
        """1 where there are queries, and some of what they see, else 0: wgmma may stand in a loop,
        and under no condition."""
        some = (span.asked - span.asked.min(self._first(span))).min(1)
        return some.min(span.tiles) if self.split else some

    def _first(self, span: Span) -> UOp:
        """The CTA's first query of its sequence's."""
        return span.reach - span.tokens - 1

    # -- copying -------------------------------------------------------------------------------

    def _copy(self, span: Span) -> None:
        """A stage's tiles, one after another; each warp has some rows of them."""
        t = var("copied")
        self.page, self.next_page = self.r.uint32(), self.r.uint32()
        lines = range(self.share // LINES)  # a lane's, one of every four rows
        self.lane_rows = [self.r.uint32(name=f"row_of_{i}_") for i in lines]
        with where(span.present & (span.first < span.end)):
            self._ask_page(span, self.mine)
            with repeat(t, span.tiles, self.mine, self.stages):
                self._tile(span, t)

    def _token(self, span: Span, t: UOp) -> UOp:
        return self.work.token(span, t, self.first + (LANE & (self.share - 1)))

    def _ask_page(self, span: Span, t: UOp) -> None:
        """The page of a row of the warp in a tile, a lane each."""
        table, index = self.work.entry(span, self._token(span, t))
        emit(load_global(self.next_page.slot, table, index, unread="dst"))

    def _tile(self, span: Span, t: UOp) -> None:
        """The warp's rows of a tile, part by part; a part is handed over when it is there."""
        self.page.set(self.next_page)
        row = self.r.uint32(self.work.row(self.page.value, self._token(span, t)), "row")
        self._ask_page(span, t + self.stages)
        for i, mine in enumerate(self.lane_rows):
            emit(at.shuffle_from(mine.slot, row.slot, (LANE >> 3) + LINES * i))
        for part in self.parts:
            emit(part.ring.wait_empty(t))
            for i, mine in enumerate(self.lane_rows):
                group, half = divmod(i, GROUP // LINES)
                first = (self.first // GROUP + group) * part.group
                place = slot(part.tiles, part.ring.stage(t), first, part.group)
                emit(part.copy(part.cache, place, half, mine.value))
            emit(at.copies_commit())
        for number, part in enumerate(self.parts):
            emit(part.ring.landed(t, PARTS - 1 - number))
