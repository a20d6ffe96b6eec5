"""The kernels that carry a state on sm_90a by wgmma: main warps are warpgroups of 64 rows.

A of all products with the state is in registers: the state's terms in S K^T and S Q^T, the updates'
in X^T K, whose sums are the state itself. S Q^T is on its way while updates are solved, X^T K while
outputs are. What tokens of a chunk do to each other is as by mma.sync.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, Role, loop, role, smem, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Statement, Storage, Value, const, var
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.chunk_warps import PIECE, Place, Stream
from ptxflow.compiler.kernels.gdn_prefill.decisions import SWIZZLE, UNIT
from ptxflow.compiler.kernels.gdn_prefill.kernel import ENTRY, Terms
from ptxflow.compiler.kernels.gdn_prefill.packets import Carry
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.gdn_prefill.shape import Gate
from ptxflow.compiler.kernels.gdn_prefill.swizzled import WIDE, Swizzled
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import COLUMN, QUAD, ROW, Matrix, k_major, rows_along_k, wgmma
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, UInt32, emit, traced

HANDING = 2  # the named barrier of all warps
EARLY_TOKENS = 32  # of a chunk, for whose values and gates there are registers beside the state's


class Hopper(Swizzled):
    """The only kernel. `apart`: S Q^T may be on its way when S K^T is there."""

    apart = True

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.keys = self.tile, self.k
        self.turns = int(decisions.turns(s.fields(), problem, device))
        self.span, self.neighbours = UNIT * len(self.tiles), 2 * len(self.tiles)
        self.packed = self._packs()
        # what is needed first is loaded before wgmma, behind which it would wait in the same queue
        early = self.turns == 1 and len(self.tiles) == 1 and self.chunk <= EARLY_TOKENS
        self.early = range(self.units * early)
        self.raw = [self._packs() for _ in self.early]
        factors = product(self.early, self.first_gates)
        self.factors = {each: [self.r.float32(2) for _ in range(2)] for each in factors}

    def _packs(self) -> list[UInt32]:
        """A lane's rows of all its tiles, of each of its four tokens of 16."""
        return [self.r.uint32(width=len(self.tiles)) for _ in range(QUAD)]

    # -- rows ----------------------------------------------------------------------------------

    @property
    def warp_row(self) -> Value:
        """The first of the warp's rows of a head's state. Of each of its tiles a lane has two rows,
        eight apart in a wgmma: these are neighbours in the state."""
        return self.place[2] + WARP * self.span

    def _rows_of(self, t: int, half: int) -> tuple[Value, Value, int]:
        return self.warp_row, ROW * self.neighbours + (2 * t + half), self.span

    def _load_values(self, n: Value, unit: int, into: list[UInt32]) -> None:
        """Rows of all the lane's tiles together, a token at a time."""
        row = ROW * (self.neighbours * ELEMENT) + (WARP ^ (LANE & 3)) * (self.span * ELEMENT)
        for i, raw in enumerate(into):
            lane = (COLUMN + (i // 2 * 8 + i % 2)) * self.value_pitch + row
            emit(at.ld_shared(raw.slot, self.token_rows(self.v, n, unit), lane))

    def _load_early(self, n: Value) -> None:
        for unit in self.early:
            self._load_values(n, unit, self.raw[unit])
        for (unit, which), pairs in self.factors.items():
            self._load_factors(n, which, unit, pairs)

    def _factors(self, n: Value, which: Gate, unit: int) -> list[Float32]:
        return self.factors.get((unit, which)) or super()._factors(n, which, unit)

    def _values(self, n: Value, unit: int, t: int) -> Float32:
        """As sums are held."""
        held = self.raw[unit] if self.early else self.packed
        if t == 0 and not self.early:
            self._load_values(n, unit, held)
        out, tokens = self.r.float32(2 * QUAD), [raw[t].unpack(self.dtype) for raw in held]
        for i in range(2 * QUAD):
            out[i].set(tokens[i // QUAD * 2 + i % 2][i // 2 % 2])
        return out

    def _ring_place(self, n: Scalar, stream: Stream, number: int) -> Place:
        """Of values, rows of warps change places with each two tokens: for other banks."""
        place, offset = super()._ring_place(n, stream, number)
        if stream.ring is not self.v:
            return place, offset
        across, each = stream.across, self.span * ELEMENT // PIECE
        piece = (LANE % across) ^ ((self._token(stream, number) >> 1 & 3) * each)
        return place, LANE // across * self.value_pitch + (piece << 4)

    def _store(self, n: Value, t: int, unit: int, sums: Float32) -> None:
        """Outputs of 16 tokens, where there are those of the warp's last tile: a lane's rows."""
        for i, packed in enumerate(self.packed):
            pair, (h, c) = self.r.float32(2), divmod(i, 2)
            for row in range(2):
                pair[row].set(sums[h * QUAD + 2 * row + c])
            pair.pack(self.dtype, packed[t])
        if t < self.tiles[-1]:
            return
        column, pitch = self.place[1] * self.size + self.warp_row, self.value_heads * self.size
        count, mine = self.neighbours, self.first(n) + COLUMN
        index = mine * (pitch // count) + (column // count + ROW)
        attrs: dict[str, Any] = {"element": ELEMENT * count, "cache": "cs"}  # none is read again
        for i, packed in enumerate(self.packed):
            later = unit * UNIT + i // 2 * 8
            token, place = later + i % 2, (self.first(n) + later, column, 8, self.span)
            inside, attrs["offset"] = mine + token < self.end, token * pitch * ELEMENT
            emit(store_global("output", index, packed.slot, place, inside, **attrs))

    # -- multiplying ---------------------------------------------------------------------------

    def _tokens(self, n: Value) -> list[tuple[Callable[[int], Matrix], slice]]:
        """What a state is multiplied by, from an element of a token on, and where its sums are."""
        half = self.chunk // 2
        keys, queries = (partial(k_major, self.tile, x, n % self.stages) for x in (self.k, self.q))
        return [(keys, slice(half)), (queries, slice(half, None))]

    def _multiply_state(self, n: Value) -> list[list[Float32]]:
        """S K^T; S Q^T of the last tile may be on its way."""
        out, half = [self.r.float32(self.chunk) for _ in self.tiles], self.chunk // 2
        each = self.steps // self.turns
        rounds = [(t, turn * each) for t in self.tiles for turn in range(self.turns)]
        for t, first in rounds:
            state, steps = self.state[t], range(first, first + each)
            operands = [self.terms(self._unit(state, step), self.parts) for step in steps]
            emit(at.wgmma_fence())
            for b, some in self._tokens(n):
                sums = out[t][some].slot
                for step, terms in zip(steps, operands, strict=True):
                    for p, a in enumerate(terms):
                        more = int(step + p > 0)
                        emit(wgmma(sums, a.slot, b(step * UNIT), more, self.operand))
                emit(at.wgmma_commit())
            emit(at.wgmma_wait(pending=int(self.apart and (t, first) == rounds[-1])))
        return [[sums[:half] for sums in out], [sums[half:] for sums in out]]

    def _by_updates(self, n: Value, leaving: Terms) -> None:
        """X^T K, added to the state."""
        emit(at.wgmma_wait(pending=0) if self.apart else None, at.wgmma_fence())
        for unit in range(self.units):
            row, blocks = unit * UNIT, self.size // WIDE
            b = rows_along_k(*self.keys, n % self.stages, row, 0, blocks)
            for t, state in enumerate(self.state):
                for a in leaving[t, unit]:
                    emit(wgmma(state.slot, a.slot, b, 1, self.operand))
        emit(at.wgmma_commit())

    def advance(self, n: Value) -> None:
        self._load_early(n)
        pull, read = self._multiply_state(n)
        self._decay(n)
        self._differences(n, pull)
        if self.apart and len(self.tiles) > 1:
            emit(at.wgmma_wait(pending=0))
        updates, leaving = self._solve_updates(n, pull)
        self._by_updates(n, leaving)
        self._outputs(n, read, updates)
        emit(at.wgmma_wait(pending=0))

    # -- the whole -----------------------------------------------------------------------------

    def build(self) -> Statement:
        """The lowered kernel."""
        n, m = var("chunk"), var("ahead")
        main_registers, others = decisions.SPLIT if decisions.splits(self.s.fields()) else (0, 0)
        hand = at.named_sync(id=HANDING, threads=decisions.WARP * self.warps)
        main = role(
            Role("main", 0, self.mains, regs=main_registers),
            self.load_state(),
            loop(n, self.chunks, hand, traced(self.advance, n), rolled=True),
            self.store_state(),
        )
        helpers = role(
            Role("helpers", self.mains, self.helpers, regs=others),
            at.grid_wait() if self.waits else None,
            when(const(0) < self.chunks, traced(self.before)),
            loop(m, self.chunks, self.ask_ahead(m), traced(self.relate, m), hand, rolled=True),
        )
        info = KernelInfo(ENTRY, self.device.arch, self.warps, 1, self.params, self.storage)
        info = replace(info, dependent=self.waits)
        return finish(info, *self.find_bounds(), main, helpers)


class HopperCarry(Hopper, Carry):
    """The second of two kernels."""


class HopperPair(HopperCarry):
    """The same of 128 rows of a state. A chunk's queries lie below its keys, and one wgmma, twice
    as wide, multiplies both: of 64 rows, which alone wait for it, two are faster, as the second is
    not needed at once."""

    apart = False

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        tile = SmemTile(2 * self.chunk, self.size, ELEMENT, SWIZZLE)
        self.keys = tile, smem("tokens", tile.bytes, self.stages)

    @property
    def storage(self) -> tuple[Storage, ...]:
        return (self.keys[1], self.v, self.packets, *self.bounds, *self.r.storage)

    def _streams(self) -> list[Stream]:
        *streams, values = super()._streams()
        ring = self.keys[1]
        both = (replace(s, ring=ring, block=2 * s.block + (s.ring is self.q)) for s in streams)
        return [*both, values]

    def _tokens(self, n: Value) -> list[tuple[Callable[[int], Matrix], slice]]:
        return [(partial(k_major, *self.keys, n % self.stages), slice(None))]
