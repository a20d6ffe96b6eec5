"""Kernels measured when they are asked for: a GPU's child and the compiler's processes stay warm.

For whoever decides by a measurement what to measure next. Every outcome is appended to a file of
records as a campaign's are, and what the file holds already is not measured again.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family
from ptxflow.env.measurements import REFINE
from ptxflow.env.space import decision_digest
from ptxflow.eval.bench import campaign
from ptxflow.eval.bench.candidates import (
    Candidate,
    Origin,
    Settings,
    make_record,
    run_one,
    run_together,
)
from ptxflow.eval.bench.records import Identity, Record, RecordFile
from ptxflow.eval.bench.schedule import CHUNK, Compiler, Outcome
from ptxflow.eval.bench.worker import Worker, WorkerError

Text = tuple[str, str, tuple[str, ...] | None]  # definition, strategy's key, what is chained
KEPT = 1024  # compiled kernels, for other sizes
SETTINGS = Settings(seeds=(1, 2), rounds=7, settle=0.1, ties=0.0, every_baseline=False)


@dataclass
class Measurer:
    """Measures candidates of one device on one GPU; made by `open_measurers`. Any thread may have
    kernels compiled ahead, while one at a time measures."""

    records: RecordFile
    worker: Worker
    compiler: Compiler
    origin: Origin
    folder: Path
    settings: Settings = SETTINGS
    built: dict[Identity, CompiledKernel] | None = None  # kept where somebody will ask for them
    _latest: dict[Identity, Record] = field(default_factory=dict)
    _ahead: dict[Text, tuple[Future[list[Outcome]], int]] = field(default_factory=dict)
    _made: dict[Text, CompiledKernel] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)  # of what is compiled or compiling

    def __post_init__(self) -> None:
        self._latest = self.records.latest()

    def __call__(self, candidates: Iterable[Candidate]) -> list[Record]:
        """The record of each, in order: checked, then timed beside the yardstick.

        WorkerError where the machinery fails twice in a row.
        """
        asked = list(candidates)
        for candidate, outcome in self._compile(self._fresh(asked)):
            self._keep(self._screen(candidate, outcome))
        return [self._latest[c.identity] for c in asked]

    def ahead(self, candidates: Iterable[Candidate]) -> list[Future[list[Outcome]]]:
        """Begin to compile what of these is not measured: it will be asked for, in this order. What
        there is to wait for."""
        return self._submit(c for c in self._fresh(candidates) if _text(c) not in self._made)

    def latest(self, identity: Identity) -> Record | None:
        """What the records hold of a kernel in a pass."""
        return self._latest.get(identity)

    def together(self, candidates: Sequence[Candidate], **beside: Any) -> list[Record]:
        """The candidates, of one workload and right before, timed anew in the same rounds, beside
        every library there is or what `beside` says (see `run_together`). WorkerError where that
        cannot be."""
        built = [(c, k) for c, k in self._compile(candidates) if isinstance(k, CompiledKernel)]
        if not built:
            return []
        result = run_together(built, self.worker, self.settings, self.folder, **beside)
        if result["status"] != "ok":
            raise WorkerError(f"{len(built)} kernels timed together: {result['detail']}")
        outcomes = zip(built, result["outcomes"], strict=True)
        return [
            self._keep(make_record(c, outcome, self.worker.gpu, self.origin, k, REFINE))
            for (c, k), outcome in outcomes
        ]

    def _fresh(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return list({c.identity: c for c in candidates if c.identity not in self._latest}.values())

    def _submit(self, candidates: Iterable[Candidate]) -> list[Future[list[Outcome]]]:
        """Have the compiler make what it is not yet making, many to a disassembler run."""
        with self._lock:
            asked = {_text(c): c for c in candidates}
            new = [c for text, c in asked.items() if text not in self._ahead]
            size = max(1, min(CHUNK, -(-len(new) // self.compiler.workers)))
            for chunk in (new[i : i + size] for i in range(0, len(new), size)):
                made = self.compiler.submit([(c.problem, c.strategy, c.device) for c in chunk])
                self._ahead |= {_text(c): (made, place) for place, c in enumerate(chunk)}
            return [self._ahead[text][0] for text in asked]

    def _compile(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Outcome]]:
        """Each with its kernel or why there is none, in order, while later ones are compiled. What
        was compiled for other sizes is not compiled again."""
        held = {} if self.built is None else self.built
        self._submit(c for c in candidates if c.identity not in held and _text(c) not in self._made)
        for candidate in candidates:
            known = held.get(candidate.identity) or self._elsewhere(candidate)
            outcome = known or self._awaited(candidate)
            if isinstance(outcome, CompiledKernel):
                held[candidate.identity] = outcome
            yield candidate, outcome

    def _awaited(self, candidate: Candidate) -> Outcome:
        """What the compiler makes of it."""
        text = _text(candidate)
        self._submit([candidate])
        made, place = self._ahead[text]
        outcome = made.result()[place]
        with self._lock:
            del self._ahead[text]
            if isinstance(outcome, CompiledKernel):
                self._made[text] = outcome
            if len(self._made) > KEPT:
                del self._made[next(iter(self._made))]
        return outcome

    def _elsewhere(self, candidate: Candidate) -> CompiledKernel | None:
        """The kernel as it was compiled for other sizes, launched for these: no family's text
        depends on variable axes. None where there is none, or the strategy is not legal here."""
        kernel, c = self._made.get(_text(candidate)), candidate
        if kernel is None or c.family.wide.refusals(c.problem, c.strategy, c.device):
            return None
        launch = c.family.launch(c.problem, c.strategy, c.device)
        return replace(kernel, problem=c.problem, launch=launch)

    def _screen(self, candidate: Candidate, outcome: Outcome) -> Record:
        if not isinstance(outcome, CompiledKernel):
            detail = f"{type(outcome).__name__}: {outcome}"
            result = {"status": "compile_error", "detail": detail}
            return make_record(candidate, result, {}, self.origin)
        try:
            result = run_one(candidate, outcome, self.worker, self.settings, self.folder)
        except WorkerError:  # a fresh child tells the machinery's failure from the kernel's
            self.worker.stop()
            result = run_one(candidate, outcome, self.worker, self.settings, self.folder)
        return make_record(candidate, result, self.worker.gpu, self.origin, outcome)

    def _keep(self, record: Record) -> Record:
        self.records.append(record)
        self._latest[record.identity] = record
        return record


def _text(candidate: Candidate) -> Text:
    return candidate.definition.name, candidate.strategy.key, candidate.problem.chained


@contextmanager
def open_measurers(
    path: Path, device: Device, families: Iterable[Family], command: str, jobs: int | None = None
) -> Iterator[list[Measurer]]:
    """One for each GPU of `campaign.machines`, ready to measure into `path`.

    RuntimeUnavailable where no GPU runs the device's code, RecordError where the file is no good.
    """
    origin = campaign.origin_of([], [])
    spaces = {f.name: decision_digest(f) for f in families}
    origin = replace(origin, run={**origin.run, "command": command, "spaces": spaces})
    with (
        campaign.machines(device, jobs) as (workers, compiler),
        RecordFile(path) as records,
        tempfile.TemporaryDirectory(prefix="ptxflow-") as folder,
    ):
        places = [Path(tempfile.mkdtemp(dir=folder)) for _ in workers]
        yield [Measurer(records, worker, compiler, origin, place)
               for worker, place in zip(workers, places, strict=True)]  # fmt: skip


@contextmanager
def open_measurer(
    path: Path, device: Device, families: Iterable[Family], command: str, jobs: int | None = None
) -> Iterator[Measurer]:
    """The first of `open_measurers`."""
    with open_measurers(path, device, families, command, jobs) as found:
        yield found[0]


def seconds(record: Record) -> float:
    """A right kernel's median; infinite of any other."""
    if record.status != "ok" or not record.latency_us:
        return float("inf")
    return record.latency_us["median"] * 1e-6
