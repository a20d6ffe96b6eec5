"""Training: batches of walks, the trajectory-balance step, curriculum and measurement.

A `Trainer` advances one step at a time and its whole state can be written and read back: a resumed
run computes the same numbers as one that was never stopped. It prints nothing and draws nothing.
Everything that a step reads lies on one device, and nothing in it waits for a GPU: what the host
must know of it (losses by family) it asks for every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ptxflow.env.reward import ModelReward, Reward
from ptxflow.env.space import Space
from ptxflow.gfn.balance import KernelEnv, KernelTB
from ptxflow.gfn.checkpoint import Checkpoint, CheckpointError, require_space
from ptxflow.gfn.curriculum import Curriculum, Promotion
from ptxflow.gfn.muon import Muon
from ptxflow.gfn.network import FamilyConfig, LogZNetwork, NetworkConfig, PolicyNetwork
from ptxflow.gfn.targets import Targets
from ptxflow.gfn.walks import family_shape, workload_features

LEAST_SPREAD = 0.25  # of a feature that hardly varies in training
RECENT = 0.05  # weight of a step's loss in its family's recent loss
WATCHED_LEAVES = 400_000  # strategies of a family whose probabilities are worked out on the way
EVEN = 0.1  # of the steps, shared evenly among families
LOOK_EVERY = 10  # steps between the host's looks at the losses of families


@dataclass(frozen=True)
class TrainConfig:
    """What a run needs besides its workloads; travels in its checkpoints."""

    tau: float
    seed: int = 0
    batch: int = 1024
    learning_rate: float = 3e-3  # of what is no matrix
    matrix_rate: float = 2e-2  # of the matrices, whose updates are orthogonalised; 0: they stay
    log_z_rate: float = 1e-2
    workloads: int = 64  # of a batch, at most: few have many prefixes in common
    hidden: int = 256
    layers: int = 2
    clip: float = 1.0  # of the gradient's norm
    epsilon: float = 0.02  # falls linearly to zero
    target_share: float = 0.1  # of each batch, drawn from the targets themselves
    stages: int = 4
    stage_threshold: float = 0.12  # mean exact TV at which a stage is promoted
    stage_share: float = 0.06  # of the run, the most for a stage before the last
    warmup: int = 50  # steps
    flat: float = 0.3  # of the run, before the learning rate decays

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


RATES = {f.name: f.default for f in fields(TrainConfig) if f.name.endswith("_rate")}  # of learning


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


class Group(Targets):
    """The training workloads of one family: targets, environment, trajectory balance, and losses.

    A workload's target is worked out when it is first needed.
    """

    def __init__(self, spaces: list[Space], ids: list[int], trainer: Trainer) -> None:
        super().__init__(spaces, trainer.compute)
        self.ids = ids  # of the trainer's workloads, by workload id of the forest
        self.env = KernelEnv(self.forest, self.log_rewards)
        self.balance = KernelTB(trainer.network, trainer.log_z, self.env)
        self.loss: Tensor | None = None  # of its recent steps, where training runs
        self.known: float | None = None  # the same, when the host last looked


class Trainer:
    """Trains one policy on `spaces`, of one family or several; `total` steps are planned."""

    def __init__(
        self,
        spaces: Sequence[Space],
        config: TrainConfig,
        total: int,
        reward: Reward | None = None,
        held_out: Sequence[Space] = (),
        bar: Callable[[Sequence[int]], Iterable[int]] = iter,
        compute: torch.device | str = "cpu",
        start: PolicyNetwork | None = None,
    ) -> None:
        """`bar` is given the workloads whose targets are worked out next, and yields them;
        `compute` is where networks and tables lie; `start` is a trained network to begin with,
        whose other families stay as they are.
        """
        refuse_overlap(spaces, held_out)
        self.config = config
        self.total = total
        self.step = 0
        self.spaces = list(spaces)
        self.reward = reward or ModelReward()
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
            self.log_z = LogZNetwork(shape).to(self.compute)
        self.bar = bar
        self._judged: dict[int, Targets] = {}  # of held-out spaces, by id: a target keeps its space
        families = _by_family(spaces)
        self.groups = [Group([self.spaces[i] for i in ids], ids, self) for ids in families]
        self.curriculum = Curriculum(
            [s.problem for s in spaces], config.stages, config.stage_threshold, config.stage_share
        )
        self.optimisers = self._optimisers()
        for optimiser in self.optimisers.values():
            for part in optimiser.param_groups:
                part["full"] = part["lr"]  # what `rate` is a share of
        self._need(self.curriculum.active)

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
                {"params": list(self.log_z.parameters()), "lr": config.log_z_rate},
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
        group, workload = self._batch()
        if group.loss is None:
            self._level_log_z(group, workload)
        drawn = round(self.config.target_share * len(workload))
        leaf = functional.pad(
            group.draw(workload[:drawn], self.generator), (0, len(workload) - drawn), value=-1
        )
        walk = group.forest.walk(
            self.network, workload, leaf=leaf, epsilon=self.epsilon, generator=self.generator
        )
        trajectories = group.env.trajectories(walk, workload)
        loss = group.balance.loss(group.env, trajectories, recalculate_all_logprobs=False)
        self.update(loss)
        loss = loss.detach()
        before = loss if group.loss is None else group.loss
        group.loss = before + RECENT * (loss - before)
        self.step += 1
        if self.step % LOOK_EVERY == 0:
            self._look()
        reached = self.config.tau * group.log_rewards[walk.leaf[drawn:]].mean()
        figures = torch.stack([loss, reached, walk.entropy, walk.masked])
        return StepReport(group.forest.family, figures)

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
        parameters = [*self.network.parameters(), *self.log_z.parameters()]
        torch.nn.utils.clip_grad_norm_(parameters, self.config.clip)
        for optimiser in self.optimisers.values():
            optimiser.step()

    def _level_log_z(self, group: Group, workload: Tensor) -> None:
        """Start log Z where a family's first batch balances on average, not nats away from it."""
        with torch.no_grad():
            walk = group.forest.walk(self.network, workload, generator=self.generator)
            trajectories = group.env.trajectories(walk, workload)
            scores = group.balance.get_scores(trajectories, recalculate_all_logprobs=False)
            forest = group.forest
            own = self.log_z.of(forest.family)
            log_z = own(forest.features, forest.log_leaves)[workload]
            own.level.sub_((scores + log_z).mean())

    def _batch(self) -> tuple[Group, Tensor]:
        """A family, drawn by its share, and workload ids [batch] of its active ones in turn."""
        active = set(self.curriculum.active)
        held = [[w for w, i in enumerate(g.ids) if i in active] for g in self.groups]
        chosen = 0
        if len(held) > 1:
            chosen = int(self.rng.choice(len(held), p=self._shares([len(h) for h in held])))
        ids = torch.from_numpy(self.rng.permutation(held[chosen])[: self.config.workloads])
        ids = ids.to(self.compute, non_blocking=True)
        turns = ids.repeat(-(-self.config.batch // len(ids)))[: self.config.batch]
        return self.groups[chosen], turns

    def _shares(self, workloads: Sequence[int]) -> NDArray[np.float64]:
        """Of the steps, by family: by how many workloads it has, and by how far off it still is.

        The loss is a mean square, so that its root goes with the distance.
        """
        known = [g.known for g in self.groups if g.known is not None]
        losses = [max(known, default=1.0) if g.known is None else g.known for g in self.groups]
        weights = np.sqrt(np.array(workloads) * np.array(losses))
        return EVEN / len(weights) + (1 - EVEN) * weights / weights.sum()

    def _need(self, workloads: Iterable[int]) -> None:
        """Work out the targets of workloads that have none yet."""
        places = {i: self._place(i) for i in workloads}
        missing = [i for i, (group, w) in places.items() if w not in group.log_z]
        for i in self.bar(missing) if missing else ():
            group, w = places[i]
            group.set(w, self.reward, self.config.tau)

    def propose(
        self, workload: int, count: int, known: NDArray[np.int64] | None = None
    ) -> NDArray[np.int64]:
        """Codes of distinct strategies of a workload, none of `known`, drawn one after the other
        with the policy's probabilities."""
        group, number = self._place(workload)
        codes = self.spaces[workload].codes
        scores = group.forest.leaf_log_probs(self.network, number).double().cpu().numpy()
        keys = scores + self.rng.gumbel(size=len(scores))
        if known is not None:
            codes, keys = (a[~np.isin(self.spaces[workload].codes, known)] for a in (codes, keys))
        return codes[np.argsort(-keys)[:count]]

    def reward_anew(self, reward: Reward, workloads: Sequence[int]) -> None:
        """Train on another reward from here on; its targets differ for these workloads only."""
        self.reward = reward
        for workload in workloads:
            group, number = self._place(workload)
            group.set(number, reward, self.config.tau)

    def _place(self, workload: int) -> tuple[Group, int]:
        """The group that holds a workload, and its number in there."""
        group = next(g for g in self.groups if workload in g.ids)
        return group, group.ids.index(workload)

    def distances(self, workloads: Sequence[int]) -> list[float]:
        """Exact total variation distance to the target, of workload ids."""
        self._need(workloads)
        places = map(self._place, workloads)
        return [d for group, w in places for d in group.distances(self.network, [w])]

    def held_out_distances(self, spaces: Sequence[Space]) -> Iterator[float]:
        """The same of spaces that are not trained, one after the other."""
        for space in spaces:
            if id(space) not in self._judged:
                judged = Targets([space], self.compute)
                judged.set(0, self.reward, self.config.tau)
                self._judged[id(space)] = judged
            yield from self._judged[id(space)].distances(self.network, [0])

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
        promotion = self.curriculum.measured(distance, self.step, self.progress)
        if promotion:
            self._need(self.curriculum.active)
        return promotion

    def policy_checkpoint(self, about: Mapping[str, Any]) -> Checkpoint:
        """What sampling needs and no more; `about` is JSON data kept in the header."""
        tensors = {f"policy.{k}": v for k, v in self.network.state_dict().items()}
        return Checkpoint(self.network.config, dict(about), tensors)

    def state(self, about: Mapping[str, Any]) -> Checkpoint:
        """Everything a later `restore` needs to continue exactly."""
        tensors = self.policy_checkpoint({}).tensors
        tensors |= {f"log_z.{k}": v for k, v in self.log_z.state_dict().items()}
        for name, optimiser in self.optimisers.items():
            for i, slots in optimiser.state_dict()["state"].items():
                tensors |= {f"{name}.{i}.{key}": value for key, value in slots.items()}
        tensors["generator"] = self.generator.get_state()
        curriculum = self.curriculum
        progress = {
            "train": self.config.to_json(),
            "leaves": [len(s) for s in self.spaces],
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

    def restore(self, checkpoint: Checkpoint, where: object = "checkpoint") -> None:
        """Take over a state; CheckpointError where it is of another run or decision space."""
        for group in self.groups:
            require_space(where, checkpoint.network, family_shape(group.forest.spaces.spaces[0]))
        config = checkpoint.config
        if config.get("leaves") != [len(s) for s in self.spaces] or "generator" not in (
            checkpoint.tensors
        ):
            raise CheckpointError(
                f"{where}: not a state to resume: it is a policy alone, or of other workloads or "
                f"rules"
            )
        self.network.load_state_dict(checkpoint.group("policy"))
        self.log_z.load_state_dict(checkpoint.group("log_z"))
        for name, optimiser in self.optimisers.items():
            slots: dict[int, dict[str, Tensor]] = {}
            for place, value in checkpoint.group(name).items():
                number, key = place.split(".")
                slots.setdefault(int(number), {})[key] = value
            optimiser.load_state_dict({**optimiser.state_dict(), "state": slots})
        self.curriculum.stage, self.curriculum.since = config["stage"], config["since"]
        self.curriculum.promotions = [Promotion(**p) for p in config["promotions"]]
        self._need(self.curriculum.active)
        losses = zip(self.groups, config["losses"], config["known_losses"], strict=True)
        for group, loss, group.known in losses:
            group.loss = None if loss is None else torch.tensor(loss, device=self.compute)
        self.generator.set_state(checkpoint.tensors["generator"])
        self.rng.bit_generator.state = config["rng"]
        self.step, self.total = config["step"], config["total"]


def watched(spaces: Sequence[Space], most: int) -> list[int]:
    """Places of up to `most` spaces, evenly over the sequence; of fewer where spaces are large,
    so that their exact distances do not take longer than the training between them."""
    leaves = sum(map(len, spaces)) / max(len(spaces), 1)
    n = min(most, len(spaces), max(1, int(WATCHED_LEAVES / max(leaves, 1))))
    return [(2 * i + 1) * len(spaces) // (2 * n) for i in range(n)]


def refuse_overlap(trained: Sequence[Space], held_out: Sequence[Space]) -> None:
    """ValueError when a held-out workload is also trained."""

    def key(space: Space) -> tuple[object, ...]:
        problem = space.problem
        return problem.family, problem.axes, problem.dtype, space.device.name

    both = {key(s) for s in trained} & {key(s) for s in held_out}
    if both:
        raise ValueError(f"held-out workloads must not be trained: {sorted(map(str, both))}")


def network_config(spaces: Sequence[Space], config: TrainConfig) -> NetworkConfig:
    """A family policy for each family of these workloads, whose features set its standardisation.

    What never varies gets no gain: on a device or dtype that was not trained, an untrained weight
    would turn it into noise.
    """
    policies = []
    for ids in _by_family(spaces):
        own = [spaces[i] for i in ids]
        values = workload_features(own)
        center, spread = values.mean(0), values.std(0, correction=0)
        gain = torch.where(spread > 1e-6, 1 / spread.clamp(min=LEAST_SPREAD), 0.0)
        rows = tuple(center.tolist()), tuple(gain.tolist())
        policies.append(FamilyConfig(family_shape(own[0]), *rows, config.hidden, config.layers))
    return NetworkConfig(tuple(policies))


def _by_family(spaces: Sequence[Space]) -> list[list[int]]:
    names = list(dict.fromkeys(s.family.name for s in spaces))
    return [[i for i, s in enumerate(spaces) if s.family.name == name] for name in names]
