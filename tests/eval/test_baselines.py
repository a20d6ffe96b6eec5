"""Baselines are compared before they are timed: who differs says how, who is wrong is absent."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ptxflow.env.measurements import COPY
from ptxflow.env.tasks.definition import load, names
from ptxflow.eval.bench.baselines import cublaslt, is_eager_reference, moe, sparse
from ptxflow.eval.bench.baselines import registry as baselines
from ptxflow.eval.bench.baselines.baseline import Given, Unsupported
from ptxflow.eval.bench.baselines.registry import Baselines
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.records import best_baseline
from ptxflow.eval.bench.references.moe import dequantise
from ptxflow.eval.bench.session import FEW_ROUNDS, shares
from ptxflow.eval.bench.timing import time_interleaved
from tests.builders import python
from tests.eval.benches import bench_of, beside, given, install, ready

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
    monkeypatch.delitem(baselines.BASELINES["rmsnorm"], "triton")
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

    for library in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, library, None)  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "compile", broken)
    found = small("rmsnorm_h128", batch_size=5)
    assert list(found.calls(every=True)) == [COPY, "torch.rms_norm"]
    assert found.absent["torch.compile"] == "RuntimeError: no compiler here"
    for library in ("flashinfer", "triton"):
        assert found.absent[library].startswith("ModuleNotFoundError: ")


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

    def watched(baseline: str, maker: Callable[..., Any]) -> Callable[..., Any]:
        def make(given: Any) -> Any:
            made.append(baseline)
            return maker(given)

        return make

    for op_type, makers in baselines.BASELINES.items():
        held = {name: watched(name, maker) for name, maker in makers.items()}
        monkeypatch.setitem(baselines.BASELINES, op_type, held)
    found = small(name, **axes)
    assert list(found.calls(every=False)) == [found.yardstick] == [yardstick] == made
    found.calls(every=False)
    assert made == [yardstick]  # once


def test_cublas_lt_is_the_fastest_of_its_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Callable[..., Any]] = {str(us): lambda us=us: us for us in (9.0, 5.0, 7.0)}
    monkeypatch.setattr(cublaslt, "L2Flush", lambda: None)
    monkeypatch.setattr(cublaslt, "time_interleaved", lambda calls, rounds, flush: {
        name: [99.0, *[call()] * (rounds[name] - 1)] for name, call in calls.items()})  # fmt: skip
    assert cublaslt.fastest([*made.values()])() == 5.0
    with pytest.raises(Unsupported, match="propose nothing"):
        cublaslt.fastest([])


def test_without_cuda_there_is_no_cublas_lt() -> None:
    found = small("gemm_n128_k2048", M=6)
    assert "cublasLt" not in found.calls(every=True)
    assert "cublasLt" in found.absent


def test_a_copy_moves_the_compulsory_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    ones = torch.ones

    def watched(size: int, **options: Any) -> Tensor:
        sizes.append(size)
        return ones(size, **options)

    monkeypatch.setattr(torch, "ones", watched)
    small("rmsnorm_h128", batch_size=5).calls(every=False)
    assert sizes == [2 * (2 * 5 + 1) * 128 // 2]  # hidden states, output and the weight


@pytest.mark.parametrize("fate", ["same", "wrong", "not captured"])
@pytest.mark.parametrize("name", NORMS)
def test_a_call_that_keeps_the_host_comes_from_a_graph_that_computes_it(
    monkeypatch: pytest.MonkeyPatch, flashinfer: FlashInfer, name: str, fate: str
) -> None:
    @contextmanager
    def capturing(graph: object) -> Iterator[None]:
        if fate == "not captured":
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        flashinfer.times = float(fate == "same")
        yield
        flashinfer.times = 1.0

    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(Baselines, "_keeps_host", lambda *_: True)
    found = small(name, batch_size=5)
    assert len(found.calls(every=True, without=[COPY])) == 3
    returns = fate == "same" and name == NORMS[0]  # the other works in place
    assert found.replayed[2:] == ["flashinfer"] * returns
    assert found.replayed[:2] == ["torch.rms_norm", "torch.compile"] * (fate != "not captured")
    assert found.about() == ({"replayed": found.replayed} if found.replayed else {})


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("peer", ["flashinfer", "flashinfer-radix"])
def test_flashinfer_samples_inside_its_own_ranges(
    filters: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = load(f"{filters}_sampling_from_probs_v128256").resized(vocab_size=VOCABULARY)
    seen: list[Tensor] = []

    def most_probable(probs: Tensor, *limits: Tensor, **options: Any) -> Tensor:
        seen[:] = limits
        return probs.argmax(-1).int()

    kind = f"sampling__{filters}" if peer == "flashinfer" else "cake_sampling__top_k_top_p"
    function = f"{kind}_sampling_from_probs"
    install(monkeypatch, **{function: most_probable})
    found = beside(definition, {"batch_size": 10}, 1)
    assert "torch" in found.calls(every=True)
    if (peer, filters) == ("flashinfer-radix", "top_p"):
        assert found.absent[peer] == "it takes a top_k"
        return
    assert peer in found.calls(every=True)
    bounds = {"top_k": (1, VOCABULARY - 1), "top_p": (2.0**-10, 1 - 2.0**-10)}
    names = [n for n in bounds if n in found.definition.inputs]
    for name, limit in zip(names, seen, strict=True):
        low, high = bounds[name]
        assert low <= limit.min() and limit.max() <= high
        assert not torch.equal(limit, found.bench.tensors[name])  # there are rows outside
    install(monkeypatch, **{function: lambda probs, *a, **o: probs.argmin(-1)})
    found = beside(definition, {"batch_size": 10}, 1)
    assert peer not in found.calls(every=True)
    assert found.absent[peer].startswith("wrong: samples: ")


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
    """Of an operator's baselines those that are made of several PyTorch operations, alone."""
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
    assert python("-c", code).returncode == 0


INDEXER = "dsa_topk_indexer_fp8_h64_d128_topk256_ps64"
MOE = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
SPARSE = [name for name in names() if "sparse_attention" in name]
SPARSE_SIZES = {
    "num_qo_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16, "topk": 40,
    "num_experts": 32, "num_local_experts": 4, "hidden_size": 256, "intermediate_size": 128,
    "gemm1_out_size": 256, "num_hidden_blocks": 2, "num_intermediate_blocks": 1,
    "num_gemm1_out_blocks": 2,
}  # fmt: skip
PLACES: list[tuple[str, dict[str, int]]] = [
    *((name, {"num_tokens": 20, "num_pages": 50}) for name in SPARSE),
    (SPARSE[0], {"num_tokens": 3, "num_pages": 9}),  # fewer slots than a token may choose
    (INDEXER, {"batch_size": 20, "max_num_pages": 9, "num_pages": 60}),
    (INDEXER, {"batch_size": 3, "max_num_pages": 2, "num_pages": 9}),
    (MOE, {"seq_len": 20}),
    (MOE, {"seq_len": 1}),
    (MOE, {"seq_len": moe.COUNTED}),
]


def resized(name: str) -> Any:
    definition = load(name)
    fixed = {"topk", "page_size"} if name == INDEXER else {"page_size"}
    sizes = {a: v for a, v in SPARSE_SIZES.items() if a in set(definition.const_axes) - fixed}
    return definition.resized(**sizes)


COMPILE = torch.compile


def test_what_is_compiled_for_a_workload_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more workloads than torch compiles one function for; none is compiled when it is timed."""
    made: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    calls: list[Callable[[], Any]] = []
    for n in range(1, 12):
        found = small("rmsnorm_h128", batch_size=n)
        calls.append(found.calls(every=True)["torch.compile"])
    for _ in range(2):
        assert [len(call()) for call in calls] == [*range(1, 12)]
        assert len(made) == len(calls)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda formula, **options: formula)


@pytest.mark.parametrize(("name", "axes"), PLACES)
def test_every_formula_computes_it_on_every_seed(name: str, axes: dict[str, int]) -> None:
    found = beside(resized(name), axes)
    bench, calls = found.bench, found.calls(every=True)
    formulas = [baseline for baseline in calls if baseline.startswith("torch")]
    assert formulas == ["torch.grouped" if name == MOE else "torch", "torch.compile"]
    assert found.disagree == {} and next(iter(calls)) == COPY
    assert not any(baseline.startswith("torch") for baseline in found.absent)
    for seed in bench.seeds[::-1]:
        inputs, expected = bench.fill(seed)
        for baseline in formulas:
            made = ready(baseline, Given(found.definition, bench.tensors, bench.scalars, 0))
            for out, (output, right) in zip(made.outputs(), expected.items(), strict=True):
                assert out.dtype == bench.case.outputs[output][1]
                assert not compare(out, right, bench.case.tolerance[output]).wrong
        assert not any(bool(count) for count in bench.disturbances(inputs).values())


def test_a_moe_follows_weights_that_change() -> None:
    """They are widened before a call, and again before it is compared."""
    definition = resized(MOE)
    bench = bench_of(definition, {"seq_len": 20})
    bench.fill(1)
    made = ready("torch.grouped", Given(definition, bench.tensors, bench.scalars, 0))
    expected = bench.fill(2)[1]["output"]
    limit = bench.case.tolerance["output"]
    assert not compare(made.outputs()[0], expected, limit).wrong
    assert compare(made.call(), expected, limit).wrong


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("tokens", [1, moe.COUNTED - 1, moe.COUNTED])
def test_a_count_of_rows_changes_nothing(tokens: int, elsewhere: bool) -> None:
    definition = resized(MOE)
    inputs = make_inputs(definition, {"seq_len": tokens}, 3)
    if elsewhere:  # no token chooses an expert of this rank
        inputs["routing_bias"][inputs["local_expert_offset"] :][:4] = -1e3
    counted = moe.arguments(given(definition, inputs))
    assert counted[-1] == (tokens >= moe.COUNTED)
    one, other = (moe.experts(*[*counted[:-1], flag]) for flag in (False, True))
    assert torch.equal(one, other)
    assert bool(one.any()) == (not elsewhere)


def test_nothing_waits_for_the_device() -> None:
    """Tensors without values have no host to be read on."""
    for name, axes in (PLACES[0], PLACES[4], PLACES[6]):
        definition = resized(name)
        made = make_inputs(definition, axes, 1, torch.device("meta"))
        shapes = definition.shapes(definition.outputs, definition.bind(axes))
        for n, shape in shapes.items():
            made[n] = torch.empty(shape or (), device="meta")
        compiled = ready("torch.compile", given(definition, made))
        for out, shape in zip(compiled.outputs(), shapes.values(), strict=True):
            assert out.shape == shape


def test_scores_keep_float32_on_a_gpu() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(3, n, 512, dtype=torch.bfloat16, device="cuda") for n in (16, 256))
        z = sparse.product(q, k.mT)
        assert (z.shape, z.dtype) == ((3, 16, 256), torch.float32)


def cutlass_fused_moe(
    input: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor,
    fc1_expert_weights: Tensor, fc2_expert_weights: Tensor, output_dtype: torch.dtype,
    quant_scales: list[Tensor], ep_size: int, ep_rank: int, output: Tensor,
    use_deepseek_fp8_block_scale: bool,
) -> list[Tensor]:  # fmt: skip
    """The library's function with its checks, computed choice by choice."""
    assert use_deepseek_fp8_block_scale and output_dtype == torch.bfloat16 == input.dtype
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == torch.float32
    assert fc1_expert_weights.dtype == fc2_expert_weights.dtype == torch.float8_e4m3fn
    assert {len(scale.shape) for scale in quant_scales} == {3}
    local = len(fc1_expert_weights)
    assert ep_size * local == 32 and 0 <= ep_rank < ep_size
    total = torch.zeros(output.shape)
    for t, place in (token_selected_experts // local == ep_rank).nonzero().tolist():
        expert = int(token_selected_experts[t, place]) - ep_rank * local
        up, down = (
            dequantise(w[expert], scale[expert])
            for w, scale in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)
        )
        linear, gate = (up @ input[t].float()).chunk(2)
        total[t] += token_final_scales[t, place] * (down @ (linear * gate.sigmoid() * gate))
    output.copy_(total)
    return [output]


def test_flashinfer_gets_a_choice_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fused_moe__cutlass_fused_moe=cutlass_fused_moe)
    found = beside(resized(MOE), {"seq_len": 21})
    assert "flashinfer" in found.calls(every=True) and found.about() == {}
    held = {**found.bench.tensors, **found.bench.scalars, "local_expert_offset": 6}
    with pytest.raises(Unsupported, match="ranks of 4 experts"):
        ready("flashinfer", given(found.definition, held))
