"""Keeps every core compiling and every GPU measuring: one process pool, one child for each GPU.

A GPU takes one workload at a time, so that its inputs stay and its ratios compare; a free GPU takes
the next workload. Compiled kernels wait in bounded queues. When a workload is screened, or time is
up, its best kernels are timed again, all in one job. A GPU whose machinery fails hands its workload
back to the others. Outcomes are reported by the thread that calls `run`, and only there.
"""

import heapq
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ptxflow.compiler.compilation import CompiledKernel, compile_chunk
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.processes import Processes
from ptxflow.env.measurements import REFINE, SCREEN
from ptxflow.eval.bench.candidates import Candidate, Settings, Workload, run_each, run_together
from ptxflow.eval.bench.records import Record, yardstick_time
from ptxflow.eval.bench.worker import Lost, Worker, WorkerError

Json = dict[str, Any]
Outcome = CompiledKernel | Exception
CHUNK = 16  # kernels to one disassembler run, which takes a third of a second to start
AHEAD = 512  # kernels compiled or compiling for a workload that is being measured
PREFETCH = 128  # the same for one that is waiting for a GPU, on average over as many as GPUs
NICENESS = 10  # of compiler processes: a GPU's child must never wait for a core
STRIKES = 3  # failures of the machinery in a row that retire a GPU
POLL = 0.2  # seconds between looks at the clock


class Compiler(Protocol):
    """Compiles chunks elsewhere; `workers` of them at a time."""

    workers: int

    def submit(self, tasks: list[tuple[Problem, Strategy, Device]]) -> Future[list[Outcome]]: ...

    def close(self) -> None: ...


class ProcessCompiler:
    """A pool of low-priority compiler processes."""

    def __init__(self, workers: int):
        self.workers = workers
        self._pool = Processes(workers, NICENESS)

    def submit(self, tasks: list[tuple[Problem, Strategy, Device]]) -> Future[list[Outcome]]:
        return self._pool.submit(compile_chunk, tasks)

    def close(self) -> None:
        """Ends the processes: a chunk in flight that nobody waits for would take seconds more."""
        self._pool.stop()


@dataclass(frozen=True)
class Measured:
    """What came of one candidate; `kernel` is None and `gpu` empty where it did not compile."""

    candidate: Candidate
    result: Json
    gpu: Json = field(default_factory=dict)
    kernel: CompiledKernel | None = None
    timing_pass: str = SCREEN


@dataclass(frozen=True)
class _Compiled:
    task: "Task"
    chunk: list[Candidate]
    future: Future[list[Outcome]]


@dataclass(frozen=True)
class _Ended:
    worker: Worker
    error: Exception | None


@dataclass(eq=False)
class Task:
    """One workload on its way. `scores` are of right kernels, the larger the faster."""

    workload: Workload
    todo: deque[Candidate]
    scores: dict[str, float]
    refined: set[str]
    ready: deque[tuple[Candidate, CompiledKernel]] = field(default_factory=deque)
    kernels: dict[str, CompiledKernel] = field(default_factory=dict)  # of the best, at least
    suspects: set[str] = field(default_factory=set)  # whose measuring broke a worker
    compiling: int = 0
    claimed: bool = False
    done: bool = False

    @property
    def backlog(self) -> int:
        return len(self.ready) + self.compiling

    def best(self, count: int) -> list[str]:
        """Keys of the `count` fastest, fastest first."""
        return heapq.nlargest(count, self.scores, key=self.scores.__getitem__)

    def note(self, key: str, score: float, kernel: CompiledKernel, keep: int) -> None:
        """Remember a right kernel; the images of those that cannot be refined are let go."""
        self.scores[key], self.kernels[key] = score, kernel
        if len(self.kernels) > 2 * keep:
            best = set(self.best(keep))
            self.kernels = {k: v for k, v in self.kernels.items() if k in best}


def make_task(workload: Workload, measured: Iterable[Record], again: bool = False) -> Task:
    """What is left to do of a workload whose records so far are `measured`."""
    wanted = {c.strategy.key for c in workload.candidates}
    latest = {} if again else {r.identity: r for r in measured if r.key in wanted}
    screens = {r.key: r for r in latest.values() if r.timing_pass == SCREEN}
    return Task(
        workload,
        deque(c for c in workload.candidates if c.strategy.key not in screens),
        {k: _score(r.latency_us, r.peers, r.timing) for k, r in screens.items()
         if r.status == "ok" and r.latency_us},
        {r.key for r in latest.values() if r.timing_pass == REFINE},
    )  # fmt: skip


def _score(latency: Json, baselines: Json, timing: Json) -> float:
    return (yardstick_time(baselines, timing) or 1.0) / float(latency["median"])


class Schedule:
    """One run over tasks. `report` is called with every outcome, `say` with lines for the user."""

    def __init__(
        self, tasks: Sequence[Task], fleet: Sequence[Worker], compiler: Compiler,
        settings: Settings, report: Callable[[Measured], None], say: Callable[[str], None],
    ):  # fmt: skip
        self.tasks, self.fleet, self.compiler = tasks, fleet, compiler
        self.settings, self.report, self.say = settings, report, say
        left = sum(len(t.todo) for t in tasks)
        self._chunk = max(1, min(CHUNK, left // (2 * compiler.workers)))
        self._changed = threading.Condition()
        self._events: queue.Queue[Measured | _Compiled | _Ended] = queue.Queue()
        self._futures: set[Future[list[Outcome]]] = set()
        self._stopping = self._abandoned = False

    # The calling thread: feeds the compiler, reports outcomes ------------------------------------

    def run(self, deadline: float = float("inf")) -> bool:
        """Whether all is done; False where `deadline` (of time.monotonic) ended the screening.

        WorkerError where no GPU is left; a failure of the compiler's processes is raised too.
        """
        with tempfile.TemporaryDirectory(prefix="ptxflow-campaign-") as folder:
            for i, worker in enumerate(self.fleet):
                own = Path(folder, str(i))  # workloads share strategies, so images need places
                own.mkdir()
                threading.Thread(target=self._serve, args=(worker, own), daemon=True).start()
            try:
                self._loop(deadline)
            finally:
                self._abandoned = True
                self.stop()
                for worker in self.fleet:
                    worker.stop()
        return all(t.done and not t.todo and not t.backlog for t in self.tasks)

    def _loop(self, deadline: float) -> None:
        serving = len(self.fleet)
        while serving:
            if time.monotonic() > deadline and not self._stopping:
                self.stop()
            self._feed()
            try:
                event = self._events.get(timeout=POLL)
            except queue.Empty:
                continue
            match event:
                case Measured():
                    self.report(event)
                case _Compiled():
                    self._compiled(event)
                case _Ended():
                    serving -= 1
                    self._ended(event, serving)

    def stop(self) -> None:
        """Let what is in flight finish; start nothing but refinement."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            futures = list(self._futures)
        for future in futures:
            future.cancel()

    def _ended(self, event: _Ended, serving: int) -> None:
        if event.error is None:
            return
        if not isinstance(event.error, WorkerError):
            raise event.error
        if not serving and not self._stopping:
            raise event.error
        self.say(f"lost a GPU, the others go on: {event.error}")

    def _feed(self) -> None:
        while len(self._futures) < 2 * self.compiler.workers:
            with self._changed:
                task = None if self._stopping else self._hungriest()
                if task is None:
                    return
                chunk = [task.todo.popleft() for _ in range(min(self._chunk, len(task.todo)))]
                task.compiling += len(chunk)
            self._submit(task, chunk)

    def _hungriest(self) -> Task | None:
        """The measured workload with the fewest kernels ahead; else one that is next in line:
        small ones far down the line, too, or compilers would idle."""
        open_ = [t for t in self.tasks if t.todo]
        served = [t for t in open_ if t.claimed and t.backlog < AHEAD]
        if served:
            return min(served, key=lambda t: t.backlog)
        waiting = [t for t in self.tasks if not t.claimed and not t.done]
        if sum(t.backlog for t in waiting) >= PREFETCH * len(self.fleet):
            return None
        return next((t for t in waiting if t.todo and t.backlog < PREFETCH), None)

    def _submit(self, task: Task, chunk: list[Candidate]) -> None:
        future = self.compiler.submit([(c.problem, c.strategy, c.device) for c in chunk])
        self._futures.add(future)
        future.add_done_callback(lambda f: self._events.put(_Compiled(task, chunk, f)))

    def _compiled(self, event: _Compiled) -> None:
        self._futures.discard(event.future)
        task, chunk = event.task, event.chunk
        if event.future.cancelled():
            outcomes: list[Outcome] = []
        elif error := event.future.exception():
            if isinstance(error, BrokenProcessPool) or not isinstance(error, Exception):
                raise error
            if len(chunk) > 1:  # an error that the compiler does not know: whose is it?
                for candidate in chunk:
                    self._submit(task, [candidate])
                return
            outcomes = [error]
        else:
            outcomes = event.future.result()
        refused = []
        with self._changed:
            task.compiling -= len(chunk)
            if not outcomes:
                task.todo.extendleft(reversed(chunk))
            for candidate, outcome in zip(chunk, outcomes, strict=False):
                if isinstance(outcome, CompiledKernel):
                    task.ready.append((candidate, outcome))
                else:
                    refused.append((candidate, outcome))
            self._changed.notify_all()
        for candidate, why in refused:
            detail = f"{type(why).__name__}: {why}"
            self.report(Measured(candidate, {"status": "compile_error", "detail": detail}))

    # One thread for each GPU ---------------------------------------------------------------------

    def _serve(self, worker: Worker, folder: Path) -> None:
        error: Exception | None = None
        # of its own: GPUs may measure one strategy for different workloads at a time
        folder = Path(tempfile.mkdtemp(dir=folder))
        try:
            worker.start()
            while (task := self._claim()) is not None:
                finished = False
                try:
                    self._screen(task, worker, folder)
                    self._refine(task, worker, folder)
                    finished = True
                finally:
                    self._release(task, finished)
        except Exception as raised:
            error = raised
        self._events.put(_Ended(worker, error))

    def _claim(self) -> Task | None:
        """The next workload without a GPU; waits while another GPU may still hand one back."""
        with self._changed:
            while not self._stopping:
                for task in self.tasks:
                    if not task.claimed and not task.done:
                        task.claimed = True
                        return task
                if all(t.done for t in self.tasks):
                    break
                self._changed.wait()
            return None

    def _release(self, task: Task, done: bool) -> None:
        with self._changed:
            task.claimed, task.done = False, done
            self._changed.notify_all()

    def _take(self, task: Task, most: int) -> list[tuple[Candidate, CompiledKernel]]:
        """The next compiled kernels, `most` at most; none when there will be no more."""
        with self._changed:
            while not self._stopping:
                if task.ready:
                    return [task.ready.popleft() for _ in range(min(most, len(task.ready)))]
                if not task.todo and not task.compiling:
                    break
                self._changed.wait()
            return []

    def _screen(self, task: Task, worker: Worker, folder: Path) -> None:
        """Measure what is compiled. A machinery that fails is tried again with another kernel.

        Failing twice with one kernel is the kernel's fault; with several in a row, the GPU is lost.
        """
        strikes = 0
        while items := self._take(task, worker.batch):
            try:
                results = run_each(items, worker, self.settings, folder)
            except Lost:
                with self._changed:
                    task.ready.extend(items)
                raise
            for item, result in zip(items, results, strict=True):
                if not isinstance(result, WorkerError):
                    strikes = 0
                elif self._suspect(task, item):
                    strikes += 1
                    continue
                else:
                    result = {"status": "fault", "detail": f"the worker failed twice: {result}"}
                self._note(task, item, result, worker.gpu)
            if strikes >= STRIKES and isinstance(results[-1], WorkerError):
                raise results[-1]

    def _suspect(self, task: Task, item: tuple[Candidate, CompiledKernel]) -> bool:
        """Whether the kernel is to be tried once more."""
        key = item[0].strategy.key
        with self._changed:
            if key in task.suspects:
                return False
            task.suspects.add(key)
            task.ready.append(item)
            return True

    def _note(
        self, task: Task, item: tuple[Candidate, CompiledKernel], result: Json, gpu: Json
    ) -> None:
        candidate, kernel = item
        if result["status"] == "ok" and self.settings.refine:
            baselines, timing = result.get("peers", {}), result.get("timing", {})
            score = _score(result["latency_us"], baselines, timing)
            task.note(candidate.strategy.key, score, kernel, self.settings.refine)
        self._events.put(Measured(candidate, result, gpu, kernel))

    def _refine(self, task: Task, worker: Worker, folder: Path) -> None:
        """Time the best again, interleaved; not where all of them have been."""
        best = task.best(self.settings.refine)
        if best and (default := task.workload.default) in task.scores and default not in best:
            best.append(default)  # what is delivered must not be slower than that
        if set(best) <= task.refined or self._abandoned:
            return
        chosen = self._kernels(task, best)
        if not chosen:
            return
        try:
            result = run_together(chosen, worker, self.settings, folder)
        except WorkerError as error:
            worker.stop()
            result = {"status": "fault", "detail": str(error)}
        if result["status"] != "ok":
            self.say(f"{task.workload.label}: not refined: {result['detail']}")
            return
        for (candidate, kernel), outcome in zip(chosen, result["outcomes"], strict=True):
            self._events.put(Measured(candidate, outcome, worker.gpu, kernel, REFINE))

    def _kernels(self, task: Task, keys: list[str]) -> list[tuple[Candidate, CompiledKernel]]:
        """The kernels of right candidates; compiled again where an earlier run measured them."""
        by_key = {c.strategy.key: c for c in task.workload.candidates}
        missing = {
            k: self.compiler.submit([(by_key[k].problem, by_key[k].strategy, by_key[k].device)])
            for k in keys
            if k not in task.kernels
        }
        chosen = []
        for key in keys:
            made = task.kernels[key] if key in task.kernels else missing[key].result()[0]
            if isinstance(made, CompiledKernel):
                chosen.append((by_key[key], made))
            else:
                self.say(f"{key} was right in an earlier run and does not compile now: {made}")
        return chosen
