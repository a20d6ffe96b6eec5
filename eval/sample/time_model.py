"""Times of a library's candidates at sizes where they were not measured.

What the reward errs by, log(measured / predicted), is taken for a Gaussian process over strategies
and places. Two strategies err alike where they share decisions, most where they are the same; two
places do where the sizes are near and the strategy has as many rounds there, as full a last wave
and as much padding: times jump at the edges of tiles and waves, and so do their errors.

The scales below are what says most about GEMM's measured libraries, each size left out in turn.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.space import differing, digits, sizes_of
from ptxflow.eval.sample.looks import Flags, Floats, Ints, Judge
from ptxflow.eval.sample.ranges import Sizes

#: standard deviations of the error: of all strategies at a place, of those that share decisions
#: there, of one strategy there, and what strategies that share decisions have at every place
PLACE, ALIKE, OWN, EVERYWHERE = 0.03, 0.05, 0.03, 0.03
DECISIONS = 3.0  # that may differ until errors have a third in common
#: octaves of the sizes and of the rounds, share of a wave, octaves of padding: the same of places
DISTANCES = (2.0, 1.0, 0.5, 0.25)
SCREENED, TOGETHER, ELSEWHERE = 0.012, 0.006, 0.03  # error of a median, by how it was measured
TOTAL = math.hypot(PLACE, ALIKE, OWN, EVERYWHERE)

Single = NDArray[np.float32]


@dataclass(frozen=True)
class Seen:
    """A strategy that was measured at a place: log(measured / predicted), its error, and where
    that is, in DISTANCES."""

    code: int
    off: float
    error: float
    place: Floats


@dataclass
class TimeModel:
    """What was measured, and what follows for other strategies and sizes."""

    judge: Judge
    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)  # by sizes and code
    _fitted: tuple[Floats, float] | None = None  # weights of what was seen, and its middle

    def add(self, sizes: Sizes, codes: Ints, seconds: Floats, error: float) -> None:
        """Right kernels' times; the more exact one of two of the same kernel and sizes stays."""
        name, said = json.dumps(sizes, sort_keys=True), self.judge.seconds(sizes, codes)
        places = self._place(sizes, codes)
        for code, off, place in zip(codes.tolist(), np.log(seconds / said), places, strict=True):
            known = self.seen.get((name, code))
            if math.isfinite(off) and (known is None or error <= known.error):
                self.seen[name, code] = Seen(code, float(off), error, place)
                self._fitted = None

    def table(self, places: Sequence[Sizes], codes: Ints) -> tuple[Floats, Floats]:
        """[places, codes] log of seconds, infinite where a strategy is not legal, and its standard
        deviation: an upper bound, given the nearest measurement alone."""
        with np.errstate(divide="ignore"):
            said = np.log([self.judge.seconds(sizes, codes) for sizes in places])
        if not self.seen:
            return said, np.where(np.isfinite(said), TOTAL, 0.0)
        weights, middle = self._fit()
        own, there, error = self._arrays()
        alike, same = self._alike(own, codes), own[:, None] == codes
        exact = np.sqrt(TOTAL**2 + error**2).astype(np.float32)[:, None]
        shares, sd = weights.astype(np.float32), np.zeros(said.shape)
        for row, sizes in enumerate(places):
            common = _common(there, self._place(sizes, codes), alike, same)
            said[row] += middle + shares @ common
            sd[row] = np.sqrt(TOTAL**2 - ((common / exact).max(0)) ** 2)
        return said, sd

    def left_out(self) -> tuple[Floats, Floats]:
        """[seen] what each measurement is off by from what all that were made at other sizes say,
        and the reward's own error."""
        errors, covariance = self._covariance()
        errors = errors - np.median(errors)
        inverse = np.linalg.inv(covariance)
        weights, out = inverse @ errors, np.zeros(len(errors))
        names = np.array([name for name, _ in self.seen])
        for name in np.unique(names):
            (at,) = np.nonzero(names == name)
            out[at] = np.linalg.solve(inverse[np.ix_(at, at)], weights[at])
        return out, errors

    def _fit(self) -> tuple[Floats, float]:
        if self._fitted is None:
            errors, covariance = self._covariance()
            middle = float(np.median(errors))
            self._fitted = np.linalg.solve(covariance, errors - middle), middle
        return self._fitted

    def _arrays(self) -> tuple[Ints, Floats, Floats]:
        """[seen] codes, [seen, coordinates] places and [seen] errors of measuring."""
        seen = self.seen.values()
        columns = [s.code for s in seen], [s.place for s in seen], [s.error for s in seen]
        return np.array(columns[0]), np.array(columns[1]), np.array(columns[2])

    def _covariance(self) -> tuple[Floats, Floats]:
        """[seen] errors of the reward, and [seen, seen] what they have in common."""
        own, there, error = self._arrays()
        common = _common(there, there, self._alike(own, own), own[:, None] == own)
        offs = np.array([s.off for s in self.seen.values()])
        both: Floats = common.astype(np.float64) + np.diag(error**2)
        return offs, both

    def _alike(self, some: Ints, others: Ints) -> Single:
        """[some, others] what errors have in common by how many decisions differ."""
        each, back = np.unique(some, return_inverse=True)
        sizes = sizes_of(self.judge.family)
        differ = differing(digits(each, sizes), digits(others, sizes))
        found: Single = np.exp(-differ / DECISIONS).astype(np.float32)
        return found[back]

    def _place(self, sizes: Sizes, codes: Ints) -> Floats:
        """[codes, coordinates] where strategies are at these sizes, in DISTANCES."""
        octaves = np.log2(list(sizes.values()))
        scales = np.array([DISTANCES[0]] * len(octaves) + list(DISTANCES[1:]))
        own = np.broadcast_to(octaves, (len(codes), len(octaves)))
        return np.hstack([own, self.judge.load(sizes, codes)]) / scales


def _common(here: Floats, there: Floats, alike: Single, same: Flags) -> Single:
    """[here, there] the covariance of strategies at places, in single precision."""
    near = np.zeros((len(here), len(there)), np.float32)
    for a, b in zip(here.T.astype(np.float32), there.T.astype(np.float32), strict=True):
        near -= np.abs(a[:, None] - b)
    np.exp(near, out=near)
    local = np.float32(ALIKE**2) * alike + np.float32(PLACE**2)
    local[same] += np.float32(OWN**2)
    return np.asarray(near * local + np.float32(EVERYWHERE**2) * alike)
