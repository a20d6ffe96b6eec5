"""Atoms of both targets for threads that stream rows: cached loads, shuffles, float32 arithmetic.

Loads take the read-only path: the validator refuses them where the kernel stores to the tensor.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import (
    GENERIC,
    READ_ONLY,
    Access,
    Atom,
    Lanes,
    Rule,
    Scope,
    define,
)
from ptxflow.compiler.ir import Op, UOp

CACHES = ("", "L1::no_allocate", "L1::evict_first", "L1::evict_last")
PREFETCHES = (0, 128, 256)  # bytes that a miss brings into L2 around it; 0: not said


def pieces(text: str) -> list[str]:
    """The registers of an operand's text."""
    return text.split(", ")


def vector(registers: str) -> tuple[str, str]:
    """(type, operand) of a load or store of these registers."""
    count = len(pieces(registers))
    return ("b32", registers) if count == 1 else (f"v{count}.b32", f"{{{registers}}}")


def _load_text(use: UOp, text: dict[str, str]) -> str:
    cache, prefetch = use.arg.attr("cache"), use.arg.attr("prefetch")
    kind, registers = vector(text["dst"])
    hints = (f".{cache}" if cache else "") + (f".L2::{prefetch}B" if prefetch else "")
    load = (
        f"mad.wide.u32 %rda, {text['index']}, {use.arg.attr('element')}, {text['base']};\n"
        f"{{guard}}ld.global.nc{hints}.{kind} {registers}, [%rda+{use.arg.attr('offset')}];"
    )
    if text["inside"] == "1":
        return load.replace("{guard}", "")
    zero = "".join(f"mov.b32 {r}, 0;\n" for r in pieces(text["dst"]))
    return zero + load.replace("{guard}", f"@{text['inside']} ")


ld_global = define(
    Atom(
        "ld_global",
        (
            ("dst", "frag"),
            ("base", "value"),
            ("index", "value"),
            ("inside", "value"),
            ("tile", "global"),
        ),
        Scope.THREAD,
        Lanes.ALL,
        _load_text,
        "9.7.9.9 ld.global.nc; index counts elements, offset bytes, zeros where not `inside`",
        accesses=(Access("tile", "r", READ_ONLY), Access("dst", "w", GENERIC)),
        sass=("ld.global.nc",),
        defaults=(("cache", ""), ("offset", 0), ("prefetch", 0)),
        rules=(
            Rule("it loads one, two or four registers", lambda u: u.src[0].arg in (1, 2, 4)),
            Rule("the base is a pointer parameter", lambda u: u.src[1].op is Op.PARAM),
            Rule("the cache hint is one of " + ", ".join(filter(None, CACHES)), lambda u: (
                u.arg.attr("cache") in CACHES)),
            Rule("L2 prefetches 128 or 256 bytes", lambda u: u.arg.attr("prefetch") in PREFETCHES),
        ),
    )
)  # fmt: skip


def _unpack_text(use: UOp, text: dict[str, str]) -> str:
    low_high = iter(pieces(text["dst"]))
    lines = []
    for source, low, high in zip(pieces(text["src"]), low_high, low_high, strict=True):
        if use.arg.attr("dtype") == "bf16":
            lines += [f"shl.b32 {low}, {source}, 16;", f"and.b32 {high}, {source}, 0xFFFF0000;"]
        else:
            lines += [
                f"cvt.u16.u32 %rh, {source};",
                f"cvt.f32.f16 {low}, %rh;",
                f"shr.u32 %ra, {source}, 16;",
                "cvt.u16.u32 %rh, %ra;",
                f"cvt.f32.f16 {high}, %rh;",
            ]
    return "\n".join(lines)


unpack = define(
    Atom(
        "unpack",
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        _unpack_text,
        "9.7.9.22 cvt: 16-bit pairs to float32, exactly; the lower half is the first element",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        rules=(Rule("two values of a register", lambda u: u.src[0].arg == 2 * u.src[1].arg),),
    )
)
sum_squares = define(
    Atom(
        "sum_squares",
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"fma.rn.f32 {t['dst']}, {s}, {s}, {t['dst']};" for s in pieces(t["src"])
        ),
        "9.7.3.7 fma: each square is added with one rounding",
        accesses=(Access("src", "r", GENERIC), Access("dst", "rw", GENERIC)),
        rules=(Rule("one register sums", lambda u: u.src[0].arg == 1),),
    )
)
mul_f32 = define(
    Atom(
        "mul_f32",
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"mul.rn.f32 {d}, {d}, {s};"
            for d, s in zip(pieces(t["dst"]), pieces(t["src"]), strict=True)
        ),
        "9.7.3.5 mul",
        accesses=(Access("src", "r", GENERIC), Access("dst", "rw", GENERIC)),
        rules=(Rule("as many registers as factors", lambda u: u.src[0].arg == u.src[1].arg),),
    )
)
scale_f32 = define(
    Atom(
        "scale_f32",
        (("dst", "frag"), ("factor", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(f"mul.rn.f32 {d}, {d}, {t['factor']};" for d in pieces(t["dst"])),
        "9.7.3.5 mul: every register by one factor",
        accesses=(Access("factor", "r", GENERIC), Access("dst", "rw", GENERIC)),
        rules=(Rule("there is one factor", lambda u: u.src[1].arg == 1),),
    )
)
fma_constants = define(
    Atom(
        "fma_constants",
        (("dst", "frag"),),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"fma.rn.f32 {d}, {d}, 0f{use.arg.attr('factor'):08X}, 0f{use.arg.attr('summand'):08X};"
            for d in pieces(t["dst"])
        ),
        "9.7.3.7 fma: times a constant plus a constant, given as float32 bits",
        accesses=(Access("dst", "rw", GENERIC),),
    )
)
rsqrt = define(
    Atom(
        "rsqrt",
        (("dst", "frag"),),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(f"rsqrt.approx.ftz.f32 {d}, {d};" for d in pieces(t["dst"])),
        "9.7.3.17 rsqrt.approx: relative error 2^-22.9; subnormals count as zero",
        accesses=(Access("dst", "rw", GENERIC),),
        sass=("rsqrt.approx",),
    )
)
shuffle_xor = define(
    Atom(
        "shuffle_xor",
        (("dst", "frag"), ("src", "frag")),
        Scope.WARP,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"shfl.sync.bfly.b32 {d}, {s}, {use.arg.attr('lanes')}, 31, 0xFFFFFFFF;"
            for d, s in zip(pieces(t["dst"]), pieces(t["src"]), strict=True)
        ),
        "9.7.9.6 shfl.sync.bfly: the register of lane XOR lanes",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        sass=("shfl.sync.bfly",),
        rules=(
            Rule("as many registers as it moves", lambda u: u.src[0].arg == u.src[1].arg),
            Rule("it reaches another lane of the warp", lambda u: 1 <= u.arg.attr("lanes") < 32),
        ),
    )
)
st_shared = define(
    Atom(
        "st_shared",
        (("dst", "smem"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ONE,
        "st.shared.b32 [{dst}], {src};",
        "9.7.9.11 st of one register by one lane",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        rules=(
            Rule("it stores one register", lambda u: u.src[1].arg == 1),
            Rule("a register has four bytes", lambda u: u.src[0].arg == 4),
        ),
    )
)
ld_shared = define(
    Atom(
        "ld_shared",
        (("dst", "frag"), ("src", "smem"), ("offset", "value")),
        Scope.THREAD,
        Lanes.ALL,
        "add.u32 %ra, {src_reg}, {offset};\nld.shared.b32 {dst}, [%ra];",
        "9.7.9.8 ld of one register",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        rules=(Rule("it loads one register", lambda u: u.src[0].arg == 1),),
    )
)
