"""Atoms of both targets for the ends of filters: goals, prefixes, windows and ties, the same in
every lane.

What was *found* is four registers: a digit and 1 (0: nothing, the filter keeps all), what is left
of the goal there, the sum of all bins, and 0.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms.reductions import KEY_BITS, LEAST, WEIGHT_SCALE, scoped, weigh
from ptxflow.compiler.atoms.table import GENERIC, Access, Lanes, Scope, define
from ptxflow.compiler.atoms.threads import pieces
from ptxflow.compiler.ir import UOp

MANY = 0x7FFFFFFF  # a count that no row reaches
EVERYTHING = 0xFFFFFFFF  # a weight that no row exceeds
NOWHERE = 0xFFFFFFFF  # the prefix of a threshold that there is not
WHOLE = 1 << 31  # the weight of probability 1
FLOOR = LEAST - 1  # a threshold below all that weighs something


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


is_active = _formula(
    "is_active",
    "k",
    "9.7.6 setp: 1 where k filters, 0 < k < size, else 0",
    lambda u, t: [
        f"add.u32 %_a, {t['k']}, -1;",
        f"setp.lt.u32 %_q, %_a, {u.arg.attr('size') - 1};",
        f"selp.b32 {t['dst']}, 1, 0, %_q;",
    ],
    "b32 a, pred q",
)
choose = _formula(
    "choose",
    "flag a b",
    "9.7.7 selp: the first where the flag is not 0, else the second",
    lambda u, t: [
        f"setp.ne.u32 %_q, {t['flag']}, 0;",
        *(
            f"selp.b32 {d}, {a}, {b}, %_q;"
            for d, a, b in zip(pieces(t["dst"]), pieces(t["a"]), pieces(t["b"]), strict=True)
        ),
    ],
    "pred q",
)
whole_kept = _formula(
    "whole_kept",
    "total key ties",
    "9.7.1 mad: the mass above a threshold, and that of its ties",
    lambda u, t: [
        *weigh(t["key"], "%_a"),
        f"mad.lo.u32 {t['dst']}, %_a, {t['ties']}, {t['total']};",
    ],
    "b32 a",
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
    "9.7.7 selp: the element of a whole key; FLOOR where there is none",
    lambda u, t: [
        f"add.u32 %_a, {t['prefix']}, {LEAST};",
        f"setp.ne.u32 %_q, {t['prefix']}, {NOWHERE};",
        f"selp.b32 {t['dst']}, %_a, {FLOOR}, %_q;",
    ],
    "b32 a, pred q",
)


def _window(use: UOp, t: dict[str, str]) -> list[str]:
    """The elements of the bin that was found; LEAST twice where none was."""
    shift, found = KEY_BITS - use.arg.attr("bits"), pieces(t["found"])[0]
    high, low = pieces(t["dst"])
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
    _window,
    "pred q",
)
window_of_both = _formula(
    "window_of_both",
    "found active",
    "9.7.7 selp: as window; where k is active nothing is kept for certain",
    lambda u, t: [
        *_window(u, t),
        f"setp.ne.u32 %_q, {t['active']}, 0;",
        f"selp.b32 {pieces(t['dst'])[0]}, {EVERYTHING}, {pieces(t['dst'])[0]}, %_q;",
    ],
    "pred q",
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


def _until(key: str, goal: str) -> list[str]:
    """%_b: as many elements equal to a key as bring their weights above a goal."""
    return [
        *weigh(key, "%_a"),
        "max.u32 %_a, %_a, 1;",
        f"div.u32 %_b, {goal}, %_a;",
        f"min.u32 %_b, %_b, {MANY - 1};",
        "add.u32 %_b, %_b, 1;",
    ]


ties_of_mass = _formula(
    "ties_of_mass",
    "found key",
    "9.7.1 div: ties that are kept, until their weights pass what the goal left; MANY for all",
    lambda u, t: [
        *_until(t["key"], pieces(t["found"])[1]),
        f"setp.ne.u32 %_q, {pieces(t['found'])[0]}, 0;",
        f"selp.b32 {t['dst']}, %_b, {MANY}, %_q;",
    ],
    "b32 a b, pred q",
)
ties_of_rest = _formula(
    "ties_of_rest",
    "ties total key goal",
    "9.7.1 div, min: of the ties at a threshold as many as bring what is above it above the goal",
    lambda u, t: [
        f"sub.u32 %_b, {t['goal']}, {t['total']};",
        *_until(t["key"], "%_b"),
        f"min.u32 {t['dst']}, %_b, {t['ties']};",
    ],
    "b32 a b",
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
