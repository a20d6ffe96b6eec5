"""The validator: a kernel that is not proven safe here never becomes PTX."""

from __future__ import annotations

from collections.abc import Sequence

from ptxflow.compiler.check.machine import SCHEDULES, Machine
from ptxflow.compiler.check.program import Program
from ptxflow.compiler.check.spec import check_spec
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import UOp
from ptxflow.compiler.launch import Launch
from ptxflow.compiler.lower import layout
from ptxflow.compiler.strategy import Trip

__all__ = ["Machine", "Program", "check", "check_launch", "check_spec", "execute"]


def check(kernel: UOp, trips: Sequence[Trip], device: Device) -> list[str]:
    """Prove a lowered kernel: static rules, then abstract execution of every trip class.

    Returns one line per proof. Raises SpecError or HazardError with who, where, which rule, which
    facts, and what would fix it.
    """
    rules = check_spec(kernel, device)
    program = Program(kernel)
    proofs = [f"static: {rules} rules hold"]
    for trip in trips:
        steps = [execute(program, trip, schedule) for schedule in schedules(program)]
        proofs.append(f"abstract: {trip.name}: {steps[0]} steps, {len(steps)} schedules")
    return proofs


def schedules(program: Program) -> Sequence[str]:
    """One where warps meet at barriers of all alone: who comes first then changes nothing."""
    return SCHEDULES[:1] if program.in_step else SCHEDULES


def check_launch(kernel: UOp, launch: Launch) -> None:
    """Raise SpecError for a launch with less shared memory than the kernel's storage takes."""
    needed = layout(kernel.arg).smem_bytes
    if launch.smem_bytes < needed:
        raise SpecError(
            f"{launch.entry} is launched with {launch.smem_bytes} bytes of shared memory, and its "
            f"storage ends at {needed}; fix: count every tile on its alignment"
        )


def execute(program: Program, trip: Trip, schedule: str) -> int:
    """One abstract run; the number of statements executed. Raises HazardError."""
    return Machine(program, trip, schedule).run()
