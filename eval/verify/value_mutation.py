"""What becomes of mutants of values: a mutation score of the trials.

A part of the mutants of some kernels of each family, each with a verdict:

validator   `check` or `check_launch` refuses it
emulator    wrong on the trials: in values, by a fault or a hazard
equivalent  right on the trials, and on a larger random problem
escaped     right on the trials, and wrong on the larger problem
crashed     the validator or the emulator ended in an error that is not its own

What is no other kernel is counted apart: `unchanged`, of which ptxas makes the same machine code,
and `malformed`, which it has no instruction for.

With --log, verdicts are kept as lines of JSON as they are reached, and a run that was cut off goes
on with the rest. They are of the kernel's PTX, the mutant's and the problems, whatever builds them.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from ptxflow.command import Parser, reports
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.ptx import digest, write
from ptxflow.compiler.check import check, check_bounds, check_launch
from ptxflow.compiler.compilation import Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import PtxSyntaxError
from ptxflow.compiler.emulator.operands import Program
from ptxflow.compiler.emulator.parse import parse
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import family
from ptxflow.compiler.processes import each, memory_of, within
from ptxflow.env.tasks.arguments import positive_int
from ptxflow.eval.verify import results
from ptxflow.eval.verify.draws import add_arguments, drawn
from ptxflow.eval.verify.mutants import Mutant
from ptxflow.eval.verify.mutation import chosen_structures, digests
from ptxflow.eval.verify.results import Summary, append, name_of, spread
from ptxflow.eval.verify.value_mutants import KINDS
from ptxflow.eval.verify.value_mutants import drawn as drawn_mutants
from ptxflow.eval.verify.value_problems import Bench, Known, bench_of, small_kernel

VERDICTS = ("validator", "emulator", "equivalent", "escaped", "crashed", "unchanged", "malformed")
ASSEMBLY = 40_000  # instructions emulated in the time that ptxas takes, about
WHOLE = 50_000_000  # instructions of a larger problem that is run whole, at most half of its limit
SHOWN = 100  # equivalent mutants, at most, in a result
PART = 40  # mutants of a kernel that one process judges in a turn


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
    kernel: str = ""  # the digest of its PTX
    id: str = ""  # of the kernel's PTX and the mutant's
    by: str = ""  # the problem that killed it, or the bench none of whose problems did

    def __str__(self) -> str:
        return f"{self.family}: {self.text}" + f": {self.why}" * bool(self.why)


# -- one mutant -----------------------------------------------------------------------------------


def judge(mutant: Mutant, validate: Callable[[Statement], None], bench: Bench) -> Judged:
    """What becomes of a mutant of a bench's kernel or program, whose whole is its tree.

    `validate` raises CompileError.
    """
    verdict, why, by, times = "", "", "", [time.process_time()]
    try:
        try:
            validate(mutant.tree)
        except CompileError as refusal:
            verdict, why = "validator", str(refusal).splitlines()[0]
        times.append(time.process_time())
        if not verdict:
            verdict, why, by = _emulated(write(mutant.tree, bench.device), bench)
    except Exception as error:  # any at all: a run of hours must not end by one mutant's
        verdict, why = "crashed", f"{type(error).__name__}: {error}".splitlines()[0]
    times += [time.process_time()] * (3 - len(times))
    check_s, emulator_s = (round(b - a, 3) for a, b in pairwise(times))
    return Judged(mutant.operator, str(mutant), verdict, why, check_s, emulator_s, by=by)


def _emulated(text: str, bench: Bench) -> tuple[str, str, str]:
    """The verdict on a mutant that the validator accepts, why, and by what: the machine code is
    asked for once a problem has not killed it, or before all where the first takes longer than
    `ptxas`."""
    if not _parses(text, bench):
        return "malformed", "", ""
    ordered = bench.ordered()
    early = ordered[0].instructions > ASSEMBLY
    if early and (verdict := _assembled(text, bench)):
        return verdict, "", ""
    for i, known in enumerate(ordered):
        if complaint := _complaint(text, known, bench):
            return "emulator", complaint, known.name
        if not i and not early and (verdict := _assembled(text, bench)):
            return verdict, "", ""
    larger = bench.larger
    assert larger is not None
    for known in bench.others():
        if complaint := _complaint(text, known, bench):
            return "emulator", complaint, bench.name
    complaint = _complaint(text, larger, bench)
    if complaint and any(larger.attempt.some):  # clusters that did not run may write the same
        whole = replace(larger, attempt=replace(larger.attempt, some=()), instructions=WHOLE)
        complaint = _complaint(text, whole, bench)
    return ("escaped" if complaint else "equivalent"), complaint, bench.name


def _complaint(text: str, known: Known, bench: Bench) -> str:
    """What a problem shows to be wrong, in one line; empty where nothing is."""
    found = bench.run(text, known)
    complaint = found.error or next(iter(found.report.hazards), "")
    return f"{complaint} at {known.attempt}" if complaint else ""


def _parses(text: str, bench: Bench) -> bool:
    """Whether the emulator knows all that a text holds; where it does not, nor does ptxas."""
    try:
        for step in bench.launch(bench.known[0].attempt).steps:
            Program(parse(text, step.entry))
    except PtxSyntaxError:
        return False
    return True


def _assembled(text: str, bench: Bench) -> str:
    """`malformed` if ptxas refuses a text, `unchanged` if it makes the kernel's own cubin of it."""
    try:
        cubin = ptxas.assemble(text, bench.device.arch).cubin
    except ptxas.PtxasError:
        return "malformed"
    return "unchanged" if cubin == _cubin(bench.text, bench.device.arch) else ""


@lru_cache(maxsize=4)
def _cubin(text: str, arch: str) -> bytes:
    return ptxas.assemble(text, arch).cubin


# -- the mutants of a kernel ----------------------------------------------------------------------


Task = tuple[Job, int, int]  # mutants of a kernel: from one to another


def judge_part(
    device: Device, seed: int, log: Path | None, until: float, memory: int, task: Task
) -> list[Judged]:
    """`judge_kernel`, in so many bytes: a mutant that takes more is one that crashed."""
    with within(memory):
        return judge_kernel(device, seed, log, until, task)


def judge_kernel(
    device: Device, seed: int, log: Path | None, until: float, task: Task
) -> list[Judged]:
    """Mutants of a strategy's kernel, on the problems that cover its text, and all in the log that
    are of the same PTX. None is begun when the clock (`time.time`) is at `until`."""
    job, first, last = task
    strategy = job[1]
    kernel = digest(write(small_kernel(job, device)[1], device))
    known = {j.id: j for j in read_log(log).values() if j.kernel == kernel}
    if not known and time.time() > until:
        return []
    try:
        bench, maker = bench_of(job, device, seed), family(strategy.family)
    except (ValueError, MemoryError) as error:
        return [Judged(KINDS[0], strategy.key, "crashed", str(error), family=strategy.family)]
    out = {key: j for key, j in known.items() if holds(j, bench)}
    if len(out) >= last or time.time() > until:
        return list(out.values())
    if known:
        by = {k.name: k.attempt for k in bench.known}
        bench.kills = Counter(by[j.by] for j in known.values() if j.by in by)
    trips = maker.trips(bench.shape, strategy, device)
    launch = maker.launch(bench.shape, strategy, device)

    def validate(tree: Statement) -> None:
        check(tree, trips, device, bench.proven)
        check_launch(tree, launch)
        check_bounds(tree, launch, dict(bench.shape.axes), maker.held)

    rng = np.random.default_rng([seed, int(strategy.key, 16)])
    for mutant in drawn_mutants(bench.lowered, device, last, rng, trips)[first:]:
        whole = replace(mutant, tree=mutant.within(bench.lowered))
        key = name_of(bench.kernel, digest(write(whole.tree, device)))
        if key not in out and time.time() < until:
            found = judge(whole, validate, bench)
            out[key] = replace(found, family=strategy.family, kernel=bench.kernel, id=key)
            append(log, asdict(out[key]))
    return list(out.values())


def holds(judged: Judged, bench: Bench) -> bool:
    """Whether a verdict is one on the bench's problems: what killed a mutant is still among them,
    or all that did not are."""
    if judged.verdict == "emulator":
        return judged.by in {k.name for k in bench.known} | {bench.name}
    return judged.by in ("", bench.name)


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


# -- the result -----------------------------------------------------------------------------------


def summarise(judged: Sequence[Judged]) -> Summary:
    """Verdicts by family and by kind, the times, every mutant that escaped, and some of those that
    nothing tells from the kernel, to be looked at."""

    def rows(of: Callable[[Judged], str], names: Sequence[str]) -> Summary:
        counts = Counter((of(j), j.verdict) for j in judged)
        present = [name for name in names if any(counts[name, v] for v in VERDICTS)]
        return {name: {v: counts[name, v] for v in VERDICTS} for name in present}

    same = [j for j in judged if j.verdict == "equivalent"]
    shown = same[:: max(1, -(-len(same) // SHOWN))]
    return {
        "families": rows(lambda j: j.family, sorted({j.family for j in judged})),
        "kinds": rows(lambda j: j.kind, KINDS),
        "all": {v: sum(j.verdict == v for j in judged) for v in VERDICTS},
        "validator_s": spread(j.check_s for j in judged),
        "emulator_s": spread(j.emulator_s for j in judged if j.emulator_s),
        **{v: listed(judged, v) for v in ("escaped", "crashed")},
        "equivalent": [f"{j.family}: {j.text}" for j in shown],
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


def share_of(jobs: Sequence[Job], name: str, count: int) -> int:
    """Mutants of each kernel of a family, of `count` spread over families and their kernels."""
    kernels = Counter(strategy.family for _, strategy in jobs)
    return -(-count // (len(kernels) * kernels[name]))


def tasks(jobs: Sequence[Job], count: int) -> list[Task]:
    """`count` mutants in parts; families take turns, so that what a run that is cut off has judged
    is of all."""
    most = max(Counter(strategy.family for _, strategy in jobs).values())
    rank = Counter[str]()
    out = list[tuple[int, Task]]()
    for job in jobs:
        name = job[1].family
        share = share_of(jobs, name, count)
        rank[name] += 1
        for i, first in enumerate(range(0, share, PART)):
            out.append((rank[name] + i * most, (job, first, min(first + PART, share))))
    return [task for _, task in sorted(out, key=lambda one: one[0])]


def run(
    jobs: Sequence[Job], device: Device, count: int, workers: int, seed: int, log: Path | None,
    minutes: float = math.inf,
) -> list[Judged]:  # fmt: skip
    """`count` mutants on `workers` processes; none is begun after so many minutes."""
    until, memory = time.time() + 60 * minutes, memory_of(workers)
    work = partial(judge_part, device, seed, log, until, memory)
    found = each(work, tasks(jobs, count), workers, f"{count} mutants for {device.arch}")
    return list({j.id: j for judged in found for j in judged}.values())


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
    add("--minutes", type=float, default=math.inf, metavar="N",
        help="begin no mutant after so many")  # fmt: skip
    add("--log", type=Path, metavar="FILE.jsonl", help="keep verdicts, and go on from those there")
    return parser


@reports("mutate-values", ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if nothing escaped or crashed, 1 if something did, 2 on bad arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments().parse_args(given)

    def work(device: Device) -> Summary:
        jobs = chosen_structures(drawn(args, device, args.draws), device, args.kernels)
        found = run(jobs, device, args.mutants, args.jobs, args.seed, args.log, args.minutes)
        return {"kernels": len(jobs), "digests": digests(jobs, device), **summarise(found)}

    summary = results.make("mutate-values", args, given, work)
    print(f"{summary['device']}: {summary['kernels']} kernels, {summary['seconds']:.0f} s")
    print(table(summary))
    return int(bool(summary["escaped"] or summary["crashed"]))
