"""How many mutants the validator kills.

A few kernels of each family, of different structures, some mutants of each or all, and what became
of them. The PTX of every mutant that the validator accepts runs under several schedules. One is

killed    the validator refuses it
caught    the validator accepts it, and the emulator shows it to be wrong: in its values alone, or
          by a fault or hazard
equivalent  accepted, and on the pinned list of changes that change nothing; it must be right
survived  accepted, right under every schedule, and not on that list
refused   on that list, and refused: the validator is too strict
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ptxflow.command import Parser, reports
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.compilation import Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import Op, Statement, kernels_of, walk
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch
from ptxflow.compiler.processes import each
from ptxflow.env.tasks.arguments import natural_int, positive_int
from ptxflow.eval.verify import results
from ptxflow.eval.verify.draws import add_arguments, drawn
from ptxflow.eval.verify.emulation import Emulation, emulate_kernel
from ptxflow.eval.verify.equivalent import reason
from ptxflow.eval.verify.mutants import OPERATORS, Mutant, mutants
from ptxflow.eval.verify.results import Log, Summary, kernel_digest, kernels_digest, spread

VERDICTS = ("killed", "caught", "equivalent", "survived", "refused")


@dataclass(frozen=True)
class Judged:
    """One mutant without its tree: the error that killed it, why it is equivalent."""

    operator: str
    text: str
    error: str
    equivalent: str
    check_s: float = 0.0
    emulation: Emulation | None = None  # of an accepted mutant, where it was asked for

    @property
    def verdict(self) -> str:
        if self.error:
            return "refused" if self.equivalent else "killed"
        return "equivalent" if self.equivalent else "caught" if self.wrong else "survived"

    @property
    def right(self) -> bool:
        """Emulated, and as right as the kernel that it was made from."""
        return self.emulation is not None and self.emulation.right

    @property
    def wrong(self) -> bool:
        return self.emulation is not None and not self.emulation.right

    @property
    def fault(self) -> bool:
        """Wrong in more than its values."""
        return self.emulation is not None and (self.emulation.fault or bool(self.emulation.hazards))

    def __str__(self) -> str:
        complaints = self.emulation.complaints if self.emulation else ()
        return f"{self.text}: {'; '.join(complaints)}" if complaints else self.text

    @classmethod
    def from_json(cls, row: Summary) -> "Judged":
        """As `asdict` gives it."""
        emulation = row["emulation"] and Emulation.from_json(row["emulation"])
        return cls(**row | {"emulation": emulation})


def structures(jobs: Iterable[Job], device: Device) -> list[Job]:
    """The smallest kernel of each structure: the same roles, loops and instructions in them; in the
    order of their sizes."""
    best: dict[object, tuple[int, Job]] = {}
    for problem, strategy in jobs:
        kernels = kernels_of(family(strategy.family).build(problem, strategy, device))
        found, size = set[tuple[object, ...]](), 0
        for kernel in kernels:
            for statement in kernel.src:
                role = statement.arg.name if statement.op is Op.ROLE else kernel.arg.name
                nodes = list(walk(statement))
                found |= {_kind(role, path, node) for path, node in nodes if node.op is not Op.IF}
                size += len(nodes)
        key = frozenset(found), any(kernel.arg.cluster > 1 for kernel in kernels)
        if key not in best or size < best[key][0]:
            best[key] = size, (problem, strategy)
    return [job for _, job in sorted(best.values(), key=lambda sized: sized[0])]


def chosen_structures(jobs: Iterable[Job], device: Device, most: int) -> list[Job]:
    """Of each family's structures `most`, spread evenly from the smallest to the largest."""
    families: dict[str, list[Job]] = {}
    for job in jobs:
        families.setdefault(job[1].family, []).append(job)
    out: list[Job] = []
    for drawn_jobs in families.values():
        found = structures(drawn_jobs, device)
        count = min(most, len(found))
        out += [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]
    return out


def _kind(role: str, path: tuple[int, ...], node: Statement) -> tuple[object, ...]:
    if node.op is Op.ATOM:
        return role, node.arg.atom, node.arg.attr("cta_group")
    return role, node.op, len(path)


def judge(
    lowered: Statement,
    trips: Sequence[Trip],
    device: Device,
    chosen: Iterable[Mutant] | None = None,
    emulate: Callable[[Statement], Emulation | None] = lambda tree: None,
    launch: Launch | None = None,
) -> Iterator[Judged]:
    """What becomes of the mutants of a kernel or program (all, or those chosen), as `launch` starts
    it, if that is known; `emulate` runs the accepted."""
    for mutant in mutants(lowered) if chosen is None else chosen:
        error, began, changed = "", time.process_time(), mutant.within(lowered)
        try:
            check(changed, trips, device)
            if launch:
                check_launch(changed, launch)
        except CompileError as refusal:
            error = type(refusal).__name__
        seconds = time.process_time() - began
        emulation = None if error else emulate(changed)
        why = reason(mutant.kernel, mutant)
        yield Judged(mutant.operator, str(mutant), error, why, seconds, emulation)


def judge_strategy(
    device: Device, seeds: Sequence[int], job: Job, count: int = 0, seed: int = 0,
    log: Path | None = None,
) -> list[Judged]:  # fmt: skip
    """`count` mutants (0: all) of a strategy's kernel, built for its emulation problem; those in
    the log as they are.

    Those that the validator accepts are emulated under the schedules of `seeds`, if there are any.
    """
    problem, strategy = job
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    kernel = maker.build(small.problem, strategy, device)
    trips = maker.trips(small.problem, strategy, device)
    launch = maker.launch(small.problem, strategy, device)

    def emulate(tree: Statement) -> Emulation | None:
        return emulate_kernel(tree, small, strategy, device, seeds) if seeds else None

    chosen = list(mutants(kernel))
    if count:
        chosen = pick(chosen, count, (seed, int(strategy.key, 16)))
    known, text = Log(log), write(kernel, device)

    def one(mutant: Mutant) -> Summary:
        (found,) = judge(kernel, trips, device, [mutant], emulate, launch)
        return asdict(found)

    named = ((m, (text, repr(small), repr(seeds), str(m))) for m in chosen)
    return [Judged.from_json(known.get(name, partial(one, m))) for m, name in named]


def pick(found: Sequence[Mutant], count: int, seed: Sequence[int]) -> list[Mutant]:
    """`count` of the mutants, or all there are: drawn without repetition, in their order."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(found), min(count, len(found)), replace=False)
    return [found[i] for i in sorted(chosen)]


def run(
    jobs: Sequence[Job], device: Device, workers: int, schedules: int = 0, count: int = 0,
    seed: int = 0, log: Path | None = None,
) -> list[list[Judged]]:  # fmt: skip
    """Judge `count` mutants of every job's kernel, or all of them for 0, on `workers` processes."""
    work = partial(judge_strategy, device, range(schedules), count=count, seed=seed, log=log)
    return list(each(work, jobs, workers, f"mutants for {device.arch}"))


# -- the result -----------------------------------------------------------------------------------


def summarise(judged: Sequence[Judged]) -> Summary:
    """Counts by operator and verdict, equivalent reasons, times, and whatever should not be."""
    emulated = [j.emulation for j in judged if j.emulation]
    operators = {
        operator: _verdicts(j for j in judged if j.operator == operator)
        for operator in OPERATORS
        if any(j.operator == operator for j in judged)
    }
    return {
        "operators": operators,
        "all": _verdicts(judged),
        "emulated": {
            "schedules": max((e.schedules for e in emulated), default=0),
            "right": sum(e.right for e in emulated),
            "wrong": sum(not e.right for e in emulated),
            "faults": sum(j.fault for j in judged),
        },
        "validator_s": spread(j.check_s for j in judged),
        "emulator_s": spread(e.seconds for e in emulated),
        "equivalent": _counted(j.equivalent for j in judged if j.verdict == "equivalent"),
        "survivors": _counted(j.text for j in judged if j.verdict == "survived"),
        "refused": _counted(j.text for j in judged if j.verdict == "refused"),
        "values": _counted(j.text for j in judged if j.verdict == "caught" and not j.fault),
        "faults": _counted(str(j) for j in judged if j.verdict == "caught" and j.fault),
        "wrong": _counted(str(j) for j in judged if j.verdict == "equivalent" and j.wrong),
    }


def by_family(jobs: Sequence[Job], judged: Sequence[Sequence[Judged]]) -> Summary:
    """The numbers behind a row for each family."""
    rows: dict[str, list[Sequence[Judged]]] = {}
    for (_, strategy), found in zip(jobs, judged, strict=True):
        rows.setdefault(strategy.family, []).append(found)
    kept = ("all", "emulated", "validator_s", "emulator_s")
    out = {}
    for name, kernels in rows.items():
        summary = summarise([j for found in kernels for j in found])
        out[name] = {"kernels": len(kernels), **{k: summary[k] for k in kept}}
    return out


def _verdicts(judged: Iterable[Judged]) -> dict[str, int]:
    found = Counter(j.verdict for j in judged)
    return {verdict: found[verdict] for verdict in VERDICTS}


def _counted(texts: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(texts).items()))


def digests(jobs: Sequence[Job], device: Device) -> dict[str, str]:
    """By family, the digest of the kernels that were changed: mistakes in machine code that is the
    same, whichever statements of it they are made in."""
    kernels: dict[str, list[str]] = {}
    for job in jobs:
        kernels.setdefault(job[1].family, []).append(kernel_digest(*job, device))
    return {name: kernels_digest(found) for name, found in kernels.items()}


def table(summary: Summary) -> str:
    """Operator by verdict, the kill rate, each equivalent reason, and whatever should not be."""
    lines = [f"{'operator':10}" + "".join(f"{v:>10}" for v in VERDICTS)]
    for operator, counts in {**summary["operators"], "all": summary["all"]}.items():
        lines.append(f"{operator:10}" + "".join(f"{counts[v]:10}" for v in VERDICTS))
    total = summary["all"]
    harmful = total["killed"] + total["caught"] + total["survived"]
    lines.append(
        f"of {sum(total.values())} mutants {harmful} are not on the list of equivalent mutants; of "
        f"these the validator kills {total['killed'] / max(harmful, 1):.2%}"
    )
    ran = summary["emulated"]
    if ran["schedules"]:
        lines.append(
            f"accepted mutants that are right under {ran['schedules']} schedules: "
            f"{ran['right']} of {ran['right'] + ran['wrong']}; {ran['faults']} of the others show "
            "a fault or hazard"
        )
    titles = {
        "equivalent": "equivalent", "survivors": "survivors", "refused": "equivalent, but refused",
        "values": "caught by their values", "faults": "caught by a fault or hazard",
        "wrong": "equivalent, and WRONG",
    }  # fmt: skip
    for key, title in titles.items():
        lines.append(f"{title}:{' none' * (not summary[key])}")
        lines += [f"  {n:5} {text}" for text, n in summary[key].items()]
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow mutation",
        description=__doc__,
        epilog="examples: ptxflow mutation --device h200 --families rmsnorm\n"
        "ptxflow mutation --families gemm --draws 800 --kernels 1000 --mutants 0",
    )
    add_arguments(parser)
    results.add_arguments(parser)
    results.add_log(parser)
    add = parser.add_argument
    add("--draws", type=positive_int, default=24,
        help="strategies of each family to find structures in (default: 24)")  # fmt: skip
    add("--kernels", type=positive_int, default=5,
        help="structures of each family, at most (default: 5)")  # fmt: skip
    add("--mutants", type=natural_int, default=24,
        help="of each kernel (default: 24; 0: all there are)")  # fmt: skip
    add("--emulate", type=natural_int, default=2, metavar="SCHEDULES",
        help="run accepted mutants under so many schedules (default: 2; 0: do not)")  # fmt: skip
    return parser


@reports("mutation", ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if the validator refuses no equivalent mutant, and accepts no other but those that are
    wrong in their values alone; 1 if not, 2 on bad arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments().parse_args(given)

    def work(device: Device) -> Summary:
        jobs = chosen_structures(drawn(args, device, args.draws), device, args.kernels)
        found = run(jobs, device, args.jobs, args.emulate, args.mutants, args.seed, args.log)
        counts = summarise([j for judged in found for j in judged])
        return {
            "kernels": len(jobs),
            "digests": digests(jobs, device),
            "families": by_family(jobs, found),
            **counts,
        }

    summary = results.make("mutation", args, given, work)
    print(f"{summary['device']}: {summary['kernels']} kernels, {summary['seconds']:.0f} s")
    print(table(summary))
    return int(any(summary[what] for what in ("survivors", "refused", "faults", "wrong")))
