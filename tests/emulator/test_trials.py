"""Every path through the GEMM builders computes C exactly, tails included, on both targets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ptxflow.eval import trial
from ptxflow.eval.prove import main
from ptxflow.eval.trial import run_trial
from tests.gemm_cases import CASES, IDS, problem_for


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_exactly_right(dev, name, s):  # type: ignore[no-untyped-def]
    result = run_trial(problem_for(s), s, dev)
    assert result.right and result.schedules == 2, result
    assert "exactly right" in str(result)


def test_a_wrong_kernel_is_told_from_a_right_one(monkeypatch: pytest.MonkeyPatch):
    """One bit of a descriptor: the values differ, and the report says how many."""
    dev, _, s = CASES[0]
    write = trial.write

    def planted(kernel, device):  # type: ignore[no-untyped-def]
        text = write(kernel, device)
        assert "0x4000004000000000" in text
        return text.replace("0x4000004000000000", "0x4000002000000000")

    monkeypatch.setattr(trial, "write", planted)
    result = run_trial(problem_for(s), s, dev)
    assert not result.right and result.error


def test_bfloat16():
    dev, _, s = CASES[0]
    assert run_trial(replace(problem_for(s), dtype="bfloat16"), s, dev, (0,)).right


def test_the_data_is_exact_in_float32():
    s = CASES[0][2]
    tensors, output, expected = trial.gemm_case(problem_for(s))
    assert output == "C" and np.isnan(tensors["C"].astype(np.float32)).all()
    assert not np.isnan(expected.astype(np.float32)).any()


def test_the_command(capsys: pytest.CaptureFixture[str]):
    asked = ["--definition", "gemm_n128_k2048", "--axes", "M=17", "--samples", "2", "--jobs", "1"]
    assert main([*asked, "--device", "h200"]) == 0
    assert "2 of 2 proven for sm_90a" in capsys.readouterr().out
    assert main([*asked, "--samples", "0"]) == 2
    assert main(["--definition", "gemm_n12", "--jobs", "1"]) == 2
    assert "near names" in capsys.readouterr().err
