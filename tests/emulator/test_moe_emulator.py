"""moe programs compute what the definition says, however tokens are routed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.emulator.values import decode, e4m3_bits
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.launch import Arguments
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.references.moe import moe, route
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.verify.cases.case import Case, plain
from ptxflow.eval.verify.cases.moe import NONE, ONE, SPREAD, case, shares
from ptxflow.eval.verify.emulation import run_emulation
from tests.moe_cases import (
    B200,
    BLACKWELL,
    CASES,
    H200,
    HOPPER,
    IDS,
    MOE,
    problem,
    sized,
    strategy,
)

SMALL = {"local": 3, "hidden": 256, "inner": 128}


def wrong(p: Problem, s: Strategy, made: Case, dev: Device = H200, text: str = "") -> int:
    """Elements of the output that are out of bounds; the program has no hazards."""
    ptx = text or write(MOE.build(p, s, dev), dev)
    tensors = {name: t.copy() for name, t in made.tensors.items()}
    launch = MOE.launch(p, s, dev)
    report = emulate(ptx, launch, tensors, dict(p.axes), arguments=made.arguments)
    assert not report.hazards
    (low, high), found = made.expected["output"], plain(tensors["output"])
    return int((~((low <= found) & (found <= high))).sum())


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_right(dev, name, s):  # type: ignore[no-untyped-def]
    result = run_emulation(problem(), s, dev, (0,))
    assert result.right, result


@pytest.mark.parametrize(
    ("routing", "offset", "tokens"),
    [(ONE, None, 11), (NONE, None, 3), (SPREAD, 254, 8), (SPREAD, -1, 2), (SPREAD, 31, 1)],
)
def test_wherever_tokens_go(routing: str, offset: int | None, tokens: int) -> None:
    """To one expert, to none here, and to local ones of which some are no experts at all."""
    s, p = HOPPER["columns"], problem(tokens, **SMALL)
    made = case(p, 1, routing, offset)
    low, high = made.expected["output"]
    assert (routing == NONE) == bool((low == 0).all() and (high == 0).all())
    assert wrong(p, s, made) == 0


def test_more_local_experts_than_lanes() -> None:
    p = problem(5, local=40, hidden=128, inner=128)
    assert wrong(p, strategy(), case(p, 0, ONE)) == 0


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_one_program_serves_every_number_of_tokens(dev) -> None:  # type: ignore[no-untyped-def]
    s = (BLACKWELL if dev is B200 else HOPPER)["rows"]
    assert len({write(MOE.build(problem(t), s, dev), dev) for t in (1, 64, 14107)}) == 1


def test_e4m3_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=4000) * 10.0 ** np.linspace(-4, 3, 4000)
    steps = decode(np.arange(127, dtype=np.uint8), "e4m3")
    values = np.concatenate([values, steps, (steps[:-1] + steps[1:]) / 2, [1e9]]).astype("f4")
    kept = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn)
    assert (e4m3_bits(values) == kept.view(torch.uint8).numpy()).all()


def test_routing_of_the_case_is_that_of_the_reference() -> None:
    made = case(problem(50, **SMALL), 3).tensors
    logits = torch.from_numpy(made["routing_logits"].copy())
    bias = torch.from_numpy(plain(made["routing_bias"]).copy())
    chosen, share = route(logits, bias)
    expected = np.zeros((50, 256))
    np.put_along_axis(expected, chosen.numpy(), 2.5 * share.numpy(), 1)
    assert np.allclose(shares(made["routing_logits"], plain(made["routing_bias"])), expected)


def _torch(values: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    kinds = {np.dtype("u1"): torch.float8_e4m3fn, np.dtype("u2"): torch.bfloat16}
    held = torch.from_numpy(values.copy().view({1: "u1", 2: "i2", 4: "f4"}[values.itemsize]))
    return held.view(kinds[values.dtype]) if values.dtype in kinds else held


def test_the_expected_values_are_those_of_the_reference() -> None:
    made = case(problem(20, **SMALL), 2)
    inputs: list[Any] = [_torch(t) for name, t in made.tensors.items() if name != "output"]
    found = moe(*inputs, *made.arguments.scalars.values()).float().numpy()
    low, high = made.expected["output"]
    assert ((low <= found) & (found <= high)).all()
    assert np.median((high - low) / np.abs(found).mean()) < 0.7  # what rounding leaves room for


def test_a_program_passes_the_check_of_a_gpu() -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    given, p = sized(**SMALL), problem(24, **SMALL)
    s = HOPPER["columns"]
    inputs = make_inputs(given, {"seq_len": 24}, 1)
    inputs["local_expert_offset"] = 8
    inputs["routing_bias"][8:11] += 0.3
    tensors = case(p).tensors
    for name, held in inputs.items():
        if isinstance(held, torch.Tensor):
            size = held.element_size()
            bits = held.view({1: torch.uint8, 2: torch.int16, 4: torch.float32}[size])
            tensors[name] = bits.numpy().view({1: "u1", 2: "u2", 4: "f4"}[size]).copy()
    scalars = {n: inputs[n] for n in ("local_expert_offset", "routed_scaling_factor")}
    ptx, launch = write(MOE.build(p, s, H200), H200), MOE.launch(p, s, H200)
    arguments = Arguments(scalars)
    assert not emulate(ptx, launch, tensors, dict(p.axes), arguments=arguments).hazards
    expected = load_reference(given)(*inputs.values())
    compared = compare(_torch(tensors["output"]), expected, tolerance(given, "output"))
    assert not compared.wrong, compared


PLANTED = {
    "the scale of the gates": (
        "%u_factor2, %u_token_scale0, %u_weight_scale1_0",
        "%u_factor2, %u_token_scale0, %u_weight_scale0_0",
    ),
    "the factor of shares": ("%t_weights0, %t_factor0", "%t_weights0, %t_weights0"),
    "one of four groups fewer": ("%_rank, 4;", "%_rank, 3;"),
    "the largest of two lanes only": (
        "%u_top_moved2_0, %u_top_both1_0, 16",
        "%u_top_moved2_0, %u_top_both1_0, 8",
    ),
}


@pytest.mark.parametrize("name", ["", *PLANTED])
def test_a_wrong_kernel_is_told_from_a_right_one(name: str) -> None:
    p, s = problem(20, **SMALL), HOPPER["columns"]
    text = write(MOE.build(p, s, H200), H200)
    old, new = PLANTED.get(name, ("", ""))
    assert old in text, [line for line in text.splitlines() if "top_moved" in line][:4]
    assert bool(wrong(p, s, case(p), text=text.replace(old, new))) == bool(name)
