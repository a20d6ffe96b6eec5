"""The policy network: one for all families. PyTorch only, so that sampling needs no torchgfn.

A state is what was decided so far, where in the construction it stands, and the workload. Each
decided choice, each position and each family owns a learned vector; the workload's features pass
through an encoder. Their sum goes through a residual trunk, and the rows of the output table that
belong to the next decision give its logits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class FamilyShape:
    """What the network must know of a family: choices per decision, and which space it was."""

    name: str
    sizes: tuple[int, ...]
    digest: str  # of the decision space; a checkpoint of another one is refused


@dataclass(frozen=True)
class NetworkConfig:
    """Everything that fixes the parameters' shapes and meaning; travels in every checkpoint."""

    families: tuple[FamilyShape, ...]
    features: tuple[str, ...]  # problem features, then device features, in order
    center: tuple[Any, ...]  # subtracted from the features: one row for all families, or one each
    gain: tuple[Any, ...]  # then multiplied; 0 mutes what never varied in the family's training
    hidden: int = 256
    layers: int = 2

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> NetworkConfig:
        families = tuple(
            FamilyShape(f["name"], tuple(f["sizes"]), f["digest"]) for f in data["families"]
        )
        tuples = {k: tuple(_frozen(row) for row in data[k]) for k in ("features", "center", "gain")}
        return NetworkConfig(families, **tuples, hidden=data["hidden"], layers=data["layers"])

    def family(self, name: str) -> int:
        """The index of a family; KeyError lists the known ones."""
        names = [f.name for f in self.families]
        if name not in names:
            raise KeyError(f"the network has no family {name!r}; it has {', '.join(names)}")
        return names.index(name)


def _frozen(row: Any) -> Any:
    return tuple(row) if isinstance(row, list) else row


class FeatureEncoder(nn.Module):
    """[W, features] of one family -> [W, features], standardised by the family's constants."""

    center: Tensor
    gain: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        shape = len(config.families), len(config.features)
        for name in ("center", "gain"):
            rows = torch.tensor(getattr(config, name), dtype=torch.float32).expand(shape)
            self.register_buffer(name, rows.contiguous(), persistent=False)

    def forward(self, features: Tensor, family: int) -> Tensor:
        return (features - self.center[family]) * self.gain[family]


class PolicyNetwork(nn.Module):
    """Logits of the next choice for batches of prefixes of one family at one depth."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        self.input_dim = len(config.features)  # torchgfn's estimators ask for it
        hidden = config.hidden
        slots = [sum(f.sizes) for f in config.families]
        self._slot_start = [sum(slots[:i]) for i in range(len(slots))]
        depths = [len(f.sizes) for f in config.families]
        self._position_start = [sum(depths[:i]) for i in range(len(depths))]
        # vectors: one a choice slot (what was decided), then one a position of each family
        self.tokens = nn.Parameter(torch.randn(sum(slots) + sum(depths), hidden) * 0.3)
        self.family = nn.Parameter(torch.randn(len(slots), hidden) * 0.1)
        self.standardise = FeatureEncoder(config)
        self.encoder = nn.Sequential(
            nn.Linear(self.input_dim, hidden // 2), nn.SiLU(), nn.Linear(hidden // 2, hidden)
        )
        self.trunk = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(config.layers))
        # zero rows: an untrained policy is uniform over legal choices
        self.head = nn.Parameter(torch.zeros(sum(slots), hidden))
        self.head_bias = nn.Parameter(torch.zeros(sum(slots)))
        self._positions = sum(slots)
        self.starts = [list(accumulate(f.sizes, initial=0)) for f in config.families]
        for number, edges in enumerate(self.starts):  # on the network's device, for `decided`
            self.register_buffer(f"starts_{number}", torch.tensor(edges), persistent=False)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over trained parameters; earlier files hold the features' constants, too."""
        own = {k: v for k, v in tensors.items() if not k.startswith("standardise.")}
        self.load_state_dict(own)

    def matrices(self) -> list[Tensor]:
        """The weights between layers, which mix everything; the rest are rows of tables."""
        layers = [*self.encoder, *self.trunk]
        return [layer.weight for layer in layers if isinstance(layer, nn.Linear)]

    def conditions(self, features: Tensor, family: int) -> Tensor:
        """[W, features] -> [W, hidden]: the workload's part of the state, computed once."""
        encoded: Tensor = self.encoder(self.standardise(features, family))
        return encoded + self.family[family]

    def slots(self, family: int, first: int, stop: int) -> slice:
        """Rows of `tokens` and `head` of the choices of decisions `first` to `stop` - 1."""
        start, edges = self._slot_start[family], self.starts[family]
        return slice(start + edges[first], start + edges[stop])

    def positions(self, family: int) -> slice:
        """Rows of `tokens` of a family's decisions."""
        start = self._positions + self._position_start[family]
        return slice(start, start + len(self.config.families[family].sizes))

    def decided(self, family: int, depth: int, choices: Tensor) -> Tensor:
        """[n, >= depth] choice indices -> [n, hidden]: the sum of what was decided.

        A product with a row of ones and zeros: its gradient is a product, too, where that of
        looked-up rows would be a sum into few places.
        """
        width = self.starts[family][depth]
        rows = choices[:, :depth] + self.get_buffer(f"starts_{family}")[:depth]
        ones = self.tokens.new_zeros(len(choices), width).scatter_(1, rows, 1.0)
        return ones @ self.tokens[self.slots(family, 0, depth)]

    def logits(self, family: int, depth: int, state: Tensor) -> Tensor:
        """[n, hidden] states (conditions + decided) -> [n, sizes[depth]] logits."""
        position = self.positions(family).start + depth
        x = functional.silu(state + self.tokens[position])
        for layer in self.trunk:
            x = x + functional.silu(layer(x))
        own = self.slots(family, depth, depth + 1)
        return functional.linear(x, self.head[own], self.head_bias[own])


class LogZNetwork(nn.Module):
    """log Z of each workload: log(valid strategies) plus a learned mean log-reward excess.

    Each family has a level of its own, for families' rewards lie nats apart.
    """

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_dim = len(config.features)
        self.standardise = FeatureEncoder(config)
        self.net = nn.Sequential(
            nn.Linear(self.input_dim, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(),
            nn.Linear(128, 1),
        )  # fmt: skip
        self.level = nn.Parameter(torch.zeros(len(config.families)))

    def forward(self, features: Tensor, log_leaves: Tensor, family: int) -> Tensor:
        """[W, features] and [W] of one family -> [W]"""
        excess: Tensor = self.net(self.standardise(features, family))
        return log_leaves + excess.squeeze(-1) + self.level[family]
