"""Whatever the masks allow builds, is proven, assembles and shows what it claims.

A seeded 40 a target; `python -m ptxflow.eval.survey --samples 2000` is the long version.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from ptxflow.compiler.compile import CompiledKernel, compile_kernel, compile_many
from ptxflow.compiler.device import device
from ptxflow.compiler.errors import IllegalStrategy
from ptxflow.compiler.ptxas import assemble
from ptxflow.compiler.ptxas import check as complaints
from ptxflow.env.space import enumerate_space
from ptxflow.eval.drawing import draw
from tests.gemm_cases import B200, CASES, GEMM, H200, IDS, problem, problem_for, strategy

CLAIMS = {
    "h200": {"wgmma f16", "TMA tensor load"},
    "b200": {"tcgen05.mma f16/bf16/tf32", "TMA tensor load", "tcgen05.ld", "tcgen05.commit"},
}


@pytest.mark.parametrize("name", ["h200", "b200"])
def test_a_seeded_forty(name: str):
    dev = device(name)
    definitions = ["gemm_n128_k2048", "gemm_n256_k7168", "gemm_n4096_k4096", "gemm_n28672_k4096"]
    jobs = draw(definitions, {"M": [1, 1000]}, dev, 40, seed=7)
    outcomes = compile_many(jobs, dev, workers=1)
    assert [o for o in outcomes if not isinstance(o, CompiledKernel)] == []
    for kernel in outcomes:
        assert isinstance(kernel, CompiledKernel)
        shown = {t for t, n in kernel.sass.counts.items() if n}
        assert shown >= CLAIMS[name] - (
            {"TMA tensor load"} if kernel.strategy.cta_group == 2 else set()
        )
        assert kernel.usage.spill_stores == kernel.usage.stack == 0
        if kernel.strategy.producer_regs:
            assert "setmaxnreg.dec" in shown
        else:
            resources = GEMM.resources(kernel.strategy.fields(), kernel.problem, dev)
            assert kernel.usage.registers <= resources.registers


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_through_the_builders(dev, name, s):  # type: ignore[no-untyped-def]
    kernel = compile_kernel(problem_for(s), s, dev)
    assert kernel.sass.ok and kernel.cubin
    assert len(kernel.checks) == 1 + len(GEMM.trips(problem_for(s), s, dev))


@profile(max_examples=15)
@given(
    m=st.integers(1, 20000),
    n=st.integers(1, 4000).map(lambda i: 8 * i),
    k=st.integers(1, 2000).map(lambda i: 8 * i),
    pick=st.integers(0, 2**31),
    dev=st.sampled_from([H200, B200]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
)
def test_legal_by_mask_means_proven_and_assembled(m, n, k, pick, dev, dtype):  # type: ignore[no-untyped-def]
    """Any problem with rows of whole 16-byte units, any strategy that the mask allows."""
    p = problem(m, n, k, dtype)
    space = enumerate_space(GEMM, p, dev)
    s = space.strategy(int(space.codes[pick % len(space)]))
    kernel = compile_kernel(p, s, dev)
    assert kernel.sass.ok


def test_an_illegal_strategy_is_told_every_rule_it_breaks():
    with pytest.raises(IllegalStrategy) as refusal:
        compile_kernel(problem(), strategy(cta_group=2, persistent=1, warp_specialized=0), H200)
    message = str(refusal.value)
    for part in ("gemm_n4096_k4096", "M=4096", "h200", "needs tcgen05", "specialises its warps"):
        assert part in message
    with pytest.raises(IllegalStrategy, match="num_stages must be one of"):
        compile_kernel(problem(), strategy(num_stages=9), H200)


def test_an_ignored_register_split_is_noticed():
    """The same kernel without its launch bound: ptxas drops setmaxnreg, and we complain."""
    dev, _, s = CASES[0]
    kernel = compile_kernel(problem(), s, dev)
    unbound = kernel.ptx.replace(".reqntid 384, 1, 1\n", "")
    assert unbound != kernel.ptx
    assert any("C7508" in c for c in complaints(assemble(unbound, dev.arch)))
