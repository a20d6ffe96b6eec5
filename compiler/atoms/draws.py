"""Atoms of both targets that draw: the segment and the element at which a random number falls.

Shares and ties of segments are what `candidates` leaves: the mass above the threshold, and the
number of elements that equal it, of which the first ones are kept.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.candidates import SHARE
from ptxflow.compiler.atoms.reductions import ALL_LANES, scan_lanes, weigh
from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import pieces, scoped, vector
from ptxflow.compiler.ir import UOp

_PHILOX = ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85))  # multipliers, key increments


def _kept(mass: str, ties: str, allowed: str, to: str) -> list[str]:
    """A mass, and that of the ties that are allowed; %_tie is the weight of one."""
    return [f"min.u32 {to}, {ties}, {allowed};", f"mad.lo.u32 {to}, {to}, %_tie, {mass};"]


def _shares_of(use: UOp, text: dict[str, str]) -> list[str]:
    """%_m and %_t: the share and the ties of segment %_s; zeros where there is none."""
    lines = ["mov.b32 %_m, 0;", "mov.b32 %_t, 0;"]
    lines.append(f"setp.lt.and.u32 %_p, %_s, {use.arg.attr('segments')}, %_in;")
    for name, to in (("shares", "%_m"), ("ties", "%_t")):
        lines.append(f"mad.lo.u32 %_at, %_s, {SHARE}, {text[name + '_reg']};")
        lines.append(f"@%_p ld.shared.b32 {to}, [%_at];")
    return lines


def _holds(allowed: str) -> list[str]:
    """%_hit: whether the lane, from %_mb and %_tb on, of %_m and %_t, holds %_goal; %_low: from
    where on."""
    return [
        *_kept("%_mb", "%_tb", allowed, "%_low"),
        "add.u32 %_m, %_m, %_mb;",
        "add.u32 %_t, %_t, %_tb;",
        *_kept("%_m", "%_t", allowed, "%_next"),
        "setp.ge.u32 %_hit, %_goal, %_low;",
        "setp.lt.and.u32 %_hit, %_goal, %_next, %_hit;",
    ]


def _before(value: str, to: str, all_: str = "") -> list[str]:
    """What lower lanes have, and what all have."""
    lines = [f"mov.b32 {to}, {value};", *scan_lanes(to, "%_up", "%_p")]
    if all_:
        lines.append(f"shfl.sync.idx.b32 {all_}, {to}, 31, 31, {ALL_LANES};")
    return [*lines, f"sub.u32 {to}, {to}, {value};"]


def _first_hit(some: str) -> list[str]:
    """%_lane: the first lane with %_hit; a predicate that there is one."""
    return [
        f"vote.sync.ballot.b32 %_lane, %_hit, {ALL_LANES};",
        f"setp.ne.u32 {some}, %_lane, 0;",
        "brev.b32 %_lane, %_lane;",
        "clz.b32 %_lane, %_lane;",
        "and.b32 %_lane, %_lane, 31;",
    ]


def _pick_segment_text(use: UOp, text: dict[str, str]) -> str:
    """A lane has neighbouring segments; then each of the lane's that holds the target has one."""
    own, allowed = -(-use.arg.attr("segments") // 32), text["allowed"]
    low, high = pieces(text["uniform"])
    segment, rest, left, _ = dst = pieces(text["dst"])
    every = ["mov.b32 %_mm, 0;", "mov.b32 %_tt, 0;", f"mul.lo.u32 %_s, %lane, {own};"]
    every.append("mov.pred %_in, 1;")
    for _ in range(own):
        every += [*_shares_of(use, text), "add.u32 %_mm, %_mm, %_m;", "add.u32 %_tt, %_tt, %_t;"]
        every.append("add.u32 %_s, %_s, 1;")
    return scoped(
        "b32 mm tt m t mb tb s at up low next goal tie mass lane base, b64 wide target, "
        "pred p in hit",
        [
            *weigh(text["key"], "%_tie"),
            *every,
            *_before("%_mm", "%_mb", "%_mass"),
            *_before("%_tt", "%_tb", "%_next"),
            *_kept("%_mass", "%_next", allowed, "%_goal"),
            "cvt.u64.u32 %_wide, %_goal;",
            f"mov.b64 %_target, {{{low}, {high}}};",
            "mul.hi.u64 %_target, %_target, %_wide;",
            "cvt.u32.u64 %_goal, %_target;",
            "mov.b32 %_m, %_mm;",
            "mov.b32 %_t, %_tt;",
            *_holds(allowed),
            *_first_hit("%_in"),  # there is mass
            f"shfl.sync.idx.b32 %_mm, %_mb, %_lane, 31, {ALL_LANES};",
            f"shfl.sync.idx.b32 %_tt, %_tb, %_lane, 31, {ALL_LANES};",
            f"mad.lo.u32 %_base, %_lane, {own}, 1;",
            f"mad.lo.u32 %_s, %_lane, {own}, %lane;",
            f"setp.lt.and.u32 %_in, %lane, {own}, %_in;",
            *_shares_of(use, text),
            *_before("%_m", "%_mb"),
            *_before("%_t", "%_tb"),
            "add.u32 %_mb, %_mb, %_mm;",
            "add.u32 %_tb, %_tb, %_tt;",
            *_holds(allowed),
            "and.pred %_hit, %_hit, %_in;",
            *_first_hit("%_hit"),
            f"add.u32 {segment}, %_base, %_lane;",
            f"selp.b32 {segment}, {segment}, 0, %_hit;",
            "sub.u32 %_low, %_goal, %_low;",
            f"shfl.sync.idx.b32 {rest}, %_low, %_lane, 31, {ALL_LANES};",
            f"min.u32 %_tb, %_tb, {allowed};",
            f"sub.u32 %_tb, {allowed}, %_tb;",
            f"shfl.sync.idx.b32 {left}, %_tb, %_lane, 31, {ALL_LANES};",
            f"mov.b32 {dst[3]}, 0;",
        ],
    )


instruction(
    "pick_segment(dst: frag*4 w, shares ties: smem r, key allowed uniform: frag r) warp",
    _pick_segment_text,
    "9.7.1 mul.hi: where a uniform number of 64 bits falls among the kept masses: the segment "
    "and 1 (0 where no mass is), how far into it, how many ties are kept from there on, 0",
    rules=(Rule("a lane has up to 32 segments", lambda u: u.arg.attr("segments") <= 1024),),
)


def _locate_text(use: UOp, text: dict[str, str]) -> str:
    """A lane has neighbouring elements; sums over the lanes say which of them holds the target."""
    size, width, vocab = (use.arg.attr(n) for n in ("size", "vector", "vocab"))
    segment, goal, allowed, _ = pieces(text["found"])
    key, own = text["key"], size // 32
    held = [f"%_x{i}" for i in range(own)]
    lines = [
        f"sub.u32 %_first, {segment}, 1;",
        f"mul.lo.u32 %_first, %_first, {size};",
        f"mad.lo.u32 %_first, %lane, {own}, %_first;",
        f"setp.ne.u32 %_hit, {segment}, 0;",
        f"add.u32 %_at, %_first, {text['index']};",
        f"mad.wide.u32 %_address, %_at, 4, {text['base']};",
        *(f"mov.b32 {x}, 0;" for x in held),
    ]
    for i in range(0, own, width):
        kind, registers = vector(", ".join(held[i : i + width]))
        lines += [
            f"add.u32 %_at, %_first, {i};",
            f"setp.lt.and.u32 %_p, %_at, {vocab}, %_hit;",
            f"@%_p ld.global.nc.{kind} {registers}, [%_address+{4 * i}];",
        ]
    lines += ["mov.b32 %_ties, 0;"]
    for x in held:
        lines += [
            f"add.sat.f32 {x}, {x}, 0f00000000;",
            f"setp.eq.u32 %_p, {x}, {key};",
            "@%_p add.u32 %_ties, %_ties, 1;",
        ]
    lines += [*_before("%_ties", "%_rank"), "mov.b32 %_sum, 0;"]
    for x in held:  # from here on its weight, if it is kept
        lines += [
            f"setp.lt.u32 %_p, %_rank, {allowed};",
            f"setp.eq.and.u32 %_p, {x}, {key}, %_p;",
            f"setp.eq.u32 %_q, {x}, {key};",
            "@%_q add.u32 %_rank, %_rank, 1;",
            f"setp.gt.or.u32 %_p, {x}, {key}, %_p;",
            *weigh(x, x),
            f"selp.b32 {x}, {x}, 0, %_p;",
            f"add.u32 %_sum, %_sum, {x};",
        ]
    lines += _before("%_sum", "%_before")
    lines += [
        f"setp.ge.and.u32 %_hit, {goal}, %_before, %_hit;",
        f"sub.u32 %_up, {goal}, %_before;",
        "setp.lt.and.u32 %_hit, %_up, %_sum, %_hit;",
        "mov.b32 %_sum, 0;",
    ]
    for x in held[:-1]:  # past the elements that end before it
        lines += [
            f"add.u32 %_sum, %_sum, {x};",
            "setp.ge.u32 %_p, %_up, %_sum;",
            "@%_p add.u32 %_first, %_first, 1;",
        ]
    lines += [
        "selp.b32 %_first, %_first, 0, %_hit;",
        f"redux.sync.add.u32 {text['dst']}, %_first, {ALL_LANES};",
    ]
    temps = f"b32 first at ties rank up sum before x<{own}>, b64 address, pred p q hit"
    return scoped(temps, lines)


instruction(
    "locate(dst: frag w, found key: frag r, base index: value, tile: global r read-only) warp",
    _locate_text,
    "9.7.9.6 shfl.sync: the element of a segment that holds the target, in the order of "
    "indices: its index, in every lane; 0 where nothing was found",
    sass=("redux.sync",),
    rules=(
        Rule(
            "whole vectors for every lane",
            lambda u: u.arg.attr("size") % (32 * u.arg.attr("vector")) == 0,
        ),
    ),
)


def _philox_text(use: UOp, text: dict[str, str]) -> str:
    (m0, m1), (w0, w1) = _PHILOX
    names = ("offset_low", "offset_high", "row")
    state = pieces(text["state"])
    lines = [f"mov.b32 %_c{i}, {text[name]};" for i, name in enumerate(names)]
    lines += ["mov.b32 %_c3, 0;"]
    lines += [f"mov.b32 %_k{i}, {text[name]};" for i, name in enumerate(("seed_low", "seed_high"))]
    held = ("k0", "k1", "c0", "c1")
    lines += [f"add.u32 %_{n}, %_{n}, {s};" for n, s in zip(held, state, strict=True)]
    for i in range(10):
        if i:
            lines += [f"add.u32 %_k0, %_k0, {w0};", f"add.u32 %_k1, %_k1, {w1};"]
        lines += [
            f"mul.hi.u32 %_h0, %_c0, {m0};",
            f"mul.lo.u32 %_l0, %_c0, {m0};",
            f"mul.hi.u32 %_h1, %_c2, {m1};",
            f"mul.lo.u32 %_l1, %_c2, {m1};",
            "xor.b32 %_c0, %_h1, %_c1;",
            "xor.b32 %_c0, %_c0, %_k0;",
            "xor.b32 %_c2, %_h0, %_c3;",
            "xor.b32 %_c2, %_c2, %_k1;",
            "mov.b32 %_c1, %_l1;",
            "mov.b32 %_c3, %_l0;",
        ]
    lines += [f"mov.b32 {d}, %_c{i};" for i, d in enumerate(pieces(text["dst"]))]
    return scoped("b32 c<4> k<2> h<2> l<2>", lines)


instruction(
    "philox(dst: frag*1|2|3|4 w, state: frag*4 r, seed_low seed_high offset_low offset_high row: "
    "value)",
    _philox_text,
    "9.7.1 mul.hi, mul.lo: Philox4x32-10 (Salmon et al., SC 2011) of the counter (offset, row, "
    "0) under the seed: its first words, the lower first. To each word of seed and offset is added "
    "that of the state, without carry",
)
