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
from ptxflow.compiler.ir.nodes import LANE, WARP, Statement, Value, const, var
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.decisions import UNIT
from ptxflow.compiler.kernels.gdn_prefill.kernel import ENTRY, Terms
from ptxflow.compiler.kernels.gdn_prefill.packets import Carry
from ptxflow.compiler.kernels.gdn_prefill.shape import Gate
from ptxflow.compiler.kernels.gdn_prefill.swizzled import WIDE, Swizzled
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import k_major, rows_along_k, wgmma
from ptxflow.compiler.tile.values import Float32, emit, traced

HANDING = 2  # the named barrier of all warps


class Hopper(Swizzled):
    """The only kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        asked = s.fields(), problem, device
        self.turns, self.resident = (
            int(x(*asked)) for x in (decisions.turns, decisions.wgmma_ctas)
        )
        split = decisions.SPLIT[self.mains] if decisions.splits(*asked) else (0, 0)
        self.main_registers, self.helper_registers = split

    def tile_number(self, t: int) -> Value:
        """A tile of each warp of a warpgroup are the rows of a wgmma."""
        return WARP + t * self.mains

    # -- multiplying ---------------------------------------------------------------------------

    def _by_state(self, n: Value, t: int, steps: range, pull: Float32, read: Float32) -> None:
        """S K^T and S Q^T of a tile along some keys, with a group each."""
        operands = {i: self.terms(self._unit(self.state[t], i), self.parts) for i in steps}
        emit(at.wgmma_fence())
        for ring, sums in ((self.k, pull), (self.q, read)):
            for step, terms in operands.items():
                b = k_major(self.tile, ring, n % self.stages, step * UNIT)
                for p, a in enumerate(terms):
                    emit(wgmma(sums.slot, a.slot, b, int(step + p > 0), self.operand))
            emit(at.wgmma_commit())

    def _multiply_state(self, n: Value) -> list[list[Float32]]:
        """S K^T; S Q^T of the last tile may be on its way."""
        pull, read = ([self.r.float32(self.chunk // 2) for _ in self.tiles] for _ in range(2))
        each = self.steps // self.turns
        for t in self.tiles:
            for first in range(0, self.steps, each):
                self._by_state(n, t, range(first, first + each), pull[t], read[t])
                last = t == self.tiles[-1] and first + each == self.steps
                emit(at.wgmma_wait(pending=int(last)))
        return [pull, read]

    def _start_update(self, n: Value, leaving: Terms) -> None:
        """2^G S + X^T K."""
        emit(at.wgmma_fence())
        for unit in range(self.units):
            b = rows_along_k(self.tile, self.k, n % self.stages, unit * UNIT, 0, self.size // WIDE)
            for t, state in enumerate(self.state):
                for a in leaving[t, unit]:
                    emit(wgmma(state.slot, a.slot, b, 1, self.operand))
        emit(at.wgmma_commit())

    def _decay(self, n: Value) -> None:
        whole = self.r.float32()
        emit(at.ld_shared(whole.slot, self.gate(n, Gate.TOTAL), LANE << 2))
        for state in self.state:
            emit(at.scale_f32(state.slot, state.slot, whole.slot))

    def advance(self, n: Value) -> None:
        pull, read = self._multiply_state(n)
        self._decay(n)
        self._differences(n, pull)
        emit(at.wgmma_wait(pending=0))
        updates, leaving = self._solve_updates(n, pull)
        self._start_update(n, leaving)
        self._outputs(n, read, updates)
        emit(at.wgmma_wait(pending=0))

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        n, ahead = var("chunk"), var("ahead")
        hand = at.named_sync(id=HANDING, threads=decisions.WARP * self.warps)
        main = role(
            Role("main", 0, self.mains, regs=self.main_registers),
            self.load_state(),
            loop(n, self.chunks, hand, traced(self.advance, n), rolled=True),
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
        info = replace(info, dependent=self.waits, resident=self.resident)
        return finish(info, *self.find_bounds(), main, helpers)


class HopperCarry(Hopper, Carry):
    """The second of two kernels."""
