"""The wide space of a gdn_prefill: tokens of all chunks related by a kernel of its own."""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.family import Decision, Wide
from ptxflow.compiler.kernels.gdn_prefill import decisions as listed
from ptxflow.compiler.kernels.gdn_prefill.decisions import MMA_SYNC, ONE, TWO, WGMMA

DECISIONS = (
    Decision("kernels", (ONE, TWO), "two: the first relates the tokens of all chunks at once"),
    Decision("products", (MMA_SYNC, WGMMA), "with a state: by a warp, or 64 rows of four warps"),
)

#: shared memory and registers
RULES = tuple(replace(r, reads=(*r.reads, "kernels")) for r in listed.RULES[-2:])

WIDE = Wide(DECISIONS, RULES)
