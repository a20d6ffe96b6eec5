"""Hardware counters of one kernel, by Nsight Compute around the worker that measures.

The worker is started by `ncu`, which reads counters between the profiler's start and stop alone, so
that checks and libraries are not in it. What ncu writes is CSV; launches of one kernel are weighted
by their time. Clocks are left as they are (`--clock-control none`).
"""

import csv
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from threading import Lock

from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.eval.bench.candidates import Candidate, Settings, run_one
from ptxflow.eval.bench.worker import Worker, WorkerError
from ptxflow.eval.tune.gaps import Profile

TIME = "gpu__time_duration.sum"
COMPUTE = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
MEMORY = "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
REASONS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "no_instruction",
    "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {STALL.format(reason): reason for reason in REASONS}
METRICS = (TIME, COMPUTE, MEMORY, *STALLS)
START = 120.0  # seconds for ncu and the worker to be there
SETTINGS = Settings(seeds=(1,), rounds=0, every_baseline=False, timeout=120.0)


class NoProfile(RuntimeError):
    """There is no profile, and why: one line."""


def profile(
    ncu: str, candidate: Candidate, kernel: CompiledKernel, folder: Path, lock: Lock
) -> Profile:
    """The counters of a kernel that is right; NoProfile where ncu is missing, is refused them, does
    not answer in time, or writes what is not its CSV. The `lock` of the GPU is taken once ncu and
    the worker, which need seconds to be there, are."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        log = Path(own, "ncu.csv")
        command = [
            ncu, "--csv", "--log-file", str(log), "--clock-control", "none", "--profile-from-start",
            "off", "--target-processes", "all", "--metrics", ",".join(METRICS),
            sys.executable, "-m", "ptxflow.eval.bench.worker",
        ]  # fmt: skip
        worker = Worker(command, start_timeout=START)
        try:
            worker.start()
            with lock:
                result = run_one(candidate, kernel, worker, SETTINGS, folder, profile=True)
            worker.end(START)
        except (OSError, WorkerError, subprocess.TimeoutExpired) as error:
            raise NoProfile(f"ncu: {said(log) or error}") from None
        finally:
            worker.stop()
        if result["status"] != "ok":
            raise NoProfile(f"ncu: the kernel under it is {result['status']}: {result['detail']}")
        return read(log)


def read(log: Path) -> Profile:
    """The CSV of ncu; NoProfile where it is none or lacks a metric."""
    try:
        text = log.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise NoProfile(f"ncu wrote no text: {error}") from None
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict[str, float]] = defaultdict(dict)
    try:
        for row in csv.DictReader(lines):
            launches[row["ID"]][row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
        seconds = [values[TIME] for values in launches.values()]
        total = sum(seconds)
        mean = {
            name: sum(v[name] * s for v, s in zip(launches.values(), seconds, strict=True)) / total
            for name in METRICS
        }
    except (KeyError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        raise NoProfile(
            f"ncu: {said(log) or 'no CSV with the metrics that were asked for'}"
        ) from None
    reason = max(STALLS, key=mean.__getitem__)
    waits = sum(mean[name] for name in STALLS)
    return Profile(
        round(mean[COMPUTE] / 100, 4), round(mean[MEMORY] / 100, 4),
        round(mean[reason] / waits, 4) if waits else 0.0, STALLS[reason],
    )  # fmt: skip


def said(log: Path) -> str:
    """The first complaint of ncu, as `==ERROR== ...`, if it made one."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix("==ERROR== ") for line in lines if "==ERROR==" in line), "")
