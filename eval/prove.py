"""Prove sampled strategies without the hardware: `python -m ptxflow.eval.prove --help`.

For each strategy: the validator's verdict, what ptxas reports, the machine code that was claimed,
and the emulator's verdict on the emitted PTX, run on a small problem with tails under several
schedules. A strategy that any stage refuses is named with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

from tqdm import tqdm

from ptxflow.compiler import cache, ptxas, sass
from ptxflow.compiler.compile import finish, prepare
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.strategy import Problem, Strategy
from ptxflow.eval.arguments import UsageError, find_device, parse_axes
from ptxflow.eval.definition import DefinitionError, names
from ptxflow.eval.report import align
from ptxflow.eval.survey import draw
from ptxflow.eval.trial import SEEDS, Emulation, run_trial


@dataclass(frozen=True)
class Proof:
    """One strategy's verdicts; `refused` is one line where a stage of the compiler said no."""

    problem: Problem
    strategy: Strategy
    refused: str = ""
    check_s: float = 0.0  # rules, build and validator
    compile_s: float = 0.0  # ptxas and the disassembler
    registers: int = 0
    emulation: Emulation | None = None

    @property
    def proven(self) -> bool:
        return self.emulation is not None and self.emulation.right


def prove(task: tuple[Problem, Strategy, Device, tuple[int, ...]]) -> Proof:
    """Take one strategy through every stage and the emulator."""
    problem, strategy, device, seeds = task
    began = time.monotonic()
    try:
        draft = prepare(problem, strategy, device)
        checked = time.monotonic()
        assembly = cache.assemble(draft.ptx, device.arch)
        report = sass.check(assembly.cubin, device.arch, draft.expected)
        kernel = finish(draft, assembly, report)
    except (CompileError, ptxas.PtxasError) as refusal:
        return Proof(problem, strategy, f"{type(refusal).__name__}: {refusal}")
    compiled = time.monotonic()
    return Proof(
        problem,
        strategy,
        check_s=checked - began,
        compile_s=compiled - checked,
        registers=kernel.usage.registers,
        emulation=run_trial(problem, strategy, device, seeds),
    )


def prove_all(
    jobs: Iterable[tuple[Problem, Strategy]], device: Device, seeds: Sequence[int], workers: int
) -> list[Proof]:
    """Every job's proof, in order, behind a progress bar."""
    tasks = [(problem, strategy, device, tuple(seeds)) for problem, strategy in jobs]
    with tqdm(total=len(tasks), desc=f"prove for {device.arch}", unit="kernel") as bar:
        if workers <= 1:
            return [_counted(bar, prove(task)) for task in tasks]
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            return [_counted(bar, proof) for proof in pool.map(prove, tasks, chunksize=4)]


def _counted(bar: tqdm, proof: Proof) -> Proof:  # type: ignore[type-arg]
    bar.update()
    return proof


def table(proofs: Sequence[Proof], device: Device) -> str:
    """A line per workload, the totals, and every strategy that is not proven."""
    groups: dict[tuple[str, str], list[Proof]] = {}
    for proof in proofs:
        axes = " ".join(f"{k}={v}" for k, v in proof.problem.axes)
        groups.setdefault((proof.problem.definition, axes), []).append(proof)
    rows = [
        ("definition", "axes", "compiled", "emulated right", "check s", "ptxas+SASS s", "emulate s")
    ]
    for (name, axes), group in groups.items():
        done = [p for p in group if p.emulation is not None]
        rows.append((
            name, axes, f"{len(done)}/{len(group)}", f"{sum(p.proven for p in done)}/{len(group)}",
            _middle(p.check_s for p in done), _middle(p.compile_s for p in done),
            _middle(p.emulation.seconds for p in done if p.emulation),
        ))  # fmt: skip
    lines = [align(rows)]
    for p in proofs:
        if not p.proven:
            reason = p.refused or (p.emulation.error if p.emulation else "")
            lines.append(f"  {p.strategy.key} {p.problem.definition}: {reason}")
    right = sum(p.proven for p in proofs)
    schedules = max((p.emulation.schedules for p in proofs if p.emulation), default=0)
    lines.append(
        f"{right} of {len(proofs)} proven for {device.arch}: validated, assembled, SASS as "
        f"claimed, and exactly right under {schedules} emulated schedules"
    )
    return "\n".join(lines)


def _middle(values: Iterable[float]) -> str:
    held = list(values)
    return f"{median(held):.2f}" if held else "-"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ptxflow.eval.prove",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m ptxflow.eval.prove --definition gemm_n4096_k4096 --samples 8",
    )
    gemms = [name for name in names() if name.startswith("gemm_")]
    add = parser.add_argument
    add("--definition", nargs="+", default=gemms, metavar="NAME|PATH", help="default: every gemm")
    add("--axes", nargs="+", default=["M=1,1000"], metavar="M=1,17", help="default: M=1,1000")
    add("--device", default="b200", help="b200, h200 or h100 (default: b200)")
    add("--samples", type=int, default=16, help="strategies, drawn uniformly (default: 16)")
    add("--schedules", type=int, default=len(SEEDS), help=f"emulated (default: {len(SEEDS)})")
    add("--seed", type=int, default=0, help="of the draw (default: 0)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if every strategy is proven, 1 if not, 2 on bad arguments."""
    args = arguments().parse_args(argv)
    try:
        if args.samples < 1 or args.schedules < 1:
            raise UsageError("--samples and --schedules must be at least 1")
        device = find_device(args.device)
        jobs = draw(args.definition, parse_axes(args.axes), device, args.samples, args.seed)
        proofs = prove_all(jobs, device, range(args.schedules), args.jobs)
        print(table(proofs, device))
    except (UsageError, DefinitionError, ptxas.ToolMissing) as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
    return 0 if all(p.proven for p in proofs) else 1


if __name__ == "__main__":
    sys.exit(main())
