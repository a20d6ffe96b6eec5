"""Runs kernels in a child process, so that a hang or a fault costs one kernel and not the run.

The parent writes one JSON job per line to the child's stdin and reads JSON messages from its
stdout: `ready` once, then per job any number of `stage` and one `result`. A kernel that outlives
its timeout is a hang: the child is killed and the next job starts a fresh one. A child that dies,
or whose CUDA context is corrupt, is replaced likewise. `python -m ptxflow.eval.bench.worker` is the
child.
"""

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
PREPARE_TIMEOUT = 240.0  # for inputs and references of a problem
LIBRARY = "making "  # begins the stage in which a library is called first, and may build itself:
LIBRARY_TIMEOUT = 1800.0
KEEP_BUSY = 30.0  # seconds that a child without a job keeps its GPU's clocks up
KILL_TIMEOUT = 60.0


class WorkerError(RuntimeError):
    """The machinery failed, not a kernel: the run cannot go on. One line."""


class Lost(WorkerError):
    """The GPU is gone, and no other came in its place: whatever it measured is not to blame."""


class Worker:
    """A child that runs jobs, started when needed and replaced when lost. Timeouts are seconds."""

    batch = 1  # jobs that are worth giving at a time

    def __init__(
        self,
        command: Sequence[str] | None = None,
        start_timeout: float = START_TIMEOUT,
        prepare_timeout: float = PREPARE_TIMEOUT,
        environment: Mapping[str, str] | None = None,
    ):
        self.command = list(command or [sys.executable, "-m", "ptxflow.eval.bench.worker"])
        self.start_timeout, self.prepare_timeout = start_timeout, prepare_timeout
        self.library_timeout = LIBRARY_TIMEOUT
        self.environment = dict(environment or {})
        self.starts = 0
        self.gpu: Json = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this object

    def start(self) -> Json:
        """Start the child if none runs; returns what it says of its GPU.

        WorkerError where it finds no GPU, dies, or says nothing within `start_timeout`.
        """
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
            env=os.environ | self.environment | {"PYTHONPATH": path},
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
        """The outcome of one job: a mapping with `status` and whatever belongs to it.

        `timeout` is seconds for the kernel, checks and timing together, inputs not counted. A hang
        or a fault of the kernel is an outcome; WorkerError where the machinery fails.
        """
        self.start()
        assert self._process is not None and self._process.stdin is not None
        stage = "load"
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"the worker died between jobs: {self._death()}") from None
        limit = self.prepare_timeout
        deadline = time.monotonic() + limit
        while True:
            message = self._receive(deadline)
            if message is None:
                self.stop()
                if stage not in KERNEL_STAGES:
                    raise WorkerError(f"{stage} took longer than the timeout of {limit:g} s")
                return {"status": "hang", "detail": f"no end of `{stage}` within {timeout:g} s"}
            match message["type"]:
                case "stage":
                    before, stage = stage, message["stage"]
                    if stage.startswith(LIBRARY):
                        limit = self.library_timeout
                    elif stage in KERNEL_STAGES and before not in KERNEL_STAGES:
                        limit = timeout
                    else:
                        continue
                    deadline = time.monotonic() + limit
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

    def run_all(self, jobs: Sequence[Json], timeout: float) -> list[Json | WorkerError]:
        """The outcome of each job; the WorkerError of one at which the machinery failed, and was
        replaced. Lost is raised, and all of them are to be done again."""
        return [self._tried(job, timeout) for job in jobs]

    def _tried(self, job: Json, timeout: float) -> Json | WorkerError:
        try:
            return self.run(job, timeout)
        except Lost:
            raise
        except WorkerError as error:
            self.stop()
            return error

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

    def end(self, timeout: float) -> None:
        """Let the child end by itself: it is given no more jobs. Its profiler writes then.

        subprocess.TimeoutExpired where it does not.
        """
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout)

    def stop(self) -> None:
        """Kill the child, if there is one; it keeps nothing worth saving."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        try:
            process.wait(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise WorkerError("a worker with a hung kernel does not die; reset the GPU") from None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _forward(pipe: Any, messages: queue.Queue[bytes | None]) -> None:
    with contextlib.suppress(ValueError):  # the pipe was closed while reading
        for line in pipe:
            messages.put(line)
    messages.put(None)


# The child ---------------------------------------------------------------------------------------


def serve(
    measure: Callable[[Json, Callable[[str], None]], Json],
    ready: Json,
    idle: Callable[[], bool] = lambda: False,
) -> None:
    """Answer jobs from stdin until it closes. stdout is kept for messages alone.

    `idle` is called again and again while no job is there, until it returns False.
    """
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        channel.write(json.dumps(message, allow_nan=False).encode() + b"\n")
        channel.flush()

    lines: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_read_lines, args=(0, lines), daemon=True).start()
    say(type="ready", gpu=ready)
    while (line := _next_line(lines, idle)) is not None:
        try:
            result = measure(json.loads(line), lambda stage: say(type="stage", stage=stage))
        except Exception as error:
            traceback.print_exc()
            said = (str(error).splitlines() or [""])[0]
            say(type="error", error=f"{type(error).__name__}: {said}")
            return
        say(type="result", **result)
        if result.get("last"):
            return


def _read_lines(descriptor: int, lines: queue.Queue[bytes | None]) -> None:
    """Unbuffered: a thread that is left in a read must hold no lock when the process ends.

    A parent that is gone wants no answer: then the process ends in the middle of a job.
    """
    parent, rest = os.getppid(), b""
    while chunk := os.read(descriptor, 1 << 20):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            lines.put(line)
    lines.put(None)
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _next_line(lines: queue.Queue[bytes | None], idle: Callable[[], bool]) -> bytes | None:
    end = time.monotonic() + KEEP_BUSY
    while time.monotonic() < end:
        try:
            return lines.get_nowait()
        except queue.Empty:
            if not idle():
                break
    return lines.get()


def main() -> None:
    """The child: say what GPU this is, or why there is none, and answer jobs until stdin closes."""
    from ptxflow.compiler.backend.runtime import gpu_info

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, who kills us
    try:
        info = gpu_info()
        from ptxflow.eval.bench.session import Session

        session = Session()
    except (RuntimeError, ImportError) as error:  # no driver, no GPU, a torch without CUDA
        print(json.dumps({"type": "failed", "error": str(error).splitlines()[0]}), flush=True)
        return
    serve(session.measure, info.to_json() | session.about(), session.idle)


def job(
    definition: Json, axes: Mapping[str, int], launch: Json, image: Path, *, seeds: Sequence[int],
    rounds: int, settle: float, every_baseline: bool = True, without: Sequence[str] = (),
    profile: bool = False,
) -> Json:  # fmt: skip
    """A job for the child: check a kernel on `seeds`, and if it is right, time `rounds` samples
    (0: do not), or run it once with the profiler on.

    `launch` is that of the cubin in the file `image`; `settle` are seconds of load before timing.
    It is timed beside every baseline but those named in `without`, or the yardstick alone.
    """
    return {
        "definition": definition,
        "axes": dict(axes),
        "launch": launch,
        "image": str(image),
        "seeds": list(seeds),
        "rounds": rounds,
        "settle": settle,
        "every_baseline": every_baseline,
        "without": list(without),
        "profile": profile,
    }


def refine_job(
    definition: Json, axes: Mapping[str, int], kernels: Sequence[tuple[Json, Path]], ties: float,
    **how: Any,
) -> Json:  # fmt: skip
    """A job for the child: time kernels (launch, image) in the same rounds beside every baseline,
    then check each; `how` as in `job`, and `seconds` of the GPU that more rounds may take, as
    `ties` those may which may be the fastest."""
    more = {"ties": ties} | {name: how.pop(name) for name in ("seconds",) if name in how}
    one = job(definition, axes, {}, Path(), **how) | more
    images = [{"launch": launch, "image": str(image)} for launch, image in kernels]
    return {k: v for k, v in one.items() if k not in ("launch", "image")} | {"kernels": images}


if __name__ == "__main__":
    main()
