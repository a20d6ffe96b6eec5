"""What a block works on: which tile of queries of which sequence and heads, and which keys it sees.

Only the device knows where sequences begin. Tile j of sequence b has the number
qo_indptr[b] // tile_q + b + j: no two tiles share one, and numbers grow with b, so that a block
finds b by counting the sequences whose first number is not above its own. The host launches blocks
for all numbers that can occur; a few of them find no tile and leave.
"""

from collections.abc import Callable

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, const, global_tensor, loop, param, value, var
from ptxflow.compiler.ir.nodes import CTAID, LANE, Op, Scalar, Slot, Statement, Value
from ptxflow.compiler.kernels.attention.sequences import load_index
from ptxflow.compiler.kernels.gqa_prefill.decisions import HEADS, tile_rows
from ptxflow.compiler.kernels.gqa_prefill.mask import Mask
from ptxflow.compiler.kernels.gqa_prefill.page_map import PageMap
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.launch import Expr, Param
from ptxflow.compiler.tile.values import Float32, Registers, UInt32, emit

WARP_LANES = 32
SEQUENCES: dict[str, Param | Expr] = {"sequences": "len_indptr - 1"}
LOOKED_UP = "start", "after", "q_first", "q_end", "kv_first", "kv_end", "last"
PARTIAL = "partial"  # what parts of the keys come to, and its log-sum-exp


class Work:
    """A strategy applied to a problem: its tiles of queries, as every warp of a block sees them.

    A tile has `rows` rows: `tokens` tokens, each in `share` heads that read the same keys. A `mask`
    that somebody wrote holds beside causality; tiles of which it hides all keys are not skipped. A
    `page_map` that somebody wrote says where the table has pages.
    """

    mask: Mask | None = None
    page_map: PageMap | None = None
    prefix = ""  # of registers, which tells those of two kernels apart

    def __init__(self, problem: Problem, strategy: Strategy, device: Device):
        self.problem, self.s, self.device = problem, strategy, device
        axes = dict(problem.axes)
        self.heads, self.kv_heads, self.dim = (
            axes[n] for n in ("num_qo_heads", "num_kv_heads", "head_dim")
        )
        self.page = axes.get("page_size", 0)  # tokens of a page; 0: no pages
        self.dtype = PTX_TYPE[problem.dtype]
        self.rows = int(tile_rows(strategy.fields(), device))
        self.share: int = strategy.share
        self.tokens: int = self.rows // self.share
        self.tile_kv: int = strategy.tile_kv
        self.units = self.heads // self.share  # of heads, side by side
        self.cut: int = strategy.get("parts", 1)  # parts of a tile's keys, at most
        self.least: int = strategy.get("least", 1)  # tiles of keys of a part, at least
        r = self.keep = Registers(self.prefix)
        self.start, self.after, *bounds, self.last = (r.uint32(name=n) for n in LOOKED_UP)
        self.q_first, self.q_end, self.kv_first, self.kv_end = bounds
        self._tile()
        self._keys()
        if self.cut > 1:
            self._part()
        # columns and rows of a TMA box: all tokens of a head, or all heads of a token
        self.query_box = 128 // ELEMENT, self.rows if self.share == 1 else self.share

    def _tile(self) -> None:
        """Which tile of queries: of which heads, where neighbours share keys, and which tokens."""
        numbers: Value = param("total_q") // self.tokens + param("sequences")  # of tiles
        block, unit, part = self._given(numbers)
        # the last tiles of sequences see the most keys, and come first
        self._number = numbers - 1 - block
        # queries of the sequence, the tile's first token among them, and among all
        first, end = self.q_first.value, self.q_end.value
        before = first // self.tokens + (self.after.value - 1)
        self.queries = self.kept("queries", end - first)
        self.first_token = self.kept("tile_from", (self._number - before) * self.tokens)
        self.first_row = first + self.first_token
        self.first_head = self.kept("unit", unit) * self.share
        self.part = self.kept("part", part) if self.cut > 1 else part
        self.kv_head = self.first_head // (self.heads // self.kv_heads)

    def _given(self, numbers: Value) -> tuple[Value, Value, Value]:
        """Which tile, which heads and which part of the keys the block has."""
        first, cut = self.s.order == HEADS, self.cut
        inner, outer = (
            (CTAID % self.units, CTAID // self.units)
            if first
            else (CTAID % numbers, CTAID // numbers)
        )
        outer, part = (outer // cut, outer % cut) if cut > 1 else (outer, const(0))
        return (outer, inner, part) if first else (inner, outer, part)

    def _keys(self) -> None:
        """Which keys the tile's queries see."""
        entries = self.kv_end.value - self.kv_first.value
        self.keys = entries  # of the sequence
        if self.page > 1:
            full = entries.min(1)  # a sequence without pages has no last one
            self.keys = (entries - full) * self.page + full * self.last.value
        # behind the tile's last token, among the queries of its sequence
        end = (self.first_token + self.tokens).min(self.queries)
        left = self.queries - self.queries.min(self.first_token)
        # 1 where the block has a tile and some query of it sees a key; where none does; else 0
        self.sees = left.min(1) * self.seen(end).min(1)
        self.fully_masked = left.min(1) - self.sees
        # tiles of keys that some query sees; the last ones, at least 1, of which not all see some
        self.tiles = self.end = (self.seen(end) + (self.tile_kv - 1)) // self.tile_kv
        whole = self.seen(self.first_token + 1) // self.tile_kv
        self.masked = self.tiles - whole.min(self.tiles - 1)

    def _part(self) -> None:
        """The block has some of the tiles of keys: as many as others', or `least`."""
        tiles, share = self.tiles, (self.tiles - self.tiles.min(1)) // self.cut + 1
        self.portion = share + self.least - share.min(self.least)
        first = self.part * self.portion
        self.end = (first + self.portion).min(tiles)
        self.tiles = self.end - first.min(self.end)
        seen_by_all = tiles - self.masked
        before = seen_by_all + first - seen_by_all.min(first)
        self.masked = self.end - before.min(self.end - 1)
        self.all_tiles = tiles
        self.cut_up = (tiles - tiles.min(self.portion)).min(1)  # whether there are other parts
        self.sees = self.sees * self.tiles.min(1)
        self.fully_masked = self.fully_masked * (1 - self.part.min(1))

    def kept(self, name: str, found: Value) -> Value:
        """What every warp uses of what it finds: worked out anew each time."""
        return found

    @property
    def blocks(self) -> Expr:
        """Tiles that there can be, in all heads."""
        return f"(total_q // {self.tokens} + len_indptr - 1) * {self.units}"

    # -- which tile ----------------------------------------------------------------------------

    def find(self) -> list[Body]:
        """Every warp finds its block's sequence and where it begins and ends.

        What it looks up then lies in lines that the search has brought, of all tables at once: no
        number in them is negative, but the count waits for it.
        """
        i, count, r = var("group"), self.keep.uint32(name="count"), self.keep
        sequence = i * WARP_LANES + LANE
        inside = sequence < param("sequences")
        number = self.start.value // self.tokens + sequence
        tables = ("kv_indptr", "kv_last_page_len")[: 1 + (self.page > 1)]
        others = {table: r.uint32(name=f"some_{table}") for table in tables}
        counted = inside & (number < self._number + 1)
        for held in others.values():
            counted = counted & (held.value < 1 << 31)
        search = [
            self._word(self.start, "qo_indptr", sequence, inside),
            *(self._word(held, table, sequence, inside) for table, held in others.items()),
            at.count_lanes(count, counted),
        ]
        groups = (param("sequences") + (WARP_LANES - 1)) // WARP_LANES
        after = self.after.value
        return [
            at.mov(count, 0),
            loop(i, groups, search),
            at.copy(self.after, count, found=("qo_indptr", 1, param("sequences"))),
            self._word(self.q_first, "qo_indptr", after - 1),
            self._word(self.q_end, "qo_indptr", after),
            self._word(self.kv_first, "kv_indptr", after - 1),
            self._word(self.kv_end, "kv_indptr", after),
            self._word(self.last, "kv_last_page_len", after - 1) if self.page > 1 else None,
        ]

    def _word(self, held: UInt32, tensor: str, index: Value, inside: Scalar = 1) -> Statement:
        return load_index(held.slot.src[0], tensor, index, inside)

    # -- which keys ----------------------------------------------------------------------------

    def seen(self, end: Value) -> Value:
        """How many keys the queries of the sequence before `end` see: at least 0."""
        return end + self.keys - (end + self.keys).min(self.queries)

    def tile_at(self, step: Scalar) -> Value:
        """The tile of keys of a step: the last one comes first, as only it needs a mask."""
        return self.end - 1 - value(step)

    def visible(self, row: Scalar, step: Scalar) -> Value:
        """How many keys of a step's tile a row sees, signed."""
        token = self.first_token + value(row) // self.share
        return token + 1 + self.keys - self.queries - self.tile_at(step) * self.tile_kv

    def hide(
        self, scores: Float32, step: Scalar, place: Callable[[int], tuple[Scalar, Scalar]]
    ) -> Float32:
        """Scores of a step, by the `place` (row, column) of each in its tile: minus infinity where
        the mask hides them."""
        if self.mask is None:
            return scores
        out = self.keep.float32(scores.n, dtype=scores.slot.src[0].arg.dtype)
        emit(at.copy(out.slot, scores.slot))
        first = self.tile_at(step) * self.tile_kv
        for i, (row, column) in enumerate(map(place, range(scores.n))):
            token = self.first_token + value(row) // self.share + self.keys - self.queries
            given = {"q": token, "k": first + column, "queries": self.queries, "keys": self.keys}
            emit(at.hide(out[i].slot, self.mask.condition(given)))
        return out

    # -- places in global memory ---------------------------------------------------------------

    def row_inside(self, row: Scalar) -> Value:
        """Whether a row of the tile has a query."""
        return self.first_token + value(row) // self.share < self.queries

    def index(self, row: Scalar) -> Value:
        """Of a row of the tile among the rows (token, head) of q, output and lse."""
        token, head = value(row) // self.share, value(row) % self.share
        return (self.first_row + token) * self.heads + self.first_head + head

    def partial_index(self, row: Scalar) -> Value:
        """Of a row of the tile among those of all parts."""
        return self.part * param("total_q") * self.heads + self.index(row)

    def rectangle(self, tensor: str, row: Scalar, rows: int, column: int, columns: int) -> Slot:
        """`rows` rows of the tile from `row` on, for the validator: tokens by heads.

        A multiple or a divisor of the heads that share a tile.
        """
        tokens, heads = max(rows // self.share, 1), min(rows, self.share)
        width = 1 if tensor.endswith("lse") else self.dim
        token, head = self.first_row + value(row) // self.share, value(row) % self.share
        if tensor.startswith(PARTIAL):
            token = self.part * param("total_q") + token
        at_column = (self.first_head + head) * width + column
        place = (global_tensor(tensor), token, at_column)
        return Slot(Op.SLOT, place, (tokens, columns, heads, width))

    # -- where queries come from ---------------------------------------------------------------

    def query_origin(self, box: Value, column: int) -> tuple[Value, Value]:
        """Coordinates of a box of queries."""
        if self.share == 1:
            return self.first_head * self.dim + column, self.first_row
        return const(column), (self.first_row + box) * self.heads + self.first_head
