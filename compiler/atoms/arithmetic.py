"""Atoms of both targets for arithmetic on a lane's own registers, most of it in float32, and a sum
over lanes.

Operands are as wide as the result, or taken in turn: one register serves all, two serve a fragment
whose columns alternate.
"""

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import ALIKE, each
from ptxflow.compiler.ir import Statement


def _in_turn(use: Statement) -> bool:
    return all(use.src[0].arg % s.arg == 0 for s in use.src[1:] if s.arg)


_TURNS = Rule("operands are as wide as the result, or taken in turn", _in_turn)


def arithmetic(
    name: str, names: str, form: str, isa: str, rule: Rule = _TURNS, sass: tuple[str, ...] = ()
) -> None:
    """An instruction on registers: `names` are the result and its operands, in order."""
    result, sources = names.split(" ", 1)
    head = f"{name}({result}: frag w, {sources}: frag r)"
    instruction(head, each(form), isa, (rule,), sass)


instruction(
    "copy(dst: frag w, src: frag r, found: found?)",
    each("mov.b32 {dst}, {src};"),
    "9.7.9.3 mov",
    (ALIKE,),
    among=("src",),
)
instruction(
    "sum_f32(dst: frag w, a b: frag r, sat: str='')",
    each("add.rn{sat}.f32 {dst}, {a}, {b};"),
    "9.7.3.3 add; sat: between 0 and 1, and NaN gives 0",
    (_TURNS,),
)
instruction(
    "add_f32(dst: frag*n rw, src: frag*n r)", each("add.f32 {dst}, {dst}, {src};"), "9.7.3.3 add"
)
arithmetic("mul_f32", "dst a b", "mul.rn.f32 {dst}, {a}, {b};", "9.7.3.5 mul", ALIKE)
instruction(
    "scale_f32(dst: frag*n w, a: frag*n r, b: frag r)",
    each("mul.rn.f32 {dst}, {a}, {b};"),
    "9.7.3.5 mul: registers by factors, in turn",
    rules=(Rule("factors in turn", lambda u: u.src[0].arg % u.src[2].arg == 0),),
)
arithmetic("fma_f32", "dst a b c", "fma.rn.f32 {dst}, {a}, {b}, {c};", "9.7.3 fma: a b + c")
arithmetic("sub_f32", "dst a b", "sub.rn.f32 {dst}, {a}, {b};", "9.7.3 sub")
arithmetic(
    "exp2_f32",
    "dst src",
    "ex2.approx.ftz.f32 {dst}, {src};",
    "9.7.3 ex2.approx: relative error 2^-22.5; subnormals count as zero",
    sass=("ex2.approx",),
)
arithmetic(
    "reciprocal_f32",
    "dst src",
    "rcp.approx.ftz.f32 {dst}, {src};",
    "9.7.3 rcp.approx: relative error 2^-23; subnormals count as zero",
)
arithmetic("sum_u32", "dst a b", "add.u32 {dst}, {a}, {b};", "9.7.1.1 add of integers", ALIKE)
arithmetic("div_f32", "dst a b", "div.rn.f32 {dst}, {a}, {b};", "9.7.3.8 div.rn")
arithmetic("relu_f32", "dst src", "max.f32 {dst}, {src}, 0f00000000;", "9.7.3 max: with 0")
arithmetic("max_u32", "dst a b", "max.u32 {dst}, {a}, {b};", "9.7.1 max of integers", ALIKE)
arithmetic("abs_f32", "dst src", "and.b32 {dst}, {src}, 0x7FFFFFFF;", "9.7.8 and: without sign")
arithmetic("max_f32", "dst a b", "max.f32 {dst}, {a}, {b};", "9.7.3 max")
arithmetic("min_f32", "dst a b", "min.f32 {dst}, {a}, {b};", "9.7.3 min")
arithmetic(
    "log2_f32",
    "dst src",
    "lg2.approx.ftz.f32 {dst}, {src};",
    "9.7.3 lg2.approx: absolute error 2^-22 near 1, relative elsewhere; log of zero is -inf",
)
arithmetic(
    "rsqrt",
    "dst src",
    "rsqrt.approx.ftz.f32 {dst}, {src};",
    "9.7.3.17 rsqrt.approx: relative error 2^-22.9; subnormals count as zero",
    ALIKE,
    ("rsqrt.approx",),
)


instruction(
    "fma_constants(dst: frag*n w, src: frag*n r, factor summand: int)",
    each("fma.rn.f32 {dst}, {src}, 0f{factor:08X}, 0f{summand:08X};"),
    "9.7.3.7 fma: times a constant plus a constant, given as float32 bits",
)
