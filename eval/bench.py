"""Measure kernels on this machine's GPU: `python -m ptxflow.eval.bench --help`.

Strategies are drawn uniformly (or read from files), compiled on all cores with the machine's own
ptxas, and run one at a time in a child process that checks them before it times them beside
torch.mm. Every outcome is one appended record; a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ptxflow import __version__
from ptxflow.compiler import ptxas
from ptxflow.compiler.compile import CompiledKernel, Job, compile_many
from ptxflow.compiler.device import Device
from ptxflow.compiler.runtime import RuntimeUnavailable, require_gpu
from ptxflow.compiler.strategy import Family, Problem, Strategy
from ptxflow.env.cost import model_tflops
from ptxflow.eval.arguments import (
    UsageError,
    find_device,
    find_problem,
    find_space,
    parse_axes,
    product,
    read_strategies,
)
from ptxflow.eval.definition import Definition, DefinitionError, load, names
from ptxflow.eval.records import Identity, Record, RecordError, RecordFile, identity
from ptxflow.eval.report import PEER, bench_table, totals
from ptxflow.eval.worker import Worker, WorkerError, job

FAILURES = (
    UsageError, DefinitionError, RecordError, RuntimeUnavailable, WorkerError, ptxas.ToolMissing,
    BrokenProcessPool,
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A strategy to measure for a definition at bound axes."""

    definition: Definition
    family: Family
    problem: Problem
    strategy: Strategy
    device: Device

    @property
    def axes(self) -> dict[str, int]:
        """The variable axes alone: the constants are the definition's."""
        return {name: self.problem[name] for name in self.definition.var_axes}

    @property
    def identity(self) -> Identity:
        return identity(self.definition.name, self.axes, self.strategy.key, self.device.name)

    @property
    def label(self) -> str:
        axes = " ".join(f"{n}={v}" for n, v in self.axes.items())
        return f"{self.definition.name} {axes} {self.strategy.key}"


@dataclass(frozen=True)
class Settings:
    """How to measure. `timeout` is seconds for one kernel, checks and timing together."""

    seeds: tuple[int, ...] = (1, 2, 3)
    rounds: int = 20
    settle: float = 0.5
    timeout: float = 60.0
    jobs: int | None = None


def sample_uniform(
    definition: Definition, axes: dict[str, int], device: Device, count: int, seed: int
) -> list[Candidate]:
    """`count` distinct strategies drawn uniformly (all of them where there are no more)."""
    family, problem = find_problem(definition, axes)
    space = find_space(family, problem, device)
    where = f"{definition.name} {sorted(axes.items())}"
    rng = np.random.default_rng([seed, zlib.crc32(where.encode())])
    drawn = rng.choice(len(space), size=min(count, len(space)), replace=False)
    return [
        Candidate(definition, family, problem, space.strategy(int(space.codes[i])), device)
        for i in drawn
    ]


def read_candidates(path: Path, device: Device) -> list[Candidate]:
    """The candidates of a strategy file; a strategy that is not legal there is a UsageError."""
    candidates = []
    for definition, axes, strategy in read_strategies(path):
        family, problem = find_problem(definition, axes)
        refusals = family.refusals(problem, strategy, device)
        if refusals:
            raise UsageError(
                f"{path}: {strategy.key} is not legal on {device.name}: {'; '.join(refusals)}"
            )
        candidates.append(Candidate(definition, family, problem, strategy, device))
    return candidates


def measure_all(
    candidates: Sequence[Candidate],
    records: RecordFile,
    worker: Worker,
    settings: Settings,
    gpu: dict[str, Any],
) -> None:
    """Compile and measure every candidate; each outcome is appended as soon as it is known."""
    if not candidates:
        return
    compiler = ptxas.version()
    jobs = [(c.problem, c.strategy) for c in candidates]
    outcomes = compile_all(jobs, candidates[0].device, settings.jobs)
    built: list[tuple[Candidate, CompiledKernel]] = []
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if isinstance(outcome, CompiledKernel):
            built.append((candidate, outcome))
        else:
            result = {"status": "compile_error", "detail": f"{type(outcome).__name__}: {outcome}"}
            _append(records, make_record(candidate, result, gpu, compiler))
    with tempfile.TemporaryDirectory(prefix="ptxflow-bench-") as folder:
        for candidate, kernel in tqdm(built, desc="measure", unit="kernel"):
            result = run_one(candidate, kernel, worker, settings, Path(folder))
            _append(records, make_record(candidate, result, gpu, compiler, kernel))


def compile_all(
    jobs: Sequence[Job], device: Device, workers: int | None
) -> list[CompiledKernel | Exception]:
    """Compile on all cores (or `workers` of them) behind a progress bar; see `compile_many`."""
    with tqdm(total=len(jobs), desc="compile", unit="kernel") as bar:
        count = workers or os.cpu_count() or 1
        return compile_many(jobs, device, workers=count, progress=bar.update)


def run_one(
    candidate: Candidate, kernel: CompiledKernel, worker: Worker, settings: Settings, folder: Path
) -> dict[str, Any]:
    """Check and time one compiled kernel in the worker; see `Worker.run`."""
    image = folder / "kernel.cubin"
    image.write_bytes(kernel.cubin)
    return worker.run(
        job(
            candidate.definition.to_json(),
            candidate.axes,
            kernel.launch.to_json(),
            image,
            seeds=settings.seeds,
            rounds=settings.rounds,
            settle=settings.settle,
        ),
        settings.timeout,
    )


def make_record(
    candidate: Candidate,
    result: dict[str, Any],
    gpu: dict[str, Any],
    ptxas_version: str,
    kernel: CompiledKernel | None = None,
) -> Record:
    """The record of one outcome, with everything that follows from it."""
    latency = result.get("latency_us")
    peers = result.get("peers", {})
    checked = result.get("check", {})
    fields = candidate.strategy.fields()
    modelled = model_tflops(candidate.family, fields, candidate.problem, candidate.device)
    return Record(
        definition=candidate.definition.name,
        axes=candidate.axes,
        strategy=candidate.strategy.to_json(),
        key=candidate.strategy.key,
        device=candidate.device.name,
        status=result["status"],
        detail=result.get("detail", ""),
        gpu=gpu,
        ptxas=ptxas_version,
        usage=asdict(kernel.usage) if kernel else {},
        sass_ok=kernel.sass.ok if kernel else None,
        correct=checked.get("correct"),
        check=checked,
        latency_us=latency,
        peers=peers,
        ratio=peers[PEER] / latency["median"] if latency and PEER in peers else None,
        tflops=candidate.problem.flops / latency["median"] / 1e6 if latency else None,
        timing=result.get("timing", {}),
        modelled_tflops=float(modelled[0]),
        ptxflow=__version__,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _append(records: RecordFile, record: Record) -> None:
    records.append(record)
    if record.status != "ok":
        axes = " ".join(f"{n}={v}" for n, v in record.axes.items())
        line = f"{record.definition} {axes} {record.key}: {record.status}: {record.detail}"
        tqdm.write(line, file=sys.stderr)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ptxflow.eval.bench",
        description=__doc__.partition("\n")[2],
        epilog="example: python -m ptxflow.eval.bench --device h200 --samples 8 "
        "--axes M=1,17,128,1000,4096 --out runs/h200.jsonl",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--definition", nargs="+", metavar="NAME|PATH", help="default: every gemm definition")
    add(
        "--axes",
        nargs="+",
        metavar="M=1,17",
        default=["M=1024"],
        help="values of the variable axes, by comma; several axes combine (default: M=1024)",
    )
    add("--samples", type=int, default=8, help="strategies per definition and axes (default: 8)")
    add("--seed", type=int, default=0, help="of the uniform draw (default: 0)")
    add(
        "--strategies",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure the strategies of these JSON files (sample.py's summary.json) instead",
    )
    add("--device", default="h200", help="b200, h200 or h100 (default: h200)")
    add("--out", type=Path, default=Path("runs/bench.jsonl"), help="the record file, appended to")
    add("--again", action="store_true", help="measure what the file already holds, too")
    add("--timeout", type=float, default=60.0, help="seconds per kernel (default: 60)")
    add("--rounds", type=int, default=20, help="timed samples per kernel (default: 20)")
    add("--check-seeds", type=int, default=3, help="fresh inputs per kernel (default: 3)")
    add("--jobs", type=int, help="compiler processes (default: one per core)")
    args = parser.parse_args(argv)  # fmt: skip
    for name in ("samples", "timeout", "rounds", "check_seeds"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return args


def plan(args: argparse.Namespace, device: Device) -> list[Candidate]:
    """Every candidate the arguments ask for, grouped by problem, each once."""
    candidates: list[Candidate] = []
    if args.strategies:
        for path in args.strategies:
            candidates += read_candidates(path, device)
    else:
        chosen = args.definition or [n for n in names() if load(n).op_type == "gemm"]
        rows = product(parse_axes(args.axes))
        for definition in map(load, chosen):
            for axes in rows:
                candidates += sample_uniform(definition, axes, device, args.samples, args.seed)
    return list({c.identity: c for c in candidates}.values())


def run(args: argparse.Namespace) -> int:
    device = find_device(args.device)
    candidates = plan(args, device)
    gpu = require_gpu(device).to_json()
    ptxas.executable()
    settings = Settings(
        seeds=tuple(range(1, args.check_seeds + 1)),
        rounds=args.rounds,
        timeout=args.timeout,
        jobs=args.jobs,
    )
    worker = Worker()
    with RecordFile(args.out) as records:
        held = records.latest()
        todo = [c for c in candidates if args.again or c.identity not in held]
        try:
            worker.start()
            measure_all(todo, records, worker, settings, gpu)
        finally:
            worker.stop()
        outcomes = [records.latest()[c.identity] for c in candidates]
    print(bench_table(outcomes))
    skipped = len(candidates) - len(todo)
    note = f" ({skipped} of them recorded before)" if skipped else ""
    print(f"{gpu['name']}, driver {gpu['driver']}; records in {args.out}")
    print(totals(outcomes) + note)
    return 0 if all(r.status == "ok" for r in outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        return run(args)
    except FAILURES as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; the records so far are kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
