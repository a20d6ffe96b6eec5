"""`ptxflow COMMAND`: what it lists exists, what it does not know it says, and it starts quickly."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ptxflow
from ptxflow.__main__ import COMMANDS, EXAMPLES, MODULES, main, text
from ptxflow.eval.bench import campaign
from tests.builders import ROOT, python


@pytest.fixture(autouse=True)
def argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ptxflow"])


@pytest.mark.parametrize("name", MODULES)
def test_every_command_explains_itself_as_it_was_started(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: ptxflow {name} ")
    assert not re.findall(r"python -m ptxflow|\b(?:sample|train)\.py", told)
    assert set(re.findall(r"\bptxflow ([a-z-]+)", told)) <= set(MODULES)


def test_scripts_and_modules_explain_themselves_as_they_were_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for start, module in (("sample.py", "sample"), ("report.py", "eval.bench.report")):
        monkeypatch.setattr(sys, "argv", [f"/somewhere/{start}"])
        with pytest.raises(SystemExit):
            importlib.import_module(f"ptxflow.{module}").main(["--help"])
    told = capsys.readouterr().out
    assert "usage: sample.py " in told and "\n  python sample.py --definition gemm" in told
    assert "usage: ptxflow report " in told


def test_help_has_a_line_for_each_command_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    assert capsys.readouterr().out == 2 * (text() + "\n")
    lines = text().splitlines()
    for group in COMMANDS.values():
        for name, (_, line) in group.items():
            assert len([x for x in lines if x.split()[:1] == [name] and x.endswith(line)]) == 1
    assert max(map(len, lines[:-1])) <= 100
    for example in EXAMPLES:
        program, name, *_ = example.split()
        assert program == "ptxflow" and name in MODULES


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ptxflow {ptxflow.__version__}\n"


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smaple", "-k", "8"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
    assert "'smaple'" in told.err and all(name in told.err for name in MODULES)


def test_bad_arguments_are_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sample", "--axes", "M=1"])
    assert ended.value.code == 2 and "--definition" in capsys.readouterr().err


def test_an_interrupted_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("ptxflow.eval.verify.survey"), "main", interrupted)
    assert main(["survey"]) == 130
    assert capsys.readouterr().err == "survey: interrupted\n"


def test_help_and_definitions_import_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from ptxflow.__main__ import main\n"
        "main(['--help']); assert 'numpy' not in sys.modules\n"
        "raise SystemExit(main(['definitions']))"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "rmsnorm_h4096" in done.stdout


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "ptxflow", "definitions"],
        cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


#: the counts and seeds of each command, and what it needs besides
POSITIVE = {
    "ablation": ["--jobs"],
    "agree": ["--samples", "--jobs"],
    "calibrate": ["--folds", "--least", "--most"],
    "campaign": ["--samples", "--rounds", "--refine-rounds", "--check-seeds", "--jobs"],
    "fit-surrogate": ["--steps", "--folds", "--least", "--jobs"],
    "harness": ["--workloads", "--trials", "--timeout"],
    "mutate-values": ["--draws", "--kernels", "--mutants", "--jobs"],
    "mutation": ["--draws", "--kernels", "--jobs"],
    "policy-draws": ["--workloads", "-k", "--jobs"],
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
    "verify": ["--mutants", "--seed"],
    "survey": ["--seed"],
}
NEEDED = {
    "calibrate": ["--measurements", "x"],
    "fit-surrogate": ["--measurements", "x", "--out", "x"],
    "harness": ["x"],
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
