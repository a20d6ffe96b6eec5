"""Atoms of both targets for rows that lanes copy from global to shared memory, 16 bytes each.

They write through the generic proxy: who reads through the async one needs a fence behind the wait.
"""

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
from ptxflow.compiler.ir import Op, UOp

CHUNK = 16  # bytes of a lane


def _copy_text(use: UOp, text: dict[str, str]) -> str:
    size = "16" if text["inside"] == "1" else "%rb"
    select = "" if size == "16" else f"selp.u32 %rb, 16, 0, {text['inside']};\n"
    return (
        f"mad.wide.u32 %rda, {text['column']}, {use.arg.attr('element')}, {text['base']};\n"
        f"mad.wide.u32 %rda, {text['row']}, {use.arg.attr('pitch')}, %rda;\n"
        f"{select}add.u32 %ra, {text['dst_reg']}, {text['offset']};\n"
        f"cp.async.cg.shared.global [%ra], [%rda], 16, {size};"
    )


copy_chunks = define(
    Atom(
        "copy_chunks",
        (
            ("dst", "smem"),
            ("offset", "value"),
            ("base", "value"),
            ("row", "value"),
            ("column", "value"),
            ("inside", "value"),
            ("tile", "global"),
        ),
        Scope.WARP,
        Lanes.ALL,
        _copy_text,
        "9.7.9.25 cp.async: 16 bytes of every lane, from a row and column that it names to its "
        "offset; zeros where not `inside`; rows are `pitch` bytes apart",
        accesses=(Access("tile", "r", READ_ONLY), Access("dst", "w", GENERIC, "copies")),
        sass=("cp.async",),
        rules=(
            Rule("the base is a pointer parameter", lambda u: u.src[2].op is Op.PARAM),
            Rule("rows begin at multiples of 16 bytes", lambda u: u.arg.attr("pitch") % 16 == 0),
            Rule("its lanes fill the slot", lambda u: u.src[0].arg == 32 * CHUNK),
        ),
    )
)
