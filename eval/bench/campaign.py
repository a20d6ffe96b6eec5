"""Measure strategies on this machine's GPUs.

Strategies are drawn uniformly from a workload's space or a stated part of it, taken whole, or read
from files. Compilation on all cores runs ahead of the GPUs; each kernel is checked, then timed
beside a yardstick in a child process, and the best of each workload are timed again, all in the
same rounds, beside every library there is. Every outcome is one appended record; a run that was cut
short goes on where it stopped.
"""

import argparse
import ctypes
import functools
import json
import os
import shlex
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ptxflow.command import CLUSTER, LOCAL, BadInput, Parser, add_cluster, reports
from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.backend.runtime import Driver, RuntimeUnavailable, gpu_info, require_gpu
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from ptxflow.env.space import decision_digest
from ptxflow.env.tasks.arguments import (
    UsageError,
    find_device,
    find_problem,
    natural_int,
    parse_axes,
    parse_fix,
    positive_int,
    product,
    read_strategies,
)
from ptxflow.env.tasks.definition import Definition, load, names
from ptxflow.env.tasks.spaces import cores
from ptxflow.env.tasks.workload import workloads as workload_rows
from ptxflow.eval.bench import schedule
from ptxflow.eval.bench.candidates import (
    Origin,
    Settings,
    Workload,
    listed_workload,
    make_record,
    sample_workload,
)
from ptxflow.eval.bench.records import Record, RecordFile, read_records
from ptxflow.eval.bench.report import bench_table, settled, totals
from ptxflow.eval.bench.schedule import Compiler, ProcessCompiler, Schedule, Task, make_task
from ptxflow.eval.bench.worker import Worker, WorkerError

FAILURES = (BadInput, RuntimeUnavailable, WorkerError, ptxas.ToolMissing, BrokenProcessPool)
SHOWN = 20  # failures that are printed as they come; all are in the records
STOPPED = 3  # exit code where the time limit left strategies unmeasured


def plan(args: argparse.Namespace, device: Device) -> list[Workload]:
    """The workloads that the arguments ask for, each once, in order; may raise UsageError."""
    found: list[Workload] = []
    for path in args.strategies or []:
        found += from_list(read_strategies(path), device, str(path))
    if args.workloads:
        found += from_file(args.workloads, device, args)
    elif not args.strategies:
        count = None if args.all else args.samples
        fix = parse_fix(args.fix)
        for definition, axes in places(args.definition, parse_axes(args.axes or [])):
            found.append(sample_workload(definition, axes, device, fix, count, args.seed))
    return merge(found)


def places(
    chosen: Sequence[str] | None, axes: Mapping[str, Sequence[int]]
) -> list[tuple[Definition, dict[str, int]]]:
    """Definitions at bound axes: the chosen ones, or all with kernels that vary in these axes; at
    the given axes, or at the workloads that come with them. UsageError where there is none."""
    definitions = [load(name) for name in chosen or names()]
    if not chosen:
        definitions = [d for d in definitions if has_kernels(d, axes)]
    if not definitions:
        raise UsageError(f"no definition with kernels has the variable axes {', '.join(axes)}")
    return [
        (definition, bound)
        for definition in definitions
        for bound in (
            product(axes) if axes else [dict(w.axes) for w in workload_rows(definition.name)]
        )
    ]


def has_kernels(definition: Definition, axes: Iterable[str]) -> bool:
    """Whether a family builds kernels for the definition, and it varies in these axes, if any."""
    if axes and set(axes) != set(definition.var_axes):
        return False
    try:
        find_problem(definition, workload_rows(definition.name)[0].axes)
    except UsageError:
        return False
    return True


def from_list(
    rows: Sequence[tuple[Definition, dict[str, int], Strategy]], device: Device, where: str
) -> list[Workload]:
    """The rows of a strategy file, by workload."""
    groups: dict[str, tuple[Definition, dict[str, int], list[Strategy]]] = {}
    for definition, axes, strategy in rows:
        place = f"{definition.name} {sorted(axes.items())}"
        groups.setdefault(place, (definition, axes, []))[2].append(strategy)
    return [listed_workload(d, axes, device, listed, where) for d, axes, listed in groups.values()]


def from_file(path: Path, device: Device, args: argparse.Namespace) -> list[Workload]:
    """A workloads file: a JSON list of {definition, axes, fix?, all? | samples? | strategies?}.

    UsageError for a file that is none; OSError where it cannot be read.
    """
    try:
        rows = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    known = {"definition", "axes", "fix", "all", "samples", "strategies", "seed"}
    found: list[Workload] = []
    for i, row in enumerate(rows if isinstance(rows, list) else [rows], 1):
        where = f"{path}, workload {i}"
        if not isinstance(row, dict) or not {"definition", "axes"} <= set(row) <= known:
            raise UsageError(f"{where}: must have definition and axes, may have {sorted(known)}")
        if "strategies" in row:
            listed = path.parent / row["strategies"]
            found += from_list(read_strategies(listed), device, str(listed))
            continue
        try:
            count = None if row.get("all") else positive_int(row.get("samples", args.samples))
            seed = natural_int(row.get("seed", args.seed))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{where}: samples or seed {error}") from None
        axes = {n: v if isinstance(v, list) else [v] for n, v in row["axes"].items()}
        definition, fix = load(row["definition"]), _fix(row.get("fix", {}), where)
        found += [
            sample_workload(definition, bound, device, fix, count, seed) for bound in product(axes)
        ]
    return found


def _fix(data: Any, where: str) -> dict[str, list[str]]:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: fix must be an object, as in {{'swizzle': 128}}")
    return {n: [str(c) for c in (v if isinstance(v, list) else [v])] for n, v in data.items()}


def merge(found: Sequence[Workload]) -> list[Workload]:
    """One workload for each definition and axes, with every candidate once."""
    merged: dict[Any, Workload] = {}
    for workload in found:
        before = merged.get(workload.place)
        if before is not None:
            both = {c.strategy.key: c for c in (*before.candidates, *workload.candidates)}
            default = before.default or workload.default
            workload = replace(before, candidates=(*both.values(),), size=None, default=default)
        merged[workload.place] = workload
    return list(merged.values())


def show_plan(tasks: Sequence[Task]) -> str:
    """One line a workload: the size of its sub-space, what is chosen, what is left to measure."""
    lines = []
    for task in tasks:
        w = task.workload
        of = f" of {w.size} in the sub-space" if w.size is not None else ""
        lines.append(f"{w.label}: {len(w.candidates)}{of}, {len(task.todo)} to measure")
    total = sum(len(t.todo) for t in tasks)
    return "\n".join([*lines, f"{len(tasks)} workloads, {total} strategies to measure"])


def fleet(device: Device) -> list[Worker]:
    """A worker for each visible GPU that runs the device's code; RuntimeUnavailable without one."""
    require_gpu(device)
    driver = Driver()
    return [
        Worker(environment={"CUDA_VISIBLE_DEVICES": token})
        for i, token in enumerate(_tokens(driver))
        if gpu_info(i, driver).runs(device)
    ]


def _tokens(driver: Driver | None = None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each visible GPU; RuntimeUnavailable without a driver."""
    count = ctypes.c_int()
    (driver or Driver())("cuDeviceGetCount", ctypes.byref(count))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    tokens = listed.split(",") if listed else map(str, range(count.value))
    return [token.strip() for token in tokens][: count.value]


@contextmanager
def machines(
    device: Device, jobs: int | None = None
) -> Iterator[tuple[Sequence[Worker], Compiler]]:
    """GPUs that run the device's code, and a compiler of `jobs` processes: this machine's, or those
    of the cluster that `--cluster` names. RuntimeUnavailable or BadInput where there is none."""
    workers: Sequence[Worker]
    compiler: Compiler
    with ExitStack() as held:
        if address := os.environ.get(CLUSTER):
            from ptxflow.eval.bench.cluster import Cluster
            from ptxflow.eval.bench.local_cluster import of_this_machine

            if address.startswith(LOCAL):
                host = of_this_machine(address.removeprefix(LOCAL), _tokens(), jobs)
                held.callback(host.close)
                address = host.scheduler_address
            cluster = Cluster(address)
            held.callback(cluster.close)
            workers, compiler = cluster.gpus(device), cluster.compiler()
        else:
            workers = fleet(device)
            ptxas.executable()
            compiler = ProcessCompiler(jobs or max(1, cores() - len(workers)))
        held.callback(compiler.close)
        for worker in workers:
            held.callback(worker.stop)
        yield workers, compiler


class Log:
    """Turns outcomes into records, a progress bar, and a line for each of the first failures."""

    def __init__(self, records: RecordFile, origin: Origin, total: int):
        self.records, self.origin = records, origin
        self.failures = 0
        self.bar = tqdm(total=total, desc="measure", unit="kernel", smoothing=0.05)

    def __call__(self, m: schedule.Measured) -> None:
        record = make_record(m.candidate, m.result, m.gpu, self.origin, m.kernel, m.timing_pass)
        self.records.append(record)
        self.bar.update(m.timing_pass == "screen")
        if record.status != "ok":
            self.failures += 1
            axes = " ".join(f"{n}={v}" for n, v in record.axes.items())
            line = f"{record.definition} {axes} {record.key}: {record.status}: {record.detail}"
            if self.failures <= SHOWN:
                self.say(line)

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()
        if self.failures > SHOWN:
            self.say(f"{self.failures - SHOWN} more failures are in the records")


def origin_of(workloads: Sequence[Workload], argv: Sequence[str]) -> Origin:
    """What identifies this run in its records."""
    families = {w.family.name: w.family for w in workloads}
    now = datetime.now(UTC)
    run = {
        "id": f"{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}",
        "command": shlex.join(["ptxflow", "campaign", *argv]),
        "code": cache.sources(),
        "spaces": {name: decision_digest(f) for name, f in families.items()},
    }
    return Origin(ptxas.version(), run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Plan, measure and print; the exit code. Raises one of FAILURES."""
    began = time.monotonic()
    device = find_device(args.device)
    workloads = plan(args, device)
    earlier = [r for path in args.measured or [] for r in read_records(path)]
    if args.plan:
        recorded = [*earlier, *read_records(args.out)]
        print(show_plan(tasks_of(workloads, recorded, args.again)))
        return 0
    origin = origin_of(workloads, argv)
    settings = Settings(
        seeds=tuple(range(1, args.check_seeds + 1)), rounds=args.rounds, settle=args.settle,
        timeout=args.timeout, refine=args.refine, refine_rounds=args.refine_rounds,
        refine_seconds=args.refine_seconds, ties=args.ties, libraries=not args.alone,
        every_baseline=not (args.refine or args.alone),
    )  # fmt: skip
    with machines(device, args.jobs) as (workers, compiler), RecordFile(args.out) as records:
        recorded = [*earlier, *records.records]
        warn_of_other_code(recorded, origin)
        tasks = tasks_of(workloads, recorded, args.again)
        print(show_plan(tasks), flush=True)
        skipped = sum(len(t.workload.candidates) - len(t.todo) for t in tasks)
        deadline = began + args.time_limit
        finished = measure(tasks, workers, compiler, settings, records, origin, deadline)
        outcomes = chosen_records([*earlier, *records.records], workloads)
    print(bench_table(outcomes))
    note = f" ({skipped} of them recorded before)" if skipped else ""
    print(f"{len(workers)} GPUs, {time.monotonic() - began:.0f} s; records in {args.out}")
    print(totals(settled(outcomes)) + note)
    if not finished:
        missing = sum(len(w.candidates) for w in workloads) - len(settled(outcomes))
        print(f"stopped: {missing} strategies are not measured; the same command goes on")
        return STOPPED
    return 0 if all(r.status == "ok" for r in outcomes) else 1


def measure(
    tasks: Sequence[Task], workers: Sequence[Worker], compiler: Compiler, settings: Settings,
    records: RecordFile, origin: Origin, deadline: float,
) -> bool:  # fmt: skip
    """Whether everything was measured before `deadline`, in seconds of `time.monotonic`.

    Outcomes are appended to `records`. WorkerError where every GPU is lost.
    """
    log = Log(records, origin, sum(len(t.todo) for t in tasks))
    try:
        return Schedule(tasks, workers, compiler, settings, log, log.say).run(deadline)
    finally:
        log.close()


def tasks_of(workloads: Sequence[Workload], recorded: Sequence[Record], again: bool) -> list[Task]:
    """What is left to measure of each workload; all of it with `again`."""
    by_place: dict[Any, list[Record]] = {}
    for r in recorded:
        by_place.setdefault((r.device, r.definition, tuple(sorted(r.axes.items()))), []).append(r)
    return [make_task(w, by_place.get((w.device.name, *w.place), ()), again) for w in workloads]


def chosen_records(records: Sequence[Record], workloads: Sequence[Workload]) -> list[Record]:
    """The last record of each identity that the workloads ask for."""
    asked = {c.identity[:4] for w in workloads for c in w.candidates}
    latest = {r.identity: r for r in records}
    return [r for r in latest.values() if r.identity[:4] in asked]


def warn_of_other_code(recorded: Sequence[Record], origin: Origin) -> None:
    """Say on stderr how many records are of kernels by other code than this run's."""
    codes = Counter(r.run.get("code", "unknown") for r in recorded)
    other = sum(n for code, n in codes.items() if code != origin.run["code"])
    if other:
        print(f"{other} earlier records are of kernels by another version of the compiler; "
              "--again measures them anew", file=sys.stderr)  # fmt: skip


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="ptxflow campaign",
        description=__doc__,
        epilog="""examples:
  8 strategies of every definition that varies in M alone, at five sizes:
    ptxflow campaign --axes M=1,17,128,1000,4096 --out runs/h200.jsonl
  of one definition, at every workload that comes with it:
    ptxflow campaign --definition rmsnorm_h4096 --samples 100
  every strategy of a sub-space:
    ptxflow campaign --definition gemm_n4096_k4096 --axes M=1,64,4096 \\
        --fix tile_k=64,raster_group=8 --all
  many workloads within nine minutes; the same command goes on afterwards:
    ptxflow campaign --workloads workloads.json --time-limit 540

  on the GPUs of a Dask cluster:
    ptxflow campaign --cluster tcp://host:8786 --samples 16

exit code: 0 all right, 1 a kernel was not, 2 bad input or no GPU, 3 stopped by --time-limit""",
    )
    _what(parser)
    _how(parser)
    args = parser.parse_args(argv)
    for name in ("timeout", "time_limit"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return args


def _what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to measure").add_argument
    count = functools.partial(add, type=positive_int)
    files = functools.partial(add, type=Path, metavar="FILE")
    add("--device", default="h200", help="b200, h200 or h100 (default: h200)")
    about = "default: all with kernels, of the axes given"
    add("--definition", nargs="+", metavar="NAME|PATH", help=about)
    about = "values of the variable axes, by comma; several axes combine (default: the workloads "
    add("--axes", nargs="+", metavar="M=1,17", help=f"{about}that come with the definition)")
    about = "only strategies with these choices: tile_k=64,tile_m=64|128"
    add("--fix", nargs="+", metavar="NAME=A|B", default=[], help=about)
    count("--samples", default=8, help="strategies per definition and axes (default: 8)")
    add("--all", action="store_true", help="every valid strategy instead of samples")
    add("--seed", type=natural_int, default=0, help="of the uniform draw (default: 0)")
    about = "the strategies of these JSON files instead (sample.py's summary.json)"
    files("--strategies", nargs="+", help=about)
    about = "a JSON list of workloads instead: definition, axes, and fix, all, samples, seed or "
    files("--workloads", help=f"{about}strategies (a file beside it)")
    add("--plan", action="store_true", help="print how many strategies that is, and stop")


def _how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how").add_argument
    count = functools.partial(add, type=positive_int)
    seconds = functools.partial(add, type=float, metavar="SECONDS")
    out = Path("runs/campaign.jsonl")
    add("--out", type=Path, default=out, help=f"the record file, appended to (default: {out})")
    about = "record files, packed or not: what they hold is not measured again"
    add("--measured", nargs="+", type=Path, metavar="FILE", help=about)
    add("--again", action="store_true", help="measure what is recorded, too")
    about = "after this, finish what is in flight, refine what is screened, and stop"
    seconds("--time-limit", default=float("inf"), help=about)
    count("--rounds", default=7, help="timed samples per kernel (default: 7)")
    about = "of each workload, time the best N again, all in the same rounds (default: 32)"
    add("--refine", type=natural_int, default=32, metavar="N", help=about)
    about = "samples of each of those, or as many as take --refine-seconds (default: 40)"
    count("--refine-rounds", default=40, help=about)
    seconds("--refine-seconds", default=Settings.refine_seconds, help="(default: 1)")
    add("--alone", action="store_true", help="no libraries beside the best: the yardstick alone")
    about = f"for those that may be the fastest, against each other (default: {Settings.ties:g})"
    seconds("--ties", default=Settings.ties, help=about)
    count("--check-seeds", default=2, help="fresh inputs per kernel (default: 2)")
    about = "of the yardstick before a workload, for the clocks (default: 0.5)"
    seconds("--settle", default=0.5, help=about)
    seconds("--timeout", default=20.0, help="per kernel (default: 20)")
    count("--jobs", help="compiler processes here (default: one per core, less the GPUs)")
    add_cluster(parser)


@reports("campaign", *FAILURES)
def main(argv: Sequence[str] | None = None) -> int:
    """The exit codes that --help names; 130 where Ctrl-C ends it, with the records kept."""
    argv = sys.argv[1:] if argv is None else argv
    args = arguments(argv)
    try:
        return run(args, argv)
    except KeyboardInterrupt:
        print("campaign: interrupted; the records so far are kept", file=sys.stderr)
        return 130
