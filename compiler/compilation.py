"""The compiler, one line a stage: rules, build, validate, write, assemble, check the SASS."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ptxflow.compiler.atoms import atom
from ptxflow.compiler.backend import cache, ptxas, sass
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.backend.ptxas import Assembly, Usage
from ptxflow.compiler.backend.sass import SassReport
from ptxflow.compiler.check import check, check_bounds, check_launch
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import AssemblyError, CompileError, IllegalStrategy
from ptxflow.compiler.family import Family, Problem, Strategy, Trip
from ptxflow.compiler.ir import Op, Statement, walk
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch
from ptxflow.compiler.processes import Processes

Job = tuple[Problem, Strategy]
Validator = Callable[[Statement, Sequence[Trip], Device], list[str]]


@dataclass(frozen=True)
class Draft:
    """A validated kernel as text: what is assembled, how it is launched, what it promises."""

    problem: Problem
    strategy: Strategy
    device: Device
    launch: Launch
    ptx: str
    expected: tuple[str, ...]  # techniques that the machine code must show
    checks: tuple[str, ...]  # a line for each check that held


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that passed every stage. `usage` is what ptxas reports, `sass` what it emitted."""

    problem: Problem
    strategy: Strategy
    device: Device
    launch: Launch
    ptx: str
    cubin: bytes
    usage: Usage
    sass: SassReport
    checks: tuple[str, ...]


def compile_kernel(problem: Problem, strategy: Strategy, device: Device) -> CompiledKernel:
    """Compile one strategy for a problem, through every stage.

    Raises a CompileError that says why: IllegalStrategy, SpecError or HazardError from before
    ptxas, AssemblyError from behind it; and PtxasError, ptxas' own words.
    """
    draft = prepare(problem, strategy, device, cache.check)
    assembly = cache.assemble(draft.ptx, device.arch)
    return finish(draft, assembly, sass.check(assembly.cubin, device.arch, draft.expected))


def prepare(
    problem: Problem,
    strategy: Strategy,
    device: Device,
    validate: Validator = check,
    maker: Family | None = None,
) -> Draft:
    """Everything before ptxas: build the strategy's kernel, validate it, and write its PTX.

    `validate` is given the kernel, its trip classes and the device, and returns a line for each
    check; `maker` may stand for the strategy's family. Raises IllegalStrategy for a strategy that
    breaks a rule, SpecError, HazardError.
    """
    maker = maker or family(strategy.family)
    if refusals := maker.wide.refusals(problem, strategy, device):
        axes = " ".join(f"{k}={v}" for k, v in problem.axes)
        raise IllegalStrategy(
            f"strategy {strategy.key} for {problem.definition} ({axes}) on {device.name}: "
            + "; ".join(refusals)
        )
    kernel = maker.build(problem, strategy, device)
    checks = [*validate(kernel, maker.trips(problem, strategy, device), device)]
    launch = maker.launch(problem, strategy, device)
    check_launch(kernel, launch)
    checks += check_bounds(kernel, launch, dict(problem.axes), maker.held)
    text = write(kernel, device)
    return Draft(problem, strategy, device, launch, text, techniques(kernel), tuple(checks))


def finish(draft: Draft, assembly: Assembly, report: SassReport) -> CompiledKernel:
    """Everything after ptxas: no spills, no C75xx notes, and the techniques that were claimed.

    `assembly` is the draft's cubin with its resource usage, `report` what its machine code shows.
    Raises AssemblyError, which lists all complaints.
    """
    complaints = [*ptxas.check(assembly), *report.complaints()]
    if complaints:
        raise AssemblyError(f"strategy {draft.strategy.key}: {'; '.join(complaints)}")
    return CompiledKernel(
        draft.problem,
        draft.strategy,
        draft.device,
        draft.launch,
        draft.ptx,
        assembly.cubin,
        assembly.usage,
        report,
        draft.checks,
    )


def techniques(kernel: Statement) -> tuple[str, ...]:
    """Names of sass_signatures.json that the machine code must show, from the atoms used."""
    found: set[str] = set()
    for _, node in walk(kernel):
        if node.op is Op.ATOM:
            claimed = atom(node.arg.atom).sass
            found.update(claimed(node) if callable(claimed) else claimed)
    return tuple(sorted(found))


def compile_many(
    jobs: Iterable[Job],
    device: Device,
    *,
    workers: int,
    progress: Callable[[int], None] = lambda n: None,
) -> list[CompiledKernel | Exception]:
    """Compile (problem, strategy) jobs on `workers` processes.

    Returns a kernel for each job, in their order, or in its place the CompileError or PtxasError
    that refused it. `progress(n)` is called as n more jobs are done.
    """
    tasks = [(problem, strategy, device) for problem, strategy in jobs]
    size = max(1, min(_CHUNK, -(-len(tasks) // max(workers, 1))))
    chunks = [tasks[i : i + size] for i in range(0, len(tasks), size)]
    results: list[CompiledKernel | Exception] = []
    if workers <= 1 or len(chunks) == 1:
        outcomes: Iterable[list[CompiledKernel | Exception]] = map(compile_chunk, chunks)
        return _gather(outcomes, results, progress)
    with Processes(workers) as pool:
        return _gather(pool.map(compile_chunk, chunks), results, progress)


_CHUNK = 8  # the most kernels to one disassembler run


def _gather(
    outcomes: Iterable[list[CompiledKernel | Exception]],
    results: list[CompiledKernel | Exception],
    progress: Callable[[int], None],
) -> list[CompiledKernel | Exception]:
    for outcome in outcomes:
        results += outcome
        progress(len(outcome))
    return results


def compile_chunk(
    tasks: list[tuple[Problem, Strategy, Device]],
) -> list[CompiledKernel | Exception]:
    """Compile a few jobs in this process, with one run of the disassembler: see compile_many."""
    outcomes: list[CompiledKernel | Exception | tuple[Draft, Assembly]] = []
    for task in tasks:
        try:
            draft = prepare(*task, cache.check)
            outcomes.append((draft, cache.assemble(draft.ptx, draft.device.arch)))
        except (CompileError, ptxas.PtxasError) as refusal:
            outcomes.append(refusal)
    whole = [o for o in outcomes if isinstance(o, tuple)]
    reports = iter(sass.check_many([(a.cubin, d.device.arch, d.expected) for d, a in whole], 1))
    out: list[CompiledKernel | Exception] = []
    for outcome in outcomes:
        if isinstance(outcome, tuple):
            try:
                out.append(finish(*outcome, next(reports)))
            except CompileError as refusal:
                out.append(refusal)
        else:
            out.append(outcome)
    return out
