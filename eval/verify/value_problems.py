"""The problems that mutants of a kernel's values are emulated on.

All have the kernel's own text: a first one, of which every output is checked, those of the family
that cover more of the text, and a larger random one for what these do not kill. They are found
once and kept on disk; where only some clusters run, what they write is learnt from the kernel.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ptxflow.compiler.backend import cache
from ptxflow.compiler.backend.ptx import digest, write
from ptxflow.compiler.compilation import Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.emulator.coverage import OPEN, skeleton
from ptxflow.compiler.family import PartialSums, Problem, Size, Strategy, Trial
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch, evaluate
from ptxflow.eval.verify import trials
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import Tensors
from ptxflow.eval.verify.draws import FOLLOWING
from ptxflow.eval.verify.trials import Attempt, Outcome, attempt, built

SIZES = 2, 3  # times an axis of the trial, at the least and the most
DRAWS = 6  # of a larger problem, on which the kernel itself must be right
COVERING = 1_000_000  # instructions after which no further problem is sought
SOON = 120_000  # instructions that the first problem, and a larger one, may take
CLUSTERS = (12, 6, 3, 2)  # of these two, where not all, so many: as end soon
#: times the kernel's own instructions, those of a larger problem, and so many more: it does not end
LONGER, SLOWEST, GRACE = 2, 8, 2000
NEAR = 8  # clusters of the first problem, one behind the other
QUICK = 1, 1.8  # clusters of a problem that comes first, where that is so many times as quick
LIMITS = SIZES, DRAWS, COVERING, SOON, CLUSTERS, tuple(OPEN)


@dataclass(frozen=True)
class Known:
    """A problem on which the kernel is right, and the instructions that it takes there."""

    attempt: Attempt
    instructions: int
    data: str  # digest of what goes in and is right

    @property
    def name(self) -> str:
        """Of all that a verdict depends on."""
        return cache.key(self.attempt.name, self.data)[:16]


@dataclass
class Bench:
    """A kernel, `lowered` for `shape`, and the problems that have its text, those that kill most in
    the shortest time first."""

    job: Job
    device: Device
    shape: Problem
    lowered: Statement
    text: str
    known: list[Known]
    larger: Known | None = None
    kernel: str = ""  # the digest of its PTX, whatever its registers are called
    kills: Counter[Attempt] = field(default_factory=Counter)
    written: dict[Attempt, trials.Masks] = field(default_factory=dict)
    beside: Sequence[Known] | None = None
    proven: set[object] = field(default_factory=set)
    over: dict[tuple[Attempt, int], Tensors] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the kernel and its problems."""
        names = (k.name for k in (*self.known, self.larger) if k)
        return cache.key(self.kernel, *names, *(g.name for g in self.left_out()))[:16]

    def ordered(self) -> list[Known]:
        """By what a problem cost for each mutant that it killed."""
        return sorted(self.known, key=lambda k: k.instructions / (1 + self.kills[k.attempt]))

    def run(self, text: str, known: Known) -> Outcome:
        """A mutant's text on a problem; a kill is counted. A run that takes much longer than the
        kernel does not end. What some clusters leave unwritten is known of the larger problem, and
        of the first, which stands for one that trials run whole."""
        given = known.attempt
        if given.sums and self._alike(text)[1:] == [True]:  # which none of its launches is of
            return Outcome()
        whole = known is self.larger or given.problem == self.shape
        if whole and any(given.some) and given not in self.written:
            self.written[given] = self.whole(given).written
        times = LONGER if known is not self.larger else SLOWEST
        limit = times * known.instructions + GRACE
        wanted = self.written.get(given) if whole else None
        found = attempt(text, self.launch(given), given, wanted, limit, self.left(text, given))
        self.kills[given] += bool(found.error or found.report.hazards)
        return found

    def left(self, text: str, given: Attempt) -> tuple[int, Tensors]:
        """How many of the launches that come first are of kernels which a mutant's text has
        unchanged, and what they leave."""
        launch, case = self.launch(given), given.case
        if given.sums or given.problem.chained is not None:
            return int(given.sums is not None), case.tensors
        count = [*self._alike(text)[:-1], False].index(False)
        if count and (given, count) not in self.over:
            axes = dict(given.problem.axes)
            space = {
                w.name: np.full(max(1, evaluate(w.bytes, axes)), 0xFF, np.uint8)
                for w in launch.workspace
            }
            held = {name: t.copy() for name, t in case.tensors.items()} | space
            part = replace(launch, then=launch.then[: count - 1])
            emulate(
                self.text, part, held, axes, seed=given.seed, some=given.some, grid=given.blocks,
                arguments=case.arguments,
            )  # fmt: skip
            self.over[given, count] = held
        return count, self.over[given, count] if count else case.tensors

    def _alike(self, text: str) -> list[bool]:
        """Which kernels, in the order of their launches, a mutant's text has unchanged."""
        mutant, own = _entries(text), _entries(self.text)
        return [
            mutant[e] == own[e] for e in (s.entry for s in self.launch(Attempt(self.shape)).steps)
        ]

    def whole(self, given: Attempt, limit: int = 0) -> Outcome:
        """The kernel itself on a problem."""
        return attempt(self.text, self.launch(given), given, None, limit)

    def left_out(self) -> list[Attempt]:
        """The first problem, which trials run whole, or its first clusters, where some stand for
        all; the family's problems that are none of the known."""
        offered = family(self.job[1].family).trials(*self.job, self.device)
        known, first = {k.attempt for k in self.known}, self.known[0].attempt
        counts = [_clusters(step, first) for step in self.launch(first).steps]
        ran = sum(map(min, counts, first.some or counts))
        whole = self.known[0].instructions * sum(counts) <= trials.INSTRUCTIONS * ran
        more = replace(first, some=() if whole else tuple(-NEAR for _ in first.some))
        sizes = trials.attempts_of(self.shape, offered.sizes)
        return [more] * any(first.some) + [g for g in sizes if g not in known]

    def others(self) -> Sequence[Known]:
        """What the trials run beside the known, where nothing more is covered by it."""
        if self.beside is None:
            self.beside = _remembered(
                cache.key("beside", self.name, repr(trials.INSTRUCTIONS)), self.shape, self._others
            )
        return self.beside

    def _others(self) -> Iterator[Known]:
        spent = 0
        for given in self.left_out():
            kernel = built(given.problem, self.job[1], self.device)
            if spent < trials.INSTRUCTIONS and kernel and write(kernel, self.device) == self.text:
                instructions = self.whole(given).report.instructions
                spent += instructions
                yield Known(given, instructions, digest_of(given))

    def launch(self, given: Attempt) -> Launch:
        return family(self.job[1].family).launch(given.problem, self.job[1], self.device)


@lru_cache(maxsize=4)
def bench_of(job: Job, device: Device, seed: int) -> Bench:
    """The problems of a kernel. ValueError where it is wrong itself."""
    strategy = job[1]
    maker, (shape, lowered) = family(strategy.family), small_kernel(job, device)
    small, offered = maker.trial(*job, device), maker.trials(*job, device)
    text = write(lowered, device)
    made = Bench(job, device, shape, lowered, text, [], kernel=digest(text))
    name = cache.key(
        "value problems", made.kernel, repr(small), repr(offered), repr(seed), repr(LIMITS)
    )

    def found() -> Iterator[Known]:
        made.known = _covering(made, Attempt(shape, 0, small.blocks), offered.sizes)
        yield from made.known
        yield _larger(made, seed)

    *made.known, made.larger = _remembered(name, shape, found)
    return made


def _remembered(name: str, shape: Problem, find: Callable[[], Iterable[Known]]) -> list[Known]:
    """Problems as they are on disk, if their data are today's, or else found."""
    held = cache.store().get(name)
    kept = [_kept(shape, row) for row in json.loads(held or b"[]")]
    if held is None or any(k.data != digest_of(k.attempt) for k in kept):
        kept = list(find())
        rows = [asdict(k) | {"axes": dict(k.attempt.problem.axes)} for k in kept]
        cache.store().put(name, json.dumps(rows).encode())
    return kept


def small_kernel(job: Job, device: Device) -> tuple[Problem, Statement]:
    """The constants of a kernel's problems, and what is built for them."""
    problem, strategy = job
    maker = family(strategy.family)
    whole = skeleton(write(maker.build(problem, strategy, device), device))
    first, offered = maker.trial(*job, device).problem, maker.trials(*job, device)
    shape, _ = trials.shape_of(first, offered.shapes, strategy, device, whole)
    return shape, maker.build(shape, strategy, device)


def _entries(text: str) -> dict[str, str]:
    """What a text has of each entry."""
    parts = re.split(r"^\.visible \.entry (\w+)", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _kept(shape: Problem, row: dict[str, Any]) -> Known:
    given = row["attempt"] | {"problem": replace(shape, axes=tuple(row["axes"].items()))}
    given["some"] = tuple(given["some"])
    given["sequences"] = tuple(map(tuple, given["sequences"]))
    given["blocks"] = tuple(b) if isinstance(b := given["blocks"], list) else b
    if given["sums"]:
        given["sums"] = PartialSums(given["sums"]["chunk"], tuple(given["sums"]["tokens"]))
    return Known(Attempt(**given), row["instructions"], row["data"])


def digest_of(given: Attempt) -> str:
    """Of a problem's inputs, and of what is right as far as all CPUs round it alike."""
    case = given.case
    state = hashlib.sha256(repr(case.arguments).encode())
    for name in sorted(case.tensors):
        state.update(np.ascontiguousarray(case.tensors[name]).data)
        for right in (*case.expected.get(name, ()), *case.slopes.get(name, ())):
            held = np.abs(np.nan_to_num(right)).astype(float).ravel()
            with np.errstate(over="ignore"):  # another sum where elements change places
                told = held @ np.linspace(1, 2, held.size)
            state.update(f"{told:.5g}".encode() if right.dtype.kind == "f" else right.tobytes())
    return state.hexdigest()[:16]


def _covering(made: Bench, first: Attempt, sizes: Sequence[Size]) -> list[Known]:
    """The problems that cover something new of the text, and the first, cheap ones first."""
    out, held, spent = trials.Covering(made.shape, True), list[Known](), 0
    for given in dict.fromkeys((first, *trials.attempts_of(made.shape, sizes))):
        if held and not (out.gaps and spent < COVERING):
            break
        kernel = built(given.problem, made.job[1], made.device)
        if kernel is None or write(kernel, made.device) != made.text:
            continue
        given, outcome = _soon(made, given) if given is first else (given, made.whole(given))
        if outcome.error:
            raise ValueError(f"{made.job[1].family}: the kernel itself is wrong: {outcome.error}")
        spent += outcome.report.instructions
        out.add(given, outcome, True, made.text, 0.0)
        if given in out.chosen:
            held.append(Known(given, outcome.report.instructions, digest_of(given)))
    some, quick = QUICK
    least, cheapest = min((k.instructions, i) for i, k in enumerate(held) if not k.attempt.sums)
    brief = replace(held[cheapest].attempt, some=_each(made, some))
    outcome = made.whole(brief)
    if not outcome.error and outcome.report.instructions * quick < least:
        held.append(Known(brief, outcome.report.instructions, digest_of(brief)))
    return held


def _soon(made: Bench, given: Attempt) -> tuple[Attempt, Outcome]:
    """The kernel on a problem: on all clusters, or on as many as end soon, going by two of them; on
    all, too, where a launch needs all of the one before it."""
    few = replace(given, some=_each(made, CLUSTERS[-1]))
    outcome = made.whole(few)
    report, whole = outcome.report, sum(_clusters(step, given) for step in made.launch(given).steps)
    wanted = 0
    for some, share in ((0, whole), *((n, n * len(few.some)) for n in CLUSTERS)):
        wanted = 0 if outcome.fault else some
        if report.instructions * share <= SOON * report.clusters:
            break
    sized = few if wanted == CLUSTERS[-1] else replace(given, some=_each(made, wanted))
    if sized != few:
        outcome = made.whole(sized)
    return (given, made.whole(given)) if outcome.error and wanted else (sized, outcome)


def _clusters(step: Launch, given: Attempt) -> int:
    grid = [evaluate(axis, dict(given.problem.axes)) for axis in step.grid]
    return math.prod(grid) // math.prod(step.cluster)


def _each(made: Bench, some: int) -> tuple[int, ...]:
    """So many clusters of every launch; none: all."""
    steps = made.launch(Attempt(made.shape)).steps
    return (some,) * len(steps) if some else ()


def larger_problem(
    lowered: Statement, small: Trial, strategy: Strategy, device: Device, rng: np.random.Generator
) -> Trial:
    """The trial with axes in SIZES times as large: those that the PTX does not depend on."""
    maker, text = family(strategy.family), write(lowered, device)
    own = dict(small.problem.axes)
    axes = dict(own)
    free = [n for n in axes if FOLLOWING.get(n, ("",))[0] not in axes]
    for name in map(str, rng.permutation(free * 2)):  # one may need another to be larger first
        if axes[name] != own[name]:
            continue
        least, most = (own[name] * times for times in SIZES)
        tried = axes | {name: int(rng.integers(least, most + 1))}
        tried |= {n: rule(tried[of]) for n, (of, rule) in FOLLOWING.items() if {n, of} <= set(axes)}
        if "max_num_pages" in axes:  # of a sequence: none of them may be another's
            tried["num_pages"] = tried["batch_size"] * tried["max_num_pages"] + 2
        problem = replace(small.problem, axes=tuple(tried.items()))
        try:
            same = write(maker.build(problem, strategy, device), device) == text
            case_of(problem)
        except (ValueError, KeyError, IndexError, ZeroDivisionError, AssertionError):
            continue
        if same:
            axes = tried
    return replace(small, problem=replace(small.problem, axes=tuple(axes.items())))


def _larger(made: Bench, seed: int) -> Known:
    """A larger problem on which the kernel itself is right; ValueError where none of DRAWS is."""
    strategy, complaint = made.job[1], ""
    for draw in range(DRAWS):
        rng = np.random.default_rng([seed, draw, int(strategy.key, 16)])
        sized = larger_problem(made.lowered, Trial(made.shape), strategy, made.device, rng).problem
        given, outcome = _soon(made, Attempt(sized))
        if not outcome.error:
            return Known(given, outcome.report.instructions, digest_of(given))
        complaint = outcome.error
    raise ValueError(
        f"{strategy.family}: the kernel itself is wrong on larger problems: {complaint}"
    )
