"""Atoms of both targets that settle a threshold and draw: lists of candidates, shares, the search.

A row is cut into *segments*, in the order of indices, and a warp sifts a segment at a time:
weights of what is kept for certain are added up, what may be kept becomes a *candidate* in the
segment's list, of `slots` words. A segment has a *tally*, the number of its candidates, a *share*,
the mass that it keeps, and *ties*, the number of elements that equal the threshold. Lists and these
words lie in one CTA, the row's leader. Where a list was too short (*overflow*) the leader reads the
row again.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms.reductions import (
    ALL_LANES,
    BEFORE_TEMPS,
    KEY_BITS,
    LEAST,
    QUANTITIES,
    before_warp,
    count_in,
    scan_lanes,
    scoped,
    weigh,
)
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
from ptxflow.compiler.atoms.threads import pieces, vector
from ptxflow.compiler.ir import UOp

SLOT, TALLY, SHARE = 4, 4, 4  # bytes
AHEAD = 4  # vectors of a row that a thread of the leader has in flight
_PHILOX = ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85))  # multipliers, key increments


def _sift_text(use: UOp, text: dict[str, str]) -> str:
    attr, src = use.arg.attr, pieces(text["src"])
    size, slots, peers = attr("group"), attr("slots"), attr("peers")
    high, low, *beside = pieces(text["window"])
    least = beside[0] if beside else low
    lines = [
        "mov.b32 %_mass, 0;",
        "mov.b32 %_count, 0;",
        "shl.b32 %_below, 1, %lane;",
        "sub.u32 %_below, %_below, 1;",
        # What follows is 2^31, and ptxas cannot know it: it would work out the weights of all
        # elements once, and keep them in registers.
        f"shr.u32 %_scale, {high}, 31;",
        "or.b32 %_scale, %_scale, 0x4F000000;",
    ]
    lines += _there(text, "list", slots * SLOT, peers)
    for first in range(0, len(src), size):
        group = src[first : first + size]
        lines += _sift_group(group, text["window"], least, f"G{first}", slots)
    lines += [
        f"redux.sync.add.u32 %_mass, %_mass, {ALL_LANES};",
        "setp.eq.u32 %_p, %lane, 0;",
    ]
    space = ".shared::cluster" if peers > 1 else ".shared"
    for name, stride, stored in (
        ("tallies", TALLY, "b32 [%_at], %_count"),
        ("shares", SHARE, "b32 [%_at], %_mass"),
    ):
        lines += _there(text, name, stride, peers)
        lines.append(f"@%_p st{space}.{stored};")
    lines += [f"setp.gt.and.u32 %_p, %_count, {slots}, %_p;", "@!%_p bra FITS;"]
    lines += _there(text, "overflow", 0, peers)
    order = ".relaxed.cluster" if peers > 1 else ""
    lines += [f"red{order}{space}.add.u32 [%_at], 1;", "FITS:"]
    temps = f"b32 mass count below scale at pos w, pred p some any k<{size}> m<{size}>"
    return scoped(temps, lines)


def _there(text: dict[str, str], name: str, stride: int, peers: int) -> list[str]:
    """%_at: an address in the leader, of the chunk's part where there is a stride."""
    base = text[f"{name}_reg"]
    lines = [f"mov.b32 %_at, {base};"]
    if stride:
        lines = [f"mad.lo.u32 %_at, {text['chunk']}, {stride}, {base};"]
    if peers > 1:
        lines.append(f"mapa.shared::cluster.u32 %_at, %_at, {text['rank']};")
    return lines


def _sift_group(group: list[str], window: str, least: str, label: str, slots: int) -> list[str]:
    """Nothing, if no lane has an element that may be kept; candidates are rarer still."""
    high, low, *beside = pieces(window)
    lines = []
    for j, x in enumerate(group):
        lines.append(f"setp.ge.u32 %_m{j}, {x}, {least};")
        lines.append(f"or.pred %_some, %_some, %_m{j};" if j else f"mov.pred %_some, %_m{j};")
    lines += [f"vote.sync.any.pred %_any, %_some, {ALL_LANES};", f"@!%_any bra {label};"]
    for j, x in enumerate(group):
        lines += [
            f"setp.ge.u32 %_k{j}, {x}, {high};",
            *weigh(x, "%_w", "%_scale"),
            f"@%_k{j} add.u32 %_mass, %_mass, %_w;",
        ]
        if beside:  # or in the bin where k ends
            lines += [
                f"sub.u32 %_w, {x}, {beside[0]};",
                f"setp.lt.u32 %_some, %_w, {beside[1]};",
                f"setp.ge.or.u32 %_some, {x}, {low}, %_some;",
                f"and.pred %_m{j}, %_m{j}, %_some;",
            ]
        lines += [f"not.pred %_k{j}, %_k{j};", f"and.pred %_m{j}, %_m{j}, %_k{j};"]
        lines.append(f"or.pred %_any, %_any, %_m{j};" if j else f"mov.pred %_any, %_m{j};")
    lines += [f"vote.sync.any.pred %_any, %_any, {ALL_LANES};", f"@!%_any bra {label};"]
    for j, x in enumerate(group):
        lines += [
            f"vote.sync.ballot.b32 %_w, %_m{j}, {ALL_LANES};",
            "and.b32 %_pos, %_w, %_below;",
            "popc.b32 %_pos, %_pos;",
            "add.u32 %_pos, %_pos, %_count;",
            "popc.b32 %_w, %_w;",
            "add.u32 %_count, %_count, %_w;",
            f"setp.lt.and.u32 %_some, %_pos, {slots}, %_m{j};",
            f"mad.lo.u32 %_pos, %_pos, {SLOT}, %_at;",
            f"@%_some st.SPACE.b32 [%_pos], {x};",
        ]
    return [*lines, f"{label}:"]


def _sift(use: UOp, text: dict[str, str]) -> str:
    space = "shared::cluster" if use.arg.attr("peers") > 1 else "shared"
    return _sift_text(use, text).replace("st.SPACE", f"st.{space}")


sift = define(
    Atom(
        "sift",
        (
            ("list", "smem"),
            ("tallies", "smem"),
            ("shares", "smem"),
            ("overflow", "smem"),
            ("src", "frag"),
            ("window", "frag"),
            ("chunk", "value"),
            ("rank", "value"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _sift,
        "9.7.9.11 st.shared::cluster: a segment's candidates, their number and its share into the "
        "leader; a group in which no lane has an element that may be kept is skipped by a vote",
        accesses=(
            Access("src", "r", GENERIC),
            Access("window", "r", GENERIC),
            Access("list", "w", GENERIC),
            Access("tallies", "w", GENERIC),
            Access("shares", "w", GENERIC),
            Access("overflow", "a", GENERIC),
        ),
        rules=(
            Rule("whole groups", lambda u: u.src[4].arg % u.arg.attr("group") == 0),
            Rule("a window is two registers, or four for two filters", lambda u: (
                u.src[5].arg in (2, 4))),
        ),
    )
)  # fmt: skip


def _candidates(use: UOp, text: dict[str, str], visit: Callable[[str], list[str]]) -> list[str]:
    """Every candidate in %_x, its segment in %_segment: of the lists, or of the row on overflow."""
    attr = use.arg.attr
    slots, warps, width, vocab = (attr(n) for n in ("slots", "warps", "vector", "vocab"))
    lines = [
        f"setp.ne.u32 %_q, {text['overflow']}, 0;",
        f"selp.b32 %_end, 0, {attr('segments')}, %_q;",
        f"mov.b32 %_segment, {text['warp']};",
        "LISTS:",
        "setp.ge.u32 %_q, %_segment, %_end;",
        "@%_q bra ROW;",
        f"mad.lo.u32 %_at, %_segment, {TALLY}, {text['tallies_reg']};",
        "ld.shared.b32 %_n, [%_at];",
        f"mad.lo.u32 %_at, %_segment, {slots}, %lane;",
        f"mad.lo.u32 %_at, %_at, {SLOT}, {text['list_reg']};",
    ]
    for part in range(0, slots, 32):
        lines += [
            f"add.u32 %_d, %lane, {part};",
            "setp.lt.u32 %_q, %_d, %_n;",
            "mov.b32 %_x0, 0;",
            f"@%_q ld.shared.b32 %_x0, [%_at+{SLOT * part}];",
            *visit("%_x0"),
        ]
    lines += [f"add.u32 %_segment, %_segment, {warps};", "bra LISTS;", "ROW:"]
    step, held = 32 * width, [f"%_x{i}" for i in range(width * AHEAD)]
    kind, _ = vector(", ".join(held[:width]))
    lines += [
        f"setp.ne.u32 %_q, {text['overflow']}, 0;",
        f"selp.b32 %_end, {vocab}, 0, %_q;",
        f"mul.lo.u32 %_first, {text['warp']}, {step};",
        "AGAIN:",
        "setp.ge.u32 %_q, %_first, %_end;",
        "@%_q bra DONE;",
        f"mad.lo.u32 %_n, %lane, {width}, %_first;",
        *(f"mov.b32 {x}, 0;" for x in held),
    ]
    for i in range(AHEAD):
        registers = vector(", ".join(held[i * width : (i + 1) * width]))[1]
        lines += [
            f"add.u32 %_d, %_n, {i * step * warps};",
            f"setp.lt.u32 %_q, %_d, {vocab};",
            f"add.u32 %_d, %_d, {text['index']};",
            f"mad.wide.u32 %_address, %_d, 4, {text['base']};",
            f"@%_q ld.global.nc.{kind} {registers}, [%_address];",
        ]
    for i in range(AHEAD):
        lines += [
            f"add.u32 %_d, %_n, {i * step * warps};",
            f"div.u32 %_segment, %_d, {attr('size')};",
        ]
        for x in held[i * width : (i + 1) * width]:
            lines += [f"add.sat.f32 {x}, {x}, 0f00000000;", *visit(x)]
    return [*lines, f"add.u32 %_first, %_first, {AHEAD * step * warps};", "bra AGAIN;", "DONE:"]


def _candidate_temps(use: UOp) -> str:
    return (
        f"b32 segment end at n d w first x<{use.arg.attr('vector') * AHEAD}>, b64 address, pred p q"
    )


_SOURCES: tuple[tuple[str, str], ...] = (
    ("list", "smem"),
    ("tallies", "smem"),
    ("overflow", "frag"),
    ("base", "value"),
    ("index", "value"),
    ("warp", "value"),
    ("tile", "global"),
)
_FROM_SOURCES = (
    Access("list", "r", GENERIC),
    Access("tallies", "r", GENERIC),
    Access("overflow", "r", GENERIC),
    Access("tile", "r", READ_ONLY),
)


def _refine_text(use: UOp, text: dict[str, str]) -> str:
    shift, bits, quantity = (use.arg.attr(n) for n in ("shift", "bits", "quantity"))

    def visit(x: str) -> list[str]:
        return [
            f"sub.u32 %_d, {x}, {LEAST};",
            f"shr.u32 %_w, %_d, {shift + bits};",
            f"setp.eq.u32 %_p, %_w, {text['prefix']};",
            f"shr.u32 %_d, %_d, {shift};",
            f"and.b32 %_d, %_d, {(1 << bits) - 1};",
            f"mad.lo.u32 %_d, %_d, 4, {text['bins_reg']};",
            *count_in(quantity, "%_d", x, 4 << bits, "%_p", "%_w"),
        ]

    return scoped(_candidate_temps(use), _candidates(use, text, visit))


refine = define(
    Atom(
        "refine",
        (("bins", "smem"), ("prefix", "frag"), *_SOURCES),
        Scope.WARP,
        Lanes.ALL,
        _refine_text,
        "9.7.13.8 red.shared: counts or weights of candidates by their next digit, of those that "
        "share the prefix",
        accesses=(
            Access("prefix", "r", GENERIC),
            *_FROM_SOURCES,
            Access("bins", "a", GENERIC),
        ),
        rules=(
            Rule("digits lie in the key", lambda u: (
                u.arg.attr("shift") + u.arg.attr("bits") <= KEY_BITS)),
            Rule("there is a bin for each digit", lambda u: (
                u.src[0].arg == 4 * QUANTITIES[u.arg.attr("quantity")] << u.arg.attr("bits"))),
        ),
    )
)  # fmt: skip


def _settle_text(use: UOp, text: dict[str, str]) -> str:
    key, high = text["key"], pieces(text["window"])[0]

    def visit(x: str) -> list[str]:
        return [
            f"mad.lo.u32 %_d, %_segment, {SHARE}, {text['shares_reg']};",
            f"setp.lt.u32 %_q, {x}, {high};",
            f"setp.gt.and.u32 %_p, {x}, {key}, %_q;",
            *weigh(x, "%_w"),
            "@%_p red.shared.add.u32 [%_d], %_w;",
            f"mad.lo.u32 %_d, %_segment, {SHARE}, {text['ties_reg']};",
            f"setp.eq.and.u32 %_p, {x}, {key}, %_q;",
            "@%_p red.shared.add.u32 [%_d], 1;",
        ]

    return scoped(_candidate_temps(use), _candidates(use, text, visit))


settle = define(
    Atom(
        "settle",
        (("shares", "smem"), ("ties", "smem"), ("key", "frag"), ("window", "frag"), *_SOURCES),
        Scope.WARP,
        Lanes.ALL,
        _settle_text,
        "9.7.13.8 red.shared: the weights of candidates above the threshold, and the number of "
        "those equal to it, to the shares and ties of their segments",
        accesses=(
            Access("key", "r", GENERIC),
            Access("window", "r", GENERIC),
            *_FROM_SOURCES,
            Access("shares", "a", GENERIC),
            Access("ties", "a", GENERIC),
        ),
    )
)


def _shares_text(use: UOp, text: dict[str, str]) -> str:
    dst = pieces(text["dst"])
    own, lines = len(dst) // 2, [f"mov.b32 {d}, 0;" for d in dst]
    lines += [f"mul.lo.u32 %_s, {text['thread']}, {own};"]
    lines += [f"mad.lo.u32 %_at, %_s, {SHARE}, {text['shares_reg']};"]
    lines += [f"mad.lo.u32 %_tie, %_s, {SHARE}, {text['ties_reg']};"]
    for i in range(own):
        lines += [
            f"setp.lt.u32 %_p, %_s, {use.arg.attr('segments')};",
            f"@%_p ld.shared.b32 {dst[i]}, [%_at+{SHARE * i}];",
            f"@%_p ld.shared.b32 {dst[own + i]}, [%_tie+{SHARE * i}];",
            "add.u32 %_s, %_s, 1;",
        ]
    return scoped("b32 s at tie, pred p", lines)


ld_shares = define(
    Atom(
        "ld_shares",
        (("dst", "frag"), ("shares", "smem"), ("ties", "smem"), ("thread", "value")),
        Scope.THREAD,
        Lanes.ALL,
        _shares_text,
        "9.7.9.8 ld: the shares of a thread's segments, then their ties; zeros beyond the last",
        accesses=(
            Access("shares", "r", GENERIC),
            Access("ties", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
    )
)


def _kept(mass: str, ties: str, allowed: str, to: str) -> list[str]:
    """A mass, and that of the ties that are allowed; %_tie is the weight of one."""
    return [f"min.u32 {to}, {ties}, {allowed};", f"mad.lo.u32 {to}, {to}, %_tie, {mass};"]


def _find_segment_text(use: UOp, text: dict[str, str]) -> str:
    """%_low is what is kept before a segment, %_next with it; at most one holds the target."""
    src, before = pieces(text["src"]), pieces(text["before"])
    own, allowed, found = len(src) // 2, text["ties"], text["found_reg"]
    low, high = pieces(text["uniform"])
    lines = [
        *before_warp(text["totals_reg"], use.arg.attr("warps"), text["warp"], before),
        *weigh(text["key"], "%_tie"),
        *_kept("%_all0", "%_all1", allowed, "%_next"),
        "cvt.u64.u32 %_wide, %_next;",
        f"mov.b64 %_target, {{{low}, {high}}};",
        "mul.hi.u64 %_target, %_target, %_wide;",
        "cvt.u32.u64 %_goal, %_target;",
        *_kept("%_before0", "%_before1", allowed, "%_low"),
        f"mul.lo.u32 %_at, {text['thread']}, {own};",
    ]
    for i in range(own):
        lines += [
            f"add.u32 %_sum, %_before0, {src[i]};",
            f"add.u32 %_up, %_before1, {src[own + i]};",
            *_kept("%_sum", "%_up", allowed, "%_next"),
            "add.u32 %_at, %_at, 1;",
            "setp.ge.u32 %_p, %_goal, %_low;",
            "setp.lt.and.u32 %_p, %_goal, %_next, %_p;",
            f"@%_p red.shared.add.u32 [{found}], %_at;",
            "sub.u32 %_low, %_goal, %_low;",
            f"@%_p red.shared.add.u32 [{found}+4], %_low;",
            f"min.u32 %_low, %_before1, {allowed};",
            f"sub.u32 %_low, {allowed}, %_low;",
            f"@%_p red.shared.add.u32 [{found}+8], %_low;",
            "mov.b32 %_low, %_next;",
            "mov.b32 %_before0, %_sum;",
            "mov.b32 %_before1, %_up;",
        ]
    temps = f"{BEFORE_TEMPS} tie next goal low, b64 wide target, pred p"
    return scoped(temps, lines)


find_segment = define(
    Atom(
        "find_segment",
        (
            ("found", "smem"),
            ("src", "frag"),
            ("before", "frag"),
            ("totals", "smem"),
            ("key", "frag"),
            ("ties", "frag"),
            ("uniform", "frag"),
            ("thread", "value"),
            ("warp", "value"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _find_segment_text,
        "9.7.1 mul.hi: where a uniform number of 64 bits falls among the kept masses: the segment "
        "and 1, how far into it, how many ties are kept from there on; zeros where no mass is",
        accesses=(
            Access("src", "r", GENERIC),
            Access("before", "r", GENERIC),
            Access("totals", "r", GENERIC),
            Access("key", "r", GENERIC),
            Access("ties", "r", GENERIC),
            Access("uniform", "r", GENERIC),
            Access("found", "a", GENERIC),
        ),
        rules=(Rule("four words are found", lambda u: u.src[0].arg == 16),),
    )
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
        *(f"mov.b32 {x}, 0;" for x in held),
    ]
    for i in range(0, own, width):
        kind, registers = vector(", ".join(held[i : i + width]))
        lines += [
            f"add.u32 %_at, %_first, {i};",
            f"setp.lt.and.u32 %_p, %_at, {vocab}, %_hit;",
            f"add.u32 %_at, %_at, {text['index']};",
            f"mad.wide.u32 %_address, %_at, 4, {text['base']};",
            f"@%_p ld.global.nc.{kind} {registers}, [%_address];",
        ]
    lines += ["mov.b32 %_ties, 0;"]
    for x in held:
        lines += [
            f"add.sat.f32 {x}, {x}, 0f00000000;",
            f"setp.eq.u32 %_p, {x}, {key};",
            "@%_p add.u32 %_ties, %_ties, 1;",
        ]
    lines += ["mov.b32 %_rank, %_ties;", *scan_lanes("%_rank", "%_up", "%_p")]
    lines += ["sub.u32 %_rank, %_rank, %_ties;", "mov.b32 %_sum, 0;"]
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
    lines += ["mov.b32 %_before, %_sum;", *scan_lanes("%_before", "%_up", "%_p")]
    lines += [
        "sub.u32 %_before, %_before, %_sum;",
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


locate = define(
    Atom(
        "locate",
        (
            ("dst", "frag"),
            ("found", "frag"),
            ("key", "frag"),
            ("base", "value"),
            ("index", "value"),
            ("tile", "global"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _locate_text,
        "9.7.9.6 shfl.sync: the element of a segment that holds the target, in the order of "
        "indices: its index, in every lane; 0 where nothing was found",
        accesses=(
            Access("found", "r", GENERIC),
            Access("key", "r", GENERIC),
            Access("tile", "r", READ_ONLY),
            Access("dst", "w", GENERIC),
        ),
        sass=("redux.sync",),
        rules=(
            Rule("whole vectors for every lane", lambda u: (
                u.arg.attr("size") % (32 * u.arg.attr("vector")) == 0)),
        ),
    )
)  # fmt: skip


def _philox_text(use: UOp, text: dict[str, str]) -> str:
    (m0, m1), (w0, w1) = _PHILOX
    names = ("offset_low", "offset_high", "row")
    lines = [f"mov.b32 %_c{i}, {text[name]};" for i, name in enumerate(names)]
    lines += ["mov.b32 %_c3, 0;"]
    lines += [f"mov.b32 %_k{i}, {text[name]};" for i, name in enumerate(("seed_low", "seed_high"))]
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


philox = define(
    Atom(
        "philox",
        (
            ("dst", "frag"),
            ("seed_low", "value"),
            ("seed_high", "value"),
            ("offset_low", "value"),
            ("offset_high", "value"),
            ("row", "value"),
        ),
        Scope.THREAD,
        Lanes.ALL,
        _philox_text,
        "9.7.1 mul.hi, mul.lo: Philox4x32-10 (Salmon et al., SC 2011) of the counter (offset, row, "
        "0) under the seed: its first words, the lower first",
        accesses=(Access("dst", "w", GENERIC),),
        rules=(Rule("it gives up to four words", lambda u: 1 <= u.src[0].arg <= 4),),
    )
)
