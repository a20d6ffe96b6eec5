"""Verify sampled strategies without the hardware.

For each strategy: the validator's verdict, what ptxas reports, the machine code that was claimed,
the emulator's verdict on the emitted PTX, run on a small problem with tails under several schedules
and on problems that are chosen by what they cover of the text, whether all instructions were
executed, and what becomes of some mutants of the kernel. What any stage refuses is named with the
reason.
"""

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ptxflow.command import Parser, align, reports
from ptxflow.compiler.backend import cache, ptxas, sass
from ptxflow.compiler.backend.ptxas import Usage
from ptxflow.compiler.compilation import Job, prepare
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError, IllegalStrategy
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.processes import each
from ptxflow.env.tasks.arguments import UsageError, find_family, natural_int, positive_int
from ptxflow.env.tasks.definition import load
from ptxflow.eval.verify import results
from ptxflow.eval.verify.draws import add_arguments, drawn
from ptxflow.eval.verify.emulation import SEEDS, Emulation, covering_emulation
from ptxflow.eval.verify.mutation import Judged, judge_strategy
from ptxflow.eval.verify.results import (
    Summary,
    kernels_digest,
    machine_digest,
    median_and_max,
    spread,
)

STAGES = ("rules", "validator", "ptxas", "SASS", "emulator", "coverage")


@dataclass(frozen=True)
class Verification:
    """One strategy's verdicts; `refused` is the first of STAGES that said no, or nothing."""

    problem: Problem
    strategy: Strategy
    refused: str = ""
    reasons: tuple[str, ...] = ()
    check_s: float = 0.0  # rules, build, validator and PTX
    kernel: str = ""  # the digest of its machine code and launch
    usage: Usage | None = None
    smem: int = 0  # bytes of dynamic shared memory
    emulation: Emulation | None = None
    mutants: tuple[Judged, ...] = ()

    @property
    def verified(self) -> bool:
        """No stage refuses it, nor did the validator accept a mutant that ends in a fault or shows
        a hazard; what is wrong in values alone is the emulator's to catch."""
        return not self.refused and not any(m.fault for m in self.mutants)

    def passed(self, stage: str) -> bool:
        return not self.refused or STAGES.index(self.refused) > STAGES.index(stage)

    @property
    def who(self) -> str:
        axes = " ".join(f"{k}={v}" for k, v in self.problem.axes)
        return f"{self.strategy.key} of {self.problem.definition} ({axes})"

    def complaints(self) -> Iterator[str]:
        """One line for everything that should not be."""
        yield from (f"{self.who}: {self.refused}: {reason}" for reason in self.reasons)


def verify(device: Device, seeds: Sequence[int], mutants: int, seed: int, job: Job) -> Verification:
    """Take one strategy through every stage; then `mutants` of its kernel, drawn by `seed`."""
    problem, strategy = job
    began = time.process_time()
    try:
        draft = prepare(problem, strategy, device)
    except CompileError as refusal:
        stage = "rules" if isinstance(refusal, IllegalStrategy) else "validator"
        return Verification(problem, strategy, stage, (f"{type(refusal).__name__}: {refusal}",))
    check_s = time.process_time() - began

    def ended(stage: str, reasons: Iterable[str], usage: Usage | None = None) -> Verification:
        return Verification(
            problem, strategy, stage, tuple(reasons), check_s, "", usage, draft.launch.smem_bytes
        )

    try:
        assembly = cache.assemble(draft.ptx, device.arch)
    except ptxas.PtxasError as refusal:
        return ended("ptxas", [str(refusal)])
    if complaints := ptxas.check(assembly):
        return ended("ptxas", complaints, assembly.usage)
    if complaints := sass.check(assembly.cubin, device.arch, draft.expected).complaints():
        return ended("SASS", complaints, assembly.usage)
    emulation = covering_emulation(problem, strategy, device, seeds)
    judged: list[Judged] = []
    if mutants and emulation.right:
        judged = judge_strategy(device, seeds, job, mutants, seed)
    correct = emulation.exact and not emulation.hazards
    refused = "" if emulation.right else "coverage" if correct else "emulator"
    return Verification(
        problem, strategy, refused, emulation.complaints, check_s,
        machine_digest(assembly.cubin, draft.launch), assembly.usage, draft.launch.smem_bytes,
        emulation, tuple(judged),
    )  # fmt: skip


# -- the result -----------------------------------------------------------------------------------

COLUMNS = (
    "", "strategies", "validator", "s", "registers", "smem KiB", "spills", "SASS",
    "emulator", "s", "executed", "problems", "covered",
)  # fmt: skip
OF_MUTANTS = ("mutants", "killed", "caught", "right")


def count(verifications: Sequence[Verification]) -> Summary:
    """Verdicts, resources, times and mutants of some strategies; the numbers behind a row."""
    usages = [p.usage for p in verifications if p.usage]
    mutants = [m for p in verifications for m in p.mutants]
    return {
        "strategies": len(verifications),
        "kernels": kernels_digest(p.kernel for p in verifications),
        "passed": {stage: sum(p.passed(stage) for p in verifications) for stage in STAGES},
        "registers": _range(u.registers for u in usages),
        "smem_bytes": _range(p.smem for p in verifications if p.usage),
        "spill_bytes": _range(u.spill_stores + u.spill_loads for u in usages),
        "validator_s": spread(p.check_s for p in verifications if p.check_s),
        "emulator_s": spread(p.emulation.seconds for p in verifications if p.emulation),
        "problems": _range(p.emulation.problems for p in verifications if p.emulation),
        "covered": {
            "items": sum(p.emulation.items for p in verifications if p.emulation),
            "open": sum(p.emulation.open for p in verifications if p.emulation),
        },
        "mutants": {
            "tried": len(mutants),
            "killed": sum(bool(m.error) for m in mutants),
            "caught": sum(m.wrong for m in mutants),
            "right": sum(m.right for m in mutants),
        },
    }


def _range(values: Iterable[int]) -> list[int] | None:
    ordered = sorted(values)
    return [ordered[0], ordered[-1]] if ordered else None


def summarise(verifications: Sequence[Verification]) -> Summary:
    """A row for each family; of one, for each definition; of one, for each strategy. All; how many
    of each definition are verified; and what is not."""
    families = len({p.strategy.family for p in verifications}) > 1
    several = len({p.problem.definition for p in verifications}) > 1
    values = Counter(name for name, _ in {axis for p in verifications for axis in p.problem.axes})
    rows: dict[str, list[Verification]] = {}
    for verification in verifications:
        varying = [
            f"{name}={value}" for name, value in verification.problem.axes if values[name] > 1
        ]
        key = (
            verification.problem.definition
            if several
            else " ".join([verification.strategy.key, *varying])
        )
        key = verification.strategy.family if families else key
        rows.setdefault(key, []).append(verification)
    return {
        "schedules": max((p.emulation.schedules for p in verifications if p.emulation), default=0),
        "rows": {name: count(group) for name, group in rows.items()},
        "all": count(verifications),
        "definitions": {
            name: {
                "strategies": sum(p.problem.definition == name for p in verifications),
                "verified": sum(p.problem.definition == name and p.verified for p in verifications),
            }
            for name in sorted({p.problem.definition for p in verifications})
        },
        "failures": [line for p in verifications for line in p.complaints()],
        "caught": [f"{p.who}: mutant: {m}" for p in verifications for m in p.mutants if m.wrong],
    }


def joined(whole: Summary, part: Summary) -> Summary:
    """A result of all families with the rows of some of them, drawn alike, made anew.

    UsageError where the two commands differ in more than --families and --jobs. Medians over all
    kernels are not known any more.
    """
    require_part(whole, shlex.split(part["command"])[2:])
    families = {_family(name) for name in part["definitions"]}
    new: Summary = part["rows"] if len(families) > 1 else dict.fromkeys(families, part["all"])
    rows = {name: new.get(name, row) for name, row in whole["rows"].items()}
    stay = {n: d for n, d in whole["definitions"].items() if _family(n) not in families}
    return whole | {
        "rows": rows,
        "all": _sum(list(rows.values())),
        "definitions": dict(sorted((stay | part["definitions"]).items())),
        **{
            kind: [line for line in whole[kind] if line.split()[2] in stay] + part[kind]
            for kind in ("failures", "caught")
        },
    }


def require_part(whole: Summary, argv: Sequence[str]) -> None:
    """UsageError unless a command draws some families of a result of all, and draws alike."""
    first, second = (
        vars(arguments().parse_args(given)) for given in (shlex.split(whole["command"])[2:], argv)
    )
    free = ("families", "jobs", "out", "renew")
    if (
        first["families"]
        or first["definition"]
        or any(value != second[name] for name, value in first.items() if name not in free)
    ):
        raise UsageError(f"--renew: {shlex.join(argv)} is no part of {whole['command']}")


def _family(definition: str) -> str:
    return find_family(load(definition)).name


def _sum(rows: Sequence[Summary]) -> Summary:
    """The counts of all kernels from those of each family."""

    def ends(name: str) -> list[int] | None:
        return _range(x for row in rows for x in row[name] or ())

    def total(name: str) -> dict[str, int]:
        return {key: sum(row[name][key] for row in rows) for key in rows[0][name]}

    return {
        "strategies": sum(row["strategies"] for row in rows),
        "kernels": kernels_digest(row["kernels"] for row in rows),
        **{name: total(name) for name in ("passed", "covered", "mutants")},
        **{name: ends(name) for name in ("registers", "smem_bytes", "spill_bytes", "problems")},
        **{s: {"max": max(row[s]["max"] for row in rows)} for s in ("validator_s", "emulator_s")},
    }


def lines(summary: Summary) -> list[tuple[str, ...]]:
    """The table: its heads, a line for each row, and one for all; of mutants where any were
    tried."""
    heads = (*COLUMNS, *OF_MUTANTS)
    rows = {**summary["rows"], "all": summary["all"]}
    shown = len(heads if summary["all"]["mutants"]["tried"] else COLUMNS)
    return [heads[:shown], *(cells(name, row)[:shown] for name, row in rows.items())]


def cells(name: str, row: Summary) -> tuple[str, ...]:
    """A row of the table, in the order of COLUMNS and OF_MUTANTS."""
    total, passed, mutants = row["strategies"], row["passed"], row["mutants"]

    def verdict(stage: str) -> str:
        return "ok" if passed[stage] == total else f"{passed[stage]} of {total}"

    return (
        name, str(total), verdict("validator"), median_and_max(row["validator_s"]),
        _from_to(row["registers"]), _from_to(row["smem_bytes"], 1024),
        _from_to(row["spill_bytes"]), verdict("SASS"), verdict("emulator"),
        median_and_max(row["emulator_s"]), verdict("coverage"), _from_to(row["problems"]),
        _share(row["covered"]),
        *(str(mutants[k]) for k in ("tried", "killed", "caught", "right")),
    )  # fmt: skip


def _share(covered: Mapping[str, int]) -> str:
    items = covered["items"]
    return f"{1 - covered['open'] / items:.1%}" if items else "-"


def _from_to(values: Sequence[int] | None, unit: int = 1) -> str:
    if not values:
        return "-"
    low, high = (round(v / unit) for v in values)
    return str(low) if low == high else f"{low}-{high}"


def conclusion(summary: Summary) -> str:
    """The verdict on all strategies and mutants, in one sentence."""
    row, mutants = summary["all"], summary["all"]["mutants"]
    verified = row["passed"][STAGES[-1]]
    text = (
        f"{verified} of {row['strategies']} verified for {summary['arch']}: validated, assembled, "
        f"SASS as claimed, and right under {summary['schedules']} emulated schedules"
    )
    if mutants["tried"]:
        text += (
            f"; mutants: {mutants['tried']} tried, {mutants['killed']} killed by the validator, "
            f"{mutants['caught']} caught by the emulator, {mutants['right']} right"
        )
    return text


def table(summary: Summary) -> str:
    """The rows and their total, what is not verified, mutants that the emulator alone catches, and
    the verdict."""
    named = [f"  {line}" for line in (*summary["failures"], *summary["caught"])]
    return "\n".join([align(lines(summary)), *named, conclusion(summary)])


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow verify",
        description=__doc__,
        epilog="columns: s is the median (and maximum) in seconds of the processor, of rules, "
        "build, validator\nand PTX, and of all runs in the emulator; executed: of the kernels all "
        "instructions;\ncovered: of instructions, outcomes of predicates, trips of loops, digits "
        "and bounds of indices;\na mutant is killed if "
        "the validator refuses it,\ncaught if the emulator shows it to be wrong, else right.\n\n"
        "examples: ptxflow verify --families gqa_decode mla_decode --samples 4\n"
        "ptxflow verify --definition gemm_n4096_k4096 --axes M=1,1000",
    )
    add_arguments(parser)
    results.add_arguments(parser)
    add = parser.add_argument
    add("--samples", type=positive_int, default=8,
        help="strategies of each family, drawn uniformly, or of the definitions together "
        "(default: 8)")  # fmt: skip
    add("--schedules", type=positive_int, default=len(SEEDS),
        help=f"emulated (default: {len(SEEDS)})")  # fmt: skip
    add("--mutants", type=natural_int, default=2, help="tried of each kernel (default: 2; 0: none)")
    add("--renew", type=Path, metavar="FILE.json",
        help="replace the rows of --families in this result of all families, too")  # fmt: skip
    return parser


@reports("verify", ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if every strategy is verified, and no mutant of one that the validator accepts shows a
    fault or hazard; 1 if not, 2 on misuse."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = arguments().parse_args(given)

    def work(device: Device) -> Summary:
        one = partial(verify, device, tuple(range(args.schedules)), args.mutants, args.seed)
        jobs = drawn(args, device, args.samples)
        return summarise(list(each(one, jobs, args.jobs, f"verify for {device.arch}")))

    whole = results.read(args.renew) if args.renew else None
    if whole is not None:
        require_part(whole, given)
    summary = results.make("verify", args, given, work)
    if whole is not None:
        write_whole(args.renew, json.dumps(joined(whole, summary), indent=1) + "\n")
    print(table(summary))
    return int(any(d["verified"] < d["strategies"] for d in summary["definitions"].values()))
