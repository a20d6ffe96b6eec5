"""RMSNorm kernels compute what the definition says, to the last rounding, tails included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import emulate, from_bfloat16
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.verify import emulation
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.rmsnorm import ROOT_ERROR
from ptxflow.eval.verify.emulation import run_emulation
from tests.alike import alike
from tests.rmsnorm_cases import B200, CASES, H200, IDS, RMSNORM, problem, space, strategy

WORKLOADS = [(h, r) for h in (128, 512, 1536, 2048, 4096, 7168, 56, 5000) for r in (False, True)]


@pytest.mark.parametrize(("dev", "name", "hidden", "residual", "s"), CASES, ids=IDS)
def test_every_path_is_right(dev, name, hidden, residual, s):  # type: ignore[no-untyped-def]
    p = problem(hidden, 2048, residual, "bfloat16" if residual else "float16")
    if dev is H200 or not alike(p, s):
        result = run_emulation(p, s, dev)
        assert result.right, result


@pytest.mark.parametrize(("hidden", "residual"), WORKLOADS)
def test_sampled_strategies_are_right(hidden: int, residual: bool) -> None:
    for dev, batch in ((H200, 3000), (B200, 5)):
        p = problem(hidden, batch, residual)
        found = space(p, dev)
        for code in found.sample_uniform(2, np.random.default_rng(hidden)):
            result = run_emulation(p, found.strategy(int(code)), dev)
            assert result.right, (found.strategy(int(code)), result)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 9, 16])
def test_one_kernel_serves_every_batch(batch: int) -> None:
    """The text does not depend on the batch, and rows that do not exist are not touched."""
    s, p = strategy(row_threads=8, rows=8), problem(64, 4096)
    small = problem(64, batch)
    ptx = write(RMSNORM.build(p, s, H200), H200)
    assert ptx == write(RMSNORM.build(small, s, H200), H200)
    tensors = case_of(small).tensors
    low, high = case_of(small).expected["output"]
    report = emulate(ptx, RMSNORM.launch(p, s, H200), tensors, dict(small.axes))
    values = from_bfloat16(tensors["output"])
    assert not report.hazards and ((low <= values) & (values <= high)).all()


def test_the_expected_values_are_those_of_the_reference() -> None:
    """Of the definition itself, in torch: the bounds hold it, and are an ulp apart at most."""
    for name in ("rmsnorm_h512", "fused_add_rmsnorm_h2048"):
        definition = load(name)
        p = RMSNORM.problem(definition.to_json(), definition.bind({"batch_size": 9}))
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0f3727C5AC", "0f358637BD"),  # eps 1e-6 for 1e-5
        ("bfly.b32 %lanes_moved0, %own0, 16", "bfly.b32 %lanes_moved0, %own0, 8"),
        ("%out0, %product1, %product0", "%out0, %product0, %product1"),  # halves swapped
        ("0f3B000000", "0f3B010000"),  # one of 512 elements more or less
    ],
)
def test_a_wrong_kernel_is_told_from_a_right_one(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    write_ptx = emulation.write

    def planted(kernel, device):  # type: ignore[no-untyped-def]
        text = write_ptx(kernel, device)
        assert old in text, text
        return text.replace(old, new)

    monkeypatch.setattr(emulation, "write", planted)
    result = run_emulation(problem(512, 2048), strategy(), H200, (0,))
    assert not result.right and result.error
