"""Atoms of both targets that settle a threshold: lists of candidates, shares of segments.

A row is cut into *segments*, in the order of indices, and a warp sifts its run of them, one at a
time: weights of what is kept for certain are added up, what may be kept becomes a *candidate* in
the run's list, with its segment. A run has a *tally*, the number of its candidates; a segment has a
*share*, the mass that it keeps, and *ties*, the number of elements that equal the threshold. Lists
and these words lie in one CTA, the row's leader. Where a list was too short (*overflow*) the leader
reads the row again.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms.reductions import (
    ALL_LANES,
    KEY_BITS,
    LEAST,
    count_in,
    skip_unless_any,
    weigh,
)
from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import pieces, scoped, vector
from ptxflow.compiler.ir import UOp

SLOT, TALLY, SHARE = 8, 4, 4  # bytes
AHEAD = 4  # vectors of a row that a thread of the leader has in flight


def _sift_text(use: UOp, text: dict[str, str]) -> str:
    attr, src, begun = use.arg.attr, pieces(text["src"]), text["accumulate"]
    size, slots, peers = attr("group"), attr("slots"), attr("peers")
    high, low = pieces(text["window"])
    guard = "" if begun == "0" else f"@!{begun} "
    lines = [] if begun == "1" else [f"{guard}mov.b32 {text['count']}, 0;"]
    lines += [
        "mov.b32 %_mass, 0;",
        "shl.b32 %_below, 1, %lane;",
        "sub.u32 %_below, %_below, 1;",
        # What follows is 2^31, and ptxas cannot know it: it would work out the weights of all
        # elements once, and keep them in registers.
        f"shr.u32 %_scale, {low}, 31;",
        "or.b32 %_scale, %_scale, 0x4F000000;",
        *_there(text, "list", peers, "%_list"),
    ]
    space = ".shared::cluster" if peers > 1 else ".shared"
    for first in range(0, len(src), size):
        label = f"NONE{first}"
        lines += _sift_group(src[first : first + size], high, low, label)
        lines += _list_group(src[first : first + size], text, space, slots)
        lines.append(f"{label}:")
    lines += [
        f"redux.sync.add.u32 %_mass, %_mass, {ALL_LANES};",
        "setp.eq.u32 %_p, %lane, 0;",
        *_there(text, "shares", peers, "%_at"),
        f"mad.lo.u32 %_at, {text['chunk']}, {SHARE}, %_at;",
        f"@%_p st{space}.b32 [%_at], %_mass;",
        *_there(text, "tally", peers, "%_at"),
        f"@%_p st{space}.b32 [%_at], {text['count']};",
        f"setp.gt.and.u32 %_p, {text['count']}, {slots}, %_p;",
        "@!%_p bra FITS;",
        *_there(text, "overflow", peers, "%_at"),
        f"red{'.relaxed.cluster' if peers > 1 else ''}{space}.add.u32 [%_at], 1;",
        "FITS:",
    ]
    temps = f"b32 mass below scale list at pos w, pred p some k<{size}> m<{size}>"
    return scoped(temps, lines)


def _there(text: dict[str, str], name: str, peers: int, to: str) -> list[str]:
    """An address in the leader."""
    if peers == 1:
        return [f"mov.b32 {to}, {text[name + '_reg']};"]
    return [f"mapa.shared::cluster.u32 {to}, {text[name + '_reg']}, {text['rank']};"]


def _sift_group(group: list[str], high: str, low: str, label: str) -> list[str]:
    """Nothing, if no lane has an element that may be kept; candidates are rarer still."""
    may = [f"%_m{j}" for j in range(len(group))]
    lines = [f"setp.ge.u32 {m}, {x}, {low};" for m, x in zip(may, group, strict=True)]
    lines += skip_unless_any(may, label)
    for j, x in enumerate(group):
        lines += [
            f"setp.ge.u32 %_k{j}, {x}, {high};",
            *weigh(x, "%_w", "%_scale"),
            f"@%_k{j} add.u32 %_mass, %_mass, %_w;",
            f"setp.lt.and.u32 %_m{j}, {x}, {high}, %_m{j};",
        ]
    return [*lines, *skip_unless_any(may, label)]


def _list_group(group: list[str], text: dict[str, str], space: str, slots: int) -> list[str]:
    count, lines = text["count"], list[str]()
    for j, x in enumerate(group):
        lines += [
            f"vote.sync.ballot.b32 %_w, %_m{j}, {ALL_LANES};",
            "and.b32 %_pos, %_w, %_below;",
            "popc.b32 %_pos, %_pos;",
            f"add.u32 %_pos, %_pos, {count};",
            "popc.b32 %_w, %_w;",
            f"add.u32 {count}, {count}, %_w;",
            f"setp.lt.and.u32 %_some, %_pos, {slots}, %_m{j};",
            f"mad.lo.u32 %_pos, %_pos, {SLOT}, %_list;",
            f"mov.b32 %_w, {text['segment']};",
            f"@%_some st{space}.b32 [%_pos], {x};",
            f"@%_some st{space}.b32 [%_pos+4], %_w;",
        ]
    return lines


instruction(
    "sift(list: smem w, tally: smem*4 w, shares: smem w, overflow: smem a, count: frag rw, "
    "src: frag r, window: frag*2 r, segment chunk accumulate rank: value) warp",
    _sift_text,
    "9.7.9.11 st.shared::cluster: a segment's candidates, their number and its share into the "
    "leader; a group in which no lane has an element that may be kept is skipped by a vote",
    defaults=(("unread", "count"),),
    rules=(
        Rule("whole groups", lambda u: u.src[5].arg % u.arg.attr("group") == 0),
        Rule("a list has its slots", lambda u: u.src[0].arg == SLOT * u.arg.attr("slots")),
    ),
)


def _candidates(
    use: UOp, text: dict[str, str], visit: Callable[[str], list[str]], none: str = ""
) -> list[str]:
    """Every candidate in turn, its segment in %_segment: of the lists, or of the row on overflow.

    `none`: a predicate that there is nothing to visit.
    """
    attr = use.arg.attr
    slots, warps, width, vocab = (attr(n) for n in ("slots", "warps", "vector", "vocab"))
    step, held = 32 * width, [f"%_x{i}" for i in range(width * AHEAD)]
    kind, _ = vector(", ".join(held[:width]))
    lines = [
        f"setp.ne.u32 %_q, {text['overflow']}, 0;",
        f"selp.b32 %_end, 0, {attr('runs')}, %_q;",
        f"selp.b32 %_last, {vocab}, 0, %_q;",
        *([f"@{none} mov.b32 %_end, 0;", f"@{none} mov.b32 %_last, 0;"] if none else []),
        f"mov.b32 %_run, {text['warp']};",
        "RUN:",
        "setp.ge.u32 %_q, %_run, %_end;",
        "@%_q bra ROW;",
        f"mad.lo.u32 %_at, %_run, {TALLY}, {text['tallies_reg']};",
        "ld.shared.b32 %_n, [%_at];",
        f"mad.lo.u32 %_at, %_run, {slots}, %lane;",
        f"mad.lo.u32 %_at, %_at, {SLOT}, {text['list_reg']};",
        f"add.u32 %_run, %_run, {warps};",
        "mov.b32 %_first, 0;",
        "MORE:",
        "setp.ge.u32 %_q, %_first, %_n;",
        "@%_q bra RUN;",
        "add.u32 %_d, %_first, %lane;",
        "setp.lt.u32 %_q, %_d, %_n;",
        "mov.b32 %_x0, 0;",
        "mov.b32 %_segment, 0;",
        "@%_q ld.shared.v2.b32 {%_x0, %_segment}, [%_at];",
        *visit("%_x0"),
        f"add.u32 %_at, %_at, {32 * SLOT};",
        "add.u32 %_first, %_first, 32;",
        "bra MORE;",
        "ROW:",
        f"mul.lo.u32 %_first, {text['warp']}, {step};",
        "AGAIN:",
        "setp.ge.u32 %_q, %_first, %_last;",
        "@%_q bra DONE;",
        f"mad.lo.u32 %_n, %lane, {width}, %_first;",
        f"add.u32 %_d, %_n, {text['index']};",
        f"mad.wide.u32 %_address, %_d, 4, {text['base']};",
        *(f"mov.b32 {x}, 0;" for x in held),
    ]
    for i in range(AHEAD):
        registers = vector(", ".join(held[i * width : (i + 1) * width]))[1]
        lines += [
            f"add.u32 %_d, %_n, {i * step * warps};",
            f"setp.lt.u32 %_q, %_d, {vocab};",
            f"@%_q ld.global.nc.{kind} {registers}, [%_address+{4 * i * step * warps}];",
        ]
    for i in range(AHEAD):
        lines.append(f"add.u32 %_d, %_n, {i * step * warps};")
        lines.append(f"div.u32 %_segment, %_d, {attr('size')};")
        for x in held[i * width : (i + 1) * width]:
            lines += [f"add.sat.f32 {x}, {x}, 0f00000000;", *visit(x)]
    return [*lines, f"add.u32 %_first, %_first, {AHEAD * step * warps};", "bra AGAIN;", "DONE:"]


def _candidate_temps(use: UOp) -> str:
    return (
        f"b32 run segment end last at n d w first x<{use.arg.attr('vector') * AHEAD}>, "
        "b64 address, pred p q no"
    )


def _refine_text(use: UOp, text: dict[str, str]) -> str:
    shift, bits, quantity = (use.arg.attr(n) for n in ("shift", "bits", "quantity"))

    def visit(x: str) -> list[str]:
        return [
            f"setp.gt.u32 %_q, {x}, {text['above']};",
            f"sub.u32 %_d, {x}, {LEAST};",
            f"shr.u32 %_w, %_d, {shift + bits};",
            f"setp.eq.and.u32 %_p, %_w, {text['prefix']}, %_q;",
            f"shr.u32 %_d, %_d, {shift};",
            f"and.b32 %_d, %_d, {(1 << bits) - 1};",
            f"mad.lo.u32 %_d, %_d, 4, {text['bins_reg']};",
            *count_in(quantity, "%_d", x, "%_p", "%_w"),
        ]

    nowhere = f"setp.eq.u32 %_no, {text['prefix']}, 0xFFFFFFFF;"
    lines = _candidates(use, text, visit, "%_no")
    return scoped(_candidate_temps(use), [nowhere, *lines])


instruction(
    "refine(bins: smem a, prefix above: frag r, list tallies: smem r, overflow: frag r, base "
    "index warp: value, tile: global r read-only) warp",
    _refine_text,
    "9.7.13.8 red.shared: counts or weights of candidates by their next digit, of those above "
    "an element that share the prefix",
    rules=(
        Rule(
            "digits lie in the key", lambda u: u.arg.attr("shift") + u.arg.attr("bits") <= KEY_BITS
        ),
        Rule("there is a bin for each digit", lambda u: u.src[0].arg == 4 << u.arg.attr("bits")),
    ),
)


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


instruction(
    "settle(shares ties: smem a, key window: frag r, list tallies: smem r, overflow: frag r, "
    "base index warp: value, tile: global r read-only) warp",
    _settle_text,
    "9.7.13.8 red.shared: the weights of candidates above the threshold, and the number of "
    "those equal to it, to the shares and ties of their segments",
)
