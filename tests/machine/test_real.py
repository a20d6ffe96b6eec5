"""Real rows and drawn shapes in the emulator: what is told of them."""

import os
import resource
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.device import DEVICES
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.verify import real, survey
from ptxflow.eval.verify.draws import draw_shapes, places
from ptxflow.eval.verify.emulation import Emulation
from ptxflow.eval.verify.page import sections
from ptxflow.eval.verify.real import chosen, emulate_row, lines, row_of

H200 = DEVICES["h200"]


def test_a_real_row_is_one_of_the_workloads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = {problem.family: (problem, strategy) for problem, strategy in chosen([], H200, 0)}
    assert set(jobs) == set(places())
    for problem, _ in jobs.values():
        definition = load(problem.definition)
        axes = dict(problem.axes)
        held = definition.const_axes.items() & axes.items()
        assert len(held) >= len(definition.const_axes.keys() & axes.keys())
        rows = [dict(w.axes) for w in workloads(problem.definition)]
        assert any(
            {n: row.get(n) for n in axes if n in row}.items() <= axes.items() for row in rows
        )
    monkeypatch.setattr(real, "MOST", (0.0, 0.0))
    log = tmp_path / "log.jsonl"
    least = partial(row_of, H200, 60, log, 8 << 30, chosen(["rmsnorm"], H200, 0)[0])
    row = least()
    with log.open("a") as file:
        file.write('\n{"id": "cut o')
    monkeypatch.setattr(real, "emulate_row", None)
    assert least() == row, "what is in the log is not emulated again"
    assert row.verdict == "right" and row.instructions > 0
    summary = {"kind": "verify-real", "device": "h200", "arch": "sm_90a", "versions": {},
               "command": "c", "seconds": 1.0, "processes": 1, "rows": [vars(row)]}  # fmt: skip
    told = sections([summary])["verify-real"]
    assert "1 of 1 rows right for sm_90a" in told and "| right |" in told
    assert lines([vars(row)])[0][0] == "rmsnorm"


def test_a_row_that_does_not_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = chosen(["gemm"], H200, 0)

    def at_once(which: int, seconds: float) -> None:
        if seconds:
            os.kill(os.getpid(), signal.SIGPROF)

    monkeypatch.setattr(signal, "setitimer", at_once)
    assert emulate_row(H200, 5, job, "", 8 << 30).verdict == "not ended after 5 s"


def test_a_row_that_takes_more_memory_than_there_is_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (job,) = chosen(["gemm"], H200, 0)
    monkeypatch.setattr(real, "attempt", lambda *_: np.ones(64 << 30, np.uint8))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    row = emulate_row(H200, 5, job, "", 48 << 30)
    assert row.verdict == "takes more than the 48.0 GiB that a process has: fewer --jobs"
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


@pytest.mark.slow
def test_drawn_shapes_are_emulated_in_part(tmp_path: Path) -> None:
    jobs, empty = draw_shapes(["rmsnorm"], H200, 3, 0)
    rows = survey.survey(jobs, H200, 1, 2, tmp_path / "log.jsonl")
    assert [row.emulated for row in rows] == ["", "", None]
    assert survey.survey(jobs, H200, 1, 2, tmp_path / "log.jsonl") == rows
    summary = survey.summarise(rows, empty)
    assert survey.lines(summary)[-1] == ["all", 3, 0, 0, 2, 2] and not summary["failures"]


def test_what_a_drawn_shape_s_problems_never_execute_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (job,), _ = draw_shapes(["rmsnorm"], H200, 1, 0)
    found = Emulation({}, 1, True, 0.0, items=2, open=1, unexecuted=("a line", "another"))
    monkeypatch.setattr(survey, "covering_emulation", lambda *_: found)
    summary = survey.summarise(survey.survey([job], H200, 1, 1), [])
    assert survey.lines(summary)[-1] == ["all", 1, 0, 0, 1, 0]
    assert "2 instructions never executed: a line" in summary["failures"][0]
