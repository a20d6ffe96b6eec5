"""Atoms of both targets for threads that stream rows: cached loads, shuffles.

Most loads take the read-only path: the validator refuses them where the kernel stores to the
tensor.
"""

import struct
from collections.abc import Callable, Iterable
from functools import partial
from string import Formatter
from typing import Any

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.ir import Statement

Text = Callable[[Statement, dict[str, str]], str]  # what writes a use of a row
CACHES = ("", "L1::no_allocate", "L1::evict_first", "L1::evict_last")
PREFETCHES = (0, 128, 256)  # bytes that a miss brings into L2 around it; 0: not said
CACHED = Rule(
    "the cache hint is one of " + ", ".join(filter(None, CACHES)),
    lambda u: u.arg.attr("cache") in CACHES,
)
PREFETCHED = Rule("L2 prefetches 128 or 256 bytes", lambda u: u.arg.attr("prefetch") in PREFETCHES)


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


def scoped(registers: str, lines: Iterable[str]) -> str:
    """Lines with labels and registers of their own: `b32 a b<4>, pred p` declares %_a, %_b0, ...

    The underscore keeps them from hiding an operand.
    """
    declared = []
    for group in registers.split(", "):
        kind, *names = group.split()
        declared.append(f".reg .{kind} {', '.join('%_' + name for name in names)};")
    return "\n".join(["{", *declared, *lines, "}"])


class _Registers(str):
    """An operand's text, of which `[i]` is a register; `kind` and `vector` are for a load or store
    of them, `guard` for an instruction that a condition predicates."""

    kind = property(lambda self: vector(self)[0])
    vector = property(lambda self: vector(self)[1])
    guard = property(lambda self: "" if self == "1" else f"@{self} ")

    def __getitem__(self, index: Any) -> str:
        return str(self.split(", ")[index])


class _Named:
    """Operands and attributes of a use by name, as templates take them."""

    def __init__(self, use: Statement, operands: dict[str, str]):
        self.attrs, self.operands = dict(use.arg.attrs), operands

    def __getitem__(self, name: str) -> Any:
        return self.attrs[name] if name in self.attrs else _Registers(self.operands[name])


def written(temps: str, *lines: str) -> Text:
    """Lines as templates of operands, `{found[0]}` one of its registers, and of attributes, with
    registers of their own, if there are any: see `scoped`."""

    def write(use: Statement, operands: dict[str, str]) -> str:
        text = [line.format_map(_Named(use, operands)) for line in lines]
        return scoped(temps, text) if temps else "\n".join(text)

    return write


def each(text: str, rows: str = "", picked: str = "", temps: str = "", begin: str = "") -> Text:
    """The text once for each register, with the operands and attributes that it names in step, and
    those of fewer registers in turn; `{src[0]}` and `{src[1]}` are the next two. `rows`: an operand
    of two, one for each of a lane's rows of a fragment; `picked`: one of whose registers the
    attribute `order` names some, in turn. `temps` are registers of its own, see `scoped`, and
    `begin` comes before all."""
    wide = dict[str, int]()  # registers of an operand that go together
    for _, field, _, _ in Formatter().parse(text):
        name, _, index = (field or "").rstrip("]").partition("[")
        wide |= {name: max(wide.get(name, 1), int(index or 0) + 1)} if name else {}

    def write(use: Statement, operands: dict[str, str]) -> str:
        named, order = _Named(use, operands), use.arg.attr("order")
        held = {n: pieces(x) if isinstance(x := named[n], str) else [x] for n in wide}

        def of(name: str, i: int) -> Any:
            if (n := wide[name]) > 1:
                return _Registers(", ".join(held[name][n * i : n * (i + 1)]))
            at = i >> 1 & 1 if name == rows else order[i % len(order)] if name == picked else i
            return held[name][at % len(held[name])]

        count = max(len(x) // wide[n] for n, x in held.items() if n != picked)
        lines = [text.format_map({n: of(n, i) for n in wide}) for i in range(count)]
        lines = [begin.format_map(named), *lines] if begin else lines
        return scoped(temps, lines) if temps else "\n".join(lines)

    return write


def _load_text(use: Statement, text: dict[str, str], path: str = "") -> str:
    cache, prefetch = use.arg.attr("cache"), use.arg.attr("prefetch")
    kind, registers = vector(text["dst"])
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
    "ld_global(dst: frag*1|2|4 w, base: pointer, index inside: value, tile: global r read-only, "
    "element: int, cache: str='', offset: int=0, prefetch: int=0)",
    partial(_load_text, path=".nc"),
    "9.7.9.9 ld.global.nc; index counts elements, offset bytes, zeros where not `inside`",
    sass=("ld.global.nc",),
    rules=(CACHED, PREFETCHED),
)
instruction(
    "ld_global_coherent(dst: frag*1|2|4 w, base: pointer, index inside: value, tile: global r, "
    "element: int, cache: str='', offset: int=0, prefetch: int=0)",
    _load_text,
    "9.7.9.8 ld.global, as ld_global, of what a kernel before hands on, which may end after this "
    "one began, or the kernel itself has written",
    rules=(CACHED, PREFETCHED),
)


def widened(dtype: str, source: str, low: str, high: str, temp: str) -> str:
    """Both halves of a register to float32, exactly."""
    if dtype == "bf16":
        return f"shl.b32 {low}, {source}, 16;\nand.b32 {high}, {source}, 0xFFFF0000;"
    return (
        f"cvt.u16.u32 %rh, {source};\ncvt.f32.f16 {low}, %rh;\n"
        f"shr.u32 {temp}, {source}, 16;\ncvt.u16.u32 %rh, {temp};\ncvt.f32.f16 {high}, %rh;"
    )


instruction(
    "unpack(dst: frag*2n w, src: frag*n r, dtype: str)",
    lambda use, text: each(widened(use.arg.attr("dtype"), "{src}", "{dst[0]}", "{dst[1]}", "%ra"))(
        use, text
    ),
    "9.7.9.22 cvt: 16-bit pairs to float32, exactly; lower half first; last: not read again",
)


ALIKE = Rule("as many registers of every operand", lambda u: len({s.arg for s in u.src}) == 1)


instruction(
    "shuffle_xor(dst: frag*n w, src: frag*n r, lanes: int) warp",
    each("shfl.sync.bfly.b32 {dst}, {src}, {lanes}, 31, 0xFFFFFFFF;"),
    "9.7.9.6 shfl.sync.bfly: the register of lane XOR lanes",
    sass=("shfl.sync.bfly",),
    rules=(Rule("it reaches another lane of the warp", lambda u: 1 <= u.arg.attr("lanes") < 32),),
)
instruction(
    "st_shared(dst: smem*4 w, src: frag*1 r) one",
    "st.shared.b32 [{dst}], {src};",
    "9.7.9.11 st of one register by one lane",
)
