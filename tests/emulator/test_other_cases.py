"""The other cases hold what the definitions' references compute, and leave little room."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ptxflow.compiler.emulator.values import decode, e4m3_bits
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.references.gdn import gdn_decode, gdn_prefill
from ptxflow.eval.bench.references.moe import moe, route
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import plain
from ptxflow.eval.verify.cases.moe import shares
from ptxflow.eval.verify.cases.rmsnorm import ROOT_ERROR
from tests.families import dsa_indexer, rmsnorm
from tests.families.gdn_decode import problem as step
from tests.families.gdn_prefill import problem as packed
from tests.families.moe import problem as experts
from tests.reference_check import as_torch

SMALL = {"local": 3, "hidden": 256, "inner": 128}


def test_gdn_decode_is_the_reference() -> None:
    """Of the definition itself, in torch, and the bounds leave little room."""
    p = step(3, 64, 2, 4)
    for state, scale in ((True, 0.25), (False, 0.0)):
        made = case_of(p, given=state, scale=scale)
        names = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b")
        inputs: list[Any] = [
            as_torch(made.tensors[n]) if n in made.tensors else None for n in names
        ]
        found = gdn_decode(*[*inputs, scale])
        for (name, (low, high)), value in zip(made.expected.items(), found, strict=True):
            ours = value.float().numpy()
            # where a gate is shut, the reference rounds what it adds and takes away again
            assert (np.abs(ours - np.clip(ours, low, high)) <= 2.0**-21).all(), name
            room = (2.0**-7 if name == "output" else 2.0**-16) * np.abs(ours) + 2.0**-13
            assert (high - low <= room).all(), name


def test_gdn_prefill_is_the_reference() -> None:
    """Of the definition itself, in torch, and the bounds leave little room."""
    p = packed(90, 3, 64, 1, 2)
    for state, scale in ((True, 0.25), (False, 0.0)):
        made = case_of(p, lengths=(30, 0, 60), given=state, scale=scale)
        names = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", "cu_seqlens")
        inputs: list[Any] = [
            as_torch(made.tensors[n]) if n in made.tensors else None for n in names
        ]
        found = gdn_prefill(*[*inputs, scale])
        for (name, (low, high)), value in zip(made.expected.items(), found, strict=True):
            ours = value.float().numpy()
            assert (np.abs(ours - np.clip(ours, low, high)) <= 2.0**-20).all(), name
            assert (high - low).max() <= 0.1 * np.abs(ours).max(), name
        assert not found[1][1].any()  # a sequence without tokens drops its state


def test_rmsnorm_is_the_reference() -> None:
    """Of the definition itself, in torch: the bounds hold it, and are an ulp apart at most."""
    for name in ("rmsnorm_h512", "fused_add_rmsnorm_h2048"):
        definition = load(name)
        p = rmsnorm.RMSNORM.problem(definition.to_json(), definition.bind({"batch_size": 9}))
        tensors = case_of(p).tensors
        low, high = case_of(p).expected["output"]
        inputs = [
            torch.from_numpy(tensors[n].view(np.int16)).view(torch.bfloat16)
            for n in definition.inputs
        ]
        expected = load_reference(definition)(*inputs).float().numpy()
        assert ((low <= expected) & (expected <= high)).all()
        assert (high - low <= 2.0**-7 * np.maximum(np.abs(low), np.abs(high))).all()
        assert (low != high).mean() < 4 * ROOT_ERROR * 2**8  # near a tie of two roundings


def narrow(values: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    """A case's array as torch has it: bytes are float8, 16-bit words bfloat16."""
    if values.dtype == np.uint8:
        return torch.from_numpy(values.copy()).view(torch.float8_e4m3fn)
    return as_torch(values)


def test_e4m3_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=4000) * 10.0 ** np.linspace(-4, 3, 4000)
    steps = decode(np.arange(127, dtype=np.uint8), "e4m3")
    values = np.concatenate([values, steps, (steps[:-1] + steps[1:]) / 2, [1e9]]).astype("f4")
    kept = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn)
    assert (e4m3_bits(values) == kept.view(torch.uint8).numpy()).all()


def test_routing_of_the_case_is_that_of_the_reference() -> None:
    made = case_of(experts(50, **SMALL), seed=3).tensors
    logits = torch.from_numpy(made["routing_logits"].copy())
    bias = torch.from_numpy(plain(made["routing_bias"]).copy())
    chosen, share = route(logits, bias)
    expected = np.zeros((50, 256))
    np.put_along_axis(expected, chosen.numpy(), 2.5 * share.numpy(), 1)
    assert np.allclose(shares(made["routing_logits"], plain(made["routing_bias"])), expected)


def test_moe_is_the_reference() -> None:
    made = case_of(experts(20, **SMALL), seed=2)
    inputs: list[Any] = [narrow(t) for name, t in made.tensors.items() if name != "output"]
    found = moe(*inputs, *made.arguments.scalars.values()).float().numpy()
    low, high = made.expected["output"]
    assert ((low <= found) & (found <= high)).all()
    assert np.median((high - low) / np.abs(found).mean()) < 0.7  # what rounding leaves room for


def test_of_equal_scores_the_first_are_chosen() -> None:
    p = dsa_indexer.problem(4, 11, 30, topk=32)
    given = case_of(p, lengths=(70, 0, 600, 701))
    own = given.tensors["block_table"][3, 0] * 64
    assert (given.expected["topk_indices"][0][3] == own + np.arange(32)).all()
    assert (given.expected["topk_indices"][0][1] == -1).all()
