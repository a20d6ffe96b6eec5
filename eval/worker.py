"""Runs kernels in a child process, so that a hang or a fault costs one kernel and not the run.

The parent writes one JSON job per line to the child's stdin and reads JSON messages from its
stdout: `ready` once, then per job any number of `stage` and one `result`. A job that outlives its
timeout is a hang: the child is killed and the next job starts a fresh one. A child that dies, or
whose CUDA context is corrupt, is replaced likewise. `python -m ptxflow.eval.worker` is the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ptxflow

Json = dict[str, Any]
KERNEL_STAGES = ("check", "time")  # a timeout in one of these is the kernel's doing
START_TIMEOUT = 240.0
KILL_TIMEOUT = 60.0


class WorkerError(RuntimeError):
    """The machinery failed, not a kernel: the run cannot go on. One line."""


class Worker:
    """A child that runs jobs, started when needed and replaced when lost."""

    def __init__(self, command: Sequence[str] | None = None, start_timeout: float = START_TIMEOUT):
        self.command = list(command or [sys.executable, "-m", "ptxflow.eval.worker"])
        self.start_timeout = start_timeout
        self.starts = 0
        self.gpu: Json = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this object

    def start(self) -> Json:
        """Start the child if none runs; returns what it says of its GPU."""
        if self._process is not None and self._process.poll() is None:
            return self.gpu
        root = str(Path(ptxflow.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._log.seek(0)
        self._log.truncate()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.starts += 1
        self._messages = queue.Queue()
        reader = threading.Thread(
            target=_forward, args=(self._process.stdout, self._messages), daemon=True
        )
        reader.start()
        message = self._receive(time.monotonic() + self.start_timeout)
        if message is None:
            self.stop()
            raise WorkerError(f"the worker did not start within {self.start_timeout:g} s")
        if message.get("type") != "ready":
            detail = message.get("error") or self._death()
            self.stop()
            raise WorkerError(detail)
        self.gpu = message["gpu"]
        return self.gpu

    def run(self, job: Json, timeout: float) -> Json:
        """The outcome of one job: a mapping with `status` and whatever belongs to it."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        stage = "load"
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"the worker died between jobs: {self._death()}") from None
        deadline = time.monotonic() + timeout
        while True:
            message = self._receive(deadline)
            if message is None:
                self.stop()
                if stage not in KERNEL_STAGES:
                    raise WorkerError(f"{stage} took longer than the timeout of {timeout:g} s")
                return {"status": "hang", "detail": f"no end of `{stage}` within {timeout:g} s"}
            match message["type"]:
                case "stage":
                    stage = message["stage"]
                case "result":
                    if message.pop("last", False):
                        self.stop()
                    return message
                case "end":
                    detail = self._death()
                    self.stop()
                    if stage not in KERNEL_STAGES:
                        raise WorkerError(f"the worker died during {stage}: {detail}")
                    return {"status": "fault", "detail": f"died during {stage}: {detail}"}
                case _:
                    error = message.get("error", f"unexpected message {message}")
                    self.stop()
                    raise WorkerError(error)

    def _receive(self, deadline: float) -> Json | None:
        """The next message; None at the deadline; type `end` when the child is gone."""
        try:
            line = self._messages.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if line is None:
            return {"type": "end"}
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or "type" not in message:
            return {"type": "garbage", "error": f"the worker said {line[:80]!r}, not a message"}
        return message

    def _death(self) -> str:
        """How the child ended, and its last words."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            return "it closed its output and lives on"
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {words[-1]}" if words else how

    def stop(self) -> None:
        """Kill the child, if there is one; it keeps nothing worth saving."""
        if self._process is None:
            return
        self._process.kill()
        try:
            self._process.wait(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise WorkerError("a worker with a hung kernel does not die; reset the GPU") from None
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process = None


def _forward(pipe: Any, messages: queue.Queue[bytes | None]) -> None:
    with contextlib.suppress(ValueError):  # the pipe was closed while reading
        for line in pipe:
            messages.put(line)
    messages.put(None)


# The child ---------------------------------------------------------------------------------------


def serve(measure: Callable[[Json, Callable[[str], None]], Json], ready: Json) -> None:
    """Answer jobs from stdin until it closes. stdout is kept for messages alone."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        channel.write(json.dumps(message, allow_nan=False).encode() + b"\n")
        channel.flush()

    say(type="ready", gpu=ready)
    for line in sys.stdin.buffer:
        try:
            result = measure(json.loads(line), lambda stage: say(type="stage", stage=stage))
        except Exception as error:
            traceback.print_exc()
            say(type="error", error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return
        say(type="result", **result)
        if result.get("last"):
            return


def main() -> None:
    from ptxflow.compiler.runtime import gpu_info

    try:
        info = gpu_info()
        from ptxflow.eval.measure import Session

        session = Session()
    except (RuntimeError, ImportError) as error:  # no driver, no GPU, a torch without CUDA
        print(json.dumps({"type": "failed", "error": str(error).splitlines()[0]}), flush=True)
        return
    serve(session.measure, info.to_json())


def job(
    definition: Json,
    axes: Mapping[str, int],
    launch: Json,
    image: Path,
    *,
    seeds: Sequence[int],
    rounds: int,
    settle: float,
) -> Json:
    """A job for the child: check the kernel in the file `image`, then time it if it is right."""
    return {
        "definition": definition,
        "axes": dict(axes),
        "launch": launch,
        "image": str(image),
        "seeds": list(seeds),
        "rounds": rounds,
        "settle": settle,
    }


if __name__ == "__main__":
    main()
