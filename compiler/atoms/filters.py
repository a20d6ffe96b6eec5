"""Atoms of both targets for the ends of filters: goals, prefixes, windows and ties, the same in
every lane.

What was *found* is four registers: a digit and 1 (0: nothing, the filter keeps all), what is left
of the goal there, the sum of all bins, and 0.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.reductions import KEY_BITS, LEAST, WEIGHT_SCALE, weigh
from ptxflow.compiler.atoms.table import instruction
from ptxflow.compiler.atoms.threads import Text, written

MANY = 0x7FFFFFFF  # a count that no row reaches
EVERYTHING = 0xFFFFFFFF  # a weight that no row exceeds
NOWHERE = 0xFFFFFFFF  # the prefix of a threshold that there is not
WHOLE = 1 << 31  # the weight of probability 1
FLOOR = LEAST - 1  # a threshold below all that weighs something
_FOUND = "setp.ne.u32 %_q, {found[0]}, 0;"

instruction(
    "goal_of_k(dst: frag w, k: frag r)",
    written("b32 a", "add.u32 %_a, {k}, -1;", f"min.u32 {{dst}}, %_a, {MANY};"),
    "9.7.1 add, min: k - 1, or MANY where k keeps everything",
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
        f"selp.b32 {{dst}}, {EVERYTHING}, %_a, %_q;",
    ),
    "9.7.9.22 cvt, 9.7.1 mul: floor(p total), p in steps of 2^-31; 0 for p <= 0, EVERYTHING from 1",
)
instruction(
    "is_active(dst: frag w, k: frag r)",
    written(
        "b32 a, pred q",
        "add.u32 %_a, {k}, -1;",
        "setp.lt.u32 %_q, %_a, {most};",
        "selp.b32 {dst}, 1, 0, %_q;",
    ),
    "9.7.6 setp: 1 where k filters, from 1 to `most`, else 0",
)
instruction(
    "choose(dst: frag*n w, flag: frag r, a b: frag*n r)",
    lambda use, t: written(
        "pred q",
        "setp.ne.u32 %_q, {flag}, 0;",
        *(f"selp.b32 {{dst[{i}]}}, {{a[{i}]}}, {{b[{i}]}}, %_q;" for i in range(use.src[0].arg)),
    )(use, t),
    "9.7.7 selp: the first where the flag is not 0, else the second",
)
instruction(
    "whole_kept(dst: frag w, total key ties: frag r)",
    written("b32 a", *weigh("{key}", "%_a"), "mad.lo.u32 {dst}, %_a, {ties}, {total};"),
    "9.7.1 mad: the mass above a threshold, and that of its ties",
)
instruction(
    "narrow(dst: frag w, prefix found: frag r)",
    written(
        "b32 a b",
        "sub.u32 %_a, {found[0]}, 1;",
        "shl.b32 %_b, {prefix}, {bits};",
        "or.b32 {dst}, %_b, %_a;",
    ),
    "9.7.8 shl, or: the prefix with the digit that was found, NOWHERE where none was",
)
instruction(
    "key_of(dst: frag w, prefix: frag r)",
    written(
        "b32 a, pred q",
        f"add.u32 %_a, {{prefix}}, {LEAST};",
        f"setp.ne.u32 %_q, {{prefix}}, {NOWHERE};",
        f"selp.b32 {{dst}}, %_a, {FLOOR}, %_q;",
    ),
    "9.7.7 selp: the element of a whole key; FLOOR where there is none",
)


def _window(*more: str) -> Text:
    """The elements of the bin that was found; LEAST twice where none was. dst: high, low."""
    return lambda use, t: written(
        "pred q",
        _FOUND,
        "sub.u32 {dst[1]}, {found[0]}, 1;",
        f"shl.b32 {{dst[1]}}, {{dst[1]}}, {KEY_BITS - use.arg.attr('bits')};",
        f"add.u32 {{dst[1]}}, {{dst[1]}}, {LEAST};",
        f"add.u32 {{dst[0]}}, {{dst[1]}}, {1 << KEY_BITS - use.arg.attr('bits')};",
        f"selp.b32 {{dst[1]}}, {{dst[1]}}, {LEAST}, %_q;",
        f"selp.b32 {{dst[0]}}, {{dst[0]}}, {LEAST}, %_q;",
        *more,
    )(use, t)


instruction(
    "window(dst: frag w, found: frag r)",
    _window(),
    "9.7.8 shl: what is kept for certain begins at the first register, what may be at the second",
)
instruction(
    "window_of_both(dst: frag w, found active: frag r)",
    _window(
        "setp.ne.u32 %_q, {active}, 0;", f"selp.b32 {{dst[0]}}, {EVERYTHING}, {{dst[0]}}, %_q;"
    ),
    "9.7.7 selp: as window; where k is active nothing is kept for certain",
)
instruction(
    "ties_of_count(dst: frag w, found: frag r)",
    written(
        "b32 a, pred q",
        _FOUND,
        "add.u32 %_a, {found[1]}, 1;",
        f"selp.b32 {{dst}}, %_a, {MANY}, %_q;",
    ),
    "9.7.1.1 add: ties that are kept, one more than what the goal left; MANY where k keeps all",
)


def _until(goal: str) -> list[str]:
    """%_b: as many elements equal to a key as bring their weights above a goal."""
    return [
        *weigh("{key}", "%_a"),
        "max.u32 %_a, %_a, 1;",
        f"div.u32 %_b, {goal}, %_a;",
        f"min.u32 %_b, %_b, {MANY - 1};",
        "add.u32 %_b, %_b, 1;",
    ]


instruction(
    "ties_of_mass(dst: frag w, found key: frag r)",
    written(
        "b32 a b, pred q", *_until("{found[1]}"), _FOUND, f"selp.b32 {{dst}}, %_b, {MANY}, %_q;"
    ),
    "9.7.1 div: ties that are kept, until their weights pass what the goal left; MANY for all",
)
instruction(
    "ties_of_rest(dst: frag w, ties total key goal: frag r)",
    written(
        "b32 a b", "sub.u32 %_b, {goal}, {total};", *_until("%_b"), "min.u32 {dst}, %_b, {ties};"
    ),
    "9.7.1 div, min: of the ties at a threshold as many as bring what is above it above the goal",
)
instruction(
    "prefer(dst: frag w, prefix inner outer: frag r)",
    written(
        "pred q",
        f"setp.ne.u32 %_q, {{prefix}}, {NOWHERE};",
        "selp.b32 {dst}, {inner}, {outer}, %_q;",
    ),
    "9.7.7 selp: the inner threshold's, or the outer's where there is no inner one",
)
