"""What prefill kernels of the delta net are timed beside computes the reference's."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ptxflow.env.measurements import COPY
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.baselines import beside as peers
from ptxflow.eval.bench.baselines.beside import Beside
from ptxflow.eval.bench.baselines.ready import Given
from ptxflow.eval.bench.checking import Bench
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.references.gdn import delta_step, spread
from ptxflow.eval.bench.session import case_of

PREFILL, DECODE = "gdn_prefill_qk16_v32_d128_k_last", "gdn_decode_qk16_v32_d128_k_last"
CPU = torch.device("cpu")
SIZES = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2}
AXES = {"total_seq_len": 61, "num_seqs": 20, "len_cu_seqlens": 21}  # two have no token


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
) -> Any:
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
    library = SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", library)  # type: ignore[arg-type]
    definition = load(PREFILL).resized(**SIZES)
    bench = Bench(case_of(definition, AXES, CPU), CPU, (1, 2))
    assert 0 in bench.fill(1)[0]["cu_seqlens"].diff()
    found = Beside(definition, AXES, bench)
    assert list(found.calls(every=True)) == [COPY, "torch.chunked", "flashinfer"]
    assert found.about() == {}
    monkeypatch.setitem(library.__dict__, "chunk_gated_delta_rule", _transposed)
    found = Beside(definition, AXES, bench)
    found.calls(every=True)
    assert list(found.disagree["flashinfer"]) == ["new_state"]


def _transposed(*inputs: Any, **outputs: Any) -> None:
    """A library that has another order of the state's dimensions."""
    state = chunk_gated_delta_rule(*inputs, **outputs)[1]
    state.copy_(state.mT.clone())


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("forgets", [False, True])
def test_chunks_are_the_recurrence(with_state: bool, forgets: bool) -> None:
    sizes = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2}
    definition = load(PREFILL).resized(**sizes)
    inputs = make_inputs(definition, {"total_seq_len": 133, "num_seqs": 3, "len_cu_seqlens": 4}, 0)
    if forgets:  # a head and a token whose decay is 0 in float32
        inputs["A_log"][1], inputs["a"][70, 1] = 4.0, 5.0
    if not with_state:
        inputs["state"] = None
    tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    given = Given(definition, tensors, {"scale": inputs["scale"]}, 0)
    made = peers.makers_of(definition)["torch.chunked"](given)
    assert made.outputs is not None
    expected = load_reference(definition)(*inputs.values())
    for ours, right in zip(made.outputs(), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-2, atol=1e-4)


def test_prefill_has_the_chunked_form_and_decoding_the_reference() -> None:
    assert list(peers.makers_of(load(PREFILL))) == [COPY, "torch.chunked", "flashinfer"]
    assert list(peers.makers_of(load(DECODE))) == [COPY, "torch"]
