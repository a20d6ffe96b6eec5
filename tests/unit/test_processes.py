"""Worker processes end with their parent, also one that is killed, and with a block that fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ptxflow.compiler.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import os, time
from ptxflow.compiler.processes import Processes
if __name__ == "__main__":
    with Processes(1) as pool:
        pid = pool.submit(os.getpid).result()
        pool.submit(time.sleep, 100)
        print(pid, flush=True)
        time.sleep(100)
"""


CHILD = """
import os, time
from ptxflow.eval.bench.worker import serve

def measure(job, stage):
    time.sleep(100)

serve(measure, {"pid": os.getpid()})
"""
MEASURING = """
import sys
from ptxflow.eval.bench.worker import Worker
worker = Worker([sys.executable, "-c", sys.argv[1]])
print(worker.start()["pid"], flush=True)
worker.run({}, 100)
"""


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in time; one that nobody has asked for its exit code has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("script", [(PARENT,), (MEASURING, CHILD)], ids=["pool", "measuring"])
def test_workers_end_with_a_parent_that_is_killed(
    how: signal.Signals, script: tuple[str, ...]
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", *script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert not gone(worker, 0.5)
    parent.send_signal(how)
    parent.wait()
    parent.stdout.close()
    assert gone(worker)


def test_an_exception_ends_workers_in_the_middle_of_their_work() -> None:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Processes(1) as pool:
        worker = pool.submit(os.getpid).result()
        pool.submit(time.sleep, 100)
        raise KeyboardInterrupt
    assert gone(worker) and time.monotonic() - began < 30


def test_a_block_that_ends_well_waits_for_its_work() -> None:
    with Processes(1) as pool:
        answers = [pool.submit(pow, 2, n) for n in range(4)]
    assert [a.result() for a in answers] == [1, 2, 4, 8]
