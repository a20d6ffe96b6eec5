"""A warpgroup of a prefill by wgmma: scores and weights of every other tile, sums of all tiles.

The scores of a tile are one warpgroup's. It rounds their weights for the other one, which adds
their products with its half of the tile's values; and the maxima of rows go from tile to tile.
"""

from __future__ import annotations

import math

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.families.attention.softmax import Registers
from ptxflow.compiler.families.gqa_prefill.softmax import Softmax
from ptxflow.compiler.families.mla.hopper_decisions import LINE, PARTS, ROWS, WARPS
from ptxflow.compiler.families.mla.hopper_output import Leaver
from ptxflow.compiler.families.mla.hopper_parts import GROUP, LINES, Part, Parts
from ptxflow.compiler.families.mla.kernel import FLOOR
from ptxflow.compiler.families.mla.problem import ELEMENT
from ptxflow.compiler.families.mla.span import Span, Work
from ptxflow.compiler.ir import LANE, WARP, Body, UOp, const, loop, param, part, slot, var, when
from ptxflow.compiler.layout import descriptor_hopper
from ptxflow.compiler.lower import single

SIDES = ("l_", "r_")  # before the registers of the warpgroups with the latent's halves
TOLD = (1, 2)  # named barriers: a side's weights and maxima are there for the other one
READY = 3  # queries are there
READ = (5, 6)  # a side has used the other one's weights
MMA_K = 16


class Warpgroup(Leaver):
    """What warpgroup `side` does; tiles 0, 2, 4, ... are the first one's, others the second's."""

    def __init__(self, kernel: Parts, side: int):
        self.kernel, self.side = kernel, side
        self.prefix = SIDES[side]
        self.r = Registers(self.prefix)
        self.work = Work(kernel, self.prefix)
        self.softmax = Softmax(self.r)
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
            self._begin(),
            when(span.first < span.end, self._ask_queries(span)),
            *first,
            loop(t, tiles, self._own(t, span), start=2 - self.side, step=2, rolled=True),
            loop(var(f"{self.prefix}tail"), left, self._others(tiles - 1)),
            self.leave(span),
        ]

    def _begin(self) -> list[UOp]:
        """What scores are scaled by to base 2, maxima below all, and sums; without tiles nobody
        needs some of it."""
        r, given = self.r, self.r("sm_scale", 1)
        scales = [
            at.fma_constants(
                r(name, 1),
                given,
                factor=float_bits(sign * math.log2(math.e)),
                summand=0,
                unread="dst",
            )
            for name, sign in (("scale", 1), ("minus_scale", -1))
        ]
        return [
            at.mov(given, param("sm_scale")),
            *scales,
            at.mov(self.softmax.top, FLOOR, unread="dst"),
            at.mov(self.softmax.total, 0),
            at.mov(self.sums, 0),
        ]

    # -- queries ------------------------------------------------------------------------------

    def _ask_queries(self, span: Span) -> list[Body]:
        """Eight rows of a warp; past the sequence's last query that one again."""
        k, out = self.kernel, list[Body]()
        for half in range(GROUP // LINES):
            row = WARP * GROUP + ((LANE >> 3) + LINES * half)
            query = (row // k.heads).min(span.queries - 1)
            index = (span.row + query) * k.heads + row % k.heads
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

    # -- tiles --------------------------------------------------------------------------------

    def _own(self, t: UOp, span: Span, alone: bool = False) -> list[Body]:
        """A tile of its own, and the other one's before it if there is one: parts of the scores,
        those values, the other parts."""
        lead: int = self.kernel.s.lead
        scores = [self._score(i, t) for i in range(PARTS)]
        if alone:
            return [scores, at.wgmma_wait(pending=0), self._weigh(t, span), self._add_own(t)]
        other: list[Body] = [self._follow(), self._add_others(t - 1)]
        through = [self._release(self.values, t - 1)]
        read = at.named_sync(id=READ[self.side], threads=16 * WARPS)  # the weights, by all warps
        if lead == PARTS:
            wait: list[Body] = [at.wgmma_wait(pending=1)]
            behind: list[Body] = [at.wgmma_wait(pending=0), *through, read]
        else:
            wait = [at.wgmma_wait(pending=PARTS - lead), *through, at.wgmma_wait(pending=0)]
            behind = [read]
        return [
            scores[:lead],
            other,
            scores[lead:],
            wait,
            self._weigh(t, span, behind),
            self._add_own(t),
        ]

    def _others(self, t: UOp) -> list[Body]:
        """The other one's tile, behind which it has none."""
        wait = at.wgmma_wait(pending=0)
        return [self._follow(), self._add_others(t), wait, self._release(self.values, t)]

    def _release(self, each: Part, t: UOp) -> UOp:
        return single(at.mbar_arrive(slot(each.ring.empty, each.ring.stage(t))))

    # -- scores and weights -------------------------------------------------------------------

    def _score(self, number: int, t: UOp) -> list[UOp]:
        """The products along the dims of a part of the rows."""
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
        return [*out, at.wgmma_commit()]

    def _weigh(self, t: UOp, span: Span, behind: Body = None) -> list[Body]:
        """Scores to weights, for both; `behind`: what must be over before they are stored."""
        k = self.kernel
        return [
            self._release(k.rotary, t),
            when(span.seen(0) < (t + 1) * k.tile, self._hide(t, span)),
            self.softmax.weigh("own", self.scores, self.scores, False),
            at.pack(self.packed, self.scores, dtype=k.dtype),
            behind,
            self._put_weights(),
            self.tell(k.tops, self.softmax.top),
            at.fence_proxy_async(),
            at.named_arrive(id=TOLD[self.side], threads=32 * WARPS),
            at.rescale_rows(self.sums, self.softmax.factor("own")),
        ]

    def _hide(self, t: UOp, span: Span) -> UOp:
        """Scores of tokens that a row's query does not see."""
        rooms = []
        for half in range(2):
            query = (self.row + (LANE >> 2) + 8 * half) // self.kernel.heads
            rooms.append(span.seen(query) - t * self.kernel.tile - ((LANE & 3) << 1))
        return at.hide_columns(self.scores, self.scores, *rooms)

    def _put_weights(self) -> list[UOp]:
        """The warp's 16 rows, 16 columns at a time."""
        rows = slot(self.kernel.weights, 0, self.row * LINE, 16 * LINE)
        line, out = LANE & 15, list[UOp]()
        for column in range(0, self.kernel.tile, 16):
            chunk = (LANE >> 4) + column // 8
            out.append(
                at.stmatrix_x4(
                    rows,
                    line * LINE + ((chunk ^ (line & 7)) << 4),
                    part(self.packed, column // 4, 4),
                    across=((column * ELEMENT, (column + 16) * ELEMENT),),
                )
            )
        return out

    def _follow(self) -> list[Body]:
        """Waits for the other one's weights, and goes on from its maxima."""
        r, softmax = self.r, self.softmax
        top, shift, fall = r("their_top", 2), r("their_shift", 2), r("their_fall", 2)
        factor = r("their_factor", 2)
        return [
            at.named_sync(id=TOLD[1 - self.side], threads=32 * WARPS),
            self.hear(self.kernel.tops, top),
            at.scale_f32(shift, top, r("minus_scale", 1)),
            at.fma_f32(fall, softmax.top, softmax.scale, shift),
            at.exp2_f32(factor, fall),
            at.copy(softmax.top, top, unread="dst"),  # lse is of one side
            at.rescale(softmax.total, factor),
            at.rescale_rows(self.sums, factor),
        ]

    # -- values -------------------------------------------------------------------------------

    def _value(self, t: UOp, row: int) -> UOp:
        """Values of 16 tokens."""
        each = self.values
        first = row // GROUP * each.group
        return slot(each.tiles, each.ring.stage(t), first, MMA_K // GROUP * each.group)

    def _add_own(self, t: UOp) -> list[Body]:
        """Weights from registers times values."""
        out: list[Body] = [at.wgmma_fence()]
        for row in range(0, self.kernel.tile, MMA_K):
            out.append(
                at.wgmma_registers(
                    self.sums,
                    part(self.packed, row // 4, 4),
                    self._value(t, row),
                    1,
                    n=self.kernel.half,
                    dtype=self.kernel.dtype,
                    transposed=True,
                    b_desc=self.values.value_descriptor,
                )
            )
        return [
            *out,
            at.wgmma_commit(),
            at.wgmma_wait(pending=0),
            self._release(self.values, t),
        ]

    def _add_others(self, t: UOp) -> list[UOp]:
        """The other one's weights, which it has stored, times values."""
        out = [at.wgmma_fence()]
        for row in range(0, self.kernel.tile, MMA_K):
            out.append(
                at.wgmma(
                    self.sums,
                    slot(self.kernel.weights),
                    self._value(t, row),
                    1,
                    n=self.kernel.half,
                    dtype=self.kernel.dtype,
                    transposed=True,
                    a_step=row * ELEMENT,
                    a_desc=descriptor_hopper(0, 0, GROUP * LINE, LINE),
                    b_desc=self.values.value_descriptor,
                )
            )
        return [*out, at.wgmma_commit()]
