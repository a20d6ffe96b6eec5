"""The kernel: main warps carry a state from chunk to chunk, helpers are one chunk ahead of them.

All meet once a chunk: then what helpers hand over is there, and what main warps read is free. Main
warps hold rows of a state in registers. All products have the state's rows as the rows of their
MMA, so that what one leaves in registers is an operand of the next: S K^T and S Q^T, the solved
updates X^T, then the output and the new state.
"""

from dataclasses import replace

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import KernelInfo, Params, loop, parameters, part, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Slot, Statement, Value, const, param, var
from ptxflow.compiler.kernels.gdn_prefill.chunk_warps import ChunkWarps
from ptxflow.compiler.kernels.gdn_prefill.decisions import UNIT
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT, STATE_BYTES
from ptxflow.compiler.kernels.gdn_prefill.shape import PRESENT, Gate
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import COLUMN, QUAD, ROW, k_rows, load_matrix, mma, n_rows
from ptxflow.compiler.tile.tensors import Place, load_global, store_global
from ptxflow.compiler.tile.values import Float32, UInt32, emit, traced

ENTRY = "gdn_prefill"
TENSORS = "q k v state A_log a dt_bias b cu_seqlens output new_state"
Held = dict[tuple[int, int], Float32]  # by a warp's tile of rows and 16 tokens
Terms = dict[tuple[int, int], list[UInt32]]


class Kernel(ChunkWarps):
    """A gdn_prefill strategy applied to a problem. A tile is 16 rows; a main warp holds `row_tiles`
    of them. `waits`: helpers wait for the kernel before, which may still run."""

    waits = False
    first_gates = Gate.BETA, Gate.PULL

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.tiles = range(int(s.row_tiles))
        self.state = [self.r.float32(self.size // 8 * QUAD) for _ in self.tiles]

    def tile_number(self, t: int) -> Value:
        """Of a warp's tile, among those of the CTA."""
        return WARP * len(self.tiles) + t

    def _row(self, t: int) -> Value:
        """The first row of a tile, of a head's state."""
        return self.place[2] + self.tile_number(t) * UNIT

    # -- states --------------------------------------------------------------------------------

    def _state_rows(self, t: int) -> list[tuple[Slot, Value, Place, dict[str, int]]]:
        """Registers, index of the lane's row, 8 x 8 elements, and bytes from the row."""
        sequence, head, _ = self.place
        first = (sequence * self.value_heads + head) * self.size
        out = list[tuple[Slot, Value, Place, dict[str, int]]]()
        for half in range(2):
            row, mine, count = self._rows_of(t, half)
            index = (first + row + mine) * self.size + COLUMN
            for n in range(self.size // 8):
                held = part(self.state[t].slot, n * QUAD + 2 * half, 2)
                attrs = {"element": STATE_BYTES, "offset": n * 8 * STATE_BYTES}
                out.append((held, index, (first + row, n * 8, count, 8), attrs))
        return out

    def _rows_of(self, t: int, half: int) -> tuple[Value, Value, int]:
        """Of half a tile the first row, the lane's behind it, and among how many rows they are."""
        return self._row(t) + half * 8, ROW, 8

    def load_state(self) -> list[Statement]:
        """The state, or zeros where there is none or the sequence has no token."""
        inside = param(PRESENT).ne(0) & (self.begin < self.end)
        return [
            load_global(held, "state", index, inside, place, **attrs)
            for t in self.tiles
            for held, index, place, attrs in self._state_rows(t)
        ]

    def store_state(self) -> list[Statement]:
        return [
            store_global("new_state", index, held, place, **attrs)
            for t in self.tiles
            for held, index, place, attrs in self._state_rows(t)
        ]

    # -- a chunk -------------------------------------------------------------------------------

    def advance(self, n: Value) -> None:
        """The state and the outputs through chunk n."""
        pull, read = self._multiply_state(n)
        self._differences(n, pull)
        updates, leaving = self._solve_updates(n, pull)
        self._outputs(n, read, updates)
        self._update_state(n, leaving)

    def _multiply_state(self, n: Value) -> list[list[Float32]]:
        """S K^T and S Q^T, 16 rows by the chunk's tokens of each tile."""
        wide = self.chunk // 8 * QUAD
        out = [[self.r.constant(0.0, wide) for _ in self.tiles] for _ in range(2)]
        for step in range(self.steps):
            some = slice(step * 2 * QUAD, (step + 1) * 2 * QUAD)
            operands = [self.terms(state[some], self.parts) for state in self.state]
            lane = n_rows(self.key_pitch) + step * UNIT * ELEMENT
            for unit in range(self.units):
                for sums, storage in zip(out, (self.k, self.q), strict=True):
                    b = load_matrix(self.r, self.token_rows(storage, n, unit), lane)
                    for t in self.tiles:
                        self._add(self._unit(sums[t], unit), operands[t], [b])
        return out

    def _add(self, sums: Float32, a: list[UInt32], b: list[UInt32]) -> None:
        """Products of terms with terms, but the last with the last."""
        emit(mma(sums.slot, [each.slot for each in a], b[0].slot, self.operand))
        if len(b) > 1:
            emit(mma(sums.slot, [a[0].slot], b[1].slot, self.operand))

    def _factors(self, n: Value, which: Gate, unit: int) -> list[Float32]:
        """A gate of the lane's columns of 16 tokens, two pairs of them."""
        name = f"{which.name.lower()}{unit}_"
        pairs = [self.r.float32(2, f"{name}{h}_") for h in range(2)]
        self._load_factors(n, which, unit, pairs)
        return pairs

    def _load_factors(self, n: Value, which: Gate, unit: int, pairs: list[Float32]) -> None:
        for h, pair in enumerate(pairs):
            place = ((LANE & 3) << 3) + (unit * UNIT + 8 * h) * 4
            emit(at.ld_shared(pair.slot, self.gate(n, which), place))

    def _differences(self, n: Value, pull: list[Float32]) -> None:
        """beta (v - 2^G S k), in the place of S k."""
        for unit in range(self.units):
            beta, factor = self._pull_factors(n, unit)
            for t in self.tiles:
                wide = self._values(n, unit, t)
                for h in range(2):
                    v = wide[h * QUAD : (h + 1) * QUAD] * beta[h]
                    sums = self._unit(pull[t], unit)[h * QUAD : (h + 1) * QUAD]
                    emit(at.fma_f32(sums.slot, sums.slot, factor[h].slot, v.slot))

    def _values(self, n: Value, unit: int, t: int) -> Float32:
        """Of 16 tokens and a tile, as sums of both are held."""
        lane = n_rows(self.value_pitch) + self.tile_number(t) * UNIT * ELEMENT
        return load_matrix(self.r, self.token_rows(self.v, n, unit), lane, True).unpack(self.dtype)

    def _solve_updates(self, n: Value, pull: list[Float32]) -> tuple[Terms, Terms]:
        """X^T, block after block, as operands: as it is, and as it counts at the chunk's end."""
        updates, leaving = Terms(), Terms()
        for solve in range(self.solves):
            units = range(solve * self.solve_units, (solve + 1) * self.solve_units)
            for i in units:
                for j in range(solve * self.solve_units):
                    self._add_pulls(n, i, j, pull, updates)
            right, solved = Terms(), Held()
            for t in self.tiles:
                for i in units:
                    held = self._unit(pull[t], i)
                    right[t, i], solved[t, i] = self.terms(held, self.solve_parts), held.fresh()
                    solved[t, i].set(held)
            for i in units:
                for j in range(units[0], i + 1):
                    self._add_solved(n, solve, i, j, right, solved)
                self._make_updates(n, i, solved, updates, leaving)
        return updates, leaving

    @staticmethod
    def _unit(sums: Float32, unit: int) -> Float32:
        """The part of 16 tokens."""
        return sums[unit * 2 * QUAD : (unit + 1) * 2 * QUAD]

    def _add_pulls(self, n: Value, i: int, j: int, pull: list[Float32], updates: Terms) -> None:
        """What updates of 16 earlier tokens do to 16 later ones."""
        index, count = self.triangle(i, j), self.solve_parts
        b = [self.handed(n, "pulls", index, p) for p in range(count)]
        for t in self.tiles:
            self._add(self._unit(pull[t], i), updates[t, j][:count], b)

    def _add_solved(self, n: Value, solve: int, i: int, j: int, right: Terms, solved: Held) -> None:
        u = self.solve_units
        index = solve * self.square + i % u * u + j % u
        b = [self.handed(n, "solved", index, p) for p in range(self.solve_parts)]
        for t in self.tiles:
            self._add(solved[t, i], right[t, j], b)

    def _make_updates(
        self, n: Value, unit: int, solved: Held, updates: Terms, leaving: Terms
    ) -> None:
        """Operands of 16 tokens' updates, as later tokens and the chunk's end need them."""
        leave = self._factors(n, Gate.LEAVE, unit)
        last = unit // self.solve_units == self.solves - 1
        for t in self.tiles:
            update, scaled = solved[t, unit], self.r.float32(2 * QUAD)
            needed = self.parts if last else max(self.parts, self.solve_parts)
            updates[t, unit] = self.terms(update, needed)
            for h in range(2):
                some = slice(h * QUAD, (h + 1) * QUAD)
                emit(at.scale_f32(scaled[some].slot, update[some].slot, leave[h].slot))
            leaving[t, unit] = self.terms(scaled, self.parts)

    def _outputs(self, n: Value, read: list[Float32], updates: Terms) -> None:
        """scale (2^G S q + scores X), rounded once."""
        for i in range(self.units):
            factor = self._read_factors(n, i)
            units = [self._unit(sums, i) for sums in read]
            for sums in units:
                for h in range(2):
                    emit(at.rescale(sums[h * QUAD : (h + 1) * QUAD].slot, factor[h].slot))
            for j in range(i + 1):
                index = self.triangle(i, j)
                b = [self.handed(n, "scores", index, p) for p in range(self.parts)]
                for t, sums in enumerate(units):
                    self._add(sums, updates[t, j][: self.parts], b)
            for t, sums in enumerate(units):
                self._store(n, t, i, sums)

    def _pull_factors(self, n: Value, unit: int) -> list[list[Float32]]:
        """What values and what S k count for in x."""
        return [self._factors(n, which, unit) for which in self.first_gates]

    def _read_factors(self, n: Value, unit: int) -> list[Float32]:
        """What S q counts for in the output."""
        return self._factors(n, Gate.READ, unit)

    def _store(self, n: Value, t: int, unit: int, sums: Float32) -> None:
        """Outputs of 16 tokens: two rows of a token become neighbours, then leave together."""
        head = self.place[1]
        for h in range(2):
            packed = sums[h * QUAD : (h + 1) * QUAD].pack(self.dtype)
            first = self.first(n) + (unit * UNIT + 8 * h)
            token, column = first + ROW, head * self.size + self._row(t)
            index = token * (self.value_heads * self.size) + column + COLUMN
            for half in range(2):
                mine, place = packed[half].apply(at.movmatrix), (first, column + half * 8, 8, 8)
                attrs = {"element": ELEMENT, "offset": half * 8 * ELEMENT}
                emit(store_global("output", index, mine.slot, place, token < self.end, **attrs))

    def _update_state(self, n: Value, leaving: Terms) -> None:
        """2^G S + X^T K."""
        self._decay(n)
        for unit in range(self.units):
            for step in range(self.steps):
                place = self.token_rows(self.k, n, unit)
                lane = k_rows(self.key_pitch) + step * UNIT * ELEMENT
                b = load_matrix(self.r, place, lane, True)
                for t, state in enumerate(self.state):
                    self._add(self._unit(state, step), leaving[t, unit], [b])

    def _decay(self, n: Value) -> None:
        whole = self._whole(n)
        for state in self.state:
            emit(at.scale_f32(state.slot, state.slot, whole.slot))

    def _whole(self, n: Value) -> Float32:
        """What the state counts for at the chunk's end."""
        out, last = self.r.float32(), const((self.chunk - 1) << 2)
        emit(at.ld_shared(out.slot, self.gate(n, Gate.DECAY), last))
        return out

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        return parameters(f"{TENSORS}: ptr, scale {PRESENT} num_seqs: u32")

    def build(self) -> Statement:
        """The lowered kernel."""
        n, helps, main = var("chunk"), self.mains <= WARP, self.mains > WARP
        turns = self.chunks + self.chunks.min(1)
        body = [
            *self.find_bounds(),
            when(main, self.load_state()),
            when(helps, at.grid_wait()) if self.waits else None,
            when(helps & (const(0) < self.chunks), traced(self.before)),
            loop(
                n,
                turns,
                at.cta_sync(),
                when(main & (const(0) < n), traced(self.advance, n - 1)),
                when(helps & (n < self.chunks), self.ask_ahead(n), traced(self.relate, n)),
                rolled=True,
            ),
            when(main, self.store_state()),
        ]
        info = KernelInfo(ENTRY, self.device.arch, self.warps, 1, self.params, self.storage)
        return finish(replace(info, dependent=self.waits), *body)
