"""Sampled strategies to ranked kernels: compile each, measure where there is a GPU, rank."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.backend.runtime import GpuInfo
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.processes import Processes
from ptxflow.env.cost import derived
from ptxflow.env.measurements import REFINE
from ptxflow.env.space import Space
from ptxflow.env.tasks.definition import Definition, names
from ptxflow.env.tasks.definition import load as load_definition
from ptxflow.env.tasks.spaces import cores
from ptxflow.eval.bench.campaign import machines
from ptxflow.eval.bench.candidates import (
    Candidate,
    Origin,
    Settings,
    compile_all,
    make_record,
    run_one,
    run_together,
)
from ptxflow.eval.bench.measurer import seconds
from ptxflow.eval.bench.records import Record
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted
from ptxflow.eval.sample.samples import Run, Sample, rank
from ptxflow.eval.sample.selection import POLICY, REWARD, Chosen
from ptxflow.eval.verify.emulation import Emulation, cached_emulation

REFINED = 4  # of the fastest, that are timed again in the same rounds


def compile_and_rank(
    definition: Definition, axes: Mapping[str, int], space: Space, chosen: Chosen,
    gpu: GpuInfo | None, *, valid: int, seed: int, checkpoint: str, jobs: int | None = None,
    emulate: bool = True, stop_at: float | None = None,
) -> Run:  # fmt: skip
    """The chosen strategies of a space, or of the part of one that was drawn, compiled, best first;
    `valid` is how many there are in the whole.

    Where there is no GPU, what their reward predicts ranks them. Where there is one, they are
    measured in their order until one has `stop_at` of the attainable speed.
    """
    problem, device = space.problem, space.device
    strategies = [space.strategy(int(space.codes[place])) for place in chosen.places]
    outcomes = compile_all([(problem, s) for s in strategies], device, jobs)
    built = [o for o in outcomes if isinstance(o, CompiledKernel)]
    emulations = emulate_all(built, jobs) if emulate else {}
    default = strategies[int(np.argmax(chosen.predicted[chosen.places]))].key
    records = measure(definition, space, built, gpu, default, stop_at) if gpu else {}
    return Run(
        definition=definition.to_json(),
        known=definition.name in names() and load_definition(definition.name) == definition,
        family=space.family,
        problem=problem,
        device=device,
        axes=dict(axes),
        seed=seed,
        checkpoint=checkpoint,
        predicted=chosen.predicted,
        valid=valid,
        samples=rank(_samples(space, chosen, outcomes, records, emulations)),
        refused=[
            (s, o) for s, o in zip(strategies, outcomes, strict=True) if isinstance(o, Exception)
        ],
        predicted_by=chosen.reward,
        ranked_by=f"measurement on {gpu.name}" if gpu else chosen.reward,
        remarks=chosen.remarks,
        stop_at=stop_at,
    )


def _samples(
    space: Space,
    chosen: Chosen,
    outcomes: Sequence[CompiledKernel | Exception],
    records: Mapping[str, Record],
    emulations: Mapping[str, Emulation],
) -> list[Sample]:
    """Of the chosen strategies those that were built."""
    samples = []
    for number, (place, kernel) in enumerate(zip(chosen.places, outcomes, strict=True)):
        if isinstance(kernel, CompiledKernel):
            key = kernel.strategy.key
            samples.append(Sample(
                kernel=kernel,
                source=POLICY if number < chosen.drawn else REWARD,
                log_prob=float(chosen.log_probs[place]),
                derived=derived(space.family, kernel.strategy, space.problem, space.device),
                place=1 + int((chosen.predicted > chosen.predicted[place]).sum()),
                predicted=float(chosen.predicted[place]),
                record=records.get(key),
                emulation=emulations.get(key),
            ))  # fmt: skip
    return samples


def emulate_all(kernels: Sequence[CompiledKernel], jobs: int | None) -> dict[str, Emulation]:
    """Each kernel's PTX on its family's trial problem, on all cores, unless it was right there
    before; by strategy key."""
    with Processes(jobs or cores()) as pool:
        runs = pool.map(
            cached_emulation,
            [k.problem for k in kernels],
            [k.strategy for k in kernels],
            [k.device for k in kernels],
        )
        bar = tqdm(runs, total=len(kernels), desc="emulate", unit="kernel")
        return {k.strategy.key: run for k, run in zip(kernels, bar, strict=True)}


def measure(
    definition: Definition,
    space: Space,
    kernels: Sequence[CompiledKernel],
    gpu: GpuInfo,
    default: str,
    stop_at: float | None = None,
) -> dict[str, Record]:
    """Check and time each kernel in a child process, until one is right and has `stop_at` of the
    attainable speed; then the fastest and the `default`, by its key, anew in the same rounds.
    Records by strategy key."""
    settings, origin = Settings(), Origin(ptxas.version())
    axes = {name: space.problem[name] for name in definition.var_axes}
    floors = Floors.of(counted(definition, axes), space.device)
    records: dict[str, Record] = {}
    with (
        machines(space.device) as (workers, _),
        tempfile.TemporaryDirectory(prefix="ptxflow-sample-") as folder,
    ):
        for kernel in tqdm(kernels, desc="measure", unit="kernel"):
            strategy = kernel.strategy
            candidate = Candidate(definition, space.family, space.problem, strategy, space.device)
            outcome = run_one(candidate, kernel, workers[0], settings, Path(folder))
            record = make_record(candidate, outcome, gpu.to_json(), origin, kernel)
            records[strategy.key] = record
            if stop_at and floors.share(seconds(record) * 1e6) >= stop_at:
                break
        right = [k for k in kernels if (r := records.get(k.strategy.key)) and r.status == "ok"]
        right.sort(key=lambda k: seconds(records[k.strategy.key]))
        chosen = [
            (Candidate(definition, space.family, space.problem, k.strategy, space.device), k)
            for place, k in enumerate(right)
            if place < REFINED or k.strategy.key == default
        ]
        if len(chosen) > 1:
            told = run_together(chosen, workers[0], settings, Path(folder))
            outcomes = zip(chosen, told.get("outcomes", ()), strict=False)
            for (candidate, kernel), outcome in outcomes:
                record = make_record(candidate, outcome, gpu.to_json(), origin, kernel, REFINE)
                records[record.key] = record
    return records
