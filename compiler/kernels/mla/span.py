"""Which queries and tokens a CTA has: a chunk of a sequence in decoding, a tile of its queries in a
prefill. Lengths are data: a CTA finds its sequence by its own number."""

from dataclasses import dataclass, replace

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import Scalar, Statement, Storage, Value, const, param, slot, value, when
from ptxflow.compiler.ir.nodes import LANE, WARP
from ptxflow.compiler.kernels.attention.sequences import QueryTiles, Sequences
from ptxflow.compiler.kernels.mla.shape import COUNT, Shape
from ptxflow.compiler.kernels.mla.shares import Shares
from ptxflow.compiler.tile.values import emit, trace

PLANNING = "p_"  # before the registers of the warp that plans for all


@dataclass(frozen=True)
class Span:
    """Tokens first..end-1 of a sequence, for `queries` queries from `row` on.

    `present`: whether there is anything to do; `tokens`: how many the sequence has. Of `total`
    tokens that CTAs share one has `part` at most: a CTA that has all writes the output.
    """

    first: Value
    end: Value
    tiles: Value
    row: Value
    queries: Value
    present: Value
    tokens: Value
    reach: Value  # tokens that the first query sees, plus `asked`, which may be more
    asked: Value
    total: Value
    part: Value

    def seen(self, query: Scalar) -> Value:
        """The first token that a query of the CTA does not see."""
        reach = self.reach + query
        return (reach - reach.min(self.asked)).min(self.end)


class Work:
    """Finds a CTA's span, and where the rows of its tokens are. Each role does so in registers of
    its own, told apart by `prefix`: what is held across roles that differ in registers, ptxas
    spills."""

    def __init__(self, shape: Shape, prefix: str = ""):
        self.shape = shape
        self.sequences = Sequences(shape.page_size, shape.chunk or shape.tile, prefix)
        self.tiles = QueryTiles(shape.queries, prefix)
        self.shares = Shares(shape, prefix)
        self.lengths_storage = self.sequences.bounds

    @property
    def storage(self) -> tuple[Storage, ...]:
        """Registers that it holds values in."""
        if not self.shape.decodes and self.shape.split:
            return (*self.lengths_storage, *self.tiles.bounds, *self.shares.storage)
        if not self.shape.decodes:
            return (*self.lengths_storage, *self.tiles.storage)
        return self.sequences.storage if self.shape.split else self.lengths_storage

    def find(self) -> tuple[list[Statement], Span]:
        """Statements that find the span, and the span."""
        if not self.shape.decodes:
            return self._part() if self.shape.split else self._place(self.shape.place)
        return self._chunk() if self.shape.split else self._sequence()

    def _sequence(self) -> tuple[list[Statement], Span]:
        """A whole sequence."""
        tokens = self.sequences.tokens
        sequence = self.shape.place
        span = self._span(sequence, const(0), tokens, const(1))
        return self.sequences.lengths(sequence), span

    def _chunk(self) -> tuple[list[Statement], Span]:
        """A chunk; an empty sequence has one, too."""
        s, chunk, place = self.sequences, self.shape.chunk, self.shape.place
        body, sequence = s.find(place, param(COUNT))
        number = place - s.first_place(sequence)
        tokens, first = s.tokens, number * chunk
        present = (first < tokens) | number.eq(0)
        end = (first + chunk).min(tokens)
        span = self._span(sequence, first, end, present)
        return [*body, *s.lengths(sequence)], span

    def _span(self, sequence: Value, first: Value, end: Value, present: Value) -> Span:
        tokens, tiles = self.sequences.tokens, self._tiles(first, end)
        of = tokens, const(self.shape.chunk)
        return Span(first, end, tiles, sequence, const(1), present, tokens, end, const(0), *of)

    def plan(self) -> list[Statement]:
        """What all warps are told of a part, by the first: the same code by all would come late."""
        place = self.shape.place
        found, _ = self.sequence(place, of_parts=True)
        with trace() as body:
            emit(*found)
            part = place - self.shares.first
            first = (self.asked - 1 - part // self.parts) * self.shape.queries
            tile = part % self.parts * self.share
            self.tell(self.shares.which, first, tile, self.share)
        return [when(WARP.eq(0), body), at.cta_sync()]

    def _part(self) -> tuple[list[Statement], Span]:
        """Some of the tiles that a tile of queries sees, if there are any; late queries first."""
        with trace() as body:
            which, begin, tile, share = self.hear("which", "from", "tile", "share")
            mine = which.min(param(COUNT) - 1)
            emit(self.sequences.lengths(mine), self.tiles.lengths(mine))
        span, tokens, there = self.queries(begin), share * self.shape.tile, which < param(COUNT)
        first = tile * self.shape.tile
        end = (first + tokens).min(span.end)
        tiles, present = self._tiles(first, end) * there, there & (first < end)
        own = {"first": first, "end": end, "tiles": tiles, "present": present, "part": tokens}
        return body, replace(span, **own)

    def tell(self, *words: Scalar) -> None:
        """One warp's, to all."""
        told = self.shares.r.together(words).slot
        emit(at.st_shared_lanes(slot(*self.shape.told), 0, LANE.eq(0), told))

    def hear(self, *names: str) -> list[Value]:
        """What it told, in registers of these names."""
        told = [self.shares.r.uint32(name=name) for name in names]
        for i, x in enumerate(told):
            emit(at.ld_shared(x, slot(*self.shape.told), 4 * i, alike=True))
        return [x.value for x in told]

    def sequence(self, number: Value, of_parts: bool) -> tuple[list[Statement], Value]:
        """Finds the sequence of a part or a query, into how many parts of how many tiles it is cut
        for each tile of queries, and how many of these are `asked`; and whether there is one."""
        with trace() as body:
            self.shares.find(number, of_parts)
            mine = self.shares.which.min(param(COUNT) - 1)
            emit(self.sequences.lengths(mine), self.tiles.lengths(mine))
        tiles, queries = self.sequences.chunks, self.shape.queries
        self.asked = (self.tiles.count + (queries - 1)) // queries
        self.parts = self.shares.parts(tiles)
        self.share = (tiles - tiles.min(1)) // self.parts + 1
        return body, self.shares.which < param(COUNT)

    def _place(self, place: Value) -> tuple[list[Statement], Span]:
        """All that the queries of a place see."""
        body, sequence = self.tiles.find(place, param(COUNT))
        found = [*self.sequences.lengths(sequence), *self.tiles.lengths(sequence)]
        return [*body, *found], self.queries(self.tiles.first(place, sequence))

    def queries(self, first: Value) -> Span:
        """Some queries of the sequence, and the tokens that the last of them sees."""
        asked, tokens = self.tiles.count, self.sequences.tokens
        reach = tokens + first + self.shape.queries
        end = (reach - reach.min(asked)).min(tokens)
        return Span(
            first=const(0),
            end=end,
            tiles=self._tiles(const(0), end),
            row=self.tiles.begin + first,
            queries=(asked - first).min(self.shape.queries),
            present=first < asked,
            tokens=tokens,
            reach=tokens + first + 1,
            asked=asked,
            total=end,
            part=end,
        )

    def _tiles(self, first: Value, end: Value) -> Value:
        count = end - first.min(end)
        return (count + (self.shape.tile - 1)) // self.shape.tile

    def token(self, span: Span, tile: Value, number: Scalar) -> Value:
        """The token of a row of a tile; past the end the last one again."""
        return (span.first + (tile * self.shape.tile + value(number))).min(span.end - 1)

    def entry(self, span: Span, token: Value) -> tuple[str, Value]:
        """The tensor that says where a token's row is, and the index of that."""
        return "kv_indices", self.sequences.begin + token // self.shape.page_size

    def row(self, entry: Value, token: Value) -> Value:
        """A token's row in the cache, of all tokens of all pages."""
        return self.sequences.row(entry, token)

    def there(self, row: Value) -> Value | None:
        """Whether there is such a row; None where all tokens have one."""
        return None
