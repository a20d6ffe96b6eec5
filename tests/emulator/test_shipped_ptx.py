"""The bugs that shipped in public kernels, as PTX: check-ptx finds each by the rule meant for it,
and nothing in the text without it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.launch import Launch
from ptxflow.compiler.lower import layout
from ptxflow.eval.verify.foreign import Verdict, check
from ptxflow.eval.verify.launch_file import parse
from tests.emulator.described import described
from tests.machine.test_shipped_bugs import BUGS

Build = Callable[..., tuple[str, Launch]]
M, N, K = 300, 128, 448  # 7 steps through 2 stages
PAIR: dict[str, int | str] = {
    "persistent": 1, "acc_buffers": 2, "cta_group": 2, "cluster": "2x1",
}  # fmt: skip

# Replays of few statements: the rule that finds them, and operands whose boxes have half the rows.
SMALL = {
    "a CTA-scope arrive used across a cluster": ("race", "AB"),
    "arrive without wait on a named barrier": ("convergence", ""),
    "a producer tail that deadlocks": ("deadlock", ""),
    "a stage released before the proxy fence": ("proxy-fence", ""),
    "a hang on empty tiles": ("deadlock", ""),
    "a warp that never gives its registers back": ("deadlock", ""),
    "a missing wait on dependent launch": ("dependent-launch", ""),
}

# Replays of a GEMM: device, choices, the change of its text, the rules that find it.
GEMM: dict[str, tuple[str, dict[str, int | str], str, str, set[str]]] = {
    "tx bytes not doubled for a CTA pair": (
        "b200", PAIR, r"(expect_tx.*), 40960;", r"\1, 20480;", {"in-flight"}),
    "parity not taken modulo 2": (
        "h200", {}, r"and\.b32 (%r\d+), (%r\d+), 1;\n\txor\.b32 (%r\d+), \1, 1;",
        r"add.u32 \3, \2, 1;", {"mbarrier-count"}),
    "a commit that signals one CTA only": (
        "b200", PAIR, r"mov\.b16 %rh, 3;", "mov.b16 %rh, 1;", {"deadlock"}),
    "CTAs of a cluster on different tiles": (
        "h200", {"cluster": "2x1", "epilogue": "direct"},
        r"(shr\.u32 %r\d+, %r2,) 1;", r"\1 0;", {"value"}),
    "TMEM freed before the last load": (
        "b200", {"epilogue": "direct"}, r"\tbar\.sync 0;\n(?=(.*\n){0,9}.*dealloc)", "",
        {"out-of-bounds"}),
    "no fence after mbarrier.init": (
        "h200", {}, r"\tfence\.mbarrier_init\S*\n", "", {"mbarrier-lifetime"}),
    "no expect_tx": (
        "h200", {}, r"arrive\.expect_tx(.*), \d+;", r"arrive\1;", {"in-flight", "mbarrier-count"}),
}  # fmt: skip


def rules(verdict: Verdict) -> set[str]:
    assert not verdict.stopped
    return {f.rule.id for f in verdict.findings}


@pytest.mark.parametrize("name", SMALL)
def test_a_replay_of_few_statements(name: str) -> None:
    rule, halves = SMALL[name]
    for broken in (False, True):
        tree, _, dev = BUGS[name][0](broken)
        info, ptx = tree.arg, write(tree, dev)
        if name == "a hang on empty tiles":  # it is written with two steps
            ptx, found = re.subn(r"(setp\.\w+\.u32 %p\d+, %r\d+), 2;", r"\1, 0;", ptx)
            assert found
        maps: list[dict[str, Any]] = [
            {"tensor_map": x, "dims": [16, 256], "strides": [32],
             "box": [16, 32 if x in halves else 64]} for x in "ABC"
        ]  # fmt: skip
        words = {"dtype": "float16", "shape": [256, 16], "contents": {"random": "normal"}}
        launch = {
            "version": 1, "grid": [info.cluster], "block": [32 * info.warps],
            "cluster": [info.cluster], "shared_bytes": layout(info).smem_bytes,
            "buffers": {x: words for x in "ABC"}, "params": [*maps, {"buffer": "C"}],
            "dependent": ["A"] if info.dependent else [],
        }  # fmt: skip
        verdict = check(ptx, parse(launch))
        assert rules(verdict) == ({rule} if broken else set())
        assert all(f.line or rule == "value" for f in verdict.findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", GEMM)
def test_a_replay_of_a_gemm(name: str, build: Build, tmp_path: Path) -> None:
    device, choices, pattern, to, found_by = GEMM[name]
    ptx, launch = build(device, M, N, K, **choices)
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-4, 5, (rows, K)).astype(np.float16) for rows in (M, N))
    right = (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)
    given = described(
        tmp_path, launch, {"A": a, "B": b, "C": np.full((M, N), np.nan, np.float16)},
        {"M": M, "N": N, "K": K}, expected={"C": (right, 0.0, 0.0)},
    )  # fmt: skip
    broken, count = re.subn(pattern, to, ptx)
    assert count
    assert rules(check(ptx, given, 2)) == set()
    assert rules(check(broken, given)) & found_by


HEAD = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 x)
{
    .shared .align 16 .b32 slot;
    .reg .b32 %a, %t, %c;
    .reg .b64 %x;
    .reg .pred %p, %q;
    ld.param.u64 %x, [x];
"""
ALLOC = """    mov.u32 %t, %warpid;
    setp.eq.u32 %p, %t, 0;
    @!%p bra USE;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
USE:
    BARRIER
    ld.shared.b32 %a, [slot];
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    @%p tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a, 32;
    ret;
}
"""
COUNTER = """    mov.u32 %t, %tid.x;
    setp.eq.u32 %p, %t, 0;
    @!%p bra DONE;
    atom.ORDER.gpu.global.add.u32 %c, [%x], 1;
    setp.eq.u32 %q, %c, 1;
    mov.u32 %a, 0;
    @%q st.global.u32 [%x], %a;
DONE:
    ret;
}
"""
BULK = """    .shared .align 16 .b8 tile[256];
    .shared .align 8 .b64 full;
    mov.u32 %t, %tid.x;
    setp.eq.u32 %p, %t, 0;
    @!%p bra WAIT;
    mbarrier.init.shared::cta.b64 [full], 1;
    FENCE
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%x], 256, [full];
WAIT:
    bar.sync 0;
LOOP:
    mbarrier.try_wait.parity.shared::cta.b64 %q, [full], 0;
    @!%q bra LOOP;
    ld.shared.b32 %a, [tile];
    ret;
}
"""
TEXTS = {
    "the address of tensor memory is read before the allocation": (
        ALLOC, ("BARRIER", "bar.sync 0;"), ("BARRIER", ""), {"uninitialized", "race"}),
    "a counter is reset by the last CTA, unordered with the others": (
        COUNTER, ("ORDER", "acq_rel"), ("ORDER", "relaxed"), {"race"}),
    "an mbarrier's init is not made known to the asynchronous proxy": (
        BULK, ("FENCE", "fence.proxy.async.shared::cta;"), ("FENCE", ""), {"mbarrier-lifetime"}),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_replay_in_ptx(name: str) -> None:
    text, right, wrong, found_by = TEXTS[name]
    words = {"dtype": "uint32", "shape": [64], "contents": "zeros"}
    given = parse({"version": 1, "grid": [2], "block": [64], "buffers": {"x": words},
                   "params": [{"buffer": "x"}]})  # fmt: skip
    assert rules(check(HEAD + text.replace(*right), given)) == set()
    assert rules(check(HEAD + text.replace(*wrong), given)) & found_by


def test_every_bug_is_replayed() -> None:
    assert {*SMALL, *GEMM} == {*BUGS}
