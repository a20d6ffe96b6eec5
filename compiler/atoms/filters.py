"""Atoms of both targets for the ends of filters: goals, prefixes, windows and ties, the same in
every lane.

What was *found* is four registers: a digit and 1 (0: nothing, the filter keeps all), what is left
of the goal there, and of masses what is above that bin and in it.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms.reductions import KEY_BITS, LEAST, WEIGHT_SCALE, scoped, weigh
from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, Lanes, Scope, define
from ptxflow.compiler.atoms.threads import pieces
from ptxflow.compiler.ir import UOp

MANY = 0x7FFFFFFF  # a count that no row reaches
EVERYTHING = 0xFFFFFFFF  # a weight that no row exceeds
NOWHERE = 0xFFFFFFFF  # the prefix of a threshold that there is not
WHOLE = 1 << 31  # the weight of probability 1


def _formula(
    name: str,
    operands: str,
    isa: str,
    lines: Callable[[UOp, dict[str, str]], list[str]],
    temps: str,
) -> Callable[..., UOp]:
    """An atom that computes dst from registers, the same in every lane."""
    sources = operands.split()

    def text(use: UOp, t: dict[str, str]) -> str:
        return scoped(temps, lines(use, t))

    return define(
        Atom(
            name,
            (("dst", "frag"), *((s, "frag") for s in sources)),
            Scope.THREAD,
            Lanes.ALL,
            text,
            isa,
            accesses=(
                *(Access(s, "r", GENERIC) for s in sources),
                Access("dst", "w", GENERIC),
            ),
        )
    )


goal_of_k = _formula(
    "goal_of_k",
    "k",
    "9.7.1 add, min: k - 1, or MANY where k keeps everything",
    lambda u, t: [f"add.u32 %_a, {t['k']}, -1;", f"min.u32 {t['dst']}, %_a, {MANY};"],
    "b32 a",
)
goal_of_p = _formula(
    "goal_of_p",
    "p total",
    "9.7.9.22 cvt, 9.7.1 mul: floor(p total), p in steps of 2^-31; 0 for p <= 0, EVERYTHING from 1",
    lambda u, t: [
        f"mul.f32 %_a, {t['p']}, {WEIGHT_SCALE};",
        "cvt.rzi.u32.f32 %_a, %_a;",
        f"setp.ge.f32 %_q, {t['p']}, 0f3F800000;",
        f"mul.wide.u32 %_m, %_a, {t['total']};",
        "shr.u64 %_m, %_m, 31;",
        "cvt.u32.u64 %_a, %_m;",
        f"selp.b32 {t['dst']}, {EVERYTHING}, %_a, %_q;",
    ],
    "b32 a, b64 m, pred q",
)


def _whole_lines(use: UOp, t: dict[str, str], least: str, most: str) -> list[str]:
    """dst: both, or the total where nothing was found, or the weight of 1 where k keeps all."""
    lines = [
        f"setp.ne.u32 %_p, {pieces(t['found'])[0]}, 0;",
        f"add.u32 %_a, {t['k']}, -1;",
        f"setp.lt.u32 %_q, %_a, {use.arg.attr('size') - 1};",
    ]
    for d, x in zip(pieces(t["dst"]), (least, most), strict=False):
        lines += [f"selp.b32 {d}, {x}, {t['total']}, %_p;", f"selp.b32 {d}, {d}, {WHOLE}, %_q;"]
    return lines


def _whole_bounds(use: UOp, t: dict[str, str]) -> list[str]:
    _, _, above, inside = pieces(t["found"])
    return [f"add.u32 %_b, {above}, {inside};", *_whole_lines(use, t, above, "%_b")]


whole_bounds = _formula(
    "whole_bounds",
    "found total k",
    "9.7.7 selp: the mass that k keeps, between what is above the bin of its threshold and with it",
    _whole_bounds,
    "b32 a b, pred p q",
)


def _whole_exact(use: UOp, t: dict[str, str]) -> list[str]:
    lines = [*weigh(t["key"], "%_b"), f"mul.lo.u32 %_b, %_b, {t['ties']};"]
    lines += [f"add.u32 %_b, %_b, {pieces(t[f])[2]};" for f in ("found", "second", "third")]
    return [*lines, *_whole_lines(use, t, "%_b", "%_b")]


whole_exact = _formula(
    "whole_exact",
    "found second third key ties total k",
    "9.7.7 selp: the mass that k keeps: what is above each digit of its key, and the kept ties",
    _whole_exact,
    "b32 a b, pred p q",
)
narrow = _formula(
    "narrow",
    "prefix found",
    "9.7.8 shl, or: the prefix with the digit that was found, NOWHERE where none was",
    lambda u, t: [
        f"sub.u32 %_a, {pieces(t['found'])[0]}, 1;",
        f"shl.b32 %_b, {t['prefix']}, {u.arg.attr('bits')};",
        f"or.b32 {t['dst']}, %_b, %_a;",
    ],
    "b32 a b",
)
key_of = _formula(
    "key_of",
    "prefix",
    "9.7.7 selp: the element of a whole key; LEAST where there is none",
    lambda u, t: [
        f"add.u32 %_a, {t['prefix']}, {LEAST};",
        f"setp.ne.u32 %_q, {t['prefix']}, {NOWHERE};",
        f"selp.b32 {t['dst']}, %_a, {LEAST}, %_q;",
    ],
    "b32 a, pred q",
)


def _window(found: str, bits: int, low: str, high: str) -> list[str]:
    """The elements of the bin that was found; LEAST twice where none was. %_q: whether one was."""
    shift = KEY_BITS - bits
    return [
        f"setp.ne.u32 %_q, {found}, 0;",
        f"sub.u32 {low}, {found}, 1;",
        f"shl.b32 {low}, {low}, {shift};",
        f"add.u32 {low}, {low}, {LEAST};",
        f"add.u32 {high}, {low}, {1 << shift};",
        f"selp.b32 {low}, {low}, {LEAST}, %_q;",
        f"selp.b32 {high}, {high}, {LEAST}, %_q;",
    ]


window = _formula(
    "window",
    "found",
    "9.7.8 shl: what is kept for certain begins at the first register, what may be at the second",
    lambda u, t: _window(
        pieces(t["found"])[0], u.arg.attr("bits"), pieces(t["dst"])[1], pieces(t["dst"])[0]
    ),
    "pred q",
)


def _windows(use: UOp, t: dict[str, str]) -> list[str]:
    """p's window, or k's where p keeps all; beside it k's, of width 0 where p keeps all."""
    high, low, outer, width = pieces(t["dst"])
    bits = use.arg.attr("bits")
    first, last, k = (pieces(t[name])[0] for name in ("first", "last", "found"))
    return [
        *_window(k, bits, outer, width),
        "mov.pred %_k, %_q;",
        *_window(first, bits, "%_a", high),
        *_window(last, bits, low, "%_b"),
        f"selp.b32 {high}, {high}, {width}, %_q;",
        f"selp.b32 {low}, {low}, {outer}, %_q;",
        "and.pred %_k, %_k, %_q;",
        f"selp.b32 {outer}, {outer}, {low}, %_k;",
        f"selp.b32 {width}, {1 << (KEY_BITS - bits)}, 0, %_k;",
    ]


windows = _formula(
    "windows",
    "found first last",
    "9.7.7 selp: p's window between the bins of its least and its greatest goal, then where k's "
    "begins and its width; k's alone where p keeps everything",
    _windows,
    "b32 a b, pred q k",
)
ties_of_count = _formula(
    "ties_of_count",
    "found",
    "9.7.1.1 add: ties that are kept, one more than what the goal left; MANY where k keeps all",
    lambda u, t: [
        f"setp.ne.u32 %_q, {pieces(t['found'])[0]}, 0;",
        f"add.u32 %_a, {pieces(t['found'])[1]}, 1;",
        f"selp.b32 {t['dst']}, %_a, {MANY}, %_q;",
    ],
    "b32 a, pred q",
)
ties_of_mass = _formula(
    "ties_of_mass",
    "found key",
    "9.7.1 div: ties that are kept, until their weights pass what the goal left; MANY for all",
    lambda u, t: [
        *weigh(t["key"], "%_a"),
        f"div.u32 %_b, {pieces(t['found'])[1]}, %_a;",
        f"min.u32 %_b, %_b, {MANY - 1};",
        "add.u32 %_b, %_b, 1;",
        f"setp.ne.u32 %_q, {pieces(t['found'])[0]}, 0;",
        f"selp.b32 {t['dst']}, %_b, {MANY}, %_q;",
    ],
    "b32 a b, pred q",
)
prefer = _formula(
    "prefer",
    "prefix inner outer",
    "9.7.7 selp: the inner threshold's, or the outer's where there is no inner one",
    lambda u, t: [
        f"setp.ne.u32 %_q, {t['prefix']}, {NOWHERE};",
        f"selp.b32 {t['dst']}, {t['inner']}, {t['outer']}, %_q;",
    ],
    "pred q",
)
