"""GPUs and compilers of other hosts, by Dask: `--cluster ADDRESS` of whatever measures.

A host offers GPUs as Dask workers with the resource GPU=1, one each, and cores as workers with
COMPILE=1. What crosses the network is text (JSON) and bytes. A GPU's worker keeps the killable
child that a local measurement has. Its loss costs time alone: what it held is measured by another
GPU of its kind, and a kernel that three GPUs were lost over is said to be at fault.

Who can reach the scheduler runs code on its workers: Dask names functions by pickle. Use TLS
(`Security` of Dask's configuration) on a network that is not yours alone.
"""

import base64
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput
from ptxflow.compiler import errors
from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.backend.ptxas import PtxasError, Usage
from ptxflow.compiler.backend.runtime import CAPABILITY
from ptxflow.compiler.backend.sass import SassReport
from ptxflow.compiler.compilation import CompiledKernel, compile_chunk
from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.launch import Launch
from ptxflow.eval.bench.records import STATUSES
from ptxflow.eval.bench.worker import Lost, Worker, WorkerError

Json = dict[str, Any]
Outcome = CompiledKernel | Exception
Task = tuple[Problem, Strategy, Device]
GPU, COMPILE = {"GPU": 1}, {"COMPILE": 1}
POLL = 1.0  # seconds between looks at whether a worker lives
REBIND = 60.0  # seconds that a GPU of the kind may take to come (back)
LOSSES = 3  # of GPUs over one job, after which the job is at fault
ANSWER = 240.0  # seconds for a GPU's worker to say what it is
NO_MESSAGE = ValueError, TypeError, LookupError, AttributeError, RecursionError


# What crosses the network ------------------------------------------------------------------------


def task_text(tasks: Sequence[Task]) -> str:
    """Jobs for `compile_text`."""
    return json.dumps([[asdict(p), s.to_json(), d.name] for p, s, d in tasks])


def read_tasks(text: str) -> list[Task]:
    return [
        (_problem(problem), Strategy.from_json(strategy), DEVICES[device])
        for problem, strategy, device in json.loads(text)
    ]


def _problem(data: Json) -> Problem:
    pairs = {name: tuple(map(tuple, data[name])) for name in ("axes", "constants")}
    chained = data["chained"]
    return Problem(**data | pairs | {"chained": None if chained is None else tuple(chained)})


def compile_text(text: str) -> str:
    """In a worker: the kernels of `task_text`, or why there is none, as text."""
    return outcome_text(compile_chunk(read_tasks(text)))


def outcome_text(outcomes: Sequence[Outcome]) -> str:
    return json.dumps([_plain(o) for o in outcomes])


def _plain(outcome: Outcome) -> Json:
    if isinstance(outcome, Exception):
        return {"refusal": type(outcome).__name__, "text": str(outcome)}
    return {
        "launch": outcome.launch.to_json(),
        "ptx": outcome.ptx,
        "cubin": base64.b64encode(outcome.cubin).decode(),
        "usage": asdict(outcome.usage),
        "sass": asdict(outcome.sass),
        "checks": outcome.checks,
    }


def read_outcomes(text: str, tasks: Sequence[Task]) -> list[Outcome]:
    """What `compile_text` said of these tasks; WorkerError where it is something else."""
    try:
        return [_outcome(row, *task) for row, task in zip(json.loads(text), tasks, strict=True)]
    except NO_MESSAGE as error:
        raise WorkerError(f"a compiler's worker said {text[:80]!r}: {error}") from None


def _outcome(row: Json, problem: Problem, strategy: Strategy, device: Device) -> Outcome:
    if "refusal" in row:
        kinds = {c.__name__: c for c in (*errors.CompileError.__subclasses__(), PtxasError)}
        return kinds.get(row["refusal"], errors.CompileError)(row["text"])
    found = row["sass"]
    sass = SassReport(found["counts"], tuple(found["missing"]), tuple(found["forbidden"]))
    launch, cubin = Launch.from_json(row["launch"]), base64.b64decode(row["cubin"])
    usage, checks = Usage(**row["usage"]), tuple(row["checks"])
    return CompiledKernel(problem, strategy, device, launch, row["ptx"], cubin, usage, sass, checks)


# In a GPU's Dask worker --------------------------------------------------------------------------

_CHILDREN: dict[str, Worker] = {}


def _child(command: str) -> Worker:
    if command not in _CHILDREN:
        _CHILDREN[command] = Worker(json.loads(command))
    return _CHILDREN[command]


def about(command: str) -> str:
    """What the GPU's child says of it, the compiler's sources, and ptxas' version; or `error`."""
    try:
        gpu = _child(command).start()
        return json.dumps({"gpu": gpu, "code": cache.sources(), "ptxas": ptxas.version()})
    except (WorkerError, ptxas.ToolMissing) as error:
        return json.dumps({"error": str(error)})


def run(command: str, jobs: str, images: Sequence[bytes], timeout: float) -> str:
    """The child's outcomes of jobs, whose images come along; `error` where the machinery failed."""
    with tempfile.TemporaryDirectory(prefix="ptxflow-") as folder:
        paths = [Path(folder, f"{i}.cubin") for i in range(len(images))]
        for path, image in zip(paths, images, strict=True):
            path.write_bytes(image)
        left = iter(paths)
        told = _child(command).run_all([_with_images(j, left) for j in json.loads(jobs)], timeout)
    return json.dumps([{"error": str(o)} if isinstance(o, WorkerError) else o for o in told])


def stop(command: str) -> None:
    """Kill the child."""
    _child(command).stop()


def _with_images(job: Json, paths: Iterator[Path]) -> Json:
    if "kernels" not in job:
        return job | {"image": str(next(paths))}
    return job | {"kernels": [k | {"image": str(next(paths))} for k in job["kernels"]]}


def _images(jobs: Sequence[Json]) -> list[bytes]:
    return [Path(k["image"]).read_bytes() for job in jobs for k in job.get("kernels", [job])]


# Here --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What GPUs must share for their times to stand in one table."""

    gpu: str
    driver: str
    code: str
    ptxas: str

    @staticmethod
    def of(said: Json) -> "Kind":
        gpu = said["gpu"]
        return Kind(gpu.get("name", ""), gpu.get("driver", ""), said["code"], said["ptxas"])

    def __str__(self) -> str:
        return f"{self.gpu}, driver {self.driver}, ptxas {self.ptxas}, compiler {self.code}"


@dataclass
class Cluster:
    """A connection to a Dask scheduler. `address` as in tcp://host:8786.

    `command` starts the child of a GPU, by default the worker's own Python; `compile_in` is what a
    compiler's worker does. BadInput where Dask is not installed or no scheduler answers.
    """

    address: str
    command: Sequence[str] = ()
    compile_in: Callable[[str], str] = compile_text
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
    kind: Kind | None = None
    client: Any = None  # a Dask Client, by default of the address
    _seen: tuple[float, Json] = (float("-inf"), {})  # when, and the scheduler's workers
    _bound: dict[str, "RemoteWorker"] = field(default_factory=dict)
    _strangers: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _looking: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.child = json.dumps([*self.command])
        if self.client is not None:
            return
        try:
            from distributed import Client
        except ImportError:
            raise BadInput("--cluster needs Dask: pip install 'ptxflow[cluster]'") from None
        try:
            self.client = Client(self.address, timeout=20, set_as_default=False)
        except (OSError, ValueError) as error:
            raise BadInput(f"no Dask scheduler answers at {self.address}: {error}") from None

    def addresses(self, resource: Mapping[str, int]) -> list[str]:
        """Of the workers that offer it, as of POLL seconds ago at most: a look is a round trip, and
        every GPU's thread asks. Lost where the scheduler is gone."""
        (name,) = resource
        with self._looking:
            if time.monotonic() - self._seen[0] > POLL:
                try:
                    found = self.client.scheduler_info(n_workers=-1)["workers"]
                except (OSError, ValueError, KeyError) as error:  # KeyError: it is cut off
                    raise Lost(f"the scheduler at {self.address} is gone: {error}") from None
                self._seen = time.monotonic(), found
        return [a for a, w in self._seen[1].items() if w.get("resources", {}).get(name)]

    def gpus(self, device: Device) -> list["RemoteWorker"]:
        """One a GPU of the kind that most of those are of which run the device's code; the rest are
        named on stderr. BadInput where there is none."""
        found = self._ask(self.addresses(GPU))
        able = {a: said for a, said in found.items() if _runs(said["gpu"], device)}
        if not able:
            raise BadInput(f"no GPU of the cluster at {self.address} runs code for {device.name}")
        kinds = Counter(map(Kind.of, able.values()))
        self.kind = kinds.most_common(1)[0][0]
        for kind, count in kinds.items():
            if kind != self.kind:
                self.say(f"{count} GPUs are not used, as these are of another kind: {kind}")
        ours = [a for a, said in able.items() if Kind.of(said) == self.kind]
        if self.kind.code != cache.sources():
            raise BadInput("the cluster's workers have another version of the compiler than this "
                           f"program: {self.kind.code}, not {cache.sources()}")  # fmt: skip
        workers = [RemoteWorker(self) for _ in ours]
        for address, worker in zip(ours, workers, strict=True):
            worker.bind(address, able[address]["gpu"])
            self._bound[address] = worker
        return workers

    def _ask(self, addresses: Sequence[str]) -> dict[str, Json]:
        """What each says it is; who fails or is silent is named on stderr and left out."""
        asked = {a: self.submit(about, a, self.child) for a in addresses}
        found, end = {}, time.monotonic() + ANSWER
        for address, future in asked.items():
            try:
                said = json.loads(self.answer(future, address, end))
            except Exception as error:  # a worker may fail in any way
                said = {"error": f"{type(error).__name__}: {error}"}
            if "error" in said:
                self._strangers.add(address)
                self.say(f"the GPU of {address} is not used: {said['error']}")
            else:
                found[address] = said
        return found

    def submit(self, work: Callable[..., Any], address: str, *given: Any) -> Future[Any]:
        """A call in a GPU's worker; Lost where the scheduler is gone."""
        pool = self.client.get_executor(workers=[address], resources=GPU, pure=False)
        return self.ask(pool, work, *given)

    def ask(self, pool: Executor, work: Callable[..., Any], *given: Any) -> Future[Any]:
        """A call through an executor of the client; Lost where the scheduler is gone."""
        from distributed.client import ClosedClientError

        try:
            return pool.submit(work, *given)
        except ClosedClientError as error:
            raise Lost(f"the scheduler at {self.address} is gone: {error}") from None

    def answer(self, asked: Future[Any], address: str, end: float = float("inf")) -> Any:
        """What the worker there says; Lost where it is gone, TimeoutError at `end`."""
        while True:
            try:
                return asked.result(timeout=POLL)
            except TimeoutError:
                gone = address not in self.addresses(GPU)
                if gone or time.monotonic() > end:
                    asked.cancel()
                    raise Lost(f"{address} is gone") if gone else TimeoutError(address) from None
            except CancelledError:
                raise Lost(f"the call in {address} was cancelled") from None

    def rebind(self, worker: "RemoteWorker") -> None:
        """A free GPU of the kind for a worker that has lost its own; Lost where none comes."""
        end = time.monotonic() + REBIND
        while time.monotonic() < end:
            time.sleep(POLL)  # no look from before the loss
            with self._lock:
                alive = self.addresses(GPU)
                self._bound = {a: w for a, w in self._bound.items() if w is not worker}
                held = {a for a in self._bound if a in alive}
                free = [a for a in alive if a not in held | self._strangers]
                if free:
                    self._bound[free[0]] = worker
            if free:
                said = self._ask(free[:1]).get(free[0])
                if said and Kind.of(said) == self.kind:
                    worker.bind(free[0], said["gpu"])
                    return
                self._strangers.add(free[0])
        raise Lost(f"a GPU's worker is gone, and no other came within {REBIND:g} s")

    def compiler(self) -> "ClusterCompiler":
        """BadInput where no worker offers COMPILE."""
        if not (workers := self.addresses(COMPILE)):
            raise BadInput(f"no worker of the cluster at {self.address} has the resource COMPILE=1")
        return ClusterCompiler(self, len(workers))

    def close(self) -> None:
        with suppress(Exception):  # a scheduler that is gone
            self.client.close(timeout=5)


def _runs(gpu: Json, device: Device) -> bool:
    return tuple(gpu.get("capability", ())) == CAPABILITY[device.arch]


class ClusterCompiler:
    """Compiles chunks on the cluster's cores: a `schedule.Compiler`."""

    def __init__(self, cluster: Cluster, workers: int):
        self.cluster, self.workers = cluster, workers
        # Dask gives a lost worker's chunk to another; one that three were lost over fails
        self._pool = cluster.client.get_executor(resources=COMPILE, pure=False)
        self._asked: set[Future[list[Outcome]]] = set()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, tasks: list[Task]) -> Future[list[Outcome]]:
        made: Future[list[Outcome]] = Future()
        self._asked.add(made)
        made.add_done_callback(self._asked.discard)
        try:
            said = self.cluster.ask(self._pool, self.cluster.compile_in, task_text(tasks))
        except Lost as error:
            made.set_exception(BrokenProcessPool(str(error)))
            return made
        said.add_done_callback(lambda said: _hand_on(said, made, tasks))
        made.add_done_callback(lambda made: made.cancelled() and said.cancel())
        return made

    def _watch(self) -> None:
        """Fail what is asked for once no worker has offered COMPILE for REBIND seconds."""
        seen = time.monotonic()
        while not self._closed.wait(5 * POLL):
            with suppress(WorkerError):
                if self.cluster.addresses(COMPILE):
                    seen = time.monotonic()
            if time.monotonic() - seen > REBIND:
                why = f"no worker of the cluster has offered COMPILE=1 for {REBIND:g} s"
                for made in [*self._asked]:
                    if made.set_running_or_notify_cancel():
                        made.set_exception(BrokenProcessPool(why))

    def close(self) -> None:
        self._closed.set()
        self._pool.shutdown(wait=False)


def _hand_on(said: Future[str], made: Future[list[Outcome]], tasks: list[Task]) -> None:
    if made.done():
        return
    if said.cancelled() or not made.set_running_or_notify_cancel():
        made.cancel()
        return
    try:
        made.set_result(read_outcomes(said.result(), tasks))
    except Exception as error:
        made.set_exception(error)


class RemoteWorker(Worker):
    """A GPU elsewhere, as the schedule sees one: see Worker."""

    batch = 8  # one round trip; more would make a stop wait, and be done again after a loss

    def __init__(self, cluster: Cluster):
        super().__init__()
        self.cluster, self.address = cluster, ""

    def bind(self, address: str, gpu: Json) -> None:
        self.address, self.gpu = address, gpu
        self.starts += 1

    def start(self) -> Json:
        if not self.address:
            self.cluster.rebind(self)
        return self.gpu

    def run(self, job: Json, timeout: float) -> Json:
        (outcome,) = self.run_all([job], timeout)
        if isinstance(outcome, WorkerError):
            raise outcome
        return outcome

    def run_all(self, jobs: Sequence[Json], timeout: float) -> list[Json | WorkerError]:
        """In one task. What a lost host held is done again, one by one: whose kernel is it?"""
        text, images = json.dumps(jobs), _images(jobs)
        for _ in range(LOSSES):
            self.start()
            given = self.cluster.child, text, images, timeout
            try:
                asked = self.cluster.submit(run, self.address, *given)
                said = self.cluster.answer(asked, self.address)
            except Lost:
                self.address = ""
                if len(jobs) > 1:
                    return [outcome for job in jobs for outcome in self.run_all([job], timeout)]
                continue
            return _told(said, len(jobs))
        why = f"{LOSSES} hosts were lost while they measured it"
        return [{"status": "fault", "detail": why}]

    def stop(self) -> None:
        if self.address:
            with suppress(Exception):  # one that is lost has no child
                self.cluster.submit(stop, self.address, self.cluster.child).result(timeout=POLL)

    def end(self, timeout: float) -> None:
        raise WorkerError("profiles are taken on this machine's GPUs only")


def _told(text: str, count: int) -> list[Json | WorkerError]:
    """So many outcomes in what `run` said; WorkerError where it said something else."""
    try:
        rows = json.loads(text)
        if len(rows) != count or not all(
            "error" in row or row["status"] in STATUSES for row in rows
        ):
            raise ValueError(f"no outcomes of {count} kernels")
        return [WorkerError(row["error"]) if "error" in row else dict(row) for row in rows]
    except NO_MESSAGE as error:
        raise WorkerError(f"a GPU's worker said {text[:80]!r}: {error}") from None
