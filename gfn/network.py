"""The policy network: a family policy for each kernel family. PyTorch only, without torchgfn.

A state is what was decided so far, where in the construction it stands, and the workload. Each
decided choice and each position owns a learned vector; the workload's features pass through an
encoder. Their sum goes through a residual trunk, and the rows of the output table that belong to
the next decision give its logits. Families share no parameter: their decisions, features and
rewards have nothing in common but names, and a shared trunk let each one's steps disturb the others
(gfn/README.md has the figures). So one can be trained alone, and joins others as it is.
"""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ptxflow.env.reward import TAU
from ptxflow.gfn.known import Below, Known, Near


@dataclass(frozen=True)
class FamilyShape:
    """What a family policy was made for; a checkpoint of another shape is refused."""

    name: str
    sizes: tuple[int, ...]  # choices per decision
    digest: str  # of the decision space
    features: tuple[str, ...]  # problem features, then device features, in order


@dataclass(frozen=True)
class FamilyConfig:
    """What fixes the shapes and the meaning of a family policy's parameters."""

    shape: FamilyShape
    center: tuple[float, ...]  # subtracted from the features
    gain: tuple[float, ...]  # then multiplied; 0 mutes what never varied in training
    hidden: int = 256
    layers: int = 2
    temperatures: tuple[float, float] | None = None  # least and most tau; None: of one, not told
    knowing: str = ""  # who says what some strategies are worth, see `hints`; or nobody
    asked: str = ""  # how, by `hints.settings`

    @property
    def inputs(self) -> int:
        """How many numbers the encoder reads: the features, and the temperature if it varies."""
        return len(self.center) + (self.temperatures is not None)

    @property
    def middle(self) -> float:
        """The temperature at which logits are what the head says."""
        least, most = self.temperatures or (TAU, TAU)
        return math.sqrt(least * most)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "FamilyConfig":
        """KeyError or TypeError where the data is of another format."""
        shape = dict(data["shape"])
        shape |= {name: tuple(shape[name]) for name in ("sizes", "features")}
        rows = {name: tuple(data[name]) for name in ("center", "gain")}
        told, by = data.get("temperatures"), data.get("knowing") or ""
        asked = data["asked"] if by else ""  # those without were told less than they would be now
        return FamilyConfig(
            FamilyShape(**shape), rows["center"], rows["gain"], data["hidden"], data["layers"],
            tuple(told) if told else None, by, asked,
        )  # fmt: skip


@dataclass(frozen=True)
class NetworkConfig:
    """The family policies; travels in every checkpoint, where they are called towers."""

    policies: tuple[FamilyConfig, ...]

    def to_json(self) -> dict[str, Any]:
        return {"towers": [asdict(policy) for policy in self.policies]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "NetworkConfig":
        return NetworkConfig(tuple(map(FamilyConfig.from_json, data["towers"])))

    @property
    def families(self) -> tuple[FamilyShape, ...]:
        """What each family policy was made for."""
        return tuple(policy.shape for policy in self.policies)


@dataclass(frozen=True)
class Conditions:
    """Workloads, each at a temperature, as the steps of a walk need them.

    encoded  float [S, hidden]
    scale    float [S]  of the logits: the middle temperature over this one
    hints    float [S, choices, choices]  or None; `hints.hints`
    known    of these S, or None
    near     of these S, or None
    """

    encoded: Tensor
    scale: Tensor
    hints: Tensor | None = None
    known: Known | None = None
    near: Near | None = None


class Standardise(nn.Module):
    """[W, features] -> [W, features]"""

    center: Tensor
    gain: Tensor

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        for name in ("center", "gain"):
            row = torch.tensor(getattr(config, name), dtype=torch.float32)
            self.register_buffer(name, row, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return (features - self.center) * self.gain


TRUST = 0.5  # in hints, before training: the best with a choice is not all that it leads to
BEHIND = 0.05  # of the attainable, that others are behind these, before training
DOUBT = 8.0  # strategies drawn that outweigh what is said of the rest, before training
LEVEL = 0.1  # the same of how high all of them are
NONE, MOST = 1e-100, 200.0  # weights are at least this, and their logarithms at most


class FamilyPolicy(nn.Module):
    """Logits of the next choice for batches of prefixes of one family at one depth."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.config = config
        hidden, sizes = config.hidden, config.shape.sizes
        slots = sum(sizes)
        # vectors: one a choice slot (what was decided), then one a position
        self.tokens = nn.Parameter(torch.randn(slots + len(sizes), hidden) * 0.3)
        self.standardise = Standardise(config)
        self.encoder = nn.Sequential(
            nn.Linear(config.inputs, hidden // 2), nn.SiLU(), nn.Linear(hidden // 2, hidden)
        )
        self.trunk = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(config.layers))
        # zero rows: an untrained policy is uniform over legal choices
        self.head = nn.Parameter(torch.zeros(slots, hidden))
        self.head_bias = nn.Parameter(torch.zeros(slots))
        if config.knowing:  # by decision, how much what hints say counts
            self.trust = nn.Parameter(torch.zeros(len(sizes), hidden))
            self.trust_bias = nn.Parameter(torch.full((len(sizes),), TRUST))
            self.doubt = nn.Parameter(torch.full((len(sizes),), math.log(DOUBT)))
            nn.init.constant_(self.head_bias, -BEHIND / config.middle)
        self.edges = list(accumulate(sizes, initial=0))  # of decisions, in the slots
        # where the parameters are, for `decided`
        self.register_buffer("starts", torch.tensor(self.edges), persistent=False)

    def matrices(self) -> list[Tensor]:
        """The weights between layers, which mix everything; the rest are rows of tables."""
        layers = [*self.encoder, *self.trunk]
        return [layer.weight for layer in layers if isinstance(layer, nn.Linear)]

    def conditions(self, features: Tensor, tau: Tensor, hints: Tensor | None = None) -> Conditions:
        """[S, features] and temperatures [S]: the workload's part of the state, computed once."""
        inputs = self.standardise(features)
        if self.config.temperatures:
            inputs = torch.cat([inputs, _octaves(tau)], 1)
        return Conditions(self.encoder(inputs), self.config.middle / tau, hints)

    def decided(self, depth: int, choices: Tensor) -> Tensor:
        """[n, >= depth] choice indices -> [n, hidden]: the sum of what was decided.

        A product with a row of ones and zeros: its gradient is a product, too, where that of
        looked-up rows would be a sum into few places.
        """
        width = self.edges[depth]
        rows = choices[:, :depth] + self.get_buffer("starts")[:depth]
        ones = self.tokens.new_zeros(len(choices), width).scatter_(1, rows, 1.0)
        return ones @ self.tokens[:width]

    def hinted(self, depth: int, said: Conditions, which: Tensor, choices: Tensor) -> Tensor | None:
        """[n, sizes[depth]] what hints say of the next choices after choice indices [n, >= depth],
        of conditions [n]: the least of what each is worth alone and beside one that was decided."""
        if said.hints is None:
            return None
        own = said.hints[:, :, slice(*self.edges[depth : depth + 2])]
        starts = self.get_buffer("starts")
        alone = torch.arange(self.edges[depth], self.edges[depth + 1], device=own.device)
        worth = own[:, alone].diagonal(dim1=1, dim2=2)[which]
        if depth:
            decided = choices[:, :depth] + starts[:depth]
            worth = torch.minimum(worth, own[which[:, None], decided].amin(1))
        return worth / self.config.middle

    def hidden(self, depth: int, state: Tensor) -> Tensor:
        """[n, hidden] states (conditions + decided) -> [n, hidden], what the head reads."""
        x = functional.silu(state + self.tokens[self.edges[-1] + depth])
        for layer in self.trunk:
            x = x + functional.silu(layer(x))
        return x

    def logits(
        self, depth: int, state: Tensor, scale: Tensor, log_counts: Tensor,
        hints: Tensor | None = None, known: Below | None = None,
    ) -> Tensor:  # fmt: skip
        """[n, hidden] states -> [n, sizes[depth]] logits of the next choice; -inf where illegal.

        Told the temperature, they are `scale` [n] times what the head says, on top of `log_counts`
        [n, sizes[depth]] of the completions: uniform over strategies where it is high, and as
        1 / tau where it is low, as the target's are. An older policy has the head's alone. Where
        strategies are known, they say what they weigh, and the head what one of the others does.
        """
        own = slice(*self.edges[depth : depth + 2])
        x = self.hidden(depth, state)
        said = functional.linear(x, self.head[own], self.head_bias[own])
        if hints is not None:
            trust = functional.linear(x, self.trust[depth : depth + 1], self.trust_bias[depth])
            if known is not None:  # others are behind what is known, or as far as the hints say
                reached = known.reached / self.config.middle
                said, hints = said + reached, (hints - reached).clamp(max=0)
            said = torch.addcmul(said, trust, hints)
        if known is not None:
            each = (scale[:, None] * said).double().clamp(-MOST, MOST).exp()
            weight = _weight(log_counts.double().exp(), each, known, self.doubt[depth].exp())
            logits: Tensor = weight.clamp(min=NONE).log().to(said)
            return logits.masked_fill(log_counts.isneginf(), -torch.inf)
        if self.config.temperatures:
            return torch.addcmul(log_counts, said, scale[:, None])
        return said.masked_fill(log_counts.isneginf(), -torch.inf)


def _weight(completions: Tensor, each: Tensor, known: Below, doubt: Tensor) -> Tensor:
    """What `completions` [n, choices] of each next choice weigh, where one of those that are not
    known weighs `each` in proportion.

    The sample says how high that is in all, and corrects it for a choice below which many were
    drawn; who was found or drawn counts with his own weight.
    """
    rest = completions - known.counts
    rest = torch.where(rest > 0.5, rest, 0.0)
    among = rest + known.counts - known.found  # of whom the sample is
    usual = _mean(each, among).clamp(min=NONE)
    number = known.number.sum(1, keepdim=True)
    stand = known.stands.sum(1, keepdim=True).clamp(min=1)
    seen = number * known.weighs.sum(1, keepdim=True) / stand + LEVEL * usual
    level = seen / (number * _mean(each, known.stands) + LEVEL * usual)
    own = known.number * known.weighs / known.stands.clamp(min=1)
    estimate = (own + doubt * level * each) / (known.number + doubt)
    return known.masses + known.drawn + rest * estimate


def _mean(rows: Tensor, weights: Tensor) -> Tensor:
    """[n, 1] the means of rows [n, m], weighed [n, m]; 0 where nothing weighs."""
    return (rows * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)


class PolicyNetwork(nn.Module):
    """The family policies by name; `towers` is what the keys of their tensors say."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.input_dim = 1  # torchgfn's estimators ask for it: the workload
        self.towers = nn.ModuleDict({c.shape.name: FamilyPolicy(c) for c in config.policies})

    def of(self, family: str) -> FamilyPolicy:
        """A family's policy; KeyError lists the known families."""
        if family not in self.towers:
            known = ", ".join(self.towers)
            raise KeyError(f"the network has no family {family!r}; it has {known}")
        return cast(FamilyPolicy, self.towers[family])

    def extended(self, fresh: NetworkConfig, seed: int = 0) -> "PolicyNetwork":
        """A copy that has the families of `fresh`, too: those that this network lacks in their
        shape begin untrained, with choices that are uniform."""
        new = {c.shape.name: c for c in fresh.policies if c.shape not in self.config.families}
        policies = {c.shape.name: c for c in self.config.policies} | new
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = PolicyNetwork(NetworkConfig(tuple(policies.values())))
        for name in policies.keys() - new:
            network.towers[name] = deepcopy(self.towers[name]).cpu()
        return network


class LogZ(nn.Module):
    """log Z of workloads of a family: log(valid strategies) plus a learned mean log-reward excess,
    which goes about as 1 / tau."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.config, self.middle = config, config.middle
        self.standardise = Standardise(config)
        self.net = nn.Sequential(
            nn.Linear(len(config.center) + 1, 128), nn.SiLU(), nn.Linear(128, 128),
            nn.SiLU(), nn.Linear(128, 1),
        )  # fmt: skip
        self.level = nn.Parameter(torch.zeros(()))

    def forward(self, features: Tensor, log_leaves: Tensor, tau: Tensor) -> Tensor:
        """[S, features], [S] and temperatures [S] -> [S]"""
        excess: Tensor = self.net(torch.cat([self.standardise(features), _octaves(tau)], 1))
        return log_leaves + self.middle / tau * (excess.squeeze(-1) + self.level)


class LogF(nn.Module):
    """log flow of states of a family: log(completions) plus a learned excess, as in `LogZ`."""

    def __init__(self, config: FamilyConfig) -> None:
        super().__init__()
        self.net = FamilyPolicy(config)
        self.out = nn.Parameter(torch.zeros(len(config.shape.sizes), config.hidden))
        self.level = nn.Parameter(torch.zeros(()))

    def forward(self, depth: int, state: Tensor, scale: Tensor, log_counts: Tensor) -> Tensor:
        """[n, hidden] states at a depth, [n] and log completions [n] -> [n]"""
        excess = self.net.hidden(depth, state) @ self.out[depth] + self.level
        return log_counts + scale * excess


def _octaves(tau: Tensor) -> Tensor:
    """Temperatures [S] as a feature [S, 1], about -1 to 1."""
    return torch.log2(tau / TAU)[:, None] / 2


class ByFamily(nn.Module):
    """What is learned beside the policies: `LogZ` or `LogF`, by family."""

    def __init__(self, config: NetworkConfig, kind: type[LogZ] | type[LogF]) -> None:
        super().__init__()
        self.families = nn.ModuleDict({c.shape.name: kind(c) for c in config.policies})

    def of(self, family: str) -> Any:
        """A family's."""
        return self.families[family]
