"""Atoms of both targets for matrices that a warp holds: ldmatrix and mma.sync, copies of rows into
shared memory, and what a softmax does to fragments.

Fragments are those of m16n8k16 (PTX ISA 9.7.14.5): lane l holds, of C, rows l/4 and l/4 + 8,
columns 2(l%4) and the next; of A and B, pairs along K in a register.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.streaming import _BASE, _arithmetic
from ptxflow.compiler.atoms.table import (
    GENERIC,
    READ_ONLY,
    Access,
    Atom,
    Lanes,
    Rule,
    Scope,
    define,
)
from ptxflow.compiler.atoms.threads import ALIKE, BINARY, OF_ONE, OF_TWO, each, pieces
from ptxflow.compiler.ir import UOp

MINUS_INFINITY = "0fFF800000"


def _load_matrix_text(use: UOp, text: dict[str, str]) -> str:
    transposed = ".trans" if use.arg.attr("transposed") else ""
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\n"
        f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{text['dst']}}}, [%ra];"
    )


ldmatrix_x4 = define(
    Atom(
        "ldmatrix_x4",
        (("dst", "frag"), ("src", "smem"), ("offset", "value")),
        Scope.WARP,
        Lanes.ALL,
        _load_matrix_text,
        "9.7.14.5.15 ldmatrix: four 8 x 8 matrices; lane 8j + r says where row r of matrix j is",
        accesses=(Access("src", "r", GENERIC), Access("dst", "w", GENERIC)),
        sass=lambda u: ("ldmatrix.trans" if u.arg.attr("transposed") else "ldmatrix",),
        defaults=(("transposed", False),),
        rules=(Rule("it loads four registers", lambda u: u.src[0].arg == 4),),
    )
)


def _mma_text(use: UOp, text: dict[str, str]) -> str:
    dtype, acc = use.arg.attr("dtype"), text["acc"]
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        f"{{{acc}}}, {{{text['a']}}}, {{{text['b']}}}, {{{acc}}};"
    )


mma_16816 = define(
    Atom(
        "mma_16816",
        (("acc", "frag"), ("a", "frag"), ("b", "frag")),
        Scope.WARP,
        Lanes.ALL,
        _mma_text,
        "9.7.14.5.14 mma.sync m16n8k16: adds A B to its accumulators",
        accesses=(
            Access("a", "r", GENERIC),
            Access("b", "r", GENERIC),
            Access("acc", "rw", GENERIC),
        ),
        sass=("mma.sync f16/bf16",),
        rules=(
            Rule("four accumulators", lambda u: u.src[0].arg == 4),
            Rule("four registers of A and two of B", lambda u: (
                u.src[1].arg == 4 and u.src[2].arg == 2)),
        ),
    )
)  # fmt: skip


copy_async = define(
    Atom(
        "copy_async",
        (
            ("dst", "smem"),
            ("offset", "value"),
            ("base", "value"),
            ("index", "value"),
            ("tile", "global"),
        ),
        Scope.THREAD,
        Lanes.ALL,
        "add.u32 %ra, {dst_reg}, {offset};\n"
        "mad.wide.u32 %rda, {index}, 16, {base};\n"
        "cp.async.cg.shared.global [%ra], [%rda], 16;",
        "9.7.9.25.3.1 cp.async: 16 bytes of each lane; index counts 16 bytes; complete with the "
        "lane's group, and for other lanes once they met",
        accesses=(Access("tile", "r", READ_ONLY), Access("dst", "w", GENERIC, "copies")),
        sass=("cp.async",),
        rules=(_BASE,),
    )
)
copies_commit = define(
    Atom(
        "copies_commit",
        (),
        Scope.THREAD,
        Lanes.ALL,
        "cp.async.commit_group;",
        "9.7.9.25.3.2 cp.async.commit_group",
        effect="commit",
        defaults=(("pipe", "copies"),),
        orders=True,
    )
)
copies_wait = define(
    Atom(
        "copies_wait",
        (),
        Scope.THREAD,
        Lanes.ALL,
        "cp.async.wait_group {pending};",
        "9.7.9.25.3.3 cp.async.wait_group: the lane's own copies have landed",
        effect="wait_copies",
        orders=True,
    )
)
shuffle_from = define(
    Atom(
        "shuffle_from",
        (("dst", "frag"), ("src", "frag"), ("lane", "value")),
        Scope.WARP,
        Lanes.ALL,
        "shfl.sync.idx.b32 {dst}, {src}, {lane}, 31, 0xFFFFFFFF;",
        "9.7.9.6 shfl.sync.idx: the register of a lane that each lane names",
        accesses=OF_ONE,
        rules=(Rule("one register", lambda u: u.src[0].arg == u.src[1].arg == 1),),
    )
)
count_lanes = define(
    Atom(
        "count_lanes",
        (("dst", "frag"), ("inside", "value")),
        Scope.WARP,
        Lanes.ALL,
        "vote.sync.ballot.b32 %ra, {inside}, 0xFFFFFFFF;\n"
        "popc.b32 %ra, %ra;\n"
        "add.u32 {dst}, {dst}, %ra;",
        "9.7.13.10 vote.sync, 9.7.1 popc: adds the number of lanes for which a condition holds",
        accesses=(Access("dst", "rw", GENERIC),),
        defaults=(("alike", True),),
        rules=(Rule("one register", lambda u: u.src[0].arg == 1),),
    )
)
copy = define(
    Atom(
        "copy",
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        each("mov.b32 {dst}, {src};"),
        "9.7.9.3 mov",
        accesses=OF_ONE,
        rules=(ALIKE,),
    )
)
max_f32 = define(_arithmetic("max_f32", "dst a b", "max.f32 {dst}, {a}, {b};", "9.7.3 max"))
log2_f32 = define(
    _arithmetic(
        "log2_f32",
        "dst src",
        "lg2.approx.ftz.f32 {dst}, {src};",
        "9.7.3 lg2.approx: absolute error 2^-22 near 1, relative elsewhere; log of zero is -inf",
    )
)


def _fold(name: str, operation: str, isa: str) -> Atom:
    """All registers of src into each of dst in turn: the first ones begin it."""

    def write(use: UOp, text: dict[str, str]) -> str:
        results, sources = pieces(text["dst"]), pieces(text["src"])
        lines = []
        for i, d in enumerate(results):
            mine = sources[i :: len(results)]
            lines.append(f"mov.b32 {d}, {mine[0]};")
            lines += [f"{operation} {d}, {d}, {s};" for s in mine[1:]]
        return "\n".join(lines)

    return Atom(
        name,
        (("dst", "frag"), ("src", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        write,
        isa,
        accesses=OF_ONE,
        rules=(Rule("each result gets as many", lambda u: u.src[1].arg % u.src[0].arg == 0),),
    )


fold_max = define(_fold("fold_max", "max.f32", "9.7.3 max: of registers i, i + n, ... into i of n"))
fold_sum = define(_fold("fold_sum", "add.f32", "9.7.3 add: of registers i, i + n, ... into i of n"))
hide = define(
    Atom(
        "hide",
        (("dst", "frag"), ("inside", "value")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"selp.f32 {d}, {d}, {MINUS_INFINITY}, {t['inside']};" for d in pieces(t["dst"])
        ),
        "9.7.7 selp: minus infinity where a condition does not hold",
        accesses=(Access("dst", "rw", GENERIC),),
    )
)


def _shift_text(use: UOp, text: dict[str, str]) -> str:
    shifts = pieces(text["shift"])
    return "\n".join(
        f"fma.rn.f32 {d}, {x}, {text['scale']}, {shifts[i % len(shifts)]};\n"
        f"ex2.approx.ftz.f32 {d}, {d};"
        for i, (d, x) in enumerate(zip(pieces(text["dst"]), pieces(text["src"]), strict=True))
    )


shift_exp2 = define(
    Atom(
        "shift_exp2",
        (("dst", "frag"), ("src", "frag"), ("scale", "frag"), ("shift", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        _shift_text,
        "9.7.3 fma, ex2.approx: 2^(x scale + shift); shifts in turn; relative error 2^-22.5",
        accesses=(
            Access("src", "r", GENERIC),
            Access("scale", "r", GENERIC),
            Access("shift", "r", GENERIC),
            Access("dst", "w", GENERIC),
        ),
        sass=("ex2.approx",),
        rules=(
            Rule("as many registers of both", lambda u: u.src[0].arg == u.src[1].arg),
            Rule("one factor", lambda u: u.src[2].arg == 1),
            Rule("shifts in turn", lambda u: u.src[0].arg % u.src[3].arg == 0),
        ),
    )
)
rescale = define(
    Atom(
        "rescale",
        (("dst", "frag"), ("factor", "frag")),
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"mul.rn.f32 {d}, {d}, {pieces(t['factor'])[i % len(pieces(t['factor']))]};"
            for i, d in enumerate(pieces(t["dst"]))
        ),
        "9.7.3.5 mul: accumulators by factors, in turn",
        accesses=(Access("factor", "r", GENERIC), Access("dst", "rw", GENERIC)),
        rules=(Rule("factors in turn", lambda u: u.src[0].arg % u.src[1].arg == 0),),
    )
)
finite_or_zero = define(
    Atom(
        "finite_or_zero",
        BINARY,
        Scope.THREAD,
        Lanes.ALL,
        lambda use, t: "\n".join(
            f"setp.eq.f32 %pw, {b}, {MINUS_INFINITY};\nselp.f32 {d}, 0f00000000, {a}, %pw;"
            for d, a, b in zip(*(pieces(t[n]) for n in ("dst", "a", "b")), strict=True)
        ),
        "9.7.6 setp, selp: a, or zero where b is minus infinity",
        accesses=OF_TWO,
        rules=(ALIKE,),
    )
)
