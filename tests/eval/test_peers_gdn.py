"""The chunked form in torch that prefill kernels are timed beside is the reference's."""

from __future__ import annotations

import pytest
import torch

from ptxflow.env.measurements import COPY
from ptxflow.eval import peers
from ptxflow.eval.definition import load
from ptxflow.eval.inputs import make_inputs
from ptxflow.eval.peers.ready import Given

PREFILL, DECODE = "gdn_prefill_qk16_v32_d128_k_last", "gdn_decode_qk16_v32_d128_k_last"


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
    for ours, right in zip(made.outputs(), definition.reference()(*inputs.values()), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-2, atol=1e-4)


def test_prefill_has_the_chunked_form_and_decoding_the_reference() -> None:
    assert list(peers.makers_of(load(PREFILL))) == [COPY, "torch.chunked"]
    assert list(peers.makers_of(load(DECODE))) == [COPY, "torch"]
