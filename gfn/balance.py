"""The objectives on torchgfn: the environment, the policy estimator, and walks for its losses.

Decisions come in a fixed order, so the state graph is a tree and P_B is 1. Stock torchgfn code
(`Sampler`, `TBGFlowNet` and the others) works on `KernelEnv`, `KernelPolicy` and `KernelFlow`; what
is derived from it here gives the same losses and gradients while walking whole batches level by
level (`Walks.walk`).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from gfn.actions import Actions
from gfn.containers import Trajectories
from gfn.env import DiscreteEnv
from gfn.estimators import (
    ConditionalLogZEstimator,
    ConditionalScalarEstimator,
    DiscretePolicyEstimator,
)
from gfn.gflownet import LogPartitionVarianceGFlowNet, SubTBGFlowNet, TBGFlowNet
from gfn.gflownet.base import TrajectoryBasedGFlowNet
from gfn.states import DiscreteStates
from torch import Tensor, nn
from torch.nn import functional

from ptxflow.env.reward import TAU
from ptxflow.gfn.network import LogF, LogZ, PolicyNetwork
from ptxflow.gfn.walks import Walk, Walks


class KernelEnv(DiscreteEnv):
    """Builds a strategy decision by decision.

    State: int64 [F] choice indices, -1 where undecided. Action c < max(sizes): choice c of the next
    decision; the last action is exit, legal in complete states alone. Condition: [2], the workload
    and the temperature. `worth` says the TFLOP/s over the attainable [n] of workloads [n] and
    choices [n, F].
    """

    is_conditional = True

    def __init__(self, walks: Walks, worth: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.walks = walks
        self.worth = worth
        super().__init__(
            n_actions=max(walks.sizes) + 1,
            s0=torch.full((walks.depth,), -1, dtype=torch.int64, device=walks.device),
            state_shape=(walks.depth,),
        )

    def make_states_class(self) -> type[DiscreteStates]:
        env = self

        class KernelStates(DiscreteStates):
            state_shape = env.state_shape
            s0 = env.s0
            sf = env.sf
            n_actions = env.n_actions

            def _compute_forward_masks(self) -> Tensor:
                return env.legal(self)[0]

            def _compute_backward_masks(self) -> Tensor:
                """Only the choice that was taken last can be undone."""
                depth = (self.tensor >= 0).sum(-1, keepdim=True)
                last = self.tensor.gather(-1, (depth - 1).clamp(min=0))
                slots = torch.arange(env.n_actions - 1, device=self.tensor.device)
                return (slots == last) & (depth > 0)

        return KernelStates

    def legal(self, states: DiscreteStates) -> tuple[Tensor, Tensor]:
        """Legal actions [..., n_actions] and node ids [...] of states."""
        x = states.tensor.reshape(-1, self.walks.depth)
        node = asked(states.conditions)[0].reshape(-1)
        depth = (x >= 0).sum(1)
        mask = torch.zeros(len(x), self.n_actions, dtype=torch.bool, device=x.device)
        for t, size in enumerate(self.walks.sizes):
            here = depth == t
            mask[here, :size] = self.walks.child[t][node[here]] >= 0
            going = depth > t
            node[going] = self.walks.child[t][node[going], x[going, t]].long()
        mask[depth == self.walks.depth, -1] = True
        batch = states.batch_shape
        return mask.reshape(*batch, -1), node.reshape(batch)

    def step(self, states: Any, actions: Actions) -> DiscreteStates:
        depth = (states.tensor >= 0).sum(-1, keepdim=True)
        return self._with(states, states.tensor.scatter(-1, depth, actions.tensor))

    def backward_step(self, states: Any, actions: Actions) -> DiscreteStates:
        depth = (states.tensor >= 0).sum(-1, keepdim=True)
        return self._with(states, states.tensor.scatter(-1, depth - 1, -1))

    def _with(self, states: DiscreteStates, tensor: Tensor) -> DiscreteStates:
        return self.states_from_tensor(tensor, conditions=states.conditions)

    def log_reward(self, states: Any) -> Tensor:
        workload, tau = asked(states.conditions)
        return self.worth(workload, states.tensor) / tau

    def sample_conditions(self, batch_shape: int | tuple[int, ...]) -> Tensor:
        """Workloads drawn uniformly, at TAU: [*batch_shape, 2]."""
        shape = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
        drawn = torch.randint(len(self.walks), shape, device=self.walks.device)
        return torch.stack([drawn.float(), torch.full(shape, TAU, device=drawn.device)], -1)

    def trajectories(
        self, walk: Walk, workload: Tensor, tau: Tensor, log_rewards: Tensor
    ) -> Trajectories:
        """torchgfn's container of the one path that leads to each of N strategies."""
        n, depth = walk.choices.shape
        place = torch.arange(depth + 1, device=workload.device)
        undecided = place[:-1] >= place[:, None]
        states = walk.choices.expand(depth + 1, n, depth).masked_fill(undecided[:, None], -1)
        states = torch.cat([states, self.sf.expand(1, n, depth)])
        exits = workload.new_full((1, n), self.n_actions - 1)
        conditions = torch.stack([workload.to(tau), tau], 1)
        return Trajectories(
            env=self,
            states=self.states_from_tensor(states, conditions.expand(depth + 2, n, 2)),
            actions=self.actions_from_tensor(torch.cat([walk.choices.T, exits])[..., None]),
            terminating_idx=workload.new_full((n,), depth + 1),
            log_rewards=log_rewards,
            log_probs=functional.pad(walk.log_probs, (0, 0, 0, 1)),
        )


class KernelPolicy(DiscretePolicyEstimator):
    """The policy network as a torchgfn estimator over the actions of a `KernelEnv`."""

    def __init__(self, network: PolicyNetwork, env: KernelEnv) -> None:
        super().__init__(module=network, n_actions=env.n_actions, debug=env.debug)
        self.network = network
        self.env = env

    def forward(self, input: Any, conditions: Tensor | None = None) -> Tensor:
        """[N] states at any mixture of depths -> [N, n_actions]."""
        states, walks = input, self.env.walks
        workload, tau = asked(states.conditions if conditions is None else conditions)
        encoded = walks.conditions(self.network, workload, tau)
        depth, node = (states.tensor >= 0).sum(-1), self.env.legal(states)[1]
        out = encoded.encoded.new_zeros(len(depth), self.n_actions)
        for t, size in enumerate(walks.sizes):
            rows = torch.nonzero(depth == t).squeeze(1)
            if len(rows):
                prefix = states.tensor[rows]
                logits = walks.logits(self.network, t, node[rows], prefix, encoded, rows)
                out[rows, :size] = logits.masked_fill(logits.isneginf(), 0.0)
        return out


class WorkloadLogZ(nn.Module):
    """log Z by workload id and temperature, [N, 2] -> [N, 1]."""

    input_dim = 2

    def __init__(self, network: LogZ, env: KernelEnv) -> None:
        super().__init__()
        self.network = network
        self.env = env

    def forward(self, conditions: Tensor) -> Tensor:
        workload, tau = asked(conditions)
        walks = self.env.walks
        features = walks.seen(self.network.config)[workload]
        log_z: Tensor = self.network(features, walks.log_leaves[workload], tau)
        return log_z.unsqueeze(-1)


class Walked(TrajectoryBasedGFlowNet):
    """What the objectives have in common: trajectories are walked level by level, P_B is 1."""

    env: KernelEnv

    def get_pfs_and_pbs(
        self, trajectories: Trajectories, recalculate_all_logprobs: bool = True
    ) -> tuple[Tensor, Tensor]:
        """log P_F [F + 1, N], kept or recomputed by walking the same leaves, and log P_B = 0."""
        log_pf = trajectories.log_probs
        if recalculate_all_logprobs or log_pf is None:
            states = trajectories.terminating_states
            workload, tau = asked(states.conditions)
            network = cast(KernelPolicy, self.pf).network
            walk = self.env.walks.walk(network, workload, tau, given=states.tensor)
            log_pf = functional.pad(walk.log_probs, (0, 0, 0, 1))
        return log_pf, torch.zeros_like(log_pf)


class KernelTB(Walked, TBGFlowNet):
    """Trajectory balance with log Z(w, tau)."""


class KernelVariance(Walked, LogPartitionVarianceGFlowNet):
    """Log-partition variance, within each `each` walks of one workload at one temperature."""

    each = 1

    def get_scores(self, *args: Any, **options: Any) -> Tensor:
        scores = super().get_scores(*args, **options).unflatten(0, (-1, self.each))
        return (scores - scores.mean(1, keepdim=True)).flatten()


class KernelSubTB(Walked, SubTBGFlowNet):
    """Sub-trajectory balance; detailed balance where its weighting is DB."""

    def calculate_log_state_flows(
        self, env: Any, trajectories: Trajectories, log_pf_trajectories: Tensor
    ) -> Tensor:
        """[F + 1, N]; of what is complete its log reward."""
        walks, last = self.env.walks, trajectories.terminating_states.tensor
        workload, tau = asked(trajectories.terminating_states.conditions)
        flow = cast(KernelFlow, self.logF).network
        conditions = flow.net.conditions(walks.seen(flow.net.config)[workload], tau)
        flows, node = [], workload
        for depth in range(walks.depth):
            state = conditions.encoded + flow.net.decided(depth, last)
            counts = walks.log_counts[depth][node].logsumexp(1)
            flows.append(flow(depth, state, conditions.scale, counts))
            node = walks.child[depth][node, last[:, depth]].long()
        rewards = trajectories.log_rewards
        assert rewards is not None
        return torch.stack([*flows, rewards])


class KernelFlow(ConditionalScalarEstimator):
    """log F of states at any mixture of depths, for stock torchgfn; of complete ones log R."""

    def __init__(self, network: LogF, env: KernelEnv) -> None:
        nn.Module.__init__(self)
        self.network, self.env = network, env

    def forward(self, input: Any, conditions: Tensor | None = None) -> Tensor:
        """[N] states -> [N, 1]"""
        walks = self.env.walks
        workload, tau = asked(input.conditions if conditions is None else conditions)
        encoded = self.network.net.conditions(walks.seen(self.network.net.config)[workload], tau)
        depth, node = (input.tensor >= 0).sum(-1), self.env.legal(input)[1]
        out = self.env.log_reward(input)
        for t in range(walks.depth):
            rows = torch.nonzero(depth == t).squeeze(1)
            if len(rows):
                state = encoded.encoded[rows] + self.network.net.decided(t, input.tensor[rows])
                counts = walks.log_counts[t][node[rows]].logsumexp(1)
                out[rows] = self.network(t, state, encoded.scale[rows], counts)
        return out[:, None]


OBJECTIVES = ("tb", "variance", "subtb", "db")


def objective(
    kind: str, policy: PolicyNetwork, log_z: LogZ, log_f: LogF | None, env: KernelEnv
) -> Walked:
    """The objective of this name; `log_f` is of subtb and db."""
    pf: dict[str, Any] = {"pf": KernelPolicy(policy, env), "pb": None, "constant_pb": True}
    made: Walked
    if kind == "tb":
        made = KernelTB(**pf, logZ=ConditionalLogZEstimator(WorkloadLogZ(log_z, env)))
    elif kind == "variance":
        made = KernelVariance(**pf)
    else:
        assert log_f is not None
        weighting: Any = "DB" if kind == "db" else "geometric_within"
        made = KernelSubTB(**pf, logF=KernelFlow(log_f, env), weighting=weighting)
    made.env = env
    return made


def asked(conditions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Workload ids [...], for which float32 is exact, and temperatures of conditions [..., 2]."""
    if conditions is None:
        raise ValueError("states of a KernelEnv carry workload and temperature; none is set")
    workload, tau = conditions.unbind(-1)
    return workload.long(), tau
