"""How many mutants the validator kills: `python -m ptxflow.eval.mutation --device b200`.

One kernel for every structure that the builders can make, every mutant of each, and what became of
them. The kill rate counts each mutant that is not on the list of harmless changes. With --emulate,
the PTX of every mutant that the validator accepts runs under several schedules, and must still
compute C exactly: that is what shows the list of harmless changes to be one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
from tqdm import tqdm

from ptxflow.compiler.check import check
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.families import family
from ptxflow.compiler.ir import Op, UOp, walk
from ptxflow.compiler.strategy import Problem, Strategy, Trip
from ptxflow.eval.arguments import UsageError, find_device, find_problem, find_space, parse_axes
from ptxflow.eval.definition import DefinitionError, load
from ptxflow.eval.harmless import reason
from ptxflow.eval.mutants import OPERATORS, Mutant, mutants
from ptxflow.eval.trial import emulate_kernel

DRAWS = 400  # strategies among which structures are looked for


@dataclass(frozen=True)
class Judged:
    """One mutant without its tree: the error that killed it, why it is harmless."""

    operator: str
    text: str
    error: str
    harmless: str
    emulated: str = ""  # "exact", or what went wrong, of an accepted mutant

    @property
    def verdict(self) -> str:
        if self.harmless:
            return "refused" if self.error else "harmless"
        return "killed" if self.error else "survived"


def structures(
    problem: Problem, device: Device, strategies: Iterable[Strategy]
) -> dict[object, Strategy]:
    """The smallest kernel of each structure: the same instructions, loops and roles."""
    best: dict[object, tuple[int, Strategy]] = {}
    for strategy in strategies:
        kernel = family(strategy.family).build(problem, strategy, device)
        nodes = [(path, node) for path, node in walk(kernel)]
        found = {_kind(path, node) for path, node in nodes if node.op is not Op.IF}
        key = frozenset(found), kernel.arg.cluster > 1
        if key not in best or len(nodes) < best[key][0]:
            best[key] = len(nodes), strategy
    return {key: strategy for key, (_, strategy) in best.items()}


def _kind(path: tuple[int, ...], node: UOp) -> tuple[object, ...]:
    if node.op is Op.ATOM:
        return node.arg.atom, node.arg.attr("cta_group")
    return node.op, len(path)


def judge(
    kernel: UOp,
    trips: Sequence[Trip],
    device: Device,
    chosen: Iterable[Mutant] | None = None,
    emulate: Callable[[UOp], str] = lambda tree: "",
) -> Iterator[Judged]:
    """What becomes of a kernel's mutants (all, or those chosen); `emulate` runs the accepted."""
    for mutant in mutants(kernel) if chosen is None else chosen:
        error = ""
        try:
            check(mutant.tree, trips, device)
        except CompileError as refusal:
            error = type(refusal).__name__
        emulated = "" if error else emulate(mutant.tree)
        yield Judged(mutant.operator, str(mutant), error, reason(kernel, mutant), emulated)


def _judge_strategy(
    problem: Problem, device: Device, schedules: int, strategy: Strategy
) -> list[Judged]:
    """The mutants of a strategy's kernel, built for its trial problem where they are emulated."""
    maker = family(strategy.family)
    if not schedules:
        kernel = maker.build(problem, strategy, device)
        return list(judge(kernel, maker.trips(problem, strategy, device), device))
    small = maker.trial(problem, strategy, device)

    def emulate(tree: UOp) -> str:
        result = emulate_kernel(tree, small, strategy, device, range(schedules))
        return "exact" if result.exact else result.error

    kernel = maker.build(small.problem, strategy, device)
    trips = maker.trips(small.problem, strategy, device)
    return list(judge(kernel, trips, device, emulate=emulate))


def table(judged: Sequence[Judged]) -> str:
    """Operator by verdict, the kill rate, and each harmless reason with its count."""
    counts = Counter((j.operator, j.verdict) for j in judged)
    verdicts = ("killed", "harmless", "survived", "refused")
    lines = [f"{'operator':10}" + "".join(f"{v:>10}" for v in verdicts)]
    for operator in OPERATORS:
        if any(counts[operator, v] for v in verdicts):
            row = "".join(f"{counts[operator, v]:10}" for v in verdicts)
            lines.append(f"{operator:10}{row}")
    total = Counter(j.verdict for j in judged)
    lines.append(f"{'all':10}" + "".join(f"{total[v]:10}" for v in verdicts))
    harmful = total["killed"] + total["survived"]
    harmless = len(judged) - harmful
    lines.append(
        f"kill rate: {total['killed']} of {harmful} = {total['killed'] / max(harmful, 1):.2%} "
        f"(of {len(judged)} enumerated, {harmless} are harmless)"
    )
    accepted = [j for j in judged if j.emulated]
    if accepted:
        exact = sum(j.emulated == "exact" for j in accepted)
        lines.append(f"accepted mutants that compute C exactly: {exact} of {len(accepted)}")
        lines += [f"  WRONG: {j.text}: {j.emulated}" for j in accepted if j.emulated != "exact"]
    reasons = Counter((j.operator, j.harmless) for j in judged if j.verdict == "harmless")
    lines += ["harmless:", *(f"  {n:5} {op}: {why}" for (op, why), n in sorted(reasons.items()))]
    for verdict, title in (("survived", "survivors"), ("refused", "harmless, but refused")):
        found = Counter(j.text for j in judged if j.verdict == verdict)
        lines += [f"{title}: {'none' * (not found)}"]
        lines += [f"  {n:5} {text}" for text, n in sorted(found.items())]
    return "\n".join(lines)


def run(
    problem: Problem, device: Device, strategies: Sequence[Strategy], jobs: int, schedules: int = 0
) -> list[Judged]:
    """Judge every mutant of every strategy's kernel on `jobs` processes."""
    work = partial(_judge_strategy, problem, device, schedules)
    out: list[Judged] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for judged in tqdm(pool.map(work, strategies), total=len(strategies), unit="kernel"):
            out += judged
    return out


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptxflow.eval.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="b200", help="b200, h200 or h100 (default: b200)")
    parser.add_argument("--definition", default="gemm_n4096_k4096", metavar="NAME|PATH")
    parser.add_argument("--axes", nargs="+", default=["M=4096"], metavar="M=4096")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of strategies")
    parser.add_argument(
        "--emulate", type=int, default=0, metavar="SCHEDULES",
        help="run accepted mutants under so many schedules (default: 0, do not)",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if all harmful mutants are refused and no others, 1 if not, 2 on bad arguments."""
    args = arguments().parse_args(argv)
    try:
        device = find_device(args.device)
        axes = {name: values[0] for name, values in parse_axes(args.axes).items()}
        maker, problem = find_problem(load(args.definition), axes)
        space = find_space(maker, problem, device)
    except (UsageError, DefinitionError) as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    codes = space.sample_uniform(min(DRAWS, len(space)), np.random.default_rng(args.seed))
    found = structures(problem, device, (space.strategy(int(c)) for c in codes))
    judged = run(problem, device, list(found.values()), args.jobs, args.emulate)
    print(f"{device.name}: {len(found)} kernels, {time.monotonic() - began:.0f} s")
    print(table(judged))
    wrong = any(j.emulated not in ("", "exact") for j in judged)
    return int(wrong or any(j.verdict in ("survived", "refused") for j in judged))


if __name__ == "__main__":
    sys.exit(main())
