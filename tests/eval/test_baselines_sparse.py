"""Formulas in torch for sparse attention, its indexer and mixtures compute the definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ptxflow.env.measurements import COPY
from ptxflow.env.tasks.definition import load, names
from ptxflow.eval.bench.baselines import moe, sparse
from ptxflow.eval.bench.baselines.baseline import Given, Unsupported
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references.moe import dequantise
from tests.eval.benches import bench_of, beside, given, install, ready

INDEXER = "dsa_topk_indexer_fp8_h64_d128_topk256_ps64"
MOE = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
SPARSE = [name for name in names() if "sparse_attention" in name]
SIZES = {
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
    sizes = {a: v for a, v in SIZES.items() if a in set(definition.const_axes) - fixed}
    return definition.resized(**sizes)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda formula, **options: formula)


@pytest.mark.parametrize(("name", "axes"), PLACES)
def test_every_formula_computes_it_on_every_seed(name: str, axes: dict[str, int]) -> None:
    found = beside(resized(name), axes)
    bench, calls = found.bench, found.calls(every=True)
    formulas = [peer for peer in calls if peer.startswith("torch")]
    assert formulas == ["torch.grouped" if name == MOE else "torch", "torch.compile"]
    assert found.disagree == {} and next(iter(calls)) == COPY
    assert not any(peer.startswith("torch") for peer in found.absent)
    for seed in bench.seeds[::-1]:
        inputs, expected = bench.fill(seed)
        for peer in formulas:
            made = ready(peer, Given(found.definition, bench.tensors, bench.scalars, 0))
            for out, (output, right) in zip(made.outputs(), expected.items(), strict=True):
                assert out.dtype == bench.case.outputs[output][1]
                assert not compare(out, right, bench.case.tolerance[output]).wrong
        assert not any(bool(count) for count in bench.disturbances(inputs).values())


def test_a_mixture_follows_weights_that_change() -> None:
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
