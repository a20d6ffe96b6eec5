"""Kernels measured when they are asked for: a GPU's child and the compiler's processes stay warm.

For whoever decides by a measurement what to measure next. Every outcome is appended to a file of
records as a campaign's are, and what the file holds already is not measured again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ptxflow.compiler.backend import ptxas
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

SETTINGS = Settings(seeds=(1, 2), rounds=7, settle=0.1, every_baseline=False)


@dataclass
class Measurer:
    """Measures candidates of one device on one GPU; made by `open_measurer`."""

    records: RecordFile
    worker: Worker
    compiler: Compiler
    origin: Origin
    folder: Path
    settings: Settings = SETTINGS
    _latest: dict[Identity, Record] = field(default_factory=dict)
    _ahead: dict[Identity, tuple[Future[list[Outcome]], int]] = field(default_factory=dict)

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

    def ahead(self, candidates: Iterable[Candidate]) -> None:
        """Begin to compile what of these is not measured: it will be asked for, in this order."""
        self._submit(self._fresh(candidates))

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

    def _submit(self, candidates: Iterable[Candidate]) -> None:
        """Have the compiler make what it is not yet making, many to a disassembler run."""
        new = [c for c in candidates if c.identity not in self._ahead]
        size = max(1, min(CHUNK, -(-len(new) // self.compiler.workers)))
        for chunk in (new[i : i + size] for i in range(0, len(new), size)):
            made = self.compiler.submit([(c.problem, c.strategy, c.device) for c in chunk])
            self._ahead |= {c.identity: (made, place) for place, c in enumerate(chunk)}

    def _compile(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Outcome]]:
        """Each with its kernel or why there is none, in order, while later ones are compiled."""
        self._submit(candidates)
        for candidate in candidates:
            made, place = self._ahead.pop(candidate.identity)
            yield candidate, made.result()[place]

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


@contextmanager
def open_measurer(
    path: Path, device: Device, families: Iterable[Family], command: str, jobs: int | None = None
) -> Iterator[Measurer]:
    """One of this machine's GPUs, ready to measure into `path`.

    RuntimeUnavailable where no GPU runs the device's code, RecordError where the file is no good.
    """
    worker = campaign.fleet(device)[0]
    origin = campaign.origin_of([], [])
    spaces = {f.name: decision_digest(f) for f in families}
    origin = replace(origin, run={**origin.run, "command": command, "spaces": spaces})
    ptxas.executable()
    compiler = campaign.ProcessCompiler(jobs or max(1, (os.cpu_count() or 2) - 1))
    try:
        with RecordFile(path) as records, tempfile.TemporaryDirectory(prefix="ptxflow-") as folder:
            yield Measurer(records, worker, compiler, origin, Path(folder))
    finally:
        worker.stop()
        compiler.close()


def seconds(record: Record) -> float:
    """A right kernel's median; infinite of any other."""
    if record.status != "ok" or not record.latency_us:
        return float("inf")
    return record.latency_us["median"] * 1e-6
