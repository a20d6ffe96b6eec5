"""What policy and reward say at sizes: candidates, predicted times, legality; kept in a file.

A look is one size whose whole space was scored: its candidates are the reward's best and draws of
the policy. Looks are appended to a state file as they are made, so that a run that was cut short
goes on where it stopped.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Problem, Strategy
from ptxflow.env.reward import Reward
from ptxflow.env.space import Space, sizes_of, strides_of
from ptxflow.env.tasks.arguments import UsageError, find_family, find_problem, find_space
from ptxflow.env.tasks.definition import load, names
from ptxflow.eval.sample.ranges import Ranges, Sizes
from ptxflow.eval.sample.selection import POLICY, REWARD
from ptxflow.eval.sample.widened import AGAIN, AROUND, around, seldom, varied, widened

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Scorer = Callable[[Space], Floats]  # [n] log-probabilities of the policy
Drawer = Callable[[Floats], Ints]  # k places of them, drawn
TOP = 256  # of the reward's best strategies at a size: what serves one well may serve many
WIDER = 96  # of these from the wide space, where candidates are


@dataclass(frozen=True)
class Look:
    """A size, the best seconds of its space by the reward, and its candidates' codes.

    drawn  those of them that the policy drew
    best   those that the reward ranks best, in this order
    """

    sizes: Sizes
    seconds: float
    drawn: tuple[int, ...]
    best: tuple[int, ...]

    @property
    def codes(self) -> tuple[int, ...]:
        return (*self.drawn, *self.best)


@dataclass(frozen=True)
class Judge:
    """A family's strategies at any size of the ranges, by the reward."""

    family: Family
    device: Device
    ranges: Ranges
    reward: Reward
    chained: tuple[str, ...] | None = None
    _said: dict[str, tuple[Ints, Floats]] = field(default_factory=dict, compare=False)

    def problem(self, sizes: Mapping[str, int]) -> Problem:
        found = find_problem(self.ranges.definition, self.ranges.axes(sizes))[1]
        return replace(found, chained=self.chained)

    @property
    def listed(self) -> Family:
        """The family of the listed space, where its own is the wide one."""
        return find_family(self.ranges.definition)

    def space(self, sizes: Mapping[str, int]) -> Space:
        """All listed strategies that are legal there; UsageError where none is."""
        return find_space(self.listed, self.problem(sizes), self.device)

    def some(self, sizes: Mapping[str, int], codes: Ints) -> Space:
        """The strategies with these codes, legal there or not."""
        return Space(self.family, self.problem(sizes), self.device, codes)

    def legal(self, sizes: Mapping[str, int], codes: Ints) -> NDArray[np.bool_]:
        """[n] whether strategies are legal there."""
        space = self.some(sizes, codes)
        fields, found = space.fields(), np.ones(len(codes), bool)
        for rule in self.family.rules:
            found &= np.asarray(rule.legal(fields, space.problem, self.device), bool)
        return found

    def seconds(self, sizes: Mapping[str, int], codes: Ints) -> Floats:
        """[n] seconds of strategies there by the reward; infinite where they are not legal. What
        was asked before is remembered."""
        none = np.zeros(0, np.int64), np.zeros(0)
        known, said = self._said.get(_name(sizes), none)
        if len(new := np.setdiff1d(codes, known)):
            both = np.append(known, new)
            order = np.argsort(both)
            known, said = both[order], np.append(said, self._seconds(sizes, new))[order]
            self._said[_name(sizes)] = known, said
        return said[np.searchsorted(known, codes)]

    def _seconds(self, sizes: Mapping[str, int], codes: Ints) -> Floats:
        found = np.full(len(codes), np.inf)
        legal = np.flatnonzero(self.legal(sizes, codes))
        space = self.some(sizes, codes[legal])
        if len(legal):
            tflops = np.nan_to_num(self.reward.tflops(space, space.codes))
            known = tflops > 0
            found[legal[known]] = space.problem.flops / tflops[known] / 1e12
        return found

    def look(self, sizes: Sizes, score: Scorer, draw: Drawer, source: str) -> Look:
        """Score the whole space of a size."""
        space = self.space(sizes)
        drawn = draw(score(space)) if source != REWARD else np.zeros(0, np.int64)
        tflops = np.nan_to_num(self.reward.tflops(space, space.codes))
        order = np.argsort(-tflops, kind="stable")[: 0 if source == POLICY else TOP]
        least = float(space.problem.flops / tflops.max() / 1e12)  # of the listed ones
        own, best = (space.codes[places] for places in (drawn, order))
        if self.family.decisions != self.listed.decisions:
            own, best = (widened(codes, self.listed) for codes in (own, best))
            best = self._with_wider(sizes, np.append(best[:AROUND], own), best)
        return Look(sizes, least, tuple(own.tolist()), tuple(best.tolist()))

    def _with_wider(self, sizes: Sizes, near: Ints, best: Ints) -> Ints:
        """The best listed strategies and the best wide ones, around some or seldom, in turn."""
        rest = seldom(self.family, self.problem(sizes), self.device)
        found = np.union1d(around(near, self.listed, 2), rest)
        for turns in (1, 0):
            space = self.some(sizes, found[self.legal(sizes, found)])
            tflops = np.nan_to_num(self.reward.tflops(space, space.codes))
            load = self.family.demand(space.fields(), space.problem, self.device)
            n = len(space.codes)
            loads = (np.broadcast_to(load.blocks, n), np.broadcast_to(load.mma_cycles, n))
            kept = varied(loads, tflops, AGAIN if turns else WIDER)
            found = around(space.codes[kept], self.listed, turns) if turns else space.codes[kept]
        both = itertools.chain(*itertools.zip_longest(found.tolist(), best[: TOP - WIDER].tolist()))
        return np.array(list(dict.fromkeys(c for c in both if c is not None)), np.int64)

    def load(self, sizes: Mapping[str, int], codes: Ints) -> Floats:
        """[n, 3] what jumps at the edges of tiles and waves: log2 of the tiles that the busiest SM
        works through one after the other, how full these waves are, and log2 of what tiles compute
        over what is asked for, up to a constant of the strategy."""
        space, n = self.some(sizes, codes), len(codes)
        load = self.family.demand(space.fields(), space.problem, self.device)
        tiles = np.broadcast_to(np.asarray(load.blocks * load.tiles, float), n)
        room = self.device.sms * np.broadcast_to(np.maximum(load.resident, 1.0), n)
        rounds = np.ceil(load.blocks / room) * load.tiles
        cycles = tiles * load.steps * np.maximum(load.mma_cycles, 1.0)
        columns = np.log2(rounds), tiles / room / rounds, np.log2(cycles / space.problem.flops)
        return np.stack([np.broadcast_to(c, n) for c in columns], axis=1)

    def alike(self, name: str) -> bool:
        """Whether a definition of this name asks for the same but for element types and epilogues:
        its constants, and decisions that are as many."""
        if name not in names():
            return False
        other, own = load(name), self.ranges.definition
        return (
            other.const_axes == own.const_axes
            and other.var_axes == own.var_axes
            and find_family(other).decisions == self.listed.decisions
        )

    def code(self, strategy: Strategy) -> int | None:
        """The code of a strategy that may be illegal anywhere; None where today's family has it
        not."""
        try:
            chosen = self.family.choices(strategy)
            row = [d.choices.index(chosen[d.name]) for d in self.family.decisions]
        except (KeyError, ValueError):
            return None
        return int(np.dot(row, strides_of(sizes_of(self.family))[1:]))


def corners(low: Mapping[str, int], high: Mapping[str, int]) -> Iterator[Sizes]:
    """The corners of a cell, both ends included."""
    ends = [sorted({low[n], high[n]}) for n in low]
    return (dict(zip(low, row, strict=True)) for row in itertools.product(*ends))


class State:
    """Looks of one run, appended to a file that the end of the run removes.

    A file of another run, by its digest, is begun anew; a last line that was cut off is passed
    over. UsageError where the file cannot be written.
    """

    def __init__(self, path: Path, run: str):
        self.path, self.looks = path, dict[str, Look]()
        try:
            lines = path.read_text().splitlines() if path.exists() else []
            rows = [row for line in lines if (row := _row(line)) is not None]
            if rows[:1] == [{"run": run}]:
                made = [Look(**{k: _tuple(v) for k, v in row.items()}) for row in rows[1:]]
                self.looks = {_name(look.sizes): look for look in made}
            kept = [{"run": run}, *map(vars, self.looks.values())]
            path.write_text("".join(json.dumps(row) + "\n" for row in kept))
            self._file = path.open("a")
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from None

    def get(self, sizes: Sizes, make: Callable[[], Look]) -> Look:
        """The look at a size: as it was made before, or made now and kept."""
        name = _name(sizes)
        if name not in self.looks:
            self.looks[name] = make()
            self._file.write(json.dumps(vars(self.looks[name])) + "\n")
            self._file.flush()
        return self.looks[name]

    def remove(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


def _row(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _name(sizes: Mapping[str, int]) -> str:
    return json.dumps(sizes, sort_keys=True)


def matrix(judge: Judge, places: Sequence[Sizes], codes: Ints) -> Floats:
    """[places, codes] seconds by the reward."""
    return np.array([judge.seconds(sizes, codes) for sizes in places])
