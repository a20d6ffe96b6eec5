"""What is known below the prefixes of a walk: what strategies weigh that were found, or drawn.

`Known` are sums of what a search found, and of a sample of the others (`hints.py`). `Near` are all
strategies below prefixes that have few.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ptxflow.env.search import Values
from ptxflow.env.space import Codes, StrategySpace
from ptxflow.gfn.hints import DRAWN, MODEL, ROOM, drawn, found, reach, told

NEAR = 1 << 10  # of so many strategies below a prefix all are asked for; half of it of a surrogate
LEAST = 1e-14  # that a known strategy weighs, over the best: what float64 tells apart in a sum

Held = tuple[Codes, Values, Values]  # in order; their worth; of how many each is one

_counted: dict[tuple[int, int], tuple[StrategySpace, Codes, Values]] = {}  # by ids
_asked: dict[tuple[str, int], tuple[StrategySpace, Held]] = {}  # by the id of the space
_known: dict[tuple[int, float, str, str, int], tuple[StrategySpace, "Known"]] = {}
RECENT = 4  # entries of each of the last two


def _kept(memory: dict[Any, Any], key: object, value: object) -> None:
    """Remembered, and the oldest forgotten."""
    memory.pop(key, None)
    while len(memory) >= RECENT:
        del memory[next(iter(memory))]
    memory[key] = value


def alike(space: StrategySpace, codes: Codes) -> Values:
    """Of how many strategies of the space each of these [n] is one: those that differ from it in
    decisions alone that no reward knows; 0 of one that is none of the space."""
    rows = space.indices(codes)[:, : named(space)]
    return np.asarray(space.counts(rows[:, :-1])[np.arange(len(rows)), rows[:, -1]], float)


def _inside(space: StrategySpace, codes: Codes, *values: Values) -> tuple[Codes, list[Values]]:
    """Those of codes [n] and values [n] that are of the space, and last `alike`; remembered."""
    if (key := (id(space), id(codes))) not in _counted:
        if sum(len(row) for _, row, _ in _counted.values()) + len(codes) > 2 * ROOM:
            _counted.clear()
        _counted[key] = space, codes, alike(space, codes)
    counts = _counted[key][2]
    if counts.all():
        return codes, [*values, counts]
    return codes[counts > 0], [row[counts > 0] for row in (*values, counts)]


def named(space: StrategySpace) -> int:
    """How many decisions come before those of which rewards know nothing, which are the last."""
    return len(space.decisions) - len(space.family.unknown)


@dataclass(frozen=True)
class Sums:
    """Strategies of S workloads, N of each at most, and what they come to.

    codes   int64 [S N]  in order; those of workload s are counted from s * room
    before  float64 [S, N + 1, C]  of C figures the sums of those before each
    """

    codes: Tensor
    before: Tensor

    @staticmethod
    def of(rows: Sequence[tuple[Codes, Tensor]], room: int) -> "Sums":
        """Of codes [n] and figures [n, C] of each workload."""
        codes = pad_sequence([torch.from_numpy(own) for own, _ in rows], True, room - 1)
        first = rows[0][1]
        before = first.new_zeros(len(codes), codes.shape[1] + 1, first.shape[1])
        for sums, (_, own) in zip(before, rows, strict=True):
            sums[len(own) + 1 :] = torch.cumsum(own, 0, out=sums[1 : len(own) + 1])[-1:].sum(0)
        codes = (codes + room * torch.arange(len(codes))[:, None]).flatten()
        return Sums(codes.to(before.device), before)

    def between(self, edges: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Of workloads [n], between edges [n, m + 1]: how many there are [n, m], and what their
        figures come to [n, m, C]."""
        place = torch.searchsorted(self.codes, edges)
        place = place - (which * (self.before.shape[1] - 1))[:, None]
        return place.diff(dim=1), self.before[which[:, None], place].diff(dim=1)


@dataclass(frozen=True)
class Below:
    """What is known below each next choice after n prefixes; all but `reached` [n, choices].

    counts   float64  strategies whose worth is known: those found, and those drawn of the others
    found    float64  of these those that were found
    masses   float64  what those found weigh, over the best
    drawn    float64  what those drawn weigh
    number   int64  how many were drawn
    stands   float64  for how many of the others they stand
    weighs   float64  what those weigh for which they stand
    reached  float32 [n, 1]  as `Found.reached`
    """

    counts: Tensor
    found: Tensor
    masses: Tensor
    drawn: Tensor
    number: Tensor
    stands: Tensor
    weighs: Tensor
    reached: Tensor


@dataclass(frozen=True)
class Known:
    """What is known of S workloads at temperatures.

    found   those found; figures: strategies that each is one of, what they weigh
    drawn   the sample of others; as well, and for how many each stands, what those weigh
    reached float32 [S]  as `Found.reached`
    """

    found: Sums
    drawn: Sums
    reached: Tensor
    strides: tuple[int, ...]
    named: int

    @staticmethod
    def of(
        spaces: Sequence[StrategySpace], tau: Tensor, by: str = MODEL, n: int | None = None
    ) -> "Known":
        """Of workloads [S] at temperatures [S], where these lie, by n draws of the others; one
        workload's remembered."""
        n = reach(DRAWN, by) if n is None else n
        key = (id(spaces[0]), tau.tolist()[0], str(tau.device), by, n)
        if len(spaces) == 1 and key in _known:
            return _known[key][1]
        best, rest, ends = [], [], []
        for space, t in zip(spaces, tau.double(), strict=True):
            first, more = found(space, by), drawn(space, by, n)
            codes, (worth, counts) = _inside(space, first.codes, first.worth)
            best.append((codes, _weighed(worth, t, counts)))
            codes, (worth, stands, counts) = _inside(space, more.codes, more.worth, more.stands)
            rest.append((codes, _weighed(worth, t, counts, stands * counts)))
            ends.append(first.reached)
        strides = tuple(map(int, spaces[0].strides))
        known, other = (Sums.of(rows, strides[0] + 1) for rows in (best, rest))
        reached = torch.tensor(ends, device=tau.device)
        made = Known(known, other, reached, strides, named(spaces[0]))
        if len(spaces) == 1:
            _kept(_known, key, (spaces[0], made))
        return made

    def below(self, depth: int, which: Tensor, prefix: Tensor) -> Below | None:
        """After prefixes [n, >= depth] of workloads [n]. None from where decisions begin that
        no reward knows, whose choices are all alike."""
        if depth >= self.named:
            return None
        first = which * (self.strides[0] + 1)
        for choice, stride in zip(prefix[:, :depth].T, self.strides[1:], strict=False):
            first = first + choice * stride
        whole, each = self.strides[depth : depth + 2]
        edges = first[:, None] + torch.arange(0, whole + 1, each, device=first.device)
        _, best = self.found.between(edges, which)
        number, others = self.drawn.between(edges, which)
        (counts, masses), (own, drawn, stands, weighs) = best.unbind(2), others.unbind(2)
        return Below(
            counts + own, counts, torch.maximum(masses, LEAST * counts),
            torch.maximum(drawn, LEAST * own), number, stands,
            torch.maximum(weighs, LEAST * stands), self.reached[which, None],
        )  # fmt: skip


def _weighed(worth: Values, tau: Tensor, *numbers: Values) -> Tensor:
    """[n, 2 C] numbers [n] of strategies of this worth [n], each beside what they weigh."""
    weight = (torch.from_numpy(worth).to(tau.device) / tau).exp()
    counts = torch.from_numpy(np.stack(numbers, 1)).to(tau.device)
    return torch.stack([counts, counts * weight[:, None]], 2).flatten(1)


class Near:
    """All strategies below prefixes that have few, of S workloads at temperatures [S]: asked for
    when a walk comes there. So the last decisions are the target's own."""

    def __init__(self, spaces: Sequence[StrategySpace], tau: Tensor, by: str) -> None:
        self.spaces, self.tau, self.by = spaces, tau.double(), by
        none = np.zeros(0, np.int64), np.zeros(0), np.zeros(0)
        self.held: list[Held] = [_asked.get((by, id(s)), (s, none))[1] for s in spaces]

    def below(self, depth: int, which: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
        """Which of prefixes [n, >= depth] of workloads [n] have few, and of these what is below
        each next choice weighs [few, choices], in proportion."""
        rows, of = prefix[:, :depth].cpu().numpy(), which.cpu().numpy()
        whole, each = map(int, self.spaces[0].strides[depth : depth + 2])
        places, weights = [which[:0]], [self.tau.new_zeros(0, whole // each)]
        for w in np.unique(of).tolist() if depth < named(self.spaces[0]) else ():
            part, mine = self.spaces[w].plain, np.flatnonzero(of == w)
            left = part.counts(rows[mine]).sum(1)
            few = (left > 0) & (left <= reach(NEAR, self.by))
            mine, first = mine[few], rows[mine[few]] @ part.strides[1 : depth + 1]
            edges = first[:, None] + np.arange(0, whole + 1, each)
            held = np.diff(np.searchsorted(self.held[w][0], edges[:, [0, -1]]), axis=1)[:, 0]
            if len(new := mine[held < left[few]]):
                self._ask(w, part.below(np.unique(rows[new], axis=0)))
            codes, worth, counts = self.held[w]
            if len(mine):
                figures = _weighed(worth - worth.max(), self.tau[w], counts)
                sums = Sums.of([(codes, figures)], int(part.strides[0]) + 1)
                at = torch.from_numpy(mine).to(which.device)
                _, found = sums.between(torch.from_numpy(edges).to(at.device), torch.zeros_like(at))
                places.append(at)
                weights.append(torch.maximum(found[..., 1], LEAST * found[..., 0]))
        return torch.cat(places), torch.cat(weights)

    def _ask(self, w: int, codes: Codes) -> None:
        space = self.spaces[w]
        fresh = codes, told(space, self.by)(codes), alike(space, codes)
        both = [np.concatenate(rows) for rows in zip(self.held[w], fresh, strict=True)]
        held, first = np.unique(both[0], return_index=True)
        self.held[w] = held, both[1][first], both[2][first]
        _kept(_asked, (self.by, id(space)), (space, self.held[w]))
