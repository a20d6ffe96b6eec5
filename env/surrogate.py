"""A learned correction of the analytic model: an ensemble of small networks in plain numpy.

Each member maps features of a strategy on a problem to log(measured time / modelled time). What the
ensemble agrees on corrects the model; what it disagrees on, and how far a strategy lies from what
was measured, is the uncertainty, and the reward is pessimistic by it. Files are safetensors with
their description as JSON in the header; one of other decisions, features or costs is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Family, Fields, Problem, Resources
from ptxflow.env import cost
from ptxflow.env.features import describe_problem
from ptxflow.env.space import StrategySpace

Array = NDArray[np.float64]
Matrix = NDArray[np.float32]

CLIP = 4.0  # standard deviations at which a feature stops growing: no extrapolation beyond
BLOCK = 1 << 15  # strategies whose features are held at a time
CHUNK = 4096  # rows evaluated at a time: a chunk's activations stay in cache
LEAK = np.float32(0.1)  # slope of the activation below zero
LEAST = 1e-4  # share of the modelled time below which a term does not matter


class SurrogateError(BadInput):
    """A surrogate that cannot be used; the message is one line."""


AXIS = "problem.log2_"  # and an axis's name: problems of one family need not have the same axes


def strategy_features(
    family: Family, f: Fields, problem: Problem, device: Device
) -> tuple[dict[str, Array], Array]:
    """Features by name, each [n], in a fixed order; and the modelled seconds [n].

    Choices are one-hot. `load.` and `resources.` are logs of what the family states; `share.` are
    logs of the time each limit alone would take over the modelled time, so that they mean the same
    for every problem; `problem.` are the same for every strategy of a problem.
    """
    modelled = problem.flops / cost.model_tflops(family, f, problem, device) / 1e12
    n = len(modelled)
    out: dict[str, Any] = {
        f"{d.name}={c}": np.asarray(getattr(f, d.name)) == c
        for d in family.decisions
        for c in d.choices
    }
    load_, taken = family.demand(f, problem, device), family.resources(f, problem, device)
    for prefix, source, rows in (("load", load_, Demand), ("resources", taken, Resources)):
        for row in fields(rows):
            value = getattr(source, row.name)
            if not isinstance(value, Demand | None):
                out[f"{prefix}.{row.name}"] = np.log2(1 + np.asarray(value, np.float64))
    out |= _shares(load_, device, modelled)
    ideal = problem.flops / (problem.roofline_tflops(device) * 1e12)
    out["log_modelled_over_ideal"] = np.log(modelled / ideal)
    out["log_modelled_over_launch"] = np.log(modelled / cost.rates(device).launch_s)
    out |= _problem_features(family, problem, device)
    return {k: np.broadcast_to(np.asarray(v, np.float64), n) for k, v in out.items()}, modelled


def _problem_features(family: Family, problem: Problem, device: Device) -> dict[str, float]:
    """What any family's problem has; a family's own features would tell workloads apart by name."""
    generic = describe_problem(problem, device, family)
    own = f"{family.name}."
    out = {f"problem.{k}": v for k, v in generic.items() if not k.startswith(own)}
    return out | {f"{AXIS}{axis}": np.log2(size) for axis, size in problem.axes}


def _shares(load_: Demand, device: Device, modelled: Array) -> dict[str, Array]:
    """log2 of times over the modelled time, and how evenly the blocks fill the SMs."""
    rate, second = cost.rates(device), device.clock_ghz * 1e9
    per_sm = -(-np.asarray(load_.blocks) // device.sms)
    steps = load_.steps * load_.tiles * per_sm
    seconds = {
        "mma": load_.mma_cycles * steps / second,
        "issue": load_.issue_cycles * steps / second,
        "smem": load_.smem_bytes * steps / (rate.smem_bytes_per_cycle * second),
        "port": load_.l2_bytes * steps / (rate.port_bytes_per_cycle * second),
        "l2": load_.l2_bytes * load_.steps * load_.tiles * load_.blocks
        / (rate.l2_bytes_per_cycle * second),
        "dram": load_.dram_bytes / (device.hbm_bytes_per_s * rate.hbm_efficiency),
        "special": load_.special * steps / (rate.special_per_cycle * second),
        "fill": load_.latency * rate.dram_latency * steps
        / (load_.stages * load_.resident * second),
        "epilogue": load_.epilogue_cycles * load_.tiles * per_sm / second,
        "setup": load_.setup_cycles * per_sm / load_.resident / second,
        "launch": rate.launch_s + 0 * per_sm,
    }  # fmt: skip
    if load_.following is not None:  # a kernel's launch is in its time
        seconds["following"] = cost.seconds(load_.following, device, rate)
    out = {f"share.{k}": np.log2(np.maximum(v / modelled, LEAST)) for k, v in seconds.items()}
    out["fill.sms"] = load_.blocks / (per_sm * device.sms)
    out["fill.waves"] = load_.blocks / (per_sm * device.sms) * (per_sm > 1)
    out["fill.concurrent"] = np.log2(np.minimum(load_.blocks / device.sms, load_.resident))
    out["fill.rounds"] = np.log2(np.ceil(per_sm / load_.resident))
    out["fill.ring"] = np.log2(load_.steps / load_.stages)
    return out


@dataclass(frozen=True)
class Ensemble:
    """E fitted members over D features; arrays alone, so that processes can exchange it.

    center, gain  float32 [D] of the features
    layers        weights [E, in, out] and biases [E, 1, out], leaky ReLU between, one output
    precision     float32 [D + 1, D + 1]: inverse of the features' ridge-regularised Gram matrix
    reach         leverage up to which a strategy is as close as what was measured
    level         float32 [D + 1]: what a problem's strategies have in common, of its features
    prior         standard deviation of log(measured / modelled) around that level
    """

    center: Matrix
    gain: Matrix
    layers: tuple[tuple[Matrix, Matrix], ...]
    precision: Matrix
    level: Matrix
    reach: float
    prior: float

    def correction(self, x: Matrix) -> tuple[Array, Array]:
        """Mean and standard deviation [n] of log(measured / modelled), of features [n, D]."""
        mean, std = np.empty(len(x)), np.empty(len(x))
        for start in range(0, len(x), CHUNK):
            part = slice(start, start + CHUNK)
            inputs = standardise(x[part], self.center, self.gain)
            outputs = forward(self.layers, inputs)[-1][..., 0].astype(np.float64)
            trust = self.trust(inputs)
            mean[part] = self.common(inputs) + trust * outputs.mean(0)
            std[part] = np.sqrt((trust * outputs.std(0)) ** 2 + (1 - trust) * self.prior**2)
        return mean, std

    def common(self, inputs: Matrix) -> Matrix:
        """[n] the level alone: all that is known of a strategy far from what was measured."""
        return np.asarray(inputs @ self.level[:-1] + self.level[-1])

    def trust(self, inputs: Matrix) -> Array:
        """1 near what was measured, towards 0 far from it: by the leverage of inputs [n, D]."""
        one = np.hstack([inputs, np.ones((len(inputs), 1), np.float32)])
        leverage = np.einsum("nd,nd->n", one @ self.precision, one)
        beyond = np.maximum(leverage.astype(np.float64) / self.reach - 1, 0.0)
        return np.asarray(1 / (1 + beyond))


@dataclass(frozen=True)
class Probe:
    """What `strategy_features` said of a few strategies [n] when the fit was made: [n, D]."""

    problem: Problem
    codes: NDArray[np.int64]
    values: Matrix


@dataclass(frozen=True)
class Surrogate:
    """An ensemble fitted for one family on one device.

    features  names, in the order of `strategy_features`
    kappa     standard deviations by which the reward is pessimistic
    probes    features of a few strategies, by which a change of the costs is seen
    about     JSON data: where it comes from
    digest    of the file that it was read from
    """

    family: Family
    device: Device
    features: tuple[str, ...]
    ensemble: Ensemble
    kappa: float
    probes: tuple[Probe, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""

    def predict(self, f: Fields, problem: Problem) -> tuple[Array, Array]:
        """log seconds [n] and their standard deviation [n]."""
        columns, modelled = strategy_features(self.family, f, problem, self.device)
        mean, std = self.ensemble.correction(matrix(columns, self.features))
        return np.log(modelled) + mean, std

    def tflops(self, f: Fields, problem: Problem) -> Array:
        """[n] the TFLOP/s that a strategy reaches even if it is `kappa` deviations slower."""
        log_seconds, std = self.predict(f, problem)
        result: Array = problem.flops / np.exp(log_seconds + self.kappa * std) / 1e12
        return result


class SurrogateReward:
    """A surrogate behind the reward protocol; on another device or family, SurrogateError."""

    name = "surrogate"

    def __init__(self, surrogate: Surrogate) -> None:
        self.surrogate = surrogate

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> Array:
        """float64 [n] pessimistic TFLOP/s of codes int64 [n], `BLOCK` of them at a time."""
        fitted = self.surrogate
        if (space.family.name, space.device.name) != (fitted.family.name, fitted.device.name):
            raise SurrogateError(
                f"the surrogate is of {fitted.family.name} on {fitted.device.name}, not of "
                f"{space.family.name} on {space.device.name}"
            )
        starts = range(0, len(codes), BLOCK)
        parts = [fitted.tflops(space.fields(codes[i : i + BLOCK]), space.problem) for i in starts]
        return np.concatenate([np.zeros(0), *parts])


def matrix(columns: Mapping[str, Array], names: Sequence[str] = ()) -> Matrix:
    """[n, D] of features by name, a column each in memory: those named, by default all.

    Problems of one family may have other axes (pages, or none): a feature that a problem lacks is
    0, and one without a name here is left out.
    """
    names = names or tuple(columns)
    out = np.zeros((len(names), len(next(iter(columns.values())))), np.float32)
    for row, name in zip(out, names, strict=True):
        if name in columns:
            row[:] = columns[name]
    return out.T


def standardise(x: Matrix, center: Matrix, gain: Matrix) -> Matrix:
    """Features [n, D] in standard deviations of what was measured, none beyond `CLIP`."""
    out = (x - center) * gain  # in the layout of x, which may have a column each in memory
    return np.asarray(np.clip(out, -CLIP, CLIP, out=out), np.float32)


def forward(layers: Sequence[tuple[Matrix, Matrix]], inputs: Matrix) -> list[Matrix]:
    """What enters each layer, [n, D] and then [E, n, width], and the output [E, n, 1]."""
    out = [inputs]
    for i, (weight, bias) in enumerate(layers):
        hidden = out[-1] @ weight + bias
        if i + 1 < len(layers):
            np.maximum(hidden, LEAK * hidden, out=hidden)
        out.append(hidden)
    return out
