"""Atoms of both targets that count, weigh and choose: shared atomics, and scans over a CTA.

The elements of a row are float32 bits between LEAST and the bits of 1, which order as integers;
what lies below weighs nothing. A *key* is an element less LEAST, of KEY_BITS bits, a *weight*
rint(x 2^31), so that the weights of a row of probabilities add up in 32 bits. *Bins* hold a count,
a mass (a sum of weights) or both, one array after the other, for each value of a digit of the key;
where there are *copies* of a bin, they are neighbours, each for some of the lanes.
"""

from __future__ import annotations

from collections.abc import Iterable

from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, Lanes, Rule, Scope, define
from ptxflow.compiler.atoms.threads import ALIKE, OF_ONE, each, pieces, vector
from ptxflow.compiler.ir import UOp

KEY_BITS = 28
LEAST = 0x2F800001  # the bits of the least float whose weight is not 0: just above 2^-32
WEIGHT_SCALE = "0f4F000000"  # 2^31
ALL_LANES = "0xFFFFFFFF"
QUANTITIES = {"count": 1, "mass": 1, "both": 2}


def scoped(registers: str, lines: Iterable[str]) -> str:
    """Lines with labels and registers of their own: `b32 a b<4>, pred p` declares %_a, %_b0, ...

    The underscore keeps them from hiding an operand.
    """
    declared = []
    for group in registers.split(", "):
        kind, *names = group.split()
        declared.append(f".reg .{kind} {', '.join('%_' + name for name in names)};")
    return "\n".join(["{", *declared, *lines, "}"])


def weigh(x: str, to: str, scale: str = WEIGHT_SCALE) -> list[str]:
    return [f"mul.f32 {to}, {x}, {scale};", f"cvt.rni.u32.f32 {to}, {to};"]


def count_in(quantity: str, at: str, x: str, bins: int, guard: str, weight: str) -> list[str]:
    """Adds an element to a bin at the address `at`; `bins` is the size of an array of them."""
    lines = [] if quantity == "mass" else [f"@{guard} red.shared.add.u32 [{at}], 1;"]
    if quantity != "count":
        further = f"+{bins}" if quantity == "both" else ""
        lines += [*weigh(x, weight), f"@{guard} red.shared.add.u32 [{at}{further}], {weight};"]
    return lines


def scan_lanes(value: str, other: str, predicate: str) -> list[str]:
    """An inclusive sum over the lanes, in place."""
    lines = []
    for step in (1, 2, 4, 8, 16):
        lines += [
            f"shfl.sync.up.b32 {other}|{predicate}, {value}, {step}, 0, {ALL_LANES};",
            f"@{predicate} add.u32 {value}, {value}, {other};",
        ]
    return lines


zero_shared = define(
    Atom(
        "zero_shared",
        (("dst", "smem"),),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: scoped(
            "b32 z",
            [
                "mov.b32 %_z, 0;",
                f"mad.lo.u32 %ra, %lane, 16, {t['dst_reg']};",
                "st.shared.v4.b32 [%ra], {%_z, %_z, %_z, %_z};",
            ],
        ),
        "9.7.9.11 st of zeros: 16 bytes a lane; begun: sums, to be read when something was added",
        accesses=(Access("dst", "w", GENERIC),),
        defaults=(("begun", False), ("unread", "dst")),
        rules=(Rule("a warp zeroes 512 bytes", lambda u: u.src[0].arg == 512),),
    )
)
saturate = define(
    Atom(
        "saturate",
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        each("add.sat.f32 {dst}, {src}, 0f00000000;"),
        "9.7.3.3 add.sat: between 0 and 1; NaN gives 0",
        accesses=OF_ONE,
        rules=(ALIKE,),
    )
)


def _tally_text(use: UOp, text: dict[str, str]) -> str:
    bits, copies, quantity = (use.arg.attr(n) for n in ("bits", "copies", "quantity"))
    lines = [
        f"and.b32 %_base, %lane, {copies - 1};",
        f"mad.lo.u32 %_base, %_base, 4, {text['bins_reg']};",
    ]
    for x in pieces(text["src"]):
        lines += [
            f"setp.ge.u32 %_p, {x}, {LEAST};",
            f"sub.u32 %_d, {x}, {LEAST};",
            f"shr.u32 %_d, %_d, {KEY_BITS - bits};",
            f"mad.lo.u32 %_d, %_d, {4 * copies}, %_base;",
            *count_in(quantity, "%_d", x, 4 * copies << bits, "%_p", "%_w"),
        ]
    return scoped("b32 base d w, pred p", lines)


_BITS = Rule("a digit lies in the key", lambda u: 0 < u.arg.attr("bits") <= KEY_BITS)
_QUANTITY = Rule(
    "a quantity is one of " + ", ".join(QUANTITIES),
    lambda u: u.arg.attr("quantity") in QUANTITIES,
)


def _bin_bytes(use: UOp) -> int:
    attr = use.arg.attr
    return int(4 * QUANTITIES[attr("quantity")] * attr("copies") << attr("bits"))


tally = define(
    Atom(
        "tally",
        (("bins", "smem"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        _tally_text,
        "9.7.13.8 red.shared: counts or weights of elements by the first digit of their keys",
        accesses=(Access("src", "r", GENERIC), Access("bins", "a", GENERIC)),
        defaults=(("copies", 1),),
        rules=(
            _BITS,
            _QUANTITY,
            Rule("there is a bin for each digit and copy", lambda u: u.src[0].arg == _bin_bytes(u)),
        ),
    )
)


def _ranks(use: UOp, own: str) -> list[list[str]]:
    """Every rank of the cluster in %_rank, from the thread's own on: not all ask one first."""
    count = use.arg.attr("peers")
    return [
        [f"add.u32 %_rank, {own}, {c};", f"and.b32 %_rank, %_rank, {count - 1};"]
        for c in range(count)
    ]


def _merge_text(use: UOp, text: dict[str, str]) -> str:
    """A thread's bins are neighbours, the highest digit of all in thread 0, and first in dst."""
    attr, dst, thread = use.arg.attr, pieces(text["dst"]), text["thread"]
    copies, peers, total = attr("copies"), attr("peers"), 1 << attr("bits")
    arrays = QUANTITIES[attr("quantity")]
    own = len(dst) // arrays  # bins of a thread
    words = own * copies
    wide = min(words, 4)
    end = (total - own) * 4 * copies
    lines = [f"mov.b32 {d}, 0;" for d in dst]
    if own * attr("threads") > total:
        lines += [f"setp.ge.u32 %_p, {thread}, {total // own};", "@%_p bra NONE;"]
    lines += [
        f"mul.lo.u32 %_at, {thread}, {own * 4 * copies};",
        f"sub.u32 %_at, {end}, %_at;",
        f"add.u32 %_at, %_at, {text['src_reg']};",
    ]
    held = ", ".join(f"%_w{i}" for i in range(wide))
    for ranked in _ranks(use, text["own"]):
        space, there = ".shared", "%_at"
        if peers > 1:
            lines += [*ranked, "mapa.shared::cluster.u32 %_there, %_at, %_rank;"]
            space, there = ".shared::cluster", "%_there"
        for array in range(arrays):
            for first in range(0, words, wide):
                kind, registers = vector(held)
                offset = array * total * 4 * copies + first * 4
                lines.append(f"ld{space}.{kind} {registers}, [{there}+{offset}];")
                for i in range(wide):
                    to = dst[array * own + own - 1 - (first + i) // copies]
                    lines.append(f"add.u32 {to}, {to}, %_w{i};")
    return scoped(f"b32 at there rank w<{wide}>, pred p", [*lines, "NONE:"])


merge_bins = define(
    Atom(
        "merge_bins",
        (("dst", "frag"), ("src", "smem"), ("thread", "value"), ("own", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _merge_text,
        "9.7.9.8 ld.shared::cluster: a thread's bins, over their copies and, with `everywhere`, "
        "over the CTAs of the cluster; of the highest digit first",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        defaults=(("copies", 1), ("peers", 1)),
        rules=(
            _BITS,
            _QUANTITY,
            Rule("a cluster has 1, 2, 4 or 8 CTAs", lambda u: u.arg.attr("peers") in (1, 2, 4, 8)),
            Rule("there is a bin for each digit and copy", lambda u: u.src[1].arg == _bin_bytes(u)),
        ),
    )
)


def _scan_text(use: UOp, text: dict[str, str]) -> str:
    dst, src = pieces(text["dst"]), pieces(text["src"])
    own, lines = len(src) // len(dst), []
    for q, d in enumerate(dst):
        mine = src[q * own : (q + 1) * own]
        lines += [f"mov.b32 %_own{q}, {mine[0]};"]
        lines += [f"add.u32 %_own{q}, %_own{q}, {x};" for x in mine[1:]]
        lines += [f"mov.b32 {d}, %_own{q};", *scan_lanes(d, "%_up", "%_p")]
    kind, registers = vector(", ".join(dst))
    lines += ["setp.eq.u32 %_p, %lane, 31;", f"@%_p st.shared.{kind} [{text['totals']}], "]
    lines[-1] += f"{registers};"
    lines += [f"sub.u32 {d}, {d}, %_own{q};" for q, d in enumerate(dst)]
    return scoped(f"b32 up own<{len(dst)}>, pred p", lines)


scan_threads = define(
    Atom(
        "scan_threads",
        (("dst", "frag"), ("totals", "smem"), ("src", "frag")),
        Scope.WARP,
        Lanes.ALL,
        _scan_text,
        "9.7.9.6 shfl.sync: of each quantity, what the lanes below have in all their registers; "
        "the warp's totals into shared memory",
        accesses=(
            Access("src", "r", GENERIC),
            Access("totals", "w", GENERIC),
            Access("dst", "w", GENERIC),
        ),
        rules=(
            Rule("one or two quantities", lambda u: u.src[0].arg in (1, 2)),
            Rule("a word for each of them", lambda u: u.src[1].arg == 4 * u.src[0].arg),
            Rule("as many registers of each", lambda u: u.src[2].arg % u.src[0].arg == 0),
        ),
    )
)


def before_warp(totals: str, warps: int, index: str, before: list[str]) -> list[str]:
    """%_before0 and on: what lower warps and lanes have of each quantity; %_all0 and on: all."""
    n = len(before)
    kind, registers = vector(", ".join(f"%_all{q}" for q in range(n)))
    lines = [f"mov.b32 %_all{q}, 0;" for q in range(n)]
    lines += [
        f"setp.lt.u32 %_p, %lane, {warps};",
        f"mad.lo.u32 %_at, %lane, {4 * n}, {totals};",
        f"@%_p ld.shared.{kind} {registers}, [%_at];",
    ]
    for q in range(n):
        lines += [
            f"mov.b32 %_sum, %_all{q};",
            *scan_lanes("%_sum", "%_up", "%_p"),
            f"sub.u32 %_up, %_sum, %_all{q};",
            f"shfl.sync.idx.b32 %_before{q}, %_up, {index}, 31, {ALL_LANES};",
            f"shfl.sync.idx.b32 %_all{q}, %_sum, 31, 31, {ALL_LANES};",
            f"add.u32 %_before{q}, %_before{q}, {before[q]};",
        ]
    return lines


BEFORE_TEMPS = "b32 at sum up all<2> before<2>"


def _find_text(use: UOp, text: dict[str, str]) -> str:
    """At most one thread of the CTA finds the bin, and adds to what is 0."""
    attr, src, before = use.arg.attr, pieces(text["src"]), pieces(text["before"])
    own, by = len(src) // len(before), attr("by")
    other = len(before) - 1 - by
    goal, found = text["goal"], text["found_reg"]
    mine = src[by * own : (by + 1) * own]
    lines = [
        *before_warp(text["totals_reg"], attr("warps"), text["warp"], before),
        f"mov.b32 %_sum, {mine[0]};",
        *(f"add.u32 %_sum, %_sum, {x};" for x in mine[1:]),
        f"sub.u32 %_up, {goal}, %_before{by};",
        f"setp.ge.u32 %_p, {goal}, %_before{by};",
        "setp.lt.and.u32 %_p, %_up, %_sum, %_p;",
        f"vote.sync.any.pred %_q, %_p, {ALL_LANES};",
        "@!%_q bra NONE;",
        f"mul.lo.u32 %_at, {text['thread']}, {own};",
        f"sub.u32 %_at, {1 << attr('bits')}, %_at;",  # a digit and 1
    ]
    for i, x in enumerate(mine):
        lines += [
            f"setp.lt.and.u32 %_q, %_up, {x}, %_p;",
            f"@%_q red.shared.add.u32 [{found}], %_at;",
            f"@%_q red.shared.add.u32 [{found}+4], %_up;",
        ]
        if other != by:
            there = src[other * own + i]
            lines += [
                f"@%_q red.shared.add.u32 [{found}+8], %_before{other};",
                f"@%_q red.shared.add.u32 [{found}+12], {there};",
                f"add.u32 %_before{other}, %_before{other}, {there};",
            ]
        lines += [
            f"setp.ge.and.u32 %_p, %_up, {x}, %_p;",
            f"sub.u32 %_up, %_up, {x};",
            "sub.u32 %_at, %_at, 1;",
        ]
    return scoped(f"{BEFORE_TEMPS}, pred p q", [*lines, "NONE:"])


_FOUND = Rule("four words are found", lambda u: u.src[0].arg == 16)
find = define(
    Atom(
        "find",
        (
            ("found", "smem"),
            ("src", "frag"),
            ("before", "frag"),
            ("totals", "smem"),
            ("goal", "frag"),
            ("thread", "value"),
            ("warp", "value"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _find_text,
        "9.7.13.8 red.shared: the bin whose part of the quantity `by` brings the sum above the "
        "goal: its digit and 1, the goal less what is before it, and of the other quantity what is "
        "before it and in it; zeros where the sum stays at or below the goal",
        accesses=(
            Access("src", "r", GENERIC),
            Access("before", "r", GENERIC),
            Access("totals", "r", GENERIC),
            Access("goal", "r", GENERIC),
            Access("found", "a", GENERIC),
        ),
        rules=(
            _FOUND,
            Rule("it goes by one of the quantities", lambda u: (
                0 <= u.arg.attr("by") < u.src[2].arg)),
            Rule("totals of all warps", lambda u: (
                u.src[3].arg == 4 * u.src[2].arg * u.arg.attr("warps"))),
        ),
    )
)  # fmt: skip


def _total_text(use: UOp, text: dict[str, str]) -> str:
    every = use.arg.attr("every")
    lines = [
        "mov.b32 %_all, 0;",
        f"setp.lt.u32 %_p, %lane, {use.arg.attr('warps')};",
        f"mad.lo.u32 %_at, %lane, {4 * every}, {text['totals_reg']};",
        f"@%_p ld.shared.b32 %_all, [%_at+{4 * (every - 1)}];",
        f"redux.sync.add.u32 {text['dst']}, %_all, {ALL_LANES};",
    ]
    return scoped("b32 all at, pred p", lines)


row_total = define(
    Atom(
        "row_total",
        (("dst", "frag"), ("totals", "smem")),
        Scope.WARP,
        Lanes.ALL,
        _total_text,
        "9.7.13.11 redux.sync: the last quantity's total over the warps, of `every` words each",
        accesses=(Access("totals", "r", GENERIC), Access("dst", "w", GENERIC)),
        sass=("redux.sync",),
    )
)


def _st_vector_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["src"])
    return (
        f"add.u32 %ra, {text['dst_reg']}, {text['offset']};\nst.shared.{kind} [%ra], {registers};"
    )


def _ld_vector_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["dst"])
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\nld.shared.{kind} {registers}, [%ra];"
    )


st_shared_vector = define(
    Atom(
        "st_shared_vector",
        (("dst", "smem"), ("offset", "value"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        _st_vector_text,
        "9.7.9.11 st of one, two or four registers by every lane",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        rules=(Rule("it stores one, two or four", lambda u: u.src[2].arg in (1, 2, 4)),),
    )
)
ld_shared_vector = define(
    Atom(
        "ld_shared_vector",
        (("dst", "frag"), ("src", "smem"), ("offset", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _ld_vector_text,
        "9.7.9.8 ld of one, two or four registers by every lane",
        accesses=OF_ONE,
        rules=(Rule("it loads one, two or four", lambda u: u.src[0].arg in (1, 2, 4)),),
    )
)
