"""Atoms of sm_100a: tcgen05 and tensor memory, TMA for CTA pairs."""

from ptxflow.compiler.atoms.common import _ISA_TMA, _TMA_RULES
from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.ir import Statement

_KINDS = {"f16": "tcgen05.mma f16/bf16/tf32", "f8f6f4": "tcgen05.mma f8f6f4/mxf8"}
_COLUMNS = Rule(
    "TMEM is allocated in powers of two, 32..512 columns",
    lambda u: u.arg.attr("columns") in (32, 64, 128, 256, 512),
)

instruction(
    "tmem_alloc(address: smem w, columns cta_group: int) warp sm_100a -> tmem_alloc",
    "tcgen05.alloc.cta_group::{cta_group}.sync.aligned.shared::cta.b32 [{address}], {columns};",
    "9.7.16.7.1 tcgen05.alloc",
    sass=("tcgen05.alloc",),
    rules=(_COLUMNS,),
)
instruction(
    "tmem_relinquish(cta_group: int) warp sm_100a -> tmem_relinquish",
    "tcgen05.relinquish_alloc_permit.cta_group::{cta_group}.sync.aligned;",
    "9.7.16.7.1 tcgen05.relinquish_alloc_permit",
)
instruction(
    "tmem_address(address: smem r) sm_100a -> tmem_address",
    "ld.shared.b32 %tmem, [{address}];",
    "9.7.9.8 ld",
)
instruction(
    "tmem_dealloc(columns cta_group: int) warp sm_100a -> tmem_dealloc",
    "tcgen05.dealloc.cta_group::{cta_group}.sync.aligned.b32 %tmem, {columns};",
    "9.7.16.7.1 tcgen05.dealloc",
    rules=(_COLUMNS,),
)


def _mma_text(use: Statement, text: dict[str, str], a: str) -> str:
    return (
        f"tcgen05.mma.cta_group::{use.arg.attr('cta_group')}.kind::{use.arg.attr('kind')} "
        f"[{text['d_reg']}], {a}, {text['b']}, {use.arg.attr('idesc')}, "
        f"{text['accumulate']};"
    )


def _step_of_n(use: Statement) -> int:
    """M is in bits 24 and up of the instruction descriptor, by 16 (9.7.16.4.2)."""
    group: int = use.arg.attr("cta_group")
    return 8 if group == 1 and use.arg.attr("idesc") >> 24 == 64 >> 4 else 16 * group


instruction(
    "tcgen05_mma(d: tmem rw tensor tcgen05, a b: desc r tensor tcgen05, accumulate: value, "
    "cta_group idesc: int, kind: str='f16') one sm_100a -> mma",
    lambda use, t: _mma_text(use, t, t["a"]),
    "9.7.16.10.9 tcgen05.mma; one thread issues for the CTA, or for the pair",
    sass=lambda u: (
        (_KINDS[u.arg.attr("kind")],)
        + (("tcgen05.mma cta_group::2",) if u.arg.attr("cta_group") == 2 else ())
    ),
    rules=(
        Rule(
            "N is 16..256 in steps of 16, of 32 for a CTA pair, of 8 from 8 on where M is 64",
            lambda u: u.src[0].arg in range(_step_of_n(u), 257, _step_of_n(u)),
        ),
        Rule("operands have 16 or 8 bits", lambda u: u.arg.attr("kind") in _KINDS),
    ),
)

instruction(
    "tcgen05_mma_held(d: tmem rw tensor tcgen05, a: tmem*8 r tensor tcgen05, b: desc r tensor "
    "tcgen05, accumulate: value, cta_group idesc: int, kind: str='f16') one sm_100a -> mma",
    lambda use, t: _mma_text(use, t, f"[{t['a_reg']}]"),
    "9.7.16.10.9 tcgen05.mma, A in tensor memory: a row a lane, two elements along K a column",
    sass=("tcgen05.mma f16/bf16/tf32", "tcgen05.mma A from TMEM"),
    rules=(
        Rule("N is 16..256 in steps of 16", lambda u: u.src[0].arg in range(16, 257, 16)),
        Rule("one CTA issues it", lambda u: u.arg.attr("cta_group") == 1),
    ),
)


def _commit_text(use: Statement, text: dict[str, str]) -> str:
    group, mask = use.arg.attr("cta_group"), use.arg.attr("mask")
    head = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    if not mask:
        return f"{head}.b64 [{text['bar']}];"
    return f"mov.b16 %rh, {mask};\n{head}.multicast::cluster.b64 [{text['bar']}], %rh;"


instruction(
    "tcgen05_commit(bar: mbar, cta_group: int=1, mask: int=0) one sm_100a orders -> tcgen05_commit",
    _commit_text,
    "9.7.16.12.1 tcgen05.commit; tracks the issuing thread's earlier tcgen05 operations",
    sass=("tcgen05.commit",),
)


def _ld_text(use: Statement, text: dict[str, str]) -> str:
    shape = use.arg.attr("shape")
    count = use.src[0].arg // (4 if shape == "16x256b" else 1)
    split = f", {use.arg.attr('split')}" if use.arg.attr("split") else ""
    return (
        f"add.u32 %ra, {text['src_reg']}, {text['lane']};\n"
        f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{text['dst']}}}, [%ra]{split};"
    )


instruction(
    "tcgen05_ld(dst: frag*1|2|4|8|16|32|64|128 w generic ld, src: tmem r tensor ld, lane: value, "
    "shape: str, split: int?) warp sm_100a",
    _ld_text,
    "9.7.16.8.1 tcgen05.ld; `lane` is the warp's lane quarter, in bits 16 and up",
    sass=("tcgen05.ld",),
)
instruction(
    "tcgen05_wait_ld() warp sm_100a orders -> wait_ld",
    "tcgen05.wait::ld.sync.aligned;",
    "9.7.16.8.5 tcgen05.wait",
)


def _st_text(use: Statement, text: dict[str, str]) -> str:
    shape = use.arg.attr("shape")
    count = use.src[1].arg // _ST_COLUMNS[shape]
    return (
        f"add.u32 %ra, {text['dst_reg']}, {text['lane']};\n"
        f"tcgen05.st.sync.aligned.{shape}.x{count}.b32 [%ra], {{{text['src']}}};"
    )


_ST_COLUMNS = {"32x32b": 1, "16x128b": 2}  # for a register of each lane


instruction(
    "tcgen05_st(dst: tmem*1|2|4|8|16|32|64|128 w tensor st, src: frag*1|2|4|8|16|32|64|128 r, "
    "lane: value, shape: str='32x32b') warp sm_100a",
    _st_text,
    "9.7.16.8.2 tcgen05.st: register i of a lane to column i of its row, or 16x128b: as mma.sync "
    "has pairs of 16 bits; `lane` is where the warp's lanes begin, in bits 16 and up",
    sass=("tcgen05.st",),
    rules=(
        Rule(
            "32 lanes or 16 have a register for each column, or for two",
            lambda u: u.src[0].arg == u.src[1].arg * _ST_COLUMNS[u.arg.attr("shape")],
        ),
    ),
)
instruction(
    "tcgen05_wait_st() warp sm_100a orders -> wait_st",
    "tcgen05.wait::st.sync.aligned;",
    "9.7.16.8.5 tcgen05.wait",
    sass=("tcgen05.wait::st",),
)
instruction(
    "tcgen05_fence_before() any sm_100a orders -> fence_before",
    "tcgen05.fence::before_thread_sync;",
    "9.7.16.11 tcgen05.fence",
)
instruction(
    "tcgen05_fence_after() any sm_100a orders -> fence_after",
    "tcgen05.fence::after_thread_sync;",
    "9.7.16.11 tcgen05.fence",
)
instruction(
    "tma_gather4(dst: smem w async mbar, map: map, c0 r0 r1 r2 r3: value, bar: mbar, box: pair, "
    "element: int, apart: bool?) one sm_100a -> tma_load",
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes "
    "[{dst}], [{map}, {{{c0}, {r0}, {r1}, {r2}, {r3}}}], [{bar}];",
    _ISA_TMA + ", tile::gather4: part of four rows, signed, side by side; zeros outside",
    sass=("TMA gather4",),
    rules=(*_TMA_RULES, Rule("it brings four rows", lambda u: u.arg.attr("box")[1] == 4)),
)
