"""Atoms of both targets for tensors that stream through a CTA: bulk copies without a tensor map,
and narrow loads.

A bulk load reads what the kernel never writes; a bulk store belongs to its thread's bulk group.
"""

from __future__ import annotations

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import CACHED
from ptxflow.compiler.ir import UOp

_FILLED = Rule("it is all of its slot", lambda u: u.src[0].arg == u.arg.attr("bytes"))
_WHOLE = Rule("it copies whole chunks of 16 bytes", lambda u: u.arg.attr("bytes") % 16 == 0)
_COUNTED = Rule("tx bytes are below 2^20", lambda u: 0 < u.arg.attr("bytes") < 2**20)

instruction(
    "bulk_load(dst: smem w async mbar, base: pointer, index: value, tile: global r read-only, "
    "bar: mbar) one -> bulk_load",
    "mad.wide.u32 %rda, {index}, {element}, {base};\n"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[{dst}], [%rda], {bytes}, [{bar}];",
    "9.7.9 cp.async.bulk; index counts elements; its bytes complete on the barrier",
    sass=("bulk copy g->s",),
    rules=(_WHOLE, _COUNTED, _FILLED),
)
instruction(
    "bulk_store(src: smem r async bulk, base: pointer, index: value, tile: global w async bulk) "
    "one",
    "mad.wide.u32 %rda, {index}, {element}, {base};\n"
    "cp.async.bulk.global.shared::cta.bulk_group [%rda], [{src}], {bytes};",
    "9.7.9 cp.async.bulk; index counts elements; complete with its bulk group",
    sass=("bulk copy s->g",),
    rules=(_WHOLE, _FILLED),
)


def _narrow_text(use: UOp, text: dict[str, str]) -> str:
    cache = use.arg.attr("cache")
    return (
        f"mad.wide.u32 %rda, {text['index']}, 2, {text['base']};\n"
        f"ld.global.nc{cache and '.' + cache}.b16 %rh, [%rda];\n"
        f"cvt.f32.{use.arg.attr('dtype')} {text['dst']}, %rh;"
    )


instruction(
    "ld_global_narrow(dst: frag*1 w, base: pointer, index: value, tile: global r read-only)",
    _narrow_text,
    "9.7.9.9 ld.global.nc of one 16-bit value, widened (9.7.9.22 cvt); index counts elements",
    sass=("ld.global.nc",),
    defaults=(("cache", ""),),
    rules=(CACHED,),
)
