"""Atoms of both targets that count, weigh and choose: shared atomics, sums and picks of bins.

The elements of a row are float32 bits between LEAST and the bits of 1, which order as integers;
what lies below weighs nothing. A *key* is an element less LEAST, of KEY_BITS bits, a *weight*
rint(x 2^31), so that the weights of a row of probabilities add up in 32 bits. *Bins* hold a count
or a mass, a sum of weights, for each value of a digit of the key; where there are *copies* of a
bin, they are neighbours, each for some of the lanes. Every warp of a CTA sums up one *range* of
bins, of the highest digits the first; these sums lie behind the bins.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import each, pieces, scoped, vector, written
from ptxflow.compiler.ir import UOp

KEY_BITS = 28
LEAST = 0x2F800001  # the bits of the least float whose weight is not 0: just above 2^-32
WEIGHT_SCALE = "0f4F000000"  # 2^31
ALL_LANES = "0xFFFFFFFF"
QUANTITIES = ("count", "mass")


def weigh(x: str, to: str, scale: str = WEIGHT_SCALE) -> list[str]:
    return [f"mul.f32 {to}, {x}, {scale};", f"cvt.rni.u32.f32 {to}, {to};"]


def count_in(quantity: str, at: str, x: str, guard: str, weight: str) -> list[str]:
    """Adds an element to a bin at the address `at`."""
    if quantity == "count":
        return [f"@{guard} red.shared.add.u32 [{at}], 1;"]
    return [*weigh(x, weight), f"@{guard} red.shared.add.u32 [{at}], {weight};"]


def skip_unless_any(predicates: list[str], label: str) -> list[str]:
    """Branch to a label where no lane has any of the predicates."""
    lines = [f"mov.pred %_some, {predicates[0]};"]
    lines += [f"or.pred %_some, %_some, {p};" for p in predicates[1:]]
    return [*lines, f"vote.sync.any.pred %_some, %_some, {ALL_LANES};", f"@!%_some bra {label};"]


def scan_lanes(value: str, other: str, predicate: str) -> list[str]:
    """An inclusive sum over the lanes, in place."""
    lines = []
    for step in (1, 2, 4, 8, 16):
        lines += [
            f"shfl.sync.up.b32 {other}|{predicate}, {value}, {step}, 0, {ALL_LANES};",
            f"@{predicate} add.u32 {value}, {value}, {other};",
        ]
    return lines


instruction(
    "zero_shared(dst: smem*512 w)",
    written(
        "b32 z",
        "mov.b32 %_z, 0;",
        "mad.lo.u32 %ra, %lane, 16, {dst_reg};",
        "st.shared.v4.b32 [%ra], {{%_z, %_z, %_z, %_z}};",
    ),
    "9.7.9.11 st of zeros: 16 bytes a lane; begun: sums, to be read when something was added",
    defaults=(("begun", False), ("unread", "dst")),
)
instruction(
    "weigh(dst: frag*n w, src: frag*n r)",
    each("\n".join(weigh("{src}", "{dst}"))),
    "9.7.9.22 cvt: the weight of an element",
)
instruction(
    "goal_of_p(dst: frag w, p total: frag r)",
    written(
        "b32 a, b64 m, pred q",
        f"mul.f32 %_a, {{p}}, {WEIGHT_SCALE};",
        "cvt.rzi.u32.f32 %_a, %_a;",
        "setp.ge.f32 %_q, {p}, 0f3F800000;",
        "mul.wide.u32 %_m, %_a, {total};",
        "shr.u64 %_m, %_m, 31;",
        "cvt.u32.u64 %_a, %_m;",
        "selp.b32 {dst}, 0xFFFFFFFF, %_a, %_q;",
    ),
    "9.7.9.22 cvt, 9.7.1 mul: floor(p total), p in steps of 2^-31; 0 for p <= 0, all ones from 1",
)
instruction(
    "saturate(dst: frag*n w, src: frag*n r)",
    each("add.sat.f32 {dst}, {src}, 0f00000000;"),
    "9.7.3.3 add.sat: between 0 and 1; NaN gives 0",
)


def _tally_lines(
    use: UOp, text: dict[str, str], quantity: str, least: str = str(LEAST), shift: str = ""
) -> list[str]:
    bits, copies = use.arg.attr("bits"), use.arg.attr("copies")
    shift = shift or str(KEY_BITS - bits)
    lines = [
        f"and.b32 %_base, %lane, {copies - 1};",
        f"mad.lo.u32 %_base, %_base, 4, {text['bins_reg']};",
    ]
    for x in pieces(text["src"]):
        lines += [
            f"setp.ge.u32 %_p, {x}, {least};",
            f"sub.u32 %_d, {x}, {least};",
            f"shr.u32 %_d, %_d, {shift};",
            f"mad.lo.u32 %_d, %_d, {4 * copies}, %_base;",
            *count_in(quantity, "%_d", x, "%_p", "%_w"),
        ]
    return lines


def _tally_either_text(use: UOp, text: dict[str, str]) -> str:
    """ptxas must not see that both sides take the same digits: it would work them out before the
    branch, and hold them all. It cannot know that the register is 0 on the other side."""
    lines = [
        f"setp.eq.u32 %_p, {text['counts']}, 0;",
        "@%_p bra MASS;",
        *_tally_lines(use, text, "count"),
        "bra DONE;",
        "MASS:",
        f"shr.u32 %_shift, {text['counts']}, 31;",
        f"or.b32 %_least, %_shift, {LEAST};",
        f"or.b32 %_shift, %_shift, {KEY_BITS - use.arg.attr('bits')};",
        *_tally_lines(use, text, "mass", "%_least", "%_shift"),
        "DONE:",
    ]
    return scoped("b32 base d w least shift, pred p", lines)


_BITS = Rule("a digit lies in the key", lambda u: 0 < u.arg.attr("bits") <= KEY_BITS)
_BINS = Rule(
    "there is a bin for each digit and copy",
    lambda u: u.src[0].arg == 4 * u.arg.attr("copies") << u.arg.attr("bits"),
)
instruction(
    "tally(bins: smem a, src: frag r)",
    lambda use, text: scoped(
        "b32 base d w, pred p", _tally_lines(use, text, use.arg.attr("quantity"))
    ),
    "9.7.13.8 red.shared: counts or weights of elements by the first digit of their keys",
    defaults=(("copies", 1),),
    rules=(
        _BITS,
        _BINS,
        Rule("it counts or weighs", lambda u: u.arg.attr("quantity") in QUANTITIES),
    ),
)
instruction(
    "tally_either(bins: smem a, src counts: frag r)",
    _tally_either_text,
    "9.7.13.8 red.shared: as tally; counts where the last register is not 0, else weights",
    defaults=(("copies", 1),),
    rules=(_BITS, _BINS),
)


def _ranges_text(use: UOp, text: dict[str, str]) -> str:
    attr = use.arg.attr
    words = (attr("copies") << attr("bits")) // attr("warps")
    wide = min(4, words // 32)
    kind, held = vector(", ".join(f"%_w{i}" for i in range(wide)))
    lines = [
        f"sub.u32 %_at, {attr('warps') - 1}, {text['warp']};",
        f"mul.lo.u32 %_at, %_at, {4 * words};",
        f"mad.lo.u32 %_at, %lane, {4 * wide}, %_at;",
        f"add.u32 %_at, %_at, {text['bins_reg']};",
        "mov.b32 %_sum, 0;",
    ]
    for first in range(0, 4 * words, 128 * wide):
        lines.append(f"ld.shared.{kind} {held}, [%_at+{first}];")
        lines += [f"add.u32 %_sum, %_sum, %_w{i};" for i in range(wide)]
    lines += [
        f"redux.sync.add.u32 %_sum, %_sum, {ALL_LANES};",
        "setp.eq.u32 %_p, %lane, 0;",
        f"@%_p st.shared.b32 [{text['range']}], %_sum;",
    ]
    return scoped(f"b32 at sum w<{wide}>, pred p", lines)


instruction(
    "sum_range(bins: smem r, range: smem*4 w, warp: value) warp",
    _ranges_text,
    "9.7.13.11 redux.sync: the sum of a warp's range of bins, behind them",
    defaults=(("copies", 1),),
    sass=("redux.sync",),
    rules=(
        _BITS,
        _BINS,
        Rule(
            "every lane has a word of a range",
            lambda u: (u.arg.attr("copies") << u.arg.attr("bits")) // u.arg.attr("warps") >= 32,
        ),
    ),
)


def _sum_of_ranges_text(use: UOp, text: dict[str, str]) -> str:
    lines = [
        "mov.b32 %_sum, 0;",
        f"setp.lt.u32 %_p, %lane, {use.src[1].arg // 4};",
        f"mad.lo.u32 %_at, %lane, 4, {text['ranges_reg']};",
        "@%_p ld.shared.b32 %_sum, [%_at];",
        f"redux.sync.add.u32 {text['dst']}, %_sum, {ALL_LANES};",
    ]
    return scoped("b32 at sum, pred p", lines)


instruction(
    "sum_of_ranges(dst: frag w, ranges: smem r) warp",
    _sum_of_ranges_text,
    "9.7.13.11 redux.sync: the sum of all ranges",
    sass=("redux.sync",),
    rules=(Rule("up to 32 warps have a range each", lambda u: 4 <= u.src[1].arg <= 128),),
)


def everywhere(use: UOp, own: str, load: list[str]) -> list[str]:
    """A load at %_there of every CTA of the cluster, from the own one on; or at %_at alone."""
    peers = use.arg.attr("peers")
    if peers == 1:
        return ["mov.b32 %_there, %_at;", *load]
    lines = []
    for c in range(peers):
        lines += [f"add.u32 %_rank, {own}, {c};", f"and.b32 %_rank, %_rank, {peers - 1};"]
        lines += ["mapa.shared::cluster.u32 %_there, %_at, %_rank;", *load]
    return lines


def pick_lane(value: str, goal: str, to: str, rest: str, total: str = "") -> list[str]:
    """The lane whose value, in the order of lanes, brings the sum above the goal, 32 if none does;
    the goal less what is before it."""
    lines = [f"mov.b32 %_sum, {value};", *scan_lanes("%_sum", "%_up", "%_p")]
    if total:
        lines.append(f"shfl.sync.idx.b32 {total}, %_sum, 31, 31, {ALL_LANES};")
    return [
        *lines,
        f"sub.u32 %_sum, %_sum, {value};",
        f"sub.u32 %_up, {goal}, %_sum;",
        f"setp.ge.u32 %_p, {goal}, %_sum;",
        f"setp.lt.and.u32 %_p, %_up, {value}, %_p;",
        f"vote.sync.ballot.b32 %_sum, %_p, {ALL_LANES};",
        "brev.b32 %_sum, %_sum;",
        f"clz.b32 {to}, %_sum;",
        f"and.b32 %_sum, {to}, 31;",
        f"shfl.sync.idx.b32 {rest}, %_up, %_sum, 31, {ALL_LANES};",
    ]


def pick_range(
    use: UOp, text: dict[str, str], behind: int, goal: str, rest: str, total: str = ""
) -> list[str]:
    """%_lane: the range of bins that brings the sum above the goal, see `pick_lane`; their sums lie
    `behind` the bins by so many bytes."""
    ranges = use.arg.attr("ranges")
    space = ".shared::cluster" if use.arg.attr("peers") > 1 else ".shared"
    load = [f"@%_hit ld{space}.b32 %_w0, [%_there];", "add.u32 %_all, %_all, %_w0;"]
    return [
        f"mad.lo.u32 %_at, %lane, 4, {text['bins_reg']};",
        f"add.u32 %_at, %_at, {behind};",
        f"setp.lt.u32 %_hit, %lane, {ranges};",
        "mov.b32 %_w0, 0;",
        "mov.b32 %_all, 0;",
        *everywhere(use, text["own"], load),
        *pick_lane("%_all", goal, "%_lane", rest, total),
    ]


def add_own(use: UOp, text: dict[str, str], own: int, copies: int = 1) -> list[str]:
    """%_v0, ...: the lane's bins from %_at on, of all CTAs and copies; %_all: their sum."""
    wide = min(4, own * copies)
    kind, held = vector(", ".join(f"%_w{i}" for i in range(wide)))
    space, load = ".shared::cluster" if use.arg.attr("peers") > 1 else ".shared", list[str]()
    for first in range(0, own * copies, wide):
        load.append(f"ld{space}.{kind} {held}, [%_there+{4 * first}];")
        bins = (f"%_v{(first + i) // copies}" for i in range(wide))
        load += [f"add.u32 {v}, {v}, %_w{i};" for i, v in enumerate(bins)]
    more = [f"add.u32 %_all, %_all, %_v{i};" for i in range(1, own)]
    return [*everywhere(use, text["own"], load), "mov.b32 %_all, %_v0;", *more]


def _digit_lines(use: UOp, text: dict[str, str], own: int) -> list[str]:
    """From the lane's %_low, the lowest of its bins, and the goal %_goal: what is found.

    Lanes take bins from the highest on; a lane's last word is its highest bin.
    """
    copies, total = use.arg.attr("copies"), "" if use.arg.attr("ranges") else "%_total"
    lines = [f"mov.b32 %_v{i}, 0;" for i in range(own)]
    lines.append(f"mad.lo.u32 %_at, %_low, {4 * copies}, {text['bins_reg']};")
    lines += add_own(use, text, own, copies)
    lines += pick_lane("%_all", "%_goal", "%_lane", "%_rest", total)
    lines += ["setp.eq.u32 %_hit, %_lane, %lane;", f"add.u32 %_low, %_low, {own};"]
    lines.append("mov.pred %_past, 1;")
    for i in reversed(range(own)):  # past the bins that end before it; at the end digit and 1
        if i:
            lines += [
                f"setp.ge.and.u32 %_past, %_rest, %_v{i}, %_past;",
                f"@%_past sub.u32 %_rest, %_rest, %_v{i};",
                "@%_past sub.u32 %_low, %_low, 1;",
            ]
    return [
        *lines,
        "mov.b32 %_none, 0;",
        f"@%_hit st.shared.v4.b32 [{text['found']}], {{%_low, %_rest, %_total, %_none}};",
        "setp.eq.u32 %_p, %_lane, 32;",
        "setp.eq.and.u32 %_p, %lane, 0, %_p;",
        f"@%_p st.shared.v4.b32 [{text['found']}], {{%_none, %_none, %_total, %_none}};",
    ]


def _pick_text(use: UOp, text: dict[str, str]) -> str:
    """Where the bins have ranges, first the range and then the bin in it."""
    attr = use.arg.attr
    ranges, total = attr("ranges"), 1 << attr("bits")
    size = total // max(1, ranges)  # bins to choose among at last
    own = size // 32
    lines = [f"mov.b32 %_goal, {text['goal']};", "sub.u32 %_low, 31, %lane;"]
    lines.append(f"mul.lo.u32 %_low, %_low, {own};")
    if ranges:
        lines += [
            *pick_range(use, text, 4 * attr("copies") * total, "%_goal", "%_rest", "%_total"),
            "setp.ne.u32 %_p, %_lane, 32;",
            f"selp.b32 %_goal, %_rest, {0xFFFFFFFF}, %_p;",  # nothing is found again
            f"min.u32 %_lane, %_lane, {ranges - 1};",
            f"sub.u32 %_lane, {ranges - 1}, %_lane;",
            f"mad.lo.u32 %_low, %_lane, {size}, %_low;",
        ]
    words = min(4, own * attr("copies"))
    temps = (
        f"b32 at there rank sum up all goal low lane rest total none w<{words}> v<{own}>, "
        "pred p hit past"
    )
    return scoped(temps, [*lines, *_digit_lines(use, text, own)])


instruction(
    "pick_bin(found: smem*16 w, bins: smem r, goal: frag r, own: value) warp",
    _pick_text,
    "9.7.9.6 shfl.sync, 9.7.13.9 vote.sync: the bin that brings the sum, from the highest "
    "digit on, above the goal: its digit and 1, the goal less what is before it, the sum of "
    "all bins, 0; zeros but for the sum where it stays at or below the goal. With `everywhere` "
    "bins are added up over the CTAs of the cluster",
    defaults=(("copies", 1), ("peers", 1), ("ranges", 0)),
    rules=(
        _BITS,
        Rule("a cluster has 1, 2, 4 or 8 CTAs", lambda u: u.arg.attr("peers") in (1, 2, 4, 8)),
        Rule(
            "there is a bin for each digit and copy, and the sums of the ranges",
            lambda u: (
                u.src[1].arg
                == (4 * u.arg.attr("copies") << u.arg.attr("bits")) + 4 * u.arg.attr("ranges")
            ),
        ),
    ),
)
