"""Atoms of both targets for matrices that a warp holds: ldmatrix and mma.sync, and what lanes tell
each other.

Fragments are those of m16n8k16 (PTX ISA 9.7.14.5): lane l holds, of C, rows l/4 and l/4 + 8,
columns 2(l%4) and the next; of A and B, pairs along K in a register.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import Lanes, Rule, Scope, accesses, define, signature
from ptxflow.compiler.atoms.threads import OF_ONE
from ptxflow.compiler.ir import UOp


def _load_matrix_text(use: UOp, text: dict[str, str]) -> str:
    transposed = ".trans" if use.arg.attr("transposed") else ""
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\n"
        f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{text['dst']}}}, [%ra];"
    )


define(
    "ldmatrix_x4",
    signature("dst: frag, src: smem, offset: value"),
    Scope.WARP,
    Lanes.ALL,
    _load_matrix_text,
    "9.7.14.5.15 ldmatrix: four 8 x 8 matrices; lane 8j + r says where row r of matrix j is",
    accesses=accesses(r="src", w="dst"),
    sass=lambda u: ("ldmatrix.trans" if u.arg.attr("transposed") else "ldmatrix",),
    defaults=(("transposed", False),),
    rules=(Rule("it loads four registers", lambda u: u.src[0].arg == 4),),
)


def _mma_text(use: UOp, text: dict[str, str]) -> str:
    dtype, acc = use.arg.attr("dtype"), text["acc"]
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        f"{{{acc}}}, {{{text['a']}}}, {{{text['b']}}}, {{{acc}}};"
    )


define(
    "mma_16816",
    signature("acc a b: frag"),
    Scope.WARP,
    Lanes.ALL,
    _mma_text,
    "9.7.14.5.14 mma.sync m16n8k16: adds A B to its accumulators",
    accesses=accesses(r="a b", rw="acc"),
    sass=("mma.sync f16/bf16",),
    rules=(
        Rule("four accumulators", lambda u: u.src[0].arg == 4),
        Rule("four registers of A and two of B", lambda u: u.src[1].arg == 4 and u.src[2].arg == 2),
    ),
)


define(
    "shuffle_from",
    signature("dst src: frag, lane: value"),
    Scope.WARP,
    Lanes.ALL,
    "shfl.sync.idx.b32 {dst}, {src}, {lane}, 31, 0xFFFFFFFF;",
    "9.7.9.6 shfl.sync.idx: the register of a lane that each lane names",
    accesses=OF_ONE,
    rules=(Rule("one register", lambda u: u.src[0].arg == u.src[1].arg == 1),),
)
define(
    "count_lanes",
    signature("dst: frag, inside: value"),
    Scope.WARP,
    Lanes.ALL,
    "vote.sync.ballot.b32 %ra, {inside}, 0xFFFFFFFF;\n"
    "popc.b32 %ra, %ra;\n"
    "add.u32 {dst}, {dst}, %ra;",
    "9.7.13.10 vote.sync, 9.7.1 popc: adds the number of lanes for which a condition holds",
    accesses=accesses(rw="dst"),
    defaults=(("alike", True),),
    rules=(Rule("one register", lambda u: u.src[0].arg == 1),),
)
