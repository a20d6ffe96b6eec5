"""The valid strategies of (family, problem, device), as sorted codes and as a tree of prefixes.

A strategy is one choice index per decision; its code is the mixed-radix number of those indices,
first decision most significant, so that a prefix is an interval of sorted codes. A choice is legal
after a prefix iff a valid strategy completes it: no walk from the root can reach a dead end.
"""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Decision, Family, Fields, Problem, Rule, Strategy

Codes = NDArray[np.int64]


@dataclass(frozen=True)
class Level:
    """The n distinct valid prefixes of t choices, in code order: the nodes at depth t of a tree.

    mask    bool  [n, sizes[t]]  legal next choices; rows are never empty ([n, 0] at the leaves)
    child   int32 [n, sizes[t]]  node at depth t+1; -1 where illegal
    parent  int32 [n]            node at depth t-1 (-1 at the roots)
    choice  int32 [n]            the choice that led here from the parent (-1 at the roots)
    first   int64 [n + 1]        leaves first[i] to first[i+1] lie below node i
    prefix  int64 [n]            the code of the prefix
    """

    mask: NDArray[np.bool_]
    child: NDArray[np.int32]
    parent: NDArray[np.int32]
    choice: NDArray[np.int32]
    first: Codes
    prefix: Codes

    def __len__(self) -> int:
        return len(self.prefix)


def decision_digest(family: Family) -> str:
    """Stable identity of a family's decision space: names, choices and the rules' sentences."""
    rows = [[d.name, list(d.choices)] for d in family.decisions]
    text = json.dumps([family.name, rows, [r.sentence for r in family.rules]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class StrategySpace(ABC):
    """The valid strategies of one problem, never none of them, in whatever form they are kept.

    Codes are int64, or Python's integers where the product of all choices does not fit.
    """

    family: Family
    problem: Problem
    device: Device

    @abstractmethod
    def __len__(self) -> int:
        """How many strategies are valid."""

    @abstractmethod
    def counts(self, prefix: NDArray[np.int64]) -> NDArray[np.int64]:
        """Completions after each next choice: prefix [n, t] of indices -> [n, sizes[t]]."""

    @abstractmethod
    def at(self, places: NDArray[np.int64]) -> Codes:
        """[n] the codes at these places [n] in their order."""

    def sample_uniform(self, n: int, rng: np.random.Generator) -> Codes:
        """[n] codes drawn exactly uniformly, with replacement, from the valid strategies."""
        return self.at(rng.integers(len(self), size=n))

    @abstractmethod
    def below(self, prefix: NDArray[np.int64]) -> Codes:
        """The codes of all strategies with one of these distinct prefixes [n, t] of indices."""

    @abstractmethod
    def given(self, fixed: Mapping[str, Collection[Choice]]) -> "StrategySpace":
        """The strategies that have one of these choices in each decision that is named, whichever
        decisions they are; EmptySpace where there are none. KeyError for an unknown decision."""

    @property
    def plain(self) -> "StrategySpace":
        """What rewards tell apart of it."""
        return self

    def mask(self, prefix: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Legal next choices: prefix [n, t] of indices -> [n, sizes[t]]."""
        return self.counts(prefix) > 0

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The family's, in the order in which they are taken; F of them."""
        return self.family.decisions

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each decision."""
        return sizes_of(self.family)

    @cached_property
    def strides(self) -> Codes:
        """[F + 1]: the codes that share a prefix of t choices span strides[t]."""
        return strides_of(self.sizes)

    @cached_property
    def digest(self) -> str:
        """See `decision_digest`: the same for all spaces of a family."""
        return decision_digest(self.family)

    def indices(self, codes: Codes) -> NDArray[np.int64]:
        """[n, F] choice indices of the codes."""
        return digits(codes, self.sizes)

    def fields(self, codes: Codes) -> Fields:
        """The choice values of the codes as arrays [n], by decision name."""
        return fields_of(codes, self.family)

    def strategy(self, code: int) -> Strategy:
        """The strategy with this code; ValueError when the code is not in the space."""
        row = self.indices(np.array([code], self.strides.dtype))
        chosen = self.counts(row[:, :-1])[0, row[0, -1]]
        if not (0 <= code < self.strides[0] and chosen):
            raise ValueError(f"{self.who}: {code} is not the code of a valid strategy")
        return self.family.strategy(
            {d.name: d.choices[i] for d, i in zip(self.decisions, row[0], strict=True)}
        )

    def code(self, strategy: Strategy) -> int:
        """The code of a strategy; ValueError with the sentences of the rules that refuse it."""
        refusals = self.family.refusals(self.problem, strategy, self.device)
        if refusals:
            raise ValueError(f"{self.who}: {'; '.join(refusals)}")
        chosen = self.family.choices(strategy)
        row = [d.choices.index(chosen[d.name]) for d in self.decisions]
        return int(np.dot(row, self.strides[1:]))

    @property
    def who(self) -> str:
        """Family, definition and device, as errors begin."""
        return f"{self.family.name} {self.problem.definition} on {self.device.name}"


@dataclass(frozen=True)
class Space(StrategySpace):
    """The valid strategies of one problem in a list; `codes` is sorted and never empty."""

    codes: Codes

    def __len__(self) -> int:
        return len(self.codes)

    def indices(self, codes: Codes | None = None) -> NDArray[np.int64]:
        """[n, F] choice indices of the codes; of every leaf, in code order, when not given."""
        return super().indices(self.codes if codes is None else np.asarray(codes, np.int64))

    def given(self, fixed: Mapping[str, Collection[Choice]]) -> "Space":
        inside, names = np.ones(len(self.codes), bool), [d.name for d in self.decisions]
        if unknown := fixed.keys() - set(names):
            raise KeyError(f"{self.who}: no decisions {sorted(unknown)}; there are {names}")
        for name, choices in fixed.items():
            at = names.index(name)
            own = np.array([c in choices for c in self.decisions[at].choices])
            inside &= own[self.codes // self.strides[at + 1] % self.sizes[at]]
        if not inside.any():
            raise EmptySpace(f"{self.who}: no strategy is valid with {dict(fixed)}")
        return Space(self.family, self.problem, self.device, self.codes[inside])

    def fields(self, codes: Codes | None = None) -> Fields:
        """The choice values of the codes, or of every leaf, as arrays [n], by decision name."""
        return super().fields(self.codes if codes is None else codes)

    def at(self, places: NDArray[np.int64]) -> Codes:
        codes: Codes = self.codes[places]
        return codes

    def below(self, prefix: NDArray[np.int64]) -> Codes:
        depth = prefix.shape[1]
        inside = np.isin(
            self.codes - self.codes % self.strides[depth], prefix @ self.strides[1 : depth + 1]
        )
        codes: Codes = self.codes[inside]
        return codes

    def counts(self, prefix: NDArray[np.int64]) -> NDArray[np.int64]:
        prefix = np.atleast_2d(np.asarray(prefix, np.int64))
        depth = prefix.shape[1]
        start = prefix @ self.strides[1 : depth + 1]
        edges = start[:, None] + np.arange(self.sizes[depth] + 1) * self.strides[depth + 1]
        return np.diff(np.searchsorted(self.codes, edges), axis=1)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The tree, depths 0 to F; nodes of depth F are the leaves in code order."""
        return _tree(self.codes, self.sizes)


def require_same_decisions(spaces: Sequence[StrategySpace]) -> None:
    """ValueError where the spaces are not all of one decision space."""
    digests = {s.digest for s in spaces}
    if len(digests) > 1:
        raise ValueError(f"spaces of different decision spaces cannot be mixed: {digests}")


class EmptySpace(BadInput):
    """No strategy of a family is valid for a problem on a device; one line with the last rule."""


def enumerate_space(family: Family, problem: Problem, device: Device) -> Space:
    """All valid strategies: 10^3 to 3 x 10^5 of them, in 0.02 to 0.2 s.

    Prefixes grow decision by decision, and a rule filters them once the decisions it reads are
    bound. It is evaluated on the product of what it reads and looked up, or on the prefixes
    themselves where those are fewer. EmptySpace names the last rule to refuse when there are none;
    ValueError where a rule reads what it does not declare, or the codes do not fit 64 bits.
    """
    names = [d.name for d in family.decisions]
    sizes = sizes_of(family)
    if math.prod(sizes) >= 2**63:
        raise ValueError(f"the product of {sizes} choices does not fit a 64-bit code")
    prefixes = np.zeros((1, 0), np.int16)
    for depth, size in enumerate(sizes):
        tail = np.tile(np.arange(size, dtype=np.int16), len(prefixes))[:, None]
        prefixes = np.hstack([np.repeat(prefixes, size, axis=0), tail])
        for rule in family.rules:
            if bound_at(rule, names) != depth:
                continue
            read = [names.index(name) for name in rule.reads]
            taken = tuple(prefixes[:, i] for i in read)
            shape = tuple(sizes[i] for i in read)
            if len(prefixes) < np.prod(shape, dtype=float):
                legal = verdict(rule, taken, family.decisions, problem, device)
            else:
                every = np.indices(shape, sparse=True)
                legal = verdict(rule, every, family.decisions, problem, device)[taken]
            prefixes = prefixes[np.broadcast_to(legal, len(prefixes))]
            if not len(prefixes):
                raise EmptySpace(
                    f"{family.name} {problem.definition} on {device.name}: no strategy is valid "
                    f"for {dict(problem.axes)}; the last to refuse was: {rule.sentence}"
                )
    return Space(family, problem, device, prefixes.astype(np.int64) @ strides_of(sizes)[1:])


def differing(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int8]:
    """[len(a), len(b)] in how many decisions strategies [n, F] of choice indices differ."""
    out = np.zeros((len(a), len(b)), np.int8)
    for x, y in zip(a.T, b.T, strict=True):
        out += x[:, None] != y
    return out


def bound_at(rule: Rule, names: list[str]) -> int:
    """Depth of the decision that completes what a rule reads."""
    unknown = set(rule.reads) - set(names)
    if unknown:
        raise ValueError(f"rule {rule.sentence!r} reads unknown decisions {sorted(unknown)}")
    return max((names.index(name) for name in rule.reads), default=0)


def verdict(
    rule: Rule,
    taken: Sequence[NDArray[Any]],
    decisions: tuple[Decision, ...],
    problem: Problem,
    device: Device,
) -> NDArray[np.bool_]:
    """What a rule says of choices: `taken` has an array of their indices for each that it reads.

    The arrays are broadcast against each other, so those of an open grid give the whole table.
    """
    choices = {d.name: d.choices for d in decisions}
    fields = {n: np.array(choices[n])[i] for n, i in zip(rule.reads, taken, strict=True)}
    try:
        legal = rule.legal(Fields(fields, choices.keys() - fields.keys()), problem, device)
    except AttributeError as error:
        raise ValueError(
            f"rule {rule.sentence!r} reads what it does not declare: {error}"
        ) from None
    return np.broadcast_to(np.asarray(legal, bool), np.broadcast_shapes(*(i.shape for i in taken)))


def sizes_of(family: Family) -> tuple[int, ...]:
    """Number of choices of each decision."""
    return tuple(len(d.choices) for d in family.decisions)


def digits(codes: Codes, sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """[n, F] choice indices of codes [n]."""
    found: NDArray[Any] = codes[:, None] // strides_of(sizes)[1:] % np.array(sizes)
    return found.astype(np.int64, copy=False)


def fields_of(codes: Codes, family: Family) -> Fields:
    """The choice values of codes [n] as arrays [n], by decision name."""
    rows = digits(codes, sizes_of(family))
    return Fields(
        {d.name: np.array(d.choices)[i] for d, i in zip(family.decisions, rows.T, strict=True)}
    )


def strides_of(sizes: tuple[int, ...]) -> Codes:
    """[F + 1] the codes that a choice of each decision spans; exact, however many there are."""
    kind = np.int64 if math.prod(sizes) < 2**63 else object
    return np.cumprod([1, *reversed(sizes)], dtype=kind)[::-1].copy()


def _tree(codes: Codes, sizes: tuple[int, ...]) -> tuple[Level, ...]:
    """Levels 0 to F of the tree over sorted codes."""
    strides = strides_of(sizes)
    firsts: list[Codes] = []
    for stride in strides:
        prefix = codes // stride
        new = np.flatnonzero(prefix[1:] != prefix[:-1]) + 1
        firsts.append(np.concatenate([[0], new, [len(codes)]]))
    levels = []
    parent = np.full(len(firsts[0]) - 1, -1, np.int32)
    choice = parent.copy()
    for depth, first in enumerate(firsts):
        n, size = len(first) - 1, sizes[depth] if depth < len(sizes) else 0
        starts = first[:-1]
        child = np.full((n, size), -1, np.int32)
        links = parent, choice
        if size:
            below = firsts[depth + 1][:-1]
            parent = (np.searchsorted(starts, below, side="right") - 1).astype(np.int32)
            choice = (codes[below] // strides[depth + 1] % size).astype(np.int32)
            child[parent, choice] = np.arange(len(below), dtype=np.int32)
        prefix = codes[starts] // strides[depth]
        levels.append(Level(child >= 0, child, *links, first, prefix))
    return tuple(levels)
