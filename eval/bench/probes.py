"""Micro-benchmark kernels of rows of the instruction table: what a step is, and the PTX around it.

A kernel reads the SM's clock, runs `count` groups of steps and reads it again, some times over; two
kernels that differ in `count` alone tell what a group costs, for what is around it cancels out. Of
latency a group is one step that needs the one before it, of throughput some that do not. The text
of a step is the row's own.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ptxflow.compiler.atoms import Atom, all_atoms, at, atom
from ptxflow.compiler.ir import Slot, Statement, Value, const, frag, mbar, param, slot, smem
from ptxflow.compiler.layout import descriptor_hopper

ARCH = "sm_90a"
PASSES = 6  # in a launch; the first brings the instructions near
CHAINS = 8  # steps of a group of throughput
AREA = 64 << 10  # bytes of shared memory, zeros; mbarriers lie behind, four for each warp
SMEM = AREA + 32 * 32
HOME = 512  # bytes that a warp has to itself, in each eighth of the area
FAR = AREA // CHAINS
ENTRY = "probe"
WARPS = (4, 8, 16)
ONE = 0x3F800000  # of float32
CHASE = 64 << 10  # words of global memory before those that hold places: zeros
LINE_WORDS = 256  # from a place to the next: 1 KiB
HOPS = 2 * 32 * PASSES  # places of a CTA
WALK = f"mad.lo.u32 {{x}}, %cta, {LINE_WORDS * HOPS}, {CHASE};"  # from place to place
MATRICES = tuple(
    f"mov.u32 %ra, %smem;\nadd.u32 %ra, %ra, {place};\nbfe.u32 %ra, %ra, 4, 14;\n"
    f"cvt.u64.u32 {name}, %ra;\nor.b64 {name}, {name}, {descriptor_hopper(0, 16, 1024, 128)};"
    for name, place in (("%da", 0), ("%db", 8192))
)
_COUNTS = (1, 2, 4, 8)  # registers of an operand
#: what attributes of a row are where a probe does not say, and texts of operands that are values
ATTRS = {
    "dtype": "bf16", "lanes": 1, "factor": ONE, "summand": 0, "scale": ONE, "value": 0, "bits": 8,
    "element": 4, "order": (0,), "operation": "add",
}  # fmt: skip
VALUES = {"inside": "%yes", "lane": "%lane", "accumulate": "1", "rank": "%peer", "greater": "%yes"}
LONGEST = 24  # lines of PTX of a step
#: rows that ptxas would fold with themselves: an addition stands between them
PAIRED = ("unpack", "reciprocal_f32", "abs_f32", "movmatrix", "sum_u32", "max_u32")


@dataclass(frozen=True)
class Step:
    """A use of a row. Operands: `x*4` are registers of the chain, `x4*1` the one behind these,
    `y*2` others; else PTX text, `:` and the bytes of the slot where a row's text needs them.

    In texts {far} is an offset of the step's own in shared memory, behind that of the lane.
    """

    row: str
    operands: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()

    @property
    def lines(self) -> int:
        """Of its PTX."""
        return self.text(0, 0, "0").count("\n") + 1

    def use(self) -> Statement:
        """As a statement, of storage of these extents."""
        nodes = [
            _node(kind, text)
            for (_, kind), text in zip(atom(self.row).operands, self.operands, strict=True)
        ]
        return getattr(at, self.row)(*nodes, **dict(self.attrs))

    def text(self, i: int, width: int, label: str) -> str:
        """PTX of the step; its chain begins at register i * width."""
        row, node = atom(self.row), self.use()
        shown = _Texts(uid=label)
        for (name, _), operand in zip(row.operands, self.operands, strict=True):
            kind, _, many = operand.partition("*")
            first = int(kind[1:] or 0) + i * width * (kind[0] == "x") if many else 0
            shown[name] = (
                ", ".join(f"%{kind[0]}{first + r}" for r in range(int(many)))
                if many
                else operand.partition(":")[0].format(far=i * FAR, x=f"%x{i * width}")
            )
        if callable(row.ptx):
            return row.ptx(node, shown)
        return row.ptx.format_map(_Texts({n: str(a) for n, a in node.arg.attrs} | shown))


class _Texts(dict[str, str]):
    """An address in a register is the operand's text."""

    def __missing__(self, name: str) -> str:
        if not name.endswith("_reg"):
            raise KeyError(name)
        return self[name.removesuffix("_reg")]


@dataclass(frozen=True)
class Probe:
    """What is timed. `before` and `after` stand around a group; in texts {x} is the chain's first
    register.

    `one`: a lane of each warp runs it. `map`: the box of a tensor map, [columns, rows, ...] of 16
    bits, which is all of its tensor.
    `latency` is whether steps depend on each other, `cold` whether L2 is emptied before a launch.
    """

    name: str
    steps: tuple[Step | str, ...]
    width: int = 4  # registers of a chain
    before: tuple[Step | str, ...] = ()
    after: tuple[Step | str, ...] = ()
    matrices: bool = False  # %da and %db describe operands of wgmma in shared memory
    start: int | str = ONE  # what the chain's registers begin with
    groups: int = 64
    warps: tuple[int, ...] = WARPS
    least: int = 1  # warps that a latency takes
    latency: bool = True
    one: bool = False
    cluster: int = 1
    cold: bool = False
    map: tuple[int, ...] = ()
    registers: int = 0  # of the chain, where it is one for all steps

    @property
    def threads(self) -> int:
        """The most that it is launched with."""
        return 32 * max(self.least, *self.warps, 1)

    @property
    def rows(self) -> tuple[str, ...]:
        """All rows that a group has."""
        parts = (*self.before, *self.steps, *self.after)
        return tuple(dict.fromkeys(p.row for p in parts if isinstance(p, Step)))


def kernel(probe: Probe, count: int, chains: int) -> str:
    """The PTX that times `count` groups of as many chains."""
    labels = itertools.count()

    def parts(given: tuple[Step | str, ...], i: int) -> Iterator[str]:
        for p in given:
            if isinstance(p, str):
                yield p.format(of=chains, far=i * FAR, x=f"%x{i * probe.width}")
            else:
                yield p.text(i, probe.width, str(next(labels)))

    body: list[str] = []
    for _ in range(count):
        body += parts(probe.before, 0)
        for i in range(chains):
            body += parts(probe.steps, i)
        body += parts(probe.after, 0)
    xs = range(probe.registers or probe.width * CHAINS)
    start = WALK if probe.start == "walk" else probe.start
    start = start if isinstance(start, str) else f"mov.b32 {{x}}, {start};"
    params = ".param .u64 out, .param .u64 data, .param .u32 zero"
    params += ", .param .align 64 .b8 map[128]" if probe.map else ""
    lines = [
        ".version 8.8", f".target {ARCH}", ".address_size 64",
        ".extern .shared .align 1024 .b8 dynamic_smem[];",
        f".visible .entry {ENTRY}({params})",
        f".explicitcluster\n.reqnctapercluster {probe.cluster}, 1, 1" if probe.cluster > 1 else "",
        f".maxntid {probe.threads}, 1, 1", ".minnctapersm 1", "{",
        f".reg .b32 %x<{len(xs)}>, %y<16>;",
        ".reg .b32 %ra, %rb, %warp, %lane, %smem, %slab, %zero, %all, %pass, %peer, %bar, %turn;",
        ".reg .b32 %cta, %begun, %both, %bins, %home<4>;",
        ".reg .b64 %rda, %data, %out, %map, %da, %db, %before, %after;",
        ".reg .pred %pw, %pe, %yes, %skip;", ".reg .b16 %rh;",
        "mov.u32 %lane, %laneid;", "mov.u32 %ra, %tid.x;", "shr.u32 %warp, %ra, 5;",
        "shl.b32 %slab, %ra, 4;", "and.b32 %slab, %slab, 0x1FFF;", "mov.u32 %smem, dynamic_smem;",
        "add.u32 %slab, %slab, %smem;", "ld.param.u32 %zero, [zero];",
        "and.b32 %zero, %zero, %lane;",  # 0 in each lane, which ptxas cannot know
        "setp.eq.u32 %yes, %zero, 0;", "mov.u32 %turn, 0;", "mov.u32 %cta, %ctaid.x;",
        "mov.u32 %peer, %cluster_ctarank;", "xor.b32 %peer, %peer, 1;",
        *(("mov.b64 %map, map;", "cvta.param.u64 %map, %map;") if probe.map else ()),
        *(f"ld.param.u64 %{n}, [{n}];\ncvta.to.global.u64 %{n}, %{n};" for n in ("data", "out")),
        *(f"mov.b32 %y{i}, {ONE};\nadd.u32 %y{i}, %y{i}, %zero;"
          for i in range(16)),
        *(start.replace("{x}", f"%x{i}") + f"\nadd.u32 %x{i}, %x{i}, %zero;" for i in xs),
        "mov.u32 %rb, %ntid.x;", "shl.b32 %ra, %ra, 2;", "shl.b32 %rb, %rb, 2;",
        "mov.u32 %pass, 0;", "add.u32 %ra, %ra, %smem;",
        "CLEAR:", "add.u32 %begun, %pass, %ra;", "st.shared.b32 [%begun], 0;",
        "add.u32 %pass, %pass, %rb;", f"setp.lt.u32 %pw, %pass, {AREA};", "@%pw bra CLEAR;",
        f"mad.lo.u32 %bar, %warp, 32, {AREA};", "add.u32 %bar, %bar, %smem;",
        "add.u32 %both, %bar, 16;", f"add.u32 %bins, %smem, {FAR // 2};",  # behind 8 warps' homes
        f"mad.lo.u32 %home0, %warp, {HOME}, %smem;",
        *(f"add.u32 %home{i}, %home0, {i * FAR};" for i in (1, 2, 3)),
        "setp.ne.u32 %skip, %lane, 0;",
        "@!%skip mbarrier.init.shared::cta.b64 [%bar], 1;",
        "@!%skip mbarrier.init.shared::cta.b64 [%bar+8], 1048575;",
        "@!%skip mbarrier.init.shared::cta.b64 [%both], 2;",
        "@!%skip mbarrier.init.shared::cta.b64 [%both+8], 32;",
        "fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;",
        *(MATRICES if probe.matrices else ()), "mov.u32 %pass, 0;",
        "AGAIN:", '.pragma "nounroll";',
        "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;",
        "fence.proxy.async.shared::cta;",
        "mov.u64 %before, %clock64;", "cvt.u32.u64 %begun, %before;",
        "and.b32 %begun, %begun, %zero;",
        *(f"xor.b32 %x{i}, %x{i}, %begun;" for i in xs),
        *(("@%skip bra DONE;", *body, "DONE:", "bar.warp.sync 0xFFFFFFFF;") if probe.one else body),
        "mov.b32 %all, %x0;", *(f"or.b32 %all, %all, %x{i};" for i in xs[1:]),
        "and.b32 %all, %all, %zero;", "setp.ne.u32 %pw, %all, 0;",
        "@%pw st.volatile.shared.b32 [%smem], %all;",  # never: the clock waits for the predicate
        "mov.u64 %after, %clock64;",
        "mov.u32 %ra, %ntid.x;", "shr.u32 %ra, %ra, 5;", "mad.lo.u32 %rb, %cta, %ra, %warp;",
        f"mad.lo.u32 %rb, %rb, {PASSES}, %pass;", "mad.wide.u32 %rda, %rb, 16, %out;",
        "@!%skip st.global.v2.b64 [%rda], {%before, %after};",
        "add.u32 %pass, %pass, 1;", f"setp.lt.u32 %pw, %pass, {PASSES};", "@%pw bra AGAIN;",
        "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;", "ret;", "}", "",
    ]  # fmt: skip
    return "\n".join(filter(None, lines))


def _node(kind: str, text: str) -> Slot | Value:
    extent = int(text.partition("*")[2] or 1)
    if kind == "frag":
        return slot(frag("x", extent, "b32"), 0, 0, extent)
    if kind == "mbar":
        return slot(mbar("bar", 1, 1))
    if kind in ("smem", "desc"):
        return slot(smem("area", AREA), 0, 0, int(text.partition(":")[2] or AREA))
    if kind == "map":
        return param("map")
    return param("data") if text == "%data" else const(1)


# Rows on registers ------------------------------------------------------------------------------


def on_registers() -> Iterator[Probe]:
    """Of each row whose operands are registers and values: the chain goes through its result and
    its first source, or through what it updates; all else are constants."""
    for row in all_atoms():
        plain = all(kind in ("frag", "value") for _, kind in row.operands)
        if plain and ARCH in row.archs and not row.effect and row.accesses:
            step = _fitted(row)
            if step:
                paired = row.name in PAIRED
                steps = (step, Step("sum_f32", ("x*1", "x*1", "y*1"))) if paired else (step,)
                name = ", ".join(s.row for s in steps)
                groups = 64 if step.lines < 5 else 16
                yield Probe(name, steps, groups=groups)


def _fitted(row: Atom) -> Step | None:
    """A use with as few registers as its rules take."""
    updates = {a.operand for a in row.accesses if "w" in a.mode and "r" in a.mode}
    written = {a.operand for a in row.accesses if "w" in a.mode}
    sources = [n for n, kind in row.operands if kind == "frag" and n not in written]
    chain = written | (set() if updates else set(sources[:1]))
    held = [n for n, kind in row.operands if kind == "frag"]
    known = {n for n, _ in (*row.defaults, *row.operands)}
    attrs = tuple((n, v) for n, v in ATTRS.items() if n not in known)
    for counts in sorted(itertools.product(_COUNTS, repeat=len(held)), key=sum):
        many = dict(zip(held, counts, strict=True))
        operands = tuple(
            f"{'x' if n in chain else 'y'}*{many[n]}" if n in many else VALUES.get(n, "%zero")
            for n, _ in row.operands
        )
        step = Step(row.name, operands, attrs)
        try:
            if all(rule.holds(step.use()) for rule in row.rules):
                text = step.text(0, 0, "0")
                return step if step.lines <= LONGEST and "None" not in text else None
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            continue
    return None


# All ---------------------------------------------------------------------------------------------


def _listed(row: dict[str, Any]) -> Probe:
    """A row of probes.json; a step is [row, operand, ..., {attribute: value}]."""

    def part(given: Any) -> Step | str:
        if isinstance(given, str):
            return given
        attrs = given.pop() if isinstance(given[-1], dict) else {}
        name, *operands = given
        held = ((n, tuple(v) if isinstance(v, list) else v) for n, v in attrs.items())
        return Step(name, tuple(operands), tuple(held))

    made = row | {n: tuple(map(part, row[n])) for n in ("steps", "before", "after") if n in row}
    made |= {n: tuple(row[n]) for n in ("warps", "map") if n in row}
    return Probe(**made)


@lru_cache(1)
def probes() -> dict[str, Probe]:
    """All, by name; a row that several probes time is in the names of all of them."""
    listed = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {p.name: p for p in (*on_registers(), *map(_listed, listed))}
