"""Atoms of both targets for a softmax over the rows of an accumulator fragment.

Fragments are those of D of m64nNk16 and of C of m16n8k16: register i belongs to the first of a
lane's two rows where (i >> 1) & 1 is 0, and to column 8 (i >> 2) + 2 (lane % 4) + (i & 1). What
goes with rows has two registers.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.matrix import MINUS_INFINITY
from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, Lanes, Rule, Scope, define
from ptxflow.compiler.atoms.threads import OF_ONE, pieces
from ptxflow.compiler.ir import UOp

ROW = 128  # bytes of a row of a column block in shared memory
_SAME = Rule("as many registers as it reads", lambda u: u.src[0].arg == u.src[1].arg)
_QUADS = Rule("rows hold whole groups of eight columns", lambda u: u.src[0].arg % 4 == 0)


def _two(*operands: int) -> Rule:
    return Rule("two rows", lambda u: all(u.src[i].arg == 2 for i in operands))


def _of_row(index: int, rows: list[str]) -> str:
    return rows[index >> 1 & 1]


def _hide_text(use: UOp, text: dict[str, str]) -> str:
    rooms = [text["first"], text["second"]]
    lines = []
    for i, (d, s) in enumerate(zip(pieces(text["dst"]), pieces(text["src"]), strict=True)):
        column = 8 * (i >> 2) + (i & 1)
        lines.append(f"setp.gt.s32 %pw, {_of_row(i, rooms)}, {column};")
        lines.append(f"selp.f32 {d}, {s}, {MINUS_INFINITY}, %pw;")
    return "\n".join(lines)


hide_columns = define(
    Atom(
        "hide_columns",
        (("dst", "frag"), ("src", "frag"), ("first", "value"), ("second", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _hide_text,
        "9.7.6 setp, 9.7.7 selp: minus infinity in the columns from one on, which each row says, "
        "counted from the lane's first one, signed",
        accesses=OF_ONE,
        rules=(_SAME, _QUADS),
    )
)


def _exp2_text(use: UOp, text: dict[str, str]) -> str:
    shifts = pieces(text["shift"])
    return "\n".join(
        f"fma.rn.f32 {d}, {s}, {text['scale']}, {_of_row(i, shifts)};\nex2.approx.ftz.f32 {d}, {d};"
        for i, (d, s) in enumerate(zip(pieces(text["dst"]), pieces(text["src"]), strict=True))
    )


exp2_rows = define(
    Atom(
        "exp2_rows",
        (("dst", "frag"), ("src", "frag"), ("scale", "frag"), ("shift", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        _exp2_text,
        "9.7.3 fma, ex2.approx: 2^(x scale + shift of the row); relative error 2^-22.5",
        accesses=(
            Access("src", "r", GENERIC),
            Access("scale", "r", GENERIC),
            Access("shift", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
        sass=("ex2.approx",),
        rules=(
            _SAME,
            _QUADS,
            Rule("one factor", lambda u: u.src[2].arg == 1),
            _two(3),
        ),
    )
)
rescale_rows = define(
    Atom(
        "rescale_rows",
        (("dst", "frag"), ("factor", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"mul.rn.f32 {d}, {d}, {_of_row(i, pieces(t['factor']))};"
            for i, d in enumerate(pieces(t["dst"]))
        ),
        "9.7.3.5 mul: every register by its row's factor",
        accesses=(Access("factor", "r", GENERIC), Access("dst", "rw", GENERIC)),
        rules=(_QUADS, _two(1)),
    )
)

warp_sync_behind = define(
    Atom(
        "warp_sync_behind",
        (("src", "frag"), ("zero", "value")),
        Scope.WARP,
        Lanes.ALL,
        lambda use, t: "\n".join(
            [
                f"mov.b32 %ra, {pieces(t['src'])[0]};",
                *(f"xor.b32 %ra, %ra, {s};" for s in pieces(t["src"])[1:]),
                f"and.b32 %ra, %ra, {t['zero']};",
                "not.b32 %ra, %ra;",
                "bar.warp.sync %ra;",
            ]
        ),
        "9.7.13.2 bar.warp.sync of all lanes, which depends on registers: with a zero that ptxas "
        "does not know, it cannot put off what they are computed from to behind what follows",
        accesses=(Access("src", "r", GENERIC),),
        effect="warp_sync",
    )
)


def _clear_text(use: UOp, text: dict[str, str]) -> str:
    """Eight lanes to a row, so a swizzle within it changes nothing."""
    lines = ["shr.u32 %rb, %lane, 3;", f"mad.lo.u32 %ra, %lane, 16, {text['dst_reg']};"]
    for row in range(0, use.src[0].arg // ROW, 4):
        lines.append(f"setp.ge.s32 %pw, %rb, {text['keep']};")
        lines.append(f"@%pw st.shared.v4.b32 [%ra+{row * ROW}], {{%rz, %rz, %rz, %rz}};")
        lines.append("add.u32 %rb, %rb, 4;")
    return "\n".join(lines).replace("%rz", "0")


clear_rows = define(
    Atom(
        "clear_rows",
        (("dst", "smem"), ("keep", "value")),
        Scope.WARP,
        Lanes.ALL,
        _clear_text,
        "9.7.9.11 st: zeros over rows of 128 bytes but the first few, whose number is signed",
        accesses=(Access("dst", "rw", GENERIC),),
        rules=(Rule("it has groups of four rows", lambda u: u.src[0].arg % (4 * ROW) == 0),),
    )
)
