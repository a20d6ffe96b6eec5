"""What draws from distributions over strategies lose by how sharply they are drawn. No method is
played: draws do not depend on what is measured."""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ptxflow.eval.study.metrics import interval, plain
from ptxflow.eval.study.search.replay import Replay

Array = NDArray[np.float64]
SHARPNESSES = (0.5, 1.0, 2.0, 4.0, 8.0)
COUNT = 8  # draws, of which the best counts


def best_of(logs: Array, times: Array, seeds: int, sharpness: float, name: str) -> Array:
    """[seeds] the best of COUNT distinct draws with probabilities exp(sharpness logs [n]), its time
    over that of the best of all; the numbers depend on `name` and the seed alone."""
    found = np.empty(seeds)
    for seed in range(seeds):
        noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).gumbel(size=len(logs))
        keys = sharpness * logs + noise
        drawn = np.argpartition(-keys, min(COUNT, len(keys)) - 1)[:COUNT]
        found[seed] = times[drawn].min()
    least: Array = np.minimum(found, times[np.isfinite(times)].max()) / times.min()
    return least


def loss(rows: Sequence[Array]) -> list[float | None]:
    """Of `best_of` on several workloads: the geometric mean, its median over seeds, and the ends of
    the 95% interval."""
    gaps = np.exp(np.mean(np.log(rows), axis=0)) - 1
    return [plain(v) for v in interval(gaps)]


def sharpness(
    replays: Sequence[Replay], logs: Mapping[str, Array], seeds: int
) -> dict[str, dict[str, list[float | None]]]:
    """By what training saw of the workloads, and by sharpness: what the best of COUNT draws from a
    policy (its log-probabilities by workload) loses."""
    out: dict[str, dict[str, list[float | None]]] = {}
    for group, kinds in (("held out", ("held_out", "unseen")), ("trained", ("trained",))):
        own = [r for r in replays if r.kind in kinds and r.name in logs]
        for b in SHARPNESSES if own else ():
            rows = [best_of(logs[r.name], r.times, seeds, b, r.name) for r in own]
            out.setdefault(group, {})[f"{b:g}"] = loss(rows)
    return out
