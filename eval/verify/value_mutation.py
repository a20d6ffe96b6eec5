"""What becomes of mutants of values: a mutation score of the trials.

A part of the mutants of some kernels of each family, each with a verdict:

validator   `check` or `check_launch` refuses it
emulator    wrong on the trials: in values, by a fault or a hazard
equivalent  right on the trials, and on a larger random problem
escaped     right on the trials, and wrong on the larger problem
malformed   ptxas has no such instruction: no kernel at all, counted apart
crashed     the validator or the emulator ended in an error that is not its own

With --log, verdicts are kept as lines of JSON as they are reached, and a run that was cut off goes
on with the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from ptxflow.command import Parser, reports
from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.backend.ptx import digest, write
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.compilation import Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import Fault, PtxSyntaxError
from ptxflow.compiler.emulator.operands import Program
from ptxflow.compiler.emulator.parse import parse
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem, Strategy, Trial
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.arguments import positive_int
from ptxflow.eval.verify import results
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.draws import FOLLOWING, add_arguments, drawn, map_jobs
from ptxflow.eval.verify.emulation import Emulation
from ptxflow.eval.verify.mutants import Mutant
from ptxflow.eval.verify.mutation import chosen_structures
from ptxflow.eval.verify.results import Summary, spread
from ptxflow.eval.verify.strategies import kernels_digest
from ptxflow.eval.verify.trials import Attempt, attempt, cover
from ptxflow.eval.verify.value_mutants import KINDS
from ptxflow.eval.verify.value_mutants import drawn as drawn_mutants

VERDICTS = ("validator", "emulator", "equivalent", "escaped", "malformed", "crashed")
SIZES = 2, 3  # times an axis of the trial, at the least and the most
DRAWS = 6  # of a larger problem, on which the kernel itself must be right
SLOWER = 4.0  # times the kernel's own time on a problem, and GRACE: the run does not end
GRACE = 3.0  # seconds

Emulate = Callable[[UOp], Emulation]


@dataclass(frozen=True)
class Judged:
    """A mutant without its tree. `why`: the refusal, or the first complaint of the emulator."""

    kind: str
    text: str
    verdict: str
    why: str = ""
    check_s: float = 0.0
    emulator_s: float = 0.0
    family: str = ""
    kernel: str = ""  # its name in a log, and the mutant's
    id: str = ""

    def __str__(self) -> str:
        return f"{self.family}: {self.text}" + f": {self.why}" * bool(self.why)


# -- one mutant -----------------------------------------------------------------------------------


def judge(
    mutant: Mutant, validate: Callable[[UOp], None], trials: Emulate, larger: Emulate
) -> Judged:
    """What becomes of a mutant.

    `validate` raises CompileError, `trials` emulates the kernels' own problems, `larger` others.
    """
    verdict, why, times = "", "", [time.process_time()]
    try:
        try:
            validate(mutant.tree)
        except CompileError as refusal:
            verdict, why = "validator", str(refusal).splitlines()[0]
        times.append(time.process_time())
        if not verdict:
            verdict, why = _emulated(mutant.tree, trials, larger)
    except Exception as error:  # any at all: a run of hours must not end by one mutant's
        verdict, why = "crashed", f"{type(error).__name__}: {error}".splitlines()[0]
    times += [time.process_time()] * (3 - len(times))
    check_s, emulator_s = (round(b - a, 3) for a, b in pairwise(times))
    return Judged(mutant.operator, str(mutant), verdict, why, check_s, emulator_s)


def _emulated(tree: UOp, trials: Emulate, larger: Emulate) -> tuple[str, str]:
    """The verdict on a mutant that the validator accepts, and why."""
    for run, verdict in ((trials, "emulator"), (larger, "escaped")):
        found = run(tree)
        if not found.right:
            return verdict, f"{found.complaints[0]} at {_axes(found.axes)}"
    return "equivalent", ""


def _axes(axes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={n}" for name, n in axes.items())


def malformed(text: str, entries: Sequence[str]) -> bool:
    """Whether the text holds what no assembler knows, as far as the emulator can tell."""
    try:
        for entry in entries:
            Program(parse(text, entry))
    except PtxSyntaxError:
        return True
    return False


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Fault in what runs longer on the processor: an endless loop. In a main thread only."""

    def end(*_: object) -> None:
        raise Fault(f"after {SLOWER:.0f} times what the kernel takes the run does not end")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- the problems ---------------------------------------------------------------------------------


def larger_problem(
    lowered: UOp, small: Trial, strategy: Strategy, device: Device, rng: np.random.Generator
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


@dataclass(frozen=True)
class Known:
    """A kernel's emulation problems, cheap ones first, each with the seconds that it takes; their
    text is that of `lowered`, which is built for `shape`."""

    shape: Problem
    lowered: UOp
    attempts: tuple[tuple[Attempt, float], ...]


@lru_cache(maxsize=4)
def trials_of(problem: Problem, strategy: Strategy, device: Device) -> Known:
    """The problems that cover the kernel's text. ValueError where it is wrong itself."""
    maker = family(strategy.family)
    found = cover(problem, strategy, device)
    if found.error:
        raise ValueError(f"{strategy.family}: the kernel itself is wrong: {found.error}")
    lowered = maker.build(found.shape, strategy, device)
    text = write(lowered, device)
    same = [
        (given, took)
        for given, took in found.chosen.items()
        if write(maker.build(given.problem, strategy, device), device) == text
    ]
    return Known(found.shape, lowered, tuple(sorted(same, key=lambda one: one[1])))


@lru_cache(maxsize=4)
def larger(
    problem: Problem, strategy: Strategy, device: Device, seed: int
) -> tuple[Attempt, float]:
    """A larger problem on which the kernel itself is right, and its seconds there; ValueError where
    none of DRAWS is."""
    known = trials_of(problem, strategy, device)
    maker, text = family(strategy.family), write(known.lowered, device)
    complaint = ""
    for draw in range(DRAWS):
        rng = np.random.default_rng([seed, draw, int(strategy.key, 16)])
        sized = larger_problem(known.lowered, Trial(known.shape), strategy, device, rng).problem
        tried, began = Attempt(sized), time.process_time()
        found = attempt(text, maker.launch(sized, strategy, device), tried)
        if not found.error:
            return tried, time.process_time() - began
        complaint = found.error
    raise ValueError(
        f"{strategy.family}: the kernel itself is wrong on larger problems: {complaint}"
    )


def emulated(
    attempts: Iterable[tuple[Attempt, float]], strategy: Strategy, device: Device, tree: UOp
) -> Emulation:
    """A mutant on problems on which the kernel itself takes so many seconds; up to the first that
    shows it to be wrong."""
    text, maker = write(tree, device), family(strategy.family)
    axes: dict[str, int] = {}
    for given, own in attempts:
        axes, launch = dict(given.problem.axes), maker.launch(given.problem, strategy, device)
        try:
            with limited(SLOWER * own + GRACE):
                found = attempt(text, launch, given)
        except Fault as fault:
            return Emulation(axes, 1, False, 0.0, str(fault), fault=True)
        if found.error:
            return Emulation(axes, 1, False, 0.0, found.error, fault=found.fault)
        if found.report.hazards:
            return Emulation(axes, 1, True, 0.0, hazards=tuple(map(str, found.report.hazards)))
    return Emulation(axes, 1, True, 0.0)


# -- the mutants of a kernel ----------------------------------------------------------------------


def judge_kernel(device: Device, count: int, seed: int, log: Path | None, job: Job) -> list[Judged]:
    """`count` mutants of a strategy's kernel, on the problems that cover its text; those in the log
    as they are."""
    problem, strategy = job
    right, maker = trials_of(problem, strategy, device), family(strategy.family)
    shape, lowered = right.shape, right.lowered
    trips = maker.trips(shape, strategy, device)
    launch = maker.launch(shape, strategy, device)
    text = write(lowered, device)
    sources = cache.sources(), cache.sources(Path(__file__).parent)
    name = _name(text, repr(shape), repr(launch), repr(seed), *sources)
    entries = [step.entry for step in launch.steps]

    def validate(tree: UOp) -> None:
        check(tree, trips, device)
        check_launch(tree, launch)

    def on_larger(tree: UOp) -> Emulation:
        return emulated([larger(problem, strategy, device, seed)], strategy, device, tree)

    trials = partial(emulated, right.attempts, strategy, device)
    known = read_log(log)
    out = []
    rng = np.random.default_rng([seed, int(strategy.key, 16)])
    for mutant in drawn_mutants(lowered, device, count, rng):
        whole = replace(mutant, tree=mutant.within(lowered))
        changed = write(whole.tree, device)
        key = _name(name, changed)
        if key not in known:
            if malformed(changed, entries):
                found = Judged(mutant.operator, str(mutant), "malformed")
            else:
                found = judge(whole, validate, trials, on_larger)
            known[key] = replace(found, family=strategy.family, kernel=name, id=key)
            _append(log, known[key])
        out.append(known[key])
    return out


def _name(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def read_log(path: Path | None) -> dict[str, Judged]:
    """The verdicts of a log by their mutants; a line that was cut off counts for nothing."""
    found: dict[str, Judged] = {}
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                judged = Judged(**json.loads(line))
            except (ValueError, TypeError):
                continue
            found[judged.id] = judged
    return found


def _append(path: Path | None, judged: Judged) -> None:
    """One write: lines of several processes do not mix. A line begins with what ends another."""
    if path is not None:
        with path.open("ab", buffering=0) as file:
            file.write(f"\n{json.dumps(asdict(judged))}".encode())


# -- the result -----------------------------------------------------------------------------------


def digests(jobs: Sequence[Job], device: Device) -> dict[str, str]:
    """By family, the digest of the kernels that were changed."""
    texts: dict[str, list[str]] = {}
    for problem, strategy in jobs:
        maker = family(strategy.family)
        text = digest(write(maker.build(problem, strategy, device), device))
        texts.setdefault(strategy.family, []).append(text)
    return {name: kernels_digest(found) for name, found in texts.items()}


def summarise(judged: Sequence[Judged]) -> Summary:
    """Verdicts by family and by kind, the times, and every mutant that no trial kills."""

    def rows(of: Callable[[Judged], str], names: Sequence[str]) -> Summary:
        counts = Counter((of(j), j.verdict) for j in judged)
        present = [name for name in names if any(counts[name, v] for v in VERDICTS)]
        return {name: {v: counts[name, v] for v in VERDICTS} for name in present}

    return {
        "families": rows(lambda j: j.family, sorted({j.family for j in judged})),
        "kinds": rows(lambda j: j.kind, KINDS),
        "all": {v: sum(j.verdict == v for j in judged) for v in VERDICTS},
        "validator_s": spread(j.check_s for j in judged),
        "emulator_s": spread(j.emulator_s for j in judged if j.emulator_s),
        **{v: listed(judged, v) for v in ("escaped", "crashed", "equivalent")},
    }


def listed(judged: Sequence[Judged], verdict: str) -> list[str]:
    """The mutants of a verdict as text, ordered by kind."""
    found = [j for j in judged if j.verdict == verdict]
    return list(map(str, sorted(found, key=lambda j: (KINDS.index(j.kind), j.family, j.text))))


def table(summary: Summary) -> str:
    """Families and kinds by verdict; then what escaped, crashed, and is equivalent."""
    lines = []
    for title in ("families", "kinds"):
        lines.append(f"{title:12}" + "".join(f"{v:>11}" for v in VERDICTS))
        rows = {**summary[title], "all": summary["all"]}
        lines += [f"{n:12}" + "".join(f"{c[v]:11}" for v in VERDICTS) for n, c in rows.items()]
    for verdict in ("escaped", "crashed", "equivalent"):
        lines.append(f"{verdict}:{' none' * (not summary[verdict])}")
        lines += [f"  {text}" for text in summary[verdict]]
    return "\n".join(lines)


def run(
    jobs: Sequence[Job], device: Device, count: int, workers: int, seed: int, log: Path | None
) -> list[Judged]:
    """`count` mutants, spread over families and their kernels, on `workers` processes."""
    kernels = Counter(strategy.family for _, strategy in jobs)
    shares: dict[int, list[Job]] = {}  # by mutants of a kernel
    for problem, strategy in jobs:
        share = -(-count // (len(kernels) * kernels[strategy.family]))
        shares.setdefault(share, []).append((problem, strategy))
    out = list[Judged]()
    for share, group in sorted(shares.items(), reverse=True):
        work = partial(judge_kernel, device, share, seed, log)
        title = f"{share} mutants a kernel, {device.arch}"
        out += [j for found in map_jobs(work, group, workers, title) for j in found]
    return out


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow mutate-values",
        description=__doc__,
        epilog="example: ptxflow mutate-values --device h200 --mutants 5000 --log values.jsonl",
    )
    add_arguments(parser)
    results.add_arguments(parser)
    add = parser.add_argument
    add("--draws", type=positive_int, default=60,
        help="strategies of each family to find structures in (default: 60)")  # fmt: skip
    add("--kernels", type=positive_int, default=16,
        help="structures of each family, at most (default: 16)")  # fmt: skip
    add("--mutants", type=positive_int, default=480,
        help="of all families together, about (default: 480)")  # fmt: skip
    add("--log", type=Path, metavar="FILE.jsonl", help="keep verdicts, and go on from those there")
    return parser


@reports("mutate-values", ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if nothing escaped or crashed, 1 if something did, 2 on bad arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments().parse_args(given)

    def work(device: Device) -> Summary:
        jobs = chosen_structures(drawn(args, device, args.draws), device, args.kernels)
        found = run(jobs, device, args.mutants, args.jobs, args.seed, args.log)
        return {"kernels": len(jobs), "digests": digests(jobs, device), **summarise(found)}

    summary = results.make("mutate-values", args, given, work)
    print(f"{summary['device']}: {summary['kernels']} kernels, {summary['seconds']:.0f} s")
    print(table(summary))
    return int(bool(summary["escaped"] or summary["crashed"]))


if __name__ == "__main__":
    sys.exit(main())
