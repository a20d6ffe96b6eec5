"""Whatever the masks allow builds, is proven, assembles and shows what it claims.

A seeded few a target; `ptxflow survey` is the long version, for 2,000 random shapes.
"""

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.backend.ptxas import assemble
from ptxflow.compiler.backend.ptxas import check as complaints
from ptxflow.compiler.compilation import CompiledKernel, compile_kernel, compile_many
from ptxflow.compiler.device import device
from ptxflow.compiler.errors import IllegalStrategy
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify import survey
from ptxflow.eval.verify.draws import draw, draw_shapes
from tests.families import ROWS, sampling
from tests.families.gemm import B200, CASES, GEMM, H200, problem, problem_for, strategy
from tests.row import Case, Row, cases, space

CLAIMS = {
    "h200": {"wgmma f16", "TMA tensor load"},
    "b200": {"tcgen05.mma f16/bf16/tf32", "TMA tensor load", "tcgen05.ld", "tcgen05.commit"},
}


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CLAIMS)
def test_a_seeded_few(name: str, count: int):
    dev = device(name)
    definitions = ["gemm_n128_k2048", "gemm_n256_k7168", "gemm_n4096_k4096", "gemm_n28672_k4096"]
    jobs = draw(definitions, {"M": [1, 1000]}, dev, count, seed=7)
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


@pytest.mark.parametrize(("row", "case"), cases(ROWS[:1], "machine"))
def test_every_path_through_the_builders(row: Row, case: Case):
    s, dev = case.strategy, case.device
    kernel = compile_kernel(problem_for(s), s, dev)
    assert kernel.sass.ok and kernel.cubin
    assert len(kernel.checks) == 1 + len(GEMM.trips(problem_for(s), s, dev)) + 1  # and bounds


@pytest.mark.slow
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
    found = space(p, dev)
    s = found.strategy(int(found.codes[pick % len(found)]))
    assert compile_kernel(p, s, dev).sass.ok


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_a_random_shape_of_every_family_assembles_without_spills(dev):  # type: ignore[no-untyped-def]
    jobs, _ = draw_shapes([], dev, 1, seed=2)
    assert len(jobs) >= 11
    for p, s in jobs:
        ptx = write(family(p.family).build(p, s, dev), dev)
        assert complaints(assemble(ptx, dev.arch)) == [], (p, s)


@pytest.mark.parametrize(
    ("dev", "filters", "vocab"), [(H200, sampling.K, 202048), (B200, sampling.P, 201088)]
)
def test_rows_in_registers_fit_at_large_vocabularies(dev, filters, vocab):  # type: ignore[no-untyped-def]
    found = space(sampling.problem(vocab, 64, filters), dev)
    kept = [c for c, r in zip(found.codes, found.fields().residency, strict=True)
            if r == "registers"]  # fmt: skip
    assert len(kept) == 48
    for s in [found.strategy(int(c)) for c in kept[::16]]:
        ptx = write(found.family.build(found.problem, s, dev), dev)
        assert complaints(assemble(ptx, dev.arch)) == [], s


def test_the_survey_of_random_shapes_counts_by_family(capsys, monkeypatch):  # type: ignore[no-untyped-def]
    few = ["--families", "rmsnorm", "sampling", "--samples", "4", "--jobs", "1"]
    assert survey.main(few) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 strategies build" in shown and "\nsampling  2 " in shown

    def refuse(tasks: list[object]) -> list[Exception]:
        return [IllegalStrategy("no such thing") for _ in tasks]

    monkeypatch.setattr(survey, "compile_chunk", refuse)
    assert survey.main([*few, "--device", "h200"]) == 1
    shown = capsys.readouterr().out
    assert "{'rules': 4}" in shown and "vocab_size=" in shown and "residency=" in shown
    for wrong in (["--axes", "M=1"], ["--families", "gemm", "--definition", "gemm_n128_k2048"]):
        assert survey.main(wrong) == 2


def test_an_illegal_strategy_is_told_every_rule_it_breaks():
    with pytest.raises(IllegalStrategy) as refusal:
        compile_kernel(problem(), strategy(cta_group=2, persistent=1, warp_specialized=0), H200)
    message = str(refusal.value)
    for part in ("gemm_n4096_k4096", "M=4096", "h200", "needs tcgen05", "specialises its warps"):
        assert part in message
    with pytest.raises(IllegalStrategy, match="num_stages must be one of"):
        compile_kernel(problem(), strategy(num_stages=99), H200)


def test_an_ignored_register_split_is_noticed():
    """The same kernel without its launch bound: ptxas drops setmaxnreg, and we complain."""
    dev, _, s = CASES[0]
    kernel = compile_kernel(problem(), s, dev)
    unbound = kernel.ptx.replace(".reqntid 384, 1, 1\n", "")
    assert unbound != kernel.ptx
    assert any("C7508" in c for c in complaints(assemble(unbound, dev.arch)))
