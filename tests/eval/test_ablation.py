"""Ablation: which choice is the default, what two kernels differ in, and what is made of that."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.compiler.family import Strategy
from ptxflow.env.measurements import REFINE
from ptxflow.env.space import Space
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.study import ablation
from ptxflow.eval.study.ablation import Face, ablate, differences, judge, measured_here, put_back
from tests.builders import space_at
from tests.scripted_gpu import scripted_gpu

NAME, AXES = "gemm_n5120_k2048", {"M": 17}
HELD_OUT = Path(ablation.MEASUREMENTS) / "h200-gemm-held-out.jsonl.xz"


@pytest.fixture(scope="module")
def space() -> Space:
    return space_at(NAME, AXES)


@pytest.fixture(scope="module")
def chosen(space: Space) -> Strategy:
    """One that uses TMA, a deep ring and split K, all of which can be put back alone."""
    fields = space.fields()
    deep = (fields.split_k == 2) & (fields.num_stages == 4) & (fields.warp_specialized == 1)
    return space.strategy(int(space.codes[np.flatnonzero(deep & (fields.swap == 1))[0]]))


def test_the_default_is_the_first_choice_that_is_valid(space: Space, chosen: Strategy) -> None:
    for decision in space.decisions:
        other = put_back(space, chosen, decision.name)
        had = getattr(chosen, decision.name)
        alone = [c for c in decision.choices
                 if not space.family.refusals(space.problem, chosen.replace(**{decision.name: c}),
                                              H200)]  # fmt: skip
        if other is None:
            assert alone == [had] and decision.choices[0] != had
        else:
            assert other == chosen.replace(**{decision.name: alone[0]})


def test_verdicts() -> None:
    assert judge(None, []) == judge(0.5, []) == "not implemented"
    assert judge(None, ["grid"]) == "realised"
    assert judge(0.009, ["grid"]) == judge(-0.009, ["grid"]) == "ineffective"
    assert (judge(0.011, ["grid"]), judge(-0.011, ["grid"])) == ("effective", "harmful")


def test_differences_tell_techniques_before_launch_before_counts() -> None:
    launch = {"grid": "8x1x1", "block": 128, "cluster": "1x1x1", "smem": 0, "parameters": "a"}
    body = ("LDS R1, [R2] ;", "FFMA R3, R1, R1, R3 ;", "LDS R4, [R2+0x10] ;")
    one = Face({"wgmma": 4, "TMA": 2}, body, b"1", (launch,), {"registers": 40})
    assert differences(one, one) == []
    assert differences(one, replace(one, code=b"2")) == ["scheduling of the same instructions"]
    moved = replace(one, code=b"2", instructions=(*body[:2], "LDS R4, [R2+0x20] ;"))
    assert differences(one, moved) == ["`LDS R4, [R2+0x10]`, by default `LDS R4, [R2+0x20]`"]
    other = Face({"wgmma": 8}, (*body[:2], body[1]), b"2", (launch | {"grid": "4x1x1"}, launch),
                 {"registers": 41})  # fmt: skip
    assert differences(one, other) == [
        "TMA 2, by default none", "launches 1, by default 2", "grid 8x1x1, by default 4x1x1",
        "registers 40, by default 41", "wgmma 4, by default 8", "LDS 2, by default 1",
        "FFMA 1, by default 2",
    ]  # fmt: skip


def test_a_strategy_is_taken_apart(space: Space, chosen: Strategy) -> None:
    """Real kernels: what a decision claims must be found, and times of both give the change."""
    other = put_back(space, chosen, "num_stages")
    assert other is not None
    times = {tuple(sorted(chosen.choices)): 2.0, tuple(sorted(other.choices)): 3.0}
    steps = {s.decision: s for s in ablate(space, chosen, times, jobs=1)}
    assert list(steps) == [d.name for d in space.decisions]
    ring = steps["num_stages"]
    assert (ring.chosen, ring.other, ring.verdict, ring.change) == (4, 2, "effective", 0.5)
    assert any(text.startswith("smem ") for text in ring.evidence)
    assert any(text.startswith("cluster ") for text in steps["split_k"].evidence)
    assert steps["split_k"].verdict == "realised" and steps["split_k"].change is None
    assert all(s.evidence for s in steps.values() if s.verdict in ("realised", "effective"))
    assert steps["cta_group"].verdict == "is the default"


def test_times_are_taken_here_in_the_same_rounds(
    space: Space, chosen: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted_gpu(monkeypatch, tmp_path)
    found = [put_back(space, chosen, d.name) for d in space.decisions]
    every = list(dict.fromkeys([chosen, *(s for s in found if s is not None)]))
    path = tmp_path / "r.jsonl"
    times = measured_here(load(NAME), AXES, space, every, path)
    refined = [r for r in read_records(path) if r.timing_pass == REFINE]
    right = [s for s in every if s.key[0] not in "df"]
    assert set(times) == {tuple(sorted(s.choices)) for s in right}
    assert [r.key for r in refined] == [s.key for s in right]


def test_the_command(
    tmp_path: Path, chosen: Strategy, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[Strategy] = []

    def fake(space: Space, strategy: Strategy, times: Any, jobs: int | None) -> list[Any]:
        asked.append(strategy)
        return [ablation.Step("swap", 1, 0, judge(0.25, ["grid"]), 0.25, ("grid",))]

    monkeypatch.setattr(ablation, "ablate", fake)
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"definition": NAME, "axes": AXES, **chosen.to_json()}))
    files = ["--measurements", str(HELD_OUT)]
    assert ablation.main(["--strategy", str(path), *files]) == 0
    assert asked == [chosen]
    assert "| swap | 1 | 0 | grid | effective | +25.0% |" in capsys.readouterr().out
    assert ablation.main(["--definition", NAME, "--axes", "M=17", *files]) == 0
    assert asked[1].swap == 1 and asked[1] != chosen, "the fastest that was measured"
    for argv, says in [
        ((), "give --strategy FILE, or --definition and --axes"),
        (("--definition", NAME, "--axes", "M=16", *files), "nothing was measured there"),
        (("--strategy", str(path), "--axes", "M=16"), "no strategy of this definition"),
    ]:
        assert ablation.main([*argv]) == 2
        assert says in capsys.readouterr().err
