"""The fault campaign: a campaign on a cluster of simulated GPUs while things go wrong.

Kernels are those of recorded measurements, and take the recorded time; nothing is compiled, and
no GPU is there. Scheduler, workers, nannies, children, timeouts and records are the real ones. Some
kernels are planted to hang, to fault, to be wrong or to be ten times slower; Dask workers are
killed at random moments. The same kernels then go to one host without Dask, in no time each:
records and best kernels must be the same. A few of them once more for each thing that ends a
campaign, which then goes on by the same command: a full disk, records cut off in the middle, a
scheduler that is gone and comes anew; and while the clock jumps.
"""

import argparse
import functools
import hashlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput, Parser, align, reports
from ptxflow.compiler.backend.ptxas import Usage
from ptxflow.compiler.backend.sass import SassReport
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.launch import Launch
from ptxflow.env.measurements import SCREEN
from ptxflow.env.tasks.arguments import UsageError, find_problem, natural_int, positive_int, todays
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench import campaign, cluster
from ptxflow.eval.bench.candidates import Candidate, Origin, Settings, Workload
from ptxflow.eval.bench.local_cluster import local
from ptxflow.eval.bench.records import Record, RecordFile, read_records
from ptxflow.eval.bench.schedule import Compiler, Outcome
from ptxflow.eval.bench.worker import Worker, WorkerError

Json = dict[str, Any]
FATES = ("hang", "fault", "wrong", "slow")
FEW = 200  # kernels for each thing that ends a campaign
FULL, CUT, CLOCK, SCHEDULER = "disk full", "records cut", "clock jumps", "scheduler restarts"
BREAKS = FULL, CUT, CLOCK, SCHEDULER
SLOW = 10.0  # times the recorded time
TIMES = Path(__file__).parents[1] / "measurements" / "h200-serving-policy.jsonl.xz"
LAUNCH = Launch("simulated", ("1", "1", "1"), 128, (1, 1, 1), 0, ())
COMPILERS = 2  # Dask workers that compile

# The child of a GPU: a kernel's image says what comes of it.
CHILD = """
import json, os, signal, time
from ptxflow.eval.bench.worker import serve

def measure(job, stage):
    kernel = json.load(open(job["image"]))
    stage("check")
    check = {"correct": kernel["fate"] != "wrong", "seeds": job["seeds"]}
    if kernel["fate"] == "fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kernel["fate"] == "hang":
        time.sleep(3600)
    time.sleep(kernel["seconds"])
    if kernel["fate"] == "wrong":
        return {"status": "wrong", "detail": "planted", "check": check}
    stage("time")
    us = {name: kernel["us"] for name in ("median", "q1", "q3")} | {"samples": job["rounds"]}
    return {"status": "ok", "check": check, "latency_us": us, "peers": {"copy": 8.0},
            "timing": {"yardstick": "copy"}}

serve(measure, {"name": "simulated", "driver": "none", "capability": [9, 0]})
"""


@dataclass(frozen=True)
class Run:
    """What came of a run: seconds from the first kernel to the last, those of CPU of this process,
    of Dask's thread in it (client and nannies) and of the scheduler, Dask workers killed."""

    records: tuple[Record, ...]
    seconds: float
    cpu: float = 0.0
    dask: float = 0.0
    scheduler: float = 0.0
    kills: int = 0

    @property
    def doubled(self) -> int:
        return sum(n - 1 for n in Counter(r.identity for r in self.records).values())

    @property
    def statuses(self) -> Counter[str]:
        return Counter(r.status for r in self.records)

    @property
    def best(self) -> dict[Any, str]:
        """The key of each workload's fastest kernel."""
        found: dict[Any, tuple[float, str]] = {}
        for r in self.records:
            if r.status == "ok" and r.latency_us:
                this = float(r.latency_us["median"]), r.key
                place = r.definition, *sorted(r.axes.items())
                found[place] = min(this, found.get(place, this))
        return {place: key for place, (_, key) in found.items()}


# What is simulated -------------------------------------------------------------------------------


def plan(paths: Sequence[Path], count: int) -> tuple[list[Workload], dict[str, float]]:
    """Recorded workloads with `count` right kernels in all, and the recorded microseconds of each
    kernel by its `label`. BadInput where the files hold fewer."""
    by_place: dict[Any, dict[str, Record]] = {}
    for r in (r for path in paths for r in read_records(path)):
        if r.status == "ok" and r.latency_us and r.timing_pass == SCREEN:
            by_place.setdefault((r.definition, *sorted(r.axes.items())), {})[r.key] = r
    workloads, us = list[Workload](), dict[str, float]()
    for records in by_place.values():
        chosen = list(islice(records.values(), count - len(us)))
        if chosen and (workload := _workload(chosen)):
            workloads.append(workload)
            for candidate, record in zip(workload.candidates, chosen, strict=True):
                us[label(*candidate.job)] = float((record.latency_us or {})["median"])
    if len(us) < count:
        raise BadInput(f"{', '.join(map(str, paths))}: {len(us)} kernels, not {count}")
    return workloads, us


def _workload(records: Sequence[Record]) -> Workload | None:
    """The records' kernels as candidates; None of a definition, or of decisions, that
    are no more."""
    first = records[0]
    device, listed = DEVICES[first.device], [Strategy.from_json(r.strategy) for r in records]
    try:
        definition = load(first.definition)
        family, problem = find_problem(definition, first.axes)
        if any(todays(s, definition, "") != s for s in listed):
            return None
    except UsageError:
        return None
    candidates = tuple(Candidate(definition, family, problem, s, device) for s in listed)
    return Workload(definition, family, problem, device, candidates)


def label(problem: Problem, strategy: Strategy) -> str:
    axes = " ".join(f"{name}={value}" for name, value in problem.axes)
    return f"{problem.definition} {axes} {strategy.key}"


def fate(name: str, share: float, seed: int) -> str:
    """What is planted into the kernel of a label; "" into all but a `share` of them."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") / 2.0**64
    return FATES[int(drawn / share * len(FATES))] if drawn < share else ""


def images(us: dict[str, float], share: float, seed: int, seconds: float) -> dict[str, Json]:
    """By label, what a simulated GPU shall do of a kernel, in so many seconds."""
    planted = {name: fate(name, share, seed) for name in us}
    return {
        name: {"fate": planted[name], "seconds": seconds,
               "us": taken * (SLOW if planted[name] == "slow" else 1.0)}
        for name, taken in us.items()
    }  # fmt: skip


@functools.cache
def _table(path: str) -> dict[str, Json]:
    table: dict[str, Json] = json.loads(Path(path).read_text())
    return table


def simulated(path: str, tasks: Sequence[cluster.Task]) -> list[Outcome]:
    """Kernels that nobody compiled, whose images are of the table in the file."""
    usage, sass, table = Usage(0, 0, 0, 0, 0, 0, 0), SassReport({}, (), ()), _table(path)
    return [
        CompiledKernel(
            p, s, d, LAUNCH, "", json.dumps(table[label(p, s)]).encode(), usage, sass, ()
        )
        for p, s, d in tasks
    ]


def simulated_text(path: str, text: str) -> str:
    """In a Dask worker: as `cluster.compile_text`."""
    return cluster.outcome_text(simulated(path, cluster.read_tasks(text)))


@dataclass
class Here:
    """A compiler without processes."""

    path: str
    workers: int = 1

    def submit(self, tasks: list[cluster.Task]) -> Future[list[Outcome]]:
        made: Future[list[Outcome]] = Future()
        made.set_result(simulated(self.path, tasks))
        return made

    def close(self) -> None:
        pass


# Runs --------------------------------------------------------------------------------------------


def measure(
    workloads: Sequence[Workload], workers: Sequence[Worker], compiler: Compiler, out: Path,
    timeout: float,
) -> Run:  # fmt: skip
    """Every kernel on these workers, into the record file `out`."""
    settings = Settings(seeds=(1,), rounds=7, settle=0.0, timeout=timeout, every_baseline=False)
    with RecordFile(out) as records:
        tasks = campaign.tasks_of(workloads, records.records, again=False)
        began = time.monotonic(), time.process_time(), _dask()
        campaign.measure(tasks, workers, compiler, settings, records, Origin("none"), float("inf"))
        ended = time.monotonic(), time.process_time(), _dask()
        seconds, cpu, dask = (b - a for a, b in zip(began, ended, strict=True))
        return Run(tuple(records.records), seconds, cpu, dask)


def _scheduler(host: Any) -> float:
    """CPU seconds of a cluster's scheduler."""
    import psutil  # Dask's own need

    used = psutil.Process(host.scheduler.process.pid).cpu_times()
    return float(used.user + used.system)


def _dask() -> float:
    """CPU seconds of the thread that client and nannies share."""
    loops = [t.ident for t in threading.enumerate() if t.name == "IO loop" and t.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in loops)


def on_one_host(
    workloads: Sequence[Workload], table: str, out: Path, timeout: float, gpus: int = 1
) -> Run:
    """Without Dask."""
    workers = [Worker([sys.executable, "-c", CHILD]) for _ in range(gpus)]
    try:
        return measure(workloads, workers, Here(table), out, timeout)
    finally:
        for worker in workers:
            worker.stop()


def on_cluster(
    workloads: Sequence[Workload], table: str, out: Path, args: argparse.Namespace,
    killer: Callable[..., None] | None = None,
) -> Run:  # fmt: skip
    """On `--workers` Dask workers of this machine, of which some are killed."""
    host = local([{}] * args.workers, COMPILERS)
    connection, ended, killed = None, threading.Event(), list[int]()
    try:
        work = functools.partial(simulated_text, table)
        command = [sys.executable, "-c", CHILD]
        connection = cluster.Cluster(host.scheduler_address, command, work)
        workers, compiler = connection.gpus(workloads[0].device), connection.compiler()
        span = sum(len(w.candidates) for w in workloads) * args.seconds / args.workers
        doom = threading.Thread(target=killer or _kill, args=(host, span, args, ended, killed))
        doom.start()
        began = _scheduler(host)
        run = measure(workloads, workers, compiler, out, args.timeout)
        run = replace(run, scheduler=_scheduler(host) - began)
        ended.set()
        doom.join()
        compiler.close()
        return replace(run, kills=len(killed))
    finally:
        ended.set()
        if connection:
            connection.close()
        with suppress(OSError):  # a scheduler that is gone: its workers end by themselves
            host.close(None if host.scheduler.process.poll() is None else 5)


def _kill(
    host: Any, span: float, args: argparse.Namespace, ended: threading.Event, killed: list[int]
) -> None:
    """Kills `--kills` of the host's Dask workers, at random moments of `span` seconds."""
    rng = random.Random(args.seed)
    moments = sorted(rng.uniform(0.05, 0.85) * span for _ in range(args.kills))
    began = time.monotonic()
    for moment in moments:
        if ended.wait(max(0.0, began + moment - time.monotonic())):
            return
        living = [n.pid for n in host.workers.values() if n.pid]
        if living:
            os.kill(victim := rng.choice(living), signal.SIGKILL)
            killed.append(victim)


# What ends a campaign, and what must not -------------------------------------------------------


def broken(args: argparse.Namespace) -> tuple[Run, dict[str, Run]]:
    """A few kernels on one GPU, left alone; and what became of them, by what happened."""
    count, folder = min(FEW, args.kernels), args.out
    workloads, us = plan(args.times, count)
    tables = {}
    for seconds in (0.0, args.seconds):
        tables[seconds] = str((folder / f"few-{seconds:g}.json").resolve())
        write_whole(Path(tables[seconds]), json.dumps(images(us, args.share, args.seed, seconds)))
    rng, quick = random.Random(args.seed), tables[0.0]
    outs = {name: folder / f"{name.replace(' ', '-')}.jsonl" for name in ("alone", *BREAKS)}
    for out in outs.values():
        out.unlink(missing_ok=True)

    def on(out: Path) -> Run:
        return on_one_host(workloads, quick, out, args.timeout)

    alone = on(outs["alone"])
    size, found = outs["alone"].stat().st_size, dict[str, Run]()
    for name in BREAKS:
        out = outs[name]
        at = rng.randrange(size // 4, 3 * size // 4)
        if name == FULL:
            given = [*args.times], count, quick, out, args.timeout, at
            child = get_context("spawn").Process(target=_on_a_full_disk, args=given)
            child.start()
            child.join()
        elif name == CUT:
            out.write_bytes(outs["alone"].read_bytes()[:at])
        elif name == SCHEDULER:
            with suppress(WorkerError, BrokenProcessPool):  # whoever misses it first
                killer = functools.partial(_kill_scheduler, out, count // 4)
                on_cluster(workloads, tables[args.seconds], out, args, killer)
        ended = len(read_records(out))
        if name == SCHEDULER:
            run = on_cluster(workloads, tables[args.seconds], out, args, _kill_nobody)
        else:
            with _jumping_clock(rng) if name == CLOCK else nullcontext():
                run = on(out)
        found[name] = replace(run, kills=ended)
    return alone, found


def _on_a_full_disk(
    times: list[Path], count: int, table: str, out: Path, timeout: float, size: int
) -> None:
    """In a process whose files end at `size` bytes, in the middle of a record: it fails."""
    workloads, _ = plan(times, count)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    on_one_host(workloads, table, out, timeout)


@contextmanager
def _jumping_clock(rng: random.Random) -> Iterator[None]:
    """`time.time` of this process strays by hours, either way, between any two looks."""
    real = time.time
    time.time = lambda: real() + rng.uniform(-1e4, 1e4)
    try:
        yield
    finally:
        time.time = real


def _kill_scheduler(
    out: Path, enough: int, host: Any, _span: float, _args: argparse.Namespace,
    ended: threading.Event, killed: list[int],
) -> None:  # fmt: skip
    """Once the file of records has so many."""
    while not ended.wait(0.05):
        if out.exists() and out.read_bytes().count(b"\n") >= enough:
            host.scheduler.process.kill()
            killed.append(host.scheduler.process.pid)
            return


def _kill_nobody(*_: Any) -> None:
    """A campaign that is left alone."""


# The command -------------------------------------------------------------------------------------


def table_of(fleet: Run, one: Run, table: dict[str, Json], args: argparse.Namespace) -> str:
    """What the campaign found, a line a question."""
    hangs = sum(image["fate"] == "hang" for image in table.values())
    ideal = ((len(table) - hangs) * args.seconds + hangs * args.timeout) / args.workers
    alike = {place for place, key in one.best.items() if fleet.best.get(place) == key}
    asked = {r.identity for r in one.records}
    lost = len(asked - {r.identity for r in fleet.records})
    outcomes = ", ".join(f"{n} {status}" for status, n in sorted(fleet.statuses.items()))
    rows = [
        ("kernels", f"{len(table):,} of {len(one.best)} workloads, {args.seconds:g} s each"),
        ("simulated GPUs", f"{args.workers}, and {COMPILERS} compilers, on {os.cpu_count()} cores"),
        ("Dask workers killed", str(fleet.kills)),
        ("outcomes", outcomes),
        ("as on one host", "yes" if fleet.statuses == one.statuses else str(one.statuses)),
        ("records lost", str(lost)),
        ("records doubled", str(fleet.doubled)),
        ("best kernels as on one host", f"{len(alike)} of {len(one.best)}"),
        ("seconds", f"{fleet.seconds:.1f}; {ideal:.1f} were nothing lost"),
        ("efficiency", f"{ideal / fleet.seconds:.3f}"),
        (
            "CPU a kernel",
            "{:.2f} ms of the scheduler, {:.2f} here, {:.2f} of them client and nannies".format(
                *(1e3 * s / len(table) for s in (fleet.scheduler, fleet.cpu, fleet.dask))
            ),
        ),
    ]
    return align(rows)


def broken_table(alone: Run, found: dict[str, Run]) -> str:
    """A line for each thing that ended a campaign."""
    rows = [("then", "recorded before", "after the same command again")]
    for name, run in found.items():
        lost = {r.identity for r in alone.records} - {r.identity for r in run.records}
        alike = sum(run.best.get(place) == key for place, key in alone.best.items())
        end = f"{len(lost)} lost, {run.doubled} doubled, {alike} of {len(alone.best)} best kernels"
        rows.append((name, f"{run.kills} of {len(alone.records)}", end))
    return align(rows)


def holds(fleet: Run, one: Run) -> bool:
    """Whether nothing was lost, doubled or decided otherwise."""
    asked = {r.identity for r in one.records}
    whole = asked == {r.identity for r in fleet.records} and not fleet.doubled
    return whole and fleet.statuses == one.statuses and fleet.best == one.best


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="ptxflow faults",
        description=__doc__,
        epilog="""examples:
  the whole campaign, minutes:
    ptxflow faults --workers 32 --kernels 10000 --kills 20
  a quick look:
    ptxflow faults --workers 4 --kernels 200 --kills 2 --seconds 0.05

exit code: 0 nothing lost, doubled or decided otherwise, 1 something was, 2 bad input""",
    )
    add = parser.add_argument
    add("--workers", type=positive_int, default=8, help="simulated GPUs (default: 8)")
    add("--kernels", type=positive_int, default=1000, help="to measure (default: 1000)")
    add("--kills", type=natural_int, default=4, help="of Dask workers (default: 4)")
    about = "of kernels that hang, fault, are wrong or slow, in equal parts (default: 0.04)"
    add("--share", type=float, default=0.04, help=about)
    add("--seconds", type=float, default=0.3, help="that a kernel takes (default: 0.3)")
    add("--timeout", type=float, default=2.0, help="seconds until one hangs (default: 2)")
    add("--seed", type=natural_int, default=1, help="of faults and kills (default: 1)")
    about = "record files whose times are taken (default: of the repository)"
    add("--times", nargs="+", type=Path, default=[TIMES], metavar="FILE", help=about)
    add("--out", type=Path, default=Path("runs/faults"), help="folder (default: runs/faults)")
    args = parser.parse_args(argv)
    if not 0 <= args.share <= 1 or args.seconds < 0 or args.timeout <= args.seconds:
        parser.error("--share is from 0 to 1, and --timeout beyond --seconds, which is not below 0")
    return args


@reports("faults", WorkerError)
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    workloads, us = plan(args.times, args.kernels)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("one.jsonl", "cluster.jsonl"):
        (args.out / name).unlink(missing_ok=True)
    table, paths = images(us, args.share, args.seed, args.seconds), {}
    for name, seconds in (("one", 0.0), ("cluster", args.seconds)):
        paths[name] = str((args.out / f"{name}.json").resolve())
        write_whole(Path(paths[name]), json.dumps(images(us, args.share, args.seed, seconds)))
    fleet = on_cluster(workloads, paths["cluster"], args.out / "cluster.jsonl", args)
    gpus = min(args.workers, os.cpu_count() or 1)
    one = on_one_host(workloads, paths["one"], args.out / "one.jsonl", args.timeout, gpus)
    print(table_of(fleet, one, table, args))
    alone, found = broken(args)
    print(broken_table(alone, found))
    whole = holds(fleet, one) and all(holds(run, alone) for run in found.values())
    return 0 if whole else 1
