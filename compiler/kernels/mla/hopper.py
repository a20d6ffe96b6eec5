"""Prefill by wgmma: two warpgroups that multiply, and four warps that copy tokens into a ring."""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, Role, Statement, Value, loop, role, var
from ptxflow.compiler.kernels.mla.hopper_decisions import CONSUMER_REGS, COPIER_REGS, COPIERS, WARPS
from ptxflow.compiler.kernels.mla.hopper_group import SIDES, Halves, Warpgroup
from ptxflow.compiler.kernels.mla.hopper_parts import COPYING, Copier
from ptxflow.compiler.kernels.mla.span import PLANNING, Span, Work
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.values import traced


class Hopper(Halves):
    """The kernel."""

    prefixes = (*SIDES, COPYING)

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.sides = [Warpgroup(self, side) for side in range(2)]
        self.planning = Work(self, PLANNING)
        self.copier = Copier(self, WARPS, Work(self, COPYING))

    def build(self) -> Statement:
        """The lowered kernel."""
        roles = [at.grid_launch_dependents()] if self.split and self.s.dependent else []
        roles += self.planning.plan() if self.split else []
        for number, (name, side) in enumerate(zip(("left", "right"), self.sides, strict=True)):
            find, span = side.work.find()
            multiply = traced(side.multiply, span)
            some = loop(var(f"{side.prefix}some"), self._any(span), multiply)
            spec = Role(name, 4 * number, WARPS // 2, regs=CONSUMER_REGS)
            roles.append(role(spec, *find, some))
        find, span = self.copier.work.find()
        spec = Role("copy", WARPS, COPIERS, regs=COPIER_REGS)
        roles.append(role(spec, *find, traced(self.copier.copy, span)))
        storage = (
            *self.storage,
            *(each for side in self.sides for each in side.storage),
            *self.copier.storage,
            *(self.planning.storage if self.split else ()),
        )
        name, arch = self.problem.family, self.device.arch
        return finish(KernelInfo(name, arch, WARPS + COPIERS, 1, self.params, storage), *roles)

    def _any(self, span: Span) -> Value:
        """1 where there are queries, and some of what they see, else 0: wgmma may stand in a loop,
        and under no condition."""
        if self.split:
            return span.tiles.min(1)
        return (span.asked - span.asked.min(self._first(span))).min(1)

    def _first(self, span: Span) -> Value:
        """The CTA's first query of its sequence's."""
        return span.reach - span.tokens - 1
