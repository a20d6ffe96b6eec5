"""The kernel: every lane decays its part of some rows of a state, and adds what the token changes.

With S' = decay S: u = S' k, c = beta (v - u), new S = S' + c k, out = scale new S q. Lanes of a
warp hold whole rows between them, so sums meet by shuffles and warps never wait for each other.
Rows of a lane follow each other, so that their outputs are one store.
"""

from collections.abc import Callable, Sequence
from itertools import product

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import KernelInfo, Params, global_tensor, parameters, rectangle
from ptxflow.compiler.ir.nodes import LANE, Scalar, Slot, Statement, Value, const, param, var
from ptxflow.compiler.kernels.gdn_decode.decisions import BULK
from ptxflow.compiler.kernels.gdn_decode.gates import decay, output_scale
from ptxflow.compiler.kernels.gdn_decode.places import PRESENT, Ring
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.softmax import SUM
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import (
    Float32,
    UInt32,
    dot,
    elected,
    emit,
    fma,
    repeat,
    sigmoid,
    times,
    traced,
    where,
)

ENTRY = "gdn_decode"
ELEMENT = 2  # bytes, of what is not the state
CHAINS = 2  # sums of a lane for a row, so that additions need not wait for each other
TENSORS = "q k v state A_log a dt_bias b output new_state"


class Kernel(Ring):
    """A gdn_decode strategy applied to a problem."""

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        return parameters(f"{TENSORS}: ptr, scale {PRESENT} batch_size: u32")

    def build(self) -> Statement:
        """The lowered kernel."""
        body = traced(self._steps)
        storage = (*((self.ring, self.full) if self.bulk else ()), *self.r.storage)
        info = KernelInfo(ENTRY, self.device.arch, self.warps, 1, self.params, storage)
        return finish(info, *body)

    def _steps(self) -> None:
        self.scale = output_scale(self.r, self.size)
        self._begin()
        if self.once:
            self._step(const(0))
            return
        use = var("use")
        with repeat(use, self.count, rolled=True):
            self._step(use)
        if self._leaves_pending:
            emit(single(at.bulk_wait_read(pending=0)))

    def _begin(self) -> None:
        """What is asked for before the first step."""
        if self.bulk:
            for i in range(self.stages):
                with elected(self._asks(const(i))):
                    self._ask(const(i))
            with where(const(0) < self.count if self.loops else None):
                self._load_v(const(0))

    def _step(self, use: Value) -> None:
        """The rows of a step. All loads come before what is computed from the first."""
        self._at_first(use, self._load_head)
        if not self.bulk:
            self._load_rows(use)
        self._at_first(use, self._compute_head)
        if self.bulk:
            self._take(use)
        rows, v = self._decayed()
        if self.bulk and not self.once:
            with where(use + 1 < self.count):
                self._load_v(use + 1)
        total = self._sums(rows, [self.k, self.q] if self.together else [self.k])
        change = fma(total[: self.flight], self.minus_beta, v)
        new = [fma(self.k, change[r], row) for r, row in enumerate(rows)]
        self._leave(use, new)
        if self.together:
            self._output(use, fma(change, self.kq, total[self.flight :]))
        else:
            self._output(use, self._sums(new, [self.q]))

    # -- loads ---------------------------------------------------------------------------------

    def _load_rows(self, use: Value) -> None:
        """The lane's rows and their values, into registers."""
        self._load_v(use)
        for r, row in enumerate(self.state):
            for j in range(self.vectors):
                index, place, attrs = self._access("state", use, r, j)
                emit(load_global(self._vector(row, j), "state", index, self._given, place, **attrs))

    def _load_v(self, use: Value) -> None:
        """The values of the lane's rows; a pair in a register, where there are several."""
        row, place, v = self._lane_row(use), self._token_place("v", use), self.v.slot
        if self.flight == 1:
            emit(at.ld_global_narrow(v, param("v"), row, place, dtype=self._dtype))
        else:
            emit(load_global(v, "v", row, 1, place, element=ELEMENT))

    def _at_first(self, use: Value, some: Callable[[Value], None]) -> None:
        """What belongs to a head, at its first step."""
        _, row = self._block(use)
        always = self.once or self.passes == 1
        step = use % self._passes if self.loops else use
        with where(None if always else step.eq(0)):
            some(row)

    def _load_head(self, row: Value) -> None:
        head, dtype = row % self.value_heads, self._dtype
        self.A_log, self.dt_bias, self.a, self.b = (self.r.float32() for _ in range(4))
        for name, held in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            emit(load_global(held.slot, name, head, 1, _word(name, 0, head)))
        for name, held in (("a", self.a), ("b", self.b)):
            emit(at.ld_global_narrow(held.slot, param(name), row, _word(name, row, 0), dtype=dtype))
        self.raw = [self._load_token(name, row // self.share) for name in ("q", "k")]

    def _compute_head(self, row: Value) -> None:
        self.decay = decay(self.A_log, self.a, self.dt_bias)
        self.beta = sigmoid(self.b)
        self.minus_beta = times(self.beta, -1.0)
        self.q, self.k = (raw.unpack(self._dtype) for raw in self.raw)
        if self.together:
            self.kq = self._sums([self.k], [self.q])

    def _load_token(self, name: str, row: Value) -> UInt32:
        """The lane's elements of q or k, two in a register."""
        index = row * self.size + LANE % self.lanes * self.width
        raw = self.r.uint32(width=self.elements // 2)
        step = self.lanes * self.width
        width = self.width // 2
        for j in range(self.vectors):
            vector, place = raw[j * width : (j + 1) * width].slot, (row, j * step, 1, step)
            offset = j * step * ELEMENT
            emit(load_global(vector, name, index, 1, place, ELEMENT, offset=offset))
        return raw

    # -- arithmetic ----------------------------------------------------------------------------

    def _decayed(self) -> tuple[list[Float32], Float32]:
        """Rows times decay and values times beta: what they came in is free for the next."""
        rows = [row.apply(at.scale_f32, self.decay, last="a") for row in self.state]
        if self.flight == 1:
            return rows, Float32(self.r, self.v.slot).apply(at.scale_f32, self.beta, last="a")
        return rows, self.v.unpack(self._dtype, last="src") * self.beta

    def _sums(self, rows: Sequence[Float32], factors: Sequence[Float32]) -> Float32:
        """Products of all rows with each factor: over a lane, then over those of a row."""
        own = self.r.float32(len(factors) * len(rows))
        for n, (factor, row) in enumerate(product(factors, rows)):
            chains = dot(row, factor, CHAINS)
            emit(at.sum_f32(own[n].slot, chains[0].slot, chains[1].slot))
        return SUM.across(own, [self.lanes >> i for i in range(1, self.lanes.bit_length())])

    # -- stores --------------------------------------------------------------------------------

    def _leave(self, use: Value, new: list[Float32]) -> None:
        """The new rows to their tensor."""
        in_bulk = self.s.path == BULK
        for r, row in enumerate(new):
            for j in range(self.vectors):
                vector = self._vector(row, j)
                if in_bulk:
                    emit(self._put(use, r, j, vector))
                else:
                    index, place, attrs = self._access("new_state", use, r, j)
                    emit(store_global("new_state", index, vector, place, **attrs))
        if in_bulk:
            self._send(use)

    def _output(self, use: Value, products: Float32) -> None:
        """scale x products, rounded once; the first lane of a row stores it."""
        scaled = products * self.scale
        row, first = self._lane_row(use), (LANE % self.lanes).eq(0)
        place = self._token_place("output", use)
        if self.flight == 1:
            target = param("output"), row, first, place
            emit(at.st_global_narrow(*target, scaled.slot, dtype=self._dtype))
        else:
            packed = scaled.pack(self._dtype).slot
            emit(store_global("output", row, packed, place, first, ELEMENT))


def _word(name: str, row: Scalar, column: Scalar) -> Slot:
    """One element of a tensor."""
    return rectangle(global_tensor(name), row, column, 1, 1)
