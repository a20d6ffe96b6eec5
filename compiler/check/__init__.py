"""The validator: a kernel that fails a check here never becomes PTX."""

from collections.abc import Sequence

from ptxflow.compiler.check.bounds import check_bounds
from ptxflow.compiler.check.launch import check_launch
from ptxflow.compiler.check.machine import SCHEDULES, Machine
from ptxflow.compiler.check.order import awaited, check_order
from ptxflow.compiler.check.program import Program
from ptxflow.compiler.check.spec import check_spec
from ptxflow.compiler.check.values import check_values, needed_values
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import Statement, kernels_of

__all__ = ["Machine", "Program", "check", "check_bounds", "check_launch", "check_spec", "execute"]


def check(
    lowered: Statement, trips: Sequence[Trip], device: Device, proven: set[object] | None = None
) -> list[str]:
    """Check a lowered kernel or program: static rules, then abstract runs of all trip classes.

    Returns a line for each check that held. Raises SpecError or HazardError with who, where, which
    rule, which facts, and what would fix it. `proven` keeps the kernels that passed, with all that
    they were judged by beside the trips, and what is there is not run again.
    """
    kernels = kernels_of(lowered)
    check_order(kernels)
    proofs = []
    for kernel in kernels:
        place = kernel, awaited(kernels, kernel), kernel is kernels[-1]
        if proven is not None and place in proven:
            continue
        rules = check_spec(kernel, device) + check_values(kernel)
        program = Program(*place)
        name = f"{kernel.arg.name}: " if len(kernels) > 1 else ""
        proofs.append(f"static: {name}{rules} rules hold")
        mine = [t for t in trips if t.entry in ("", kernel.arg.name)]
        if not mine:
            raise SpecError(f"kernel {kernel.arg.name} has no trip: nothing proves it")
        needed = needed_values(kernel)
        for trip in mine:
            unsaid = sorted(needed - {name for name, _ in trip.values})
            if unsaid:
                raise SpecError(f"trip {trip.name} does not say what {', '.join(unsaid)} hold")
            steps = [execute(program, trip, schedule) for schedule in schedules(program)]
            proofs.append(f"abstract: {name}{trip.name}: {steps[0]} steps, {len(steps)} schedules")
        if proven is not None:
            proven.add(place)
    return proofs


def schedules(program: Program) -> Sequence[str]:
    """One where warps meet at barriers of all alone: who comes first then changes nothing."""
    return SCHEDULES[:1] if program.in_step else SCHEDULES


def execute(program: Program, trip: Trip, schedule: str) -> int:
    """One abstract run; the number of statements executed. Raises HazardError, and SpecError where
    it depends on a parameter that the trip does not know."""
    try:
        return Machine(program, trip, schedule).run()
    except KeyError as unknown:
        if unknown.args[0] not in dict(program.kernel.arg.params):
            raise
        raise SpecError(f"trip {trip.name} does not say what {unknown.args[0]} is") from None
