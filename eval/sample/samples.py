"""The samples of one run of sample.py, ranked, and what was asked for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Problem, Strategy
from ptxflow.env.measurements import REFINE
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.bench.choices import EQUAL
from ptxflow.eval.bench.records import Record
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted
from ptxflow.eval.verify.emulation import Emulation

Json = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One sampled strategy, compiled. `place` is its place in what was scored, 1 the best."""

    kernel: CompiledKernel
    source: str  # "policy", which drew it, or "reward", of whose best it is
    log_prob: float  # of the policy
    derived: Mapping[str, Any]  # resources and modelled speed, see env.cost.derived
    place: int
    predicted: float  # TFLOP/s by the reward
    record: Record | None  # the measurement, where there was one
    emulation: Emulation | None = None  # of the PTX on a small problem, where it was asked for

    @property
    def wrong(self) -> bool:
        """Measured or emulated, and found wrong."""
        measured = self.record is not None and self.record.status != "ok"
        return measured or (self.emulation is not None and not self.emulation.right)

    @property
    def key(self) -> str:
        return self.kernel.strategy.key

    @property
    def latency_us(self) -> float | None:
        """Median, of a kernel that was measured and is right."""
        if self.record is None or self.record.status != "ok" or self.record.latency_us is None:
            return None
        return self.record.latency_us["median"]


@dataclass(frozen=True)
class Run:
    """One run of sample.py: what was asked and what came of it, best sample first."""

    definition: Json  # the definition itself
    known: bool  # whether it is one of ours, so that its name says everything
    family: Family
    problem: Problem
    device: Device
    axes: Mapping[str, int]  # the variable ones
    seed: int
    checkpoint: str
    predicted: NDArray[np.float64]  # TFLOP/s by the reward, of the whole space or what was drawn
    valid: int  # strategies of the whole space
    samples: Sequence[Sample]
    refused: Sequence[tuple[Strategy, Exception]]
    predicted_by: str  # the reward's name: "model", "surrogate" or "replay"
    ranked_by: str  # "measurement on NVIDIA H200", or the reward's name
    remarks: Sequence[str] = ()  # what to know of the policy for this workload
    stop_at: float | None = None  # share of the attainable speed that ended the measuring

    def us(self, tflops: float) -> float:
        """Microseconds at a speed; infinite at none."""
        return self.problem.flops / tflops / 1e6 if tflops > 0 else math.inf

    @property
    def measured(self) -> bool:
        return any(s.record is not None for s in self.samples)

    @property
    def scored(self) -> str:
        """What the predictions are of, and so what the best is the best of."""
        return "space" if len(self.predicted) == self.valid else "strategies that were found"

    @cached_property
    def floors(self) -> Floors:
        """For the work that the inputs ask for which kernels are timed on."""
        return Floors.of(counted(parse(self.definition), self.axes), self.device)

    @property
    def stopped(self) -> str:
        """What is said where measuring ended early; else nothing."""
        measured = [s for s in self.samples if s.record is not None]
        best = min((s.latency_us for s in measured if s.latency_us), default=None)
        if best is None or len(measured) == len(self.samples):
            return ""
        return (
            f"stopped after {len(measured)} of {len(self.samples)} kernels: one has "
            f"{self.floors.share(best):.1%} of the attainable speed"
        )

    @property
    def title(self) -> str:
        axes = ", ".join(f"{n}={v}" for n, v in self.axes.items())
        return f"{self.problem.definition} at {axes} on {self.device.name.upper()}"


def rank(samples: Sequence[Sample]) -> list[Sample]:
    """Best first: the right ones by measured time, those first that were timed in the same rounds,
    of these the default (the best predicted) where none is faster for certain; then the unmeasured
    as predicted, then the rest.

    Ties are broken by the strategy's key, so that the order never depends on anything else.
    """

    def order(s: Sample) -> tuple[int, float, str]:
        if s.latency_us is not None and s.record is not None:
            final = s.record.timing.get("final_us", {}).get("us", s.latency_us)
            return (0 if s.record.timing_pass == REFINE else 1), final, s.key
        return (2 if s.record is None else 3), -s.predicted, s.key

    ranked = sorted(samples, key=order)
    default = max(ranked, key=lambda s: s.predicted, default=None)
    if default is not None:
        (again, us, _), (_, least, _) = order(default), order(ranked[0])
        if again == 0 and us <= least * (1 + EQUAL):
            ranked.remove(default)
            ranked.insert(0, default)
    return ranked
