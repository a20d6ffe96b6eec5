"""The kernels that carry a state on sm_90a by wgmma: main warps are warpgroups of 64 rows.

A of all products with the state is in registers: the state's terms in S K^T and S Q^T, the updates'
in X^T K, whose sums are the state itself. S Q^T is on its way while updates are solved, X^T K while
outputs are. What tokens of a chunk do to each other is as by mma.sync.
"""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, Role, loop, role, when
from ptxflow.compiler.ir.nodes import LANE, Statement, Value, const, var
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.decisions import UNIT
from ptxflow.compiler.kernels.gdn_prefill.kernel import ENTRY, Terms
from ptxflow.compiler.kernels.gdn_prefill.packets import Carry
from ptxflow.compiler.kernels.gdn_prefill.shape import Gate
from ptxflow.compiler.kernels.gdn_prefill.swizzled import WIDE, Swizzled
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import QUAD, k_major, rows_along_k, wgmma
from ptxflow.compiler.tile.values import Float32, emit, traced

HANDING = 2  # the named barrier of all warps


class Hopper(Swizzled):
    """The only kernel. It stores outputs of a chunk while it multiplies the next."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.turns = int(decisions.turns(s.fields(), problem, device))
        split = decisions.SPLIT.get((self.mains, self.helpers), (0, 0))
        self.main_registers, self.helper_registers = split
        self.outputs = [self.r.uint32(width=QUAD) for _ in range(self.units)]

    # -- multiplying ---------------------------------------------------------------------------

    def _by_state(self, n: Value, turn: int, pull: Float32, read: Float32) -> None:
        """S K^T and S Q^T along the keys of a turn, a group each."""
        each = self.steps // self.turns
        steps = range(turn * each, (turn + 1) * each)
        operands = {i: self.terms(self._unit(self.state[0], i), self.parts) for i in steps}
        emit(at.wgmma_fence())
        for ring, sums in ((self.k, pull), (self.q, read)):
            for step, terms in operands.items():
                b = k_major(self.tile, ring, n % self.stages, step * UNIT)
                for p, a in enumerate(terms):
                    emit(wgmma(sums.slot, a.slot, b, int(step + p > 0), self.operand))
            emit(at.wgmma_commit())

    def _by_updates(self, n: Value, leaving: Terms) -> None:
        """X^T K, added to the state."""
        emit(at.wgmma_wait(pending=0), at.wgmma_fence())
        for unit in range(self.units):
            b = rows_along_k(self.tile, self.k, n % self.stages, unit * UNIT, 0, self.size // WIDE)
            for a in leaving[0, unit]:
                emit(wgmma(self.state[0].slot, a.slot, b, 1, self.operand))
        emit(at.wgmma_commit())

    def advance(self, n: Value) -> None:
        pull, read = (self.r.float32(self.chunk // 2) for _ in range(2))
        for turn in range(self.turns):
            if turn:
                emit(at.wgmma_wait(pending=0))
            self._by_state(n, turn, pull, read)
        before = n.min(1)
        self._put_outputs(n - before, self.end * before)
        emit(at.warp_sync(), at.wgmma_wait(pending=1))
        self._decay(n)
        self._differences(n, [pull])
        updates, leaving = self._solve_updates(n, [pull])
        self._by_updates(n, leaving)
        emit(at.warp_sync())
        self._outputs(n, [read], updates)
        emit(at.wgmma_wait(pending=0))

    def _decay(self, n: Value) -> None:
        """2^G S."""
        whole = self.r.float32()
        emit(at.ld_shared(whole.slot, self.gate(n, Gate.TOTAL), LANE << 2))
        emit(at.scale_f32(self.state[0].slot, self.state[0].slot, whole.slot))

    # -- outputs -------------------------------------------------------------------------------

    def _store(self, n: Value, t: int, unit: int, sums: Float32) -> None:
        for kept, each in zip(self.outputs[unit], self._turn(sums), strict=True):
            kept.set(each)

    def _put_outputs(self, n: Value, end: Value) -> None:
        for unit, kept in enumerate(self.outputs):
            self._leave(n, 0, unit, [kept[i] for i in range(QUAD)], end)

    def _no_outputs(self) -> None:
        """What the first chunk finds, and does not store."""
        for kept in self.outputs:
            emit(at.mov(kept.slot, 0, unread="dst"))

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        n, ahead = var("chunk"), var("ahead")
        hand = at.named_sync(id=HANDING, threads=decisions.WARP * self.warps)
        main = role(
            Role("main", 0, self.mains, regs=self.main_registers),
            self.load_state(),
            traced(self._no_outputs),
            loop(n, self.chunks, hand, traced(self.advance, n), rolled=True),
            when(const(0) < self.chunks, traced(self._put_outputs, self.chunks - 1, self.end)),
            self.store_state(),
        )
        helpers = role(
            Role("helpers", self.mains, self.helpers, regs=self.helper_registers),
            at.grid_wait() if self.waits else None,
            when(const(0) < self.chunks, traced(self.before)),
            loop(
                ahead,
                self.chunks,
                self.ask_ahead(ahead),
                traced(self.relate, ahead),
                hand,
                rolled=True,
            ),
        )
        info = KernelInfo(ENTRY, self.device.arch, self.warps, 1, self.params, self.storage)
        info = replace(info, dependent=self.waits)
        return finish(info, *self.find_bounds(), main, helpers)


class HopperCarry(Hopper, Carry):
    """The second of two kernels."""
