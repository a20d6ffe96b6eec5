"""RMSNorm, alone and after a residual addition: rows of float16 or bfloat16, on both targets."""

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.kernels.rmsnorm import cost, decisions
from ptxflow.compiler.kernels.rmsnorm.decisions import revise
from ptxflow.compiler.kernels.rmsnorm.kernel import ENTRY, Kernel
from ptxflow.compiler.kernels.rmsnorm.problem import SCHEMA
from ptxflow.compiler.launch import Launch, launch_of


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Trip-count classes: no group of rows, one (with a tail), and both buffers used again; where
    a row is read again, one chunk of it and two."""
    k = Kernel(p, s, device)
    out = []
    for groups in (0, 1, 4) if k.loops else (1,):
        rows = max(groups * k.group_rows - (groups == 1 and k.group_rows > 1), 1)
        for chunks in (1,) if k.kept or groups != 1 else (1, 2):
            values = {"batch_size": rows, "ctas": k.ctas, "chunks": chunks, "ctaid": 0}
            if not groups:  # the rows belong to the CTA before
                values |= {"ctas": 2, "ctaid": 1}
            columns = p["hidden_size"] if k.kept else chunks * k.at_once * k.step
            outputs = (("output", rows, columns),) if groups else ()
            name = f"{groups} groups of rows, {k.vectors if k.kept else chunks} vectors or chunks"
            out.append(Trip(name, tuple(values.items()), outputs))
    return out


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grid and parameters, as expressions over batch_size."""
    k = Kernel(p, s, device)
    groups = f"-(-batch_size // {k.group_rows})"
    grid = f"{groups} * {k.ctas}" if k.ctas > 1 else groups
    if k.loops:
        grid = f"min({groups}, {device.sms * s.ctas_per_sm})"
    return launch_of(ENTRY, grid, k.warps, k.params, smem_bytes=k.smem_bytes, cluster=k.ctas)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """A group of rows and a tail; where a CTA loops, four of them in one CTA."""
    k = Kernel(p, s, device)
    batch = (3 if k.loops else 1) * k.group_rows + max(1, k.group_rows // 2)
    small = replace(p, axes=(("batch_size", batch), ("hidden_size", k.hidden)))
    return Trial(small, 1 if k.loops else None)


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """Batches that end at each row of a thread, the first of them of more CTAs than lanes; turns of
    a loop over groups of rows in a CTA, and in two: more groups than a group has rows."""
    k = Kernel(p, s, device)
    rows = k.group_rows
    ends = [36 * rows + 1, *(n * int(s.rows) + 1 for n in range(1, k.flight))]
    turns = ((2, 1, ()), (max(5, rows + 1), 2, ())) if k.loops else ()
    several = (Size({"batch_size": n * rows + 1}, ctas, some) for n, ctas, some in turns)
    return Trials(({},), (*(Size({"batch_size": n}) for n in ends), *several))


RMSNORM = Family.of(
    SCHEMA,
    ("rmsnorm", "fused_add_rmsnorm"),
    decisions,
    cost,
    Kernels(lambda p, s, d: Kernel(p, s, d).build(), trips, launch, trial, trials),
    revise=revise,
)
