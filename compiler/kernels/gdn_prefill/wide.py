"""The wide space of a gdn_prefill: tokens of all chunks related by a kernel of its own."""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.family import Decision, Wide, rule
from ptxflow.compiler.kernels.gdn_prefill import decisions as listed
from ptxflow.compiler.kernels.gdn_prefill.decisions import MMA_SYNC, ONE, TWO, WGMMA

DECISIONS = (
    Decision("kernels", (ONE, TWO), "two: the first relates the tokens of all chunks at once"),
    Decision("products", (MMA_SYNC, WGMMA), "with a state: by a warp, or 64 rows of four warps"),
)

#: shared memory and registers
_RESOURCES = tuple(replace(r, reads=(*r.reads, "kernels", "products")) for r in listed.RULES[-2:])
RULES = (
    *_RESOURCES,
    rule(
        "wgmma is of sm_90a, and of four or eight main warps",
        "rows row_tiles products",
        lambda f, p, d: (f.products != WGMMA) | (not d.has_tmem and listed.main_warps(f) % 4 == 0),
    ),
)

WIDE = Wide(DECISIONS, RULES)
