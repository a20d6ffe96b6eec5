"""Rewards: a source of TFLOP/s for strategies, and the distribution that it asks a policy for.

R(x | w) = exp(TFLOPS(x, w) / T(w)), with T(w) = tau * attainable TFLOP/s of w. Attainable is the
roofline with the launch floor in it: against the bare roofline, which small problems never come
near, their target would be flat whatever their strategies are worth.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.env.cost import attainable_tflops, model_tflops
from ptxflow.env.space import Space, StrategySpace

Array = NDArray[np.float64]

# Sharp enough that the best of 8 exact samples is expected within 3% of the optimum on every GEMM
# workload tried (1.2% on average), and blunt enough to learn: a difference of 1%
# of attainable is half a nat.
TAU = 0.02


class Reward(Protocol):
    """A source of TFLOP/s. What failed to build, check or run is 0 or not a number."""

    @property
    def name(self) -> str: ...

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> Array:
        """float64 [n] TFLOP/s of the strategies with these codes, int64 [n], on the problem.

        Codes need not be sorted or distinct, but must be codes of the space's decisions.
        """
        ...


class ModelReward:
    """The analytic model: any problem, any device, no measurement."""

    name = "model"

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> Array:
        """float64 [n]; see `cost.model_tflops`."""
        return model_tflops(space.family, space.fields(codes), space.problem, space.device)


class FamilyRewards:
    """A reward of its own for some families, by name, and `rest` for the others."""

    def __init__(self, own: Mapping[str, Reward], rest: Reward) -> None:
        self.own = dict(own)
        self.rest = rest

    @property
    def name(self) -> str:
        return " or ".join(dict.fromkeys(r.name for r in (*self.own.values(), self.rest)))

    def of(self, family: str) -> Reward:
        """The reward of one family."""
        return self.own.get(family, self.rest)

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> Array:
        """float64 [n] by the reward of the space's family."""
        return self.of(space.family.name).tflops(space, codes)


class CachedReward:
    """A reward that is asked once for each whole space, as a run that measures distances needs."""

    def __init__(self, source: Reward) -> None:
        self.source = source
        self._cache: dict[int, tuple[Space, NDArray[np.float32]]] = {}

    @property
    def name(self) -> str:
        return self.source.name

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> Array:
        """float64 [n]; from memory, rounded to float32, where `codes` is `space.codes` itself."""
        if not isinstance(space, Space) or codes is not space.codes:
            return self.source.tflops(space, codes)
        if id(space) not in self._cache:
            self.store(space, self.source.tflops(space, codes).astype(np.float32))
        return self._cache[id(space)][1].astype(np.float64)

    def store(self, space: Space, tflops: NDArray[np.float32]) -> None:
        """Keep the source's TFLOP/s [len(space)] of a whole space, in the order of its codes."""
        self._cache[id(space)] = space, tflops  # with the space, so that its id stays taken


def log_reward(tflops: Array, problem: Problem, device: Device, tau: float = TAU) -> Array:
    """float64 [n] log R = TFLOPS / T(w) of TFLOP/s [n], in nats.

    A failure (0, negative or not a number) gets 0, the least. ValueError unless tau is positive.
    """
    if not tau > 0:
        raise ValueError(f"tau must be positive, not {tau}")
    sound = np.nan_to_num(np.asarray(tflops, np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    result: Array = np.maximum(sound, 0.0) / (tau * attainable_tflops(problem, device))
    return result


def target(space: Space, source: Reward, tau: float = TAU) -> tuple[Array, float]:
    """The exact target: log probabilities [len(space)] in the order of the codes, and log Z."""
    logs = log_reward(source.tflops(space, space.codes), space.problem, space.device, tau)
    peak = float(logs.max())
    log_z = peak + float(np.log(np.exp(logs - peak).sum()))
    return logs - log_z, log_z
