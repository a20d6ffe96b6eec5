"""How CTAs of a prefill share the tokens of their queries: in parts of about as many tiles, of long
sequences more than of short ones, numbered without gaps.

Lengths are data, so each CTA works them out. Of all tiles of all tiles of queries a part takes the
share that makes as many parts as the launch asks for, half a part lost to each tile of queries; or
some more, where all SMs are through earlier with fewer parts.
"""

from collections.abc import Callable
from functools import reduce

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import LANE, Storage, Value, const, param, var
from ptxflow.compiler.kernels.attention.sequences import QueryTiles, Sequences
from ptxflow.compiler.kernels.mla.shape import COUNT, LANES, SHARES, Shape
from ptxflow.compiler.tile.values import Registers, UInt32, emit, repeat

FEWEST = 2  # tiles of a part, if there are more
TRIED, FINE = 2, 8  # shares, each an eighth of the first more
AROUND = 256  # tokens that a CTA could have had instead of its beginning and end


class Shares:
    """The sequence of a part or a query, and how its tokens are shared; `prefix` keeps registers of
    roles and kernels apart."""

    def __init__(self, shape: Shape, prefix: str):
        self.shape, self.prefix = shape, prefix
        self.r = Registers(f"{prefix}s_")
        self.tables = list[Storage]()

    @property
    def storage(self) -> tuple[Storage, ...]:
        return (*self.tables, *self.r.storage)

    def find(self, number: Value, of_parts: bool) -> None:
        """Sets `which`, the sequence of a part or of a query, how many there are where there is
        none; `size`, the most tiles of a part; `first`, the number of the sequence's first one."""
        r, self.size = self.r, self._size()
        before, parts = r.uint32(0), r.uint32(0)
        passed = r.uint32(0) if of_parts else before

        def count(base: Value, asked: Value, tiles: Value, ends: Value) -> None:
            own = r.uint32(asked * self.parts(tiles))
            if of_parts:
                ends = passed.apply(at.copy).value + r.of(at.scan_lanes, own).value
                emit(at.sum_u32(passed, passed, self._all(own), unread="dst"))
            some = r.uint32((base + LANE < param(COUNT)) & (ends < number + 1))
            emit(at.count_lanes(before.slot, some.value.ne(0)))
            mine = self._all(r.uint32(own.value * some.value))
            emit(at.sum_u32(parts, parts, mine))

        self._each("shared", count)
        which, first = r.uint32(name="which"), r.uint32(name="first")
        which.set(before, found=("kv_indptr", 0, param(COUNT)))
        first.set(parts)
        self.which, self.first = which.value, first.value

    def parts(self, tiles: Value, size: Value | None = None) -> Value:
        """Of a sequence of so many tiles, or were there so many in a part."""
        return (tiles - tiles.min(1)) // (size or self.size) + 1

    def _size(self) -> Value:
        """The share of the tiles that there are."""
        r = self.r
        sums = r.uint32(0), r.uint32(0)  # of tiles of tokens, and of queries

        def add(base: Value, asked: Value, tiles: Value, ends: Value) -> None:
            for total, own in zip(sums, (asked * tiles, asked), strict=True):
                total += self._all(r.uint32(own))

        self._each("summed", add)
        every, places = (total.apply(at.copy).value for total in sums)
        aim = param(SHARES) - (places // 2).min(param(SHARES) - 1)
        share = (every + (aim - 1)) // aim
        least = r.uint32(share + (const(FEWEST) - share.min(FEWEST))).value
        more = r.uint32(least // FINE + (const(1) - (least // FINE).min(1))).value
        sizes = [least + more * i for i in range(TRIED)]
        return r.uint32(least + more * self._best(sizes), "size").value

    def _best(self, sizes: list[Value]) -> Value:
        """Which of some shares takes all SMs the shortest."""
        r, sms = self.r, self.shape.device.sms // self.shape.head_ctas
        counts = [r.uint32(0) for _ in sizes]

        def add(base: Value, asked: Value, tiles: Value, ends: Value) -> None:
            for total, size in zip(counts, sizes, strict=True):
                total += self._all(r.uint32(asked * self.parts(tiles, size)))

        self._each("tried", add)
        ranks = []
        for i, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            rounds = (count.apply(at.copy).value + (sms - 1)) // sms
            ranks.append(rounds * (size + AROUND // self.shape.tile) * TRIED + i)
        return reduce(Value.min, ranks) % TRIED

    def _all(self, x: UInt32) -> UInt32:
        """The sum of all lanes' numbers."""
        return self.r.of(at.reduce_lanes, x, operation="add")

    def _each(self, turn: str, body: Callable[[Value, Value, Value, Value], None]) -> None:
        """The body for each 32 sequences."""
        base = var(f"{self.prefix}s_{turn}")
        with repeat(base, param(COUNT), step=LANES, rolled=True):
            body(base, *self._lengths(turn, base))

    def _lengths(self, turn: str, base: Value) -> tuple[Value, Value, Value]:
        """Of each lane's sequence the tiles of queries, none where there is no sequence, and of
        tokens, and where its queries end."""
        shape, prefix = self.shape, f"{self.prefix}s_{turn}_"
        tokens = Sequences(shape.page_size, shape.tile, prefix)
        queries = QueryTiles(shape.queries, prefix)
        self.tables += [*tokens.bounds, *queries.bounds]
        inside = base + LANE < param(COUNT)
        sequence = (base + LANE).min(param(COUNT) - 1)
        emit(*tokens.lengths(sequence), *queries.lengths(sequence))
        asked = (queries.count + (shape.queries - 1)) // shape.queries
        mine, tiles = (self.r.uint32(x).value for x in (asked * inside, tokens.chunks))
        return mine, tiles, queries.begin + queries.count
