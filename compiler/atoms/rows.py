"""Atoms of both targets for rows of scores that a lane holds whole, as tcgen05.ld gives them."""

from __future__ import annotations

from ptxflow.compiler.atoms.matrix import MINUS_INFINITY
from ptxflow.compiler.atoms.table import Atom, Lanes, Rule, Scope, define
from ptxflow.compiler.atoms.threads import OF_ONE, pieces
from ptxflow.compiler.ir import UOp


def _hide_text(use: UOp, text: dict[str, str]) -> str:
    lines = []
    for i, (d, s) in enumerate(zip(pieces(text["dst"]), pieces(text["src"]), strict=True)):
        lines.append(f"setp.gt.s32 %pw, {text['room']}, {use.arg.attr('first') + i};")
        lines.append(f"selp.f32 {d}, {s}, {MINUS_INFINITY}, %pw;")
    return "\n".join(lines)


hide_behind = define(
    Atom(
        "hide_behind",
        (("dst", "frag"), ("src", "frag"), ("room", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _hide_text,
        "9.7.6 setp, 9.7.7 selp: minus infinity in the columns behind the first `room`, signed; "
        "registers are columns `first` and up of the lane's row",
        accesses=OF_ONE,
        defaults=(("first", 0),),
        rules=(Rule("as many registers as it reads", lambda u: u.src[0].arg == u.src[1].arg),),
    )
)
