"""Atoms of both targets that count, weigh and choose: shared atomics, votes, sums over lanes.

The elements of a row are float32 bits, *keys*: without a sign they order as unsigned integers. A
*weight* is rint(x 2^31), so that the weights of a row of probabilities add up in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable

from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, Lanes, Rule, Scope, define
from ptxflow.compiler.atoms.threads import ALIKE, BINARY, OF_ONE, OF_TWO, each, pieces, vector
from ptxflow.compiler.ir import UOp

KEY_BITS = 30  # of a float below 2: the sign and the topmost bit of the exponent are 0
LEAST_WEIGHT = 0x2F800001  # the bits of the least float whose weight is not 0: just above 2^-32
WEIGHT_SCALE = "0f4F000000"  # 2^31
ALL_LANES = "0xFFFFFFFF"
TOGETHER = 4  # elements whose predicates live at a time
WEIGHTS = ("count", "mass")


def scoped(registers: str, lines: Iterable[str]) -> str:
    """Lines with labels and registers of their own: `b32 a b<4>, pred p` declares %_a, %_b0, ...

    The underscore keeps them from hiding an operand.
    """
    declared = []
    for group in registers.split(", "):
        kind, *names = group.split()
        declared.append(f".reg .{kind} {', '.join('%_' + name for name in names)};")
    return "\n".join(["{", *declared, *lines, "}"])


def voted(use: UOp, registers: list[str]) -> list[list[str]]:
    """The elements that one vote decides on; where there is none, few, for predicates are few."""
    size = use.arg.attr("group") or TOGETHER
    return [registers[i : i + size] for i in range(0, len(registers), size)]


def skip_where_none(predicates: list[str], label: str) -> list[str]:
    """Branch to a label where no lane has any of the predicates."""
    out = [f"mov.pred %_some, {predicates[0]};"]
    out += [f"or.pred %_some, %_some, {p};" for p in predicates[1:]]
    return [*out, f"vote.sync.any.pred %_some, %_some, {ALL_LANES};", f"@!%_some bra {label};"]


def weigh(x: str, to: str, scale: str = WEIGHT_SCALE) -> list[str]:
    return [f"mul.f32 {to}, {x}, {scale};", f"cvt.rni.u32.f32 {to}, {to};"]


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


def _histogram_text(use: UOp, text: dict[str, str]) -> str:
    """One bin for each value of `bits` bits at `shift`; bin 0, which nobody asks for, stays empty.

    Where the digit is the topmost, a key that is no probability falls into some bin.
    """
    attr = use.arg.attr
    shift, bits, copies, mass = attr("shift"), attr("bits"), attr("copies"), attr("weight")
    least = max(1 << shift, LEAST_WEIGHT if mass == "mass" else 0)
    lines = [
        f"shl.b32 %_low, {text['prefix']}, {shift + bits};",
        f"add.u32 %_end, %_low, {1 << (shift + bits)};",
        f"add.u32 %_low, %_low, {1 << shift};",
        f"max.u32 %_low, %_low, {least};",
        f"max.u32 %_low, %_low, {text['floor']};",
        "max.u32 %_end, %_end, %_low;",
        "sub.u32 %_end, %_end, %_low;",
        f"and.b32 %_base, %lane, {copies - 1};",
        f"mad.lo.u32 %_base, %_base, 4, {text['bins_reg']};",
        f"mad.lo.u32 %_dump, %lane, 4, {text['dump_reg']};",
    ]
    # What follows is 0, and ptxas cannot know it: it would work out the digits and weights of all
    # elements once, and keep them in registers for later rounds.
    lines += [
        f"or.b32 %_zero, {text['prefix']}, {text['floor']};",
        "shr.u32 %_zero, %_zero, 31;",
        f"or.b32 %_shift, %_zero, {shift};",
        f"or.b32 %_scale, %_zero, {WEIGHT_SCALE.replace('0f', '0x')};",
    ]
    groups = voted(use, pieces(text["src"]))
    for i, group in enumerate(groups):
        inside = [f"%_p{j}" for j in range(len(group))]
        for p, x in zip(inside, group, strict=True):
            if shift + bits == KEY_BITS:
                lines += [f"setp.ge.u32 {p}, {x}, %_low;"]
            else:
                lines += [f"sub.u32 %_d, {x}, %_low;", f"setp.lt.u32 {p}, %_d, %_end;"]
        if attr("group"):
            lines += skip_where_none(inside, f"NONE{i}")
        for p, x in zip(inside, group, strict=True):
            lines += [f"shr.u32 %_d, {x}, %_shift;", f"and.b32 %_d, %_d, {(1 << bits) - 1};"]
            lines += [f"mad.lo.u32 %_d, %_d, {4 * copies}, %_base;"]
            held = "1"
            if mass == "mass":
                held = "%_w"
                lines += weigh(x, held, "%_scale")
            if attr("aside") == "dump":
                lines += [f"selp.b32 %_d, %_d, %_dump, {p};"]
                lines += [f"red.shared.add.u32 [%_d], {held};"]
            else:
                lines += [f"@{p} red.shared.add.u32 [%_d], {held};"]
        if attr("group"):
            lines += [f"NONE{i}:"]
    return scoped(
        f"b32 low end base dump zero shift scale d w, pred some p<{len(groups[0])}>", lines
    )


histogram = define(
    Atom(
        "histogram",
        (
            ("bins", "smem"),
            ("dump", "smem"),
            ("src", "frag"),
            ("prefix", "frag"),
            ("floor", "frag"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _histogram_text,
        "9.7.13.8 red.shared: counts or weights of elements by digit, of those that share the "
        "prefix and reach the floor; others branch around it or go into a dump; a group in which "
        "no lane has one is skipped by a vote",
        accesses=(
            Access("src", "r", GENERIC),
            Access("prefix", "r", GENERIC),
            Access("floor", "r", GENERIC),
            Access("bins", "a", GENERIC),
            Access("dump", "a", GENERIC),
        ),
        defaults=(
            ("aside", "branch"),
            ("copies", 1),
            ("group", 0),
            ("unread", "dump"),
            ("weight", "count"),
        ),
        rules=(
            Rule("digits lie in the key", lambda u: (
                u.arg.attr("shift") + u.arg.attr("bits") <= KEY_BITS)),
            Rule("there is a bin for each digit and copy", lambda u: (
                u.src[0].arg == 4 * u.arg.attr("copies") << u.arg.attr("bits"))),
            Rule("the dump has a word for each lane", lambda u: u.src[1].arg == 128),
            Rule("copies are a power of two up to 32", lambda u: (
                u.arg.attr("copies") in (1, 2, 4, 8, 16, 32))),
            Rule("a weight is one of " + ", ".join(WEIGHTS), lambda u: (
                u.arg.attr("weight") in WEIGHTS)),
        ),
    )
)  # fmt: skip


def _lump_text(use: UOp, text: dict[str, str]) -> str:
    attr = use.arg.attr
    shift, bits, unit = attr("shift"), attr("bits"), 4 * attr("copies")
    return scoped(
        "b32 d, pred p",
        [
            f"shr.u32 %_d, {text['key']}, {shift + bits};",
            f"setp.eq.u32 %_p, %_d, {text['prefix']};",
            f"shr.u32 %_d, {text['key']}, {shift};",
            f"and.b32 %_d, %_d, {(1 << bits) - 1};",
            f"mad.lo.u32 %_d, %_d, {unit}, {text['bins_reg']};",
            f"@%_p red.shared.add.u32 [%_d], {text['weight']};",
        ],
    )


histogram_lump = define(
    Atom(
        "histogram_lump",
        (("bins", "smem"), ("key", "frag"), ("weight", "frag"), ("prefix", "frag")),
        Scope.THREAD,
        Lanes.ONE,
        _lump_text,
        "9.7.13.8 red.shared: a weight for one key, if it shares the prefix",
        accesses=(
            Access("key", "r", GENERIC),
            Access("weight", "r", GENERIC),
            Access("prefix", "r", GENERIC),
            Access("bins", "a", GENERIC),
        ),
        defaults=(("copies", 1), ("partial", True)),
        label=True,
    )
)


def _add_peer_text(use: UOp, text: dict[str, str]) -> str:
    flag, number, *_ = pieces(text["src"])
    return scoped(
        "pred p",
        [
            f"setp.ne.u32 %_p, {flag}, 0;",
            f"mapa.shared::cluster.u32 %ra, {text['dst_reg']}, {text['rank']};",
            f"@%_p red.relaxed.cluster.shared::cluster.add.u32 [%ra], {number};",
        ],
    )


add_peer = define(
    Atom(
        "add_peer",
        (("dst", "smem"), ("src", "frag"), ("rank", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _add_peer_text,
        "9.7.13.8 red.shared::cluster: the second register to a word of a CTA of the cluster, by "
        "lanes whose first is not 0",
        accesses=(Access("src", "r", GENERIC), Access("dst", "a", GENERIC)),
        rules=(
            Rule("a word has four bytes", lambda u: u.src[0].arg == 4),
            Rule("a flag and a number", lambda u: u.src[1].arg >= 2),
        ),
    )
)


def _ranks(use: UOp, own: str) -> list[tuple[int, list[str]]]:
    """Every rank of the cluster in %_rank, from the thread's own on: not all ask one first."""
    count = use.arg.attr("cluster")
    return [
        (c, [f"add.u32 %_rank, {own}, {c};", f"and.b32 %_rank, %_rank, {count - 1};"])
        for c in range(count)
    ]


def _sum_peers_text(use: UOp, text: dict[str, str]) -> str:
    lines = [f"add.u32 %_at, {text['src_reg']}, {text['offset']};"]
    for c, ranked in _ranks(use, text["own"]):
        lines += ranked
        lines += [
            "mapa.shared::cluster.u32 %_there, %_at, %_rank;",
            f"ld.shared::cluster.b32 %_held{c}, [%_there];",
        ]
    count = use.arg.attr("cluster")
    lines += [f"mov.b32 {text['dst']}, %_held0;"]
    lines += [f"add.u32 {text['dst']}, {text['dst']}, %_held{c};" for c in range(1, count)]
    return scoped(f"b32 at there rank held<{count}>", lines)


_POWER = Rule("a cluster has 1, 2, 4 or 8 CTAs", lambda u: u.arg.attr("cluster") in (1, 2, 4, 8))
sum_peers = define(
    Atom(
        "sum_peers",
        (("dst", "frag"), ("src", "smem"), ("offset", "value"), ("own", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _sum_peers_text,
        "9.7.9.8 ld.shared::cluster: a word of every CTA of the cluster, added up",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        defaults=(("everywhere", "src"),),
        rules=(Rule("there is one sum", lambda u: u.src[0].arg == 1), _POWER),
    )
)


def _ld_peers_text(use: UOp, text: dict[str, str]) -> str:
    dst, lines = pieces(text["dst"]), []
    for c in range(use.arg.attr("cluster")):
        lines += [
            f"mapa.shared::cluster.u32 %_there, {text['src_reg']}, {c};",
            f"ld.shared::cluster.v4.b32 {{{', '.join(dst[4 * c : 4 * c + 4])}}}, [%_there];",
        ]
    return scoped("b32 there", lines)


ld_peers_v4 = define(
    Atom(
        "ld_peers_v4",
        (("dst", "frag"), ("src", "smem")),
        Scope.THREAD,
        Lanes.ALL,
        _ld_peers_text,
        "9.7.9.8 ld.shared::cluster: four words of every CTA of the cluster, by rank",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        defaults=(("everywhere", "src"),),
        rules=(
            Rule("four registers a CTA", lambda u: u.src[0].arg == 4 * u.arg.attr("cluster")),
            _POWER,
        ),
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
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        rules=(Rule("it loads one, two or four", lambda u: u.src[0].arg in (1, 2, 4)),),
    )
)
ld_shared_chunk = define(
    Atom(
        "ld_shared_chunk",
        (("dst", "frag"), ("src", "smem"), ("chunk", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        "shl.b32 %ra, {chunk}, 5;\nadd.u32 %ra, %ra, %lane;\n"
        "mad.lo.u32 %ra, %ra, 4, {src_reg};\nld.shared.b32 {dst}, [%ra];",
        "9.7.9.8 ld: each lane's word of a run of 32 that a register names",
        accesses=(
            Access("chunk", "r", GENERIC),
            Access("src", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
        rules=(Rule("it loads one register", lambda u: u.src[0].arg == 1),),
    )
)
sum_u32 = define(
    Atom(
        "sum_u32",
        BINARY,
        Scope.THREAD,
        Lanes.ALL,
        each("add.u32 {dst}, {a}, {b};"),
        "9.7.1.1 add",
        accesses=OF_TWO,
        rules=(ALIKE,),
    )
)
total_u32 = define(
    Atom(
        "total_u32",
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join([
            f"mov.b32 {t['dst']}, {pieces(t['src'])[0]};",
            *(f"add.u32 {t['dst']}, {t['dst']}, {s};" for s in pieces(t["src"])[1:]),
        ]),
        "9.7.1.1 add: all registers of the source",
        accesses=OF_ONE,
        rules=(Rule("there is one total", lambda u: u.src[0].arg == 1),),
    )
)  # fmt: skip
warp_sum = define(
    Atom(
        "warp_sum",
        (("dst", "frag"), ("src", "frag")),
        Scope.WARP,
        Lanes.ALL,
        each(f"redux.sync.add.u32 {{dst}}, {{src}}, {ALL_LANES};"),
        "9.7.13.11 redux.sync: the sum over the lanes, in each of them",
        accesses=OF_ONE,
        sass=("redux.sync",),
        rules=(ALIKE,),
    )
)


def _largest_text(use: UOp, text: dict[str, str]) -> str:
    dst, (first, *rest) = text["dst"], pieces(text["src"])
    begun = text["accumulate"]
    guard = "" if begun == "0" else f"@!{begun} "
    anew = [] if begun == "1" else [f"{guard}mov.b32 {dst}, 0;"]
    return "\n".join([*anew, *(f"max.u32 {dst}, {dst}, {x};" for x in (first, *rest))])


largest = define(
    Atom(
        "largest",
        (("dst", "frag"), ("src", "frag"), ("accumulate", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _largest_text,
        "9.7.1.12 max: the largest key of a thread, begun at 0 or gone on with",
        accesses=(Access("src", "r", GENERIC), Access("dst", "rw", GENERIC)),
        rules=(Rule("there is one largest", lambda u: u.src[0].arg == 1),),
    )
)


def _pick_text(use: UOp, text: dict[str, str]) -> str:
    """Inclusive sums by shuffles; the last lane that counts takes whatever is left."""
    found, *rest = pieces(text["dst"])
    last = use.arg.attr("last")
    lines = [f"mov.b32 %_sum, {text['src']};"]
    for step in (1, 2, 4, 8, 16):
        lines += [
            f"shfl.sync.up.b32 %_up|%_p, %_sum, {step}, 0, {ALL_LANES};",
            "@%_p add.u32 %_sum, %_sum, %_up;",
        ]
    lines += [
        f"sub.u32 %_up, %_sum, {text['src']};",
        f"setp.lt.u32 %_p, {text['goal']}, %_sum;",
        f"setp.eq.u32 %_q, %lane, {last};",
        "or.pred %_p, %_p, %_q;",
        f"setp.le.and.u32 %_p, %_up, {text['goal']}, %_p;",
        f"sub.u32 %_up, {text['goal']}, %_up;",
        f"vote.sync.ballot.b32 %_sum, %_p, {ALL_LANES};",
        "brev.b32 %_sum, %_sum;",
        f"clz.b32 {found}, %_sum;",
        *(f"shfl.sync.idx.b32 {r}, %_up, {found}, 31, {ALL_LANES};" for r in rest),
    ]
    return scoped("b32 sum up, pred p q", lines)


pick = define(
    Atom(
        "pick",
        (("dst", "frag"), ("src", "frag"), ("goal", "frag")),
        Scope.WARP,
        Lanes.ALL,
        _pick_text,
        "9.7.9.6 shfl.sync, 9.7.13.9 vote.sync: the lane whose weight, in the order of lanes, "
        "brings the sum above the goal (else lane `last`); the goal less what is before it",
        accesses=(
            Access("src", "r", GENERIC),
            Access("goal", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
        rules=(
            Rule("it gives a lane, or a lane and a rest", lambda u: u.src[0].arg in (1, 2)),
            Rule("the last lane is one of 32", lambda u: 0 <= u.arg.attr("last") < 32),
        ),
    )
)


def _narrow_text(use: UOp, text: dict[str, str]) -> str:
    bits = use.arg.attr("bits")
    return "\n".join([
        f"shl.b32 %ra, {text['chunk']}, 5;",
        f"add.u32 %ra, %ra, {text['lane']};",
        f"sub.u32 %ra, {(1 << bits) - 1}, %ra;",
        f"shl.b32 %rb, {text['prefix']}, {bits};",
        f"or.b32 {text['dst']}, %rb, %ra;",
    ])  # fmt: skip


narrow = define(
    Atom(
        "narrow",
        (("dst", "frag"), ("prefix", "frag"), ("chunk", "frag"), ("lane", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        _narrow_text,
        "9.7.8 or, shl: the prefix with the digit that was picked, counted from the highest",
        accesses=(
            Access("prefix", "r", GENERIC),
            Access("chunk", "r", GENERIC),
            Access("lane", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
    )
)
