"""The kernels that carry a state on sm_100a: one thread multiplies with the state by tcgen05.

Rows of the state are those of its MMAs, of which a warp holds 16 at a time as fragments of
mma.sync. A chunk begins with the state's terms in tensor memory: S K^T and S Q^T come from there
and, when updates are there too, X^T K, which is added to the state in registers. What tokens of a
chunk do to each other is as by mma.sync.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import elect, mbar, slot, tmem
from ptxflow.compiler.ir.nodes import WARP, Slot, Statement, Storage, Value, const
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.decisions import UNIT
from ptxflow.compiler.kernels.gdn_prefill.kernel import Held, Terms
from ptxflow.compiler.kernels.gdn_prefill.packets import Carry
from ptxflow.compiler.kernels.gdn_prefill.swizzled import WIDE, Swizzled
from ptxflow.compiler.tile.operands import k_major, rows_along_k, tcgen05
from ptxflow.compiler.tile.values import Float32, UInt32, emit, traced, where

MAINS = 2  # the named barrier of warps that hold the state
STEP = UNIT // 2  # columns of tensor memory of 16 elements of a term


class Blackwell(Swizzled):
    """The only kernel."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.held = tmem("terms", self.size // 2, self.parts)
        self.leaving = tmem("leaving", self.chunk // 2, self.parts)
        self.added = tmem("added", self.size)  # first S K^T, then X^T K
        self.reads = tmem("reads", self.chunk)
        self.pulled, self.read, self.summed = (
            mbar(name, 1, 1) for name in ("pulled", "read", "summed")
        )

    @property
    def storage(self) -> tuple[Storage, ...]:
        memory = (self.added, self.reads, self.held, self.leaving)  # sums on multiples of 32
        return (*super().storage, self.pulled, self.read, self.summed, *memory)

    # -- multiplying ---------------------------------------------------------------------------

    def _by_state(self, n: Value) -> None:
        """One thread's: S K^T and S Q^T."""
        emit(at.tcgen05_fence_after())
        d = slot(self.added, 0, 0, self.chunk)
        for into, ring, bar in ((d, self.k, self.pulled), (slot(self.reads), self.q, self.read)):
            for step in range(0, self.size, UNIT):
                b = k_major(self.tile, ring, n % self.stages, step)
                for p in range(self.parts):
                    a, more = slot(self.held, p, step // 2, STEP), int(step + p > 0)
                    emit(tcgen05(into, a, b, more, self.rows, self.operand))
            emit(at.tcgen05_commit(slot(bar)))

    def _by_updates(self, n: Value) -> None:
        """One thread's: X^T K."""
        emit(at.tcgen05_fence_after())
        for token in range(0, self.chunk, UNIT):
            b = rows_along_k(self.tile, self.k, n % self.stages, token, 0, self.size // WIDE)
            for p in range(self.parts):
                a, more = slot(self.leaving, p, token // 2, STEP), int(token + p > 0)
                emit(tcgen05(slot(self.added), a, b, more, self.rows, self.operand))
        emit(at.tcgen05_commit(slot(self.summed)))

    # -- between -------------------------------------------------------------------------------

    def tile_number(self, t: int) -> Value:
        """Warps that share a quarter of tensor memory have a half of it each."""
        return (WARP & 3) * 2 + (WARP >> 2) if self.mains > 4 else super().tile_number(t)

    def _lane(self, t: int) -> Value:
        """Where a tile's 16 lanes of tensor memory begin; of 64 rows, 16 are in each quarter."""
        return self.tile_number(t) << (21 if self.rows == 4 * UNIT else 20)

    def _await(self, n: Value, bar: Storage) -> None:
        emit(at.mbar_wait(slot(bar), n & 1), at.tcgen05_fence_after())

    def _take(self, columns: Slot) -> list[Float32]:
        """What a product left of the warp's tiles."""
        out = [self.r.float32(columns.arg // 2) for _ in self.tiles]
        for t, held in enumerate(out):
            emit(at.tcgen05_ld(held.slot, columns, self._lane(t), shape="16x256b"))
        emit(at.tcgen05_wait_ld())
        return out

    def _put(self, storage: Storage, t: int, first: int, terms: list[UInt32]) -> None:
        """Terms of a tile from an element on."""
        for p, term in enumerate(terms):
            columns = slot(storage, p, first // 2, 2 * term.n)
            emit(at.tcgen05_st(columns, term.slot, self._lane(t), shape="16x128b"))

    def _put_state(self, n: Value) -> None:
        """What chunk n begins with, if there is one."""
        with where(n < self.chunks):
            for t, state in enumerate(self.state):
                for i in range(0, self.size, WIDE):
                    some = state[i // 2 : (i + WIDE) // 2]
                    self._put(self.held, t, i, self.terms(some, self.parts))
            emit(at.tcgen05_wait_st())
        emit(at.tcgen05_fence_before())

    def load_state(self) -> list[Statement]:
        return [*super().load_state(), *traced(self._put_state, const(0))]

    def advance(self, n: Value) -> None:
        emit(elect(WARP.eq(0), traced(self._by_state, n)))
        self._await(n, self.pulled)
        pull = self._take(slot(self.added, 0, 0, self.chunk))
        self._differences(n, pull)
        updates, _ = self._solve_updates(n, pull)
        emit(at.tcgen05_wait_st(), at.tcgen05_fence_before())
        emit(at.named_sync(id=MAINS, threads=decisions.WARP * self.mains))
        emit(elect(WARP.eq(0), traced(self._by_updates, n)))
        self._await(n, self.read)
        self._outputs(n, self._take(slot(self.reads)), updates)
        self._add_updates(n)
        self._put_state(n + 1)

    def _make_updates(
        self, n: Value, unit: int, solved: Held, updates: Terms, leaving: Terms
    ) -> None:
        super()._make_updates(n, unit, solved, updates, leaving)
        for t in self.tiles:
            self._put(self.leaving, t, unit * UNIT, leaving.pop((t, unit)))

    def _add_updates(self, n: Value) -> None:
        """2^G S + X^T K."""
        whole = self._whole(n)
        self._await(n, self.summed)
        for i in range(0, self.size, WIDE):
            added = self._take(slot(self.added, 0, i, WIDE))
            for state, each in zip(self.state, added, strict=True):
                some = state[i // 2 : (i + WIDE) // 2]
                emit(at.fma_f32(some.slot, some.slot, whole.slot, each.slot))


class BlackwellCarry(Blackwell, Carry):
    """The second of two kernels."""
