"""Atoms of both targets for recurrences in chunks: sums over the tokens that lanes hold, and 16-bit
operands in two terms.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import instruction
from ptxflow.compiler.atoms.threads import pieces
from ptxflow.compiler.ir import UOp

WARP = 32


def _rest_text(use: UOp, text: dict[str, str]) -> str:
    lines, sources, dtype = list[str](), iter(pieces(text["src"])), use.arg.attr("dtype")
    for dst, packed in zip(pieces(text["dst"]), pieces(text["packed"]), strict=True):
        low, high = next(sources), next(sources)
        if dtype == "bf16":
            lines += [f"shl.b32 %ra, {packed}, 16;", f"and.b32 %rb, {packed}, 0xFFFF0000;"]
        else:
            lines += [
                f"cvt.u16.u32 %rh, {packed};",
                "cvt.f32.f16 %ra, %rh;",
                f"shr.u32 %rb, {packed}, 16;",
                "cvt.u16.u32 %rh, %rb;",
                "cvt.f32.f16 %rb, %rh;",
            ]
        lines += [
            f"sub.rn.f32 %ra, {low}, %ra;",
            f"sub.rn.f32 %rb, {high}, %rb;",
            f"cvt.rn.{dtype}x2.f32 {dst}, %rb, %ra;",
        ]
    return "\n".join(lines)


instruction(
    "pack_rest(dst: frag*n w, src: frag*2n r, packed: frag*n r)",
    _rest_text,
    "9.7.3.4 sub, 9.7.9.22 cvt: what packing left out, in the same type",
)


def _prefix_text(use: UOp, text: dict[str, str]) -> str:
    dst = text["dst"]
    return "\n".join(
        f"shfl.sync.up.b32 %ra|%pw, {dst}, {1 << i}, 0, 0xFFFFFFFF;\n"
        f"@%pw add.rn.f32 {dst}, {dst}, %ra;"
        for i in range(WARP.bit_length() - 1)
    )


instruction(
    "prefix_sum(dst: frag*1 rw) warp",
    _prefix_text,
    "9.7.9.6 shfl.sync.up: to every lane's value those of the lanes before are added",
)
