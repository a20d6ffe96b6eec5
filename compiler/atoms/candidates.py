"""Atoms of both targets that settle a threshold: lists of candidates, shares of segments.

A row is cut into *segments*, in the order of indices, and a warp sifts its run of them, one at a
time: weights of what is kept for certain are added up, what may be kept becomes a *candidate* in
the run's list, with its segment. A run has a *tally*, the number of its candidates; a segment has a
*share*, the mass that it keeps, and *ties*, the number of elements that equal the threshold. Lists
and these words lie in one CTA, the row's leader. Where a list was too short (*overflow*) the leader
reads the row again.
"""

from ptxflow.compiler.atoms.reductions import ALL_LANES, skip_unless_any, weigh
from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import pieces, scoped
from ptxflow.compiler.ir import Statement

SLOT, TALLY, SHARE = 8, 4, 4  # bytes


def _sift_text(use: Statement, text: dict[str, str]) -> str:
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
    "sift(list: smem w, tally: smem*4 w, shares: smem w, overflow: smem a, count: frag rw, src: "
    "frag r, window: frag*2 r, segment chunk accumulate rank: value, group peers slots: int, "
    "unread: str='count') warp",
    _sift_text,
    "9.7.9.11 st.shared::cluster: a segment's candidates, their number and its share into the "
    "leader; a group in which no lane has an element that may be kept is skipped by a vote",
    rules=(
        Rule("whole groups", lambda u: u.src[5].arg % u.arg.attr("group") == 0),
        Rule("a list has its slots", lambda u: u.src[0].arg == SLOT * u.arg.attr("slots")),
    ),
)
