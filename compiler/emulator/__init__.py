"""The emulator: runs the PTX text of a kernel on the CPU, for sm_90a and sm_100a.

It knows nothing of the compiler's IR: PTX text, a Launch and numpy arrays go in, the arrays hold
the results. Asynchronous work lands as late as is legal, and reads of what has not landed, was
never written or is out of bounds are faults that name the line.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

from ptxflow.compiler.emulator import (  # noqa: F401  importing them fills the table
    arithmetic,
    atomics,
    bits,
    bulk,
    comparisons,
    control,
    conversions,
    copies,
    floats,
    moves,
    plain,
    remote,
    scalar,
    tcgen05,
    tma,
    tmem,
    warpwide,
    wgmma,
    wmma,
)
from ptxflow.compiler.emulator.banks import Banks
from ptxflow.compiler.emulator.fault import Fault, PtxSyntaxError
from ptxflow.compiler.emulator.grid import Report
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.machine import Machine
from ptxflow.compiler.emulator.operands import Program
from ptxflow.compiler.emulator.parse import parse
from ptxflow.compiler.emulator.values import from_bfloat16, to_bfloat16
from ptxflow.compiler.launch import NO_ARGUMENTS, Arguments, Launch, evaluate

__all__ = ["Banks", "Fault", "PtxSyntaxError", "Report", "emulate", "from_bfloat16", "to_bfloat16"]


@lru_cache(maxsize=8)
def _program(ptx: str, entry: str) -> Program:
    """Of a text, which runs on several problems."""
    return Program(parse(ptx, entry))


def emulate(
    ptx: str, launch: Launch, tensors: Mapping[str, Array], axes: Mapping[str, int], *,
    seed: int = 0, some: Sequence[int] = (), grid: int | Sequence[int] | None = None,
    arguments: Arguments = NO_ARGUMENTS, limit: int = 0, before: Collection[str] = (),
    first: int = 0, banks: Banks | None = None,
) -> Report:  # fmt: skip
    """Run a kernel, or the kernels of a program in turn; output tensors are written in place.

    `tensors` are C-contiguous arrays by the names that the launch uses (bfloat16 as uint16 bits);
    an optional one may be missing. `seed` picks a schedule: 0 lets everything land as late as it
    can, others mix. `some` has the number of clusters that run of each launch, spread over its
    grid, or -n for the first n; 0, or none, runs all. `grid` (CTAs along x) replaces the (first)
    launch's, for persistent kernels. `arguments` are what parameters take besides tensors. A launch
    of more than `limit` instructions (0: 50 million a cluster) does not end. A workspace begins as
    NaN.
    `before`: tensors that what is before the call in the stream may access until the first launch
    has waited for it. Launches before the `first` are over: what they left is in `tensors`, where
    workspaces may be, too. `banks` counts conflicts, where they are asked for.
    Raises Fault (a PtxSyntaxError for text that it does not know) and ValueError for a launch that
    does not fit the kernel.
    """
    space = {
        w.name: np.full(max(1, evaluate(w.bytes, axes)), 0xFF, np.uint8)
        for w in launch.workspace
        if w.name not in tensors
    }
    whole, known = Report(), {**tensors, **space}
    grids = (grid,) if isinstance(grid, int) else grid or ()
    for i, step in enumerate(launch.steps[first:], first):
        program = _program(ptx, step.entry)
        ctas = grids[i] if i < len(grids) else 0
        machine = Machine(program, step, known, axes, seed, ctas, arguments, limit)
        machine.banks = banks
        if before and not i:
            machine.races.depend([machine.memory.named[name].shadow for name in before])
        try:
            whole.add(machine.run(some[i] if i < len(some) else 0))
        finally:
            whole.cover(step.entry, program.coverage.take())
    return whole
