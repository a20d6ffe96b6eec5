"""A kernel library: a few kernels chosen for a range of sizes, and which of them serves which.

Sizes are looked at, candidates of all of them are scored at each, few are chosen (`portfolio`) and
built, and every cell of the ranges is given to the member that is fastest there. A member serves a
cell only where it is legal at the sizes in it and is the same text there. Where a cell is left
without a member, or a member is refused or wrong, the choice is made again with what was learnt.
"""

import itertools
import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.command import BadInput
from ptxflow.compiler.backend import cache
from ptxflow.compiler.compilation import CompiledKernel, prepare
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.launch import Launch
from ptxflow.eval.bench.candidates import compile_all
from ptxflow.eval.sample.library_timing import GpuTiming, spread
from ptxflow.eval.sample.looks import Floats, Ints, Judge, Look, corners, matrix
from ptxflow.eval.sample.pipeline import emulate_all
from ptxflow.eval.sample.portfolio import Grid, choose, mean_loss, merged
from ptxflow.eval.sample.ranges import Ranges, Sizes, between, bounds, looks
from ptxflow.eval.verify.emulation import Emulation

LOOKS, CELLS = 64, 1024  # at most, before edges and gaps
BETWEEN = 256  # sizes at most at which candidates alone are scored
EDGES = 16  # looks more at the edges of waves
ROUNDS = 8  # of choosing anew
TOGETHER = 3  # choices that are timed together, before the last is taken
MORE, CONTEND = 64, 1.3  # sizes between looks, where another kernel is as near to the best
EVERY = 20_000  # sizes that are put before the rules one by one; of more, some of each cell
WITHIN = 4  # sizes inside a cell, and cells of a member, that are tried besides the outermost
HELD_OUT = 24  # sizes drawn at random, at which the finished library is judged

Looking = Callable[[Sizes], Look]
Cell = tuple[Sizes, Sizes]  # its least and largest sizes


@dataclass(frozen=True)
class Served:
    """A size, which member serves it, its seconds, and the least that is known there."""

    sizes: Sizes
    member: int
    seconds: float
    best: float


@dataclass(frozen=True)
class Library:
    """What was chosen. `bounds` and `cells` are the dispatch: upper ends by free axis, and members
    [cells of each axis]; `costs` the mean loss of portfolios of 1, 2, ... kernels."""

    ranges: Ranges
    device: Device
    members: tuple[CompiledKernel, ...]
    emulations: tuple[Emulation | None, ...]
    bounds: Mapping[str, tuple[int, ...]]
    cells: Grid
    looked: tuple[Served, ...]
    held_out: tuple[Served, ...]
    costs: tuple[float, ...]
    candidates: int
    refused: tuple[str, ...]

    def member_at(self, sizes: Mapping[str, int]) -> int:
        place = (np.searchsorted(ends, sizes[n]) for n, ends in self.bounds.items())
        return int(self.cells[tuple(place)])


@dataclass(frozen=True)
class Choice:
    """Candidates' codes, the places among them of those that are chosen, and the dispatch: upper
    ends by free axis, and for each cell which of the chosen serves it."""

    codes: Ints
    chosen: tuple[int, ...]
    ends: Mapping[str, tuple[int, ...]]
    cells: Grid

    def code_at(self, sizes: Mapping[str, int]) -> int:
        """The code of the strategy that serves these sizes."""
        cell = tuple(np.searchsorted(ends, sizes[n]) for n, ends in self.ends.items())
        return int(self.codes[self.chosen[int(self.cells[cell])]])


def loss(rows: Sequence[Served]) -> tuple[float, float]:
    """How much slower than the best that is known: in the geometric mean, and at most; 0 is as
    fast."""
    logs = [math.log(row.seconds / row.best) for row in rows]
    return math.expm1(sum(logs) / len(logs)), math.expm1(max(logs))


@dataclass
class Search:
    """One choice of a library. `look` scores a size; `timing`, where there is a GPU, replaces what
    the reward says of candidates by what was measured."""

    judge: Judge
    look: Looking
    most: int
    emulate: bool = True
    jobs: int | None = None
    seed: int = 0
    timing: GpuTiming | None = None
    looked: list[Look] = field(default_factory=list)
    more: list[Sizes] = field(default_factory=list)  # sizes that are measured but not looked at
    built: dict[int, CompiledKernel] = field(default_factory=dict)
    emulations: dict[int, Emulation] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def run(self) -> Library:
        """BadInput where no choice serves every size of the ranges."""
        return self._library(self.choice())

    def choice(self) -> Choice:
        """What serves which; BadInput where no choice serves every size of the ranges."""
        ranges = self.judge.ranges
        self._look_at(looks(ranges, LOOKS), "look")
        if self.timing:
            self.more = self._random_sizes(len(self.looked), len(self.looked))
        else:
            codes, times = self._scored()
            chosen = self._choices(codes, times, [self.most])[0]
            self._look_at(self._edges(codes[list(chosen)]), "look at edges")
        left: list[Cell] = []
        timed: list[set[int]] = []  # together: the choice is among these in the end
        for _ in range(ROUNDS):
            codes, times = self._scored()
            if len(timed) == TOGETHER:
                proven = np.isin(codes, list(set().union(*timed)))
                codes, times = codes[proven], times[:, proven]
            chosen = self._choices(codes, times, [self.most])[0]
            if not self._build(codes, times, chosen):
                continue
            now = {*codes[list(chosen)].tolist()}
            if self.timing and now not in timed and len(timed) < TOGETHER:
                timed.append(now)
                self.timing.together(self._places(), codes[list(chosen)])
                continue  # choose by what that teaches
            ends, cells, left = self._dispatch(codes[list(chosen)])
            if not left:
                return Choice(codes, chosen, ends, cells)
            self._look_at([high for _, high in left[:EDGES]], "look where no kernel serves")
        low, high = left[0] if left else ({}, {})
        why = f"none serves {low} to {high}" if left else "; ".join(self.refused.values())
        raise BadInput(
            f"{ranges.definition.name}: no {self.most} kernels serve {ranges}: {why}; "
            "narrow the ranges, or give more --members"
        )

    def _look_at(self, places: Sequence[Sizes], what: str) -> None:
        known = [look.sizes for look in self.looked]
        fresh = [sizes for sizes in places if sizes not in known]
        self.looked += map(self.look, tqdm(fresh, desc=what, unit="size", disable=not fresh))

    def _places(self) -> list[Sizes]:
        """Sizes that kernels are chosen by: the looks and, measured alone, others."""
        known = [look.sizes for look in self.looked]
        return [*known, *(sizes for sizes in self.more if sizes not in known)]

    def _scored(self) -> tuple[Ints, Floats]:
        """The codes of all candidates, or where they are measured of those that contend, and their
        times at all places."""
        every = {code for look in self.looked for code in look.codes}
        codes = np.array(sorted(every - self.refused.keys()), np.int64)
        if self.timing and len(codes):
            codes, times = self.timing(self._places(), codes)
            self.refused |= self.timing.faulty
            usable = np.isfinite(times).any(0) & ~np.isin(codes, list(self.refused))
            return codes[usable], times[:, usable]
        if not len(codes):
            raise BadInput(f"every candidate was refused: {next(iter(self.refused.values()))}")
        return codes, matrix(self.judge, self._places(), codes)

    def _times(self, places: Sequence[Sizes], codes: Ints) -> Floats:
        """[places, codes] seconds, by measurement or the reward."""
        if self.timing:
            return self.timing.times(places, codes)
        return matrix(self.judge, places, codes)

    def _choices(self, codes: Ints, times: Floats, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Portfolios of so many kernels, by the places and by sizes between them."""
        if not self.timing:
            more = matrix(self.judge, between(self.judge.ranges, BETWEEN), codes)
            times = np.vstack([times, more])
        return [choose(times, number) for number in numbers]

    def _ends(self) -> dict[str, list[int]]:
        return bounds(self.judge.ranges, CELLS, looks(self.judge.ranges, LOOKS))

    def _edges(self, codes: Ints) -> list[Sizes]:
        """Sizes on both sides of where the busiest SM of these kernels gets one more tile, the
        first of a few; along one axis, where the others have one size."""
        ends = self._ends()
        if sum(len(values) > 1 for values in ends.values()) != 1:
            return []
        places = [dict(zip(ends, row, strict=True)) for row in itertools.product(*ends.values())]
        rounds = np.exp2([self.judge.load(sizes, codes)[:, 0] for sizes in places]).round()
        legal = np.array([self.judge.legal(sizes, codes) for sizes in places])
        both = legal[1:] & legal[:-1]
        steps = both & (rounds[1:] > rounds[:-1]) & (rounds[:-1] <= 3)
        at = np.flatnonzero(steps.any(1))
        return [places[i + side] for i in at[: EDGES // 2] for side in (0, 1)]

    def _build(self, codes: Ints, times: Floats, chosen: Sequence[int]) -> bool:
        """Compile and emulate the chosen; False where one is refused or wrong."""
        jobs: dict[int, tuple[Problem, Strategy]] = {}
        for column in chosen:
            if (code := int(codes[column])) not in self.built:
                home = self._places()[int(np.flatnonzero(np.isfinite(times[:, column]))[-1])]
                problem = self.judge.problem(home)
                strategy = self.judge.some(home, codes[[column]]).strategy(code)
                jobs[code] = problem, strategy
        made = compile_all(list(jobs.values()), self.judge.device, self.jobs) if jobs else []
        for code, outcome in zip(jobs, made, strict=True):
            if isinstance(outcome, CompiledKernel):
                self.built[code] = outcome
            else:
                text = f"{type(outcome).__name__}: {outcome}"
                self.refused[code] = f"{jobs[code][1].key}: {text}"
        fresh = {c: self.built[c] for c in jobs if c in self.built and c not in self.emulations}
        if self.emulate and fresh:
            runs = emulate_all(list(fresh.values()), self.jobs)
            for code, kernel in fresh.items():
                self.emulations[code] = run = runs[kernel.strategy.key]
                if not run.right:
                    self.refused[code] = f"{kernel.strategy.key}: emulated: {run}"
        return not any(int(codes[c]) in self.refused for c in chosen)

    def _dispatch(self, codes: Ints) -> tuple[dict[str, tuple[int, ...]], Grid, list[Cell]]:
        """Upper ends and members of cells, and the cells that no member serves."""
        ends = self._ends()
        grid = list(_cells(self.judge.ranges, ends))
        shape = tuple(map(len, ends.values()))
        legal = self._legal(grid, codes)
        times = np.where(legal, self._cell_times(grid, codes), np.inf)
        if self.timing and (places := self._contested(grid, times)):
            self.timing.together(places, codes, share=1.0)
            self.more += places
            times = np.where(legal, self._cell_times(grid, codes), np.inf)
        while (left := ~np.isfinite(times).any(1)).sum() == 0:
            cells = times.argmin(1)
            differ = self._other_text(grid, codes, cells)
            if not differ:
                kept, fewer = merged(list(ends.values()), cells.reshape(shape))
                return dict(zip(ends, kept, strict=True)), fewer, []
            for place, member in differ:
                times[place, member] = np.inf
        return {}, np.zeros(shape, np.int64), [grid[i] for i in np.flatnonzero(left)]

    def _legal(self, grid: Sequence[Cell], codes: Ints) -> NDArray[np.bool_]:
        """[cells, codes] whether strategies are legal at the sizes of a cell: at every size of
        ranges that have few, else at its corners and some inside."""
        rng = np.random.default_rng(self.seed)
        number = math.prod(high - low + 1 for low, high in self.judge.ranges.free.values())
        out = []
        for low, high in tqdm(grid, desc="rules", unit="cell", leave=False):
            if number <= EVERY:
                spans = (range(low[n], high[n] + 1) for n in low)
                inside = [dict(zip(low, row, strict=True)) for row in itertools.product(*spans)]
            else:
                inside = [
                    {n: int(rng.integers(low[n], high[n] + 1)) for n in low} for _ in range(WITHIN)
                ]
                inside += corners(low, high)
            out.append(np.all([self.judge.legal(sizes, codes) for sizes in inside], axis=0))
        return np.array(out)

    def _contested(self, grid: Sequence[Cell], times: Floats) -> list[Sizes]:
        """The largest sizes of cells, not looked at, where the second of these kernels is near the
        best: at most MORE, spread over the ranges."""
        known = self._places()
        first = np.sort(times, axis=1)[:, :2]
        near = first[:, -1] < CONTEND * first[:, 0] if times.shape[1] > 1 else np.zeros(len(grid))
        found = [high for (_, high), close in zip(grid, near, strict=True)
                 if close and high not in known]  # fmt: skip
        return [found[i] for i in spread(len(found))[:MORE]]

    def _cell_times(self, grid: Sequence[Cell], codes: Ints) -> Floats:
        """[cells, codes] seconds: of a cell's largest sizes and its middle, the geometric mean."""
        middles = [{n: round(math.sqrt(low[n] * high[n])) for n in low} for low, high in grid]
        ends = self._times([high for _, high in grid], codes)
        return np.asarray(np.sqrt(ends * self._times(middles, codes)))

    def _other_text(self, grid: Sequence[Cell], codes: Ints, cells: Ints) -> list[tuple[int, int]]:
        """Cells and their members that another text, or none, is made for there: of the outermost
        and some others of each member's cells; of all, where one differs."""
        rng = np.random.default_rng(self.seed)
        found = []
        for member, code in enumerate(codes):
            own = np.flatnonzero(cells == member)
            some = {*own[:1], *own[-1:], *rng.choice(own, min(WITHIN, len(own)), replace=False)} \
                if len(own) else set()  # fmt: skip
            if any(self._differs(grid[i], int(code)) for i in some):
                found += [(int(i), member) for i in own if self._differs(grid[i], int(code))]
        return found

    def _differs(self, cell: Cell, code: int) -> bool:
        kernel = self.built[code]
        return any(
            text_of(self.judge.problem(sizes), kernel.strategy, kernel.device)
            != (kernel.ptx, kernel.launch)
            for sizes in corners(*cell)
        )

    def _library(self, choice: Choice) -> Library:
        """Members in the order in which they first serve; those that serve nothing are left out."""
        codes, order = choice.codes, list(dict.fromkeys(choice.cells.ravel().tolist()))
        place = np.full(len(choice.chosen), -1)
        place[order] = np.arange(len(order))
        kept = [choice.chosen[i] for i in order]
        times = self._times(self._places(), codes)
        least = times.min(1) if self.timing else np.array([look.seconds for look in self.looked])
        members = [self.built[int(codes[c])] for c in kept]
        library = Library(
            ranges=self.judge.ranges, device=self.judge.device, members=tuple(members),
            emulations=tuple(self.emulations.get(int(codes[c])) for c in kept),
            bounds=choice.ends, cells=place[choice.cells], looked=(), held_out=(),
            costs=tuple(
                math.expm1(mean_loss(times, some, least))
                for some in self._choices(codes, times, range(1, self.most + 1))
            ),
            candidates=len(codes), refused=tuple(self.refused.values()),
        )  # fmt: skip
        looked = []
        for row, sizes in enumerate(self._places()):
            member = library.member_at(sizes)
            looked.append(Served(sizes, member, times[row, kept[member]], least[row]))
        drawn = self._drawn(library, codes[kept])
        return Library(**vars(library) | {"looked": tuple(looked), "held_out": drawn})

    def _random_sizes(self, count: int, salt: int) -> list[Sizes]:
        """Sizes drawn at random over the octaves, which are no places yet."""
        rng, found = np.random.default_rng([self.seed, salt]), list[Sizes]()
        known = self._places()
        for _ in range(count):
            sizes = self.judge.ranges.draw(rng)
            if sizes not in known and sizes not in found:
                found.append(sizes)
        return found

    def _drawn(self, library: Library, codes: Ints) -> tuple[Served, ...]:
        """Sizes drawn at random over the octaves, by the reward: the member that serves each
        against the best of its whole space; none of these where times are measured, of which the
        reward is no judge."""
        out, found = [], self._random_sizes(HELD_OUT, HELD_OUT)
        for sizes in tqdm(found, desc="judge", unit="size", disable=not found):
            member = library.member_at(sizes)
            seconds = float(self.judge.seconds(sizes, codes)[member])
            if not math.isfinite(seconds):
                key = library.members[member].strategy.key
                raise BadInput(f"{key} is not legal at {sizes}, in the midst of sizes where it is: "
                               "narrow the ranges")  # fmt: skip
            if not self.timing:
                out.append(Served(sizes, member, seconds, self.look(sizes).seconds))
        return tuple(out)


def text_of(problem: Problem, strategy: Strategy, device: Device) -> tuple[str, Launch] | None:
    """What a strategy compiles to for a problem; None where it is refused."""
    try:
        draft = prepare(problem, strategy, device, cache.check)
    except CompileError:
        return None
    return draft.ptx, draft.launch


def _cells(ranges: Ranges, ends: Mapping[str, Sequence[int]]) -> Iterator[Cell]:
    """The cells in row-major order."""
    spans = [
        [({n: low}, {n: high}) for low, high in zip([ranges.free[n][0], *(e + 1 for e in upper)],
                                                    upper, strict=False)]
        for n, upper in ends.items()
    ]  # fmt: skip
    for row in itertools.product(*spans):
        low, high = (dict(ChainMap(*(part[side] for part in row))) for side in (0, 1))
        yield {n: low[n] for n in ends}, {n: high[n] for n in ends}
