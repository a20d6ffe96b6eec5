"""Mutants of values that no trial kills, on the GPU at real sizes.

Of the mutants that `mutate-values` judged, those that are right on every trial are made once more
in the kernels of real workloads. What the validator does not refuse there, as it sees every kernel
at the sizes it is for, is run: each must be right, as the reference says. A mutant is found in the
larger kernel by its place and by what changes, and it must change the same part of the text. With
--more it runs at other workloads of the definition, too, that have the kernel's text. Every kernel
runs in a child process that can be killed. With --log, outcomes are kept and a run that was cut off
goes on with the rest.
"""

import argparse
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ptxflow.command import Parser, align, reports
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.ptx import digest, write
from ptxflow.compiler.backend.runtime import RuntimeUnavailable, require_gpu
from ptxflow.compiler.check import check, check_bounds, check_launch
from ptxflow.compiler.compilation import Job
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator.coverage import skeleton
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem
from ptxflow.compiler.ir.nodes import Statement
from ptxflow.compiler.ir.statements import kernels_of
from ptxflow.compiler.kernels import family
from ptxflow.compiler.processes import each
from ptxflow.env.tasks.arguments import find_device, find_problem, natural_int, positive_int
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.worker import Worker, WorkerError, job
from ptxflow.eval.verify.draws import add_arguments, drawn
from ptxflow.eval.verify.draws import places as workload_places
from ptxflow.eval.verify.mutants import Mutant
from ptxflow.eval.verify.mutation import chosen_structures
from ptxflow.eval.verify.results import name_of
from ptxflow.eval.verify.trials import built
from ptxflow.eval.verify.value_mutants import Candidate, candidates
from ptxflow.eval.verify.value_mutants import drawn as drawn_mutants
from ptxflow.eval.verify.value_mutation import Judged, read_log, share_of
from ptxflow.eval.verify.value_problems import small_kernel

PASSED = ("equivalent", "escaped")  # on the trials
TIMEOUT = 20.0  # seconds of a kernel's checks: what takes longer hangs
_NUMBER = re.compile(r"-?\d[\d.e+-]*")


@dataclass(frozen=True)
class Plant:
    """A mutant of a kernel at real sizes: its cubin's file, or why there is none."""

    mutant: Judged
    problem: dict[str, Any]
    launch: dict[str, Any]
    image: str = ""
    why: str = ""
    at: int = 0  # which of the kernel's workloads

    @property
    def key(self) -> str:
        """Of its outcome."""
        return f"{self.mutant.id} {self.at}" if self.at else self.mutant.id


def places(kernel: Statement) -> Iterator[tuple[tuple[object, ...], Candidate]]:
    """Every change of a kernel by its place, so that kernels which differ in numbers alone have the
    same changes at the same places."""
    counts = Counter[tuple[object, ...]]()
    for found in candidates(kernel):
        numbers = [float(n) for n in _NUMBER.findall(found.change)[:2]]
        place = found.path, found.kind, found.node.site, _NUMBER.sub("#", found.change)
        how = _relation(*numbers) if len(numbers) == 2 else ""
        counts[place, how] += 1
        yield (*place, how, counts[place, how]), found


def _relation(old: float, new: float) -> str:
    """What a change makes of a number, the first that holds."""
    known = {old + 1: "+1", old - 1: "-1", old * 2: "*2", old // 2: "/2", 0.0: "0"}
    return known.get(new, "other")


def changed_numbers(text: str, mutant: str) -> list[int] | str:
    """Which of a text's numbers a mutant changes; the mutant's text without numbers where it
    changes more."""
    if skeleton(text) != skeleton(mutant):
        return skeleton(mutant)
    pairs = zip(*(re.findall(r"\d+", t) for t in (text, mutant)), strict=False)
    return [i for i, (a, b) in enumerate(pairs) if a != b]


def transported(
    mutant: Mutant, small: Statement, large: Statement, device: Device
) -> Statement | None:
    """The large program with a mutant of the small one; None where it has no such place."""
    at = kernels_of(small).index(mutant.kernel)
    here, there = kernels_of(small)[at], kernels_of(large)[at]
    if small is large:
        return mutant.within(large)
    same = [p for p, c in places(here) if c.kind == mutant.operator and _is(c, mutant, here)]
    target = dict(places(there)).get(same[0]) if same else None
    if target is None:
        return None
    made = target.of(there)
    texts = [write(tree, device) for tree in (here, mutant.tree, there, made.tree)]
    if changed_numbers(*texts[:2]) != changed_numbers(*texts[2:]):
        return None
    return made.within(large)


def _is(found: Candidate, mutant: Mutant, kernel: Statement) -> bool:
    return mutant.change.startswith(found.change) and found.of(kernel).tree is mutant.tree


def alike(
    job: Job, text: str, device: Device, count: int, rng: np.random.Generator
) -> list[Problem]:
    """So many other workloads of the definition whose kernels have that text, at most."""
    (problem, strategy), out = job, list[Problem]()
    maker = family(strategy.family)
    rows = [
        (d, axes) for d, axes in workload_places()[strategy.family] if d.name == problem.definition
    ]
    for row in rng.permutation(len(rows)):
        other = find_problem(*rows[row])[1]
        if len(out) == count or other == problem or maker.wide.refusals(other, strategy, device):
            continue
        kernel = built(other, strategy, device)
        out += [other] * (kernel is not None and write(kernel, device) == text)
    return out


def plant(
    device: Device, seed: int, judged: dict[str, Judged], folder: Path, more: int,
    given: tuple[Job, int],
) -> list[Plant]:  # fmt: skip
    """The plants of a kernel, assembled: of its first mutants, so many, those no trial killed; at
    `more` other workloads, too, those of one after another."""
    (problem, strategy), count = given
    maker, (shape, lowered) = family(strategy.family), small_kernel(given[0], device)
    text = write(lowered, device)
    kernel = digest(text)
    if all(j.kernel != kernel for j in judged.values()):
        return []
    large = maker.build(problem, strategy, device)
    small = lowered if write(large, device) != text else large
    own = ptxas.assemble(write(large, device), device.arch).cubin
    turns = maker.trips(problem, strategy, device)
    proven = set[object]()
    check(large, turns, device, proven)
    rng = np.random.default_rng([seed, int(strategy.key, 16)])
    trips, out = maker.trips(shape, strategy, device), list[Plant]()
    others = alike(given[0], write(large, device), device, more, np.random.default_rng(seed))
    runs = [(p, maker.launch(p, strategy, device)) for p in (problem, *others)]
    for mutant in drawn_mutants(small, device, count, rng, trips):
        found = judged.get(name_of(kernel, digest(write(mutant.within(small), device))))
        if found is None or found.verdict not in PASSED:
            continue
        tree, image = transported(mutant, small, large, device), folder / f"{found.id}.cubin"
        for at, (run_at, launch) in enumerate(runs):
            made = partial(Plant, found, run_at.to_json(), launch.to_json(), at=at)
            if tree is None:
                out.append(made(why="no such place"))
                break
            try:
                if not at:
                    check(tree, turns, device, proven)
                    image.write_bytes(ptxas.assemble(write(tree, device), device.arch).cubin)
                check_launch(tree, launch)
                check_bounds(tree, launch, dict(run_at.axes), maker.held)
            except (CompileError, ptxas.PtxasError) as error:
                refused = isinstance(error, CompileError)
                out.append(made(why="refused" if refused else "no kernel"))
                break
            if image.read_bytes() == own:
                out.append(made(why="same machine code"))
                break
            out.append(made(str(image)))
    return sorted(out, key=lambda made: made.at)


def in_turns(jobs: Sequence[Job]) -> list[Job]:
    """Families take turns, so that what a run that is cut off has seen is of all."""
    rank = Counter[str]()
    ranked = list[tuple[int, Job]]()
    for given in jobs:
        rank[given[1].family] += 1
        ranked.append((rank[given[1].family], given))
    return [given for _, given in sorted(ranked, key=lambda one: one[0])]


def run(plants: Iterable[Plant], log: Path, until: float) -> dict[str, str]:
    """What became of each plant on this machine's GPU, by the mutant's id, while others are made;
    kernels of one problem one after another. None is begun when the clock (`time.time`) is at
    `until`."""
    known = dict(json.loads(line) for line in log.read_text().splitlines()) if log.exists() else {}
    worker = Worker()
    try:
        for one in plants:
            if time.time() > until:
                break
            if one.key in known:
                continue
            if one.why:
                outcome = one.why
            else:
                definition = load(one.problem["definition"])
                axes = {n: one.problem["axes"][n] for n in definition.var_axes}
                todo = job(
                    definition.to_json(), axes, one.launch, Path(one.image), seeds=(1, 2),
                    rounds=0, settle=0.0, every_baseline=False,
                )  # fmt: skip
                try:
                    result = worker.run(todo, TIMEOUT)
                    outcome = " ".join(f"{result['status']} {result['detail']}".split())
                except WorkerError as error:
                    outcome = f"not run: {error}"
            known[one.key] = outcome
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps([one.key, outcome]) + "\n")
    finally:
        worker.stop()
    return known


def table(judged: Sequence[Judged], plants: Sequence[Plant], outcomes: dict[str, str]) -> str:
    """A row a family: mutants planted, killed before, and what became of the rest, a workload each;
    then those that were not right."""
    heads = ("refused", "ok", "wrong", "hang", "fault", "same machine code", "no such place",
             "no kernel", "not run")  # fmt: skip
    rows, bad = [["", "planted", "killed", "passed the trials", *heads]], []
    for name in sorted({j.family for j in judged}):
        all_of = [j for j in judged if j.family == name]
        passed = [p for p in plants if p.mutant.family == name]
        told = [outcomes.get(p.key, "not run") for p in passed]
        counts = [sum(t.startswith(h) for t in told) for h in heads]
        killed = sum(j.verdict in ("validator", "emulator") for j in all_of)
        rest = len({p.mutant.id for p in passed})
        rows.append([name, *map(str, (len(all_of), killed, rest, *counts))])
        for p, t in zip(passed, told, strict=True):
            if t.startswith(("wrong", "hang", "fault")):
                bad.append(f"  {p.mutant.verdict} {p.mutant}: {t} at {p.problem['axes']}")
    return "\n".join([align(rows), f"not right:{' none' * (not bad)}", *bad])


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow plants",
        description=__doc__,
        epilog="example: ptxflow plants --judged values-h200.jsonl --kernels 6 --mutants 5500",
    )
    add_arguments(parser)
    add = parser.add_argument
    add("--device", default="h200", help="of this machine's GPU: h200 or h100 (default: h200)")
    add("--judged", type=Path, required=True, metavar="FILE.jsonl",
        help="log of `mutate-values`, with whose other arguments mutants are drawn")  # fmt: skip
    add("--draws", type=positive_int, default=60, help="as there (default: 60)")
    add("--kernels", type=positive_int, default=16, help="as there (default: 16)")
    add("--mutants", type=positive_int, default=480, help="as there (default: 480)")
    add("--more", type=natural_int, default=0, metavar="N",
        help="other workloads at which each runs, too (default: 0)")  # fmt: skip
    add("--log", type=Path, required=True, metavar="FILE.jsonl", help="outcomes, kept and read")
    add(
        "--minutes", type=float, default=math.inf, metavar="N", help="begin no kernel after so many"
    )
    return parser


@reports("plants", ptxas.ToolMissing, RuntimeUnavailable)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if every plant that ran is right, 1 if one is not, 2 on bad arguments."""
    args = arguments().parse_args(argv)
    until = time.time() + 60 * args.minutes
    device = find_device(args.device)
    require_gpu(device)
    jobs = chosen_structures(drawn(args, device, args.draws), device, args.kernels)
    judged = read_log(args.judged)
    share = partial(share_of, jobs, count=args.mutants)
    with tempfile.TemporaryDirectory(prefix="ptxflow-plants-") as folder:
        work = partial(plant, device, args.seed, judged, Path(folder), args.more)
        todo = [(given, share(given[1].family)) for given in in_turns(jobs)]
        plants = list[Plant]()
        made = each(work, todo, args.jobs, "plants")

        def as_made() -> Iterator[Plant]:
            for found in made:
                plants.extend(found)
                yield from found

        outcomes = run(as_made(), args.log, until)
    print(table([j for j in judged.values()], plants, outcomes))
    ran = [outcomes.get(p.key, "") for p in plants]
    return int(any(t.startswith(("wrong", "hang", "fault")) for t in ran))
