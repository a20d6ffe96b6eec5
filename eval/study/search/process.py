"""A Gaussian process over choices, with or without a policy to start from.

log time = intercept - slope x log-probability + a residual whose correlation between two strategies
falls by `ALIKE` with every decision in which they differ. The slope is learned as measurements come
in, so that a policy which misleads is soon not believed; without a policy it is 0, and this is
plain Bayesian optimisation on categorical choices. It is our own, and no library's.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from ptxflow.env.reward import TAU
from ptxflow.env.space import Space
from ptxflow.eval.study.search.optimisers import Grid
from ptxflow.eval.study.search.play import Search

Array = NDArray[np.float64]

ALIKE = 0.75  # correlation of residuals of strategies that differ in one decision
NOISE = 0.01  # variance of a measurement over that of residuals
BRAVE = 1.0  # standard deviations that a strategy is believed to be faster than expected
FIRST = 4  # draws before it takes over
BELIEF = 8.0  # measurements' worth of belief that a policy's slope is that of its target


@dataclass(frozen=True)
class Process:
    """Measures next what could be fastest: expected log time less `BRAVE` standard deviations.

    log_probs [len(space)] of a policy, whose first FIRST draws it starts from; None: uniform ones.
    """

    name: str
    log_probs: Array | None = field(default=None, repr=False)
    sharpness: float = 1.0
    seeded: bool = True

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        rows = Grid.of(space).rows.astype(np.int8)
        logs = np.zeros(len(rows)) if self.log_probs is None else self.log_probs
        draws = np.argsort(-(self.sharpness * logs + rng.gumbel(size=len(rows))), kind="stable")
        state = Residuals(rows)
        slowest = 0.0
        for n in range(len(rows)):
            at = int(draws[n]) if n < FIRST else state.next(logs)
            time = yield at
            slowest = max(slowest, time if np.isfinite(time) else 0.0)
            state.add(at, np.log(time if np.isfinite(time) else 2 * slowest or 1.0))


class Residuals:
    """The process, conditioned on one measurement after the other: a Cholesky factor that grows,
    and the rows of its inverse times the covariances with all strategies."""

    def __init__(self, rows: NDArray[np.int8]):
        self.rows = rows
        self.asked: list[int] = []
        self.values: list[float] = []
        self.factor = np.zeros((0, 0))
        self.whitened = np.zeros((0, len(rows)))
        self.spread = np.ones(len(rows))  # posterior variance over the prior's

    def add(self, at: int, value: float) -> None:
        covariance: Array = np.power(ALIKE, (self.rows != self.rows[at]).sum(1))
        known = self.whitened[:, at]
        pivot = np.sqrt(max(float(1 + NOISE - known @ known), 1e-9))
        grown = np.zeros((len(self.asked) + 1,) * 2)
        grown[:-1, :-1], grown[-1, :-1], grown[-1, -1] = self.factor, known, pivot
        self.factor = grown
        row = (covariance - known @ self.whitened) / pivot
        self.whitened = np.vstack([self.whitened, row])
        self.spread = np.maximum(self.spread - row**2, 1e-9)
        self.asked.append(at)
        self.values.append(value)

    def expected(self, logs: Array) -> tuple[Array, float]:
        """Log times of all, and the standard deviation of residuals."""
        values = np.array(self.values)
        x = logs[self.asked]
        slope = _slope(x, values)
        intercept = float(np.mean(values + slope * x))
        rest = solve_triangular(self.factor, values - intercept + slope * x, lower=True)
        scale = np.sqrt(max(float(rest @ rest) / len(rest), 1e-6))
        return intercept - slope * logs + rest @ self.whitened, scale

    def next(self, logs: Array) -> int:
        """The strategy not measured yet that could be fastest."""
        expected, scale = self.expected(logs)
        hope = expected - BRAVE * scale * np.sqrt(self.spread)
        hope[self.asked] = np.inf
        return int(np.argmin(hope))


def _slope(x: Array, values: Array) -> float:
    """Of log time against log-probability, at least 0: least squares, drawn to the temperature of
    the policy's target by BELIEF measurements of typical spread; 0 where x does not vary."""
    centred = x - x.mean()
    power = float(centred @ centred)
    if power == 0:
        return 0.0
    weight = BELIEF * power / len(x)
    return max(0.0, (TAU * weight - float(centred @ values)) / (weight + power))
