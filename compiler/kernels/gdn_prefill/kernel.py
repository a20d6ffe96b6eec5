"""The kernel: main warps carry a state from chunk to chunk, helpers are one chunk ahead of them.

All meet once a chunk: then what helpers hand over is there, and what main warps read is free.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import WARP, UOp, const, var
from ptxflow.compiler.ir.statements import KernelInfo, loop, when
from ptxflow.compiler.ir.storage import slot
from ptxflow.compiler.kernels.gdn_prefill.problem import BOUND_BYTES
from ptxflow.compiler.kernels.gdn_prefill.shape import PRESENT
from ptxflow.compiler.kernels.gdn_prefill.state_warps import StateWarps
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import traced

ENTRY = "gdn_prefill"
TENSORS = (
    "q",
    "k",
    "v",
    "state",
    "A_log",
    "a",
    "dt_bias",
    "b",
    "cu_seqlens",
    "output",
    "new_state",
)


class Kernel(StateWarps):
    """A gdn_prefill strategy applied to a problem."""

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        pointers = ((name, "ptr") for name in TENSORS)
        return (*pointers, ("scale", "u32"), (PRESENT, "u32"), ("num_seqs", "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        n, helps, main = var("chunk"), self.mains <= WARP, self.mains > WARP
        turns = self.chunks + self.chunks.min(1)
        body = [
            *self._bounds(),
            when(main, self.load_state()),
            when(helps & (const(0) < self.chunks), traced(self.before)),
            loop(
                n,
                turns,
                at.cta_sync(),
                when(main & (const(0) < n), traced(self.advance, n - 1)),
                when(helps & (n < self.chunks), self.ask_ahead(n), traced(self.relate, n)),
                rolled=True,
            ),
            when(main, self.store_state()),
        ]
        info = KernelInfo(ENTRY, self.device.arch, self.warps, 1, self.params, self.storage)
        return finish(info, *body)

    def _bounds(self) -> list[UOp]:
        """Where the sequence begins and ends: the low words of two bounds."""
        return [
            load_global(slot(register), "cu_seqlens", self.place[0] + i, element=BOUND_BYTES)
            for i, register in enumerate(self.bounds)
        ]
