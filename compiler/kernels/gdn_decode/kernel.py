"""The kernel: every lane decays its part of some rows of a state, and adds what the token changes.

With S' = decay S: u = S' k, c = beta (v - u), new S = S' + c k, out = scale new S q. Lanes of a
warp hold whole rows between them, so sums meet by shuffles and warps never wait for each other.
Rows of a lane follow each other, so that their outputs are one store.
"""

from __future__ import annotations

import math

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir.nodes import LANE, UOp, Value, const, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, elect, loop, when
from ptxflow.compiler.ir.storage import global_tensor, part, rectangle
from ptxflow.compiler.kernels.gdn_decode.decisions import BULK, TOGETHER
from ptxflow.compiler.kernels.gdn_decode.gates import decay, sigmoid, times
from ptxflow.compiler.kernels.gdn_decode.places import PRESENT
from ptxflow.compiler.kernels.gdn_decode.ring import Ring
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.tensors import load_global, store_global

ENTRY = "gdn_decode"
ELEMENT = 2  # bytes, of what is not the state
CHAINS = 2  # sums of a lane for a row, so that additions need not wait for each other
TENSORS = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "output", "new_state")


class Kernel(Ring):
    """A gdn_decode strategy applied to a problem."""

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        pointers = ((name, "ptr") for name in TENSORS)
        return (*pointers, ("scale", "u32"), (PRESENT, "u32"), ("batch_size", "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        body: list[Body] = [self._scale(), self._steps()]
        shared = (self.ring, self.full) if self.bulk else ()
        info = KernelInfo(
            ENTRY, self.device.arch, self.warps, 1, self.params, (*shared, *self.values.values())
        )
        return finish(info, *body)

    def _steps(self) -> Body:
        use = const(0) if self.once else var("use")
        body: list[Body] = [self._state(use), self._change(), self._leave(use), self._output(use)]
        before = self._begin()
        if self.once:
            return [before, body]
        last = single(at.bulk_wait_read(pending=0)) if self._leaves_pending else None
        return [before, loop(use, self.count, body, rolled=True), last]

    def _begin(self) -> Body:
        """What is asked for before the first step."""
        if not self.bulk:
            return None
        fill = [elect(self._asks(const(i)), self._ask(const(i))) for i in range(self.stages)]
        return [fill, self._if_any(self._load_v(const(0)))]

    def _if_any(self, *body: Body) -> Body:
        return body if not self.loops else when(const(0) < self.count, *body)

    def _next(self, use: UOp, *body: Body) -> Body:
        return None if self.once else when(use + 1 < self.count, *body)

    def _state(self, use: UOp) -> list[Body]:
        """The rows of this step, decayed. All loads come before what is computed from the first."""
        load, compute = self._head(use)
        if not self.bulk:
            return [load, self._load_rows(use), compute, self._decay()]
        after = self._next(use, self._load_v(use + 1))
        return [load, compute, self._take(use), self._decay(), after]

    # -- loads ---------------------------------------------------------------------------------

    def _scale(self) -> list[UOp]:
        given, scale = self._one("given_scale"), self._one("scale")
        usual = float_bits(1 / math.sqrt(self.size))
        return [at.mov(given, param("scale")), at.replace_zero(scale, given, value=usual)]

    def _load_rows(self, use: UOp) -> list[Body]:
        """The lane's rows and their values, into registers."""
        out: list[Body] = [self._load_v(use)]
        for r in range(self.flight):
            for j in range(self.vectors):
                index, place, attrs = self._access("state", use, r, j)
                vector = part(self._row("state", r), j * self.width, self.width)
                out.append(load_global(vector, "state", index, self._given, place, **attrs))
        return out

    def _load_v(self, use: UOp) -> UOp:
        """The values of the lane's rows."""
        row, place = self._lane_row(use), self._token_place("v", use)
        if self.flight == 1:
            return at.ld_global_narrow(self._one("v"), param("v"), row, place, dtype=self._dtype)
        raw = self._value("v", 0, 1, self.flight // 2)
        return load_global(raw, "v", row, 1, place, element=ELEMENT)

    def _head(self, use: UOp) -> tuple[Body, Body]:
        """Statements that load, and that compute, what belongs to a head; at its first step."""
        _, row = self._block(use)
        head, one = row % self.value_heads, self._one
        load: list[Body] = [
            *(
                load_global(one(name), name, head, 1, _word(name, 0, head))
                for name in ("A_log", "dt_bias")
            ),
            *(
                at.ld_global_narrow(
                    one(name), param(name), row, _word(name, row, 0), dtype=self._dtype
                )
                for name in ("a", "b")
            ),
            *(self._load_token(name, row // self.share) for name in ("q", "k")),
        ]
        compute: list[Body] = [
            *decay(one, one("decay"), one("A_log"), one("a"), one("dt_bias")),
            *sigmoid(one, one("beta"), one("b")),
            times(one("minus_beta"), one("beta"), -1.0),
            *(at.unpack(self._token(n), self._raw_token(n), dtype=self._dtype) for n in "qk"),
            *(self._key_query() if self.s.reduction == TOGETHER else []),
        ]
        if self.once or self.passes == 1:
            return load, compute
        first = use.eq(0) if not self.loops else (use % self._passes).eq(0)
        return when(first, load), when(first, compute)

    def _raw_token(self, name: str) -> UOp:
        return self._value(f"raw_{name}", 0, 1, self.elements // 2)

    def _load_token(self, name: str, row: UOp) -> list[UOp]:
        """The lane's elements of q or k, two in a register."""
        index = row * self.size + LANE % self.lanes * self.width
        raw, step, width = self._raw_token(name), self.lanes * self.width, self.width // 2
        out = list[UOp]()
        for j in range(self.vectors):
            vector, place = part(raw, j * width, width), (row, j * step, 1, step)
            offset = j * step * ELEMENT
            out.append(load_global(vector, name, index, 1, place, ELEMENT, offset=offset))
        return out

    # -- arithmetic ----------------------------------------------------------------------------

    def _key_query(self) -> list[UOp]:
        """k q, which the change of every row adds to its output."""
        own, total = self._one("own_kq"), self._one("kq")
        dot = self._dot("kq", 0, 1, self._token("k"), self._token("q"), own)
        return [*dot, *self._butterfly("kq", own, total)]

    def _decay(self) -> list[UOp]:
        """Rows times decay and values times beta: what they came in is free for the next."""
        rows, one = range(self.flight), self._one
        out = [
            at.scale_f32(self._row("decayed", r), self._row("state", r), one("decay"), last="a")
            for r in rows
        ]
        v, pulled = self._rows("v"), self._rows("beta_v")
        if self.flight > 1:
            raw, v = self._value("v", 0, 1, self.flight // 2), self._rows("wide_v")
            out.append(at.unpack(v, raw, dtype=self._dtype, last="src"))
            return [*out, at.scale_f32(pulled, v, one("beta"))]
        return [*out, at.scale_f32(pulled, v, one("beta"), last="a")]

    def _change(self) -> list[UOp]:
        """The new rows; S' q beside S' k where they are summed together."""
        factors = ("k", "q") if self.s.reduction == TOGETHER else ("k",)
        out, total = self._sums("old", "decayed", factors)
        change = self._rows("change")
        u = part(total, 0, self.flight)
        out.append(at.fma_f32(change, u, self._one("minus_beta"), self._rows("beta_v")))
        for r in range(self.flight):
            new, old = self._row("new", r), self._row("decayed", r)
            out.append(at.fma_f32(new, self._token("k"), part(change, r, 1), old))
        return out

    def _products(self) -> tuple[list[UOp], UOp]:
        """Statements for the new rows times q, and where they are."""
        if self.s.reduction != TOGETHER:
            return self._sums("new", "new", ("q",))
        old = part(self._value("old_total", 0, 1, 2 * self.flight), self.flight, self.flight)
        product = self._rows("product")
        return [at.fma_f32(product, self._rows("change"), self._one("kq"), old)], product

    def _sums(self, name: str, rows: str, factors: tuple[str, ...]) -> tuple[list[UOp], UOp]:
        """Statements for products of all rows with each factor, and where they are."""
        count = len(factors) * self.flight
        own = self._value(f"{name}_own", 0, 1, count)
        out = list[UOp]()
        for i, factor in enumerate(factors):
            for r in range(self.flight):
                n = i * self.flight + r
                source = self._row(rows, r)
                out += self._dot(name, n, count, source, self._token(factor), part(own, n, 1))
        total = self._value(f"{name}_total", 0, 1, count)
        return [*out, *self._butterfly(name, own, total)], total

    def _dot(self, name: str, n: int, count: int, a: UOp, b: UOp, target: UOp) -> list[UOp]:
        """The lane's part of a product, in a few sums that are added at the end."""
        sums = self._value(f"{name}_chains", n, count, CHAINS)
        return [at.dot_f32(sums, a, b), at.sum_f32(target, part(sums, 0, 1), part(sums, 1, 1))]

    def _butterfly(self, name: str, held: UOp, total: UOp) -> list[UOp]:
        """Adds registers up over the lanes of a row, so that each of them has the same sum."""
        out = list[UOp]()
        steps, count = self.lanes.bit_length() - 1, held.arg
        for i in range(steps):
            moved = self._value(f"{name}_moved", i, steps, count)
            last = i == steps - 1
            added = total if last else self._value(f"{name}_added", i, steps, count)
            out.append(at.shuffle_xor(moved, held, lanes=self.lanes >> (i + 1)))
            out.append(at.sum_f32(added, held, moved))
            held = added
        return out

    # -- stores --------------------------------------------------------------------------------

    def _leave(self, use: UOp) -> list[Body]:
        """The new rows to their tensor."""
        in_bulk = self.s.path == BULK
        out: list[Body] = [
            self._put(use, r, j) if in_bulk else self._store(use, r, j)
            for r in range(self.flight)
            for j in range(self.vectors)
        ]
        return [*out, *self._send(use)] if in_bulk else out

    def _store(self, use: UOp, r: int, j: int) -> UOp:
        index, place, attrs = self._access("new_state", use, r, j)
        return store_global("new_state", index, self._new(r, j), place, **attrs)

    def _output(self, use: UOp) -> list[UOp]:
        """scale x product, rounded once; the first lane of a row stores it."""
        out, product = self._products()
        scaled = self._rows("scaled")
        out.append(at.scale_f32(scaled, product, self._one("scale")))
        row, first = self._lane_row(use), (LANE % self.lanes).eq(0)
        place = self._token_place("output", use)
        if self.flight == 1:
            where = param("output"), row, first, place
            return [*out, at.st_global_narrow(*where, scaled, dtype=self._dtype)]
        packed = self._value("packed", 0, 1, self.flight // 2)
        out.append(at.pack(packed, scaled, dtype=self._dtype))
        return [*out, store_global("output", row, packed, place, first, ELEMENT)]


def _word(name: str, row: Value, column: Value) -> UOp:
    """One element of a tensor."""
    return rectangle(global_tensor(name), row, column, 1, 1)
