"""Prefill by wgmma: two warpgroups that multiply, and four warps that copy tokens into a ring."""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, Role, loop, role, when
from ptxflow.compiler.ir.storage import slot, value_of
from ptxflow.compiler.kernels.mla.hopper_decisions import (
    CONSUMER_REGS,
    COPIER_REGS,
    COPIERS,
    PARTS,
    WARPS,
)
from ptxflow.compiler.kernels.mla.hopper_group import SIDES, Warpgroup
from ptxflow.compiler.kernels.mla.hopper_parts import GROUP, LINES, Part, Parts
from ptxflow.compiler.kernels.mla.span import Span, Work
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Registers, traced

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
        roles.append(role(spec, *find, self._copy(span)))
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

    def _copy(self, span: Span) -> UOp:
        """A stage's tiles, one after another; each warp has some rows of them."""
        t = var("copied")
        return when(
            span.present & (span.first < span.end),
            self._ask_page(span, self.mine),
            loop(t, span.tiles, self._tile(span, t), start=self.mine, step=self.stages),
        )

    def _token(self, span: Span, t: UOp) -> UOp:
        return self.work.token(span, t, self.first + (LANE & (self.share - 1)))

    def _ask_page(self, span: Span, t: UOp) -> UOp:
        """The page of a row of the warp in a tile, a lane each."""
        table, index = self.work.entry(span, self._token(span, t))
        page = self.r("next_page", 1)
        return load_global(page, table, index, unread="dst")

    def _tile(self, span: Span, t: UOp) -> list[Body]:
        """The warp's rows of a tile, part by part; a part is handed over when it is there."""
        r = self.r
        row = self.work.row(value_of(r("page", 1)), self._token(span, t))
        out: list[Body] = [
            at.copy(r("page", 1), r("next_page", 1)),
            at.mov(r("row", 1), row),
            self._ask_page(span, t + self.stages),
        ]
        for i in range(self.share // LINES):
            own = (LANE >> 3) + LINES * i
            out.append(at.shuffle_from(r(f"row_of_{i}_", 1), r("row", 1), own))
        for part in self.parts:
            out += [part.ring.wait_empty(t), *self._lines(part, t), at.copies_commit()]
        for number, part in enumerate(self.parts):
            out.append(at.copies_wait(pending=PARTS - 1 - number))
            arrive = at.mbar_arrive(slot(part.ring.full, part.ring.stage(t)))
            out += [at.fence_proxy_async(), at.warp_sync(), single(arrive)]
        return out

    def _lines(self, part: Part, t: UOp) -> list[UOp]:
        out = []
        for i in range(self.share // LINES):
            group, half = divmod(i, GROUP // LINES)
            first = (self.first // GROUP + group) * part.group
            place = slot(part.tiles, part.ring.stage(t), first, part.group)
            index = value_of(self.r(f"row_of_{i}_", 1))
            out.append(part.copy(part.cache, place, half, index))
        return out
