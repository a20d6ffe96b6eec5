"""The search of a reward: valid strategies alone, each asked for once, and the best of the list."""

import numpy as np
import pytest

from ptxflow.compiler.device import B200, H200
from ptxflow.env.relation import relate
from ptxflow.env.reward import ModelReward, log_reward
from ptxflow.env.search import USUAL, Search, Values, highest
from ptxflow.env.space import Codes, enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load

WORKLOADS = (
    ("gemm_n4096_k4096", {"M": 1000}, H200), ("gemm_n128_k2048", {"M": 17}, B200),
    ("rmsnorm_h4096", {"batch_size": 700}, B200),
    ("top_p_sampling_from_probs_v128256", {"batch_size": 20}, H200),
)  # fmt: skip


@pytest.mark.parametrize(("name", "axes", "device"), WORKLOADS, ids=lambda v: str(v)[:20])
def test_a_search_finds_the_best_of_the_list(name, axes, device) -> None:  # type: ignore[no-untyped-def]
    family, problem = find_problem(load(name), axes)
    listed, space = enumerate_space(family, problem, device), relate(family, problem, device)
    asked = list[Codes]()

    def worth(codes: Codes) -> Values:
        asked.append(codes)
        return ModelReward().tflops(space, codes)

    codes, values = USUAL.run(space, worth, seed=1)
    every = np.concatenate(asked)
    assert len(np.unique(every)) == len(every) == len(codes) < len(listed)
    assert np.isin(codes, listed.codes).all() and (np.diff(values) <= 0).all()
    best = ModelReward().tflops(listed, listed.codes).max()
    assert values[0] == pytest.approx(best, rel=2e-3)
    again = USUAL.run(listed, lambda c: ModelReward().tflops(listed, c), seed=1)
    np.testing.assert_array_equal(again[0], codes)


def test_a_search_of_a_space_that_is_exhausted_ends() -> None:
    family, problem = find_problem(load("gemm_n128_k2048"), {"M": 1})
    space = relate(family, problem, H200)
    row = space.indices(space.sample_uniform(1, np.random.default_rng(0)))[0]
    fixed = list(zip(family.decisions, row, strict=True))[: len(row) // 2]
    few = space.given({d.name: (d.choices[i],) for d, i in fixed})
    search = Search(drawn=4 * len(few), rounds=50, kept=len(few))
    codes, _ = search.run(few, lambda c: -c.astype(np.float64))
    assert 1 < len(few) < 1000
    assert len(codes) == len(few) and (np.diff(codes) > 0).all()


def test_a_search_goes_down_from_the_best() -> None:
    """Each round changes others, so that most of what weighs is found, not the best alone."""
    family, problem = find_problem(load("gemm_n4096_k4096"), {"M": 1000})
    listed = enumerate_space(family, problem, H200)
    worth = log_reward(ModelReward().tflops(listed, listed.codes), problem, H200, tau=0.02)
    weights = np.exp(worth - worth.max())
    search = Search(drawn=512, rounds=16, kept=64)
    codes, _ = search.run(listed, lambda c: worth[np.searchsorted(listed.codes, c)])
    found = weights[np.searchsorted(listed.codes, codes)].sum() / weights.sum()
    assert found > 0.8 and len(codes) < len(listed) / 4


def test_the_highest_are_the_head_of_a_stable_sort() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 3, 8, 40):
        values, asked = rng.integers(0, 5, 30).astype(np.float64), rng.random(30) < 0.7
        every = np.argsort(-values, kind="stable")
        assert (highest(values, asked, n) == every[asked[every]][:n]).all()
