"""What runs are worth: gaps, measurements to a goal, shares solved, modes, exact distances.

Figures are medians over seeds with a 95% interval by bootstrap over the seeds, whose generator is
fixed: what varies is a method's luck. How much hangs on the workloads that were played is another
interval, by bootstrap over these, the same draws for every method, so that two may be paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.special import log_softmax

from ptxflow.env.reward import TAU, log_reward
from ptxflow.eval.study.runs import Runs
from ptxflow.eval.study.search.replay import Replay

Array = NDArray[np.float64]
LEVELS = (0.90, 0.95, 0.99)  # of the optimum's speed
RESAMPLES = 1000
MODES_IN = 64  # measurements among which modes are counted
Figure = tuple[float, float, float]  # median, ends of its interval


@dataclass(frozen=True)
class Sheet:
    """A method's runs on some workloads: best so far over the optimum, [workloads, seeds, budget],
    and distinct modes so far, of the same shape."""

    best: Array
    modes: Array

    @staticmethod
    def of(runs: Sequence[Runs], replays: Mapping[str, Replay], seeds: int) -> "Sheet":
        """Runs of one method; that of a method that draws nothing counts for every seed, and what
        a space that was measured whole had at its end counts from there on."""
        best, modes = [], []
        for run in runs:
            replay = replays[run.workload]
            best.append(_spread(run.best(replay), seeds))
            modes.append(_spread(_distinct(replay.top[run.asked], run.asked), seeds))
        length = max(b.shape[1] for b in best)
        return Sheet(*(np.stack([_held(a, length) for a in kind]) for kind in (best, modes)))

    def gap(self) -> Array:
        """[seeds, budget] geometric mean over the workloads of what the best so far loses."""
        return np.exp(np.log(self.best).mean(0)) - 1

    def reach(self, level: float) -> Array:
        """[workloads, seeds] measurements until the best reaches a share of the optimum's speed;
        infinite where it did not within the budget."""
        there = self.best <= 1 / level + 1e-12
        first = there.argmax(2) + 1.0
        return np.where(there.any(2), first, np.inf)


def _held(rows: Array, length: int) -> Array:
    """[runs, length]: the last column again, beyond what there is."""
    return np.pad(rows, ((0, 0), (0, length - rows.shape[1])), "edge")


def _spread(rows: Array, seeds: int) -> Array:
    return np.broadcast_to(rows, (seeds, rows.shape[1])) if len(rows) == 1 else rows


def _distinct(hits: NDArray[np.bool_], asked: NDArray[np.int64]) -> Array:
    """[runs, budget] how many different modes were met so far."""
    new = hits.copy()
    for row, seen in zip(new, asked, strict=True):
        first = np.zeros(len(seen), bool)
        first[np.unique(seen, return_index=True)[1]] = True
        row &= first
    return np.cumsum(new, axis=1).astype(np.float64)


@cache
def resamples(seeds: int) -> NDArray[np.int16]:
    """[seeds, RESAMPLES] how often each seed is drawn; the same for every figure."""
    drawn = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    counts = np.zeros((seeds, RESAMPLES), np.int16)
    np.add.at(counts, (drawn, np.arange(RESAMPLES)[:, None]), 1)
    return counts


def medians(values: Array, counts: NDArray[np.int16]) -> Array:
    """[resamples, ...] medians over the first axis of values [n, ...] that each are there as often
    as counts [n, resamples] say, which have one sum.

    A walk through the sorted values for all resamples at once, and none of these is made.
    """
    flat = values.reshape(len(values), -1)
    order = np.argsort(flat, axis=0, kind="stable")
    ranked = np.take_along_axis(flat, order, 0)
    total = int(counts[:, 0].sum())
    passed = np.zeros((flat.shape[1], counts.shape[1]), np.int32)
    low, high = np.zeros_like(passed), np.zeros_like(passed)
    for rank in range(len(flat)):
        passed += counts[order[rank]]
        low += passed <= (total - 1) // 2
        high += passed <= total // 2
    columns = np.arange(flat.shape[1])[:, None]
    middle: Array = (ranked[low, columns] + ranked[high, columns]) / 2
    return middle.T.reshape(counts.shape[1], *values.shape[1:])


def ends(drawn: Array) -> tuple[Any, Any]:
    """Of the 95% interval of a statistic [resamples, ...]."""
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0, method="inverted_cdf")
    return low, high


def interval(values: Array) -> tuple[Any, Any, Any]:
    """Medians over seeds of values [seeds, ...] and the ends of their 95% bootstrap interval."""
    return np.median(values, axis=0), *ends(medians(values, resamples(len(values))))


def drawn_again(best: Array) -> Array:
    """[RESAMPLES] what the best so far [workloads, seeds], over the optimum's time, loses when the
    workloads are drawn again: the median over seeds of the geometric mean."""
    counts = resamples(len(best))
    means = counts.T @ np.log(best) / len(best)
    return np.expm1(np.median(means, axis=1))


def paired(best: Array, other: Array) -> Array:
    """[RESAMPLES] by how much slower the one is than the other, on the same workloads drawn."""
    return np.asarray((1 + drawn_again(best)) / (1 + drawn_again(other)) - 1)


def pooled(values: Array) -> Figure:
    """The median over values [workloads, seeds], seeds resampled; the workloads, where these are
    given as the second axis."""
    counts, order = resamples(values.shape[1]), np.argsort(values, axis=None, kind="stable")
    found, begins = np.unique(values.ravel()[order], return_index=True)
    together = np.add.reduceat(counts[order % values.shape[1]], begins, axis=0)
    low, high = ends(medians(found, together))
    return float(np.median(values)), float(low), float(high)


def share(values: NDArray[np.bool_]) -> Figure:
    """The share of workloads and seeds [workloads, seeds] for which something holds."""
    each = values.mean(0)
    low, high = ends(resamples(len(each)).T @ each / len(each))
    return float(each.mean()), float(low), float(high)


def judge(sheet: Sheet, budgets: Sequence[int]) -> dict[str, Any]:
    """All figures of one method on some workloads, as JSON data; None stands for infinity."""
    gap = interval(sheet.gap())
    modes = interval(sheet.modes.mean(0))
    length = sheet.best.shape[2]
    fits = [b for b in budgets if b <= length]
    within = [sheet.best[:, :, b - 1] <= 1 / LEVELS[-1] + 1e-12 for b in fits]
    return {
        "gap": {str(b): [plain(x[b - 1]) for x in gap] for b in fits},
        "curve": [[plain(v) for v in x] for x in gap],
        "modes": [plain(x[min(MODES_IN, length) - 1]) for x in modes],
        "reach": {f"{level:.0%}": list(map(plain, pooled(sheet.reach(level)))) for level in LEVELS},
        "solved": {str(b): list(map(plain, share(w))) for b, w in zip(fits, within, strict=True)},
    }


def plain(value: float) -> float | None:
    """Six digits, which is more than is known; None for what is not finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def normalised(logs: Array) -> Array:
    """Log-probabilities whose exponentials sum to 1."""
    return np.asarray(log_softmax(logs))


def measured_target(replay: Replay, tau: float = TAU) -> Array:
    """[n] exact log-probabilities of exp(TFLOPS / T) on the sub-space, TFLOP/s as measured."""
    space = replay.space
    return normalised(log_reward(replay.tflops(), space.problem, space.device, tau))


def total_variation(first: Array, second: Array) -> float:
    """Between two distributions [n], given as log-probabilities; 0 to 1."""
    return float(0.5 * np.abs(np.exp(first) - np.exp(second)).sum())


def jensen_shannon(first: Array, second: Array) -> float:
    """The Jensen-Shannon distance in base 2: the root of the divergence, 0 to 1."""
    return float(jensenshannon(np.exp(first), np.exp(second), base=2))
