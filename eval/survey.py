"""Compile many uniformly drawn strategies and count what holds: `python -m ptxflow.eval.survey`.

The claim under test: whatever the masks allow builds, passes the validator, assembles with no spill
and no C75xx note, and shows in its machine code what the strategy claims.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from ptxflow.compiler import ptxas
from ptxflow.compiler.compile import CompiledKernel, Job, compile_many
from ptxflow.compiler.device import Device
from ptxflow.compiler.families import family
from ptxflow.eval.arguments import (
    UsageError,
    find_device,
    find_problem,
    find_space,
    parse_axes,
    product,
)
from ptxflow.eval.command import Parser
from ptxflow.eval.definition import DefinitionError, load, names

STAGES = {
    "IllegalStrategy": "rules",
    "SpecError": "validator",
    "HazardError": "validator",
    "PtxasError": "ptxas",
    "AssemblyError": "ptxas notes, spills or SASS",
}


@dataclass(frozen=True)
class Outcome:
    """What became of the drawn strategies; `refused` holds one line each."""

    drawn: int
    compiled: list[CompiledKernel]
    refused: list[tuple[Job, Exception]]
    seconds: float


def draw(
    definitions: Sequence[str], axes: dict[str, list[int]], device: Device, samples: int, seed: int
) -> list[Job]:
    """`samples` strategies, spread evenly over the workloads, uniform over the valid ones.

    Each definition takes the values of its own axes; UsageError for an axis that none has.
    """
    held = [load(name) for name in definitions]
    if unknown := set(axes).difference(*(d.axes for d in held)):
        raise UsageError(f"no definition has an axis {', '.join(sorted(unknown))}")
    own = [(d, {axis: axes[axis] for axis in axes if axis in d.axes}) for d in held]
    workloads = [(d, bound) for d, values in own for bound in product(values)]
    rng = np.random.default_rng(seed)
    jobs: list[Job] = []
    for i, (definition, bound) in enumerate(workloads):
        maker, problem = find_problem(definition, bound)
        space = find_space(maker, problem, device)
        count = samples // len(workloads) + (i < samples % len(workloads))
        jobs += [(problem, space.strategy(int(c))) for c in space.sample_uniform(count, rng)]
    return jobs


def survey(jobs: Sequence[Job], device: Device, workers: int) -> Outcome:
    """Compile every job, behind a progress bar."""
    began = time.monotonic()
    with tqdm(total=len(jobs), desc=f"compile for {device.arch}", unit="kernel") as bar:
        outcomes = compile_many(jobs, device, workers=workers, progress=bar.update)
    compiled = [o for o in outcomes if isinstance(o, CompiledKernel)]
    refused = [(job, o) for job, o in zip(jobs, outcomes, strict=True) if isinstance(o, Exception)]
    return Outcome(len(jobs), compiled, refused, time.monotonic() - began)


def report(outcome: Outcome, device: Device) -> str:
    """The counts, the machine code seen, and how the register estimate compares."""
    n, seen = len(outcome.compiled), Counter[str]()
    for kernel in outcome.compiled:
        seen.update(technique for technique, count in kernel.sass.counts.items() if count)
    stages = Counter(STAGES.get(type(e).__name__, type(e).__name__) for _, e in outcome.refused)
    lines = [
        f"{device.name} ({device.arch}, ptxas {ptxas.version()}): {n} of {outcome.drawn} drawn "
        f"strategies build, validate, assemble and show their SASS ({outcome.seconds:.0f} s)",
        f"refused (a spill or a C75xx note refuses a kernel): {dict(stages) or 'none'}",
        "kernels whose machine code shows: "
        + ", ".join(f"{technique} {count}" for technique, count in sorted(seen.items())),
        _registers(outcome.compiled),
    ]
    for (problem, strategy), error in outcome.refused[:20]:
        axes = " ".join(f"{k}={v}" for k, v in problem.axes)
        lines.append(f"  {strategy.key} ({axes}): {type(error).__name__}: {error}")
    return "\n".join(lines)


def _registers(kernels: Sequence[CompiledKernel]) -> str:
    """Registers that ptxas took against the estimate, where no split fixes them."""
    excess = []
    for k in kernels:
        maker = family(k.strategy.family)
        estimate = maker.resources(k.strategy.fields(), k.problem, k.device).registers
        if not getattr(k.strategy, "producer_regs", 0):
            excess.append(k.usage.registers - int(estimate))
    if not excess:
        return "registers: every kernel has a register split"
    return (
        f"registers of {len(excess)} kernels without a split: ptxas minus estimate "
        f"{min(excess)}..{max(excess)}, over in {sum(e > 0 for e in excess)}"
    )


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m ptxflow.eval.survey",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gemms = [name for name in names() if name.startswith("gemm_")]
    parser.add_argument("--device", default="b200", help="b200, h200 or h100 (default: b200)")
    parser.add_argument("--samples", type=int, default=2000, help="strategies (default: 2000)")
    parser.add_argument("--definition", nargs="+", default=gemms, metavar="NAME|PATH")
    parser.add_argument(
        "--axes", nargs="+", default=["M=1,17,128,1000,4096"], metavar="M=1,17",
        help="values of the variable axes (default: M=1,17,128,1000,4096)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if every drawn strategy compiles and is proven, 1 if not, 2 on bad arguments."""
    args = arguments().parse_args(argv)
    try:
        if args.samples < 1:
            raise UsageError(f"--samples must be at least 1, not {args.samples}")
        device = find_device(args.device)
        jobs = draw(args.definition, parse_axes(args.axes), device, args.samples, args.seed)
        outcome = survey(jobs, device, args.jobs)
        print(report(outcome, device))
    except (UsageError, DefinitionError, ptxas.ToolMissing) as error:
        print(f"survey: {error}", file=sys.stderr)
        return 2
    return 0 if not outcome.refused else 1


if __name__ == "__main__":
    sys.exit(main())
