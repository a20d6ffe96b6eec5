"""The parent against children that hang, die, lie or stay silent: each costs one job at most."""

import sys
import time
from pathlib import Path

import pytest

from ptxflow.eval.bench.worker import Worker, WorkerError

CHILD = """
import os, sys, time
from ptxflow.eval.bench.worker import serve

def measure(job, stage):
    stage("inputs")
    if job["do"] == "slow inputs":
        time.sleep(60)
    if job["do"] == "build":
        stage("making flashinfer")
        time.sleep(job["seconds"])
    stage("check")
    match job["do"]:
        case "hang":
            time.sleep(60)
        case "die":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), 11)
        case "bug":
            raise KeyError("a bug of ours")
        case "fault":
            return {"status": "fault", "detail": "CUDA_ERROR_ILLEGAL_ADDRESS", "last": True}
        case "print":
            print("stray text on stdout")
    return {"status": "ok", "pid": os.getpid()}

serve(measure, {"name": "fake"})
"""


@pytest.fixture
def worker(tmp_path: Path):  # type: ignore[no-untyped-def]
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    made = Worker([sys.executable, str(script)], start_timeout=30)
    yield made
    made.stop()


def test_one_child_serves_many_jobs(worker: Worker) -> None:
    assert worker.start() == {"name": "fake"}
    pids = {worker.run({"do": "well"}, 10)["pid"] for _ in range(3)}
    assert len(pids) == 1 and worker.starts == 1


def test_a_hang_is_killed_and_the_next_job_runs(worker: Worker) -> None:
    worker.start()
    outcome = worker.run({"do": "hang"}, 0.5)
    assert outcome == {"status": "hang", "detail": "no end of `check` within 0.5 s"}
    assert worker.run({"do": "well"}, 10)["status"] == "ok"
    assert worker.starts == 2


def test_a_death_is_a_fault_with_the_signal_and_the_last_words(worker: Worker) -> None:
    outcome = worker.run({"do": "die"}, 10)
    assert outcome["status"] == "fault"
    assert outcome["detail"] == "died during check: SIGSEGV: last words"
    assert worker.run({"do": "well"}, 10)["status"] == "ok"


def test_a_corrupt_context_is_replaced(worker: Worker) -> None:
    assert worker.run({"do": "fault"}, 10)["detail"] == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert worker.run({"do": "well"}, 10)["status"] == "ok"
    assert worker.starts == 2


def test_stray_prints_do_not_reach_the_protocol(worker: Worker) -> None:
    assert worker.run({"do": "print"}, 10)["status"] == "ok"


def test_a_bug_of_ours_is_not_blamed_on_the_kernel(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="KeyError: 'a bug of ours'"):
        worker.run({"do": "bug"}, 10)


def test_slow_inputs_are_not_a_hang_of_the_kernel(worker: Worker) -> None:
    worker.start()
    worker.prepare_timeout = 0.5
    with pytest.raises(WorkerError, match=r"inputs took longer than the timeout of 0\.5 s"):
        worker.run({"do": "slow inputs"}, 30)


def test_a_library_that_builds_itself_has_time_of_its_own(worker: Worker) -> None:
    worker.start()
    worker.prepare_timeout = 0.5
    assert worker.run({"do": "build", "seconds": 1.0}, 0.5)["status"] == "ok"
    worker.library_timeout = 0.5
    with pytest.raises(WorkerError, match=r"making flashinfer took longer than .* 0\.5 s"):
        worker.run({"do": "build", "seconds": 30}, 30)
    with pytest.raises(WorkerError, match=r"inputs took longer than the timeout of 0\.5 s"):
        worker.run({"do": "slow inputs"}, 30)


def test_a_child_works_on_while_no_job_is_there(tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text(
        "import itertools, time\n"
        "from ptxflow.eval.bench.worker import serve\n"
        "idled = itertools.count()\n"
        "serve(lambda job, stage: {'status': 'ok', 'idled': next(idled)}, {},\n"
        "      lambda: (time.sleep(0.01), next(idled) < 5)[1])\n"
    )
    worker = Worker([sys.executable, str(script)], start_timeout=30)
    try:
        worker.start()
        time.sleep(0.5)
        assert worker.run({}, 10)["idled"] == 6
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time; time.sleep(60)", "did not start within 1 s"),
        ("print('hello', flush=True)", "said b'hello.n', not a message"),
        ("""print('{"type": "failed", "error": "no GPU"}', flush=True)""", "^no GPU$"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_child_that_does_not_start(code: str, message: str) -> None:
    worker = Worker([sys.executable, "-c", code], start_timeout=1)
    with pytest.raises(WorkerError, match=message):
        worker.start()


@pytest.mark.usefixtures("driverless")
def test_the_real_child_says_why_it_cannot_run() -> None:
    with pytest.raises(WorkerError, match=r"no NVIDIA driver on this machine: libcuda\.so\.1"):
        Worker().start()
