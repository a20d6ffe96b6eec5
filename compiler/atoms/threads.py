"""Atoms of both targets for threads that stream rows: cached loads, sums of squares, shuffles.

Loads take the read-only path: the validator refuses them where the kernel stores to the tensor.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from string import Formatter

from ptxflow.compiler.atoms.table import Rule, accesses, instruction
from ptxflow.compiler.ir import Op, UOp

CACHES = ("", "L1::no_allocate", "L1::evict_first", "L1::evict_last")
PREFETCHES = (0, 128, 256)  # bytes that a miss brings into L2 around it; 0: not said


def cache_hint(choice: str) -> str:
    """The hint of a strategy's choice, whose `default` says nothing."""
    return "" if choice == "default" else f"L1::{choice}"


def float_bits(number: float) -> int:
    """The bits of a number rounded to float32, as atoms take constants."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])


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
    path = "" if use.arg.attr("handed") else ".nc"
    hints = (f".{cache}" if cache else "") + (f".L2::{prefetch}B" if prefetch else "")
    load = (
        f"mad.wide.u32 %rda, {text['index']}, {use.arg.attr('element')}, {text['base']};\n"
        f"{{guard}}ld.global{path}{hints}.{kind} {registers}, [%rda+{use.arg.attr('offset')}];"
    )
    if text["inside"] == "1":
        return load.replace("{guard}", "")
    zero = "".join(f"mov.b32 {r}, 0;\n" for r in pieces(text["dst"]))
    return zero + load.replace("{guard}", f"@{text['inside']} ")


instruction(
    "ld_global(dst: frag w, base index inside: value, tile: global r read-only)",
    _load_text,
    "9.7.9.9 ld.global.nc; index counts elements, offset bytes, zeros where not `inside`; "
    "9.7.9.8 ld.global for what a kernel before hands on, which may end after this one began",
    sass=lambda u: () if u.arg.attr("handed") else ("ld.global.nc",),
    defaults=(("cache", ""), ("handed", False), ("offset", 0), ("prefetch", 0)),
    rules=(
        Rule("it loads one, two or four registers", lambda u: u.src[0].arg in (1, 2, 4)),
        Rule("the base is a pointer parameter", lambda u: u.src[1].op is Op.PARAM),
        Rule(
            "the cache hint is one of " + ", ".join(filter(None, CACHES)),
            lambda u: u.arg.attr("cache") in CACHES,
        ),
        Rule("L2 prefetches 128 or 256 bytes", lambda u: u.arg.attr("prefetch") in PREFETCHES),
    ),
)


def _after_text(use: UOp, text: dict[str, str]) -> str:
    dst, src = pieces(text["dst"]), pieces(text["src"])
    first = f"lop3.b32 {dst[0]}, {pieces(text['other'])[0]}, {text['zero']}, {src[0]}, 0xEA;"
    moves = (f"mov.b32 {d}, {s};" for d, s in zip(dst[1:], src[1:], strict=True))
    return "\n".join([first, *moves])


instruction(
    "after_load(dst: frag w, src other: frag r, zero: value)",
    _after_text,
    "9.7.8.6 lop3: src or (other and zero), which is src; both are loaded before it is used, "
    "where ptxas would put off loading the other",
    rules=(Rule("as many registers as before", lambda u: u.src[0].arg == u.src[1].arg),),
)


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


instruction(
    "unpack(dst: frag w, src: frag r)",
    _unpack_text,
    "9.7.9.22 cvt: 16-bit pairs to float32, exactly; lower half first; last: not read again",
    rules=(Rule("two values of a register", lambda u: u.src[0].arg == 2 * u.src[1].arg),),
)


def _squares(sums: list[str], values: list[str]) -> list[str]:
    """Squares to the sums in turn, so that an addition need not wait for the one before."""
    pairs = zip(itertools.cycle(sums), values, strict=False)
    return [f"fma.rn.f32 {d}, {s}, {s}, {d};" for d, s in pairs]


def _sum_text(use: UOp, text: dict[str, str]) -> str:
    """A predicate decides whether the sums begin anew; 0 and 1 are known here."""
    sums, begun = pieces(text["dst"]), text["accumulate"]
    guard = "" if begun == "0" else f"@!{begun} "
    anew = [] if begun == "1" else [f"{guard}mov.b32 {d}, 0;" for d in sums]
    return "\n".join([*anew, *_squares(sums, pieces(text["src"]))])


def _add_text(use: UOp, text: dict[str, str]) -> str:
    sums, held = pieces(text["dst"]), pieces(text["sum"])
    moves = [f"mov.b32 {d}, {s};" for d, s in zip(sums, held, strict=True)]
    return "\n".join([*moves, *_squares(sums, pieces(text["src"]))])


instruction(
    "sum_squares(dst: frag rw, src: frag r, accumulate: value)",
    _sum_text,
    "9.7.3.7 fma: squares to the sums in turn, one rounding each; sums begin at zero or go on",
    rules=(Rule("each sum gets as many", lambda u: u.src[1].arg % u.src[0].arg == 0),),
)


instruction(
    "add_squares(dst: frag w, sum src: frag r)",
    _add_text,
    "9.7.3.7 fma: as sum_squares, from sums to others",
    rules=(
        Rule("as many sums as before", lambda u: u.src[0].arg == u.src[1].arg),
        Rule("each sum gets as many", lambda u: u.src[2].arg % u.src[0].arg == 0),
    ),
)


def each(text: str) -> Callable[[UOp, dict[str, str]], str]:
    """The text once for each register of dst, with the operands that it names in step; an operand
    of one register serves all."""
    names = {name for _, name, _, _ in Formatter().parse(text) if name}

    def write(use: UOp, operands: dict[str, str]) -> str:
        split = {name: pieces(operands[name]) for name in names}
        return "\n".join(
            text.format_map({n: held[i % len(held)] for n, held in split.items()})
            for i in range(len(split["dst"]))
        )

    return write


ALIKE = Rule("as many registers of every operand", lambda u: len({s.arg for s in u.src}) == 1)
BINARY = (("dst", "frag"), ("a", "frag"), ("b", "frag"))
OF_TWO = accesses(r="a b", w="dst")
OF_ONE = accesses(r="src", w="dst")


def _shuffle_text(use: UOp, text: dict[str, str]) -> str:
    lanes = use.arg.attr("lanes")
    return each(f"shfl.sync.bfly.b32 {{dst}}, {{src}}, {lanes}, 31, 0xFFFFFFFF;")(use, text)


instruction(
    "shuffle_xor(dst: frag w, src: frag r) warp",
    _shuffle_text,
    "9.7.9.6 shfl.sync.bfly: the register of lane XOR lanes",
    sass=("shfl.sync.bfly",),
    rules=(
        ALIKE,
        Rule("it reaches another lane of the warp", lambda u: 1 <= u.arg.attr("lanes") < 32),
    ),
)
instruction(
    "st_shared(dst: smem w, src: frag r) one",
    "st.shared.b32 [{dst}], {src};",
    "9.7.9.11 st of one register by one lane",
    rules=(
        Rule("it stores one register", lambda u: u.src[1].arg == 1),
        Rule("a register has four bytes", lambda u: u.src[0].arg == 4),
    ),
)
instruction(
    "ld_shared(dst: frag w, src: smem r, offset: value)",
    "add.u32 %ra, {src_reg}, {offset};\nld.shared.b32 {dst}, [%ra];",
    "9.7.9.8 ld of one register",
    rules=(Rule("it loads one register", lambda u: u.src[0].arg == 1),),
)
