"""Atoms of both targets for tensors that stream through a CTA: bulk copies without a tensor map,
and the float32 arithmetic of a recurrent state.

A bulk load reads what the kernel never writes; a bulk store belongs to its thread's bulk group.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import (
    ASYNC,
    GENERIC,
    READ_ONLY,
    Access,
    Atom,
    Lanes,
    Rule,
    Scope,
    define,
)
from ptxflow.compiler.atoms.threads import BINARY, CACHES, OF_TWO, each, pieces
from ptxflow.compiler.ir import Op, UOp

SIGN = 0x80000000
_BASE = Rule("the base is a pointer parameter", lambda u: any(s.op is Op.PARAM for s in u.src))
_WHOLE = Rule("it copies whole chunks of 16 bytes", lambda u: u.arg.attr("bytes") % 16 == 0)
_COUNTED = Rule("tx bytes are below 2^20", lambda u: 0 < u.arg.attr("bytes") < 2**20)

bulk_load = define(
    Atom(
        "bulk_load",
        (
            ("dst", "smem"),
            ("base", "value"),
            ("index", "value"),
            ("tile", "global"),
            ("bar", "mbar"),
        ),
        Scope.THREAD,
        Lanes.ONE,
        "mad.wide.u32 %rda, {index}, {element}, {base};\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{dst}], [%rda], {bytes}, [{bar}];",
        "9.7.9 cp.async.bulk; index counts elements; its bytes complete on the barrier",
        accesses=(Access("tile", "r", READ_ONLY), Access("dst", "w", ASYNC, "mbar")),
        effect="bulk_load",
        sass=("bulk copy g->s",),
        rules=(
            _BASE,
            _WHOLE,
            _COUNTED,
            Rule(
                "it fills its shared-memory slot exactly",
                lambda u: u.src[0].arg == u.arg.attr("bytes"),
            ),
        ),
    )
)
bulk_store = define(
    Atom(
        "bulk_store",
        (("src", "smem"), ("base", "value"), ("index", "value"), ("tile", "global")),
        Scope.THREAD,
        Lanes.ONE,
        "mad.wide.u32 %rda, {index}, {element}, {base};\n"
        "cp.async.bulk.global.shared::cta.bulk_group [%rda], [{src}], {bytes};",
        "9.7.9 cp.async.bulk; index counts elements; complete with its bulk group",
        accesses=(Access("src", "r", ASYNC, "bulk"), Access("tile", "w", ASYNC, "bulk")),
        sass=("bulk copy s->g",),
        rules=(
            _BASE,
            _WHOLE,
            Rule(
                "it empties its shared-memory slot",
                lambda u: u.src[0].arg == u.arg.attr("bytes"),
            ),
        ),
    )
)


def _narrow_text(use: UOp, text: dict[str, str]) -> str:
    cache = use.arg.attr("cache")
    return (
        f"mad.wide.u32 %rda, {text['index']}, 2, {text['base']};\n"
        f"ld.global.nc{cache and '.' + cache}.b16 %rh, [%rda];\n"
        f"cvt.f32.{use.arg.attr('dtype')} {text['dst']}, %rh;"
    )


ld_global_narrow = define(
    Atom(
        "ld_global_narrow",
        (("dst", "frag"), ("base", "value"), ("index", "value"), ("tile", "global")),
        Scope.THREAD,
        Lanes.ALL,
        _narrow_text,
        "9.7.9.9 ld.global.nc of one 16-bit value, widened (9.7.9.22 cvt); index counts elements",
        accesses=(Access("tile", "r", READ_ONLY), Access("dst", "w", GENERIC)),
        sass=("ld.global.nc",),
        defaults=(("cache", ""),),
        rules=(
            _BASE,
            Rule("it loads one register", lambda u: u.src[0].arg == 1),
            Rule("the cache hint is one of " + ", ".join(filter(None, CACHES)), lambda u: (
                u.arg.attr("cache") in CACHES)),
        ),
    )
)  # fmt: skip


def _one_or_all(use: UOp) -> bool:
    return all(s.arg in (1, use.src[0].arg) for s in use.src[1:])


_FITS = Rule("operands have one register, or as many as the result", _one_or_all)


def _arithmetic(name: str, names: str, form: str, isa: str, sass: tuple[str, ...] = ()) -> Atom:
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
        rules=(_FITS,),
    )


fma_f32 = define(
    _arithmetic("fma_f32", "dst a b c", "fma.rn.f32 {dst}, {a}, {b}, {c};", "9.7.3 fma: a b + c")
)
sub_f32 = define(_arithmetic("sub_f32", "dst a b", "sub.rn.f32 {dst}, {a}, {b};", "9.7.3 sub"))
exp2_f32 = define(
    _arithmetic(
        "exp2_f32",
        "dst src",
        "ex2.approx.ftz.f32 {dst}, {src};",
        "9.7.3 ex2.approx: relative error 2^-22.5; subnormals count as zero",
        ("ex2.approx",),
    )
)
reciprocal_f32 = define(
    _arithmetic(
        "reciprocal_f32",
        "dst src",
        "rcp.approx.ftz.f32 {dst}, {src};",
        "9.7.3 rcp.approx: relative error 2^-23; subnormals count as zero",
    )
)
relu_f32 = define(
    _arithmetic("relu_f32", "dst src", "max.f32 {dst}, {src}, 0f00000000;", "9.7.3 max: with 0")
)
minus_abs_f32 = define(
    _arithmetic(
        "minus_abs_f32",
        "dst src",
        f"or.b32 {{dst}}, {{src}}, 0x{SIGN:X};",
        "9.7.8 or: sets the sign",
    )
)


def _plus_text(use: UOp, text: dict[str, str]) -> str:
    bits = f"0f{use.arg.attr('summand'):08X}"
    return each(f"fma.rn.f32 {{dst}}, {{a}}, {{b}}, {bits};")(use, text)


fma_plus = define(
    Atom(
        "fma_plus",
        BINARY,
        Scope.THREAD,
        Lanes.ALL,
        _plus_text,
        "9.7.3 fma: a b plus a constant, given as float32 bits",
        accesses=OF_TWO,
        rules=(_FITS,),
    )
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


dot_f32 = define(
    Atom(
        "dot_f32",
        BINARY,
        Scope.THREAD,
        Lanes.ALL,
        _dot_text,
        "9.7.3 fma: sums of products of the lane's own registers, to the results in turn",
        accesses=OF_TWO,
        rules=(
            Rule("as many registers of both factors", lambda u: u.src[1].arg == u.src[2].arg),
            Rule("each sum gets as many", lambda u: u.src[1].arg % u.src[0].arg == 0),
        ),
    )
)
replace_zero = define(
    Atom(
        "replace_zero",
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: (
            f"setp.eq.f32 %pw, {t['src']}, 0f00000000;\n"
            f"selp.f32 {t['dst']}, 0f{use.arg.attr('value'):08X}, {t['src']}, %pw;"
        ),
        "9.7.6 setp, selp: a constant, given as float32 bits, where the value is zero",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        rules=(Rule("one register", lambda u: u.src[0].arg == u.src[1].arg == 1),),
    )
)
