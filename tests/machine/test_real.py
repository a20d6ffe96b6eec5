"""Real rows and drawn shapes in the emulator: what is told of them."""

from __future__ import annotations

import os
import signal

import pytest

from ptxflow.compiler.device import DEVICES
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.verify import real, survey
from ptxflow.eval.verify.draws import draw_shapes, places
from ptxflow.eval.verify.page import sections
from ptxflow.eval.verify.real import chosen, emulate_row, lines

H200 = DEVICES["h200"]


def test_a_real_row_is_one_of_the_workloads_whole(monkeypatch: pytest.MonkeyPatch) -> None:
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
    row = emulate_row(H200, 60, chosen(["rmsnorm"], H200, 0)[0])  # the least
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
    row = emulate_row(H200, 5, job)
    assert row.verdict == "not ended after 5 s"


def test_drawn_shapes_are_emulated_in_part() -> None:
    jobs, empty = draw_shapes(["rmsnorm"], H200, 3, 0)
    outcome = survey.survey(jobs, H200, 1, empty, emulate=2)
    assert len(outcome.emulated) == 2 and not any(text for _, text in outcome.emulated)
    assert "2 of 2 emulated are right" in survey.report(outcome, H200)
    late = survey.survey(jobs, H200, 1, empty, emulate=2, minutes=0.0)
    assert not late.emulated and not late.refused
