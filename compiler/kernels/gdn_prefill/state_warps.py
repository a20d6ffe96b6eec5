"""Main warps: rows of a state in registers through all chunks of a sequence.

All products have the state's rows as the rows of their MMA, so that what one leaves in registers is
an operand of the next: S K^T and S Q^T, the solved updates X^T, then the output and the new state.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, param, part
from ptxflow.compiler.kernels.gdn_prefill.chunk_warps import ChunkWarps
from ptxflow.compiler.kernels.gdn_prefill.decisions import BLOCK_PITCH, UNIT
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT, STATE_BYTES
from ptxflow.compiler.kernels.gdn_prefill.shape import PRESENT, Gate
from ptxflow.compiler.tile.fragments import COLUMN, QUAD, ROW, k_rows, mma, n_rows
from ptxflow.compiler.tile.tensors import Place, load_global, store_global

N_BLOCK = n_rows(BLOCK_PITCH)
K_BLOCK = k_rows(BLOCK_PITCH)


class StateWarps(ChunkWarps):
    """Statements of the main warps."""

    @property
    def tiles(self) -> range:
        return range(int(self.s.row_tiles))

    def _tile(self, name: str, t: int, width: int) -> UOp:
        """Registers of one of the warp's tiles of 16 rows."""
        return self.r(f"{name}_tile{t}", width)

    def _state(self, t: int) -> UOp:
        return self._tile("state", t, self.size // 8 * QUAD)

    def _sums(self, name: str, t: int) -> UOp:
        """16 rows by the chunk's tokens."""
        return self._tile(name, t, self.chunk // 8 * QUAD)

    def _row(self, t: int) -> UOp:
        """The first row of a tile, of a head's state."""
        return self.place[2] + (WARP * len(self.tiles) + t) * UNIT

    # -- states --------------------------------------------------------------------------------

    def _state_rows(self, t: int) -> list[tuple[UOp, UOp, Place, dict[str, int]]]:
        """Registers, index of the lane's row, 8 x 8 elements, and bytes from the row."""
        sequence, head, _ = self.place
        first = (sequence * self.value_heads + head) * self.size + self._row(t)
        out = list[tuple[UOp, UOp, Place, dict[str, int]]]()
        for half in range(2):
            row = first + half * 8
            index = (row + ROW) * self.size + COLUMN
            for n in range(self.size // 8):
                held = part(self._state(t), n * QUAD + 2 * half, 2)
                attrs = {"element": STATE_BYTES, "offset": n * 8 * STATE_BYTES}
                out.append((held, index, (row, n * 8, 8, 8), attrs))
        return out

    def load_state(self) -> list[UOp]:
        """The state, or zeros where there is none or the sequence has no token."""
        inside = param(PRESENT).ne(0) & (self.begin < self.end)
        return [
            load_global(held, "state", index, inside, place, **attrs)
            for t in self.tiles
            for held, index, place, attrs in self._state_rows(t)
        ]

    def store_state(self) -> list[UOp]:
        return [
            store_global("new_state", index, held, place, **attrs)
            for t in self.tiles
            for held, index, place, attrs in self._state_rows(t)
        ]

    # -- a chunk -------------------------------------------------------------------------------

    def advance(self, n: UOp) -> list[Body]:
        """The state and the outputs through chunk n."""
        return [
            self._multiply_state(n),
            self._differences(n),
            self._solve_updates(n),
            self._outputs(n),
            self._update_state(n),
        ]

    def _terms(self, name: str, t: int, held: UOp, terms: int) -> tuple[list[UOp], list[UOp]]:
        """Statements that make one or two operands of 8 registers, and the operands."""
        packed = [self._tile(f"{name}_term{i}", t, QUAD) for i in range(terms)]
        out = [at.pack(packed[0], held, dtype=self.operand)]
        if terms > 1:
            out.append(at.pack_rest(packed[1], held, packed[0], dtype=self.operand))
        return out, packed

    def _multiply_state(self, n: UOp) -> list[UOp]:
        """S K^T and S Q^T."""
        names = (("pull", self.k), ("read", self.q))
        out = [at.mov(self._sums(name, t), 0) for name, _ in names for t in self.tiles]
        for step in range(self.steps):
            operands = []
            for t in self.tiles:
                held = part(self._state(t), step * 2 * QUAD, 2 * QUAD)
                make, terms = self._terms(f"state{step}", t, held, self.parts)
                out += make
                operands.append(terms)
            lane = n_rows(self.key_pitch) + step * UNIT * ELEMENT
            for unit in range(self.units):
                for name, storage in names:
                    b = self.r(f"{name}_b{step}_{unit}", QUAD)
                    out.append(at.ldmatrix_x4(b, self.token_rows(storage, n, unit), lane))
                    for t in self.tiles:
                        sums = part(self._sums(name, t), unit * 2 * QUAD, 2 * QUAD)
                        out += mma(sums, operands[t], b, self.operand)
        return out

    def _factors(self, n: UOp, which: Gate, unit: int) -> tuple[list[UOp], list[UOp]]:
        """Statements that load a gate of the lane's columns of 16 tokens, and two pairs of them."""
        pairs = [self.r(f"{which.name.lower()}{unit}_factor{h}", 2) for h in range(2)]
        lane = (LANE & 3) << 3
        out = [
            at.ld_shared_lanes(pair, self.gate(n, which), lane + (unit * UNIT + 8 * h) * 4)
            for h, pair in enumerate(pairs)
        ]
        return out, pairs

    def _differences(self, n: UOp) -> list[UOp]:
        """beta (v - 2^G S k), in the place of S k."""
        out = list[UOp]()
        for unit in range(self.units):
            load, beta = self._factors(n, Gate.BETA, unit)
            more, pull = self._factors(n, Gate.PULL, unit)
            out += [*load, *more]
            for t in self.tiles:
                raw = self._tile(f"raw_v{unit}", t, QUAD)
                wide = self._tile(f"wide_v{unit}", t, 2 * QUAD)
                column = (WARP * len(self.tiles) + t) * UNIT * ELEMENT
                lane = n_rows(self.value_pitch) + column
                place = self.token_rows(self.v, n, unit)
                out.append(at.ldmatrix_x4(raw, place, lane, transposed=True))
                out.append(at.unpack(wide, raw, dtype=self.dtype))
                for h in range(2):
                    v = part(wide, h * QUAD, QUAD)
                    sums = part(self._sums("pull", t), (2 * unit + h) * QUAD, QUAD)
                    out.append(at.scale_f32(v, v, beta[h]))
                    out.append(at.fma_f32(sums, sums, pull[h], v))
        return out

    def _solve_updates(self, n: UOp) -> list[UOp]:
        """X^T, block after block, as operands: as it is, and as it counts at the chunk's end."""
        out = list[UOp]()
        for solve in range(self.solves):
            units = range(solve * self.solve_units, (solve + 1) * self.solve_units)
            for i in units:
                for j in range(solve * self.solve_units):
                    out += self._add_pulls(n, i, j)
            right = {}
            for t in self.tiles:
                for i in units:
                    held = self._unit("pull", t, i)
                    make, right[t, i] = self._terms(f"right{i}", t, held, self.solve_parts)
                    out += [*make, at.copy(self._update(t, i), held)]
            for i in units:
                for j in range(units[0], i + 1):
                    out += self._add_solved(n, solve, i, j, right)
                out += self._make_updates(n, i)
        return out

    def _unit(self, name: str, t: int, unit: int) -> UOp:
        return part(self._sums(name, t), unit * 2 * QUAD, 2 * QUAD)

    def _update(self, t: int, unit: int) -> UOp:
        return self._tile(f"update{unit}", t, 2 * QUAD)

    def _operands(self, name: str, t: int, unit: int, terms: int) -> list[UOp]:
        return [self._tile(f"{name}{unit}_term{i}", t, QUAD) for i in range(terms)]

    def _add_pulls(self, n: UOp, i: int, j: int) -> list[UOp]:
        """What updates of 16 earlier tokens do to 16 later ones."""
        index = self.triangle(i, j)
        places = [self.block(self.pulls, n, index, p) for p in range(self.solve_parts)]
        out, b = self._matrices(f"far{index}", places, N_BLOCK, False)
        for t in self.tiles:
            terms = self._operands("x", t, j, max(self.parts, self.solve_parts))
            out += self._cross(self._unit("pull", t, i), terms, b, self.solve_parts)
        return out

    def _matrices(
        self, name: str, places: list[UOp], lane: UOp, transposed: bool
    ) -> tuple[list[UOp], list[UOp]]:
        """Statements that load the terms of a 16 x 16 block, and the registers."""
        held = [self.r(f"{name}_b{i}", QUAD) for i in range(len(places))]
        out = [
            at.ldmatrix_x4(b, place, lane, transposed=transposed)
            for b, place in zip(held, places, strict=True)
        ]
        return out, held

    def _cross(self, sums: UOp, a: list[UOp], b: list[UOp], terms: int) -> list[UOp]:
        """Products of terms with terms, but the last with the last."""
        out = mma(sums, a[:terms], b[0], self.operand)
        return out + (mma(sums, a[:1], b[1], self.operand) if terms > 1 else [])

    def _add_solved(
        self, n: UOp, solve: int, i: int, j: int, right: dict[tuple[int, int], list[UOp]]
    ) -> list[UOp]:
        u = self.solve_units
        index = solve * self.square + i % u * u + j % u
        places = [self.solved_blocks(n, index, p) for p in range(self.solve_parts)]
        out, b = self._matrices(f"solved{index}", places, K_BLOCK, True)
        for t in self.tiles:
            out += self._cross(self._update(t, i), right[t, j], b, self.solve_parts)
        return out

    def _make_updates(self, n: UOp, unit: int) -> list[UOp]:
        """Operands of 16 tokens' updates, as later tokens and the chunk's end need them."""
        out, leave = self._factors(n, Gate.LEAVE, unit)
        needed = self._terms_of_x(unit)
        for t in self.tiles:
            update, scaled = self._update(t, unit), self._tile(f"leaving{unit}", t, 2 * QUAD)
            make, _ = self._terms(f"x{unit}", t, update, needed)
            out += make
            for h in range(2):
                quad = part(scaled, h * QUAD, QUAD)
                out.append(at.scale_f32(quad, part(update, h * QUAD, QUAD), leave[h]))
            out += self._terms(f"leaving{unit}", t, scaled, self.parts)[0]
        return out

    def _terms_of_x(self, unit: int) -> int:
        last = unit // self.solve_units == self.solves - 1
        return self.parts if last else max(self.parts, self.solve_parts)

    def _outputs(self, n: UOp) -> list[UOp]:
        """scale (2^G S q + scores X), rounded once."""
        out = list[UOp]()
        for i in range(self.units):
            load, read = self._factors(n, Gate.READ, i)
            out += load
            for t in self.tiles:
                for h in range(2):
                    out.append(at.rescale(part(self._unit("read", t, i), h * QUAD, QUAD), read[h]))
            for j in range(i + 1):
                index = self.triangle(i, j)
                places = [self.block(self.scores, n, index, p) for p in range(self.parts)]
                make, b = self._matrices(f"score{index}", places, N_BLOCK, False)
                out += make
                for t in self.tiles:
                    terms = self._operands("x", t, j, self.parts)
                    out += self._cross(self._unit("read", t, i), terms, b, self.parts)
            out += [s for t in self.tiles for s in self._store(n, t, i)]
        return out

    def _store(self, n: UOp, t: int, unit: int) -> list[UOp]:
        """Outputs of 16 tokens: two rows of a token become neighbours, then leave together."""
        out, (_, head, _) = list[UOp](), self.place
        for h in range(2):
            packed, turned = (self._tile(f"{x}{unit}_{h}", t, 2) for x in ("packed", "turned"))
            sums = part(self._unit("read", t, unit), h * QUAD, QUAD)
            out.append(at.pack(packed, sums, dtype=self.dtype))
            first = self.first(n) + (unit * UNIT + 8 * h)
            token, column = first + ROW, head * self.size + self._row(t)
            index = token * (self.value_heads * self.size) + column + COLUMN
            for half in range(2):
                mine, place = part(turned, half, 1), (first, column + half * 8, 8, 8)
                attrs = {"element": ELEMENT, "offset": half * 8 * ELEMENT}
                out.append(at.movmatrix(mine, part(packed, half, 1)))
                out.append(store_global("output", index, mine, place, token < self.end, **attrs))
        return out

    def _update_state(self, n: UOp) -> list[UOp]:
        """2^G S + X^T K."""
        out = [at.ld_shared(self.r("whole", 1), self.gate(n, Gate.TOTAL), LANE << 2)]
        for t in self.tiles:
            out.append(at.scale_f32(self._state(t), self._state(t), self.r("whole", 1)))
        lane = k_rows(self.key_pitch)
        for unit in range(self.units):
            for step in range(self.steps):
                b = self.r(f"key_b{unit}_{step}", QUAD)
                place = self.token_rows(self.k, n, unit)
                out.append(at.ldmatrix_x4(b, place, lane + step * UNIT * ELEMENT, transposed=True))
                for t in self.tiles:
                    terms = self._operands("leaving", t, unit, self.parts)
                    sums = part(self._state(t), step * 2 * QUAD, 2 * QUAD)
                    out += mma(sums, terms, b, self.operand)
        return out
