"""Emulation problems of a kernel, chosen by what they cover of its text.

The text that ships does not depend on variable axes, so that problems of its own constant axes run
that very text; where constants are smaller, a text that differs from it in numbers alone counts.
Where only some clusters run, what they write is checked as far as all that it needs was computed.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Banks, Fault, Report, emulate
from ptxflow.compiler.emulator.coverage import Coverage, Gap, skeleton
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import PartialSums, Problem, Size, Strategy
from ptxflow.compiler.ir import Statement, kernels_of
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch
from ptxflow.eval.verify.cases import case_of, sums
from ptxflow.eval.verify.cases.case import Case, Tensors, plain

FEW = 3, 12, 0  # clusters of each launch of a brief run; all, where these leave a gap
INSTRUCTIONS = 3_000_000  # of warps, after which no problem is begun for the rest to be covered
Masks = dict[str, NDArray[np.bool_]]  # of elements, by tensor
Row = tuple[int, int]  # queries and keys of a sequence


@dataclass(frozen=True)
class Attempt:
    """A problem and how it is run: under the schedule of `seed`, CTAs along x (`blocks`), and how
    many clusters of each launch (`some`; 0, or none: all); `absent`: without optional inputs;
    `sums`: what the first launch leaves; `sequences`: queries and keys of each."""

    problem: Problem
    seed: int = 0
    blocks: int | tuple[int, ...] | None = None
    some: tuple[int, ...] = ()
    absent: bool = False
    sums: PartialSums | None = None
    sequences: tuple[Row, ...] = ()

    def __str__(self) -> str:
        axes = " ".join(f"{n}={v}" for n, v in self.problem.axes)
        some = f", {'+'.join(map(str, self.some))} clusters" if self.some else ""
        some += f", sums of {'+'.join(map(str, self.sums.tokens))} tokens" if self.sums else ""
        return f"{axes} (schedule {self.seed}{some})"

    @property
    def name(self) -> str:
        """All that it is, but for its data."""
        return f"{self} {self.blocks} {self.absent} {self.sequences}"

    @property
    def case(self) -> Case:
        """Inputs and right outputs; to be copied, not written."""
        return prepared_case(self.problem, self.absent, self.sums, *self.sequences)


@lru_cache(maxsize=16)
def prepared_case(problem: Problem, absent: bool, made: PartialSums | None, *rows: Row) -> Case:
    """Of a problem; of its second launch alone, where sums are given."""
    if made:
        return sums.case(problem, made)
    given = dict(zip(("queries", "lengths"), zip(*rows, strict=True), strict=False))
    return case_of(problem, **given, **{"given": False} if absent else {})


@dataclass
class Outcome:
    """What became of an attempt: one line where values are wrong or the run ended at a fault.
    `written`: the elements of outputs that are not as they were, and right."""

    report: Report = field(default_factory=Report)
    error: str = ""
    fault: bool = False
    written: Masks = field(default_factory=dict)


def attempt(
    ptx: str, launch: Launch, given: Attempt, wanted: Masks | None = None, limit: int = 0,
    done: tuple[int, Tensors] | None = None, banks: Banks | None = None,
) -> Outcome:  # fmt: skip
    """Run a text on a problem; of some clusters what they wrote must be right, and all of `wanted`
    be written. A launch of more than `limit` instructions does not end. `done`: so many launches
    are over, and what they left."""
    axes = dict(given.problem.axes)
    case = given.case
    first, left = done or (int(given.sums is not None), case.tensors)
    tensors = {name: t.copy() for name, t in left.items()}
    try:
        report = emulate(
            ptx, launch, tensors, axes, seed=given.seed, some=given.some, grid=given.blocks,
            arguments=case.arguments, limit=limit, first=first, banks=banks,
            before=running(given.problem, tensors, launch),
        )  # fmt: skip
    except Fault as fault:
        error = f"{' '.join(str(fault).split())} (schedule {given.seed})"
        return Outcome(error=error, fault=True)
    started = any(given.some[: len(launch.steps) - 1])
    error = differences(case, tensors, (wanted or {}) if any(given.some) else None, started)
    written = {
        name: changed(tensors[name], case.tensors[name]) & right(plain(tensors[name]), bounds)
        for name, bounds in case.expected.items()
    }
    return Outcome(report, f"{error} (schedule {given.seed})" if error else "", written=written)


def running(problem: Problem, tensors: Tensors, launch: Launch) -> set[str]:
    """What a chained call must wait for: all but what nobody writes then."""
    if problem.chained is None:
        return set()
    return {*tensors, *(w.name for w in launch.workspace)} - {*problem.chained}


def right(found: NDArray[Any], bounds: tuple[NDArray[Any], NDArray[Any]]) -> NDArray[np.bool_]:
    """The elements between the least and the greatest right values."""
    return np.asarray((found >= bounds[0]) & (found <= bounds[1]))


def changed(tensor: NDArray[Any], before: NDArray[Any]) -> NDArray[np.bool_]:
    """The elements whose bits differ."""
    bits = np.dtype(f"u{tensor.itemsize}")
    return np.asarray(tensor.view(bits) != before.view(bits))


def differences(
    case: Case, tensors: Tensors, partly: Masks | None = None, started: bool = False
) -> str:
    """What is wrong with the outputs, in one line; empty where nothing is. `partly`: of these
    elements, and of those that were written; `started`: from what some clusters of an earlier
    launch left, so that those that are no number may need the others."""
    for name, bounds in case.expected.items():
        found = plain(tensors[name])
        wrong = ~right(found, bounds)
        if partly is not None:
            written = changed(tensors[name], case.tensors[name])
            numbers = written & ~np.isnan(found) if started else written
            wrong &= numbers | partly.get(name, False)
        if count := int(wrong.sum()):
            return f"{count} of {found.size} elements of {name} differ"
    for name, (weights, room, mean) in case.slopes.items():
        whole = changed(tensors[name], case.tensors[name]).reshape(weights.shape).all(-1)
        slope = (weights * plain(tensors[name]).reshape(weights.shape)).sum(-1)
        if (wrong := whole & (abs(slope - weights.any(-1)) > room)).any():
            factor = float(slope[wrong][0])
            return f"{wrong.sum()} of {wrong.size} segments of {name} differ, by {factor:.3f} times"
        rows = whole.all(-1)
        off = (slope - weights.any(-1)).mean(-1)[rows]
        if abs(off.sum()) > np.sqrt((mean[rows] ** 2).sum()):
            return f"all rows of {name} differ, by {1 + off.mean():.4f} times"
    return ""


@dataclass
class Covering:
    """What problems covered of a kernel's text.

    `shape` is the first problem with the constants that others have, and `same` says whether its
    text is that of the kernel, numbers apart. `chosen` are the attempts that covered something new,
    in order, with their seconds of the processor; `last` is the one that `error` is of. `gaps` is
    what remains.
    """

    shape: Problem
    same: bool
    chosen: dict[Attempt, float] = field(default_factory=dict)
    last: Attempt | None = None
    tried: int = 0
    schedules: set[int] = field(default_factory=set)
    instructions: int = 0  # that warps executed
    error: str = ""
    fault: bool = False
    hazards: dict[str, int] = field(default_factory=dict)
    entries: dict[str, Coverage] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def gaps(self) -> list[Gap]:
        return [g for entry, c in self.entries.items() for g in c.gaps(entry)]

    @property
    def items(self) -> int:
        """Of all that can be covered."""
        return sum(c.items for c in self.entries.values())

    def add(self, given: Attempt, outcome: Outcome, counts: bool, ptx: str, seconds: float) -> None:
        """A run of a text; what it covered is added where it `counts`, and the attempt kept if any
        of it is new."""
        self.tried, self.last = self.tried + 1, given
        self.schedules.add(given.seed)
        self.instructions += outcome.report.instructions
        before = {g.key for g in self.gaps} if self.entries else None
        for entry, found in outcome.report.coverage.items() if counts else ():
            if entry in self.entries:
                self.entries[entry].add(found)
            else:
                self.entries[entry] = found
        if before is None or {g.key for g in self.gaps} != before:
            self.chosen[given] = seconds
        for text in map(str, outcome.report.hazards):
            self.hazards.setdefault(quoted(text, ptx), given.seed)
        self.error, self.fault = outcome.error, outcome.fault


def cover(
    problem: Problem,
    strategy: Strategy,
    device: Device,
    seeds: Sequence[int] = (0,),
    instructions: int = INSTRUCTIONS,
) -> Covering:
    """Emulate the family's first problem under every schedule, then its others in turn until all is
    covered, or so many instructions were executed and all of the text at least once; stops at the
    first wrong value or fault.

    Without schedules the whole is brief: the first problem is run once and only if its text is the
    kernel's, and FEW clusters of the others, small ones first: more, where they leave something
    never executed, or what they compute of what others left is wrong.
    """
    maker, began = family(strategy.family), time.process_time()
    whole = skeleton(write(maker.build(problem, strategy, device), device))
    small = maker.trial(problem, strategy, device)
    offered = maker.trials(problem, strategy, device)
    out = Covering(*shape_of(small.problem, offered.shapes, strategy, device, whole))
    first = [Attempt(small.problem, seed, small.blocks) for seed in seeds]
    others = list(attempts_of(out.shape, offered.sizes))
    enough = len(first) + len(others)
    if not seeds:
        lowered = maker.build(small.problem, strategy, device)
        own = skeleton(write(lowered, device)) == whole
        first = [Attempt(small.problem, 0, small.blocks)] * own
        enough = len(first) + len(others)
        steps = len(kernels_of(lowered))
        others.sort(key=lambda o: sum(n for _, n in o.problem.axes))
        others = [
            replace(o, seed=(j + own) % 2, some=o.some or (few,) * steps * (few > 0))
            for few in (FEW if steps == 1 or _floats(small.problem) else FEW[-1:])
            for j, o in enumerate(others)
        ]
    for i, given in enumerate((*first, *dict.fromkeys(others))):
        if i >= len(first):
            late = i >= enough or (out.instructions > instructions and out.tried > len(first))
            left = {g.kind for g in out.gaps}
            if (late or out.entries) and not (left & {"instruction"} if late else left):
                break
        kernel = built(given.problem, strategy, device)
        if kernel is None:
            continue
        ptx = write(kernel, device)
        launch = maker.launch(given.problem, strategy, device)
        started = time.process_time()
        outcome = attempt(ptx, launch, given)
        if outcome.error and any(given.some) and not seeds:  # it may need what others leave
            given = replace(given, some=())
            outcome = attempt(ptx, launch, given)
        took = time.process_time() - started
        out.add(given, outcome, skeleton(ptx) == whole, ptx, took)
        if out.error:
            break
    out.seconds = time.process_time() - began
    return out


def _floats(problem: Problem) -> bool:
    """Whether what comes of data that is not there shows in the outputs: as no number."""
    case = prepared_case(problem, False, None)
    return all(plain(case.tensors[name]).dtype.kind == "f" for name in case.expected)


def built(problem: Problem, strategy: Strategy, device: Device) -> Statement | None:
    """The kernel; nothing where the strategy is none of the problem's."""
    maker = family(strategy.family)
    try:
        return maker.build(problem, strategy, device)
    except (CompileError, ValueError):
        return None


def _sized(problem: Problem, axes: Mapping[str, int]) -> Problem:
    """The problem with other values of some axes."""
    return replace(problem, axes=tuple({**dict(problem.axes), **axes}.items()))


def attempts_of(shape: Problem, sizes: Sequence[Size]) -> Iterator[Attempt]:
    for i, size in enumerate(sizes):
        sized = _sized(shape, size.axes)
        yield Attempt(sized, i % 2, size.blocks, size.some, size.absent, size.sums, size.sequences)


def shape_of(
    small: Problem, shapes: Sequence[Mapping[str, int]], strategy: Strategy, device: Device,
    whole: str,
) -> tuple[Problem, bool]:  # fmt: skip
    """The first problem with the first of the shapes that makes its text `whole`, numbers apart,
    and True; else with the last, and False."""
    sized = small
    for shape in shapes:
        sized = _sized(small, shape)
        kernel = built(sized, strategy, device)
        if kernel is not None and skeleton(write(kernel, device)) == whole:
            return sized, True
    return sized, False


def quoted(hazard: str, ptx: str) -> str:
    """A hazard with the PTX statement beside each `line N`, unless it quotes statements itself."""
    lines = ptx.splitlines()

    def quote(found: re.Match[str]) -> str:
        number = int(found[1])
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"{found[0]} `{text}`" if text else found[0]

    text = " ".join(hazard.split())
    return text if "`" in text else re.sub(r"\bline (\d+)\b", quote, text)
