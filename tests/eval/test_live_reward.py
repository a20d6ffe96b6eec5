"""Live measuring: what comes next, also after a run goes on, and what it is given."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ptxflow.env.measurements import REFINE
from ptxflow.env.reward import ModelReward
from ptxflow.env.space import Space
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench import live_reward
from ptxflow.eval.bench.live_reward import AT_A_TIME, Live
from ptxflow.eval.bench.measurer import open_measurer, seconds
from ptxflow.eval.bench.worker import Worker, WorkerError
from ptxflow.eval.sample.live import Field
from tests.builders import played, space_at
from tests.scripted_gpu import MADE, scripted_gpu

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


NAME = "gdn_decode_qk16_v32_d128_k_last"


@pytest.fixture
def field() -> Field:
    return Field.of((NAME, {"batch_size": 20}), "h200", wide=False)


@pytest.fixture(autouse=True)
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Worker:
    return scripted_gpu(monkeypatch, tmp_path)


def test_what_is_asked_for_again_is_not_measured_again(field: Field, tmp_path: Path) -> None:
    candidates, path = field.candidates(field.space.listed().codes[:100]), tmp_path / "r.jsonl"
    (tmp_path / "broken").touch()  # the child dies once; the kernel is measured by the next
    with open_measurer(path, field.space.device, [field.space.family], "test") as measure:
        first = measure(candidates)
        assert measure(candidates[::-1]) == first[::-1]
        again = measure.together([c for c, r in zip(candidates, first, strict=True)
                                  if r.status == "ok"][:3])  # fmt: skip
    status = {"d": "compile_error", "f": "wrong"}
    assert [r.status for r in first] == [status.get(r.key[0], "ok") for r in first]
    assert {r.status for r in first} == {"ok", "wrong", "compile_error"}
    assert [seconds(r) < 1 for r in first] == [r.status == "ok" for r in first]
    assert [r.timing_pass for r in again] == [REFINE] * 3 and set(again[0].peers) > {"copy"}
    with open_measurer(path, field.space.device, [field.space.family], "test") as measure:
        made = MADE.total()
        assert [r.to_json() for r in measure(candidates)] == [r.to_json() for r in first]
        assert MADE.total() == made


def test_a_machinery_that_fails_twice_ends_the_run(
    field: Field, tmp_path: Path, rig: Worker
) -> None:
    rig.command = [sys.executable, "-c", "raise SystemExit(1)"]
    path = tmp_path / "r.jsonl"
    with open_measurer(path, field.space.device, [], "test") as m, pytest.raises(WorkerError):
        m(field.candidates(field.space.listed().codes[:16]))
