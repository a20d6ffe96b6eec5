"""The valid strategies of a workload as a decision diagram: none is listed, all answers are exact.

A node at depth t stands for the prefixes of t choices that have the same completions. Masks, counts
of completions, uniform draws and draws with any decisions fixed are walks in the diagram, which has
10^2 to 10^5 nodes where there are 10^3 to 10^14 strategies. Each rule becomes an automaton over the
decisions that it reads, and a node is a state of all of them; a rule that reads too many for its
table is one from where the prefixes that are left make the rest of its table small.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Family, Problem, Rule
from ptxflow.env.space import Codes, EmptySpace, Space, StrategySpace, bound_at, sizes_of, verdict

Ints = NDArray[np.int32]
LISTED = 3 * 10**5  # strategies up to which spaces are listed where they are used
TABLE = 1 << 18  # entries of a rule's table at first, at most
EACH = 32  # entries for each prefix at hand, of the rest of a table, at most
JOINED = 1 << 12  # entries up to which the tables of rules are joined, whatever each reads
EDGES = 1 << 24  # choices after states, at one depth at most: a gigabyte


@dataclass(frozen=True)
class Layer:
    """The n nodes at one depth.

    child   int32 [n, sizes[t]]  node at depth t + 1; -1 where illegal
    counts  int64 [n, sizes[t]]  completions after each next choice; 0 where illegal
    """

    child: Ints
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class RelationSpace(StrategySpace):
    """The valid strategies of one problem; `layers` are depths 0 to F - 1, the root is node 0."""

    layers: tuple[Layer, ...]

    def __len__(self) -> int:
        return int(self.layers[0].counts.sum())

    def nodes(self, prefix: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] the nodes of prefixes [n, t] of indices; -1 where no strategy completes one."""
        node = np.zeros(len(prefix), np.int64)
        for layer, choice in zip(self.layers, prefix.T, strict=False):
            node = np.where(node < 0, -1, layer.child[node, choice])
        return node

    def counts(self, prefix: NDArray[np.int64]) -> NDArray[np.int64]:
        prefix = np.atleast_2d(np.asarray(prefix, np.int64))
        node = self.nodes(prefix)
        return np.where(node[:, None] < 0, 0, self.layers[prefix.shape[1]].counts[node])

    def at(self, places: NDArray[np.int64]) -> Codes:
        left, node = places.copy(), np.zeros(len(places), np.int64)
        codes = np.zeros(len(places), self.strides.dtype)
        for layer, stride in zip(self.layers, self.strides[1:], strict=True):
            edges = np.cumsum(layer.counts[node], 1)
            choice = (edges <= left[:, None]).sum(1)
            left -= np.where(choice > 0, np.take_along_axis(edges, choice[:, None] - 1, 1)[:, 0], 0)
            node = layer.child[node, choice].astype(np.int64)
            codes += choice.astype(codes.dtype) * stride
        return codes

    def below(self, prefix: NDArray[np.int64]) -> Codes:
        depth, node = prefix.shape[1], self.nodes(prefix)
        codes: Codes = (prefix @ self.strides[1 : depth + 1])[node >= 0]
        node = node[node >= 0]
        for layer, stride in zip(self.layers[depth:], self.strides[depth + 1 :], strict=True):
            row, choice = np.nonzero(layer.child[node] >= 0)
            codes = codes[row] + choice.astype(codes.dtype) * stride
            node = layer.child[node[row], choice]
        return codes

    @staticmethod
    def of(space: Space) -> "RelationSpace":
        """The same strategies without their list, which may be a part of what the rules leave."""
        children = [level.child for level in space.levels[:-1]]
        children[-1] = np.minimum(children[-1], 0)  # all leaves are one node
        layers = _counted(_merged(children), space.who)
        return RelationSpace(space.family, space.problem, space.device, layers)

    def listed(self) -> Space:
        """The same strategies in a list, for which there must be room."""
        return Space(self.family, self.problem, self.device, self.at(np.arange(len(self))))

    @cached_property
    def plain(self) -> "RelationSpace":
        """What is left where decisions of which no reward of today knows more are as listed
        strategies have them, each where that leaves something."""
        part = self
        for name in self.family.unknown:
            try:
                part = part.given({name: (self.family.implied[name],)})
            except EmptySpace:
                continue
        return part

    def given(self, fixed: Mapping[str, Collection[Choice]]) -> "RelationSpace":
        names = [d.name for d in self.decisions]
        if unknown := fixed.keys() - set(names):
            raise KeyError(f"{self.who}: no decisions {sorted(unknown)}; there are {names}")
        children = [
            np.where([c in fixed.get(d.name, d.choices) for c in d.choices], layer.child, -1)
            for d, layer in zip(self.decisions, self.layers, strict=True)
        ]
        layers = _counted(children, self.who)
        if not layers[0].counts.any():
            raise EmptySpace(f"{self.who}: no strategy is valid with {dict(fixed)}")
        return replace(self, layers=layers)


def relate(family: Family, problem: Problem, device: Device) -> RelationSpace:
    """All valid strategies, in 1 to 10 ms for today's families.

    EmptySpace names a rule that refuses what the rules before it leave, where that is everything;
    ValueError where a rule reads what it does not declare, or where rules that read many decisions
    together leave too many prefixes apart.
    """
    build = _Diagram(family, problem, device)
    children = build.children(family.rules)
    if not children:
        few, many = 0, len(family.rules)  # rules that leave some strategies, and none
        while many - few > 1:
            half = (few + many) // 2
            few, many = (half, many) if build.children(family.rules[:half]) else (few, half)
        raise EmptySpace(
            f"{build.who}: no strategy is valid for {dict(problem.axes)}; "
            f"the last to refuse was: {family.rules[few].sentence}"
        )
    return RelationSpace(family, problem, device, _counted(_merged(children), build.who))


@dataclass(frozen=True, eq=False)
class _Automaton:
    """Rules as transitions: steps[i] int32 [states, sizes[reads[i]]] the next state, -1 refused."""

    reads: tuple[int, ...]
    steps: tuple[Ints, ...]


@dataclass
class _Front:
    """The distinct states after some decisions: a row a state, a column for what each depends on.

    Columns are states of an `_Automaton` that has begun, or the choices of a decision (its place)
    that a `Rule` without one has read.
    """

    columns: dict[_Automaton | int, Ints]
    parent: NDArray[np.int64]
    choice: Ints

    def keep(self, rows: NDArray[Any]) -> None:
        self.columns = {key: column[rows] for key, column in self.columns.items()}
        self.parent, self.choice = self.parent[rows], self.choice[rows]


class _Diagram:
    """The diagram of one workload, decision by decision."""

    def __init__(self, family: Family, problem: Problem, device: Device) -> None:
        self.decisions = family.decisions
        self.names = [d.name for d in family.decisions]
        self.sizes = sizes_of(family)
        self.problem, self.device = problem, device
        self.who = f"{family.name} {problem.definition} on {device.name}"

    def children(self, rules: Sequence[Rule]) -> list[Ints]:
        """The children of the nodes at each depth, dead ends among them; empty where all are."""
        small = [r for r in rules if math.prod(self.sizes[i] for i in self.reads(r)) <= TABLE]
        waiting = [r for r in rules if r not in small]
        automata = []
        for reads, table in self.joined([(self.reads(r), self.table(r, {}, 1)) for r in small]):
            automaton, roots = _compiled(reads, table)
            if roots[0] < 0:
                return []
            automata.append(automaton)
        root = np.zeros(1, np.int64)
        front, children = _Front({}, root, root.astype(np.int32)), list[Ints]()
        for depth, size in enumerate(self.sizes):
            nodes = len(front.choice)
            if nodes * size > EDGES:
                raise ValueError(
                    f"{self.who}: {nodes} kinds of prefixes wait for {self.names[depth]!r}, of "
                    f"{EDGES // size} at most: rules that read fewer decisions, or next to each "
                    "other, leave fewer"
                )
            front = self.taken(front, depth, automata, waiting)
            automata += self.begin(front, depth, waiting)
            first, back = _classes(list(front.columns.values()), len(front.choice))
            if not len(first):
                return []
            children.append(np.full((nodes, size), -1, np.int32))
            children[-1][front.parent, front.choice] = back
            front.keep(first)
        return children

    def reads(self, rule: Rule) -> tuple[int, ...]:
        """The places of the decisions that a rule reads, in order."""
        bound_at(rule, self.names)
        return tuple(sorted(self.names.index(name) for name in rule.reads))

    def table(self, rule: Rule, decided: Mapping[int, Ints], rows: int) -> NDArray[np.bool_]:
        """What a rule says after prefixes [rows], by the choices of what it reads further on:
        bool [rows, sizes of these]. `decided` are the choices [rows] of what it has read."""
        left = [i for i in self.reads(rule) if i not in decided]
        shape = (rows, *(self.sizes[i] for i in left))
        grid = dict(zip(left, np.indices(shape, sparse=True)[1:], strict=True))
        ones = (1,) * len(left)
        grid |= {i: column.reshape(-1, *ones) for i, column in decided.items()}
        taken = [grid[self.names.index(name)] for name in rule.reads]
        return np.broadcast_to(
            verdict(rule, taken, self.decisions, self.problem, self.device), shape
        )

    def joined(
        self, tables: list[tuple[tuple[int, ...], NDArray[np.bool_]]]
    ) -> list[tuple[tuple[int, ...], NDArray[np.bool_]]]:
        """Fewer tables that say the same together; of [1, sizes of what is read]."""
        out: list[tuple[tuple[int, ...], NDArray[np.bool_]]] = []
        for reads, table in sorted(tables, key=lambda row: -row[1].size):
            for at, (others, other) in enumerate(out):
                both = tuple(sorted({*reads, *others}))
                if math.prod(self.sizes[i] for i in both) <= max(JOINED, other.size):
                    wide = [
                        t.reshape(1, *(self.sizes[i] if i in r else 1 for i in both))
                        for r, t in ((reads, table), (others, other))
                    ]
                    out[at] = both, wide[0] & wide[1]
                    break
            else:
                if not table.all():
                    out.append((reads, table))
        return out

    def taken(
        self, front: _Front, depth: int, automata: Sequence[_Automaton], waiting: Sequence[Rule]
    ) -> _Front:
        """Every choice of the next decision after every state, those refused left out."""
        nodes, size = len(front.choice), self.sizes[depth]
        parent = np.repeat(np.arange(nodes), size)
        after = _Front({}, parent, np.tile(np.arange(size, dtype=np.int32), nodes))
        reading = [a for a in automata if depth in a.reads]
        for automaton in reading:
            begun = front.columns.get(automaton, np.zeros(nodes, np.int32))
            step = automaton.steps[automaton.reads.index(depth)]
            after.columns[automaton] = step[begun[after.parent], after.choice]
            after.keep(np.flatnonzero(after.columns[automaton] >= 0))
            if depth == automaton.reads[-1]:
                del after.columns[automaton]
        stay = {key: column for key, column in front.columns.items() if key not in reading}
        after.columns |= {key: column[after.parent] for key, column in stay.items()}
        if any(depth in self.reads(rule) for rule in waiting):
            after.columns[depth] = after.choice
        return after

    def begin(self, front: _Front, depth: int, waiting: list[Rule]) -> list[_Automaton]:
        """Automata of the waiting rules whose tables are small now; `front` keeps what they allow
        and `waiting` the other rules."""
        begun = []
        for rule in [r for r in waiting if depth in self.reads(r)]:
            left = tuple(i for i in self.reads(rule) if i > depth)
            entries, most = math.prod(self.sizes[i] for i in left), EACH * len(front.choice)
            if left and entries > max(TABLE, most):
                continue
            read = {i: front.columns[i] for i in self.reads(rule) if i <= depth}
            first, back = _classes(list(read.values()), len(front.choice))
            if left and entries * len(first) > max(TABLE, most):
                continue
            table = self.table(rule, {i: c[first] for i, c in read.items()}, len(first))
            automaton, roots = _compiled(left, table)
            front.columns[automaton] = roots[back]
            front.keep(np.flatnonzero(roots[back] >= 0))
            if left:
                begun.append(automaton)
            else:
                del front.columns[automaton]
            waiting.remove(rule)
        needed = {i for rule in waiting for i in self.reads(rule)}
        for place in [k for k in front.columns if isinstance(k, int) and k not in needed]:
            del front.columns[place]
        return begun


def _compiled(reads: tuple[int, ...], table: NDArray[np.bool_]) -> tuple[_Automaton, Ints]:
    """The least automaton of a table [rows, sizes of reads], and the state [rows] in which each row
    begins; -1 where it refuses all."""
    state, steps = np.where(table, 0, -1).astype(np.int32), []
    for size in reversed(table.shape[1:]):
        step, state = _distinct(state.reshape(-1, size))
        steps.append(step)
    return _Automaton(reads, tuple(steps[::-1])), state.reshape(-1)


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The distinct rows that are not -1 throughout, and which of them each row is, or -1."""
    live = np.flatnonzero((rows >= 0).any(1))
    first, back = _classes(list(rows[live].T), len(live))
    which = np.full(len(rows), -1, np.int32)
    which[live] = back
    return rows[live[first]], which


def _classes(columns: Sequence[Ints], rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of rows that are equal in all columns, of values from -1: one of each, and which each is."""
    key, span = np.zeros(rows, np.int64), 1
    for column in columns:
        width = int(column.max(initial=-1)) + 2
        if span * width >= 2**62:
            distinct, key = np.unique(key, return_inverse=True)
            span = len(distinct)
        key, span = key * width + (column + 1), span * width
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return first, back


def _merged(children: list[Ints]) -> list[Ints]:
    """The least diagram: nodes with the same completions are one, those with none are gone."""
    below, out = np.zeros(1, np.int32), []
    for child in reversed(children):
        rows, below = _distinct(np.where(child < 0, -1, below[child]))
        out.append(rows)
    return out[::-1]


def _counted(children: Sequence[Ints], who: str) -> tuple[Layer, ...]:
    """Layers of children; what has no completion is no child. ValueError beyond 64 bits."""
    below, about, out = np.ones(1, np.int64), np.ones(1), list[Layer]()
    for child in reversed(children):
        legal = (child >= 0) & (below[child] > 0)
        counts = np.where(legal, below[child], 0)
        about = np.where(legal, about[child], 0.0).sum(1)
        if about.max(initial=0.0) >= 2.0**62:
            raise ValueError(f"{who}: there are {about.max():.2g} strategies, of 2^62 at most")
        below = counts.sum(1)
        out.append(Layer(np.where(legal, child, -1).astype(np.int32), counts))
    return tuple(out[::-1])
