"""What completes a move: the policy, or where there is none its reward, and what was measured.

In the listed space the policy draws. A family's wide space has no policy, nor have some families:
draws are uniform there. Of a pool of such draws some are taken with the probabilities that a policy
is trained for, exp(TFLOPS / T), by the reward, corrected by how far the session's measurements of
strategies that are alike were off it. Decisions of which no reward knows anything stay as listed
strategies have them, where a move does not ask for more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.family import Strategy
from ptxflow.env.cost import attainable_tflops
from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import TAU, Reward
from ptxflow.env.space import Space, StrategySpace
from ptxflow.eval.sample.selection import reward_of
from ptxflow.eval.sample.widened import WideReward, widened
from ptxflow.eval.study.search.process import ALIKE, BRAVE, NOISE
from ptxflow.eval.tune.loop import Timed
from ptxflow.gfn.inference import Policy, sample_by_steps

POOL, DRAWN = 1_000, 32  # uniform draws, and a policy's, of which some are taken
WHOLE, LISTED = 4_000, 128  # uniform draws of all of a wide space, and a policy's beside them
MOST = 1_500  # measurements that correct a reward, the fastest

Codes = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Believed:
    """Microseconds by a reward of the listed family, in the listed space and in the wide one."""

    listed: RelationSpace
    reward: Reward

    def us(self, space: StrategySpace, codes: Codes) -> Array:
        """[n]; infinite for what does not build."""
        order, back = np.unique(codes, return_inverse=True)
        part = Space(space.family, space.problem, space.device, order)
        tflops = WideReward(self.reward, self.listed.family).tflops(part, order)
        with np.errstate(divide="ignore"):
            us: Array = space.problem.flops / 1e6 / np.maximum(np.nan_to_num(tflops), 0.0)
        return us[back]


@dataclass(frozen=True)
class Beside(Reward):
    """The geometric mean of what is modelled of a device, and what was learned on one like it."""

    own: Reward
    theirs: Reward
    device: Device

    @property
    def name(self) -> str:
        return f"{self.own.name} and {self.theirs.name} of {self.device.name}"

    def tflops(self, space: StrategySpace, codes: Codes) -> Array:
        there = Space(space.family, space.problem, self.device, np.unique(codes))
        both = self.own.tflops(space, codes) * self.theirs.tflops(there, codes)
        return np.asarray(np.sqrt(both))


def reward_beside(about: Mapping[str, Any], device: Device, family: str) -> Reward:
    """Of a policy's header: the device's reward, and where it is the model that of the device that
    the policy was trained for beside it, if its code runs here."""
    own, _ = reward_of(about, device.name, family)
    trained = DEVICES.get(about.get("settings", {}).get("device", ""), device)
    if own.name != "model" or trained.arch != device.arch:
        return own
    theirs, _ = reward_of(about, trained.name, family)
    return own if theirs.name == "model" else Beside(own, theirs, trained)


class Residuals:
    """ln(measured / believed), carried over to strategies that are alike: the mean of a Gaussian
    process whose correlation falls by ALIKE with every decision in which two differ."""

    def __init__(self, rows: NDArray[np.int64], off: Array) -> None:
        """rows [n, F] choice indices, off [n]; n may be 0."""
        self.rows = rows
        self.mean = float(np.median(off)) if len(off) else 0.0
        self.inverse = np.linalg.inv(self._alike(rows) + NOISE * np.eye(len(rows)))
        self.weights = self.inverse @ (off - self.mean)
        self.scale = float((off - self.mean) @ self.weights) / max(1, len(off))

    def of(self, rows: NDArray[np.int64]) -> Array:
        """[n] of strategies by their choice indices [n, F]."""
        return np.asarray(self.mean + self._alike(rows) @ self.weights)

    def least(self, rows: NDArray[np.int64]) -> Array:
        """[n] what it may be, BRAVE standard deviations below the mean."""
        alike = self._alike(rows)
        spread = 1 - np.einsum("ij,jk,ik->i", alike, self.inverse, alike, optimize=True)
        return self.of(rows) - BRAVE * np.sqrt(self.scale * np.maximum(spread, 1e-9))

    def _alike(self, rows: NDArray[np.int64]) -> Array:
        differ = np.zeros((len(rows), len(self.rows)), np.int16)
        for ours, theirs in zip(rows.T, self.rows.T, strict=True):
            differ += ours[:, None] != theirs[None, :]
        return np.asarray(np.power(ALIKE, differ))


def residuals(
    believed: Believed, space: StrategySpace, measured: Mapping[Strategy, float]
) -> Residuals:
    """Of strategies of the space, by their microseconds."""
    chosen = sorted((s for s in measured if np.isfinite(measured[s])), key=measured.__getitem__)
    codes = coded(space, chosen[:MOST])
    told = believed.us(space, codes) if len(codes) else np.zeros(0)
    keep = np.isfinite(told)
    off = np.log(np.array([measured[s] for s in chosen[:MOST]])[keep] / told[keep])
    return Residuals(space.indices(codes[keep]), off)


def coded(space: StrategySpace, strategies: Sequence[Strategy]) -> Codes:
    """[n] codes of strategies that are known to be legal."""
    places = [(d.name, {c: i for i, c in enumerate(d.choices)}) for d in space.decisions]
    held = [space.family.choices(s) for s in strategies]
    rows = [[at[choices[name]] for name, at in places] for choices in held]
    return np.asarray(np.array(rows, np.int64).reshape(-1, len(places)) @ space.strides[1:])


@dataclass
class Draws:
    """Codes of at most k distinct strategies of a part of the listed space, or of `space`.
    `measured` is the session's, and grows."""

    policy: Policy
    believed: Believed
    space: RelationSpace
    measured: Mapping[Strategy, Timed] = field(default_factory=dict)
    _off: tuple[int, Residuals] | None = None  # of how many measurements
    _own: Codes | None = None

    def __call__(self, part: RelationSpace, k: int, seed: int) -> Codes:
        rng = np.random.default_rng(seed)
        listed = self.believed.listed
        if part.digest == listed.digest and self.policy.knows(part.family.name):
            codes, _ = sample_by_steps(self.policy, part, max(DRAWN, k), seed)
            if not self.measured:
                return codes[:k]
        else:
            pool = WHOLE if part is self.space else min(POOL, 4 * len(part))
            beside = self._listed() if part is self.space else ()
            part = part.plain
            codes = np.union1d(part.sample_uniform(pool, rng), beside).astype(np.int64)
        off: Array | float = 0.0
        if self.measured and part.digest == self.space.digest:
            off = self._residuals().of(part.indices(codes))
        share = part.problem.flops / 1e6 / (self.believed.us(part, codes) * np.exp(off))
        keys = share / (TAU * attainable_tflops(part.problem, part.device))
        best = np.argsort(-(keys + rng.gumbel(size=len(codes))), kind="stable")
        return np.asarray(codes[best[:k]])

    def hope(self, part: RelationSpace, codes: Codes) -> Array:
        """[n] ln of the microseconds that strategies of the session's space may reach."""
        us = np.log(self.believed.us(part, codes))
        return us + self._residuals().least(part.indices(codes))

    def _listed(self) -> Codes:
        """A policy's draws of the listed space, as the wide one has them."""
        listed = self.believed.listed
        if self._own is None:
            knows = self.policy.knows(listed.family.name) and self.space is not listed
            own = sample_by_steps(self.policy, listed, LISTED, 0)[0] if knows else ()
            self._own = widened(np.array(own, np.int64), listed.family) if knows else np.array([])
        return self._own

    def _residuals(self) -> Residuals:
        if self._off is None or self._off[0] != len(self.measured):
            us = {s: t.us for s, t in self.measured.items()}
            self._off = len(us), residuals(self.believed, self.space, us)
        return self._off[1]
