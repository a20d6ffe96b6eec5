"""SASS signatures: every one against its own example, and against code that ptxas makes; an RMSNorm
strategy's loads are in the order that it says."""

import struct
from pathlib import Path

import pytest

from ptxflow.compiler.backend import cache, ptxas, sass
from ptxflow.compiler.compilation import CompiledKernel, compile_chunk, compile_kernel
from ptxflow.compiler.device import Device
from tests.families import gqa_decode
from tests.families.rmsnorm import problem, strategy
from tests.given import B200, H200, crossed

ARCHS = ("sm_90a", "sm_100a")
HEADER = """.version 8.8
.target {arch}
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out)
.reqntid 128
.minnctapersm 1
{{
.reg .b64 %d<4>;
.reg .b32 %r<8>;
.reg .f32 %f<32>;
.reg .pred %p<4>;
.shared .align 1024 .b8 tile[16384];
.shared .align 8 .b64 bar;
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
mov.u32 %r3, bar;
mov.b64 %d1, map;
cvta.param.u64 %d1, %d1;
ld.param.u64 %d2, [out];
elect.sync _|%p2, 0xffffffff;
setp.lt.u32 %p1, %r1, 32;
and.pred %p1, %p1, %p2;
"""
LOAD = """@%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 16384;
@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%r2], [%d1, {%r1, %r1}], [%r3];
LOOP: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0;
@!%p3 bra LOOP;
"""
WGMMA = """setmaxnreg.inc.sync.aligned.u32 232;
mov.b64 %d3, 0x4000004000000000;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d3, %d3, 0, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
st.global.f32 [%d2], %f0;
st.global.f32 [%d2+4], %f1;
"""
TCGEN05 = """tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;
bar.sync 0;
ld.shared.u32 %r4, [%r2];
mov.b64 %d3, 0x4000404000000000;
@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r4], %d3, %d3, 0x08200490, 1;
@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];
tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r5, %r6}, [%r4];
tcgen05.wait::ld.sync.aligned;
st.global.u32 [%d2], %r5;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32;
"""
COMMON = ("mbarrier.init", "TMA tensor load", "mbarrier.arrive.expect_tx", "mbarrier.try_wait")
EXPECTED = {
    "sm_90a": (*COMMON, "wgmma bf16", "wgmma.fence", "wgmma.wait_group", "setmaxnreg.inc"),
    "sm_100a": (
        *COMMON, "tcgen05.alloc", "tcgen05.mma f16/bf16/tf32", "tcgen05.commit", "tcgen05.ld",
        "tcgen05.dealloc",
    ),
}  # fmt: skip


def cubin(arch: str, body: str) -> bytes:
    made = ptxas.assemble(HEADER.format(arch=arch) + body + "ret;\n}\n", arch)
    assert made.notes == ()
    return made.cubin


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def kernels() -> dict[str, bytes]:
    return {"sm_90a": cubin("sm_90a", LOAD + WGMMA), "sm_100a": cubin("sm_100a", LOAD + TCGEN05)}


def test_every_signature_matches_its_own_examples() -> None:
    table = sass.signatures()
    assert len(table) == 99
    for row in table.values():
        for arch, example in row.examples:
            assert not example or row.pattern.match(example), (row.technique, arch)
            assert not example or row.exists_on(arch)


@pytest.mark.parametrize(
    ("technique", "other"),
    [
        ("wgmma f16", "wgmma bf16"),
        ("mbarrier.arrive", "mbarrier.arrive.expect_tx"),
        ("mbarrier.arrive.expect_tx", "mbarrier.arrive"),
        ("mbarrier.test_wait", "mbarrier.try_wait"),
        ("TMA tensor load multicast", "TMA tensor load"),
        ("tcgen05.commit multicast", "tcgen05.commit"),
        ("tcgen05.mma cta_group::2", "tcgen05.mma f16/bf16/tf32"),
        ("setmaxnreg.inc", "setmaxnreg.dec"),
        ("cluster wait", "cluster arrive"),
    ],
)
def test_neighbours_are_told_apart(technique: str, other: str) -> None:
    pattern = sass.signature(technique).pattern
    assert not any(pattern.match(e) for _, e in sass.signature(other).examples if e)


def test_expected_techniques_are_found(kernels: dict[str, bytes]) -> None:
    jobs = [(kernels[arch], arch, EXPECTED[arch]) for arch in ARCHS]
    for report in sass.check_many(jobs, workers=2):
        assert report.ok, report.complaints()
        assert report.counts["TMA tensor load"] == 1


def test_missing_techniques_are_named(kernels: dict[str, bytes]) -> None:
    report = sass.check(kernels["sm_90a"], "sm_90a", ["TMA tensor load", "TMA tensor store"])
    assert report.missing == ("TMA tensor store",) and not report.ok
    assert report.complaints() == ["the machine code has no TMA tensor store"]


def test_issue_by_many_lanes_is_forbidden() -> None:
    unproven = LOAD.replace("@%p1 cp.async", "cp.async")
    report = sass.check(cubin("sm_90a", unproven), "sm_90a", ["TMA tensor load"])
    assert report.missing == () and report.forbidden == ("BRA.U.ANY",) and not report.ok


@pytest.mark.parametrize("tile", [64, 128])
def test_one_lane_gathers_the_rows_of_an_only_key_head(tile: int) -> None:
    s = gqa_decode.GATHERED["gathered rows"][1].replace(tile=tile, tiles=1, stages=1)
    p = gqa_decode.problem(page_size=10, size=64, group=8, key_heads=1)
    assert compile_kernel(p, s, B200).sass.counts["TMA gather4"] > 0


def test_reports_come_from_the_store(
    kernels: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sass.check(kernels["sm_90a"], "sm_90a", EXPECTED["sm_90a"])

    def refuse(*args: object, **kwargs: object) -> str:
        raise AssertionError("disassembled twice")

    monkeypatch.setattr(sass, "listing", refuse)
    assert sass.check(kernels["sm_90a"], "sm_90a", EXPECTED["sm_90a"]) == first


def test_unknown_and_impossible_techniques(kernels: dict[str, bytes]) -> None:
    with pytest.raises(KeyError, match=r"near: .*TMA tensor load"):
        sass.check(kernels["sm_90a"], "sm_90a", ["TMA tensor lod"])
    with pytest.raises(ValueError, match="no machine form on sm_90a"):
        sass.check(kernels["sm_90a"], "sm_90a", ["tcgen05.ld"])


def test_instructions_are_stripped_of_guards_and_annotations() -> None:
    text = """
k:
.text.k:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*02f0*/                   @!UP0 UIADD3 UR4, UPT, UPT, -UR4, 0x100000, URZ ;
        /*0300*/              @!P0 BRA `(.L_x_2) ;
        /*0310*/                   UTCBAR [UR4], URZ &req={0} &wr=0x1 ?WAIT1_END_GROUP ;
        /*0320*/                   NOP;    /* 0x0000000000007918 */
                                              /* 0x000fc00000000000 */
"""
    got = [(i.function, i.address, i.guard, i.opcode, i.text) for i in sass.parse(text)]
    assert got == [
        ("k", 0x0, "", "LDC", "LDC R1, c[0x0][0x28]"),
        ("k", 0x2F0, "!UP0", "UIADD3", "UIADD3 UR4, UPT, UPT, -UR4, 0x100000, URZ"),
        ("k", 0x300, "!P0", "BRA", "BRA `(.L_x_2)"),
        ("k", 0x310, "", "UTCBAR", "UTCBAR [UR4], URZ"),
        ("k", 0x320, "", "NOP", "NOP"),
    ]


def test_many_together_are_what_each_is_alone(kernels: dict[str, bytes]) -> None:
    """By two roads: one listing a cubin with labels, and the bare code of several end to end."""
    for arch, load in (("sm_90a", LOAD), ("sm_100a", LOAD)):
        cubins = [kernels[arch], cubin(arch, load), kernels[arch]]
        together = sass.disassemble_together(cubins, arch)
        for one, body in zip(cubins, together, strict=True):
            alone = sass.disassemble(one)
            assert {i.function for i in alone} == {"k"}
            assert sorted((i.guard, i.opcode) for i in alone) == sorted(
                (i.guard, i.opcode) for i in body
            )
            assert sass.count(alone) == sass.count(body)


def test_stalls_are_read_from_control_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [1 << 63, 5 << 41 | 7 << 46, 1 << 20, 1 << 41 | 1 << 45 | 3 << 52]
    monkeypatch.setattr(sass, "code", lambda cubin: struct.pack("<4Q", *words))
    assert sass.stalls(b"") == (3.0, 0.5)


def test_what_is_not_a_cubin_is_refused(kernels: dict[str, bytes]) -> None:
    with pytest.raises(sass.SassError, match="nvdisasm"):
        sass.disassemble(b"not a cubin")
    for torn in (b"not a cubin", b"\x7fELF\x02", kernels["sm_90a"][:2000]):
        with pytest.raises(sass.SassError, match="not a cubin, or a torn one"):
            sass.check(torn, "sm_90a", [])


def test_missing_nvdisasm(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, bytes]) -> None:
    monkeypatch.setenv(sass.OVERRIDE, "/nowhere/nvdisasm")
    with pytest.raises(ptxas.ToolMissing, match=sass.OVERRIDE):
        sass.check(kernels["sm_90a"], "sm_90a", [])


def loads_before_the_sum(row_threads: int, residual: bool, dev: Device) -> dict[str, int]:
    """Loads from global memory before the first shuffle, by when the weights are loaded."""
    found = {}
    chosen = {w: strategy(row_threads=row_threads, rows=1, weights=w) for w in ("early", "late")}
    p = problem(4096, residual=residual)
    for when, made in zip(
        chosen, compile_chunk([(p, s, dev) for s in chosen.values()]), strict=True
    ):
        assert isinstance(made, CompiledKernel), made
        names = [i.opcode.partition(".")[0] for i in sass.disassemble(made.cubin)]
        found[when] = names[: names.index("SHFL")].count("LDG")
    return found


@pytest.mark.parametrize(("dev", "residual", "row_threads"), [
    pytest.param(*case, marks=[pytest.mark.slow] * slow)
    for *case, slow in crossed((H200, B200), (False, True), (256, 512))
])  # fmt: skip
def test_early_weights_do_not_wait_for_the_row(
    dev: Device, residual: bool, row_threads: int
) -> None:
    """Else a kernel of one row waits for memory twice, one time after the other."""
    vectors = 4096 // 8 // row_threads
    found = loads_before_the_sum(row_threads, residual, dev)
    assert found["early"] == (2 + residual) * vectors
    assert found["late"] <= found["early"]
