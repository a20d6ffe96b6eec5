"""Baselines of the gated delta rule."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ptxflow.env.measurements import COPY
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.baselines.registry import makers_of
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.references.gdn import delta_step, spread
from tests.eval.benches import beside, given, install, ready

PREFILL, DECODE = "gdn_prefill_qk16_v32_d128_k_last", "gdn_decode_qk16_v32_d128_k_last"
SIZES = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2}
AXES = {"total_seq_len": 61, "num_seqs": 20, "len_cu_seqlens": 21}  # two have no token


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None, output_state: Tensor | None = None, max_seqlen: int = 0,
) -> Any:  # fmt: skip
    """The library's function with its checks, computed token by token; a sequence without tokens is
    passed over."""
    given = (q, k, v, g, beta, initial_state, cu_seqlens, output, output_state)
    q, k, v, g, beta, state, bounds, output, new = (x for x in given if x is not None)
    assert all(x.is_contiguous() for x in given if x is not None)
    heads, size = max(q.shape[1], v.shape[1]), q.shape[2]
    assert g.shape == beta.shape == (len(q), heads) and output.shape == (len(q), heads, size)
    assert new.shape == state.shape == (len(bounds) - 1, heads, size, size)
    assert output.dtype == q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert {x.dtype for x in (g, beta, state, new)} == {torch.float32}
    assert bounds.dtype == torch.int64 and output_final_state and not use_qk_l2norm_in_kernel
    assert max_seqlen == int(bounds.diff().max())
    for s, (first, end) in enumerate(pairwise(bounds.tolist())):
        now = state[s]
        for t in range(first, end):
            queries, keys = spread(q[t], heads), spread(k[t], heads)
            out, now = delta_step(now, queries, keys, v[t].float(), g[t], beta[t])
            output[t] = out * (scale or size**-0.5)
        if end > first:
            new[s] = now
    return output, new


def test_flashinfer_gets_decays_and_strengths(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, gdn_prefill__chunk_gated_delta_rule=chunk_gated_delta_rule)
    definition = load(PREFILL).resized(**SIZES)
    found = beside(definition, AXES)
    assert 0 in found.bench.fill(1)[0]["cu_seqlens"].diff()
    assert list(found.calls(every=True)) == [COPY, "torch.chunked", "flashinfer"]
    assert found.about() == {}
    install(monkeypatch, gdn_prefill__chunk_gated_delta_rule=_transposed)
    found = beside(definition, AXES)
    found.calls(every=True)
    assert list(found.disagree["flashinfer"]) == ["new_state"]


def _transposed(*inputs: Any, **outputs: Any) -> None:
    """A library that has another order of the state's dimensions."""
    state = chunk_gated_delta_rule(*inputs, **outputs)[1]
    state.copy_(state.mT.clone())


def decode(*given: Any) -> None:
    """The library's function over a pool of float32 states, by our reference."""
    q, k, v, state, *gates, scale, output, normalised, pool, reads, writes = given
    assert state is None and not normalised and reads.dtype == writes.dtype == torch.int32
    made = load_reference(load(DECODE))(q, k, v, pool[reads], *gates, scale)
    output[:], pool[writes] = made


def test_flashinfer_decodes_from_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed does not drift."""
    install(monkeypatch, gdn_decode__gated_delta_rule_decode_pretranspose=decode)
    found = beside(load(DECODE).resized(**SIZES), {"batch_size": 3})
    call: Any = found.calls(every=True)["flashinfer"]
    assert found.about() == {} and torch.equal(call()[1].clone(), call()[1])


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("forgets", [False, True])
def test_chunks_are_the_recurrence(with_state: bool, forgets: bool) -> None:
    definition = load(PREFILL).resized(**SIZES)
    inputs = make_inputs(definition, {"total_seq_len": 133, "num_seqs": 3, "len_cu_seqlens": 4}, 0)
    if forgets:  # a head and a token whose decay is 0 in float32
        inputs["A_log"][1], inputs["a"][70, 1] = 4.0, 5.0
    if not with_state:
        inputs["state"] = None
    made = ready("torch.chunked", given(definition, inputs))
    assert made.outputs is not None
    expected = load_reference(definition)(*inputs.values())
    for ours, right in zip(made.outputs(), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-2, atol=1e-4)


def test_prefill_has_the_chunked_form_and_decoding_the_reference() -> None:
    assert list(makers_of(load(PREFILL))) == [COPY, "torch.chunked", "flashinfer"]
    assert list(makers_of(load(DECODE))) == [COPY, "torch", "flashinfer"]
