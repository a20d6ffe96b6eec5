"""Atoms of both targets for matrices that a warp holds: ldmatrix and mma.sync, and fragments that
lanes and warps hand to each other.

Fragments are those of m16n8k16 (PTX ISA 9.7.14.5): lane l holds, of C, rows l/4 and l/4 + 8,
columns 2(l%4) and the next; of A and B, pairs along K in a register. In shared memory every lane
stores or loads one, two or four registers at a place of its own.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import instruction
from ptxflow.compiler.atoms.threads import vector, written
from ptxflow.compiler.ir import UOp


def _load_matrix_text(use: UOp, text: dict[str, str]) -> str:
    transposed = ".trans" if use.arg.attr("transposed") else ""
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\n"
        f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{text['dst']}}}, [%ra];"
    )


instruction(
    "ldmatrix_x4(dst: frag*4 w, src: smem r, offset: value) warp",
    _load_matrix_text,
    "9.7.14.5.15 ldmatrix: four 8 x 8 matrices; lane 8j + r says where row r of matrix j is",
    sass=lambda u: ("ldmatrix.trans" if u.arg.attr("transposed") else "ldmatrix",),
    defaults=(("transposed", False),),
)
instruction(
    "mma_16816(acc: frag*4 rw, a: frag*4 r, b: frag*2 r) warp",
    written(
        "",
        "mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{{acc}}}, {{{a}}}, {{{b}}}, "
        "{{{acc}}};",
    ),
    "9.7.14.5.14 mma.sync m16n8k16: adds A B to its accumulators",
    sass=("mma.sync f16/bf16",),
)


instruction(
    "shuffle_from(dst: frag*1 w, src: frag*1 r, lane: value) warp",
    "shfl.sync.idx.b32 {dst}, {src}, {lane}, 31, 0xFFFFFFFF;",
    "9.7.9.6 shfl.sync.idx: the register of a lane that each lane names",
)
instruction(
    "count_lanes(dst: frag*1 rw, inside: value) warp",
    "vote.sync.ballot.b32 %ra, {inside}, 0xFFFFFFFF;\n"
    "popc.b32 %ra, %ra;\n"
    "add.u32 {dst}, {dst}, %ra;",
    "9.7.13.10 vote.sync, 9.7.1 popc: adds the number of lanes for which a condition holds",
    defaults=(("alike", True),),
)


def _store_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["src"])
    guard = "" if text["inside"] == "1" else f"@{text['inside']} "
    return (
        f"add.u32 %ra, {text['dst_reg']}, {text['offset']};\n"
        f"{guard}st.shared.{kind} [%ra], {registers};"
    )


instruction(
    "st_shared_lanes(dst: smem w, offset inside: value, src: frag*1|2|4 r)",
    _store_text,
    "9.7.9.11 st of one, two or four registers, by the lanes for which a condition holds",
)


def _load_text(use: UOp, text: dict[str, str]) -> str:
    kind, registers = vector(text["dst"])
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\nld.shared.{kind} {registers}, [%ra];"
    )


instruction(
    "ld_shared_lanes(dst: frag*1|2|4 w, src: smem r, offset: value)",
    _load_text,
    "9.7.9.8 ld of one, two or four registers",
)
