"""The second kernel of a prefill whose keys are cut into parts: a tile's rows from those of its
parts, each weighted by its log-sum-exp. Tiles of one part are done.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, Scalar, Statement, Value, const, var
from ptxflow.compiler.ir.statements import KernelInfo, Params, parameters, when
from ptxflow.compiler.kernels.gqa_prefill.schedule import PARTIAL, SEQUENCES, Work
from ptxflow.compiler.launch import Launch, launch_of
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import (
    Float32,
    emit,
    exp2,
    finite_or_zero,
    fma,
    log2,
    maximum,
    reciprocal,
    repeat,
    traced,
)

ENTRY = "gqa_prefill_merge"
WARPS = 4
WIDE, HALF = 8, 4  # elements of a lane, and those that it loads together


class Merge(Work):
    """A block has a tile of queries in the heads that share it, as blocks of the first kernel."""

    prefix = "m_"

    def _given(self, numbers: Value) -> tuple[Value, Value, Value]:
        return CTAID // self.units, CTAID % self.units, const(0)

    @property
    def at_once(self) -> int:
        """Rows of a warp."""
        return 32 * WIDE // self.dim

    @property
    def params(self) -> Params:
        last = " kv_last_page_len" if self.page > 1 else ""
        tables = f"qo_indptr kv_indptr{last} {PARTIAL} {PARTIAL}_lse output lse"
        return parameters(f"{tables}: ptr, total_q sequences: u32")

    def launch(self) -> Launch:
        return launch_of(ENTRY, self.blocks, WARPS, self.params, SEQUENCES, dependent=True)

    def build(self) -> Statement:
        """The lowered kernel. All wait, as what is launched next must find all that was written."""
        rows = when(self.cut_up.ne(0), traced(self.merge))
        body = [*self.find(), at.grid_wait(), rows]
        arch, storage = self.device.arch, self.keep.storage
        return finish(
            KernelInfo(ENTRY, arch, WARPS, 1, self.params, storage, dependent=True), *body
        )

    def merge(self) -> None:
        turn, together = var("m_turn"), WARPS * self.at_once
        with repeat(turn, self.rows // together, rolled=True):
            self._rows(turn * together + WARP * self.at_once)

    def _rows(self, first: Value) -> None:
        """Some rows from one on, a lane 8 columns of one; parts that see none of its keys, and what
        is past the last part, have no weight."""
        r, lanes = self.keep, self.dim // WIDE
        row, chunk = first + LANE // lanes, LANE % lanes
        inside = self.row_inside(row)
        lse, outputs = r.float32(self.cut, "all_lse"), list[Float32]()
        for number in range(self.cut):
            self.part = const(number)
            there = inside & (const(number) * self.portion < self.all_tiles)
            index, mine = self.partial_index(row), lse[number]
            place = self.rectangle(f"{PARTIAL}_lse", first, self.at_once, 0, 1)
            emit(load_global(mine.slot, f"{PARTIAL}_lse", index, there, place, handed=True))
            emit(at.hide(mine.slot, there))
            outputs.append(r.float32(WIDE, f"part_{number}_"))
            place = self.rectangle(PARTIAL, first, self.at_once, 0, self.dim)
            for half in range(2):
                four, vector = outputs[-1][half * HALF : (half + 1) * HALF], 2 * chunk + half
                which, wide = index * (2 * lanes) + vector, {"element": 16, "handed": True}
                emit(load_global(four.slot, PARTIAL, which, there, place, **wide))
        output, total, high = self._weigh(lse, outputs)
        self._store(row, first, chunk, inside, output, fma(high, r.constant(1.0), log2(total)))

    def _weigh(self, lse: Float32, outputs: list[Float32]) -> tuple[Float32, Float32, Float32]:
        """The rows' outputs, what weights sum to, and the log-sum-exp that they are relative to."""
        high = lse[0]
        for number in range(1, self.cut):
            high = maximum(high, lse[number])
        total, out = self.keep.constant(0.0), self.keep.constant(0.0, WIDE)
        for number, part in enumerate(outputs):
            weight = exp2(finite_or_zero(lse[number] - high, high))
            part *= weight
            out += part
            total += weight
        out *= reciprocal(total)
        return out, total, high

    def _store(
        self, row: Value, first: Scalar, chunk: Value, inside: Value, output: Float32, lse: Float32
    ) -> None:
        index, rows = self.index(row), self.at_once
        place = self.rectangle("output", first, rows, 0, self.dim)
        line = output.pack(self.dtype).slot
        vector = index * (self.dim // WIDE) + chunk
        emit(store_global("output", vector, line, place, inside, 16))
        place = self.rectangle("lse", first, rows, 0, 1)
        emit(store_global("lse", index, lse.slot, place, inside & chunk.eq(0)))
