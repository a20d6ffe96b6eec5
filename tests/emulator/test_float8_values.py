"""Kernels over float8 pass the check of a GPU: its inputs, reference and tolerances."""

import numpy as np
import pytest
import torch

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.launch import Arguments
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.session import scored
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import Case
from tests.emulation import run
from tests.families import dsa_indexer, moe
from tests.reference_check import as_torch

SMALL = {"local": 3, "hidden": 256, "inner": 128}


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_a_choice_passes_the_check_of_a_gpu(dev: Device) -> None:
    """The inputs, the reference and the comparison with which kernels are measured; another
    choice does not pass."""
    given = parse(dsa_indexer.definition(topk=64))
    p = dsa_indexer.problem(2, 9, 20, topk=64)
    inputs = make_inputs(given, dict(p.axes), 1)
    tensors = {}
    for name, value in inputs.items():
        held = value.view(torch.uint8) if value.dtype == torch.float8_e4m3fn else value
        tensors[name] = held.numpy().copy()
    tensors["topk_indices"] = np.full((2, 64), -7, np.int32)
    found = run(p, dsa_indexer.strategy(), Case(tensors, {}), dev)["topk_indices"]
    rule = tolerance(given)
    compared = compare(torch.from_numpy(found), scored(inputs), rule)
    assert not compared.wrong and compared.max_error_ratio < 0.01, compared
    expected = load_reference(given)(*inputs.values())
    assert not compare(expected, scored(inputs), rule).wrong
    found[0, 3] = found[0, 4]
    assert compare(torch.from_numpy(found), scored(inputs), rule).wrong


def test_a_program_passes_the_check_of_a_gpu() -> None:
    """The inputs, the reference and the tolerances with which kernels are measured."""
    given, p = moe.sized(**SMALL), moe.problem(24, **SMALL)
    inputs = make_inputs(given, {"seq_len": 24}, 1)
    inputs["local_expert_offset"] = 8
    inputs["routing_bias"][8:11] += 0.3
    made = case_of(p)
    for name, held in inputs.items():
        if isinstance(held, torch.Tensor):
            size = held.element_size()
            bits = held.view({1: torch.uint8, 2: torch.int16, 4: torch.float32}[size])
            made.tensors[name] = bits.numpy().view({1: "u1", 2: "u2", 4: "f4"}[size]).copy()
    scalars = {n: inputs[n] for n in ("local_expert_offset", "routed_scaling_factor")}
    case = Case(made.tensors, {}, Arguments(scalars))
    found = run(p, moe.HOPPER["columns"], case)
    expected = load_reference(given)(*inputs.values())
    compared = compare(as_torch(found["output"]), expected, tolerance(given, "output"))
    assert not compared.wrong, compared
