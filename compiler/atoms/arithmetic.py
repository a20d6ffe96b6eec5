"""Atoms of both targets for arithmetic on a lane's own registers, most of it in float32.

Operands are as wide as the result, or taken in turn: one register serves all, two serve a fragment
whose columns alternate.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, Lanes, Rule, Scope, add, instruction
from ptxflow.compiler.atoms.threads import ALIKE, each, pieces
from ptxflow.compiler.ir import UOp

SIGN = 0x80000000


def _in_turn(use: UOp) -> bool:
    return all(use.src[0].arg % s.arg == 0 for s in use.src[1:] if s.arg)


_TURNS = Rule("operands are as wide as the result, or taken in turn", _in_turn)


def arithmetic(
    name: str, names: str, form: str, isa: str, sass: tuple[str, ...] = (), rule: Rule = _TURNS
) -> Atom:
    """An instruction on registers: `names` are the result and its operands, in order."""
    result, *sources = names.split()
    return Atom(
        name,
        ((result, "frag"), *((source, "frag") for source in sources)),
        Scope.THREAD,
        Lanes.ALL,
        each(form),
        isa,
        accesses=(*(Access(s, "r", GENERIC) for s in sources), Access(result, "w", GENERIC)),
        sass=sass,
        rules=(rule,),
    )


add(arithmetic("copy", "dst src", "mov.b32 {dst}, {src};", "9.7.9.3 mov", rule=ALIKE))
add(arithmetic("sum_f32", "dst a b", "add.rn.f32 {dst}, {a}, {b};", "9.7.3.3 add", rule=ALIKE))
instruction(
    "add_f32(dst: frag rw, src: frag r)",
    each("add.f32 {dst}, {dst}, {src};"),
    "9.7.3.3 add",
    rules=(Rule("as many registers as it adds", lambda u: u.src[0].arg == u.src[1].arg),),
)
add(arithmetic("mul_f32", "dst a b", "mul.rn.f32 {dst}, {a}, {b};", "9.7.3.5 mul", rule=ALIKE))
instruction(
    "scale_f32(dst: frag w, a b: frag r)",
    each("mul.rn.f32 {dst}, {a}, {b};"),
    "9.7.3.5 mul: registers by factors, in turn",
    rules=(
        Rule("as many registers as it scales", lambda u: u.src[0].arg == u.src[1].arg),
        Rule("factors in turn", lambda u: u.src[0].arg % u.src[2].arg == 0),
    ),
)
add(arithmetic("fma_f32", "dst a b c", "fma.rn.f32 {dst}, {a}, {b}, {c};", "9.7.3 fma: a b + c"))
add(arithmetic("sub_f32", "dst a b", "sub.rn.f32 {dst}, {a}, {b};", "9.7.3 sub"))
add(
    arithmetic(
        "exp2_f32",
        "dst src",
        "ex2.approx.ftz.f32 {dst}, {src};",
        "9.7.3 ex2.approx: relative error 2^-22.5; subnormals count as zero",
        ("ex2.approx",),
    )
)
add(
    arithmetic(
        "reciprocal_f32",
        "dst src",
        "rcp.approx.ftz.f32 {dst}, {src};",
        "9.7.3 rcp.approx: relative error 2^-23; subnormals count as zero",
    )
)
add(arithmetic("relu_f32", "dst src", "max.f32 {dst}, {src}, 0f00000000;", "9.7.3 max: with 0"))
add(
    arithmetic(
        "minus_abs_f32",
        "dst src",
        f"or.b32 {{dst}}, {{src}}, 0x{SIGN:X};",
        "9.7.8 or: sets the sign",
    )
)
add(arithmetic("max_f32", "dst a b", "max.f32 {dst}, {a}, {b};", "9.7.3 max"))
add(
    arithmetic(
        "log2_f32",
        "dst src",
        "lg2.approx.ftz.f32 {dst}, {src};",
        "9.7.3 lg2.approx: absolute error 2^-22 near 1, relative elsewhere; log of zero is -inf",
    )
)
add(
    arithmetic(
        "rsqrt",
        "dst src",
        "rsqrt.approx.ftz.f32 {dst}, {src};",
        "9.7.3.17 rsqrt.approx: relative error 2^-22.9; subnormals count as zero",
        ("rsqrt.approx",),
        ALIKE,
    )
)
add(
    arithmetic(
        "exp2_gap",
        "dst a b",
        "sub.rn.f32 {dst}, {a}, {b};\nex2.approx.ftz.f32 {dst}, {dst};",
        "9.7.3 sub, ex2.approx: 2^(a - b); relative error 2^-22.5",
        ("ex2.approx",),
    )
)


def _fma_text(use: UOp, text: dict[str, str]) -> str:
    bits = {name: f"0f{use.arg.attr(name):08X}" for name in ("factor", "summand")}
    return each(f"fma.rn.f32 {{dst}}, {{src}}, {bits['factor']}, {bits['summand']};")(use, text)


instruction(
    "fma_constants(dst: frag w, src: frag r)",
    _fma_text,
    "9.7.3.7 fma: times a constant plus a constant, given as float32 bits",
    rules=(ALIKE,),
)


def _plus_text(use: UOp, text: dict[str, str]) -> str:
    bits = f"0f{use.arg.attr('summand'):08X}"
    return each(f"fma.rn.f32 {{dst}}, {{a}}, {{b}}, {bits};")(use, text)


instruction(
    "fma_plus(dst: frag w, a b: frag r)",
    _plus_text,
    "9.7.3 fma: a b plus a constant, given as float32 bits",
    rules=(_TURNS,),
)


def _dot_text(use: UOp, text: dict[str, str]) -> str:
    """Products to the sums in turn, so that an addition need not wait for the one before."""
    sums = pieces(text["dst"])
    lines = []
    for i, (a, b) in enumerate(zip(pieces(text["a"]), pieces(text["b"]), strict=True)):
        total = sums[i % len(sums)]
        begun = i >= len(sums)
        lines.append(
            f"fma.rn.f32 {total}, {a}, {b}, {total};" if begun else f"mul.rn.f32 {total}, {a}, {b};"
        )
    return "\n".join(lines)


instruction(
    "dot_f32(dst: frag w, a b: frag r)",
    _dot_text,
    "9.7.3 fma: sums of products of the lane's own registers, to the results in turn",
    rules=(
        Rule("as many registers of both factors", lambda u: u.src[1].arg == u.src[2].arg),
        Rule("each sum gets as many", lambda u: u.src[1].arg % u.src[0].arg == 0),
    ),
)
instruction(
    "replace_zero(dst: frag w, src: frag r)",
    lambda use, t: (
        f"setp.eq.f32 %pw, {t['src']}, 0f00000000;\n"
        f"selp.f32 {t['dst']}, 0f{use.arg.attr('value'):08X}, {t['src']}, %pw;"
    ),
    "9.7.6 setp, selp: a constant, given as float32 bits, where the value is zero",
    rules=(Rule("one register", lambda u: u.src[0].arg == u.src[1].arg == 1),),
)
