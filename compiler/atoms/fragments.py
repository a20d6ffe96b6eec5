"""Atoms of both targets for fragments that warps of a CTA hand to each other: every lane stores or
loads one, two or four registers at a place of its own.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import Lanes, Rule, Scope, accesses, define, signature
from ptxflow.compiler.atoms.threads import vector
from ptxflow.compiler.ir import UOp


def _store_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["src"])
    guard = "" if text["inside"] == "1" else f"@{text['inside']} "
    return (
        f"add.u32 %ra, {text['dst_reg']}, {text['offset']};\n"
        f"{guard}st.shared.{kind} [%ra], {registers};"
    )


define(
    "st_shared_lanes",
    signature("dst: smem, offset inside: value, src: frag"),
    Scope.THREAD,
    Lanes.ALL,
    _store_text,
    "9.7.9.11 st of one, two or four registers, by the lanes for which a condition holds",
    accesses=accesses(r="src", w="dst"),
    rules=(Rule("it stores one, two or four registers", lambda u: u.src[3].arg in (1, 2, 4)),),
)


def _load_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["dst"])
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\nld.shared.{kind} {registers}, [%ra];"
    )


define(
    "ld_shared_lanes",
    signature("dst: frag, src: smem, offset: value"),
    Scope.THREAD,
    Lanes.ALL,
    _load_text,
    "9.7.9.8 ld of one, two or four registers",
    accesses=accesses(r="src", w="dst"),
    rules=(Rule("it loads one, two or four registers", lambda u: u.src[0].arg in (1, 2, 4)),),
)
