"""A trained policy: load its checkpoint, score a space exactly, draw k strategies.

PyTorch only; torchgfn is for training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import TAU
from ptxflow.env.space import Codes, Space
from ptxflow.gfn import beam
from ptxflow.gfn.checkpoint import CheckpointError, read, require_space
from ptxflow.gfn.network import FamilyConfig, NetworkConfig, PolicyNetwork
from ptxflow.gfn.walks import Diagrams, Tree, family_shape

# Chosen by replay on brute-forced workloads: sharper draws lose less where a policy is right, more
# where it errs, and the best of 8 on workloads that were not trained was best near 2
SHARPNESS = 2.0
POOL = 512  # draws that stand for a space that is not listed: under a second, 2 s the first time


@dataclass(frozen=True)
class Policy:
    """A trained policy; `path` is the checkpoint it came from, `about` its configuration."""

    network: PolicyNetwork
    path: Path
    about: dict[str, Any]

    @property
    def device(self) -> str | None:
        """For whose limits and rates it was trained; None: for any, or its file does not say."""
        name: str | None = self.about.get("settings", {}).get("device")
        return None if name == "any" else name

    def knows(self, family: str) -> bool:
        """Whether it has a policy of the family."""
        return any(f.name == family for f in self.network.config.families)

    def trained_elsewhere(self, device: str) -> str:
        """A line where it was trained for another device than this one; else nothing."""
        if self.device in (None, device):
            return ""
        return f"{self.path} was trained for {self.device}, and goes on for {device}"


def load_policy(path: str | Path) -> Policy:
    """The policy of a checkpoint; CheckpointError, one line, where the file is no good."""
    checkpoint = read(Path(path))
    network = PolicyNetwork(checkpoint.network)
    network.load_state_dict(checkpoint.group("policy"))
    return Policy(network.eval(), Path(path), checkpoint.config)


def at_temperature(policy: Policy, family: str, temperature: float) -> tuple[float, float]:
    """The tau that a policy is told, and the sharpness, for draws in proportion to exp(TFLOPS/T) at
    a temperature; CheckpointError where it is told temperatures, and this is none of them."""
    told = policy.network.of(family).config.temperatures
    if told is None:
        return TAU, float(policy.about.get("train", {}).get("tau", TAU)) / temperature
    if not told[0] <= temperature <= told[1]:
        raise CheckpointError(
            f"{policy.path}: trained at temperatures from {told[0]} to {told[1]}, not {temperature}"
        )
    return temperature, 1.0


def log_probs(policy: Policy, space: Space, tau: float = TAU) -> NDArray[np.float64]:
    """[len(space)] exact log-probability of each strategy, in the order of `space.codes`, at a
    temperature, if the policy is told one.

    CheckpointError when the policy is of another decision space or other features.
    """
    require_space(policy.path, policy.network.config, family_shape(space))
    exact: NDArray[np.float64] = Tree(space).leaf_log_probs(policy.network, tau).double().numpy()
    return exact


def part_log_probs(policy: Policy, whole: Space, part: Space) -> NDArray[np.float64]:
    """[len(part)] exact log-probabilities of a part's strategies in the whole space of its problem.

    Only the prefixes of these strategies are evaluated, by walks that are forced to them. Raises
    CheckpointError as `log_probs` does.
    """
    if len(part) == len(whole.codes):
        return log_probs(policy, part)
    require_space(policy.path, policy.network.config, family_shape(part))
    with torch.no_grad():
        walk = Tree(whole).walk(
            policy.network,
            torch.zeros(len(part), dtype=torch.int64),
            given=torch.from_numpy(part.indices()),
        )
    exact: NDArray[np.float64] = walk.log_probs.double().sum(0).numpy()
    return exact


def with_family(policy: Policy, space: Space | RelationSpace) -> Policy:
    """The policy, with an untrained family policy for the space where it has none of its shape."""
    shape = family_shape(space)
    if shape in policy.network.config.families:
        return policy
    zeros = (0.0,) * len(shape.features)  # one workload: its features say nothing
    network = policy.network.extended(NetworkConfig((FamilyConfig(shape, zeros, zeros),)))
    return Policy(network.eval(), policy.path, policy.about)


def untrained(policy: Policy) -> Policy:
    """The same network with random weights, those of its output rows too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = PolicyNetwork(policy.network.config)
        for config in policy.network.config.policies:
            torch.nn.init.normal_(network.of(config.shape.name).head, std=config.hidden**-0.5)
    return Policy(network.eval(), policy.path, policy.about)


def sample_distinct(
    policy: Policy, space: Space | RelationSpace, k: int, seed: int, sharpness: float = SHARPNESS
) -> NDArray[np.int64]:
    """Codes of min(k, len(space)) distinct strategies; see `draw_distinct`, and `sample_by_steps`
    for a space that is not listed."""
    if isinstance(space, RelationSpace):
        return sample_by_steps(policy, space, k, seed, sharpness)[0]
    codes: NDArray[np.int64] = space.codes
    return codes[draw_distinct(log_probs(policy, space), k, seed, sharpness)]


def sample_by_steps(
    policy: Policy,
    space: RelationSpace,
    k: int,
    seed: int,
    sharpness: float = SHARPNESS,
    tau: float = TAU,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Codes of min(k, len(space)) distinct strategies of a space of any size, and their exact
    log-probabilities; no other strategy is scored. See `beam.draw_distinct`. A policy that is told
    temperatures draws at `tau / sharpness`, as far as it was trained; else each *step* is taken to
    the power of `sharpness`, so that only 1 draws as from a list. Raises CheckpointError as
    `log_probs` does, ValueError as `draw_distinct`."""
    _require_draws(k, sharpness)
    require_space(policy.path, policy.network.config, family_shape(space))
    rng, colder = np.random.default_rng(seed), tau
    if sharpness and (told := policy.network.of(space.family.name).config.temperatures):
        colder = min(max(tau / sharpness, told[0]), told[1])
    walks = Diagrams([space])
    power = sharpness * colder / tau
    drawn = beam.draw_distinct(walks, policy.network, 0, k, sharpness=power, rng=rng, tau=colder)
    codes: Codes = drawn.choices.numpy() @ space.strides[1:]
    logs = drawn.log_probs if colder == tau else _given(policy, walks, drawn.choices, tau)
    return codes, logs.numpy()


def _given(policy: Policy, walks: Diagrams, rows: Tensor, tau: float) -> Tensor:
    """float64 [n] exact log-probabilities of strategies [n, F] of the first workload."""
    zero, at = torch.zeros(1, dtype=torch.int64), torch.full((1,), tau)
    with torch.no_grad():
        walk = walks.walk(policy.network, zero, at, each=len(rows), given=rows)
    return walk.log_probs.double().sum(0)


@dataclass(frozen=True)
class Pool:
    """What is scored of a space: all of it where it is listed, else draws of a policy.

    space      all, or the draws
    log_probs  [n] of the policy, in the order of `space.codes`
    drawn      [n] places in `space.codes`, in the order in which they were drawn
    """

    space: Space
    log_probs: NDArray[np.float64]
    drawn: NDArray[np.int64]


def score(
    policy: Policy,
    space: Space | RelationSpace,
    k: int,
    seed: int,
    sharpness: float = SHARPNESS,
    tau: float = TAU,
) -> Pool:
    """A space that is listed, whole, with min(k, len(space)) draws of it as `draw_distinct`; of
    another its draws as `sample_by_steps`, of which the first j are j draws, too."""
    if isinstance(space, Space):
        logs = log_probs(policy, space, tau)
        return Pool(space, logs, draw_distinct(logs, k, seed, sharpness))
    codes, logs = sample_by_steps(policy, space, k, seed, sharpness, tau)
    order = np.argsort(codes)
    part = Space(space.family, space.problem, space.device, codes[order])
    return Pool(part, logs[order], np.argsort(order))


def with_found(
    pool: Pool | None, policy: Policy, space: RelationSpace, codes: Codes, tau: float = TAU
) -> Pool:
    """Draws of a policy and these strategies [n], which a search found, as one pool. Where there
    are no draws, as no policy was trained for the space, all strategies count as equally likely."""
    if pool is None:
        part = Space(space.family, space.problem, space.device, np.unique(codes))
        return undrawn(part, len(space))
    found = _given(policy, Diagrams([space]), torch.from_numpy(space.indices(codes)), tau).numpy()
    every, first = np.unique(np.concatenate([pool.space.codes, codes]), return_index=True)
    logs = np.concatenate([pool.log_probs, found])[first]
    drawn = np.searchsorted(every, pool.space.codes[pool.drawn])
    return Pool(Space(space.family, space.problem, space.device, every), logs, drawn)


def undrawn(part: Space, count: int) -> Pool:
    """Strategies of a space of `count` that no policy was trained for: all are equally likely."""
    return Pool(part, np.full(len(part), -np.log(count)), np.zeros(0, np.int64))


def draw_distinct(
    logs: NDArray[np.float64], k: int, seed: int, sharpness: float = SHARPNESS
) -> NDArray[np.int64]:
    """Places of min(k, n) distinct strategies in log-probabilities [n], drawn one after the other.

    Each draw has the probabilities to the power of `sharpness`, renormalised over what is left: the
    largest of the scaled log-probability plus Gumbel noise (Efraimidis-Spirakis, Gumbel-top-k).
    Where the policy has its target, that is exp(sharpness TFLOPS / T): 1 samples the target itself,
    more comes nearer to its top. Raises ValueError for k or a sharpness below 0.
    """
    _require_draws(k, sharpness)
    keys = sharpness * logs + np.random.default_rng(seed).gumbel(size=len(logs))
    return np.argsort(-keys, kind="stable")[:k]


def _require_draws(k: int, sharpness: float) -> None:
    if k < 1:
        raise ValueError(f"the number of samples must be positive, not {k}")
    if not 0 <= sharpness < np.inf:
        raise ValueError(f"the sharpness must be a number of at least 0, not {sharpness}")
