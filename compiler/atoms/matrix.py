"""Atoms of both targets for matrices that a warp holds: ldmatrix and mma.sync, and what lanes tell
each other.

Fragments are those of m16n8k16 (PTX ISA 9.7.14.5): lane l holds, of C, rows l/4 and l/4 + 8,
columns 2(l%4) and the next; of A and B, pairs along K in a register.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.ir import UOp


def _load_matrix_text(use: UOp, text: dict[str, str]) -> str:
    transposed = ".trans" if use.arg.attr("transposed") else ""
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\n"
        f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{text['dst']}}}, [%ra];"
    )


instruction(
    "ldmatrix_x4(dst: frag w, src: smem r, offset: value) warp",
    _load_matrix_text,
    "9.7.14.5.15 ldmatrix: four 8 x 8 matrices; lane 8j + r says where row r of matrix j is",
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


instruction(
    "mma_16816(acc: frag rw, a b: frag r) warp",
    _mma_text,
    "9.7.14.5.14 mma.sync m16n8k16: adds A B to its accumulators",
    sass=("mma.sync f16/bf16",),
    rules=(
        Rule("four accumulators", lambda u: u.src[0].arg == 4),
        Rule("four registers of A and two of B", lambda u: u.src[1].arg == 4 and u.src[2].arg == 2),
    ),
)


instruction(
    "shuffle_from(dst: frag w, src: frag r, lane: value) warp",
    "shfl.sync.idx.b32 {dst}, {src}, {lane}, 31, 0xFFFFFFFF;",
    "9.7.9.6 shfl.sync.idx: the register of a lane that each lane names",
    rules=(Rule("one register", lambda u: u.src[0].arg == u.src[1].arg == 1),),
)
instruction(
    "count_lanes(dst: frag rw, inside: value) warp",
    "vote.sync.ballot.b32 %ra, {inside}, 0xFFFFFFFF;\n"
    "popc.b32 %ra, %ra;\n"
    "add.u32 {dst}, {dst}, %ra;",
    "9.7.13.10 vote.sync, 9.7.1 popc: adds the number of lanes for which a condition holds",
    defaults=(("alike", True),),
    rules=(Rule("one register", lambda u: u.src[0].arg == 1),),
)
