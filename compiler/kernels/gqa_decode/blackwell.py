"""The first kernel on sm_100a: one thread multiplies by tcgen05, and a warpgroup weighs.

Tokens are the rows of S^T = K Q^T, dims those of O^T = V^T P, query heads the columns of both. With
64 rows a warp reaches 16 of them, and loads them as the fragments that wgmma leaves. A tile's
products with values begin anew, and are added to the sums in registers a tile later; the next
tile's scores are computed under a tile's softmax.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Body, Role, elect, loop, mbar, role, slot, tmem, when
from ptxflow.compiler.ir.nodes import WARP, Scalar, Statement, Storage, Value, const, value, var
from ptxflow.compiler.kernels.gqa_decode.decisions import GROUP_WARPS, ROWS
from ptxflow.compiler.kernels.gqa_decode.probs import Weights
from ptxflow.compiler.kernels.gqa_decode.tiles import KEYS, VALUES
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.operands import tcgen05
from ptxflow.compiler.tile.values import Float32, emit, repeat, traced

BUFFERS = 2  # of scores


class Blackwell(Weights):
    """The kernel."""

    frees = 1  # a commit

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device)
        self.score_columns = tmem("scores", 2 * self.scores.n, BUFFERS)
        self.added_columns = tmem("added", 2 * self.sums.n)
        self.asked = mbar("asked", 1, GROUP_WARPS)  # queries are there
        self.scored = mbar("scored", BUFFERS, 1)  # a tile's scores are there
        self.weighed = mbar("weighed", 1, GROUP_WARPS)  # its probs are, and sums are read
        self.summed = mbar("summed", 1, 1)  # its products with values are there

    def build(self) -> Statement:
        issuer = GROUP_WARPS + self.stages
        issue = elect(WARP.eq(issuer), loop(var("any"), self.any, self._issue()))
        roles = [
            role(Role("weigh", 0, GROUP_WARPS), self.all_tiles(self._weigh)),
            role(Role("produce", GROUP_WARPS, self.stages), self.produce()),
            role(Role("issue", issuer, 1), issue),
        ]
        bars = (self.asked, self.scored, self.weighed, self.summed)
        memory = (self.score_columns, self.added_columns)
        storage = (*self.tile_storage, *bars, self.broadcast, self.probs, *memory)
        # in the end warps meet when each has loaded the last sums, so that tensor memory may go
        body = [*self.find_span(), *roles, *self.add_up()]
        return finish(self.info(issuer + 1, storage), *body, drained=True)

    def _after_one(self, body: Body) -> Body:
        """What there is of several tiles alone."""
        return body if self.tiles > 1 or self.entire else None

    # -- multiplying ---------------------------------------------------------------------------

    def _issue(self) -> list[Body]:
        """One thread's: the scores of the next tile, then the products with a tile's values."""
        t = var("issued")
        following = self._after_one(when(t + 1 < self.count, self._multiply_keys(t + 1)))
        return [
            at.mbar_wait(slot(self.asked), 0),
            self._multiply_keys(const(0)),
            loop(t, self.count, following, self._multiply_values(t)),
        ]

    def _multiply_keys(self, t: Value) -> list[Statement]:
        """Their place has been read when the tile before the last one was weighed."""
        ring, out = self.rings[KEYS], [self.rings[KEYS].wait_full(t), at.tcgen05_fence_after()]
        for h, i, k, q, more in self.key_products(ring.stage(t)):
            d = slot(self.score_columns, t & 1, (h * self.deep + i) * self.wide, self.wide)
            out.append(tcgen05(d, k, q, more, ROWS, self.dtype))
        free = [at.tcgen05_commit(slot(ring.empty, ring.stage(t)))] if self.apart else []
        return [*out, *free, at.tcgen05_commit(slot(self.scored, t & 1))]

    def _multiply_values(self, t: Value) -> list[Statement]:
        ring = self.rings[VALUES]
        out = [ring.wait_full(t)] if self.apart else []
        out += [at.mbar_wait(slot(self.weighed), t & 1), at.tcgen05_fence_after()]
        for h, d, v, probs, more in self.value_products(ring.stage(t)):
            into = slot(self.added_columns, 0, (h * self.dims + d) * self.wide, self.wide)
            out.append(tcgen05(into, v, probs, more, ROWS, self.dtype))
        free = at.tcgen05_commit(slot(ring.empty, ring.stage(t)))
        return [*out, free, at.tcgen05_commit(slot(self.summed))]

    # -- weighing ------------------------------------------------------------------------------

    def _weigh(self) -> None:
        """All tiles, and what they come to."""
        emit(self.ask_queries(), self._arrive(self.asked))
        t = var("step")
        with repeat(t, self.count):
            self._step(t)
        self._add(self.count - 1)
        emit(at.tcgen05_fence_before())

    def _step(self, t: Value) -> None:
        """Scores to probs; before they take the place of the last ones, what those came to."""
        cleared = self.clear(t)
        emit(at.mbar_wait(slot(self.scored, t & 1), (t >> 1) & 1))
        self._take(self.scores, self.score_columns, t & 1)
        self.update_max(t)
        self.to_probs()
        emit(self._after_one(when(const(0) < t, traced(self._add, t - 1))))
        self.rescale_sums()
        self.put_probs()
        if cleared:
            last = self.tokens < self.first(t) + self.tile
            emit(when(last, self.rings[VALUES].wait_full(t), cleared))
        emit(at.fence_proxy_async(), at.tcgen05_fence_before(), self._arrive(self.weighed))

    def _take(self, into: Float32, columns: Storage, stage: Scalar) -> None:
        """A warp's 16 of every 64 rows, to registers: so many in a load as is a power of two."""
        emit(at.tcgen05_fence_after())
        first = 0
        while rest := into.n - first:
            n = 1 << rest.bit_length() - 1
            place = slot(columns, stage, 2 * first, 2 * n)
            held = into[first : first + n].slot
            emit(at.tcgen05_ld(held, place, WARP << 21, shape="16x256b"))
            first += n
        emit(at.tcgen05_wait_ld())

    def _add(self, t: Value) -> None:
        """What a tile's probs and values come to, to the sums."""
        emit(at.mbar_wait(slot(self.summed), value(t) & 1))
        added = self.sums.fresh()
        self._take(added, self.added_columns, 0)
        self.sums += added

    def _arrive(self, bar: Storage) -> list[Statement]:
        """A warp's arrival, of all its lanes."""
        return [at.warp_sync(), single(at.mbar_arrive(slot(bar)))]
