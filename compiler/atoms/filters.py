"""Atoms of both targets for the ends of filters: goals, floors and ties, the same in every lane."""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms.reductions import WEIGHT_SCALE, scoped, weigh
from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, Lanes, Scope, define
from ptxflow.compiler.ir import UOp

MANY = 0x7FFFFFFF  # a count that no row reaches
EVERYTHING = 0xFFFFFFFF  # a weight that no row exceeds


def _formula(
    name: str, operands: str, isa: str, lines: Callable[[dict[str, str]], list[str]], temps: str
) -> Callable[..., UOp]:
    """An atom that computes dst from single registers, the same in every lane."""
    sources = operands.split()

    def text(use: UOp, t: dict[str, str]) -> str:
        return scoped(temps, lines(t))

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
    lambda t: [f"add.u32 %_a, {t['k']}, -1;", f"min.u32 {t['dst']}, %_a, {MANY};"],
    "b32 a",
)
goal_of_p = _formula(
    "goal_of_p",
    "p total",
    "9.7.9.22 cvt, 9.7.1 mul: floor(p total), p in steps of 2^-31; 0 for p <= 0, EVERYTHING from 1",
    lambda t: [
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
floor_above = _formula(
    "floor_above",
    "key",
    "9.7.1.1 add: the next key",
    lambda t: [f"add.u32 {t['dst']}, {t['key']}, 1;"],
    "b32 a",
)
floor_of_digit = define(
    Atom(
        "floor_of_digit",
        (("dst", "frag"), ("digit", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        "shl.b32 {dst}, {digit}, {shift};",
        "9.7.8 shl: the least key with that first digit",
        accesses=(Access("digit", "r", GENERIC), Access("dst", "w", GENERIC)),
    )
)
whole_or = define(
    Atom(
        "whole_or",
        (("dst", "frag"), ("total", "frag"), ("k", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: scoped(
            "b32 a, pred q",
            [
                f"add.u32 %_a, {t['k']}, -1;",
                f"setp.lt.u32 %_q, %_a, {use.arg.attr('size') - 1};",
                f"selp.b32 {t['dst']}, {t['total']}, {1 << 31}, %_q;",
            ],
        ),
        "9.7.7 selp: what 1 means for p: the kept total where k filters (0 < k < size), else 2^31",
        accesses=(
            Access("total", "r", GENERIC),
            Access("k", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
    )
)
ties_of_count = _formula(
    "ties_of_count",
    "rest",
    "9.7.1.1 add: ties that are kept, one more than what the goal left",
    lambda t: [f"add.u32 {t['dst']}, {t['rest']}, 1;"],
    "b32 a",
)


ties_of_mass = _formula(
    "ties_of_mass",
    "rest key",
    "9.7.1 div: ties that are kept, until their weights pass what the goal left",
    lambda t: [
        *weigh(t["key"], "%_a"),
        "max.u32 %_b, %_a, 1;",
        f"div.u32 %_b, {t['rest']}, %_b;",
        f"min.u32 %_b, %_b, {MANY - 1};",
        "add.u32 %_b, %_b, 1;",
        "setp.ne.u32 %_q, %_a, 0;",
        f"selp.b32 {t['dst']}, %_b, {MANY}, %_q;",
    ],
    "b32 a b, pred q",
)
tie_weight = _formula(
    "tie_weight",
    "key ties",
    "9.7.1 mul: the weight of so many ties; MANY of them weigh nothing",
    lambda t: [*weigh(t["key"], "%_a"), f"mul.lo.u32 {t['dst']}, %_a, {t['ties']};"],
    "b32 a",
)
join_ties = _formula(
    "join_ties",
    "key ties outer_key outer_ties",
    "9.7.7 selp: the ties of the higher threshold; the fewer where both are the same",
    lambda t: [
        f"min.u32 %_a, {t['ties']}, {t['outer_ties']};",
        f"setp.gt.u32 %_q, {t['key']}, {t['outer_key']};",
        f"selp.b32 %_a, {t['ties']}, %_a, %_q;",
        f"setp.lt.u32 %_q, {t['key']}, {t['outer_key']};",
        f"selp.b32 {t['dst']}, {t['outer_ties']}, %_a, %_q;",
    ],
    "b32 a, pred q",
)
join_keys = _formula(
    "join_keys",
    "key outer_key",
    "9.7.1.12 max: the higher threshold",
    lambda t: [f"max.u32 {t['dst']}, {t['key']}, {t['outer_key']};"],
    "b32 a",
)
