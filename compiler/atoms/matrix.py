"""Atoms of both targets for matrices that a warp holds: ldmatrix and mma.sync, and fragments that
lanes and warps hand to each other.

Fragments are those of m16n8k16 (PTX ISA 9.7.14.5): lane l holds, of C, rows l/4 and l/4 + 8,
columns 2(l%4) and the next; of A and B, pairs along K in a register. In shared memory every lane
stores or loads one, two or four registers at a place of its own.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.reductions import ALL_LANES, scan_lanes
from ptxflow.compiler.atoms.table import instruction
from ptxflow.compiler.atoms.threads import pieces, scoped, written
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
    "shuffle_from(dst: frag*1 w, src: frag*1 r, index: value) warp",
    "shfl.sync.idx.b32 {dst}, {src}, {index}, 31, 0xFFFFFFFF;",
    "9.7.9.6 shfl.sync.idx: the register of a lane that each lane names",
)
instruction(
    "keep_bits(dst: frag*n w, src: frag*n r, set: frag*1 r)",
    lambda use, t: "\n".join(
        f"and.b32 %ra, {t['set']}, {1 << i};\nsetp.ne.u32 %pw, %ra, 0;\nselp.b32 {d}, {s}, 0, %pw;"
        for i, (d, s) in enumerate(zip(pieces(t["dst"]), pieces(t["src"]), strict=True))
    ),
    "9.7.7 selp: zeros in registers whose bit is not in a set",
)
instruction(
    "ballot(dst: frag*1 w, inside: value) warp",
    "vote.sync.ballot.b32 {dst}, {inside}, 0xFFFFFFFF;",
    "9.7.13.10 vote.sync: the set of lanes for which a condition holds",
    defaults=(("alike", True),),
)
instruction(
    "scan_lanes(dst: frag*1 w, src: frag*1 r) warp",
    written("b32 up, pred p", "mov.b32 {dst}, {src};", *scan_lanes("{dst}", "%_up", "%_p")),
    "9.7.9.6 shfl.sync.up: the sum of the lane's integer and those of the lanes before",
)


def _best_text(use: UOp, text: dict[str, str]) -> str:
    keys, chosen = pieces(text["keys"]), text["chosen"]
    lines = [f"mov.b32 {chosen}, 0;"]
    for _ in range(use.arg.attr("count")):
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
    "9.7.13.11 redux.sync: the `count` largest keys of the warp, as bits of each lane's keys, "
    "which it empties",
    sass=("redux.sync",),
    defaults=(("unread", "keys"),),
)


instruction(
    "transpose_bits(dst: frag*1 w, src: frag*1 r) warp",
    written(
        "b32 bit, pred p",
        "mov.b32 {dst}, 0;",
        *(
            f"and.b32 %_bit, {{src}}, {1 << bit};\n"
            "setp.ne.u32 %_p, %_bit, 0;\n"
            f"vote.sync.ballot.b32 %_bit, %_p, {ALL_LANES};\n"
            f"setp.eq.u32 %_p, %lane, {bit};\n"
            "@%_p mov.b32 {dst}, %_bit;"
            for bit in range(32)
        ),
    ),
    "9.7.13.10 vote.sync: bit j of lane i becomes bit i of lane j",
)
instruction(
    "count_lanes(dst: frag*1 rw, inside: value) warp",
    "vote.sync.ballot.b32 %ra, {inside}, 0xFFFFFFFF;\n"
    "popc.b32 %ra, %ra;\n"
    "add.u32 {dst}, {dst}, %ra;",
    "9.7.13.10 vote.sync, 9.7.1 popc: adds the number of lanes for which a condition holds",
    defaults=(("alike", True),),
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
    "ld_shared_lanes(dst: frag*1|2|4 w, src: smem r, offset: value)",
    written("", "add.u32 %ra, {src_reg}, {offset};", "ld.shared.{dst.kind} {dst.vector}, [%ra];"),
    "9.7.9.8 ld of one, two or four registers",
)
