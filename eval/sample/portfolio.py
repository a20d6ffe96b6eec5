"""Which few kernels serve many sizes, and which of them serves which: plain arrays.

Times are seconds, or anything in proportion to them, [sizes, kernels]; infinite where a kernel
cannot serve a size. A portfolio's loss at a size is log(time of its best kernel there / best of all
kernels there). What is made least is the mean over the sizes (a k-median problem) of the loss
and its square over `MILD`: one size that is served badly counts more than many served a bit worse.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Grid = NDArray[np.int64]
MILD = 0.1  # a loss that counts twice
UNSERVED = 20.0  # loss at a size that no kernel of the portfolio serves: more than any kernel's
EQUAL = 1e-12  # mean costs nearer than this are the same


def losses(times: Array) -> Array:
    """[sizes, kernels] the loss of each kernel alone; `UNSERVED` where it does not serve."""
    found = np.full(times.shape, UNSERVED)
    served = np.isfinite(times)
    least = np.where(served, times, np.inf).min(axis=1, keepdims=True)
    np.divide(times, least, out=found, where=served)
    return np.log(found, out=found, where=served)


def costs(times: Array) -> Array:
    """[sizes, kernels] what each kernel alone costs."""
    loss = losses(times)
    return np.asarray(loss * (1 + loss / MILD))


def choose(times: Array, most: int) -> tuple[int, ...]:
    """At most `most` kernels (columns of `times`), by greedy selection and then exchange.

    Fewer where more would gain nothing. Sizes that no kernel serves count for nothing. ValueError
    unless there are a kernel and room for one.
    """
    if most < 1 or not times.shape[1]:
        raise ValueError(f"a portfolio of {most} out of {times.shape[1]} kernels")
    cost = costs(times)
    chosen: list[int] = []
    while True:
        before = set(chosen)
        chosen = _needed(cost, _exchanged(cost, _filled(cost, chosen, most)))
        if set(chosen) == before:
            return tuple(chosen)


def _filled(cost: Array, chosen: Sequence[int], most: int) -> list[int]:
    """The kernels and, one after the other, those that gain most beside them."""
    now = list(chosen)
    while len(now) < most:
        best, mean = _best_with(cost, now)
        if now and mean > cost[:, now].min(1).mean() - EQUAL:
            break
        now.append(best)
    return now


def _needed(cost: Array, chosen: Sequence[int]) -> list[int]:
    """Without kernels that nothing is lost without."""
    now, mean = list(chosen), cost[:, list(chosen)].min(1).mean()
    for kernel in chosen:
        rest = [k for k in now if k != kernel]
        if rest and cost[:, rest].min(1).mean() < mean + EQUAL:
            now = rest
    return now


def _best_with(cost: Array, others: Sequence[int]) -> tuple[int, float]:
    """The kernel that makes the mean cost least beside these, and that cost."""
    held = cost[:, list(others)].min(1, initial=np.inf)
    means = np.minimum(held[:, None], cost).mean(0)
    best = int(means.argmin())
    return best, float(means[best])


def _exchanged(cost: Array, chosen: Sequence[int]) -> list[int]:
    """Kernels replaced one at a time while that makes the mean cost less."""
    now, mean, changed = list(chosen), float(cost[:, list(chosen)].min(1).mean()), True
    while changed:
        changed = False
        for place in range(len(now)):
            best, found = _best_with(cost, [*now[:place], *now[place + 1 :]])
            if found < mean - EQUAL:
                now[place], mean, changed = best, found, True
    return now


def mean_loss(times: Array, members: Sequence[int], best: Array | None = None) -> float:
    """The mean loss of a portfolio over the sizes it serves, against `best` [sizes] where given
    and else the best of all kernels; infinite where it serves none."""
    own = times[:, list(members)].min(1)
    least = times.min(1) if best is None else best
    served = np.isfinite(own)
    return float(np.log(own[served] / least[served]).mean()) if served.any() else float("inf")


def merged(
    bounds: Sequence[Sequence[int]], cells: Grid
) -> tuple[tuple[tuple[int, ...], ...], Grid]:
    """Bounds of each axis and cells [cells of each axis], without borders that tell nothing
    apart."""
    kept = []
    for axis, ends in enumerate(bounds):
        rows = np.moveaxis(cells, axis, 0)
        differ = (rows[1:] != rows[:-1]).any(axis=tuple(range(1, rows.ndim)))
        last = np.append(np.flatnonzero(differ), len(rows) - 1)
        kept.append(tuple(int(ends[i]) for i in last))
        cells = np.take(cells, last, axis=axis)
    return tuple(kept), cells
