"""Atoms of both targets for fragments that warps of a CTA hand to each other: every lane stores or
loads one, two or four registers at a place of its own.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import instruction
from ptxflow.compiler.atoms.threads import vector
from ptxflow.compiler.ir import UOp


def _store_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["src"])
    guard = "" if text["inside"] == "1" else f"@{text['inside']} "
    return (
        f"add.u32 %ra, {text['dst_reg']}, {text['offset']};\n"
        f"{guard}st.shared.{kind} [%ra], {registers};"
    )


instruction(
    "st_shared_lanes(dst: smem w, offset inside: value, src: frag*1|2|4 r)",
    _store_text,
    "9.7.9.11 st of one, two or four registers, by the lanes for which a condition holds",
)


def _load_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["dst"])
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\nld.shared.{kind} {registers}, [%ra];"
    )


instruction(
    "ld_shared_lanes(dst: frag*1|2|4 w, src: smem r, offset: value)",
    _load_text,
    "9.7.9.8 ld of one, two or four registers",
)
