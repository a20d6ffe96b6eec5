"""The analytic model's times of whole spaces, and of GEMMs beside nvMatmulHeuristics' estimates.

Times are a kernel's alone, without the launch that our clock sees: so are the estimates.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.family import Family, Fields, Problem, Strategy
from ptxflow.env import cost
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.records import Record, libraries
from ptxflow.eval.study.judge import Estimate

WELL_KNOWN = 1000  # measured kernels of a workload from which its best by tile are compared
Array = NDArray[np.float64]
Shape = tuple[int, int, int]  # M, N, K
Tile = tuple[int, int]


@dataclass(frozen=True)
class Modelled:
    """Strategies of a space and their modelled microseconds [n]."""

    space: Space
    us: Array
    fields: Fields

    @staticmethod
    def of(maker: Family, problem: Problem, device: Device = B200, share: float = 0) -> "Modelled":
        """By the device's rates, or with another sustained share of the tensor peak."""
        rates = cost.rates(device)
        rates = replace(rates, mma_efficiency=share or rates.mma_efficiency)
        space = enumerate_space(maker, problem, device)
        fields = space.fields()
        seconds = cost.seconds(maker.demand(fields, problem, device), device, rates)
        return Modelled(space, (seconds - rates.launch_s) * 1e6, fields)

    @property
    def best(self) -> float:
        return float(self.us.min())

    @property
    def tflops(self) -> float:
        return self.space.problem.flops / self.best / 1e6

    @property
    def strategy(self) -> Strategy:
        """The fastest; the first of these in code order."""
        return self.space.strategy(int(self.space.codes[self.us.argmin()]))

    def tile(self, tile: Tile) -> float:
        """The best with this tile of a CTA, operands not swapped, K whole; infinite without any."""
        f = self.fields
        fits = (f.swap == 0) & (f.split_k == 1) & (f.tile_m == tile[0]) & (f.tile_n == tile[1])
        return float(self.us[fits].min(initial=np.inf))


@cache
def product(shape: Shape, device: Device = B200, share: float = 0) -> Modelled:
    """Of an (M, N, K), by the GEMM definition that has this N and K."""
    m, n, k = shape
    return Modelled.of(*find_problem(load(f"gemm_n{n}_k{k}"), {"M": m}), device, share)


@dataclass(frozen=True)
class Judged:
    """A workload by the model beside its estimate: Spearman's rho over tiles that both have, and
    microseconds of the best of both."""

    shape: Shape
    tiles: int
    rho: float
    ours: float
    theirs: float

    @staticmethod
    def of(estimate: Estimate, share: float = 0) -> "Judged":
        found = product(estimate.shape, B200, share)
        tiles = [t for t in estimate.tiles if np.isfinite(found.tile(t))]
        rho = spearmanr([found.tile(t) for t in tiles], [estimate.tiles[t] for t in tiles])
        theirs = min(estimate.best, estimate.transposed)
        return Judged(estimate.shape, len(tiles), float(rho.statistic), found.best, theirs)

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass(frozen=True)
class Measured:
    """An H200's kernels of a GEMM: how many, microseconds of the best, ours or a library's, and of
    the best by tile, operands not swapped and K whole."""

    kernels: int
    best: float
    tiles: Mapping[Tile, float]


def measured(records: Iterable[Record]) -> dict[Shape, Measured]:
    """By workload, without the launch that the clock saw."""
    launch = cost.rates(H200).launch_s * 1e6
    groups: dict[Shape, list[Record]] = {}
    for r in records:
        if r.definition.startswith("gemm_n") and r.status == "ok" and r.latency_us:
            fixed = load(r.definition).const_axes
            groups.setdefault((r.axes["M"], fixed["N"], fixed["K"]), []).append(r)
    out = {}
    for shape, group in groups.items():
        best, tiles = float("inf"), dict[Tile, float]()
        for r in group:
            assert r.latency_us
            us = r.latency_us["median"] - launch
            best = min(best, us, *(v - launch for v in libraries(r.definition, r.peers).values()))
            c = dict(r.strategy["choices"])
            if not c["swap"] and c["split_k"] == 1:
                tile = c["tile_m"], c["tile_n"]
                tiles[tile] = min(us, tiles.get(tile, us))
        out[shape] = Measured(len(group), best, tiles)
    return out


def ranks(
    estimates: Sequence[Estimate], known: Mapping[Shape, Measured]
) -> list[tuple[float, float]]:
    """Spearman's rho over tiles, of the estimates and of our model, with an H200's measurements, of
    each workload with WELL_KNOWN kernels. Our model was fitted to these."""
    out = []
    for e in estimates:
        found = known.get(e.shape)
        tiles = [t for t in e.tiles if found and t in found.tiles]
        if found and found.kernels >= WELL_KNOWN and len(tiles) > 2:
            truth = [found.tiles[t] for t in tiles]
            model = product(e.shape, H200)
            both = [e.tiles[t] for t in tiles], [model.tile(t) for t in tiles]
            theirs, ours = (float(spearmanr(told, truth).statistic) for told in both)
            out.append((theirs, ours))
    return out


def apart(values: Iterable[float]) -> float:
    """The median distance of ratios from 1, in either direction."""
    return median(abs(v - 1) for v in values)
