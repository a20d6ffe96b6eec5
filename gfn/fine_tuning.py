"""A policy after a few measurements of one workload: asked, measured, tuned, in seconds.

What is measured turns a prior of the whole space into a posterior, and trajectory balance moves the
policy to the target that this asks for. A family that the policy lacks is added.

The prior gives log rewards, TFLOPS / T. A Gaussian process is on measured less prior ones: a
level, a factor of the prior's differences, and a part that strategies share by their common
decisions, whose scale and correlation, of a few, make the measurements likeliest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.observations import Observations
from ptxflow.env.reward import TAU, Reward, log_reward
from ptxflow.env.space import Codes, Space, StrategySpace, differing
from ptxflow.gfn.inference import Policy, log_probs, sample_distinct, with_family
from ptxflow.gfn.targets import Target
from ptxflow.gfn.training import TrainConfig, Trainer

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
EVERY = 8  # measurements between two tunings
FAR = 8.0  # nats: the most that a deviation counts for
SPAN = 40.0  # nats below the best, where log rewards end: no draw ever comes from there

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)  # nats by which the prior is off
SHARED = (0.5, 0.7, 0.85, 0.95)  # of the correlation, left by each decision that differs
NOISE = 0.3  # nats: half a percent of a time, where the best lies at 50 nats
DOUBT = 0.5  # of the slope: what lies a nat higher than another may do so by 1 +- 0.5 nats
LEVEL = 30.0  # nats: nothing is known of what is off by the same everywhere
CHUNK = 1 << 22  # elements of a kernel that are worked out at a time

# One workload needs no other mixing than many did: the matrices between layers stay, and what is
# learned are the rows of choices. That comes nearer to the target in as many steps, at a quarter of
# their cost.
TUNING = TrainConfig(
    tau=TAU, batch=256, learning_rate=3e-3, matrix_rate=0.0, log_z_rate=2e-2, epsilon=0.0,
    temperatures=None, each=256, rebuilt=0.0, replayed=0.5, room=8192, warmup=5,
)  # fmt: skip


@dataclass(frozen=True)
class TuneConfig:
    """How a policy is tuned: `train` as in any training, of `steps` steps.

    optimism  deviations by which what is uncertain is overrated, as pays for what is measured next;
              0 aims at what is expected
    """

    steps: int = 100
    train: TrainConfig = TUNING
    optimism: float = 2.0


@dataclass(frozen=True)
class PosteriorReward:
    """A reward of one space: log rewards [n] of its codes [n], up to a constant."""

    codes: Codes
    log_rewards: Array
    unit: float  # TFLOP/s of a nat
    name: str = "posterior"

    def tflops(self, space: StrategySpace, codes: Codes) -> Array:
        above = self.log_rewards - self.log_rewards.max() + SPAN
        every = np.maximum(above, 0.0) * self.unit
        return np.asarray(every[np.searchsorted(self.codes, codes)])


def propose(
    policy: Policy, space: Space, count: int, known: Codes, seed: int = 0, sharpness: float = 2.0
) -> Codes:
    """Codes of up to `count` distinct strategies to measure next, none of `known`.

    They are drawn by the policy's probabilities to the power of `sharpness`; a policy that lacks
    the family draws uniformly.
    """
    fit = with_family(policy, space)
    drawn = sample_distinct(fit, space, min(len(space), count + len(known)), seed, sharpness)
    fresh: Codes = drawn[~np.isin(drawn, known)][:count]
    return fresh


def posterior_log_rewards(
    policy: Policy,
    space: Space,
    measured: Observations | None,
    base: Reward | None,
    tau: float,
    optimism: float = 0.0,
) -> Array:
    """[n] log rewards of the space's strategies, up to a constant: `base`, or else what the policy
    itself says, corrected by what was measured, and `optimism` deviations higher. What failed is
    SPAN nats below the best of the rest.
    """
    logs = (
        log_probs(policy, space, tau)
        if base is None
        else log_reward(base.tflops(space, space.codes), space.problem, space.device, tau)
    )
    if measured is None or not len(measured):
        return logs
    places = np.searchsorted(space.codes, measured.codes)
    sound = np.isfinite(measured.seconds)
    failed, places = places[~sound], places[sound]
    if len(places):
        tflops = space.problem.flops / measured.seconds[sound] / 1e12
        seen = log_reward(tflops, space.problem, space.device, tau)
        # a policy may hold the rest for all but impossible, and be wrong
        logs = np.maximum(logs, logs[places].max() - SPAN / 2)
        logs, std = posterior(logs, space.indices(), places, seen)
        logs += optimism * np.minimum(std, FAR)
    rest = np.ones(len(logs), bool)
    rest[failed] = False
    if rest.any():  # what failed may have been expected to be the best
        logs[failed] = logs[rest].max() - SPAN
    return logs


def fine_tune(
    policy: Policy,
    space: Space,
    measured: Observations | None,
    base: Reward | None = None,
    config: TuneConfig | None = None,
    seed: int = 0,
) -> Policy:
    """The policy tuned to one workload by what was measured of it; `policy` itself stays as it is.

    space     the workload's valid strategies (any shape; a family that the policy lacks is added
              to it)
    measured  seconds of the strategies that were measured so far, failures infinite; None or empty
              where nothing was: then `base` alone is the target, and without it nothing changes
    base      the prior, a reward of the rest (ModelReward, SurrogateReward, ...); None: what the
              policy's own probabilities say of it
    """
    fit, config = with_family(policy, space), config or TuneConfig()
    if base is None and (measured is None or not len(measured)):
        return fit
    tau = float(policy.about.get("train", {}).get("tau", TAU))
    train = replace(config.train, tau=tau, seed=seed, stages=1)
    unit = 1.0 / float(log_reward(np.ones(1), space.problem, space.device, tau)[0])
    logs = posterior_log_rewards(fit, space, measured, base, tau, config.optimism)
    reward = PosteriorReward(space.codes, logs, unit)
    trainer = Trainer([space], train, config.steps, reward, start=fit.network)
    trainer.remember(0, space.codes[np.argsort(-logs)[: train.room]])
    for _ in range(config.steps):
        trainer.advance()
    count = 0 if measured is None else len(measured)
    about: dict[str, Any] = {**policy.about, "tuned": {"workload": space.problem.definition,
                             "axes": dict(space.problem.axes), "measured": count}}  # fmt: skip
    return Policy(trainer.network.eval(), policy.path, about)


def tune_by_measuring(
    policy: Policy, space: Space, measure: Callable[[Codes], Observations], count: int,
    measured: Observations | None = None, base: Reward | None = None, seed: int = 0,
) -> Iterator[tuple[Policy, Observations]]:  # fmt: skip
    """The tuned policy and all that was measured, after each EVERY of `count` measurements.

    `measure` times strategies of these codes and returns everything that it has measured of the
    workload, what is in `measured` too; each round's strategies are the tuned policy's own.
    """
    tuned = fine_tune(policy, space, measured, base, seed=seed)
    for done in range(0, count, EVERY):
        known = np.zeros(0, np.int64) if measured is None else measured.codes
        codes = propose(tuned, space, min(EVERY, count - done), known, seed + done)
        if not len(codes):
            return
        measured = measure(codes)
        tuned = fine_tune(policy, space, measured, base, seed=seed)
        yield tuned, measured


def distance(policy: Policy, space: Space, reward: Reward, tau: float = TAU) -> float:
    """Exact total variation distance of a policy to a reward's target on one space."""
    return Target(space, reward).distance(with_family(policy, space).network, tau)


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
    differ = differing(seen, seen)
    fits = [_fit(scale, shared, differ, common, off) for scale, shared in product(SCALES, SHARED)]
    _, scale, shared, factor = max(fits, key=lambda fit: fit[0])
    weights = np.linalg.solve(factor.T, np.linalg.solve(factor, off))
    mean, std = prior.copy(), np.empty(len(prior))
    step = max(1, CHUNK // len(places))
    for start in range(0, len(prior), step):
        part = slice(start, start + step)
        kernel = scale**2 * shared ** differing(choices[part], seen)
        kernel = kernel + np.outer(slope[part], slope[places]) + LEVEL**2
        mean[part] += kernel @ weights
        explained = np.square(np.linalg.solve(factor, kernel.T)).sum(0)
        whole = scale**2 + slope[part] ** 2 + LEVEL**2
        std[part] = np.sqrt(np.maximum(whole - explained, 0.0))
    return mean, std


def _fit(
    scale: float, shared: float, differ: NDArray[np.int8], common: Array, off: Array
) -> tuple[float, float, float, Array]:
    """Log likelihood of the measurements under a scale and reach, these two, and the Cholesky
    factor of the covariance."""
    covariance = scale**2 * shared**differ + common + NOISE**2 * np.eye(len(off))
    factor = np.linalg.cholesky(covariance)
    whitened = np.linalg.solve(factor, off)
    likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(factor)).sum())
    return likelihood, scale, shared, factor
