"""Policies that learn from what they measure: how they play, and what is made of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ptxflow.env.space import Space
from ptxflow.eval.study import tuning
from ptxflow.eval.study.metrics import measured_target
from ptxflow.eval.study.runs import AT, evaluate
from ptxflow.eval.study.search.plain import Ranked, Uniform
from ptxflow.eval.study.search.play import interference, play
from ptxflow.eval.study.search.replay import Replay
from ptxflow.eval.study.tables import standing as standing_table
from ptxflow.eval.study.tables import tuning as tuning_table
from ptxflow.eval.study.tuning import (
    Learner,
    Stage,
    TunedSearch,
    curve,
    standing,
    tuned,
    tunings,
    unseen,
)
from ptxflow.gfn.fine_tuning import EVERY


def test_what_was_measured_is_what_it_is_tuned_on(
    replays: list[Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every EVERY measurements, on all of them, in seconds, from the policy as it was given."""
    replay, told = replays[0], []

    def propose(policy: Any, space: Space, count: int, known: Any, seed: int) -> Any:
        left = np.setdiff1d(space.codes, known)
        return np.random.default_rng([seed, len(known)]).choice(left, count, replace=False)

    def fine_tune(policy: Any, space: Space, measured: Any, *, seed: int) -> str:
        told.append((policy, measured))
        return f"{policy}+"

    monkeypatch.setattr(tuning, "propose", propose)
    monkeypatch.setattr(tuning, "fine_tune", fine_tune)
    given: Any = "policy"
    method = TunedSearch("policy + tuning", given, replay.yardstick * 1e-6)
    asked = play(method, replay, 3 * EVERY, 0)
    assert len(set(asked.tolist())) == 3 * EVERY
    assert [len(m) for _, m in told] == [EVERY, 2 * EVERY] and {p for p, _ in told} == {"policy"}
    last = told[-1][1]
    at = np.sort(asked[: 2 * EVERY])
    assert np.array_equal(last.codes, replay.space.codes[at])
    assert last.seconds == pytest.approx(replay.seconds[at])
    assert interference(method, replay, asked[: 2 * EVERY]) is None
    tuned(given, replay.space, [], np.zeros(0), 0)
    assert told[-1] == ("policy", None)


def test_curves_and_standing(replays: list[Replay]) -> None:
    at = {r.name: r for r in replays}
    best = {r.name: [Ranked("best", -r.times)] for r in replays}
    runs = evaluate(replays, best, 2, AT[-1])
    first = dict.fromkeys(at, 0.21)
    figures = curve(runs, at, first, 2)
    assert figures[0] == [pytest.approx(0.21)] * 3 and figures[1:] == [[0.0] * 3] * 3
    short = curve(evaluate(replays, best, 2, 8), at, first, 2)
    assert short == [*figures[:2], [None] * 3, [None] * 3]
    stages = [Stage(r.name, n, measured_target(r) if n else np.zeros(len(r.times)))
              for r in replays for n in (0, 8)]  # fmt: skip
    found = standing(stages, at)
    assert list(found) == ["0", "8"] and found["8"]["tv"] == pytest.approx(0, abs=1e-9)
    assert found["0"]["tv"] > 0.5 and found["0"]["draw"] > found["8"]["draw"] > 0


@dataclass(frozen=True)
class Oracle(Ranked):
    """Ranks by what it was given; sure of it once it has measured something."""

    def logs(self, space: Space, asked: Sequence[int], times: Any) -> Any:
        return self.scores * len(asked)


def test_learners_stand_beside_searches(replays: list[Replay]) -> None:
    names = tuple(r.name for r in replays)
    uniform = {r.name: [Uniform()] for r in replays}
    runs = evaluate(replays, uniform, 4, AT[-1])
    learner = Learner("policy", "held out", names, lambda r: Oracle("policy + tuning", -r.times))
    (item,) = tunings([learner], replays, runs, 4, 1)
    assert set(item["curves"]) == {"policy + tuning", "uniform random"}
    ours, theirs = (item["curves"][n] for n in ("policy + tuning", "uniform random"))
    assert ours[1][0] == 0 < theirs[-1][0] < theirs[1][0] < theirs[0][0]
    table = tuning_table(item).splitlines()
    assert table[0].startswith("| method | after 0 | after 8 |")
    assert table[2].startswith("| policy + tuning |")
    assert "| policy itself | after 0 |" in standing_table(item)


def test_unseen_definitions_are_those_of_a_known_family(replays: list[Replay]) -> None:
    names = {r.space.problem.definition for r in replays}
    settings = {
        "h200": {"device": "h200", "definitions": [*names, "gemm_n128_k2048"]},
        "fewer": {"device": "h200", "definitions": ["gemm_n128_k2048", "my_gemm.json"]},
        "norms": {"device": "h200", "definitions": ["rmsnorm_h4096"]},
        "b200": {"device": "b200", "definitions": ["gemm_n128_k2048"]},
    }
    assert unseen(replays, settings) == {"fewer": [r.name for r in replays]}
