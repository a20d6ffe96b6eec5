"""Atoms of both targets on registers: conversions, sums, loads, stores, also into peers."""

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.atoms.threads import each, vector, written
from ptxflow.compiler.ir import Statement

instruction(
    "set_max_registers(direction: str, registers: int) warpgroup -> registers",
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


def _mov_text(use: Statement, text: dict[str, str]) -> str:
    kind = use.src[0].src[0].arg.dtype
    return "\n".join(f"mov.{kind} {d}, {text['value']};" for d in text["dst"].split(", "))


instruction(
    "mov(dst: frag w, value: value)",
    _mov_text,
    "9.7.9.3 mov: one value to every register",
    among=("value",),
)
instruction(
    "either(dst: frag*1 w, yes no inside: value)",
    "selp.b32 {dst}, {yes}, {no}, {inside};",
    "9.7.7 selp: one of two values, as a condition holds or not",
    among=("yes", "no"),
)
instruction(
    "choose(dst: frag*n w, flag: frag r, a b: frag*n r)",
    each("selp.b32 {dst}, {a}, {b}, %_q;", temps="pred q", begin="setp.ne.u32 %_q, {flag}, 0;"),
    "9.7.7 selp: the first where the flag is not 0, else the second",
    among=("a", "b"),
)
instruction("popc(dst: frag*1 w, src: frag*1 r)", "popc.b32 {dst}, {src};", "9.7.1 popc")
_TWO = each("cvt.rn.{dtype}x2.f32 {dst}, {src[1]}, {src[0]};")
_FOUR = each(
    "cvt.rn.satfinite.e4m3x2.f32 %_low, {src[1]}, {src[0]};\n"
    "cvt.rn.satfinite.e4m3x2.f32 %_high, {src[3]}, {src[2]};\n"
    "mov.b32 {dst}, {{%_low, %_high}};",
    temps="b16 low high",
)


def _held(use: Statement) -> int:
    """Values in a register."""
    return 4 if use.arg.attr("dtype") == "e4m3" else 2


instruction(
    "pack(dst: frag w, src: frag r, dtype: str)",
    lambda use, text: (_FOUR if _held(use) == 4 else _TWO)(use, text),
    "9.7.9.22 cvt to nearest even, of e4m3 to 448 at the most; the first source in the lowest bits",
    sass=lambda u: ("cvt to fp8",) * (_held(u) == 4),
    rules=(
        Rule(
            "a register has two values of 16 bits, or four of e4m3",
            lambda u: u.src[1].arg == u.src[0].arg * _held(u),
        ),
    ),
)
instruction(
    "st_shared_v4(dst: smem w, offset: value, src: frag*4 r)",
    "add.u32 %ra, {dst_reg}, {offset};\nst.shared.v4.b32 [%ra], {{{src}}};",
    "9.7.9.11 st",
)
instruction(
    "st_async_v4(dst: smem w generic mbar, offset: value, src: frag*4 r, bar: mbar, rank: value) "
    "-> st_async",
    written(
        "",
        "add.u32 %ra, {dst_reg}, {offset};",
        "mapa.shared::cluster.u32 %ra, %ra, {rank};",
        "mapa.shared::cluster.u32 %rb, {bar_reg}, {rank};",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%ra], {{{src}}}, [%rb];",
    ),
    "9.7.9.12 st.async: into a CTA of the cluster, its bytes counted on a barrier there",
    sass=("st.async",),
)
instruction(
    "ld_peer(dst: frag*1|2|4 w, src: smem r, offset rank: value)",
    written(
        "",
        "add.u32 %ra, {src_reg}, {offset};",
        "mapa.shared::cluster.u32 %ra, %ra, {rank};",
        "ld.shared::cluster.{dst.kind} {dst.vector}, [%ra];",
    ),
    "9.7.9.8 ld from the shared memory of a CTA of the cluster",
)


def _store_text(use: Statement, text: dict[str, str]) -> str:
    kind, registers = vector(text["src"])
    offset, cache = use.arg.attr("offset"), use.arg.attr("cache")
    place = f"%rda+{offset}" if offset else "%rda"
    guard = "" if text["inside"] == "1" else f"@{text['inside']} "
    return (
        f"mad.wide.u32 %rda, {text['index']}, {use.arg.attr('element')}, {text['base']};\n"
        f"{guard}st.global{cache and '.' + cache}.{kind} [{place}], {registers};"
    )


instruction(
    "st_global(base: pointer, index inside: value, tile: global w, src: frag*1|2|4 r, element: "
    "int, cache: str='', offset: int=0)",
    _store_text,
    "9.7.9.11 st; index counts elements, offset bytes, `inside` is the lane's bounds predicate",
)


def _narrow_text(use: Statement, text: dict[str, str]) -> str:
    dtype, bits, zero = use.arg.attr("dtype"), 16, ""
    if dtype == "e4m3":
        dtype, bits, zero = "satfinite.e4m3x2", 8, " 0f00000000,"
    return written(
        "",
        f"cvt.rn.{dtype}.f32 %rh,{zero} {{src}};",
        f"mad.wide.u32 %rda, {{index}}, {bits // 8}, {{base}};",
        f"{{inside.guard}}st.global.b{bits} [%rda], %rh;",
    )(use, text)


instruction(
    "st_global_narrow(base: pointer, index inside: value, tile: global w, src: frag*1 r, dtype: "
    "str)",
    _narrow_text,
    "9.7.9.11 st of one float32 register, rounded to 16 bits or to e4m3 (9.7.9.22 cvt)",
    sass=lambda u: ("cvt to fp8",) if u.arg.attr("dtype") == "e4m3" else (),
)
instruction(
    "movmatrix(dst: frag*1 w, src: frag*1 r) warp",
    "movmatrix.sync.aligned.m8n8.trans.b16 {dst}, {src};",
    "9.7.14.5.17 movmatrix: a warp's 8 x 8 matrix of 16-bit elements, transposed",
    sass=("movmatrix",),
)
