"""The wide space of a gdn_prefill: tokens of all chunks related by a kernel of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Wide, rule
from ptxflow.compiler.kernels.gdn_prefill import decisions as listed
from ptxflow.compiler.kernels.gdn_prefill.decisions import MMA_SYNC, ONE, TWO, WGMMA

DECISIONS = (
    Decision("kernels", (ONE, TWO), "two: the first relates the tokens of all chunks at once"),
    Decision("products", (MMA_SYNC, WGMMA), "with a state: by a warp, or 64 rows of four warps"),
)


def _whole(f: Fields, p: Problem, d: Device) -> Any:
    """Whether main warps are one or two warpgroups, on a device with wgmma."""
    return (not d.has_tmem) & (listed.main_warps(f) % 4 == 0)


_MORE = "stages", "kernels", "products"
RULES = (
    *(replace(r, reads=tuple({*r.reads, *_MORE})) for r in listed.RULES[-2:]),
    rule(
        "wgmma is of sm_90a, and of four or eight main warps",
        "rows row_tiles products",
        lambda f, p, d: (f.products == MMA_SYNC) | _whole(f, p, d),
    ),
)

WIDE = Wide(DECISIONS, RULES)
