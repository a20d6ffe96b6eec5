"""Atoms for float8 products with block scales: operands with a scale for each block of K are
multiplied block by block, and each block's sums are added, scaled, to others in float32.

e4m3 is the only float8 type here. A register holds four of its values, the lowest byte first.
"""

from ptxflow.compiler.atoms.common import _ISA_TMA, _TMA_RULES
from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import each

instruction(
    "tma_load_5d(dst: smem w async mbar, map: map, c0 c1 c2 c3 c4: value, bar: mbar, box: pair, "
    "element: int, apart: bool=True) one -> tma_load",
    "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[{dst}], [{map}, {{{c0}, {c1}, {c2}, {c3}, {c4}}}], [{bar}];",
    _ISA_TMA + ", five dimensions: rows of a box come in the order of its dimensions",
    sass=("TMA tensor load",),
    rules=_TMA_RULES,
)
instruction(
    "tma_prefetch(map: map, c0 c1: value, box: pair, element: int) one",
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [{map}, {{{c0}, {c1}}}];",
    "9.7.9.27.3 cp.async.bulk.prefetch.tensor: brings a box into L2",
    sass=("TMA L2 prefetch",),
    rules=(Rule("a box has 1..256 rows", lambda u: 1 <= u.arg.attr("box")[1] <= 256),),
)
instruction(
    "tma_load_handed(dst: smem w async mbar, map: map, c0 c1: value, bar: mbar, tile: global r "
    "read-only, box: pair, element: int, apart: bool=True) one -> tma_load",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[{dst}], [{map}, {{{c0}, {c1}}}], [{bar}];",
    _ISA_TMA + ", of a tensor that a kernel before has written",
    sass=("TMA tensor load",),
    rules=_TMA_RULES,
)


_ORDERED = Rule(
    "the order names registers that there are",
    lambda u: all(i < u.src[-1].arg for i in u.arg.attr("order")),
)


instruction(
    "promote(acc: frag*n rw, part: frag*n r, factor: frag r, order: ints)",
    each("fma.rn.f32 {acc}, {part}, {factor}, {acc};", picked="factor"),
    "9.7.3.7 fma: sums of a block of K, by their factors, to those of all; the factor of "
    "register i is number order[i], in turn",
    (_ORDERED,),
)
