"""What is measured: strategies of a workload, drawn from a stated part of its space, and records.

A sub-space is a space with some decisions fixed or restricted to several choices. Nothing here
knows any decision by name.
"""

import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow import __version__
from ptxflow.compiler.compilation import CompiledKernel, Job, compile_many
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Problem, Strategy
from ptxflow.env.cost import model_tflops
from ptxflow.env.measurements import SCREEN
from ptxflow.env.space import Space, StrategySpace
from ptxflow.env.tasks.arguments import UsageError, find_problem, find_space
from ptxflow.env.tasks.definition import Definition
from ptxflow.env.tasks.spaces import cores
from ptxflow.eval.bench.records import Identity, Record, best_baseline, identity
from ptxflow.eval.bench.worker import Worker, WorkerError, job, refine_job

Fix = Mapping[str, Sequence[str]]  # decision -> the choices it may take, as text


@dataclass(frozen=True)
class Candidate:
    """A strategy to measure for a definition at bound axes."""

    definition: Definition
    family: Family
    problem: Problem
    strategy: Strategy
    device: Device

    @property
    def axes(self) -> dict[str, int]:
        """The variable axes alone: the constants are the definition's."""
        return {name: self.problem[name] for name in self.definition.var_axes}

    @property
    def identity(self) -> Identity:
        return identity(self.definition.name, self.axes, self.strategy.key, self.device.name)

    @property
    def job(self) -> Job:
        return self.problem, self.strategy


@dataclass(frozen=True)
class Workload:
    """A definition at bound axes, and the candidates to measure there, in order."""

    definition: Definition
    family: Family
    problem: Problem
    device: Device
    candidates: tuple[Candidate, ...]
    size: int | None = None  # of the sub-space they are from, where they are from one
    default: str = ""  # key of the one that untuned use takes, where that is known

    @property
    def axes(self) -> dict[str, int]:
        return {name: self.problem[name] for name in self.definition.var_axes}

    @property
    def place(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        return self.definition.name, tuple(sorted(self.axes.items()))

    @property
    def label(self) -> str:
        return " ".join([self.definition.name, *(f"{n}={v}" for n, v in self.axes.items())])


@dataclass(frozen=True)
class Settings:
    """How to measure. `timeout` is seconds for one kernel, checks and timing together."""

    seeds: tuple[int, ...] = (1, 2, 3)
    rounds: int = 20
    settle: float = 0.5
    timeout: float = 60.0
    refine: int = 0  # of each workload's best kernels that are timed again, all in one job
    refine_rounds: int = 40
    refine_seconds: float = 1.0  # of the GPU, that further rounds of those may take
    ties: float = 1.0  # seconds for those of them that may be the fastest, against each other
    every_baseline: bool = True  # beside each kernel, or the yardstick alone
    libraries: bool = True  # the same where it refines


def subspace(space: Space, fix: Fix) -> NDArray[np.int64]:
    """[n] codes of the strategies whose decisions take the given choices alone.

    UsageError for a decision or a choice that does not exist, and where nothing is left.
    """
    codes = space.codes
    for name, wanted in fix.items():
        names = [d.name for d in space.decisions]
        if name not in names:
            raise UsageError(f"no decision {name!r}; there are {', '.join(names)}")
        at = names.index(name)
        choices = [str(c) for c in space.decisions[at].choices]
        unknown = [c for c in wanted if c not in choices]
        if unknown:
            raise UsageError(f"{name} has no choice {unknown[0]!r}; it has {', '.join(choices)}")
        allowed = np.isin(np.arange(len(choices)), [choices.index(c) for c in wanted])
        digit = codes // space.strides[at + 1] % space.sizes[at]
        codes = codes[allowed[digit]]
        if not len(codes):
            raise UsageError(
                f"{space.problem.definition} at {dict(space.problem.axes)}: no valid strategy has "
                f"{name}={'|'.join(wanted)} with what is fixed before it"
            )
    return codes


def strategies(space: StrategySpace, codes: NDArray[np.int64]) -> list[Strategy]:
    """The strategies of codes [n] that are in the space."""
    columns = [(d.name, d.choices) for d in space.decisions]
    return [
        space.family.strategy({n: c[int(i)] for (n, c), i in zip(columns, row, strict=True)})
        for row in space.indices(codes)
    ]


def sample_workload(
    definition: Definition,
    axes: Mapping[str, int],
    device: Device,
    fix: Fix | None = None,
    count: int | None = None,
    seed: int = 0,
) -> Workload:
    """`count` distinct strategies of a sub-space, drawn uniformly; all of them where None."""
    family, problem = find_problem(definition, axes)
    space = find_space(family, problem, device)
    codes = subspace(space, fix or {})
    size = len(codes)
    if count is not None:
        rng = np.random.default_rng([seed, zlib.crc32(f"{definition.name} {axes}".encode())])
        codes = rng.choice(codes, size=min(count, size), replace=False)
    chosen = strategies(space, codes)
    candidates = tuple(Candidate(definition, family, problem, s, device) for s in chosen)
    return Workload(definition, family, problem, device, candidates, size)


def listed_workload(
    definition: Definition,
    axes: Mapping[str, int],
    device: Device,
    listed: Sequence[Strategy],
    where: str,
) -> Workload:
    """The strategies of a list, of which the first is the default; one that is not legal there is a
    UsageError."""
    family, problem = find_problem(definition, axes)
    unique = list({s.key: s for s in listed}.values())
    for s in unique:
        if refusals := family.wide.refusals(problem, s, device):
            raise UsageError(
                f"{where}: {s.key} is not legal on {device.name}: {'; '.join(refusals)}"
            )
    candidates = tuple(Candidate(definition, family, problem, s, device) for s in unique)
    default = unique[0].key if unique else ""
    return Workload(definition, family, problem, device, candidates, None, default)


def compile_all(
    jobs: Sequence[Job], device: Device, workers: int | None
) -> list[CompiledKernel | Exception]:
    """Compile on all cores (or `workers` of them) behind a progress bar; see `compile_many`."""
    with tqdm(total=len(jobs), desc="compile", unit="kernel") as bar:
        count = workers or cores()
        return compile_many(jobs, device, workers=count, progress=bar.update)


def run_one(
    candidate: Candidate, kernel: CompiledKernel, worker: Worker, settings: Settings, folder: Path,
    profile: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Check and time, or profile, one compiled kernel in the worker; its outcome, as `Worker.run`
    gives it."""
    (outcome,) = run_each([(candidate, kernel)], worker, settings, folder, profile)
    if isinstance(outcome, WorkerError):
        raise outcome
    return outcome


def run_each(
    kernels: Sequence[tuple[Candidate, CompiledKernel]], worker: Worker, settings: Settings,
    folder: Path, profile: bool = False,
) -> list[dict[str, Any] | WorkerError]:  # fmt: skip
    """Check and time, or profile, kernels of one workload one after the other; their outcomes, as
    `Worker.run_all` gives them."""
    definition, axes, s = kernels[0][0].definition.to_json(), kernels[0][0].axes, settings
    how: dict[str, Any] = {
        "seeds": s.seeds, "rounds": s.rounds, "settle": s.settle,
        "every_baseline": s.every_baseline, "profile": profile,
    }  # fmt: skip
    jobs = []
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for candidate, kernel in kernels:
            image = Path(own, f"{candidate.strategy.key}.cubin")
            image.write_bytes(kernel.cubin)
            jobs.append(job(definition, axes, kernel.launch.to_json(), image, **how))
        return worker.run_all(jobs, settings.timeout)


def run_together(
    kernels: Sequence[tuple[Candidate, CompiledKernel]],
    worker: Worker,
    settings: Settings,
    folder: Path,
    **beside: Any,
) -> dict[str, Any]:
    """Time kernels of one workload in the same rounds, beside every baseline or those that `beside`
    says, `every_baseline`, `without` and `seconds` of a job; then check each.

    `status`, and where that is ok, `outcomes`: one for each kernel.
    """
    definition, axes = kernels[0][0].definition.to_json(), kernels[0][0].axes
    images = []
    for candidate, kernel in kernels:
        image = folder / f"{candidate.strategy.key}.refine.cubin"
        image.write_bytes(kernel.cubin)
        images.append((kernel.launch.to_json(), image))
    s = settings
    how: dict[str, Any] = {"seeds": s.seeds, "rounds": s.refine_rounds, "settle": s.settle}
    how |= {"ties": s.ties, "every_baseline": s.libraries, "seconds": s.refine_seconds} | beside
    return worker.run(refine_job(definition, axes, images, **how), 2 * s.timeout)


@dataclass(frozen=True)
class Origin:
    """What the records of a run share: the tools, and `run` (id, command, digest of the code)."""

    ptxas: str
    run: dict[str, Any] = field(default_factory=dict)


def make_record(
    candidate: Candidate, result: dict[str, Any], gpu: dict[str, Any], origin: Origin,
    kernel: CompiledKernel | None = None, timing_pass: str = SCREEN,
) -> Record:  # fmt: skip
    """The record of one outcome, with everything that follows from it."""
    latency = result.get("latency_us")
    baselines = result.get("peers", {})
    baseline = best_baseline(candidate.definition.name, baselines)
    checked = result.get("check", {})
    fields = candidate.strategy.fields()
    modelled = model_tflops(candidate.family, fields, candidate.problem, candidate.device)
    return Record(
        definition=candidate.definition.name,
        axes=candidate.axes,
        strategy=candidate.strategy.to_json(),
        key=candidate.strategy.key,
        device=candidate.device.name,
        status=result["status"],
        detail=result.get("detail", ""),
        gpu=gpu,
        ptxas=origin.ptxas,
        usage=asdict(kernel.usage) if kernel else {},
        sass_ok=kernel.sass.ok if kernel else None,
        correct=checked.get("correct"),
        check=checked,
        latency_us=latency,
        peers=baselines,
        ratio=baseline / latency["median"] if latency and baseline else None,
        tflops=candidate.problem.flops / latency["median"] / 1e6 if latency else None,
        timing=result.get("timing", {}),
        modelled_tflops=float(modelled[0]),
        ptxflow=__version__,
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        run=origin.run,
        timing_pass=timing_pass,
    )
