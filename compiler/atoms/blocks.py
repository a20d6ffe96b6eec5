"""Atoms for float8 products with block scales: operands with a scale for each block of K are
multiplied block by block, and each block's sums are added, scaled, to others in float32.

e4m3 is the only float8 type here. A register holds four of its values, the lowest byte first.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.common import _ISA_TMA, _TMA_RULES
from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import each

instruction(
    "tma_load_5d(dst: smem w async mbar, map: map, c0 c1 c2 c3 c4: value, bar: mbar) one -> "
    "tma_load",
    "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[{dst}], [{map}, {{{c0}, {c1}, {c2}, {c3}, {c4}}}], [{bar}];",
    _ISA_TMA + ", five dimensions: rows of a box come in the order of its dimensions",
    sass=("TMA tensor load",),
    rules=_TMA_RULES,
    defaults=(("apart", True),),
)
instruction(
    "tma_prefetch(map: map, c0 c1: value) one",
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [{map}, {{{c0}, {c1}}}];",
    "9.7.9.27.3 cp.async.bulk.prefetch.tensor: brings a box into L2",
    sass=("TMA L2 prefetch",),
    rules=(Rule("a box has 1..256 rows", lambda u: 1 <= u.arg.attr("box")[1] <= 256),),
)
instruction(
    "tma_load_handed(dst: smem w async mbar, map: map, c0 c1: value, bar: mbar, tile: global r "
    "read-only) one -> tma_load",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[{dst}], [{map}, {{{c0}, {c1}}}], [{bar}];",
    _ISA_TMA + ", of a tensor that a kernel before has written",
    sass=("TMA tensor load",),
    rules=_TMA_RULES,
    defaults=(("apart", True),),
)


_ORDERED = Rule(
    "the order names registers that there are",
    lambda u: all(i < u.src[-1].arg for i in u.arg.attr("order")),
)


instruction(
    "promote(acc: frag*n rw, part: frag*n r, factor: frag r)",
    each("fma.rn.f32 {acc}, {part}, {factor}, {acc};", picked="factor"),
    "9.7.3.7 fma: sums of a block of K, by their factors, to those of all; the factor of "
    "register i is number order[i], in turn",
    (_ORDERED,),
)
instruction(
    "exchange_pairs(dst: frag*2n w, src: frag*2n r) warp",
    each(
        "selp.b32 %_own, {src[1]}, {src[0]}, %_p;\n"
        "selp.b32 %_away, {src[0]}, {src[1]}, %_p;\n"
        "shfl.sync.bfly.b32 %_away, %_away, 1, 31, 0xFFFFFFFF;\n"
        "prmt.b32 {dst[0]}, %_own, %_away, %_low;\n"
        "prmt.b32 {dst[1]}, %_own, %_away, %_high;",
        temps="b32 odd low high own away, pred p",
        begin="and.b32 %_odd, %lane, 1;\nsetp.ne.u32 %_p, %_odd, 0;\n"
        "selp.b32 %_low, 0x1054, 0x5410, %_p;\nselp.b32 %_high, 0x3276, 0x7632, %_p;",
    ),
    "9.7.9.6 shfl.sync.bfly, 9.7.9.7 prmt: of accumulator columns 8j and up a lane has bytes "
    "2(l%4) and the next of two rows. Of each two such groups it gets four bytes in a row of "
    "one: group l&1, from column 4(l%4/2) on, of the first row and of the second",
    sass=("shfl.sync.bfly",),
)
