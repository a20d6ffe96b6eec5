"""The training workloads of one family: where a step gets the strategies that it learns from.

The policy's walks, local search, and what was met before. Nothing is listed: spaces are diagrams,
and a reward is asked of what was drawn.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ptxflow.env.relation import RelationSpace
from ptxflow.env.reward import Reward, log_reward
from ptxflow.env.space import Space
from ptxflow.gfn.balance import KernelEnv, objective
from ptxflow.gfn.network import ByFamily, PolicyNetwork
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.replay import Replay, destroyed
from ptxflow.gfn.walks import Diagrams

AnySpace = Space | RelationSpace


class Host(Protocol):
    """What a group asks of the training that it belongs to."""

    config: TrainConfig
    spaces: list[AnySpace]
    network: PolicyNetwork
    log_z: ByFamily
    log_f: ByFamily | None
    reward: Reward
    compute: torch.device
    generator: torch.Generator

    @property
    def epsilon(self) -> float: ...


class Group:
    """Workloads of one family with their diagrams, what was met of them, objective and losses."""

    def __init__(self, spaces: Sequence[AnySpace], ids: list[int], trainer: Host) -> None:
        self.spaces = [RelationSpace.of(s) if isinstance(s, Space) else s for s in spaces]
        self.ids = ids  # of the trainer's workloads, by workload id of the walks
        self.trainer, config = trainer, trainer.config
        self.walks = Diagrams(self.spaces, trainer.compute, near=False)
        self.replay = Replay(len(spaces), self.walks.depth, config.room, trainer.compute)
        self.env = KernelEnv(self.walks, self.worth)
        name, log_f = self.walks.family, trainer.log_f
        self.objective = objective(
            config.objective, trainer.network, trainer.log_z.of(name),
            log_f.of(name) if log_f else None, self.env,
        )  # fmt: skip
        self.steps = self.renewed = 0  # of its own, and workloads that were drawn anew
        self.loss: Tensor | None = None  # of its recent steps, where training runs
        self.known: float | None = None  # the same, when the host last looked

    def renew(self, places: Sequence[int], spaces: Sequence[RelationSpace]) -> None:
        """Other workloads in the places of some; what was met of those is forgotten."""
        for place, space in zip(places, spaces, strict=True):
            self.spaces[place] = space
            self.replay.forget(place)
        self.walks = self.env.walks = Diagrams(self.spaces, self.walks.device, near=False)

    def worth(self, workload: Tensor, choices: Tensor) -> Tensor:
        """float32 [n] the TFLOP/s over the attainable, of workloads [n] and choices [n, F]."""
        which, rows = workload.cpu().numpy(), choices.cpu().numpy()
        out = np.empty(len(which), np.float32)
        for w in np.unique(which).tolist():
            mine, space = np.flatnonzero(which == w), self.spaces[w]
            codes, back = np.unique(rows[mine] @ space.strides[1:], return_inverse=True)
            tflops = self.trainer.reward.tflops(space, codes)
            out[mine] = log_reward(tflops, space.problem, space.device, tau=1.0)[back]
        return torch.from_numpy(out).to(self.walks.device)

    @torch.no_grad()
    def meet(self, workload: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Strategies of workloads [S] at temperatures [S, T] to learn from, of which what is new
        was rewarded: choices [S T, each, F] and their worth [S T, each].

        The policy draws some as at a higher temperature; some are rebuilt from what was met, and
        kept as by Metropolis; some are replayed. What is rewarded is remembered.
        """
        network, config = self.trainer.network, self.trainer.config
        walks, generator = self.walks, self.trainer.generator
        drawn, rebuilt, replayed = config.rows
        (s, t), depth = tau.shape, walks.depth
        behave = tau
        if config.temperatures:
            u = torch.rand(s, t, generator=generator, device=tau.device)
            behave = (tau * 4**u).clamp(max=config.temperatures[1])
        slots, each = (workload.repeat_interleave(t), behave.flatten()), drawn + rebuilt
        options: dict[str, Any] = {"epsilon": self.trainer.epsilon, "generator": generator}
        before, had = self.replay.draw(workload, behave, rebuilt, generator)
        free = before.new_full((s, t, drawn, depth), -1)
        wanted = torch.cat([free, destroyed(before, generator)], 2).reshape(-1, depth)
        met = walks.walk(network, *slots, each=each, wanted=wanted, **options).choices
        worth = self.worth(workload.repeat_interleave(t * each), met).unflatten(0, (s, t, each))
        met = met.unflatten(0, (s, t, each))
        self.replay.add(workload, met.flatten(1, 2), worth.flatten(1))
        (mine, again), (first, now) = (x.split((drawn, rebuilt), 2) for x in (met, worth))
        chance = torch.rand(now.shape, generator=generator, device=now.device)
        better = now - had > tau[..., None] * chance.log()
        again, now = torch.where(better[..., None], again, before), torch.where(better, now, had)
        old, known = self.replay.draw(workload, tau, replayed, generator)
        choices, values = torch.cat([mine, again, old], 2), torch.cat([first, now, known], 2)
        return choices.flatten(0, 1), values.flatten(0, 1)
