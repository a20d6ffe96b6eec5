"""A GPU that is scripted: kernels are named by their strategies, and the child that stands for the
GPU times them by these names. Nothing is compiled; schedules, children and records are real ones.
"""

import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.eval.bench import campaign
from ptxflow.eval.bench.schedule import Outcome
from ptxflow.eval.bench.worker import Worker
from tests.builders import compiled

MADE: Counter[str] = Counter()  # what was compiled, by key

CHILD = """
import os
from ptxflow.eval.bench.worker import serve

def us(image, samples):
    key = open(image, "rb").read().decode()
    return {"median": 5.0 + int(key[:4], 16) / 4096, "q1": 5.0, "q3": 25.0, "samples": samples}

def measure(job, stage):
    check = {"correct": True, "seeds": job["seeds"]}
    peers = {"copy": 8.0, "torch": 16.0} if job["every_baseline"] else {"copy": 8.0}
    about = {"peers": peers, "timing": {"yardstick": "copy"}}
    stage("time")
    if "kernels" in job:
        return {"status": "ok", "outcomes": [
            {"status": "ok", "detail": "", "check": check, "latency_us": us(k["image"], 40)} | about
            for k in job["kernels"]]}
    key = open(job["image"], "rb").read()
    if key[:1] == b"f":
        return {"status": "wrong", "detail": "off", "check": check | {"correct": False}}
    if key[:1] == b"e" and os.path.exists(os.environ["FAKE_BROKEN"]):
        os.unlink(os.environ["FAKE_BROKEN"])
        raise KeyError("the machinery failed once")
    return {"status": "ok", "check": check, "latency_us": us(job["image"], 7)} | about

serve(measure, {"name": "NVIDIA H200", "uuid": "GPU-0"})
"""


class FakeCompiler:
    """Compiles on a thread, by a function."""

    def __init__(self, compile_one: Callable[[Problem, Strategy, Device], Outcome], workers: int):
        self.compile_one, self.workers = compile_one, workers
        self.pool = ThreadPoolExecutor(1)

    def submit(self, tasks: list[tuple[Problem, Strategy, Device]]) -> Future[list[Outcome]]:
        return self.pool.submit(lambda: [self.compile_one(*task) for task in tasks])

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


def fake_compile(problem: Problem, s: Strategy, device: Device) -> Outcome:
    MADE[s.key] += 1
    if s.key[0] == "d":
        return HazardError("a race")
    return compiled(problem, s, device, image=s.key.encode())


def script_gpus(
    monkeypatch: pytest.MonkeyPatch,
    fleet: Callable[[Device], list[Worker]],
    compile_one: Callable[[Problem, Strategy, Device], Outcome],
) -> None:
    """Campaigns find these workers, and kernels that a function makes."""
    monkeypatch.setattr(campaign, "fleet", fleet)
    monkeypatch.setattr(campaign, "ProcessCompiler", partial(FakeCompiler, compile_one))
    monkeypatch.setattr(ptxas, "version", lambda: "13.0.88")
    monkeypatch.setattr(ptxas, "executable", lambda: Path("ptxas"))


def scripted_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: str = CHILD) -> Worker:
    """What `open_measurer` finds. A file `broken` in the folder makes the child fail once."""
    script = tmp_path / "child.py"
    script.write_text(child)
    environment = {"FAKE_BROKEN": str(tmp_path / "broken")}
    worker = Worker([sys.executable, str(script)], environment=environment)
    script_gpus(monkeypatch, lambda device: [worker], fake_compile)
    MADE.clear()
    return worker
