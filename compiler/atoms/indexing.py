"""Atoms of both targets that score tokens and choose the best of a row, exactly.

A *key* is a float32 score whose bits were turned so that keys order as unsigned integers; 0 is the
key of no score. An *entry* is a key and, below it, the token's position turned round, so that no
two tokens are equal and the first of equals is the greatest: 64 bits, of which the last 12 are 0. A
row's *bound* is what is known of its least chosen entry, a digit at a time, from the highest one
on; the *state* of the choice is the bound (low and high word), the goal, which is how many entries
are to come before the one sought among those that share the bound's digits, and the number of
entries that are not below the bound.
"""

from ptxflow.compiler.atoms.reductions import ALL_LANES, skip_unless_any
from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import each, pieces, scoped
from ptxflow.compiler.ir import Statement

POSITION_BITS = 20  # of a token in its row
UNUSED_BITS = 32 - POSITION_BITS
ENTRY_BITS = 32 + POSITION_BITS
ENTRY, STATE = 8, 16  # bytes


def _sort_key_text(use: Statement, text: dict[str, str]) -> str:
    lines = (
        "add.rn.f32 {dst}, {src}, 0f00000000;",  # -0 to 0
        "shr.s32 %_s, {dst}, 31;",
        "or.b32 %_s, %_s, 0x80000000;",
        "xor.b32 {dst}, {dst}, %_s;",
        *(() if text["inside"] == "1" else ("selp.b32 {dst}, {dst}, 0, {inside};",)),
    )
    return each("\n".join(lines), temps="b32 s")(use, text)


instruction(
    "sort_key(dst: frag*n w, src: frag*n r, inside: value)",
    _sort_key_text,
    "9.7.8 xor: all bits of a negative number, the sign of others; 0 where not inside",
)


def _entry(x: str, position: str, to: str) -> list[str]:
    """The entry of a key, low word in %_low."""
    return [
        f"not.b32 %_low, {position};",
        f"shl.b32 %_low, %_low, {UNUSED_BITS};",
        f"mov.b64 {to}, {{%_low, {x}}};",
    ]


def _gather_text(use: Statement, text: dict[str, str]) -> str:
    keys, slots, peers = pieces(text["src"]), use.arg.attr("slots"), use.arg.attr("peers")
    low, high = pieces(text["bound"])
    space = "relaxed.cluster.shared::cluster" if peers > 1 else "shared"
    store = ".shared::cluster" if peers > 1 else ".shared"
    may = [f"%_m{i}" for i in range(len(keys))]
    lines = list[str]()
    for m, x in zip(may, keys, strict=True):
        lines += [f"setp.ge.u32 {m}, {x}, {high};", f"setp.ne.and.u32 {m}, {x}, 0, {m};"]
    lines += [
        *skip_unless_any(may, "NONE"),
        f"mov.b64 %_bound, {{{low}, {high}}};",
        "shl.b32 %_below, 1, %lane;",
        "sub.u32 %_below, %_below, 1;",
        "setp.eq.u32 %_first, %lane, 0;",
    ]
    for name in ("list", "count"):
        here = text[f"{name}_reg"]
        there = f"mapa.shared::cluster.u32 %_{name}, {here}, {text['rank']};"
        lines.append(there if peers > 1 else f"mov.b32 %_{name}, {here};")
    for i, (m, x) in enumerate(zip(may, keys, strict=True)):
        lines += [
            f"add.u32 %_at, {text['position']}, {i};",
            *_entry(x, "%_at", "%_entry"),
            f"setp.ge.and.u64 {m}, %_entry, %_bound, {m};",
            f"vote.sync.ballot.b32 %_lanes, {m}, {ALL_LANES};",
            "popc.b32 %_all, %_lanes;",
            "mov.b32 %_at, 0;",
            "setp.ne.and.u32 %_some, %_all, 0, %_first;",
            f"@%_some atom.{space}.add.u32 %_at, [%_count], %_all;",
            f"shfl.sync.idx.b32 %_at, %_at, 0, 31, {ALL_LANES};",
            "and.b32 %_lanes, %_lanes, %_below;",
            "popc.b32 %_lanes, %_lanes;",
            "add.u32 %_at, %_at, %_lanes;",
            f"setp.lt.and.u32 {m}, %_at, {slots}, {m};",
            f"mad.lo.u32 %_at, %_at, {ENTRY}, %_list;",
            f"@{m} st{store}.v2.b32 [%_at], {{%_low, {x}}};",
        ]
    temps = (
        f"b32 at low lanes all below list count, b64 bound entry, pred some first m<{len(keys)}>"
    )
    return scoped(temps, [*lines, "NONE:"])


instruction(
    "gather_entries(list: smem a, count: smem*4 a, src: frag r, bound: frag*2 r, position rank: "
    "value, peers slots: int) warp",
    _gather_text,
    "9.7.13.7 atom.shared: entries that are not below the bound to the leader's list, in any "
    "order, at places that its count gives out; keys of consecutive positions",
    rules=(Rule("a list has its slots", lambda u: u.src[0].arg == ENTRY * u.arg.attr("slots")),),
)


instruction(
    "outrank(rank: frag*1 rw, own: frag*2 r, others: frag*2n r)",
    each(
        "mov.b64 %_other, {{{others[0]}, {others[1]}}};\n"
        "setp.gt.u64 %_p, %_other, %_own;\n"
        "@%_p add.u32 {rank}, {rank}, 1;",
        temps="b64 own other, pred p",
        begin="mov.b64 %_own, {{{own[0]}, {own[1]}}};",
    ),
    "9.7.6 setp: adds the number of other entries that are greater",
)
instruction(
    "put_place(dst: smem a, offset inside: value, src: frag*1 r)",
    "add.u32 %ra, {dst_reg}, {offset};\n@{inside} red.shared.add.u32 [%ra], {src};",
    "9.7.13.8 red.shared: one register to a place of its own among zeros",
)
