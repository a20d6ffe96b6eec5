"""The epilogue: output fragments, normalised and rounded, through the tile's queries to rows.

A row of the tile is a token in a head; those past the end of their sequence are not written. A tile
whose queries see no key has nothing to read.
"""

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.softmax import ROW
from ptxflow.compiler.ir import Body, slot, when
from ptxflow.compiler.ir.nodes import LANE, WARP, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_prefill.schedule import PARTIAL, Work
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.tile.softmax import MINUS_INFINITY, OnlineSoftmax
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, UInt32, emit, traced

MEETING = 2  # named barrier of the first warpgroup; others follow
CHUNK = 16  # bytes that the swizzle moves together
WIDE = ROW // ELEMENT  # elements of a column block
LINES = 4  # rows of a column block that a warp stores together


class Lines(Work):
    """Stores the rows of a warp, which lie in place of its queries."""

    warp_rows = 16
    q_tile: SmemTile
    q_smem: Storage

    @property
    def line(self) -> UInt32:
        """What a lane has of LINES rows."""
        return self.keep.uint32(name="line", width=4)

    def _chunk(self, row: Scalar, chunk: Value) -> Value:
        """Byte of a chunk of a row, from a place whose rows are a multiple of eight."""
        return row * ROW + ((chunk ^ (row & 7)) << 4)

    def _place(self, row: int, rows: int, column: int) -> Slot:
        """Some of the warp's rows of a column block."""
        first = self.q_tile.k_block_offset(column) + WARP * (self.warp_rows * ROW) + row * ROW
        return slot(self.q_smem, 0, first, rows * ROW)

    def store_rows(self) -> list[Body]:
        """All of them, a few at a time."""
        return self._every_line(lambda c, r: [self._load_line(c, r), self._store_line(c, r)])

    def either(self, whole: Body, some: Callable[[], None]) -> Body:
        """What stores a tile's rows, or what a part of its keys comes to."""
        if self.cut == 1:
            return whole
        return [when(self.cut_up.eq(0), whole), when(self.cut_up.ne(0), traced(some))]

    def store_partial(
        self, held: Float32, row: Value, first: Scalar, rows: int, column: int, lanes: int = 1
    ) -> None:
        """Neighbours in a lane's row, one of so many from `first` on, whose columns from `column`
        on some lanes share."""
        n = held.n
        index = self.partial_index(row) * (self.dim // n) + (column // n + (LANE & (lanes - 1)))
        place = self.rectangle(PARTIAL, first, rows, column, n * lanes)
        emit(store_global(PARTIAL, index, held.slot, place, self.row_inside(row), 4 * n))

    def store_lse(
        self, row: Value, lse: Slot, first: Value, rows: int, mine: Value | None = None
    ) -> Body:
        """Of a lane's row, one of some rows, of those lanes that are to store one."""
        inside = self.row_inside(row) if mine is None else self.row_inside(row) & mine
        place, name = self.rectangle("lse", first, rows, 0, 1), f"{PARTIAL}_lse"
        whole = store_global("lse", self.index(row), lse, place, inside)

        def some() -> None:
            place = self.rectangle(name, first, rows, 0, 1)
            emit(store_global(name, self.partial_index(row), lse, place, inside))

        return self.either(whole, some)

    def _every_line(self, made: Callable[[int, int], Body]) -> list[Body]:
        return [
            made(column, row)
            for row in range(0, self.warp_rows, LINES)
            for column in range(0, self.dim, WIDE)
        ]

    def _load_line(self, column: int, row: int) -> Statement:
        """Some rows of a column block: 16 bytes a lane, eight lanes to a row."""
        line, chunk = LANE >> 3, LANE & 7
        at_byte = line * ROW + ((chunk ^ ((line + row) & 7)) << 4)
        return at.ld_shared(self.line, self._place(row, LINES, column), at_byte)

    def _store_line(self, column: int, row: int) -> Statement:
        """What lanes hold of these rows."""
        line, chunk = LANE >> 3, LANE & 7
        mine = WARP * self.warp_rows + row + line
        return store_global(
            "output",
            self.index(mine) * self.dim + (column + (chunk << 3)),
            self.line.slot,
            self.rectangle("output", WARP * self.warp_rows + row, LINES, column, WIDE),
            self.row_inside(mine),
            element=ELEMENT,
        )

    def store_nothing(self) -> list[Body]:
        """Of rows that see no key: zeros, and a log-sum-exp of -inf. Queries are not read."""
        nothing = self.keep.uint32(name="nothing")
        lane, rows = LANE % self.warp_rows, self.warp_rows
        row = WARP * rows + lane
        place = self.rectangle("lse", WARP * rows, rows, 0, 1)
        inside = (LANE // rows).eq(0) & self.row_inside(row)
        return [
            [at.mov(each, 0) for each in self.line],
            at.mov(nothing, MINUS_INFINITY),
            store_global("lse", self.index(row), nothing.slot, place, inside),
            self._every_line(self._store_line),
        ]


class Output(Lines):
    """Stores what a warp holds: 16 rows of an accumulator fragment."""

    softmax: OnlineSoftmax
    output: Float32
    consumers: int

    def store(self) -> None:
        """The warpgroup has read the queries, and each warp puts its rows in their place."""
        normal, lse = self.softmax.end()
        emit([self._store_lse(lse[half].slot, half) for half in range(2)])
        self.output *= normal
        emit(self.either(traced(self._store_whole), self._store_partial))

    def _store_whole(self) -> None:
        for group in range(self.consumers):
            emit(when((WARP >> 2).eq(group), at.named_sync(id=MEETING + group, threads=128)))
        for column in range(0, self.dim, 16):
            self._stage(column)
        emit(at.warp_sync(), self.store_rows())

    def _store_partial(self) -> None:
        """Two columns of a row at a time, of eight that four lanes have."""
        for column in range(0, self.dim, 8):
            for half in range(2):
                first = WARP * self.warp_rows + 8 * half
                two = self.output[column // 2 + 2 * half : column // 2 + 2 * half + 2]
                self.store_partial(two, first + (LANE >> 2), first, 8, column, 4)

    def _store_lse(self, lse: Slot, half: int) -> Body:
        first = WARP * self.warp_rows + 8 * half
        row = first + (LANE >> 2)
        return self.store_lse(row, lse, first, 8, (LANE & 3).eq(0))

    def _stage(self, column: int) -> None:
        """16 columns: two packed registers of both rows, twice."""
        packed = self.output[column // 2 : column // 2 + 8].pack(self.dtype)
        inside = column % WIDE
        chunk = (LANE >> 4) + inside * ELEMENT // CHUNK
        across = ((inside * ELEMENT, (inside + 16) * ELEMENT),)
        place = self._place(0, self.warp_rows, column)
        emit(at.stmatrix_x4(place, self._chunk(LANE & 15, chunk), packed.slot, across=across))
