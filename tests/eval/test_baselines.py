"""Baselines are compared before they are timed: who differs says how, who is wrong is absent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ptxflow.env.measurements import COPY
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.baselines import is_eager_reference
from ptxflow.eval.bench.baselines import registry as baselines
from ptxflow.eval.bench.baselines.registry import Baselines
from ptxflow.eval.bench.records import best_baseline
from ptxflow.eval.bench.session import FEW_ROUNDS, shares
from ptxflow.eval.bench.timing import time_interleaved
from tests.eval.benches import beside, install

NORMS = ("rmsnorm_h128", "fused_add_rmsnorm_h2048")
VOCABULARY = 1000
FILTERS = ("top_k", "top_p", "top_k_top_p")


def small(name: str, **axes: int) -> Baselines:
    return beside(load(name), axes, 1)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * weight.float()).bfloat16()


class FlashInfer(SimpleNamespace):
    """The library's two norms, computed on the CPU; `times` makes them wrong."""

    times = 1.0

    def rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps) * self.times

    def fused_add_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        total = x.float() + residual.float()
        x.copy_(norm(total, weight, eps) * self.times)
        residual.copy_(total)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    fake = FlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "compile", lambda formula, **options: formula)
    return fake


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.usefixtures("flashinfer")
def test_every_baseline_of_a_norm_computes_it(name: str) -> None:
    found = small(name, batch_size=5)
    calls = found.calls(every=True)
    assert found.absent == {}
    assert list(calls) == [COPY, "torch.rms_norm", "torch.compile", "flashinfer"]
    before = {n: t.clone() for n, t in found.bench.tensors.items() if n in load(name).inputs}
    for call in calls.values():
        call()
    for tensor, value in before.items():  # also after what works in place
        assert torch.equal(found.bench.tensors[tensor], value)


@pytest.mark.parametrize("name", NORMS)
def test_a_library_that_computes_something_else_is_absent(
    name: str, flashinfer: FlashInfer
) -> None:
    flashinfer.times = 1.1
    found = small(name, batch_size=5)
    assert "flashinfer" not in found.calls(every=True)
    assert found.absent["flashinfer"].startswith("wrong: output: ")


def test_a_twentieth_of_an_output_may_differ_and_is_counted(flashinfer: FlashInfer) -> None:
    for wrong, timed in ((32, True), (33, False)):  # of 640

        def careless(x: Tensor, weight: Tensor, eps: float, count: int = wrong) -> Tensor:
            out = norm(x, weight, eps)
            out.view(-1)[:count] += 1.0
            return out

        flashinfer.rmsnorm = careless  # type: ignore[method-assign]
        found = small("rmsnorm_h128", batch_size=5)
        assert ("flashinfer" in found.calls(every=True)) == timed
        if timed:
            off = found.disagree["flashinfer"]["output"]
            assert off is not None and (off["beyond"], off["total"]) == (32, 640)
            assert off["error"] == pytest.approx(1.0, abs=0.02)
        else:
            why = "wrong: output: 33 of 640 elements are wrong, more than 5%"
            assert found.about() == {"absent": {"flashinfer": why}}


def test_who_writes_beside_its_outputs_is_absent(flashinfer: FlashInfer) -> None:
    def rude(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = norm(x, weight, eps)
        x[0, 0] = 7.0
        return out

    flashinfer.rmsnorm = rude  # type: ignore[method-assign]
    found = small("rmsnorm_h128", batch_size=5)
    assert "flashinfer" not in found.calls(every=True)
    assert found.absent["flashinfer"] == "wrong: it changed its inputs, or memory beside them"


def test_what_is_not_installed_or_breaks_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(formula: Any, **options: Any) -> Any:
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "compile", broken)
    found = small("rmsnorm_h128", batch_size=5)
    assert list(found.calls(every=True)) == [COPY, "torch.rms_norm"]
    assert found.absent["torch.compile"] == "RuntimeError: no compiler here"
    assert found.absent["flashinfer"].startswith("ModuleNotFoundError: ")


def test_a_corrupt_context_is_no_absence(flashinfer: FlashInfer) -> None:
    def fault(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    flashinfer.rmsnorm = fault  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error"):
        small("rmsnorm_h128", batch_size=5).calls(every=True)


@pytest.mark.parametrize(
    ("name", "axes", "yardstick"),
    [("gemm_n128_k2048", {"M": 6}, "torch.mm"), ("rmsnorm_h128", {"batch_size": 6}, COPY)],
)
def test_the_yardstick_is_made_alone(
    name: str, axes: dict[str, int], yardstick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def watched(peer: str, maker: Callable[..., Any]) -> Callable[..., Any]:
        def make(given: Any) -> Any:
            made.append(peer)
            return maker(given)

        return make

    for op_type, makers in baselines.BASELINES.items():
        held = {peer: watched(peer, maker) for peer, maker in makers.items()}
        monkeypatch.setitem(baselines.BASELINES, op_type, held)
    found = small(name, **axes)
    assert list(found.calls(every=False)) == [found.yardstick] == [yardstick] == made
    found.calls(every=False)
    assert made == [yardstick]  # once


def test_a_copy_moves_the_compulsory_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    ones = torch.ones

    def watched(size: int, **options: Any) -> Tensor:
        sizes.append(size)
        return ones(size, **options)

    monkeypatch.setattr(torch, "ones", watched)
    small("rmsnorm_h128", batch_size=5).calls(every=False)
    assert sizes == [2 * (2 * 5 + 1) * 128 // 2]  # hidden states, output and the weight


@pytest.mark.parametrize("filters", FILTERS)
def test_flashinfer_samples_inside_its_own_ranges(
    filters: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = load(f"{filters}_sampling_from_probs_v128256").resized(vocab_size=VOCABULARY)
    seen: list[Tensor] = []

    def most_probable(probs: Tensor, *limits: Tensor, **options: Any) -> Tensor:
        seen[:] = limits
        return probs.argmax(-1).int()

    function = f"sampling__{filters}_sampling_from_probs"
    install(monkeypatch, **{function: most_probable})
    found = beside(definition, {"batch_size": 10}, 1)
    assert "flashinfer" in found.calls(every=True) and "torch" in found.calls(every=True)
    bounds = {"top_k": (1, VOCABULARY - 1), "top_p": (2.0**-10, 1 - 2.0**-10)}
    names = [n for n in bounds if n in found.definition.inputs]
    for name, limit in zip(names, seen, strict=True):
        low, high = bounds[name]
        assert low <= limit.min() and limit.max() <= high
        assert not torch.equal(limit, found.bench.tensors[name])  # there are rows outside
    install(monkeypatch, **{function: lambda probs, *a, **o: probs.argmin(-1)})
    found = beside(definition, {"batch_size": 10}, 1)
    assert "flashinfer" not in found.calls(every=True)
    assert found.absent["flashinfer"].startswith("wrong: samples: ")


def test_ratios_are_to_the_best_library() -> None:
    assert best_baseline("rmsnorm", {"torch.rms_norm": 3.0, "flashinfer": 2.0, COPY: 1.0}) == 2.0
    assert best_baseline("rmsnorm", {COPY: 1.0}) is None and best_baseline("rmsnorm", {}) is None
    assert best_baseline("gdn", {COPY: 1.0, "torch": 9.0}) is None
    assert best_baseline("moe", {"torch.compile": 3.0, "torch.grouped": 2.0}) == 3.0


def test_who_is_far_slower_takes_part_in_few_rounds() -> None:
    times = {"ours": 20.0, COPY: 10.0, "flashinfer": 150.0, "torch": 900.0}
    assert shares(times, 40) == {"ours": 40, COPY: 40, "flashinfer": 40, "torch": 10}
    assert shares(times, 7)["torch"] == FEW_ROUNDS
    assert shares({"torch": 900.0, "ours": 300.0}, 7) == {"torch": 7, "ours": 7}


def test_samples_of_few_rounds_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 0.01)
    monkeypatch.setattr("ptxflow.eval.bench.timing._event", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {name: lambda name=name: order.append(name) for name in ("often", "rarely")}
    samples = time_interleaved(calls, {"often": 12, "rarely": 3}, lambda: None)
    assert {name: len(s) for name, s in samples.items()} == {"often": 12, "rarely": 3}
    gaps = [i for i, name in enumerate(order) if name == "rarely"]
    assert all(4 <= b - a <= 6 for a, b in pairwise(gaps))


def test_chains_of_eager_operations_are_no_libraries() -> None:
    """Of every operator's peers, whoever is made of several PyTorch operations, and nobody else."""
    eager = {
        op: [name for name in makers if is_eager_reference(op, name)]
        for op, makers in baselines.BASELINES.items()
    }
    torch_alone = ("sampling", "gdn", "dsa_paged", "dsa_paged indexer", "gqa_paged", "mla_paged")
    chains = {op: ["torch"] for op in torch_alone}
    chains |= {"gdn prefill": ["torch.chunked"], "moe": ["torch.grouped"]}
    assert {op: names for op, names in eager.items() if names} == chains
    assert is_eager_reference("gqa_paged_decode_h32_kv8_d128_ps1", "torch")
    assert not is_eager_reference("fused_add_rmsnorm_h2048", "torch")  # one tuned operation
    code = "import sys, ptxflow.eval.bench.baselines; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
