"""Atoms of both targets on registers: conversions, sums, loads, stores, also into peers."""

from __future__ import annotations

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.ir import Op, UOp

instruction(
    "set_max_registers() warpgroup -> registers",
    "setmaxnreg.{direction}.sync.aligned.u32 {registers};",
    "9.7.19.5 setmaxnreg",
    sass=lambda u: ("setmaxnreg." + u.arg.attr("direction"),),
    rules=(
        Rule(
            "the count is 24..256 in steps of 8",
            lambda u: 24 <= u.arg.attr("registers") <= 256 and u.arg.attr("registers") % 8 == 0,
        ),
    ),
)


def _pack_text(use: UOp, text: dict[str, str]) -> str:
    dst, src = text["dst"].split(", "), text["src"].split(", ")
    dtype = use.arg.attr("dtype")
    return "\n".join(
        f"cvt.rn.{dtype}x2.f32 {d}, {src[2 * i + 1]}, {src[2 * i]};" for i, d in enumerate(dst)
    )


def _mov_text(use: UOp, text: dict[str, str]) -> str:
    kind = use.src[0].src[0].arg.dtype
    return "\n".join(f"mov.{kind} {d}, {text['value']};" for d in text["dst"].split(", "))


instruction("mov(dst: frag w, value: value)", _mov_text, "9.7.9.3 mov: one value to every register")
instruction(
    "pack(dst: frag w, src: frag r)",
    _pack_text,
    "9.7.9.22 cvt: the first source goes to the upper half",
    rules=(Rule("two values to a register", lambda u: u.src[1].arg == 2 * u.src[0].arg),),
)
instruction(
    "st_shared_v4(dst: smem w, offset: value, src: frag r)",
    "add.u32 %ra, {dst_reg}, {offset};\nst.shared.v4.b32 [%ra], {{{src}}};",
    "9.7.9.11 st",
    rules=(Rule("it stores four registers", lambda u: u.src[2].arg == 4),),
)
instruction(
    "ld_shared_v4(dst: frag w, src: smem r, offset: value)",
    "add.u32 %ra, {src_reg}, {offset};\nld.shared.v4.b32 {{{dst}}}, [%ra];",
    "9.7.9.8 ld",
    rules=(Rule("it loads four registers", lambda u: u.src[0].arg == 4),),
)


def _store_async_text(use: UOp, text: dict[str, str]) -> str:
    return (
        f"add.u32 %ra, {text['dst_reg']}, {text['offset']};\n"
        f"mapa.shared::cluster.u32 %ra, %ra, {text['rank']};\n"
        f"mapa.shared::cluster.u32 %rb, {text['bar_reg']}, {text['rank']};\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        f"[%ra], {{{text['src']}}}, [%rb];"
    )


instruction(
    "st_async_v4(dst: smem w generic mbar, offset: value, src: frag r, bar: mbar, rank: value) "
    "-> st_async",
    _store_async_text,
    "9.7.9.12 st.async: into a CTA of the cluster, its bytes counted on a barrier there",
    sass=("st.async",),
    rules=(Rule("it stores four registers", lambda u: u.src[2].arg == 4),),
)


def _load_peer_text(use: UOp, text: dict[str, str]) -> str:
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['offset']};\n"
        f"mapa.shared::cluster.u32 %ra, %ra, {text['rank']};\n"
        f"ld.shared::cluster.v4.b32 {{{text['dst']}}}, [%ra];"
    )


instruction(
    "ld_peer_v4(dst: frag w, src: smem r, offset rank: value)",
    _load_peer_text,
    "9.7.9.8 ld from the shared memory of a CTA of the cluster",
    rules=(Rule("it loads four registers", lambda u: u.src[0].arg == 4),),
)


def _store_text(use: UOp, text: dict[str, str]) -> str:
    count = use.src[-1].arg
    kind = "b32" if count == 1 else f"v{count}.b32"
    registers = text["src"] if count == 1 else f"{{{text['src']}}}"
    offset, cache = use.arg.attr("offset"), use.arg.attr("cache")
    place = f"%rda+{offset}" if offset else "%rda"
    guard = "" if text["inside"] == "1" else f"@{text['inside']} "
    return (
        f"mad.wide.u32 %rda, {text['index']}, {use.arg.attr('element')}, {text['base']};\n"
        f"{guard}st.global{cache and '.' + cache}.{kind} [{place}], {registers};"
    )


instruction(
    "st_global(base index inside: value, tile: global w, src: frag r)",
    _store_text,
    "9.7.9.11 st; index counts elements, offset bytes, `inside` is the lane's bounds predicate",
    defaults=(("cache", ""), ("offset", 0)),
    rules=(
        Rule("it stores one, two or four registers", lambda u: u.src[-1].arg in (1, 2, 4)),
        Rule("the base is a pointer parameter", lambda u: u.src[0].op is Op.PARAM),
    ),
)


def _store_narrow_text(use: UOp, text: dict[str, str]) -> str:
    return (
        f"cvt.rn.{use.arg.attr('dtype')}.f32 %rh, {text['src']};\n"
        f"mad.wide.u32 %rda, {text['index']}, 2, {text['base']};\n"
        f"@{text['inside']} st.global.b16 [%rda], %rh;"
    )


instruction(
    "st_global_narrow(base index inside: value, tile: global w, src: frag r)",
    _store_narrow_text,
    "9.7.9.11 st of one float32 register, rounded to 16 bits (9.7.9.22 cvt)",
    rules=(
        Rule("it stores one register", lambda u: u.src[-1].arg == 1),
        Rule("the base is a pointer parameter", lambda u: u.src[0].op is Op.PARAM),
    ),
)
instruction(
    "movmatrix(dst: frag w, src: frag r) warp",
    "movmatrix.sync.aligned.m8n8.trans.b16 {dst}, {src};",
    "9.7.14.5.17 movmatrix: a warp's 8 x 8 matrix of 16-bit elements, transposed",
    sass=("movmatrix",),
    rules=(Rule("it moves one register", lambda u: u.src[0].arg == u.src[1].arg == 1),),
)
