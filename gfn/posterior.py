"""The posterior of a whole space after a few measurements: a Gaussian process on the prior's error.

The prior gives log rewards, TFLOPS / T. The process is on measured less prior ones: a level, a
factor of the prior's differences, and a part that strategies share by their common decisions,
whose scale and correlation are those, of a few, under which the measurements are likeliest.
numpy only.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats by which the prior is off
SHARED = (0.5, 0.7, 0.85, 0.95)  # of the correlation, left by each decision that differs
NOISE = 0.3  # nats: half a percent of a time, where the best lies at 50 nats
DOUBT = 0.5  # of the slope: what lies a nat higher than another may do so by 1 +- 0.5 nats
LEVEL = 30.0  # nats: nothing is known of what is off by the same everywhere
CHUNK = 1 << 22  # elements of a kernel that are worked out at a time


def posterior(
    prior: Array, choices: Indices, places: Indices, measured: Array
) -> tuple[Array, Array]:
    """Mean and standard deviation [n] of the log rewards after measurements.

    prior [n] log rewards and choice indices [n, F] of every strategy; `measured` [m] log rewards of
    those at `places` [m], of which there is at least one.
    """
    seen = choices[places]
    off = measured - prior[places]
    slope = DOUBT * (prior - prior[places].mean())
    common = np.outer(slope[places], slope[places]) + LEVEL**2
    differ = _differ(seen, seen)
    fits = [_fit(scale, shared, differ, common, off) for scale, shared in product(SCALES, SHARED)]
    _, scale, shared, factor = max(fits, key=lambda fit: fit[0])
    weights = np.linalg.solve(factor.T, np.linalg.solve(factor, off))
    mean, std = prior.copy(), np.empty(len(prior))
    step = max(1, CHUNK // len(places))
    for start in range(0, len(prior), step):
        part = slice(start, start + step)
        kernel = scale**2 * shared ** _differ(choices[part], seen)
        kernel = kernel + np.outer(slope[part], slope[places]) + LEVEL**2
        mean[part] += kernel @ weights
        explained = np.square(np.linalg.solve(factor, kernel.T)).sum(0)
        whole = scale**2 + slope[part] ** 2 + LEVEL**2
        std[part] = np.sqrt(np.maximum(whole - explained, 0.0))
    return mean, std


def _differ(a: Indices, b: Indices) -> NDArray[np.int64]:
    """[len(a), len(b)] the number of decisions on which strategies differ."""
    out = np.zeros((len(a), len(b)), np.int64)
    for x, y in zip(a.T, b.T, strict=True):
        out += x[:, None] != y
    return out


def _fit(
    scale: float, shared: float, differ: NDArray[np.int64], common: Array, off: Array
) -> tuple[float, float, float, Array]:
    """Log likelihood of the measurements under a scale and reach, these two, and the Cholesky
    factor of the covariance."""
    covariance = scale**2 * shared**differ + common + NOISE**2 * np.eye(len(off))
    factor = np.linalg.cholesky(covariance)
    whitened = np.linalg.solve(factor, off)
    likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(factor)).sum())
    return likelihood, scale, shared, factor
