"""Atoms of both targets for rows that a list names, and some entries of which name none."""

from __future__ import annotations

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
from ptxflow.compiler.atoms.threads import PREFETCHES
from ptxflow.compiler.ir import Op, UOp


def _copy_text(use: UOp, text: dict[str, str]) -> str:
    ahead = use.arg.attr("prefetch")
    hint = f".L2::{ahead}B" if ahead else ""
    return (
        f"selp.u32 %rb, 16, 0, {text['inside']};\n"
        f"add.u32 %ra, {text['dst_reg']}, {text['offset']};\n"
        f"mad.wide.u32 %rda, {text['index']}, 16, {text['base']};\n"
        f"cp.async.cg.shared.global{hint} [%ra], [%rda], 16, %rb;"
    )


copy_or_zero = define(
    Atom(
        "copy_or_zero",
        (
            ("dst", "smem"),
            ("offset", "value"),
            ("base", "value"),
            ("index", "value"),
            ("inside", "value"),
            ("tile", "global"),
        ),
        Scope.THREAD,
        Lanes.ALL,
        _copy_text,
        "9.7.9.25.3.1 cp.async: 16 bytes of each lane, zeros where not `inside`, of which nothing "
        "is read then; index counts 16 bytes; L2 may bring `prefetch` bytes at once",
        accesses=(Access("tile", "r", READ_ONLY), Access("dst", "w", GENERIC, "copies")),
        sass=("cp.async",),
        defaults=(("prefetch", 0),),
        rules=(
            Rule("the base is a pointer parameter", lambda u: u.src[2].op is Op.PARAM),
            Rule("L2 prefetches 128 or 256 bytes", lambda u: u.arg.attr("prefetch") in PREFETCHES),
        ),
    )
)
