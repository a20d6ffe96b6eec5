"""Trajectory balance on torchgfn: the environment, the policy estimator and a fast TB layer.

Decisions come in a fixed order, so the state graph is a forest and P_B is 1. Stock torchgfn code
(`Sampler`, `TBGFlowNet`) works on `KernelEnv` and `KernelPolicy`; `KernelTB` gives the same losses
and gradients while walking whole batches level by level (`Forest.walk`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from gfn.actions import Actions
from gfn.containers import Trajectories
from gfn.env import DiscreteEnv
from gfn.estimators import ConditionalLogZEstimator, DiscretePolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.states import DiscreteStates
from torch import Tensor, nn
from torch.nn import functional

from ptxflow.gfn.network import LogZ, LogZNetwork, PolicyNetwork
from ptxflow.gfn.walks import Forest, Walk


class KernelEnv(DiscreteEnv):
    """Builds a strategy decision by decision.

    State: int64 [F] choice indices, -1 where undecided. Action c < max(sizes): choice c of the next
    decision; the last action is exit, legal in complete states alone. Condition: [1], the workload.
    """

    is_conditional = True

    def __init__(self, forest: Forest, log_rewards: Tensor, debug: bool = False) -> None:
        self.forest = forest
        self.log_rewards = log_rewards  # float32 [leaves], where the forest is
        super().__init__(
            n_actions=max(forest.sizes) + 1,
            s0=torch.full((forest.depth,), -1, dtype=torch.int64, device=forest.device),
            state_shape=(forest.depth,),
            debug=debug,
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
        x = states.tensor.reshape(-1, self.forest.depth)
        node = workloads(states.conditions).reshape(-1)
        depth = (x >= 0).sum(1)
        mask = torch.zeros(len(x), self.n_actions, dtype=torch.bool, device=x.device)
        for t, size in enumerate(self.forest.sizes):
            here = depth == t
            mask[here, :size] = self.forest.child[t][node[here]] >= 0
            going = depth > t
            node[going] = self.forest.child[t][node[going], x[going, t]].long()
        mask[depth == self.forest.depth, -1] = True
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
        return self.log_rewards[self.legal(states)[1]]

    def sample_conditions(self, batch_shape: int | tuple[int, ...]) -> Tensor:
        """Workloads drawn uniformly, [*batch_shape, 1]."""
        shape = (batch_shape,) if isinstance(batch_shape, int) else tuple(batch_shape)
        drawn = torch.randint(len(self.forest), (*shape, 1), device=self.forest.device)
        return drawn.to(torch.get_default_dtype())

    def trajectories(self, walk: Walk, workload: Tensor) -> Trajectories:
        """torchgfn's container of the one path that leads to each leaf of a walk."""
        n, depth = walk.choices.shape
        place = torch.arange(depth + 1, device=workload.device)
        undecided = place[:-1] >= place[:, None]
        states = walk.choices.expand(depth + 1, n, depth).masked_fill(undecided[:, None], -1)
        states = torch.cat([states, self.sf.expand(1, n, depth)])
        exits = workload.new_full((1, n), self.n_actions - 1)
        conditions = workload.to(torch.get_default_dtype())[:, None]
        return Trajectories(
            env=self,
            states=self.states_from_tensor(states, conditions.expand(depth + 2, n, 1)),
            actions=self.actions_from_tensor(torch.cat([walk.choices.T, exits])[..., None]),
            terminating_idx=workload.new_full((n,), depth + 1),
            log_rewards=self.log_rewards[walk.leaf],
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
        states, forest = input, self.env.forest
        which = workloads(states.conditions if conditions is None else conditions)
        encoded, policy = forest.conditions(self.network), self.network.of(forest.family)
        depth = (states.tensor >= 0).sum(-1)
        out = encoded.new_zeros(len(depth), self.n_actions)
        for t, size in enumerate(forest.sizes):
            rows = torch.nonzero(depth == t).squeeze(1)
            if len(rows):
                state = encoded[which[rows]]
                state = state + policy.decided(t, states.tensor[rows])
                out[rows, :size] = policy.logits(t, state)
        return out


class WorkloadLogZ(nn.Module):
    """log Z by workload id, [N, 1] -> [N, 1]."""

    input_dim = 1

    def __init__(self, network: LogZ, forest: Forest) -> None:
        super().__init__()
        self.network = network
        self.forest = forest

    def forward(self, conditions: Tensor) -> Tensor:
        table: Tensor = self.network(self.forest.features, self.forest.log_leaves)
        return table.index_select(0, workloads(conditions)).unsqueeze(-1)


class KernelTB(TBGFlowNet):
    """Trajectory balance with log Z(w); sampling and scoring replaced by forest walks."""

    def __init__(
        self, policy: PolicyNetwork, log_z: LogZNetwork, env: KernelEnv, **options: Any
    ) -> None:
        own = log_z.of(env.forest.family)
        super().__init__(
            pf=KernelPolicy(policy, env),
            pb=None,
            constant_pb=True,
            logZ=ConditionalLogZEstimator(WorkloadLogZ(own, env.forest)),
            **options,
        )
        self.env = env

    @property
    def policy(self) -> PolicyNetwork:
        return cast(PolicyNetwork, self.pf.network)

    def sample_trajectories(
        self,
        env: Any,
        n: int,
        conditions: Tensor | None = None,
        save_logprobs: bool = True,
        save_estimator_outputs: bool = False,
        **walk_options: Any,
    ) -> Trajectories:
        """`conditions` [n, 1] are workload ids; `walk_options` go to `Forest.walk`.

        The log-probabilities kept are the policy's own, with gradient, whatever epsilon is.
        """
        workload = workloads(env.sample_conditions(n) if conditions is None else conditions)
        walk = env.forest.walk(self.policy, workload, **walk_options)
        return cast(Trajectories, env.trajectories(walk, workload))

    def get_pfs_and_pbs(
        self, trajectories: Trajectories, recalculate_all_logprobs: bool = True
    ) -> tuple[Tensor, Tensor]:
        """log P_F [F + 1, N], kept or recomputed by walking the same leaves, and log P_B = 0."""
        log_pf = trajectories.log_probs
        if recalculate_all_logprobs or log_pf is None:
            states = trajectories.terminating_states
            forest: Forest = self.env.forest
            walk = forest.walk(self.policy, workloads(states.conditions), given=states.tensor)
            log_pf = functional.pad(walk.log_probs, (0, 0, 0, 1))
        return log_pf, torch.zeros_like(log_pf)


def workloads(conditions: Tensor | None) -> Tensor:
    """Workload ids [...] of conditions [..., 1]; float32 is exact for them."""
    if conditions is None:
        raise ValueError("states of a KernelEnv carry their workload id as condition; none is set")
    return conditions.squeeze(-1).long()
