"""Atoms of both targets for matrices that a warp holds: ldmatrix and mma.sync, and fragments that
lanes and warps hand to each other.

Fragments are those of m16n8k16 (PTX ISA 9.7.14.5): lane l holds, of C, rows l/4 and l/4 + 8,
columns 2(l%4) and the next; of A and B, pairs along K in a register. In shared memory every lane
stores or loads one, two or four registers at a place of its own.
"""

from ptxflow.compiler.atoms.table import instruction
from ptxflow.compiler.atoms.threads import written
from ptxflow.compiler.ir import Statement


def _load_matrix_text(use: Statement, text: dict[str, str]) -> str:
    transposed = ".trans" if use.arg.attr("transposed") else ""
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\n"
        f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{text['dst']}}}, [%ra];"
    )


instruction(
    "ldmatrix_x4(dst: frag*4 w, src: smem r, offset: value, transposed: bool=False) warp",
    _load_matrix_text,
    "9.7.14.5.15 ldmatrix: four 8 x 8 matrices; lane 8j + r says where row r of matrix j is",
    sass=lambda u: ("ldmatrix.trans" if u.arg.attr("transposed") else "ldmatrix",),
)
instruction(
    "mma_16816(acc: frag*4 rw, a: frag*4 r, b: frag*2 r, dtype: str) warp",
    written(
        "",
        "mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 {{{acc}}}, {{{a}}}, {{{b}}}, "
        "{{{acc}}};",
    ),
    "9.7.14.5.14 mma.sync m16n8k16: adds A B to its accumulators",
    sass=("mma.sync f16/bf16",),
)


instruction(
    "shuffle_from(dst: frag*1 w, src: frag*1 r, index: value) warp",
    "shfl.sync.idx.b32 {dst}, {src}, {index}, 31, 0xFFFFFFFF;",
    "9.7.9.6 shfl.sync.idx: the register of a lane that each lane names",
    among=("src",),
)
instruction(
    "ballot(dst: frag*1 w, inside: value, alike: bool=True) warp",
    "vote.sync.ballot.b32 {dst}, {inside}, 0xFFFFFFFF;",
    "9.7.13.10 vote.sync: the set of lanes for which a condition holds",
)
instruction(
    "scan_lanes(dst: frag*1 w, src: frag*1 r, dtype: str='u32') warp",
    written(
        "",
        "mov.b32 {dst}, {src};",
        *(
            f"shfl.sync.up.b32 %ra|%pw, {{dst}}, {1 << i}, 0, 0xFFFFFFFF;\n"
            "@%pw add.{dtype} {dst}, {dst}, %ra;"
            for i in range(5)
        ),
    ),
    "9.7.9.6 shfl.sync.up: the sum of the lane's number and those of the lanes before",
)


instruction(
    "reduce_lanes(dst: frag*1 w, src: frag*1 r, operation: str, alike: bool=True) warp",
    "redux.sync.{operation}.u32 {dst}, {src}, 0xFFFFFFFF;",
    "9.7.13.11 redux.sync: the sum or the largest of the integers of all lanes",
    sass=("redux.sync",),
)
instruction(
    "first_lane(dst: frag*1 w, inside: value, alike: bool=True) warp",
    "vote.sync.ballot.b32 {dst}, {inside}, 0xFFFFFFFF;\n"
    "brev.b32 {dst}, {dst};\n"
    "clz.b32 {dst}, {dst};",
    "9.7.13.10 vote.sync, 9.7.1 brev, clz: the first lane for which a condition holds, or 32",
)
instruction(
    "count_lanes(dst: frag*1 rw, inside: value, alike: bool=True) warp",
    "vote.sync.ballot.b32 %ra, {inside}, 0xFFFFFFFF;\n"
    "popc.b32 %ra, %ra;\n"
    "add.u32 {dst}, {dst}, %ra;",
    "9.7.13.10 vote.sync, 9.7.1 popc: adds the number of lanes for which a condition holds",
)


instruction(
    "st_shared_lanes(dst: smem w, offset inside: value, src: frag*1|2|4 r)",
    written(
        "",
        "add.u32 %ra, {dst_reg}, {offset};",
        "{inside.guard}st.shared.{src.kind} [%ra], {src.vector};",
    ),
    "9.7.9.11 st of one, two or four registers, by the lanes for which a condition holds",
)


instruction(
    "ld_shared(dst: frag*1|2|4 w, src: smem r, offset: value)",
    written("", "add.u32 %ra, {src_reg}, {offset};", "ld.shared.{dst.kind} {dst.vector}, [%ra];"),
    "9.7.9.8 ld of one, two or four registers",
)
