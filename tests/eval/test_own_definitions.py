"""Our own definitions: their references, inputs, libraries and emulation cases say the same; what
sampling says of them where no policy was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sample
from ptxflow.command import BadInput
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import Definition, load, names, own_names
from ptxflow.eval.bench.baselines.common import gemm_epilogue
from ptxflow.eval.bench.baselines.registry import SLACK, WRONG
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.sample.selection import reward_alone
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import plain

M, N, K = 5, 136, 256


def small(name: str) -> Definition:
    return load(name).resized(N=N, K=K, num_n_blocks=2, num_k_blocks=2)


def test_they_are_none_of_the_46() -> None:
    assert len(own_names()) == 8 and not set(own_names()) & set(names())
    assert all(load(name).name == name for name in own_names())


@pytest.mark.parametrize("name", own_names())
def test_references_are_what_cases_expect(name: str) -> None:
    definition = small(name)
    _, problem = find_problem(definition, {"M": M})
    case = case_of(problem)
    given = []
    for tensor, spec in definition.inputs.items():
        held = case.tensors[tensor]
        if spec.dtype.startswith("float8"):
            given.append(torch.from_numpy(held).view(torch.float8_e4m3fn))
        else:
            values = np.ascontiguousarray(plain(held))
            given.append(torch.from_numpy(values).to(getattr(torch, spec.dtype)))
    found = load_reference(definition)(*given).float().numpy()
    low, high = case.expected["C"]
    assert ((found >= low) & (found <= high)).all()


@pytest.mark.parametrize("name", own_names())
def test_inputs_keep_sums_normal_and_what_models_write_is_near_the_reference(name: str) -> None:
    definition = small(name)
    given = make_inputs(definition, {"M": 64}, 1)
    assert list(given) == list(definition.inputs)
    found = load_reference(definition)(**given).float()
    assert 0.2 < found.std() < 2
    limit = tolerance(definition)
    if "A_scale" in given:
        wide = [given[n].float() for n in ("A", "A_scale", "B", "B_scale")]
        a, b = wide[0].unflatten(1, (2, 128)), wide[2].unflatten(1, (2, 128))
        b = b * wide[3].repeat_interleave(128, 0)[:N, :, None]
        other = torch.einsum("mkc,nkc->mn", a * wide[1].T[..., None], b)
        near, most = 1.0, 0.0
    else:
        other = gemm_epilogue(
            given["A"], given["B"], *(given.get(n) for n in ("bias", "up", "residual"))
        )
        other = other.float()
        near, most = SLACK, WRONG  # it rounds on the way
    outside = (other - found).abs() > near * (limit.atol + limit.rtol * found.abs())
    assert outside.float().mean() <= most


def test_what_is_said_without_a_policy() -> None:
    assert (
        reward_alone(Path("p"), "f", "both") == "p has no policy of f: the reward's best are taken"
    )
    with pytest.raises(BadInput, match="take --from reward"):
        reward_alone(Path("p"), "f", "policy")


@pytest.mark.slow
def test_sampling_without_a_policy_says_so_in_a_line(tmp_path: Path, capsys: Any) -> None:
    argv = ["--definition", "gemm_bias_n6144_k4096", "--from", "policy", "--measure", "no"]
    assert sample.main([*argv, "--device", "h200", "--out", str(tmp_path / "out")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("sample: ") and "has no policy of gemm_epilogue: take --from" in line
    assert (
        reward_alone(Path("p"), "f", "both") == "p has no policy of f: the reward's best are taken"
    )
    with pytest.raises(BadInput, match="take --from reward"):
        reward_alone(Path("p"), "f", "policy")
