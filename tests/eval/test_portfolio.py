"""The chooser on made-up times: as good as brute force, bounded, and nobody served by the worse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ptxflow.eval.sample.portfolio import choose, costs, mean_loss, merged


def made_up(seed: int, sizes: int = 12, kernels: int = 14) -> np.ndarray:
    """Kernels that are each good around a size of their own, some of them not everywhere."""
    rng = np.random.default_rng(seed)
    own, width = rng.uniform(0, sizes, kernels), rng.uniform(2, 8, kernels)
    away = np.abs(np.arange(sizes)[:, None] - own) / width
    times = np.exp(away + 0.1 * rng.standard_normal(away.shape))
    times[(away > 2) & (rng.random(away.shape) < 0.5)] = np.inf
    return times


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_near_the_best_of_all_portfolios(seed: int, most: int) -> None:
    times = made_up(seed)
    cost, found = costs(times), choose(times, most)
    assert len(set(found)) == len(found) <= most
    every = itertools.combinations(range(times.shape[1]), most)
    best = min(cost[:, list(some)].min(1).mean() for some in every)
    reached = cost[:, list(found)].min(1).mean()
    assert best - 1e-12 <= reached <= 1.15 * best
    if most == 1:
        assert reached == pytest.approx(best)


def test_mostly_the_best_of_all_portfolios() -> None:
    hits = 0
    for seed in range(40):
        cost = costs(times := made_up(seed))
        every = itertools.combinations(range(times.shape[1]), 3)
        best = min(cost[:, list(some)].min(1).mean() for some in every)
        hits += cost[:, list(choose(times, 3))].min(1).mean() < best + 1e-9
    assert hits >= 32


def test_every_size_is_served_before_any_is_served_well() -> None:
    times = np.array([[1.0, 9.0, np.inf], [1.0, 9.0, np.inf], [np.inf, 9.0, 1.0]])
    assert choose(times, 1) == (1,)
    assert set(choose(times, 2)) == {0, 2}
    assert set(choose(times, 3)) == {0, 2}  # a third would gain nothing
    assert mean_loss(times, (1,)) == pytest.approx(np.log(9))
    assert mean_loss(times, (0, 2)) == 0


def test_a_portfolio_needs_a_kernel_and_room() -> None:
    for times, most in ((np.ones((2, 0)), 1), (np.ones((2, 2)), 0)):
        with pytest.raises(ValueError, match="a portfolio of"):
            choose(times, most)


@pytest.mark.parametrize("seed", range(5))
def test_merging_changes_no_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bounds = [np.unique(rng.integers(1, 60, n)) for n in (6, 5)]
    cells = np.repeat(np.repeat(rng.integers(0, 2, (3, 3)), 2, 0), 2, 1)
    cells = cells[: len(bounds[0]), : len(bounds[1])]
    found, fewer = merged(bounds, cells)
    assert fewer.shape == tuple(map(len, found)) and fewer.size <= cells.size
    for place in itertools.product(*(range(1, b[-1] + 1) for b in bounds)):
        old = tuple(np.searchsorted(b, v) for b, v in zip(bounds, place, strict=True))
        new = tuple(np.searchsorted(b, v) for b, v in zip(found, place, strict=True))
        assert cells[old] == fewer[new]
    assert merged(found, fewer)[0] == found  # nothing is left to merge
