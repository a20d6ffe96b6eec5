"""Acquisitions replayed on recorded measurements."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.env.observations import Observations, read_observed
from ptxflow.eval.study import acquisition
from ptxflow.eval.study.acquisition import ACQUISITIONS, SHOWN, Rows, State, losses, needed, rounds

FILE = Path(acquisition.FOLDER) / "h200-streaming-trained.jsonl.xz"


@pytest.fixture(scope="module")
def observed() -> list[Observations]:
    return [o for o in read_observed([FILE], H200)[0] if o.family.name == "gdn_decode"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquisition, "CONFIG", replace(acquisition.CONFIG, steps=20))
    monkeypatch.setattr(acquisition, "SHARES", list(SHOWN))


@pytest.mark.parametrize("name", ACQUISITIONS)
def test_picks_are_distinct_and_know_no_time_that_was_not_told(
    name: str, observed: list[Observations]
) -> None:
    pool, seconds = Rows.of(observed), np.concatenate([o.seconds for o in observed])
    asked = pool, seconds, ACQUISITIONS[name], (12, 24, 36), 0
    *_, (before, _), (told, _) = rounds(*asked)
    assert len(set(told.tolist())) == 36
    rest = np.setdiff1d(np.arange(len(seconds)), before)
    seconds[rest] = seconds[rest][::-1]
    assert [t.tolist() for t, _ in rounds(*asked)][-1] == told.tolist()


def test_a_batch_is_diverse_and_a_true_order_loses_nothing(observed: list[Observations]) -> None:
    twice = Rows.of([observed[0], observed[0]])
    flat, n = replace(twice, modelled=np.zeros(len(twice.x))), len(observed[0])
    rng, nothing = np.random.default_rng(0), np.zeros(0, np.int64)
    state = State.of(flat, None, nothing, np.zeros(0), rng)
    assert len(np.unique(acquisition.dpp(state, n // 2) % n)) == n // 2
    rows = Rows.of(observed)
    seconds = np.concatenate([o.seconds for o in observed])
    true = State.of(replace(rows, modelled=np.log(seconds)), None, nothing, np.zeros(0), rng)
    assert (losses(true, seconds)[:, 0] == 0).all() and losses(true, seconds)[:, 1].max() < 0.05


def test_a_table_of_what_was_played(observed: list[Observations]) -> None:
    assert needed(np.array([1.0, 0.1, 0.4, 0.1, 0.1]), (0, 1, 2, 3, 4), 0.2) == 3
    assert needed(np.array([0.1, 0.4]), (0, 1), 0.2) == np.inf
    rows = list(acquisition.play(observed[2:], observed[:2], 1))
    lines = acquisition.table(rows).splitlines()
    assert len(lines) == 5 + len(ACQUISITIONS) and lines[2].startswith("| a quarter of the pool |")
