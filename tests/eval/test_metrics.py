"""Figures against what they are by hand, and runs that are the same whatever runs them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any, ClassVar

import numpy as np
import pytest

from ptxflow.env.space import StrategySpace, enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.records import Record
from ptxflow.eval.study import metrics
from ptxflow.eval.study.kernels import fast, summary
from ptxflow.eval.study.knowledge import distance, look_up, trained_problems
from ptxflow.eval.study.metrics import Array, Sheet, ends, interval
from ptxflow.eval.study.results import Distribution, claims, describe, fidelity, matching
from ptxflow.eval.study.runs import Runs, evaluate
from ptxflow.eval.study.search.optimisers import CmaEs, Lfbo
from ptxflow.eval.study.search.plain import Exhaustive, Ranked, Uniform
from ptxflow.eval.study.search.play import Foul, Method
from ptxflow.eval.study.search.replay import Replay
from ptxflow.eval.study.tables import mass
from ptxflow.eval.study.tables import share as percentage


def sheet(rows: list[list[float]]) -> Sheet:
    """Of one workload: best so far over the optimum, a row a seed."""
    best = np.array([rows])
    return Sheet(best, np.zeros(best.shape))


def test_best_so_far_counts_failures_as_the_slowest_success(replays: list[Replay]) -> None:
    whole = replays[0]
    times = whole.times.copy()
    order = np.argsort(times)
    times[order[5]] = np.inf
    replay = Replay(whole.name, whole.space, times, whole.yardstick)
    run = Runs("by hand", replay.name, np.array([[order[5], order[9], order[9], order[0]]]))
    nine = times[order[9]] / times[order[0]]
    assert run.best(replay)[0] == pytest.approx([replay.slowest / replay.optimum, nine, nine, 1.0])


def test_gaps_reach_and_shares_by_hand() -> None:
    two = Sheet(np.array([[[2.0, 1.0], [1.2, 1.2]], [[1.0, 1.0], [1.0, 1.0]]]), np.zeros((2, 2, 2)))
    assert two.gap() == pytest.approx(np.sqrt([[2.0, 1.0], [1.2, 1.2]]) - 1)
    assert two.reach(0.99).tolist() == [[2, np.inf], [1, 1]]
    assert two.reach(0.80).tolist() == [[2, 1], [1, 1]]
    figures = metrics.judge(two, (1, 2))
    assert figures["solved"]["2"][0] == 0.75 and figures["reach"]["99%"][0] == 1.5
    assert metrics.judge(sheet([[1.5, 1.5]] * 3), (1, 2))["reach"]["90%"] == [None, None, None]
    assert metrics.share(np.array([[True, False], [True, False]]))[0] == 0.5


def test_matching_counts_until_others_are_as_good() -> None:
    ours = sheet([[1.1] * 8, [1.3] * 8, [1.2] * 8])  # its best of 8 is 1.2 at the median
    other = sheet([[1.5, 1.2, 1.0], [1.5, 1.5, 1.1], [1.5, 1.4, 1.3]])
    assert matching(ours, {"other": other})["other"][0] == 3  # after 2, 3 and never


def test_modes_are_counted_once(replays: list[Replay]) -> None:
    replay = replays[0]
    first, second = np.flatnonzero(replay.top)[:2]
    other = int(np.argmax(replay.times))
    asked = np.array([[first, other, first, second, second]])
    found = Sheet.of([Runs("m", replay.name, asked)], {replay.name: replay}, seeds=1)
    assert found.modes[0, 0].tolist() == [1, 1, 1, 2, 2]


def test_intervals_hold_the_median_and_shrink_with_seeds() -> None:
    rng = np.random.default_rng(0)
    few, many = rng.normal(size=20), rng.normal(size=2000)
    for values in (few, many):
        middle, low, high = interval(values)
        assert low <= middle == np.median(values) <= high
        assert interval(values) == (middle, low, high)
    assert np.diff(interval(many)[1:]) < np.diff(interval(few)[1:]) / 4
    assert interval(np.ones(10)) == (1, 1, 1)


def test_intervals_over_workloads_are_paired() -> None:
    """Two methods that differ alike everywhere differ for sure, however the workloads vary."""
    best = np.exp(np.random.default_rng(0).exponential(0.1, size=(20, 7)))
    low, high = ends(metrics.drawn_again(best))
    middle = np.median(np.exp(np.log(best).mean(0))) - 1
    assert low < middle < high and high - low > 0.02
    assert ends(metrics.paired(1.01 * best, best)) == pytest.approx((0.01, 0.01))
    assert ends(metrics.paired(best, best)) == (0, 0)
    one = np.exp([[0.1] * 7, [0.3] * 7])  # of two workloads both, or one twice
    assert set(np.round(np.log1p(metrics.drawn_again(one)), 6)) == {0.1, 0.2, 0.3}


def played(name: str, replay: Replay, place: int, seeds: int = 3) -> Runs:
    """Whose first measurement is the strategy of this rank, and stays the best."""
    at = np.argsort(replay.times)[place]
    return Runs(name, replay.name, np.full((seeds, 8), at))


def test_claims_have_a_figure_an_interval_and_a_verdict(replays: list[Replay]) -> None:
    at = {r.name: r for r in replays}
    runs = {name: [played(name, r, place) for r in replays]
            for name, place in (("policy", 0), ("TPE", 200), ("uniform random", 400))}  # fmt: skip
    found = claims(at, runs, 3)
    assert [c["kind"] for c in found] == ["loss", "share", "share", "measurements"]
    assert all(c["holds"] and c["low"] <= c["figure"] <= c["high"] for c in found)
    assert found[0]["figure"] == 0 and found[3]["figure"] == 1
    late = {**runs, "policy": [played("policy", r, 400) for r in replays]}
    first, *_, last = claims(at, late, 3)
    times = [r.times[np.argsort(r.times)[400]] / r.optimum for r in replays]
    assert first["figure"] == pytest.approx(np.exp(np.log(times).mean()) - 1, rel=1e-5)
    assert first["low"] == pytest.approx(min(times) - 1, rel=1e-5)
    assert first["high"] == pytest.approx(max(times) - 1, rel=1e-5)
    assert not first["holds"] and last["figure"] is None and not last["holds"]
    trained = {name: replace(r, kind="trained") for name, r in at.items()}
    assert claims(trained, runs, 3) == [] == claims(at, {"policy": runs["policy"]}, 3)


def test_the_mass_of_a_policy_is_what_it_has_in_the_sub_space(replays: list[Replay]) -> None:
    logs = np.log(np.full(len(replays[0].times), 0.25 / len(replays[0].times)))
    policy = Distribution("policy", logs)
    assert policy.mass == pytest.approx(0.25)
    assert describe(replays[0], [policy])["mass"] == 0.25
    assert describe(replays[0])["mass"] is None
    page = {"workloads": [describe(replays[0], [policy]), describe(replays[1], [policy])]}
    assert mass(page).startswith("In these sub-spaces is 25.0% of the policy's probability")
    assert mass({"workloads": [describe(replays[0])]}) == ""
    assert [percentage(v) for v in (0.127, 3.2e-9, 0.0, None)] == ["12.7%", "3e-09", "0.00%", "-"]


def test_a_look_up_is_of_the_nearest_trained_problem(replays: list[Replay]) -> None:
    """What its reward says there, and nothing of what is judged."""

    class Asked:
        name = "asked"
        problems: ClassVar[list[int]] = []

        def tflops(self, space: StrategySpace, codes: Any) -> Array:
            self.problems.append(space.problem["M"])
            return -np.arange(len(codes), dtype=float)

    (space,) = (r.space for r in replays if r.space.problem["M"] == 17)
    trained = trained_problems(("gemm_n5120_k2048", "gemm_n128_k2048"), "gemm")
    found = look_up(space, Asked(), trained)
    assert found is not None and Asked.problems == [20], "rounded up, though 16 is nearer"
    (smaller,) = (p for p in trained if dict(p.axes) == {**dict(space.problem.axes), "M": 16})
    found = look_up(space, Asked(), [smaller])
    assert found is not None
    known = np.isin(space.codes, enumerate_space(space.family, smaller, space.device).codes)
    assert known.any() and not known.all() and np.isneginf(found[~known]).all()
    assert found[known].tolist() == [-float(i) for i in range(int(known.sum()))]
    assert look_up(space, Asked(), []) is None
    top_k, top_p = (
        find_problem(load(f"{kind}_sampling_from_probs_v128256"), {"batch_size": size})[1]
        for kind, size in (("top_k", 20), ("top_p", 64))
    )
    asked = find_problem(load("top_p_sampling_from_probs_v128256"), {"batch_size": 20})[1]
    assert distance(top_p, asked) < distance(top_k, asked) < distance(space.problem, asked)


def test_distances_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(1)
    p, q = (metrics.normalised(rng.normal(size=6)) for _ in range(2))
    subsets = [list(s) for n in range(7) for s in combinations(range(6), n)]
    largest = max(abs(np.exp(p[s]).sum() - np.exp(q[s]).sum()) for s in subsets)
    assert metrics.total_variation(p, q) == pytest.approx(largest)
    assert metrics.total_variation(p, p) == 0 == metrics.jensen_shannon(p, p)
    apart = np.array([0.0, -np.inf]), np.array([-np.inf, 0.0])
    assert metrics.total_variation(*apart) == 1 == metrics.jensen_shannon(*apart)
    assert metrics.jensen_shannon(p, q) == pytest.approx(metrics.jensen_shannon(q, p))


def test_the_measured_target_is_at_no_distance_from_itself(replays: list[Replay]) -> None:
    replay = replays[0]
    truth = metrics.measured_target(replay)
    assert np.exp(truth).sum() == pytest.approx(1) and truth.argmax() == replay.times.argmin()
    found = fidelity(replay, [Distribution("right", truth + 3.0, own=truth)])
    right = {k: found["right"][k] for k in ("tv", "own_tv", "reward_tv")}
    assert right == pytest.approx({"tv": 0, "own_tv": 0, "reward_tv": 0}, abs=1e-9)
    assert found["uniform"]["tv"] > 0.5


def record(m: int, ratio: float, status: str = "ok") -> Record:
    latency = {"median": 10 / ratio, "q1": 1.0, "q3": 1.0, "samples": 7.0} if ratio else None
    return Record("gemm_n128_k2048", {"M": m}, {"family": "gemm", "choices": {}}, f"{m} {ratio}",
                  "h200", status, latency_us=latency, peers={"torch.mm": 10.0},
                  ratio=ratio or None)  # fmt: skip


def test_kernels_that_are_wrong_count_as_no_speedup() -> None:
    found = summary([record(1, 2.0), record(1, 1.0), record(2, 0.5), record(3, 0.0, "wrong")])
    gemm = found["gemm"]
    assert (gemm["kernels"], gemm["right"], gemm["workloads"]) == (4, 3, 3)
    assert (gemm["min"], gemm["median"], gemm["max"]) == (0, 0.5, 2)
    assert gemm["above"] == pytest.approx(1 / 3, rel=1e-5) and gemm["geometric_mean"] == 0
    assert [fast([0.0, 0.5, 2.0], p) for p in (0.4, 0.5, 1.9, 2.0)] == [2 / 3, 1 / 3, 1 / 3, 0]


def test_runs_are_the_same_on_one_process_and_on_two(replays: list[Replay]) -> None:
    methods: list[Method] = [Uniform(), Exhaustive(), CmaEs(), Lfbo()]
    given = {r.name: methods for r in replays}
    one, two = (evaluate(replays, given, seeds=3, budget=8, jobs=jobs) for jobs in (1, 2))
    assert [(r.method, r.workload, r.asked.shape) for r in one[:2]] == [
        ("uniform random", replays[0].name, (3, 8)), ("exhaustive", replays[0].name, (1, 8)),
    ]  # fmt: skip
    for a, b in zip(one, two, strict=True):
        assert (a.method, a.workload) == (b.method, b.workload)
        assert np.array_equal(a.asked, b.asked)


class Peeking(Ranked):
    """Finds the replay among its callers."""

    def search(self, space, rng):  # type: ignore[no-untyped-def]
        import sys

        frame = sys._getframe()
        while frame is not None and "replay" not in frame.f_locals:
            frame = frame.f_back  # type: ignore[assignment]
        yield from (int(at) for at in np.argsort(frame.f_locals["replay"].times))


def test_an_evaluation_refuses_a_method_that_peeks(replays: list[Replay]) -> None:
    planted = Peeking("planted", np.zeros(len(replays[0].times)))
    with pytest.raises(Foul, match=f"planted on {replays[0].name}: measurement 1 depends"):
        evaluate(replays[:1], {replays[0].name: [planted]}, seeds=2, budget=10)


def test_a_space_that_is_measured_whole_counts_on(replays: list[Replay]) -> None:
    """The longer runs of other workloads are not cut to those of the smallest space."""
    one, two = replays[:2]
    runs = [
        Runs("m", one.name, np.array([[2, int(np.argmin(one.times))]])),
        Runs("m", two.name, np.array([[2, 1, 0]])),
    ]
    found = Sheet.of(runs, {r.name: r for r in (one, two)}, seeds=1)
    assert found.best.shape == found.modes.shape == (2, 1, 3)
    assert found.best[0, 0].tolist() == [*runs[0].best(one)[0], 1.0]
    assert found.best[1, 0].tolist() == runs[1].best(two)[0].tolist()
    assert found.modes[0, 0, 2] == found.modes[0, 0, 1] == 1 + one.top[2]


def resampled(values: Array, statistic: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """A statistic over the first axis and its interval, of resamples that are made."""
    rows = np.random.default_rng(0).integers(len(values), size=(metrics.RESAMPLES, len(values)))
    drawn = statistic(values[rows], axis=1)
    ends = np.percentile(drawn, [2.5, 97.5], axis=0, method="inverted_cdf")
    return statistic(values, axis=0), *ends


@pytest.mark.parametrize("seeds", [1, 2, 7, 50])
def test_intervals_are_those_of_resamples_that_are_made(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    values = np.round(rng.random((seeds, 12)), 1)  # some are equal, and some seeds reach nothing
    values[rng.random(values.shape) < 0.1] = np.inf
    for ours, made in zip(interval(values), resampled(values, np.median), strict=True):
        assert np.array_equal(ours, made)

    def over_both(rows: Array, axis: int) -> Array:
        return np.asarray(np.median(rows, axis=(axis, axis + 1)))

    assert metrics.pooled(values.T) == tuple(map(float, resampled(values, over_both)))
    told = rng.random((5, seeds)) < 0.4
    assert metrics.share(told) == pytest.approx(resampled(told.mean(0), np.mean), rel=1e-12)
