"""Strategies of a family's wide space as a library's candidates: around the best listed ones, and
all of those with a choice that few have.

A reward was fitted to listed strategies. What it says of the listed one that is nearest is carried
over by the analytic model, which knows tiles of any size and the waves they come in. Whether that
is so is measured: such candidates are for libraries that are.
"""

import itertools
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Family, Problem
from ptxflow.env.cost import model_tflops
from ptxflow.env.relation import relate
from ptxflow.env.reward import Reward
from ptxflow.env.space import EmptySpace, Space, StrategySpace, digits, sizes_of, strides_of

Ints = NDArray[np.int64]
Array = NDArray[np.float64]

AROUND, AGAIN = 8, 32  # strategies around which there are others: listed ones, and then the best
FEW = 10_000  # strategies with a choice of the wide space, which are all looked at
NEAR = 2.0  # the ratio by which a number may differ
ALIKE = 1  # kept of those with the same blocks, and the same MMAs in each


@dataclass(frozen=True)
class WideReward:
    """A listed family's reward, of the strategies of its wide space."""

    reward: Reward
    listed: Family

    @property
    def name(self) -> str:
        return self.reward.name

    def tflops(self, space: StrategySpace, codes: Ints) -> Array:
        """float64 [n]: the nearest listed strategy's, times what the model says of the two; where
        that one does not fit an SM, the model's, times what the others' are over it."""
        if space.family is self.listed or not len(codes):
            return self.reward.tflops(space, codes)
        p, device = space.problem, space.device
        out = model_tflops(space.family, space.fields(codes), p, device)
        near = nearest(codes, self.listed)
        taken = self.listed.resources(Space(self.listed, p, device, near).fields(), p, device)
        fits = np.broadcast_to(np.asarray(taken.occupancy) > 0, near.shape)
        like = Space(self.listed, p, device, near[fits])
        over = self.reward.tflops(like, like.codes)
        over = over / model_tflops(self.listed, like.fields(), p, device)
        out[fits] *= over
        out[~fits] *= np.median(over) if len(over) else 1.0
        return out


def nearest(codes: Ints, listed: Family) -> Ints:
    """[n] codes of the listed family, of codes [n] of its wide space: each decision's choice, or
    that which is nearest to it."""
    rows = digits(codes, sizes_of(listed.wide))
    strides = strides_of(sizes_of(listed))[1:]
    offered = {d.name: d.choices for d in listed.wide.decisions}
    down = [np.array([_place(d, c) for c in offered[d.name]]) for d in listed.decisions]
    return np.asarray(sum(m[x] * s for m, x, s in zip(down, rows.T, strides, strict=False)))


def widened(codes: Ints, listed: Family) -> Ints:
    """[n] codes of the wide space, of codes [n] of the listed one."""
    strides = strides_of(sizes_of(listed.wide))[1:]
    offered = {d.name: d.choices for d in listed.wide.decisions}
    up = [np.array([offered[d.name].index(c) for c in d.choices]) for d in listed.decisions]
    rows = digits(codes, sizes_of(listed))
    return np.asarray(sum(m[x] * s for m, x, s in zip(up, rows.T, strides, strict=False)))


def around(codes: Ints, listed: Family, turns: int) -> Ints:
    """Codes of the wide space that differ from these in up to so many decisions with numbers, of
    those that listed strategies have: of others the model knows nothing."""
    family, own = listed.wide, {d.name for d in listed.decisions}
    sizes = sizes_of(family)
    strides, held = strides_of(sizes)[1:], digits(codes, sizes)
    numbers = [
        i
        for i, d in enumerate(family.decisions)
        if isinstance(d.choices[-1], int) and d.name in own
    ]
    found = [codes]
    for some in itertools.combinations(numbers, turns):
        for moved in itertools.product(*(range(sizes[i]) for i in some)):
            near = np.ones(len(codes), bool)
            change = np.zeros(len(codes), np.int64)
            for i, to in zip(some, moved, strict=True):
                near &= _ratio(family.decisions[i], to)[held[:, i]] <= NEAR
                change += (to - held[:, i]) * strides[i]
            found.append((codes + change)[near])
    return np.unique(np.concatenate(found))


def seldom(family: Family, problem: Problem, device: Device) -> Ints:
    """Codes of a wide family's strategies with a choice that no listed one makes, and at most `FEW`
    do: other decisions depend on such a choice, so that it is not around listed ones."""
    whole, found = relate(family, problem, device), [np.zeros(0, np.int64)]
    for d in (d for d in family.decisions if d.name in family.implied):
        for choice in d.choices[1:]:
            with suppress(EmptySpace):
                part = whole.given({d.name: (choice,)})
                found += [part.listed().codes] if len(part) <= FEW else []
    return np.unique(np.concatenate(found))


def _ratio(decision: Decision, to: int) -> Array:
    """[choices] by what they differ from one of them; 0 and 1 are as far apart as 1 and 2."""
    values = np.array([max(float(c), 0.5) for c in decision.choices])
    return np.maximum(values / values[to], values[to] / values)


def _place(decision: Decision, choice: object) -> int:
    """Of the choice that is nearest; of the first, where it is no number."""
    if choice in decision.choices or not isinstance(choice, int):
        return decision.choices.index(choice) if choice in decision.choices else 0
    return int(np.argmin([abs(math.log(choice / max(float(c), 0.5))) for c in decision.choices]))


def varied(load: tuple[Ints, Ints], tflops: Array, most: int) -> Ints:
    """At most so many places of the best, few of which have the same load."""
    held, out = Counter[tuple[float, float]](), list[int]()
    for i in np.argsort(-tflops, kind="stable"):
        key = float(load[0][i]), float(load[1][i])
        if held[key] < ALIKE and len(out) < most:
            out.append(i)
            held[key] += 1
    return np.array(out, np.int64)
