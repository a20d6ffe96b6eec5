"""The first kernel on sm_90a: a warpgroup multiplies by wgmma, from what its producers bring.

Tokens are the rows of S^T = K Q^T, dims those of O^T = V^T P, query heads the columns of both; sums
stay in registers.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import Role, Statement, Value, role, var, when
from ptxflow.compiler.kernels.gqa_decode.decisions import GROUP_WARPS
from ptxflow.compiler.kernels.gqa_decode.probs import MEET, THREADS, Weights
from ptxflow.compiler.kernels.gqa_decode.tiles import KEYS, VALUES
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.operands import wgmma
from ptxflow.compiler.tile.values import emit, repeat


class Hopper(Weights):
    """The kernel."""

    def build(self) -> Statement:
        roles = [
            role(Role("multiply", 0, GROUP_WARPS), self.all_tiles(self._multiply)),
            role(Role("produce", GROUP_WARPS, self.stages), self.produce()),
        ]
        body = [*self.find_span(), *roles, *self.add_up()]
        storage = (*self.tile_storage, self.broadcast, self.probs)
        return finish(self.info(GROUP_WARPS + self.stages, storage), *body)

    def _multiply(self) -> None:
        """All tiles."""
        emit(self.ask_queries(), at.named_sync(id=MEET, threads=THREADS))
        t = var("step")
        with repeat(t, self.count):
            self._step(t)

    def _step(self, t: Value) -> None:
        ring = self.rings[VALUES]
        values = ring.wait_full(t) if self.apart else None
        cleared = self.clear(t)
        emit(self._multiply_keys(t), self._release(KEYS, t) if self.apart else None)
        self.update_max(t)
        self.to_probs()
        self.put_probs()
        if cleared:
            emit(values, when(self.tokens < self.first(t) + self.tile, cleared))
        emit(at.fence_proxy_async(), at.named_sync(id=MEET, threads=THREADS))
        self.rescale_sums()
        emit(None if cleared else values, self._multiply_values(t), self._release(VALUES, t))

    def _release(self, name: str, t: Value) -> Statement:
        return self.rings[name].release(t)

    def _multiply_keys(self, t: Value) -> list[Statement]:
        """Scores of a tile."""
        ring, out = self.rings[KEYS], [self.rings[KEYS].wait_full(t), at.wgmma_fence()]
        for h, i, k, q, more in self.key_products(ring.stage(t)):
            out.append(wgmma(self.of_mma(self.scores, h, i).slot, k, q, more, self.dtype))
        return [*out, at.wgmma_commit(), at.wgmma_wait(pending=0)]

    def _multiply_values(self, t: Value) -> list[Statement]:
        """Adds the tile's values times probs."""
        out = [at.wgmma_fence()]
        for h, d, v, probs, _ in self.value_products(self.rings[VALUES].stage(t)):
            out.append(wgmma(self.of_mma(self.sums, h, d).slot, v, probs, 1, self.dtype))
        return [*out, at.wgmma_commit(), at.wgmma_wait(pending=0)]
