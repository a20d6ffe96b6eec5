"""Training: batches of walks, a step of the objective, curriculum and measurement.

A `Trainer` advances one step at a time and its whole state can be written and read back: a resumed
run computes the same numbers as one that was never stopped. It prints nothing and draws nothing.
No step reads a list of strategies: spaces are diagrams, and a reward is asked of what was drawn.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gfn.containers import Trajectories
from numpy.typing import NDArray
from torch import Tensor

from ptxflow.env.reward import ModelReward, Reward
from ptxflow.env.tasks.shapes import Stream
from ptxflow.gfn.balance import KernelSubTB, KernelVariance
from ptxflow.gfn.beam import draw_distinct
from ptxflow.gfn.checkpoint import Checkpoint, CheckpointError, require_space
from ptxflow.gfn.curriculum import Curriculum, Promotion
from ptxflow.gfn.group import AnySpace, Group
from ptxflow.gfn.hints import hints, settings
from ptxflow.gfn.muon import Muon
from ptxflow.gfn.network import ByFamily, FamilyConfig, LogF, LogZ, NetworkConfig, PolicyNetwork
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.targets import Target
from ptxflow.gfn.walks import Walk, family_shape, workload_features

REMEMBERED = 1_000_000  # strategies whose exact targets are kept
LEAST_SPREAD = 0.25  # of a feature that hardly varies in training
RECENT = 0.05  # weight of a step's loss in its family's recent loss
WATCHED_LEAVES = 400_000  # strategies of a family whose probabilities are worked out on the way
EVEN = 0.1  # of the steps, shared evenly among families
RENEW_EVERY, RENEWED = 16, 4  # steps of a family, and workloads that are drawn anew
LOOK_EVERY = 10  # steps between the host's looks at the losses of families


@dataclass(frozen=True)
class StepReport:
    """What one step did with workloads of a family.

    figures: float [4], where training runs: the loss, the mean TFLOP/s of on-policy walks over the
    attainable, the policy's entropy in nats, the share of choices that masks ruled out.
    """

    NAMES: ClassVar = ("loss", "reward", "entropy", "masked")
    family: str
    figures: Tensor

    @property
    def loss(self) -> float:
        """Trajectory balance, in nats squared; waits for the GPU."""
        return self.figures[0].item()


class Trainer:
    """Trains one policy on `spaces`, of one family or several; `total` steps are planned."""

    def __init__(
        self, spaces: Sequence[AnySpace], config: TrainConfig, total: int,
        reward: Reward | None = None, held_out: Sequence[AnySpace] = (),
        compute: torch.device | str = "cpu", start: PolicyNetwork | None = None,
        streams: Mapping[str, Stream] | None = None,
    ) -> None:  # fmt: skip
        """`compute` is where networks and tables lie; `start` is a trained network to begin with,
        whose other families stay as they are; of families with a stream the workloads are drawn
        anew as training goes on.
        """
        refuse_overlap(spaces, held_out)
        self.config = config
        self.total = total
        self.step = 0
        self.spaces: list[AnySpace] = list(spaces)
        self.reward: Reward = reward or ModelReward()
        self.compute = torch.device(compute)
        self.generator = torch.Generator(self.compute).manual_seed(config.seed)
        self.rng = np.random.default_rng(config.seed)
        shape = network_config(spaces, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.network = PolicyNetwork(shape)
        if start is not None:
            self.network = start.extended(shape, config.seed)
        self.network.to(self.compute).requires_grad_(True)
        trained = {s.family.name for s in spaces}
        self.kept = [f.name for f in self.network.config.families if f.name not in trained]
        for name in self.kept:
            self.network.of(name).requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed + 1)
            self.log_z = ByFamily(shape, LogZ).to(self.compute)
            flows = config.objective in ("subtb", "db")
            self.log_f = ByFamily(shape, LogF).to(self.compute) if flows else None
        self.streams = streams or {}
        self._judged: dict[int, Target] = {}  # by the id of the space, which a target keeps
        families = _by_family(spaces)
        self.groups = [Group([self.spaces[i] for i in ids], ids, self) for ids in families]
        self.curriculum = Curriculum(
            [s.problem for s in spaces], config.stages, config.stage_threshold, config.stage_share
        )
        self.optimisers = self._optimisers()
        for optimiser in self.optimisers.values():
            for part in optimiser.param_groups:
                part["full"] = part["lr"]  # what `rate` is a share of

    @property
    def beside(self) -> list[torch.Tensor]:
        """What is learned beside the policies."""
        return [*self.log_z.parameters(), *(self.log_f.parameters() if self.log_f else ())]

    def _optimisers(self) -> dict[str, torch.optim.Optimizer]:
        """Adam for what learns, and Muon for its matrices."""
        config = self.config
        policies = [self.network.of(f.name) for f in self.network.config.families]
        matrices = [m for p in policies for m in p.matrices() if m.requires_grad]
        if not config.matrix_rate:
            for matrix in matrices:  # nor are gradients worked out
                matrix.requires_grad_(False)
            matrices = []
        held = {id(p) for p in matrices}
        rest = [p for p in self.network.parameters() if id(p) not in held and p.requires_grad]
        adam = torch.optim.Adam(
            [
                {"params": rest, "lr": config.learning_rate},
                {"params": self.beside, "lr": config.log_z_rate},
            ],
            betas=(0.9, 0.99),
            fused=self.compute.type == "cuda",
        )
        if not matrices:
            return {"adam": adam}
        return {"adam": adam, "muon": Muon(matrices, config.matrix_rate)}

    @property
    def progress(self) -> float:
        """Steps done over steps planned, 0 to 1."""
        return min(1.0, self.step / self.total)

    @property
    def epsilon(self) -> float:
        """The share of uniform choices in on-policy walks."""
        return self.config.epsilon * (1 - self.progress)

    @property
    def rate(self) -> float:
        """The factor of the learning rates: warm-up, flat, then a cosine to 1%."""
        warm = min(1.0, (self.step + 1) / self.config.warmup)
        late = max(0.0, self.progress - self.config.flat) / (1 - self.config.flat)
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * late)))

    def advance(self) -> StepReport:
        """One batch of one family's active workloads, and one optimiser step."""
        group, workload, tau = self._batch()
        self._renew(group)
        choices, worth = group.meet(workload, tau)
        which, tau = workload.repeat_interleave(tau.shape[1]), tau.flatten()
        log_rewards = (worth / tau[:, None]).flatten()
        each = self.config.each
        walk = group.walks.walk(
            self.network, which, tau, each=each, wanted=choices.reshape(-1, group.walks.depth)
        )
        trajectories = group.env.trajectories(
            walk, which.repeat_interleave(each), tau.repeat_interleave(each), log_rewards
        )
        if group.loss is None:
            self._level(group, walk, which, tau, log_rewards)
        loss = self._loss(group, trajectories, tau)
        self.update(loss)
        loss = loss.detach()
        before = loss if group.loss is None else group.loss
        group.loss = before + RECENT * (loss - before)
        self.step += 1
        if self.step % LOOK_EVERY == 0:
            self._look()
        reached = worth[:, : self.config.rows[0]].mean()
        return StepReport(
            group.walks.family, torch.stack([loss, reached, walk.entropy, walk.masked])
        )

    def _renew(self, group: Group) -> None:
        """Now and then workloads of a family with a stream give way to new ones, in turn."""
        group.steps += 1
        stream = self.streams.get(group.walks.family)
        if stream and group.steps % RENEW_EVERY == 0:
            count = min(RENEWED, len(group.ids))
            places = [(group.renewed + i) % len(group.ids) for i in range(count)]
            group.renewed += count
            fresh = stream.draw(count, self.rng)
            group.renew(places, fresh)
            for place, space in zip(places, fresh, strict=True):
                self.spaces[group.ids[place]] = space

    def _loss(self, group: Group, trajectories: Trajectories, tau: Tensor) -> Tensor:
        """The objective's; a nat counts less where the temperature is low and all are far apart."""
        made: Any = group.objective
        if isinstance(made, KernelSubTB):
            return made.loss(group.env, trajectories, recalculate_all_logprobs=False)
        if isinstance(made, KernelVariance):
            made.each = self.config.each
        losses = made.loss(group.env, trajectories, False, reduction="none")
        weight = (tau / self.config.tau) ** self.config.weight
        return (losses * weight.repeat_interleave(self.config.each)).mean()

    def _look(self) -> None:
        """Let the host know the recent losses of families."""
        stepped = [g for g in self.groups if g.loss is not None]
        losses = torch.stack([g.loss for g in stepped if g.loss is not None]).tolist()
        for group, loss in zip(stepped, losses, strict=True):
            group.known = loss

    def update(self, loss: Tensor) -> None:
        """One step of the optimisers down the gradient of a loss."""
        for optimiser in self.optimisers.values():
            optimiser.zero_grad()
            for part in optimiser.param_groups:
                part["lr"] = part["full"] * self.rate
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_([*self.network.parameters(), *self.beside], self.config.clip)
        for optimiser in self.optimisers.values():
            optimiser.step()

    @torch.no_grad()
    def _level(
        self, group: Group, walk: Walk, workload: Tensor, tau: Tensor, log_rewards: Tensor
    ) -> None:
        """Start log Z where a family's first batch balances on average, not nats away from it."""
        excess = (log_rewards - walk.log_probs.sum(0)).unflatten(0, (len(tau), -1)).mean(1)
        name = group.walks.family
        over = (excess - group.walks.log_leaves[workload]) * tau
        for kind in (self.log_z, self.log_f):
            if kind:
                kind.of(name).level.copy_(over.mean() / self.network.of(name).config.middle)

    def _batch(self) -> tuple[Group, Tensor, Tensor]:
        """A family, drawn by its share, ids [S] of its active workloads in turn, and temperatures
        [S, T] of theirs."""
        config, active = self.config, set(self.curriculum.active)
        held = [[w for w, i in enumerate(g.ids) if i in active] for g in self.groups]
        chosen = 0
        if len(held) > 1:
            chosen = int(self.rng.choice(len(held), p=self._shares([len(h) for h in held])))
        ids = torch.from_numpy(self.rng.permutation(held[chosen])[: config.workloads])
        shape = len(ids), max(1, config.batch // (len(ids) * config.each))
        tau = torch.full(shape, config.tau)
        if config.temperatures:
            least, most = np.log(config.temperatures)
            tau = torch.from_numpy(np.exp(self.rng.uniform(least, most, shape))).float()
        ids, tau = (x.to(self.compute, non_blocking=True) for x in (ids, tau))
        return self.groups[chosen], ids, tau

    def _shares(self, workloads: Sequence[int]) -> NDArray[np.float64]:
        """Of the steps, by family: by how many workloads it has, and by how far off it still is.

        The loss is a mean square, so that its root goes with the distance.
        """
        known = [g.known for g in self.groups if g.known is not None]
        losses = [max(known, default=1.0) if g.known is None else g.known for g in self.groups]
        weights = np.sqrt(np.array(workloads) * np.array(losses))
        return EVEN / len(weights) + (1 - EVEN) * weights / weights.sum()

    def propose(
        self, workload: int, count: int, known: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Codes of distinct strategies of a workload, none of `known`, drawn one after the other
        with the policy's probabilities."""
        group, number = self._place(workload)
        seen = np.zeros(0, np.int64) if known is None else known
        walks, network = group.walks, self.network
        drawn = draw_distinct(
            walks, network, number, count + len(seen), rng=self.rng, tau=self.config.tau
        )
        codes = drawn.choices.cpu().numpy() @ group.spaces[number].strides[1:]
        fresh: NDArray[np.int64] = codes[~np.isin(codes, seen)][:count]
        return fresh

    def remember(self, workload: int, codes: NDArray[np.int64]) -> None:
        """Learn from these strategies [n] of a workload, too, as if they had been met."""
        group, number = self._place(workload)
        choices = torch.from_numpy(group.spaces[number].indices(codes)).to(self.compute)
        one = torch.tensor([number], device=self.compute)
        worth = group.worth(one.expand(len(choices)), choices)
        group.replay.add(one, choices[None], worth[None])

    def reward_anew(self, reward: Reward, workloads: Sequence[int]) -> None:
        """Train on another reward from here on, which differs for these workloads only."""
        self.reward = reward
        for workload in workloads:
            group, number = self._place(workload)
            group.replay.forget(number)
            self._judged.pop(id(self.spaces[workload]), None)

    def _place(self, workload: int) -> tuple[Group, int]:
        """The group that holds a workload, and its number in there."""
        group = next(g for g in self.groups if workload in g.ids)
        return group, group.ids.index(workload)

    def distances(self, workloads: Sequence[int], tau: float | None = None) -> list[float]:
        """Exact total variation distance to the target, of workload ids, at a temperature (the
        configuration's)."""
        return list(self.held_out_distances([self.spaces[i] for i in workloads], tau))

    def log_z_error(self, workload: int, tau: float | None = None) -> float:
        """What is learned of log Z less the exact one, in nats; where the objective learns none,
        the mean over walks that it stands for."""
        group, number = self._place(workload)
        walks, tau = group.walks, tau or self.config.tau
        one = torch.tensor([number], device=self.compute)
        at = torch.full((1,), tau, device=self.compute)
        with torch.no_grad():
            if self.config.objective == "tb":
                features = walks.seen(self.network.of(walks.family).config)[one]
                leaves = walks.log_leaves[one]
                learned = self.log_z.of(walks.family)(features, leaves, at)
            else:
                own = torch.Generator(self.compute).manual_seed(0)
                walk = walks.walk(self.network, one, at, each=1024, generator=own)
                log_rewards = group.worth(one.expand(1024), walk.choices) / tau
                learned = (log_rewards - walk.log_probs.sum(0)).mean()
        return learned.item() - self._target(self.spaces[workload]).log_z(tau)

    def held_out_distances(
        self, spaces: Iterable[AnySpace], tau: float | None = None
    ) -> Iterator[float]:
        """The same of spaces, one after the other; they are listed for it."""
        for space in spaces:
            yield self._target(space).distance(self.network, tau or self.config.tau)

    def _target(self, space: AnySpace) -> Target:
        """The exact target of a space, remembered for a while."""
        if id(space) not in self._judged:
            while sum(len(t.space) for t in self._judged.values()) > REMEMBERED:
                del self._judged[next(iter(self._judged))]
            self._judged[id(space)] = Target(space, self.reward, self.compute)
        return self._judged[id(space)]

    def stage_workloads(self, most: int) -> list[list[int]]:
        """Of each family up to `most` workloads, spread evenly: of those of the current stage, or
        of all in the last one."""
        course = self.curriculum
        stage = set(range(len(self.spaces)) if course.last else course.stages[course.stage])
        held = [[i for i in group.ids if i in stage] for group in self.groups]
        return [
            [own[place] for place in watched([self.spaces[i] for i in own], most)]
            for own in held
            if own
        ]

    def measure_stage(self, most: int = 8) -> tuple[dict[str, float], Promotion | None]:
        """Mean distance by family on `stage_workloads`; adds a stage if their mean says so."""
        distances = {
            self.spaces[own[0]].family.name: float(np.mean(self.distances(own)))
            for own in self.stage_workloads(most)
        }
        return distances, self.promote(sum(distances.values()) / len(distances))

    def promote(self, distance: float | None) -> Promotion | None:
        """Add a stage if this one is near enough (None: not measured) or has had its time."""
        return self.curriculum.measured(distance, self.step, self.progress)

    def policy_checkpoint(self, about: Mapping[str, Any]) -> Checkpoint:
        """What sampling needs and no more; `about` is JSON data kept in the header."""
        tensors = {f"policy.{k}": v for k, v in self.network.state_dict().items()}
        return Checkpoint(self.network.config, dict(about), tensors)

    def state(self, about: Mapping[str, Any]) -> Checkpoint:
        """Everything a later `restore` needs to continue exactly."""
        tensors = self.policy_checkpoint({}).tensors
        for name, kind in (("log_z", self.log_z), ("log_f", self.log_f)):
            tensors |= {f"{name}.{k}": v for k, v in (kind.state_dict() if kind else {}).items()}
        for group in self.groups:
            met = group.replay
            tensors |= {f"met.{group.walks.family}.choices": met.choices,
                        f"met.{group.walks.family}.worth": met.worth}  # fmt: skip
        for name, optimiser in self.optimisers.items():
            for i, slots in optimiser.state_dict()["state"].items():
                tensors |= {f"{name}.{i}.{key}": value for key, value in slots.items()}
        tensors["generator"] = self.generator.get_state()
        curriculum = self.curriculum
        progress = {
            "train": asdict(self.config),
            "leaves": self._leaves,
            "step": self.step,
            "total": self.total,
            "rng": self.rng.bit_generator.state,
            "stage": curriculum.stage,
            "since": curriculum.since,
            "promotions": [asdict(p) for p in curriculum.promotions],
            "losses": [None if g.loss is None else g.loss.item() for g in self.groups],
            "known_losses": [group.known for group in self.groups],
        }
        return Checkpoint(self.network.config, {**about, **progress}, tensors)

    @property
    def _leaves(self) -> list[int]:
        """By which a run knows its workloads; one with streams goes on with others."""
        return [] if self.streams else [len(s) for s in self.spaces]

    def restore(self, checkpoint: Checkpoint, where: object = "checkpoint") -> None:
        """Take over a state; CheckpointError where it is of another run or decision space."""
        for group in self.groups:
            require_space(where, checkpoint.network, family_shape(group.spaces[0]))
        config = checkpoint.config
        if config.get("leaves") != self._leaves or "generator" not in (checkpoint.tensors):
            raise CheckpointError(
                f"{where}: not a state to resume: it is a policy alone, or of other workloads or "
                f"rules"
            )
        self.network.load_state_dict(checkpoint.group("policy"))
        self.log_z.load_state_dict(checkpoint.group("log_z"))
        if self.log_f:
            self.log_f.load_state_dict(checkpoint.group("log_f"))
        for group in () if self.streams else self.groups:
            for name, tensor in checkpoint.group(f"met.{group.walks.family}").items():
                getattr(group.replay, name).copy_(tensor)
        for name, optimiser in self.optimisers.items():
            slots: dict[int, dict[str, Tensor]] = {}
            for place, value in checkpoint.group(name).items():
                number, key = place.split(".")
                slots.setdefault(int(number), {})[key] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": slots})
        self.curriculum.stage, self.curriculum.since = config["stage"], config["since"]
        self.curriculum.promotions = [Promotion(**p) for p in config["promotions"]]
        losses = zip(self.groups, config["losses"], config["known_losses"], strict=True)
        for group, loss, group.known in losses:
            group.loss = None if loss is None else torch.tensor(loss, device=self.compute)
        self.generator.set_state(checkpoint.tensors["generator"])
        self.rng.bit_generator.state = config["rng"]
        self.step, self.total = config["step"], config["total"]


def watched(spaces: Sequence[AnySpace], most: int) -> list[int]:
    """Places of up to `most` spaces, evenly over the sequence; of fewer where spaces are large,
    so that their exact distances do not take longer than the training between them."""
    leaves = sum(map(len, spaces)) / max(len(spaces), 1)
    n = min(most, len(spaces), max(1, int(WATCHED_LEAVES / max(leaves, 1))))
    return [(2 * i + 1) * len(spaces) // (2 * n) for i in range(n)]


def refuse_overlap(trained: Sequence[AnySpace], held_out: Sequence[AnySpace]) -> None:
    """ValueError when a held-out workload is also trained."""

    def key(space: AnySpace) -> tuple[object, ...]:
        problem = space.problem
        return problem.family, problem.axes, problem.dtype, space.device.name

    both = {key(s) for s in trained} & {key(s) for s in held_out}
    if both:
        raise ValueError(f"held-out workloads must not be trained: {sorted(map(str, both))}")


def network_config(spaces: Sequence[AnySpace], config: TrainConfig) -> NetworkConfig:
    """A family policy for each family of these workloads, whose features set its standardisation.

    What never varies gets no gain: on a device or dtype that was not trained, an untrained weight
    would turn it into noise.
    """
    policies = []
    for ids in _by_family(spaces):
        own = [spaces[i] for i in ids]
        values = workload_features(own)
        if config.knowing:
            values = torch.cat([values, hints(own, config.knowing).diagonal(dim1=1, dim2=2)], 1)
        center, spread = values.mean(0), values.std(0, correction=0)
        gain = torch.where(spread > 1e-6, 1 / spread.clamp(min=LEAST_SPREAD), 0.0)
        rows = tuple(center.tolist()), tuple(gain.tolist())
        shape, size = family_shape(own[0]), (config.hidden, config.layers)
        told = config.knowing, config.knowing and settings(config.knowing)
        policies.append(FamilyConfig(shape, *rows, *size, config.temperatures, *told))
    return NetworkConfig(tuple(policies))


def _by_family(spaces: Sequence[AnySpace]) -> list[list[int]]:
    names = list(dict.fromkeys(s.family.name for s in spaces))
    return [[i for i, s in enumerate(spaces) if s.family.name == name] for name in names]
