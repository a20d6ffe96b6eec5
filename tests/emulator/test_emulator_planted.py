"""Planted faults: each change of the PTX text or the launch must show, as a fault, a wrong C or a
noted hazard, under one of a few schedules."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ptxflow.compiler.emulator import Fault
from ptxflow.compiler.launch import Launch, TensorMapParam

Build = Callable[..., Any]
Run = Callable[..., Any]
Shape = tuple[int, int, int]
TILES: Shape = (300, 128, 448)  # 7 k-blocks through 2 stages, at least 4 tiles, for one cluster
FEWER: Shape = (200, 128, 448)  # for a cluster each
SCHEDULES = (0, 1, 2, 3)
KERNELS: dict[str, tuple[str, dict[str, int | str]]] = {
    "hopper": ("h200", {}),
    "hopper cluster": ("h200", {"cluster": "2x1", "epilogue": "direct"}),
    "hopper split": ("h200", {"split_k": 2, "epilogue": "direct", "producer_regs": 0}),
    "blackwell": ("b200", {"persistent": 1, "acc_buffers": 2}),
    "blackwell pair": (
        "b200",
        {"persistent": 1, "acc_buffers": 2, "cta_group": 2, "cluster": "2x1"},
    ),
    "blackwell plain": ("b200", {"warp_specialized": 0, "producer_regs": 0}),
}


def verdict(
    run: Run, ptx: str, launch: Launch, says: str = "", schedules: Sequence[int] = SCHEDULES
) -> str:
    """The first fault or wrong value of the schedules, or the first hazards that say so; else what
    hazards there are, else ""."""
    persistent = "min(" in launch.grid[0]  # one cluster of these works through several tiles
    shape, grid = (TILES, launch.cluster[0]) if persistent else (FEWER, None)
    noted = ""
    for seed in schedules:
        try:
            right, report = run(ptx, launch, *shape, seed=seed, grid=grid)
        except Fault as fault:
            return f"fault: {fault}"
        if not right:
            return "wrong"
        noted = noted or "".join(f"hazard: {h}" for h in report.hazards)
        if noted and says in noted:
            return noted
    return noted


def planted(build: Build, kernel: str) -> tuple[str, Launch]:
    name, choices = KERNELS[kernel]
    ptx, launch = build(name, *TILES, **choices)
    return ptx, launch


def change(ptx: str, pattern: str, to: str, count: int = 1) -> str:
    out, found = re.subn(pattern, to, ptx, count=count, flags=re.M)
    assert found, f"the kernel has no {pattern!r}"
    return out


@pytest.mark.parametrize("kernel", KERNELS)
def test_unchanged(build: Build, run: Run, kernel: str) -> None:
    assert verdict(run, *planted(build, kernel), schedules=(0, 1)) == ""


WAIT = re.compile(r"^\tmbarrier\.try_wait.*\n\t@!%pw bra .*\n", re.M)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_dropped_mbarrier_wait_shows(build: Build, run: Run, kernel: str) -> None:
    ptx, launch = planted(build, kernel)
    waits = list(WAIT.finditer(ptx))
    assert len(waits) >= 2
    for wait in waits:
        assert verdict(run, ptx[: wait.start()] + ptx[wait.end() :], launch), wait[0]


@pytest.mark.parametrize("kernel", ["hopper", "blackwell"])
def test_every_stuck_parity_shows(build: Build, run: Run, kernel: str) -> None:
    ptx, launch = planted(build, kernel)
    for wait in re.finditer(r"try_wait\S+ %pw, \[[^]]*\], (%r\d+);", ptx):
        for parity in "01":
            stuck = ptx[: wait.start(1)] + parity + ptx[wait.end(1) :]
            assert verdict(run, stuck, launch), (wait[0], parity)


MMA = r"(wgmma\.mma_async|tcgen05\.mma)"
TEXT_FAULTS = {
    # name: kernels, pattern, replacement, what must be in the verdict
    "swizzle code of the descriptor": (
        ("hopper", "blackwell"), r"0x4000(40|00)4000000000", r"0x8000\g<1>4000000000", ""),
    "stride of the descriptor": (
        ("hopper", "blackwell"), r"0x4000(40|00)4000000000", r"0x4000\g<1>2000000000", ""),
    "version bit missing": (
        ("blackwell",), r"0x4000404000000000", "0x4000004000000000", "bits 46-48"),
    "version bit on Hopper": (("hopper",), r"0x4000004000000000", "0x4000404000000000", "bits 46"),
    "descriptor address field": (("hopper", "blackwell"), r"(bfe.*), 4, 14;", r"\1, 5, 14;", ""),
    "K step of a descriptor": (
        ("hopper", "blackwell"), r"(add\.s64 %rd\d+, %rd\d+, \d*[02468])(;\n(?:\t(?!add.s64).*\n)*"
        r"\t" + MMA + ")", r"\g<1>2\2", ""),
    "accumulate stuck at 1": (
        ("hopper", "blackwell"), MMA + r"(.*), %p\d+(;|, 1, 1, 0, 0;)", r"\1\2, 1\3", "fault"),
    "accumulate stuck at 0": (
        ("hopper", "blackwell"), MMA + r"(.*), 1(;|, 1, 1, 0, 0;)", r"\1\2, 0\3", "wrong"),
    "M of the instruction descriptor": (("blackwell",), r"\b135266320\b", "68157456", ""),
    "N of the instruction descriptor": (("blackwell",), r"\b135266320\b", "135004176", ""),
    "N beyond the allocation": (("blackwell",), r"\b135266320\b", "138412048", "fault"),
    "bfloat16 operands": (("blackwell",), r"\b135266320\b", "135267472", "wrong"),
    "M of the CTA, not of the pair": (("blackwell pair",), r"\b269484048\b", "135266320", ""),
    "lane quarter": (("blackwell",), r"shl\.b32 (%r\d+), (%r\d+), 21;", r"shl.b32 \1, \2, 20;",
                     "out of reach"),
    "swapped halves": (("hopper", "blackwell"), r"(cvt\.rn\.f16x2\.f32 %\w+), (%\w+), (%\w+);",
                       r"\1, \3, \2;", "wrong"),
    "too few bytes expected": (("hopper", "blackwell"), r"(expect_tx.*), (\d+);", r"\1, 16;", ""),
    "too many bytes expected": (
        ("hopper", "blackwell"), r"(expect_tx.*), (\d+);", r"\1, \g<2>0;", "deadlock"),
    "an arrival too many expected": (
        ("hopper", "blackwell"), r"(mbarrier\.init.*), (\d+);", r"\1, 100;", "deadlock"),
    "commit dropped": (("blackwell", "blackwell pair"), r"^\ttcgen05\.commit.*\n", "", "fault"),
    "commit to one CTA of the pair": (
        ("blackwell pair",), r"mov\.b16 %rh, 3;", "mov.b16 %rh, 1;", "fault"),
    "wait::ld dropped": (("blackwell",), r"^\ttcgen05\.wait::ld.*\n", "", "no wait::ld"),
    "wait_group dropped": (("hopper",), r"^\twgmma\.wait_group\S* 0;\n", "", "no wait_group"),
    "wgmma.fence dropped": (("hopper",), r"^\twgmma\.fence.*\n", "", "wgmma.fence"),
    "wgmma commit dropped": (("hopper",), r"^\twgmma\.commit.*\n", "", "fault"),
    "dealloc dropped": (("blackwell",), r"^\ttcgen05\.dealloc.*\n", "", "were not deallocated"),
    "alloc of fewer columns": (("blackwell",), r"(tcgen05\.alloc.*), 128;", r"\1, 64;", "fault"),
    "fence::before dropped": (("blackwell",), r"^\ttcgen05\.fence::before.*\n", "", "before_thr"),
    "proxy fence dropped": (("hopper", "blackwell"), r"^\tfence\.proxy\.async.*\n", "", "proxy"),
    "init fence dropped": (("hopper", "blackwell"), r"^\tfence\.mbarrier_init.*\n", "", "init"),
    "barrier mask of the pair dropped": (
        ("blackwell pair",), r"0xFEFFFFFF", "0xFFFFFFFF", "fault"),
    "named barrier dropped": (("hopper",), r"^\tbar\.sync 1, .*\n", "", ""),
    "named barrier of fewer": (("hopper",), r"(bar\.sync 1), 128;", r"\1, 96;", ""),
    "named barrier of more": (("hopper",), r"(bar\.sync 1), 128;", r"\1, 160;", "deadlock"),
    "store's wait dropped": (("hopper",), r"^\tcp\.async\.bulk\.wait_group.*\n", "", "bulk store"),
    "store coordinates swapped": (
        ("hopper", "blackwell"), r"(bulk_group \[%rd\d+, \{)(%r\d+), (%r\d+)", r"\1\3, \2",
        "wrong"),
    "multicast mask": (("hopper cluster",), r"mov\.b16 %rh, 3;", "mov.b16 %rh, 1;", ""),
    "last cluster wait dropped": (
        ("hopper split",), r"^\tbarrier\.cluster\.wait\.acquire\.aligned;\n\tret", "\tret",
        "fault"),
    "parts waited for at CTA scope": (
        ("hopper split",), r"try_wait\.parity\.acquire\.cluster", "try_wait.parity",
        "narrow scope"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TEXT_FAULTS)
def test_planted_in_the_text(build: Build, run: Run, fault: str) -> None:
    kernels, pattern, to, says = TEXT_FAULTS[fault]
    for kernel in kernels:
        ptx, launch = planted(build, kernel)
        got = verdict(run, change(ptx, pattern, to), launch, says)
        assert got and says in got, (kernel, got)


@pytest.mark.parametrize("kernel", ["hopper", pytest.param("blackwell", marks=pytest.mark.slow)])
def test_every_lane_issues(build: Build, run: Run, kernel: str) -> None:
    """Without the election, 32 lanes load and multiply."""
    ptx, launch = planted(build, kernel)
    elections = list(
        re.finditer(r"^\t@!%pe bra (\w+);\n(?=(?:\t.*\n|WAIT.*\n|LOOP.*\n)*)", ptx, re.M)
    )
    shown = [verdict(run, ptx[: e.start()] + ptx[e.end() :], launch) for e in elections]
    assert sum(bool(v) for v in shown) >= 2


@pytest.mark.parametrize("kernel", ["hopper", "blackwell"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_planted_in_the_tensor_map(build: Build, run: Run, kernel: str, which: int) -> None:
    """A map without the swizzle that the descriptors, or the epilogue's addresses, expect."""
    ptx, launch = planted(build, kernel)
    param = launch.params[which]
    assert isinstance(param, TensorMapParam) and param.swizzle == 128
    params = list(launch.params)
    params[which] = replace(param, swizzle=0)
    assert verdict(run, ptx, replace(launch, params=tuple(params))) == "wrong"


def test_a_deadlock_names_every_blocked_warp(build: Build, run: Run) -> None:
    ptx, launch = planted(build, "hopper")
    got = verdict(run, change(ptx, r"^\tmbarrier\.arrive\.expect_tx.*\n", ""), launch)
    assert "deadlock" in got
    blocked = re.findall(r"warp (\d), lanes 0x\w+, line \d+: `(?:mbarrier.try_wait|bar.warp)", got)
    assert {int(w) for w in blocked} >= {0, 1, 2, 3, 4}
    assert "arrivals and" in got and "bytes outstanding" in got
