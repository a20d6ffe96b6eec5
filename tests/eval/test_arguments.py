"""Counts that mean nothing are refused by every command, in one line."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from ptxflow.__main__ import MODULES
from ptxflow.eval.bench import campaign

#: the counts and seeds of each command, and what it needs besides
POSITIVE = {
    "ablation": ["--jobs"],
    "agree": ["--samples", "--jobs"],
    "calibrate": ["--folds", "--least", "--most"],
    "campaign": ["--samples", "--rounds", "--refine-rounds", "--check-seeds", "--jobs"],
    "fit-surrogate": ["--steps", "--folds", "--least", "--jobs"],
    "legality": ["--samples", "--workloads", "--jobs"],
    "eval.study.moe_error": ["--tokens", "--experts", "--seeds"],
    "mutation": ["--draws", "--kernels", "--jobs"],
    "optimum": ["--least"],
    "baselines": ["--rounds"],
    "policy-draws": ["--workloads", "-k", "--jobs"],
    "eval.study.prefill_error": ["--tokens"],
    "verify": ["--samples", "--schedules", "--jobs"],
    "ranking": ["--folds", "--least", "--jobs"],
    "solution": ["--seeds"],
    "survey": ["--samples", "--jobs"],
}
NATURAL = {
    "agree": ["--seed"],
    "campaign": ["--seed", "--refine"],
    "fit-surrogate": ["--seed"],
    "mutation": ["--mutants", "--emulate", "--seed"],
    "policy-draws": ["--seed"],
    "eval.study.prefill_error": ["--seed"],
    "verify": ["--mutants", "--seed"],
    "survey": ["--seed"],
}
NEEDED = {
    "calibrate": ["--measurements", "x"],
    "fit-surrogate": ["--measurements", "x", "--out", "x"],
    "optimum": ["--space", "x", "--samples", "x"],
    "baselines": ["--definition", "x"],
    "policy-draws": ["--out", "x"],
    "ranking": ["--measurements", "x"],
    "solution": ["check", "x"],
}
CASES = [
    (name, option, value, least)
    for options, least, values in ((POSITIVE, 1, ("0", "-3", "few")), (NATURAL, 0, ("-1", "1.5")))
    for name, listed in options.items()
    for option, value in zip(listed, values * len(listed), strict=False)
]


@pytest.mark.parametrize(("name", "option", "value", "least"), CASES)
def test_counts(
    name: str, option: str, value: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"ptxflow.{MODULES.get(name, name)}").main
    with pytest.raises(SystemExit) as end:
        main([*NEEDED.get(name, []), f"{option}={value}" if option[1] == "-" else option + value])
    assert end.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    reason = f"must be an integer of at least {least}, not '{value}'"
    assert told.endswith(f"argument {option}: {reason}")


@pytest.mark.parametrize("given", [{"samples": 0}, {"samples": "all"}, {"seed": -1}])
def test_counts_of_a_workloads_file(
    given: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"definition": "gemm_n128_k2048", "axes": {"M": 1}, **given}]))
    out = str(tmp_path / "out.jsonl")
    assert campaign.main(["--workloads", str(path), "--plan", "--out", out]) == 2
    told = capsys.readouterr().err
    assert f"{path}, workload 1: samples or seed must be an integer of at least" in told
    assert len(told.splitlines()) == 1
