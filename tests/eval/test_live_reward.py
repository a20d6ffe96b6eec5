"""Live measuring: which workloads come next, also after a run goes on, and what they are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ptxflow.env.reward import ModelReward
from ptxflow.env.space import Space
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench import live_reward
from ptxflow.eval.bench.live_reward import AT_A_TIME, Live
from tests.builders import played, space_at

PLACES = [("gemm_n128_k2048", "M", m) for m in (1, 2, 4, 8, 16)] + [
    ("rmsnorm_h128", "batch_size", n) for n in (1, 4, 16, 64, 256)
]


@pytest.fixture(scope="module")
def spaces() -> list[Space]:
    return [space_at(n, {axis: size}) for n, axis, size in PLACES]


@pytest.fixture
def made(spaces: list[Space], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Live:
    monkeypatch.setattr(live_reward, "on_gpus", played(lambda strategy: 7.0))
    definitions = [load(name) for name, _, _ in PLACES]
    return Live(definitions, spaces, tmp_path / "m.jsonl", ModelReward())


def test_the_least_measured_come_next_also_after_a_run_goes_on(
    made: Live, spaces: list[Space]
) -> None:
    everything = range(len(spaces))
    first = made.next(everything)
    assert len(first) == AT_A_TIME and first == made.next(everything)
    assert {spaces[w].family.name for w in first} == {"gemm", "rmsnorm"}
    reward = made.measure({w: spaces[w].codes[:2] for w in first})
    later = Live(made.definitions, spaces, made.path, made.fallback)
    second = later.next(everything)
    assert set(everything) - set(first) <= set(second)
    assert set(later.next([0, 1])) == {0, 1}, "of what is active alone"
    assert len(
        Live(made.definitions, spaces, made.path, made.fallback, gpus=2).next(everything)
    ) == len(spaces)
    assert all(not len(later.known(w)) for w in set(everything) - set(first))
    w = first[0]
    assert np.array_equal(later.known(w), spaces[w].codes[:2])
    values = reward.tflops(spaces[w], spaces[w].codes[:3])
    assert values[:2] == pytest.approx(spaces[w].problem.flops / 7e-6 / 1e12)
    assert values[2] == pytest.approx(made.fallback.tflops(spaces[w], spaces[w].codes[2:3])[0])
    assert later.describe()["live"]["strategies"] == 2 * len(first)
