"""The wide space of a gdn_prefill: tokens of all chunks related by a kernel of its own."""

from __future__ import annotations

from ptxflow.compiler.family import Decision, Wide, rule
from ptxflow.compiler.kernels.gdn_prefill import decisions as listed
from ptxflow.compiler.kernels.gdn_prefill.decisions import ONE, TWO

DECISIONS = (
    Decision("kernels", (ONE, TWO), "two: the first relates the tokens of all chunks at once"),
)

RULES = (
    rule(
        listed.SHARED,
        "chunk rows row_tiles stages operands solve solve_block kernels",
        lambda f, p, d: listed.smem_bytes(f, p, d) <= d.smem_per_block,
    ),
)

WIDE = Wide(DECISIONS, RULES)
