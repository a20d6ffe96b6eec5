"""A warpgroup of a prefill by wgmma: scores and probs of every other tile, sums of all tiles.

The scores of a tile are one warpgroup's. It rounds their probs for the other one, which adds
their products with its half of the tile's values; and the maxima of rows go from tile to tile.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, const, loop, part, slot, var, when
from ptxflow.compiler.kernels.mla.hopper_decisions import LAZY, LINE, PARTS, ROWS, WARPS
from ptxflow.compiler.kernels.mla.hopper_epilogue import Leaver
from ptxflow.compiler.kernels.mla.hopper_parts import GROUP, LINES, Part, Parts
from ptxflow.compiler.kernels.mla.hopper_softmax import Softmax
from ptxflow.compiler.kernels.mla.problem import ELEMENT
from ptxflow.compiler.kernels.mla.span import Span, Work
from ptxflow.compiler.layout import descriptor_hopper
from ptxflow.compiler.lower import single
from ptxflow.compiler.tile.values import Registers

SIDES = ("l_", "r_")  # before the registers of the warpgroups with the latent's halves
#: named barriers: some of a side's probs, and with the first its maxima, are there for the other
TOLD = ((1, 2), (7, 8))
SITES = ("first", "own", "next", "tail")  # of statements where references may rise
READY = 3  # queries are there
READ = (5, 6)  # a side has used the other one's probs
MMA_K = 16
WEIGHTS = descriptor_hopper(0, 0, GROUP * LINE, LINE)


class Warpgroup(Leaver):
    """What warpgroup `side` does; tiles 0, 2, 4, ... are the first one's, others the second's."""

    def __init__(self, kernel: Parts, side: int):
        self.kernel, self.side = kernel, side
        self.prefix = SIDES[side]
        self.r = Registers(self.prefix)
        self.work = Work(kernel, self.prefix)
        self.softmax = Softmax(self.r, kernel.s.rescale == LAZY)
        self.pieces: int = kernel.s.pieces
        self.values: Part = (kernel.left, kernel.right)[side]
        self.sums = self.r("sums", kernel.half // 2)
        self.scores = self.r("scores", kernel.tile // 2)
        self.packed = self.r("packed", kernel.tile // 4)

    @property
    def storage(self) -> tuple[UOp, ...]:
        return (*self.work.storage, *self.r.storage)

    def multiply(self, span: Span) -> list[Body]:
        """All tiles of the span, and what they come to."""
        t, tiles = var(f"{self.prefix}tile"), span.tiles
        some, odd = tiles.min(1), tiles & 1
        if self.side == 0:
            first = [loop(var("l_first"), some, self._own(const(0), span, alone=True))]
            left = some - odd
        else:
            first, left = [], odd
        return [
            self.softmax.begin(),
            at.mov(self.sums, 0),
            when(span.first < span.end, self._ask_queries(span)),
            *first,
            loop(t, tiles, self._own(t, span), start=2 - self.side, step=2, rolled=True),
            loop(var(f"{self.prefix}tail"), left, self._others(tiles - 1)),
            self.epilogue(span),
        ]

    # -- queries -------------------------------------------------------------------------------

    def _ask_queries(self, span: Span) -> list[Body]:
        """Eight rows of a warp; past the sequence's last query that one again."""
        k, out = self.kernel, list[Body]()
        for half in range(GROUP // LINES):
            row = WARP * GROUP + ((LANE >> 3) + LINES * half)
            query = (row // k.own_heads).min(span.queries - 1)
            index = (span.row + query) * k.heads + row % k.own_heads + k.first_head
            for each in k.parts:
                group = slot(each.queries, 0, WARP * each.group, each.group)
                out.append(each.copy(each.asked, group, half, index))
        return [
            *out,
            at.copies_commit(),
            at.copies_wait(pending=0),
            at.fence_proxy_async(),
            at.named_sync(id=READY, threads=32 * WARPS),
        ]

    # -- tiles ---------------------------------------------------------------------------------

    def _own(self, t: UOp, span: Span, alone: bool = False) -> list[Body]:
        """A tile of its own, and the other one's before it if there is one: parts of the scores,
        those values, the other parts."""
        lead: int = self.kernel.s.lead
        if alone:
            wait: Body = at.wgmma_wait(pending=0)
            return [self._scores(t, 0, PARTS), wait, self._weigh("first", t, span, None)]
        used = [
            self._release(self.values, t - 1),
            at.named_sync(id=READ[self.side], threads=16 * WARPS),  # the probs, by all warps
        ]
        wait = at.wgmma_wait(pending=1)
        if lead == PARTS:
            used = [at.wgmma_wait(pending=0), *used]
        else:
            wait = [wait, used.pop(0), at.wgmma_wait(pending=0)]
        return [
            self._scores(t, 0, lead),
            self._add_others("next", t - 1),
            self._scores(t, lead, PARTS) if lead < PARTS else None,
            wait,
            self._weigh("own", t, span, used),
        ]

    def _others(self, t: UOp) -> list[Body]:
        """The other one's tile, behind which there is none."""
        return [self._add_others("tail", t), at.wgmma_wait(pending=0)]

    def _release(self, each: Part, t: UOp) -> UOp:
        return single(at.mbar_arrive(slot(each.ring.empty, each.ring.stage(t))))

    # -- scores --------------------------------------------------------------------------------

    def _scores(self, t: UOp, first: int, last: int) -> list[UOp]:
        """The products along the dims of some parts of the rows; with the last they are complete,
        else those behind them."""
        out = [each for number in range(first, last) for each in self._score(number, t)]
        return [*out, at.wgmma_commit()] if last == PARTS else out

    def _score(self, number: int, t: UOp) -> list[UOp]:
        k, each = self.kernel, self.kernel.parts[number]
        stage = each.ring.stage(t)
        out = [each.ring.wait_full(t), at.wgmma_fence()]
        for block in range(each.blocks):
            for step in range(0, LINE, MMA_K * ELEMENT):
                out.append(
                    at.wgmma(
                        self.scores,
                        each.block(each.queries, 0, ROWS, block),
                        each.block(each.tiles, stage, k.tile, block),
                        int(number + block + step > 0),
                        n=k.tile,
                        dtype=k.dtype,
                        a_step=step,
                        b_step=step,
                        a_desc=each.descriptor,
                        b_desc=each.descriptor,
                    )
                )
        return out

    def _token(self, span: Span, t: UOp) -> UOp:
        """The first token of a tile."""
        return span.first + t * self.kernel.tile

    def _hide(self, t: UOp, span: Span) -> UOp:
        """Scores of tokens that a row's query does not see."""
        rooms = []
        for half in range(2):
            query = (self.row + (LANE >> 2) + 8 * half) // self.kernel.own_heads
            rooms.append(span.seen(query) - self._token(span, t) - ((LANE & 3) << 1))
        return at.hide_columns(self.scores, self.scores, *rooms)

    # -- probs and values ----------------------------------------------------------------------

    def _weigh(self, site: str, t: UOp, span: Span, used: Body) -> list[Body]:
        """Scores to probs, piece by piece for both warpgroups, and those times values; `used`:
        the other one's probs are, in whose place they are stored."""
        k, softmax = self.kernel, self.softmax
        out: list[Body] = [
            self._release(k.rotary, t),
            when(span.seen(0) < self._token(span, t + 1), self._hide(t, span)),
            softmax.update_max(site, self.scores),
        ]
        for piece, columns in enumerate(self._columns()):
            scores = part(self.scores, columns[0] // 2, len(columns) * MMA_K // 2)
            packed = part(self.packed, columns[0] // 4, len(columns) * MMA_K // 4)
            out += [softmax.to_probs(scores), at.pack(packed, scores, dtype=k.dtype)]
            if piece == 0:
                out += [used, self.broadcast(k.row_maxima, softmax.reference)]
            out += [
                self._put_probs(columns),
                at.fence_proxy_async(),
                at.named_arrive(id=TOLD[piece][self.side], threads=32 * WARPS),
            ]
            if piece == 0:
                out += softmax.rescale(site, softmax.reference, self.sums)
            out += self._add(t, columns, own=True)
        return [
            *out,
            at.wgmma_commit(),
            softmax.add(self.scores),
            at.wgmma_wait(pending=0),
            self._release(self.values, t),
        ]

    def _columns(self) -> list[range]:
        """The first of 16 columns each, of the pieces of a tile's probs."""
        size = self.kernel.tile // self.pieces
        return [range(i * size, (i + 1) * size, MMA_K) for i in range(self.pieces)]

    def _put_probs(self, columns: range) -> list[UOp]:
        """The warp's 16 rows, 16 columns at a time."""
        rows = slot(self.kernel.probs, 0, self.row * LINE, 16 * LINE)
        line, out = LANE & 15, list[UOp]()
        for column in columns:
            chunk = (LANE >> 4) + column // 8
            out.append(
                at.stmatrix_x4(
                    rows,
                    line * LINE + ((chunk ^ (line & 7)) << 4),
                    part(self.packed, column // 4, 4),
                    across=((column * ELEMENT, (column + MMA_K) * ELEMENT),),
                )
            )
        return out

    def _add_others(self, site: str, t: UOp) -> list[Body]:
        """The other one's probs, when they are there, times values."""
        out, row_max = list[Body](), self.r("their_top", 2)
        for piece, columns in enumerate(self._columns()):
            out.append(at.named_sync(id=TOLD[piece][1 - self.side], threads=32 * WARPS))
            if piece == 0:
                out += [
                    self.receive(self.kernel.row_maxima, row_max),
                    self.softmax.update_max_from(site, row_max, self.sums),
                ]
            out += self._add(t, columns, own=False)
        return [*out, at.wgmma_commit()]

    def _add(self, t: UOp, columns: range, own: bool) -> list[UOp]:
        """Weights from registers, or those that the other one stored, times values."""
        each, out = self.values, [at.wgmma_fence()]
        attrs = {"n": self.kernel.half, "dtype": self.kernel.dtype, "transposed": True}
        attrs["b_desc"] = each.value_descriptor
        for row in columns:
            tokens = slot(
                each.tiles,
                each.ring.stage(t),
                row // GROUP * each.group,
                MMA_K // GROUP * each.group,
            )
            if own:
                probs = part(self.packed, row // 4, 4)
                out.append(at.wgmma_registers(self.sums, probs, tokens, 1, **attrs))
            else:
                stored = slot(self.kernel.probs)
                step = {"a_step": row * ELEMENT, "a_desc": WEIGHTS}
                out.append(at.wgmma(self.sums, stored, tokens, 1, **attrs, **step))
        return out
