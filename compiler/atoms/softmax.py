"""Atoms of both targets for a softmax over fragments: maxima and sums, masks, weights, factors.

What goes with rows of an accumulator has two registers. Such fragments are those of D of m64nNk16
and of C of m16n8k16: register i belongs to the first of a lane's two rows where (i >> 1) & 1 is 0,
and to column 8 (i >> 2) + 2 (lane % 4) + (i & 1). Otherwise factors are taken in turn: where rows
of the accumulator are tokens, those of register i are of its column, i & 1. Rows that a lane holds
whole are as tcgen05.ld gives them.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms.table import (
    Atom,
    Lanes,
    Rule,
    Scope,
    accesses,
    add,
    instruction,
    signature,
)
from ptxflow.compiler.atoms.threads import ALIKE, OF_ONE, pieces
from ptxflow.compiler.ir import UOp

ROW = 128  # bytes of a row of a column block in shared memory
MINUS_INFINITY = "0fFF800000"
_SAME = Rule("as many registers as it reads", lambda u: u.src[0].arg == u.src[1].arg)
_QUADS = Rule("rows hold whole groups of eight columns", lambda u: u.src[0].arg % 4 == 0)

Pick = Callable[[int, list[str]], str]  # what a register goes with, by its number


def _of_row(index: int, given: list[str]) -> str:
    return given[index >> 1 & 1]


def _in_turn(index: int, given: list[str]) -> str:
    return given[index % len(given)]


def _two(operand: int) -> Rule:
    return Rule("two rows", lambda u: u.src[operand].arg == 2)


def _turns(operand: int, what: str) -> Rule:
    return Rule(f"{what} in turn", lambda u: u.src[0].arg % u.src[operand].arg == 0)


def _fold(name: str, operation: str, isa: str) -> Atom:
    """All registers of src into each of dst in turn: the first ones begin it."""

    def write(use: UOp, text: dict[str, str]) -> str:
        results, sources = pieces(text["dst"]), pieces(text["src"])
        lines = []
        for i, d in enumerate(results):
            mine = sources[i :: len(results)]
            lines.append(f"mov.b32 {d}, {mine[0]};")
            lines += [f"{operation} {d}, {d}, {s};" for s in mine[1:]]
        return "\n".join(lines)

    return Atom(
        name,
        signature("dst src: frag"),
        Scope.THREAD,
        Lanes.ALL,
        write,
        isa,
        accesses=OF_ONE,
        rules=(Rule("each result gets as many", lambda u: u.src[1].arg % u.src[0].arg == 0),),
    )


add(_fold("fold_max", "max.f32", "9.7.3 max: of registers i, i + n, ... into i of n"))
add(_fold("fold_sum", "add.f32", "9.7.3 add: of registers i, i + n, ... into i of n"))
instruction(
    "hide(dst: frag rw, inside: value)",
    lambda use, t: "\n".join(
        f"selp.f32 {d}, {d}, {MINUS_INFINITY}, {t['inside']};" for d in pieces(t["dst"])
    ),
    "9.7.7 selp: minus infinity where a condition does not hold",
)


def _hidden(dst: str, src: str, ends: list[tuple[str, int]]) -> str:
    """Minus infinity where a register's column is not below an end; signed."""
    lines = []
    for d, s, (end, column) in zip(pieces(dst), pieces(src), ends, strict=True):
        lines.append(f"setp.gt.s32 %pw, {end}, {column};")
        lines.append(f"selp.f32 {d}, {s}, {MINUS_INFINITY}, %pw;")
    return "\n".join(lines)


def _hide_columns_text(use: UOp, text: dict[str, str]) -> str:
    rooms = [text["first"], text["second"]]
    ends = [(_of_row(i, rooms), 8 * (i >> 2) + (i & 1)) for i in range(use.src[0].arg)]
    return _hidden(text["dst"], text["src"], ends)


instruction(
    "hide_columns(dst: frag w, src: frag r, first second: value)",
    _hide_columns_text,
    "9.7.6 setp, 9.7.7 selp: minus infinity in the columns from one on, which each row says, "
    "counted from the lane's first one, signed",
    rules=(_SAME, _QUADS),
)


def _hide_behind_text(use: UOp, text: dict[str, str]) -> str:
    first = use.arg.attr("first")
    ends = [(text["visible"], first + i) for i in range(use.src[0].arg)]
    return _hidden(text["dst"], text["src"], ends)


instruction(
    "hide_behind(dst: frag w, src: frag r, visible: value)",
    _hide_behind_text,
    "9.7.6 setp, 9.7.7 selp: minus infinity in the columns behind the first `visible`, signed; "
    "registers are columns `first` and up of the lane's row",
    defaults=(("first", 0),),
    rules=(_SAME,),
)


def _exp2(name: str, pick: Pick, isa: str, *rules: Rule) -> Atom:
    """2^(x scale + shift), where a register picks its shift."""

    def write(use: UOp, text: dict[str, str]) -> str:
        shifts = pieces(text["shift"])
        return "\n".join(
            f"fma.rn.f32 {d}, {s}, {text['scale']}, {pick(i, shifts)};\n"
            f"ex2.approx.ftz.f32 {d}, {d};"
            for i, (d, s) in enumerate(zip(pieces(text["dst"]), pieces(text["src"]), strict=True))
        )

    return Atom(
        name,
        signature("dst src scale shift: frag"),
        Scope.THREAD,
        Lanes.ALL,
        write,
        f"9.7.3 fma, ex2.approx: {isa}; relative error 2^-22.5",
        accesses=accesses(r="src scale shift", w="dst"),
        sass=("ex2.approx",),
        rules=(_SAME, Rule("one factor", lambda u: u.src[2].arg == 1), *rules),
    )


add(_exp2("shift_exp2", _in_turn, "2^(x scale + shift); shifts in turn", _turns(3, "shifts")))
add(_exp2("exp2_rows", _of_row, "2^(x scale + shift of the row)", _QUADS, _two(3)))


def _rescale(name: str, pick: Pick, isa: str, *rules: Rule) -> Atom:
    """Registers times factors, where a register picks its own."""

    def write(use: UOp, text: dict[str, str]) -> str:
        factors = pieces(text["factor"])
        return "\n".join(
            f"mul.rn.f32 {d}, {d}, {pick(i, factors)};" for i, d in enumerate(pieces(text["dst"]))
        )

    return Atom(
        name,
        signature("dst factor: frag"),
        Scope.THREAD,
        Lanes.ALL,
        write,
        f"9.7.3.5 mul: {isa}",
        accesses=accesses(r="factor", rw="dst"),
        rules=rules,
    )


add(_rescale("rescale", _in_turn, "accumulators by factors, in turn", _turns(1, "factors")))
add(_rescale("rescale_rows", _of_row, "every register by its row's factor", _QUADS, _two(1)))
instruction(
    "finite_or_zero(dst: frag w, a b: frag r)",
    lambda use, t: "\n".join(
        f"setp.eq.f32 %pw, {b}, {MINUS_INFINITY};\nselp.f32 {d}, 0f00000000, {a}, %pw;"
        for d, a, b in zip(*(pieces(t[n]) for n in ("dst", "a", "b")), strict=True)
    ),
    "9.7.6 setp, selp: a, or zero where b is minus infinity",
    rules=(ALIKE,),
)
instruction(
    "warp_sync_behind(src: frag r, zero: value) warp -> warp_sync",
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
)


def _clear_text(use: UOp, text: dict[str, str]) -> str:
    """Eight lanes to a row, so a swizzle within it changes nothing."""
    lines = ["shr.u32 %rb, %lane, 3;", f"mad.lo.u32 %ra, %lane, 16, {text['dst_reg']};"]
    for row in range(0, use.src[0].arg // ROW, 4):
        lines.append(f"setp.ge.s32 %pw, %rb, {text['keep']};")
        lines.append(f"@%pw st.shared.v4.b32 [%ra+{row * ROW}], {{%rz, %rz, %rz, %rz}};")
        lines.append("add.u32 %rb, %rb, 4;")
    return "\n".join(lines).replace("%rz", "0")


instruction(
    "clear_rows(dst: smem rw, keep: value) warp",
    _clear_text,
    "9.7.9.11 st: zeros over rows of 128 bytes but the first few, whose number is signed",
    rules=(Rule("it has groups of four rows", lambda u: u.src[0].arg % (4 * ROW) == 0),),
)
