"""Atoms of both targets for a softmax over fragments: maxima and sums, masks, weights, factors.

What goes with rows of an accumulator has two registers. Such fragments are those of D of m64nNk16
and of C of m16n8k16: register i belongs to the first of a lane's two rows where (i >> 1) & 1 is 0,
and to column 8 (i >> 2) + 2 (lane % 4) + (i & 1). Otherwise factors are taken in turn: where rows
of the accumulator are tokens, those of register i are of its column, i & 1. Rows that a lane holds
whole are as tcgen05.ld gives them.
"""

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import each, pieces
from ptxflow.compiler.ir import Statement

ROW = 128  # bytes of a row of a column block in shared memory
MINUS_INFINITY = "0fFF800000"
_QUADS = Rule("rows hold whole groups of eight columns", lambda u: u.src[0].arg % 4 == 0)


def _fold(name: str, operation: str, isa: str) -> None:
    """All registers of src into each of dst in turn: the first ones begin it."""

    def write(use: Statement, text: dict[str, str]) -> str:
        results, sources = pieces(text["dst"]), pieces(text["src"])
        lines = []
        for i, d in enumerate(results):
            mine = sources[i :: len(results)]
            lines.append(f"mov.b32 {d}, {mine[0]};")
            lines += [f"{operation} {d}, {d}, {s};" for s in mine[1:]]
        return "\n".join(lines)

    alike = Rule("each result gets as many", lambda u: u.src[1].arg % u.src[0].arg == 0)
    instruction(f"{name}(dst: frag w, src: frag r)", write, isa, (alike,))


_fold("fold_max", "max.f32", "9.7.3 max: of registers i, i + n, ... into i of n")
_fold("fold_sum", "add.f32", "9.7.3 add: of registers i, i + n, ... into i of n")
instruction(
    "hide(dst: frag rw, inside: value, to: int=0xFF800000)",
    each("selp.f32 {dst}, {dst}, 0f{to:08X}, {inside};"),
    "9.7.7 selp: minus infinity, or a number of these bits, where a condition does not hold",
)


def _hide_columns_text(use: Statement, text: dict[str, str]) -> str:
    rooms, lines = [text["first"], text["second"]], []
    for i, (d, s) in enumerate(zip(pieces(text["dst"]), pieces(text["src"]), strict=True)):
        row, column = (0, i) if use.arg.attr("whole") else (i >> 1 & 1, 8 * (i >> 2) + (i & 1))
        lines.append(f"setp.gt.s32 %pw, {rooms[row]}, {column};")
        lines.append(f"selp.f32 {d}, {s}, {MINUS_INFINITY}, %pw;")
    return "\n".join(lines)


instruction(
    "hide_columns(dst: frag*n w, src: frag*n r, first second: value, whole: bool=False)",
    _hide_columns_text,
    "9.7.6 setp, 9.7.7 selp: minus infinity in the columns from one on, which each row says, "
    "counted from the lane's first one, signed; `whole`: registers are columns of the first row",
    rules=(_QUADS,),
)


_EXP2 = "fma.rn.f32 {dst}, {src}, {scale}, {shift};\nex2.approx.ftz.f32 {dst}, {dst};"
_SCALE = "mul.rn.f32 {dst}, {dst}, {factor};"


def _turns(operand: int, what: str) -> Rule:
    return Rule(f"{what} in turn", lambda u: u.src[0].arg % u.src[operand].arg == 0)


instruction(
    "shift_exp2(dst: frag*n w, src: frag*n r, scale: frag*1 r, shift: frag r)",
    each(_EXP2),
    "9.7.3 fma, ex2.approx: 2^(x scale + shift); shifts in turn; relative error 2^-22.5",
    (_turns(3, "shifts"),),
    ("ex2.approx",),
)
instruction(
    "exp2_rows(dst: frag*n w, src: frag*n r, scale: frag*1 r, shift: frag*2 r)",
    each(_EXP2, rows="shift"),
    "9.7.3 fma, ex2.approx: 2^(x scale + shift of the row); relative error 2^-22.5",
    (_QUADS,),
    ("ex2.approx",),
)
instruction(
    "rescale(dst: frag rw, factor: frag r)",
    each(_SCALE),
    "9.7.3.5 mul: accumulators by factors, in turn",
    (_turns(1, "factors"),),
)
instruction(
    "rescale_rows(dst: frag rw, factor: frag*2 r)",
    each(_SCALE, rows="factor"),
    "9.7.3.5 mul: every register by its row's factor",
    (_QUADS,),
)
instruction(
    "unless_equal(dst: frag*n w, a b: frag*n r, instead: int=0, number: int=0xFF800000)",
    each("setp.eq.f32 %pw, {b}, 0f{number:08X};\nselp.f32 {dst}, 0f{instead:08X}, {a}, %pw;"),
    "9.7.6 setp, selp: a, or zero where b is minus infinity; or other numbers of these bits",
)


def _clear_text(use: Statement, text: dict[str, str]) -> str:
    """Eight lanes to a row, so a swizzle within it changes nothing."""
    lines = ["shr.u32 %rb, %lane, 3;", f"mad.lo.u32 %ra, %lane, 16, {text['dst_reg']};"]
    for row in range(0, use.src[0].arg // ROW, 4):
        lines.append(f"setp.ge.s32 %pw, %rb, {text['keep']};")
        lines.append(f"@%pw st.shared.v4.b32 [%ra+{row * ROW}], {{0, 0, 0, 0}};")
        lines.append("add.u32 %rb, %rb, 4;")
    return "\n".join(lines)


instruction(
    "clear_rows(dst: smem rw, keep: value) warp",
    _clear_text,
    "9.7.9.11 st: zeros over rows of 128 bytes but the first few, whose number is signed",
    rules=(Rule("it has groups of four rows", lambda u: u.src[0].arg % (4 * ROW) == 0),),
)
