"""The rules of play: budgets count, honest methods are let be, and methods that peek are caught."""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.compiler.family import Decision, Demand, Problem, Rule
from ptxflow.env.space import Space, enumerate_space
from ptxflow.eval.study.search.bico import Bico, log, plateau, reuse
from ptxflow.eval.study.search.optimisers import GENETIC, TPE, CmaEs, Grid, Lfbo, Projection
from ptxflow.eval.study.search.plain import Drawn, Exhaustive, Ranked, Sequential, Uniform
from ptxflow.eval.study.search.play import Foul, Method, Search, interference, play
from ptxflow.eval.study.search.process import Process, Residuals, _slope
from ptxflow.eval.study.search.replay import Replay, closed, kept
from tests.builders import toy_family

ROOT = Path(__file__).resolve().parents[2]
WIDE = Rule(
    "wide and tall are not both large", ("tall", "wide"), lambda f, p, d: f.tall * f.wide < 40
)


def load(f: Any, problem: Problem, device: Any) -> Demand:
    zero = 0 * f.tall
    moved = 1e6 / f.tall + 1e6 / f.wide
    return Demand(1 + zero, 1, 1, 1, 2, 1, 1, moved, 0, 0, 0, 1, 0)


FAMILY = toy_family(
    "toy",
    (
        Decision("tall", (1, 2, 4, 8), "rows"), Decision("wide", (1, 2, 4, 8), "columns"),
        Decision("order", ("row", "column", "snake"), "of tiles"),
        Decision("depth", (2, 3, 4, 5, 6), "of the ring"),
    ),
    (WIDE,),
    demand=load,
)  # fmt: skip
PROBLEM = Problem("toy", "toy_n64", (("M", 8), ("N", 64)), "float16", 1e9, 1e6)
SPACE = enumerate_space(FAMILY, PROBLEM, H200)


def times(seed: int = 0) -> Any:
    """Separable, with a little noise: searches have something to find."""
    rows = SPACE.indices()
    weight = np.random.default_rng(seed).random((4, 5))
    value = sum(weight[i, rows[:, i]] for i in range(4))
    return 1 + value + 0.01 * np.random.default_rng(1).random(len(rows))


REPLAY = Replay("toy M=8", SPACE, times(), 10.0)
SCORES = np.random.default_rng(2).random(len(SPACE))
METHODS: tuple[Method, ...] = (
    Uniform(), Exhaustive(), Sequential(), Ranked("ranked", SCORES), Drawn("drawn", SCORES, 2.0),
    Bico(), TPE, CmaEs(), GENETIC, Lfbo(), Process("process"),
    Process("process from a policy", SCORES, 2.0),
)  # fmt: skip


def judged(method: Method, budget: int) -> str | None:
    """Why the method is not to be trusted, or None."""
    try:
        return interference(method, REPLAY, play(method, REPLAY, budget, 0))
    except Foul as foul:
        return str(foul)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_methods_are_honest_and_repeat_themselves(method: Method) -> None:
    """No strategy twice, never more than the budget, the same numbers for the same seed."""
    asked = play(method, REPLAY, 40, seed=3)
    assert len(asked) == 40 == len(set(asked))
    assert np.array_equal(asked, play(method, REPLAY, 40, seed=3))
    assert np.array_equal(asked, play(method, REPLAY, 40, seed=4)) is not method.seeded
    assert judged(method, 40) is None


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_methods_end_with_the_space(method: Method) -> None:
    if method.name != "genetic algorithm":  # slow to get there, and no different from TPE
        assert sorted(play(method, REPLAY, 10**6, seed=0)) == list(range(len(SPACE)))


@dataclass(frozen=True)
class Planted:
    """A method that finds the times, by a function that gets what a search gets."""

    find: Callable[[Space], Any]
    name: str = "peek"
    seeded: bool = False

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        known = self.find(space)
        yield from (int(at) for at in np.argsort(known, kind="stable"))


def by_frames(space: Space) -> Any:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if "replay" in frame.f_locals:
            return frame.f_locals["replay"].times
    raise AssertionError("nothing to peek at")


def by_heap(space: Space) -> Any:
    return next(o.times for o in gc.get_objects() if isinstance(o, Replay) and o.space is space)


def by_file(space: Space) -> Any:
    with open(ROOT / "eval" / "measurements" / "h200-gemm-trained.jsonl.xz", "rb") as file:
        return np.frombuffer(file.read(len(space)), np.uint8)


@pytest.mark.parametrize(
    ("find", "says"),
    [(by_frames, "that it was not told"), (by_heap, "walks the heap"), (by_file, "opens ")],
)
def test_methods_that_peek_are_caught(find: Callable[[Space], Any], says: str) -> None:
    why = judged(Planted(find), 20)
    assert why is not None and says in why and why.startswith("peek on toy M=8: ")


@dataclass(frozen=True)
class Late:
    """Plays fair for 10 measurements, then goes straight to the optimum."""

    name: str = "late"
    seeded: bool = True
    held: list[Any] = field(default_factory=list)

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        for n, at in enumerate(rng.permutation(len(space))):
            yield int(np.argmin(by_frames(space))) if n == 10 else int(at)


def test_peeking_late_is_caught_and_located() -> None:
    assert "measurement 11 depends" in str(judged(Late(), 20))


@dataclass(frozen=True)
class Asking:
    """Asks for the indices given, whatever it is told."""

    indices: Sequence[int]
    name: str = "asking"
    seeded: bool = False

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        yield from (int(at) for at in self.indices)


@pytest.mark.parametrize("at", [-1, len(SPACE)])
def test_only_strategies_of_the_space_are_measured(at: int) -> None:
    with pytest.raises(Foul, match="is no strategy of the"):
        play(Asking([0, at]), REPLAY, 5, seed=0)


def test_every_measurement_costs() -> None:
    """Asking again is paid again, and nothing is sold beyond the budget."""
    assert play(Asking([3, 3, 3, 5]), REPLAY, 3, seed=0).tolist() == [3, 3, 3]
    assert play(Asking([3, 4]), REPLAY, 9, seed=0).tolist() == [3, 4]


def test_a_space_cannot_be_written() -> None:
    codes = SPACE.codes.copy()
    codes.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        Space(FAMILY, PROBLEM, H200, codes).codes[0] = 1


def test_projection_takes_the_nearest_that_is_left() -> None:
    grid = Grid.of(SPACE)
    projection = Projection(grid, np.random.default_rng(0))
    proposal = [3, 3, 0, 0]  # invalid: wide and tall
    taken = [projection.nearest(proposal) for _ in range(len(SPACE))]
    distance = (grid.rows[taken] != np.array(proposal)).sum(1)
    assert sorted(taken) == list(range(len(SPACE)))
    assert distance[0] == 1 and (np.diff(distance) >= 0).all()
    with pytest.raises(IndexError):
        projection.nearest(proposal)


def test_an_optimiser_outlives_failures() -> None:
    """A kernel that failed is told as slow, not as infinite, which samplers refuse."""
    broken = times()
    broken[::3] = np.inf
    for method in (TPE, CmaEs(), GENETIC, Lfbo()):
        assert len(play(method, Replay("toy", SPACE, broken, 1.0), 30, seed=0)) == 30


def test_sub_spaces_have_no_holes() -> None:
    rows = SPACE.indices()
    part = SPACE.codes[(rows[:, 0] > 1) & (rows[:, 2] == 0)]
    assert closed(part, SPACE) and closed(SPACE.codes, SPACE)
    assert not closed(np.delete(part, 3), SPACE)
    assert kept(Space(FAMILY, PROBLEM, H200, part), SPACE) == {"tall": (4, 8), "order": ("row",)}


def test_bico_ranks_by_work_over_bytes() -> None:
    f = SPACE.fields()
    assert reuse(SPACE) == pytest.approx(1e9 / (1e6 / f.tall + 1e6 / f.wide))
    asked = play(Bico(), REPLAY, len(SPACE), seed=0)
    assert (np.diff(reuse(SPACE)[asked].round(9)) <= 0).all()


def test_the_log_counts_the_sink_and_sees_the_plateau() -> None:
    rows = log([5, 4, 3, 2], [9.0, 7.0, 8.0, 6.0])
    assert [(r.budget, r.best, r.sink) for r in rows] == [
        (1, 9, 0),
        (2, 7, 1),
        (3, 7, 2),
        (4, 6, 3),
    ]
    steady = [10.0, 5.0, *[6.0] * 20]
    assert plateau(steady, window=4) == 6  # tests 3 to 6 brought nothing
    assert plateau([10.0 * 0.9**n for n in range(30)], window=4) is None


def test_the_process_is_conditioned_as_by_hand() -> None:
    """Against the covariance matrix inverted at once."""
    rows = Grid.of(SPACE).rows.astype(np.int8)
    rng = np.random.default_rng(0)
    asked, values = rng.permutation(len(rows))[:12], rng.random(12)
    state = Residuals(rows)
    for at, value in zip(asked, values, strict=True):
        state.add(int(at), value)
    apart = (rows[:, None] != rows[None]).sum(2)
    covariance = 0.75**apart
    inverse = np.linalg.inv(covariance[np.ix_(asked, asked)] + 0.01 * np.eye(12))
    toward = covariance[asked]
    assert state.spread == pytest.approx(1 - np.einsum("an,ab,bn->n", toward, inverse, toward))
    rest = np.linalg.solve(state.factor, values)
    assert rest @ state.whitened == pytest.approx(values @ inverse @ toward)


def test_a_policy_is_believed_as_far_as_it_is_right() -> None:
    x = np.linspace(-10, 0, 60)
    noise = np.random.default_rng(0).normal(0, 0.01, 60)
    assert _slope(x, 1 - 0.05 * x + noise) == pytest.approx(0.05, rel=0.2)
    assert _slope(x, 1 + 0.05 * x + noise) == 0  # it misleads
    assert _slope(x[[0, -1]], np.ones(2)) == pytest.approx(0.02, rel=0.3)  # too early to say
    assert _slope(np.zeros(5), noise[:5]) == 0
