"""What a block works on: which tile of queries of which sequence and heads, and which keys it sees.

Only the device knows where sequences begin. Tile j of sequence b has the number
qo_indptr[b] // tile_q + b + j: no two tiles share one, and numbers grow with b, so that a block
finds b by counting the sequences whose first number is not above its own. The host launches blocks
for all numbers that can occur; a few of them find no tile and leave.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, Op, UOp, Value, const, param, value, var
from ptxflow.compiler.ir.statements import Body, loop
from ptxflow.compiler.ir.storage import global_tensor, value_of
from ptxflow.compiler.kernels.attention.sequences import load_index
from ptxflow.compiler.kernels.gqa_prefill.decisions import HEADS, tile_rows
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.tile.values import Registers

WARP_LANES = 32


class Work:
    """A strategy applied to a problem: its tiles of queries, as every warp of a block sees them.

    A tile has `rows` rows: `tokens` tokens, each in `share` heads that read the same keys.
    """

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
        self.keep = Registers()
        # how many numbers of tiles there are
        self._numbers: UOp = param("total_q") // self.tokens + param("sequences")
        self.kv_head = self.first_head // (self.heads // self.kv_heads)
        # behind the tile's last token, among the queries of its sequence
        self._end = (self.first_token + self.tokens).min(self.queries)
        # 1 where the block has a tile, and some query of it sees a key, else 0
        self.sees = self.any * self.seen(self._end).min(1)
        # 1 where the block has a tile, and none of its queries sees a key, else 0
        self.fully_masked = self.any - self.sees
        # the tile's first token among all queries
        self.first_row = self.value("q_first") + self.first_token
        # columns and rows of a TMA box: all tokens of a head, or all heads of a token
        self.query_box = 128 // ELEMENT, self.rows if self.share == 1 else self.share

    def value(self, name: str) -> UOp:
        """The value of a register."""
        return value_of(self.keep(name, 1))

    # -- which tile ----------------------------------------------------------------------------

    @property
    def _number(self) -> UOp:
        """This block's: the last tiles of sequences see the most keys, and come first."""
        block = CTAID // self.units if self.s.order == HEADS else CTAID % self._numbers
        return self._numbers - 1 - block

    @property
    def unit(self) -> UOp:
        """Which heads: neighbours share keys."""
        return CTAID % self.units if self.s.order == HEADS else CTAID // self._numbers

    @property
    def first_head(self) -> UOp:
        return self.unit * self.share

    def find(self) -> list[Body]:
        """Every warp finds its block's sequence and where it begins and ends.

        What it looks up then lies in lines that the search has brought, of all tables at once: no
        number in them is negative, but the count waits for it.
        """
        i, count = var("group"), self.keep("count", 1)
        sequence = i * WARP_LANES + LANE
        inside = sequence < param("sequences")
        number = self.value("start") // self.tokens + sequence
        tables = ("kv_indptr", "kv_last_page_len")[: 1 + (self.page > 1)]
        others = {f"some_{table}": table for table in tables}
        counted = inside & (number < self._number + 1)
        for name in others:
            counted = counted & (self.value(name) < 1 << 31)
        search = [
            self._word("start", "qo_indptr", sequence, inside),
            *(self._word(name, table, sequence, inside) for name, table in others.items()),
            at.count_lanes(count, counted),
        ]
        groups = (param("sequences") + (WARP_LANES - 1)) // WARP_LANES
        after = self.value("after")
        return [
            at.mov(count, 0),
            loop(i, groups, search),
            at.copy(self.keep("after", 1), count),
            self._word("q_first", "qo_indptr", after - 1),
            self._word("q_end", "qo_indptr", after),
            self._word("kv_first", "kv_indptr", after - 1),
            self._word("kv_end", "kv_indptr", after),
            self._word("last", "kv_last_page_len", after - 1) if self.page > 1 else None,
        ]

    def _word(self, name: str, tensor: str, index: UOp, inside: Value = 1) -> UOp:
        return load_index(self.keep(name, 1).src[0], tensor, index, inside)

    # -- which queries -------------------------------------------------------------------------

    @property
    def queries(self) -> UOp:
        """Of the sequence."""
        return self.value("q_end") - self.value("q_first")

    @property
    def first_token(self) -> UOp:
        """Of the tile, among the queries of its sequence."""
        before = self.value("q_first") // self.tokens + (self.value("after") - 1)
        return (self._number - before) * self.tokens

    @property
    def any(self) -> UOp:
        """1 where the block has a tile, else 0."""
        left = self.queries - self.queries.min(self.first_token)
        return left.min(1)

    # -- which keys ----------------------------------------------------------------------------

    @property
    def keys(self) -> UOp:
        """Of the sequence."""
        entries = self.value("kv_end") - self.value("kv_first")
        if self.page <= 1:
            return entries
        full = entries.min(1)  # a sequence without pages has no last one
        return (entries - full) * self.page + full * self.value("last")

    def seen(self, end: UOp) -> UOp:
        """How many keys the queries of the sequence before `end` see: at least 0."""
        return end + self.keys - (end + self.keys).min(self.queries)

    @property
    def tiles(self) -> UOp:
        """Tiles of keys that some query sees."""
        return (self.seen(self._end) + (self.tile_kv - 1)) // self.tile_kv

    @property
    def masked(self) -> UOp:
        """Of these the last ones, some keys of which not all queries see: at least 1."""
        whole = self.seen(self.first_token + 1) // self.tile_kv
        return self.tiles - whole.min(self.tiles - 1)

    def tile_at(self, step: Value) -> UOp:
        """The tile of keys of a step: the last one comes first, as only it needs a mask."""
        return self.tiles - 1 - value(step)

    def visible(self, row: Value, step: Value) -> UOp:
        """How many keys of a step's tile a row sees, signed."""
        token = self.first_token + value(row) // self.share
        return token + 1 + self.keys - self.queries - self.tile_at(step) * self.tile_kv

    # -- places in global memory ---------------------------------------------------------------

    def row_inside(self, row: Value) -> UOp:
        """Whether a row of the tile has a query."""
        return self.first_token + value(row) // self.share < self.queries

    def index(self, row: Value) -> UOp:
        """Of a row of the tile among the rows (token, head) of q, output and lse."""
        token, head = value(row) // self.share, value(row) % self.share
        return (self.first_row + token) * self.heads + self.first_head + head

    def rectangle(self, tensor: str, row: Value, rows: int, column: int, columns: int) -> UOp:
        """`rows` rows of the tile from `row` on, for the validator: tokens by heads.

        A multiple or a divisor of the heads that share a tile.
        """
        tokens, heads = max(rows // self.share, 1), min(rows, self.share)
        width = self.dim if tensor == "output" else 1
        token, head = self.first_row + value(row) // self.share, value(row) % self.share
        at_column = (self.first_head + head) * width + column
        place = (global_tensor(tensor), token, at_column)
        return UOp(Op.SLOT, place, (tokens, columns, heads, width))

    # -- where queries come from ---------------------------------------------------------------

    def query_origin(self, box: UOp, column: int) -> tuple[UOp, UOp]:
        """Coordinates of a box of queries."""
        if self.share == 1:
            return self.first_head * self.dim + column, self.first_row
        return const(column), (self.first_row + box) * self.heads + self.first_head
