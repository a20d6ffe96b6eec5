"""Atoms of both targets for a mixture of experts: a warp routes a token, and tokens find a place
among the rows of the experts that they chose.

Of a token's 256 experts lane l scores 8, from 8l on: four lanes hold a group of 32. A *choice* is
the number of an expert counted from the first one that is local, all ones if it is not. In sets of
tokens a lane is a token, in sets of experts it is one of 32 experts, a *word* of them.
"""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.atoms.reductions import ALL_LANES, scan_lanes
from ptxflow.compiler.atoms.table import GENERIC, Access, Rule, add, atom, instruction
from ptxflow.compiler.atoms.threads import each, pieces, scoped
from ptxflow.compiler.ir import UOp

LANE_EXPERTS = 8
GROUPS, KEPT_GROUPS, CHOSEN = 8, 4, 8
ROW_ALIGN = 8  # rows of an expert begin at a multiple: 32 bytes of their scales
WORD = 32  # experts


def _sigmoid_text(use: UOp, text: dict[str, str]) -> str:
    """e^-x is 2^a (1 + b ln 2), where a + b is x log2 e to more than float32 holds."""
    lines = []
    for d, x in zip(pieces(text["dst"]), pieces(text["src"]), strict=True):
        lines += [
            f"mul.rn.f32 %_a, {x}, 0fBFB8AA3B;",
            "neg.f32 %_b, %_a;",
            f"fma.rn.f32 %_b, {x}, 0fBFB8AA3B, %_b;",
            f"fma.rn.f32 %_b, {x}, 0fB2A57060, %_b;",
            "ex2.approx.ftz.f32 %_e, %_a;",
            "mul.rn.f32 %_b, %_b, 0f3F317218;",
            "fma.rn.f32 %_e, %_e, %_b, %_e;",
            "add.rn.f32 %_e, %_e, 0f3F800000;",
            f"div.rn.f32 {d}, 0f3F800000, %_e;",
        ]
    return scoped("f32 a b e", lines)


instruction(
    "sigmoid(dst: frag*n w, src: frag*n r)",
    _sigmoid_text,
    "9.7.3 ex2.approx, 9.7.3.8 div.rn: 1 / (1 + e^-x), within two ulp",
    sass=("ex2.approx",),
)


def _keys_text(use: UOp, text: dict[str, str]) -> str:
    """A group's score is exact in all its lanes; what ranks it are the scores of the others."""
    dst, src = pieces(text["dst"]), pieces(text["src"])
    lines = [f"max.f32 %_top, {src[0]}, {src[1]};", f"min.f32 %_next, {src[0]}, {src[1]};"]
    for x in src[2:]:
        lines += [
            f"min.f32 %_low, %_top, {x};",
            "max.f32 %_next, %_next, %_low;",
            f"max.f32 %_top, %_top, {x};",
        ]
    for distance in (1, 2):
        lines += [
            f"shfl.sync.bfly.b32 %_o, %_top, {distance}, 31, {ALL_LANES};",
            f"shfl.sync.bfly.b32 %_q, %_next, {distance}, 31, {ALL_LANES};",
            "min.f32 %_low, %_top, %_o;",
            "max.f32 %_next, %_next, %_q;",
            "max.f32 %_next, %_next, %_low;",
            "max.f32 %_top, %_top, %_o;",
        ]
    lines += ["add.rn.f32 %_top, %_top, %_next;", "mov.b32 %_rank, 0;", "shr.u32 %_g, %lane, 2;"]
    for group in range(GROUPS):
        tie = (
            f"setp.lt.u32 %_p, {group}, %_g;",
            "setp.eq.and.f32 %_p, %_o, %_top, %_p;",
            "@%_p add.u32 %_rank, %_rank, 1;",
        )
        lines += [
            f"shfl.sync.idx.b32 %_o, %_top, {4 * group}, 31, {ALL_LANES};",
            *(tie if group < GROUPS - 1 else ()),
            "setp.gt.f32 %_p, %_o, %_top;",
            "@%_p add.u32 %_rank, %_rank, 1;",
        ]
    lines.append(f"setp.lt.u32 %_p, %_rank, {KEPT_GROUPS};")
    for d, x in zip(dst, src, strict=True):
        lines += [
            f"mov.b32 %_word, {x};",
            "shr.s32 %_sign, %_word, 31;",
            "or.b32 %_sign, %_sign, 0x80000000;",
            "xor.b32 %_word, %_word, %_sign;",
            f"selp.b32 {d}, %_word, 0, %_p;",
        ]
    return scoped("f32 top next low o q, b32 rank g word sign, pred p", lines)


instruction(
    "keep_groups(dst: frag*8 w, src: frag*8 r) warp",
    _keys_text,
    "9.7.9.6 shfl.sync: keys of the experts in the four groups of which the two largest scores "
    "add up to most, unsigned and in the order of their scores; 0 in other groups",
)


def _best_text(use: UOp, text: dict[str, str]) -> str:
    keys, chosen = pieces(text["keys"]), text["chosen"]
    lines = [f"mov.b32 {chosen}, 0;"]
    for _ in range(CHOSEN):
        lines.append(f"max.u32 %_top, {keys[0]}, {keys[1]};")
        lines += [f"max.u32 %_top, %_top, {k};" for k in keys[2:]]
        lines += [
            f"redux.sync.max.u32 %_best, %_top, {ALL_LANES};",
            "setp.eq.u32 %_p, %_top, %_best;",
            f"vote.sync.ballot.b32 %_top, %_p, {ALL_LANES};",
            "brev.b32 %_top, %_top;",
            "clz.b32 %_top, %_top;",
            "setp.eq.u32 %_p, %_top, %lane;",
        ]
        for i, k in enumerate(keys):
            lines += [
                f"setp.eq.and.u32 %_q, {k}, %_best, %_p;",
                f"@%_q or.b32 {chosen}, {chosen}, {1 << i};",
                f"@%_q mov.b32 {k}, 0;",
                "xor.pred %_p, %_p, %_q;",
            ]
    return scoped("b32 top best, pred p q", lines)


instruction(
    "take_best(chosen: frag w, keys: frag*8 rw) warp",
    _best_text,
    "9.7.13.11 redux.sync: the eight largest keys of the warp, as bits of each lane's keys, "
    "which it empties",
    sass=("redux.sync",),
    defaults=(("unread", "keys"),),
)


def _shares_text(use: UOp, text: dict[str, str]) -> str:
    dst, scores, chosen = pieces(text["dst"]), pieces(text["scores"]), text["chosen"]
    lines = ["mov.b32 %_sum, 0;"]
    for i, s in enumerate(scores):
        lines += [
            f"and.b32 %_bit, {chosen}, {1 << i};",
            "setp.ne.u32 %_p, %_bit, 0;",
            f"@%_p add.rn.f32 %_sum, %_sum, {s};",
        ]
    for distance in (1, 2, 4, 8, 16):
        lines += [
            f"shfl.sync.bfly.b32 %_o, %_sum, {distance}, 31, {ALL_LANES};",
            "add.rn.f32 %_sum, %_sum, %_o;",
        ]
    lines.append("add.rn.f32 %_sum, %_sum, 0f1E3CE508;")  # 1e-20
    for d, s in zip(dst, scores, strict=True):
        lines += [f"div.rn.f32 {d}, {s}, %_sum;", f"mul.rn.f32 {d}, {d}, {text['factor']};"]
    return scoped("f32 sum o, b32 bit, pred p", lines)


instruction(
    "share_chosen(dst: frag w, scores chosen factor: frag r) warp",
    _shares_text,
    "9.7.3.8 div.rn: scores over the sum of the chosen ones, and 1e-20, times a factor",
)


def _store_chosen_text(use: UOp, text: dict[str, str]) -> str:
    chosen = text["chosen"]
    lines = [
        f"popc.b32 %_own, {chosen};",
        "mov.b32 %_rank, %_own;",
        *scan_lanes("%_rank", "%_up", "%_p"),
        "sub.u32 %_rank, %_rank, %_own;",
        f"mad.lo.u32 %_rank, {text['token']}, {CHOSEN}, %_rank;",
        f"mul.lo.u32 %_own, %lane, {LANE_EXPERTS};",
        f"sub.u32 %_own, %_own, {text['first']};",
    ]
    for i, share in enumerate(pieces(text["shares"])):
        lines += [
            f"and.b32 %_up, {chosen}, {1 << i};",
            "setp.ne.u32 %_p, %_up, 0;",
            f"mad.wide.u32 %rda, %_rank, 4, {text['choices_base']};",
            f"setp.lt.u32 %_q, %_own, {use.arg.attr('local')};",
            "selp.b32 %_up, %_own, 0xFFFFFFFF, %_q;",
            "@%_p st.global.b32 [%rda], %_up;",
            f"mad.wide.u32 %rda, %_rank, 4, {text['shares_base']};",
            f"@%_p st.global.b32 [%rda], {share};",
            "@%_p add.u32 %_rank, %_rank, 1;",
            "add.u32 %_own, %_own, 1;",
        ]
    return scoped("b32 own rank up, pred p q", lines)


instruction(
    "st_chosen(choices_base shares_base: pointer, token first: value, choices shares_tile: "
    "global w, chosen shares: frag r) warp",
    _store_chosen_text,
    "9.7.9.11 st: a token's chosen experts, counted from the first of `local` ones, and their "
    "shares, in ascending order of experts; all ones for those that are not local",
)


def _choosers_text(use: UOp, text: dict[str, str]) -> str:
    dst, base = text["dst"], use.arg.attr("first")
    lines = ["mov.b32 %_mine, 0;", f"mov.b32 {dst}, 0;"]
    for choice in pieces(text["choices"]):
        lines += [
            f"sub.u32 %_e, {choice}, {base};",
            "shl.b32 %_bit, 1, %_e;",  # 0 where it is shifted out
            "or.b32 %_mine, %_mine, %_bit;",
        ]
    if text["inside"] != "1":
        lines.append(f"selp.b32 %_mine, %_mine, 0, {text['inside']};")
    for e in range(WORD):
        lines += [
            f"and.b32 %_bit, %_mine, {1 << e};",
            "setp.ne.u32 %_p, %_bit, 0;",
            f"vote.sync.ballot.b32 %_bit, %_p, {ALL_LANES};",
            f"setp.eq.u32 %_p, %lane, {e};",
            f"@%_p mov.b32 {dst}, %_bit;",
        ]
    return scoped("b32 mine e bit, pred p", lines)


instruction(
    "choosers(dst: frag*1 w, choices: frag*8 r, inside: value) warp",
    _choosers_text,
    "9.7.13.10 vote.sync: from tokens to experts: each lane gets the set of the warp's tokens "
    "that chose its expert, of the word that begins with `first`",
)
add(
    replace(
        atom("ld_global"),
        name="ld_global_own",
        isa="9.7.9.8 ld.global of what the kernel itself has written, before its warps met; zeros "
        "where not `inside`",
        accesses=(Access("tile", "r", GENERIC), Access("dst", "w", GENERIC)),
        sass=(),
        defaults=(("cache", ""), ("handed", True), ("offset", 0), ("prefetch", 0)),
    )
)
instruction(
    "add_size(dst: frag*1 rw, src: frag*1 r)",
    lambda use, t: f"popc.b32 %ra, {t['src']};\nadd.u32 {t['dst']}, {t['dst']}, %ra;",
    "9.7.1 popc: adds the number of members of a set",
)
instruction(
    "add_words(dst: frag*n w, a b: frag*n r)",
    each("add.u32 {dst}, {a}, {b};"),
    "9.7.1.1 add of integers",
)


def _columns_text(use: UOp, text: dict[str, str]) -> str:
    lines = [
        f"mov.b32 {text['total']}, 0;",
        f"mov.b32 {text['before']}, 0;",
        f"mad.lo.u32 %_at, %lane, 4, {text['counts_reg']};",
    ]
    warps = use.arg.attr("warps")
    for i in range(warps):
        lines += [
            f"ld.shared.b32 %_x, [%_at+{i * use.arg.attr('pitch')}];",
            f"add.u32 {text['total']}, {text['total']}, %_x;",
        ]
        if i < warps - 1:  # no warp is behind the last
            lines += [
                f"setp.gt.u32 %_p, {text['warp']}, {i};",
                f"@%_p add.u32 {text['before']}, {text['before']}, %_x;",
            ]
    return scoped("b32 at x, pred p", lines)


instruction(
    "add_counts(total before: frag w, counts: smem r, warp: value)",
    _columns_text,
    "9.7.9.8 ld: a lane's count, over all warps, and over those before one; a warp's counts "
    "are `pitch` bytes behind those of the warp before",
)


def _begin_text(use: UOp, text: dict[str, str]) -> str:
    tile, rows, tiles = use.arg.attr("tile"), text["rows"], text["tiles"]
    lines = []
    for unit, out, running in ((ROW_ALIGN, "start", rows), (tile, "first", tiles)):
        lines += [
            f"add.u32 %_own, {text['total']}, {unit - 1};",
            f"shr.u32 %_own, %_own, {unit.bit_length() - 1};",
            *(["shl.b32 %_own, %_own, 3;"] if out == "start" else []),
            "mov.b32 %_sum, %_own;",
            *scan_lanes("%_sum", "%_up", "%_p"),
            f"add.u32 %_sum, %_sum, {running};",
            f"sub.u32 {text[out]}, %_sum, %_own;",
            f"shfl.sync.idx.b32 {running}, %_sum, 31, 31, {ALL_LANES};",
        ]
    return scoped("b32 own sum up, pred p", lines)


instruction(
    "begin_experts(start first: frag w, rows tiles: frag rw, total: frag r) warp",
    _begin_text,
    "9.7.9.6 shfl.sync.up: where each lane's expert begins, among rows and among tiles of "
    "`tile` of them, behind those of the words before, which it adds to",
    defaults=(("alike", True), ("unread", "rows")),
    rules=(Rule("tiles are powers of two", lambda u: u.arg.attr("tile").bit_count() == 1),),
)


def _find_text(use: UOp, text: dict[str, str]) -> str:
    """The last expert whose tiles begin no later; empty ones begin where the next one does."""
    tile, word = use.arg.attr("tile"), use.arg.attr("first_expert")
    expert, row, rows = pieces(text["dst"])[:3]
    lines = ["mov.b32 %_e, 0xFFFFFFFF;"]
    for e in range(WORD):
        lines += [
            f"shfl.sync.idx.b32 %_x, {text['first']}, {e}, 31, {ALL_LANES};",
            f"setp.le.u32 %_p, %_x, {text['index']};",
            "@%_p add.u32 %_e, %_e, 1;",
        ]
    lines += [
        "setp.ne.u32 %_p, %_e, 0xFFFFFFFF;",
        "and.b32 %_e, %_e, 31;",
        f"shfl.sync.idx.b32 %_x, {text['first']}, %_e, 31, {ALL_LANES};",
        f"sub.u32 %_x, {text['index']}, %_x;",
        f"mul.lo.u32 %_x, %_x, {tile};",
        f"shfl.sync.idx.b32 %_y, {text['start']}, %_e, 31, {ALL_LANES};",
        f"@%_p add.u32 {row}, %_y, %_x;",
        f"shfl.sync.idx.b32 %_y, {text['total']}, %_e, 31, {ALL_LANES};",
        f"@%_p sub.u32 {rows}, %_y, %_x;",
        f"@%_p add.u32 {expert}, %_e, {word};",
    ]
    return scoped("b32 e x y, pred p", lines)


instruction(
    "find_tile(dst: frag*4 rw, index: value, first start total: frag r) warp",
    _find_text,
    "9.7.9.6 shfl.sync.idx: of each lane's tile its expert, its first row and how many rows "
    "the expert has from there; kept as it was where the word's experts come later",
)


def _rank_text(use: UOp, text: dict[str, str]) -> str:
    lines = ["mov.b32 %_below, 1;", "shl.b32 %_below, %_below, %lane;"]
    lines.append("sub.u32 %_below, %_below, 1;")
    for row, choice in zip(pieces(text["rows"]), pieces(text["choices"]), strict=True):
        lines += [
            f"sub.u32 %_e, {choice}, {use.arg.attr('first')};",
            f"setp.lt.u32 %_p, %_e, {WORD};",
            "and.b32 %_e, %_e, 31;",
            f"shfl.sync.idx.b32 %_set, {text['set']}, %_e, 31, {ALL_LANES};",
            f"shfl.sync.idx.b32 %_next, {text['next']}, %_e, 31, {ALL_LANES};",
            "and.b32 %_set, %_set, %_below;",
            "popc.b32 %_set, %_set;",
            f"@%_p add.u32 {row}, %_next, %_set;",
        ]
    lines += [f"popc.b32 %_e, {text['set']};", f"add.u32 {text['next']}, {text['next']}, %_e;"]
    return scoped("b32 below e set next, pred p", lines)


instruction(
    "rank_rows(rows: frag*n rw, next: frag rw, choices: frag*n r, set: frag r) warp",
    _rank_text,
    "9.7.9.6 shfl.sync.idx, 9.7.1 popc: a token's rows for its choices in a word: the next "
    "ones of each expert, in the order of lanes, which it passes over",
    defaults=(("unread", "next"),),
)


def _store_tokens_text(use: UOp, text: dict[str, str]) -> str:
    lines = []
    for row in pieces(text["rows"]):
        lines += [
            f"setp.ne.and.u32 %_p, {row}, 0xFFFFFFFF, {text['inside']};",
            f"mad.wide.u32 %rda, {row}, 4, {text['base']};",
            f"@%_p st.global.b32 [%rda], {text['token']};",
        ]
    return scoped("pred p", lines)


instruction(
    "st_tokens(base: pointer, token inside: value, tile: global w, rows: frag r)",
    _store_tokens_text,
    "9.7.9.11 st: a lane's token at each of its rows, but those that are all ones",
)
