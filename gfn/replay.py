"""The best distinct strategies that were met so far, of each workload of a family, to learn from.

Rows of fixed length that are sorted and masked: nothing here waits for a GPU. PyTorch only.
"""

import torch
from torch import Tensor
from torch.nn import functional

SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: strategies are told apart by a hash


class Replay:
    """Up to `room` strategies for each of W workloads.

    choices  int16 [W, room, F]
    worth    float [W, room]  TFLOP/s over the attainable; -inf where there is none
    """

    def __init__(self, workloads: int, depth: int, room: int, device: torch.device) -> None:
        self.choices = torch.zeros(workloads, room, depth, dtype=torch.int16, device=device)
        self.worth = torch.full((workloads, room), -torch.inf, device=device)
        powers = [SPREAD]
        for _ in range(depth - 1):
            powers.append((powers[-1] * SPREAD + (1 << 63)) % (1 << 64) - (1 << 63))
        self._powers = torch.tensor(powers, device=device)

    def add(self, workload: Tensor, choices: Tensor, worth: Tensor) -> None:
        """Keep the best of what is there and of choices [S, n, F], worth [S, n]; `workload` [S] are
        distinct."""
        every = torch.cat([self.choices[workload], choices.to(torch.int16)], 1)
        values = torch.cat([self.worth[workload], worth], 1)
        values, best = values.sort(1, descending=True)
        key, order = ((every.long() + 1) * self._powers).sum(2).gather(1, best).sort(stable=True)
        again = functional.pad(key[:, 1:] == key[:, :-1], (1, 0))  # the best comes first
        order, values = best.gather(1, order), values.gather(1, order)
        values = values.masked_fill(again, -torch.inf)
        kept, place = values.topk(self.worth.shape[1], dim=1)
        rows = order.gather(1, place)[..., None].expand(-1, -1, every.shape[2])
        self.choices.index_copy_(0, workload, every.gather(1, rows))
        self.worth.index_copy_(0, workload, kept)

    def forget(self, workload: int) -> None:
        """Of a workload whose rewards are others now."""
        self.worth[workload] = -torch.inf

    def draw(
        self, workload: Tensor, tau: Tensor, n: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """n strategies for each workload [S] and temperature [S, T] in proportion to their rewards:
        choices [S, T, n, F] and worth [S, T, n], which is -inf where nothing is known."""
        worth = self.worth[workload]
        probs = torch.softmax(worth[:, None, :].clamp(min=-1e4) / tau[..., None], -1)
        edges = probs.double().cumsum(-1)
        u = torch.rand(*tau.shape, n, generator=generator, device=tau.device, dtype=torch.float64)
        place = torch.searchsorted(
            edges, u * (1 - 1e-9) * edges.amax(-1, keepdim=True), right=True
        ).flatten(1)
        rows = place[..., None].expand(-1, -1, self.choices.shape[2])
        found = self.choices[workload].gather(1, rows).long()
        shape = tau.shape[1], n
        return found.unflatten(1, shape), worth.gather(1, place).unflatten(1, shape)


def destroyed(choices: Tensor, generator: torch.Generator | None) -> Tensor:
    """Strategies [..., F] with a part of their decisions undone (-1): by turns those from a random
    one on, and any with a random probability."""
    depth, device = choices.shape[-1], choices.device
    shape = choices.shape[:-1]
    cut, share = torch.rand(2, *shape, 1, generator=generator, device=device)
    tail = torch.arange(depth, device=device) >= (cut * depth).long()
    any_ = torch.rand(choices.shape, generator=generator, device=device) < 0.5 * share
    by_turns = torch.arange(shape[-1], device=device)[:, None] % 2 == 0
    return choices.masked_fill(torch.where(by_turns, tail, any_), -1)
