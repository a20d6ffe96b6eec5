"""Runs a strategy's kernel on the CPU: the emitted PTX, on a small problem.

The kernel is built anew for the family's emulation problems: a first one, whose few tiles have
tails in every direction, and others, chosen by what they cover of the kernel's text (`trials`).
`cases` has their inputs, and what is right, exactly or between narrow bounds.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ptxflow.compiler.backend import cache
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy, Trial
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify.trials import INSTRUCTIONS, Attempt, Outcome, attempt, cover, quoted

SEEDS = (0, 1)  # schedules of the emulator: 0 lets everything land as late as it can
SAMPLED = 150_000  # instructions that a sampled kernel is given, before its last problem


@dataclass(frozen=True)
class Emulation:
    """What became of a kernel under the emulator.

    `exact`: every value is as it must be under every schedule; `error` is one line where that is
    not so. `hazards` are orderings that the ISA asks for and the kernel lacks, whatever its values
    are: one line each, with the PTX statements concerned and the schedule that showed it. `seconds`
    are of the processor, so that they do not depend on what else the machine does.
    Where more `problems` than the first were run, `items` of the text can be covered, of which
    `open` are not, and `unexecuted` has a line for each instruction that none of them executed.
    """

    axes: dict[str, int]
    schedules: int
    exact: bool
    seconds: float
    error: str = ""
    hazards: tuple[str, ...] = ()
    fault: bool = False  # the run ended at an access or instruction that may not be
    problems: int = 1
    items: int = 0
    open: int = 0
    unexecuted: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return self.exact and not self.hazards and not self.unexecuted

    @property
    def complaints(self) -> tuple[str, ...]:
        """Everything that is wrong, one line each; empty where the kernel is right. What was never
        executed proves nothing, and is wrong, too."""
        hazards = (f"hazard: {h}" for h in self.hazards)
        count = len(self.unexecuted)
        never = (f"{count} instructions never executed: {text}" for text in self.unexecuted[:1])
        return (*filter(None, [self.error]), *hazards, *never)

    @property
    def covered(self) -> float:
        """The share of what can be covered of the text; 0 where nobody counted."""
        return 1 - self.open / self.items if self.items else 0.0

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Emulation":
        """As `asdict` gives it."""
        return cls(**row | {n: tuple(row[n]) for n in ("hazards", "unexecuted")})

    def __str__(self) -> str:
        """The verdict, without the time, so that reports do not depend on the machine."""
        axes = " ".join(f"{n}={v}" for n, v in self.axes.items())
        verdict = "exactly right" if self.right else f"WRONG: {'; '.join(self.complaints)}"
        text = f"{verdict} at {axes} under {self.schedules} schedules"
        if not self.items:
            return text
        return f"{text}; {self.problems} problems cover {self.covered:.1%} of the text"


def run_emulation(
    problem: Problem, strategy: Strategy, device: Device, seeds: Sequence[int] = SEEDS
) -> Emulation:
    """Emulate the strategy's kernel on its family's first problem, under each schedule."""
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    return emulate_kernel(
        maker.build(small.problem, strategy, device), small, strategy, device, seeds
    )


def covering_emulation(
    problem: Problem,
    strategy: Strategy,
    device: Device,
    seeds: Sequence[int] = SEEDS,
    instructions: int = INSTRUCTIONS,
) -> Emulation:
    """As `run_emulation`, and then on problems chosen by what they cover of the kernel's text; none
    is begun after so many instructions, unless some of the text was never executed."""
    found = cover(problem, strategy, device, seeds, instructions)
    first = family(strategy.family).trial(problem, strategy, device).problem
    at = found.last.problem if found.error and found.last else first
    gaps = found.gaps
    never = [str(g) for g in gaps if g.kind == "instruction"]
    if not found.entries:
        never = ["any: no emulation problem has the text of the kernel"]
    return Emulation(
        dict(at.axes), len(found.schedules), not found.error, found.seconds, found.error,
        tuple(f"{h} (schedule {seed})" for h, seed in sorted(found.hazards.items())), found.fault,
        problems=found.tried - max(len(seeds) - 1, 0), items=found.items, open=len(gaps),
        unexecuted=tuple(never),
    )  # fmt: skip


def cached_emulation(problem: Problem, strategy: Strategy, device: Device) -> Emulation:
    """As `covering_emulation`, but a kernel that was right before is not emulated again.

    The store's key holds the kernel's PTX and that of its first problem, its launch, the schedules,
    and the sources of the compiler with its emulator and of this folder, which say what is right.
    What is wrong is not kept.
    """
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    kernels = (maker.build(p, strategy, device) for p in (problem, small.problem))
    launch = maker.launch(small.problem, strategy, device)
    texts = (write(kernel, device) for kernel in kernels)
    parts = (*texts, repr(launch), repr(small), repr(device), repr(SEEDS))
    name = cache.key("emulation", *parts, cache.sources(), cache.sources(Path(__file__).parent))
    kept = cache.store()
    if (payload := kept.get(name)) is not None:
        return Emulation.from_json(json.loads(payload))
    made = covering_emulation(problem, strategy, device, (), SAMPLED)
    if made.right:
        kept.put(name, json.dumps(asdict(made)).encode())
    return made


def emulate_kernel(
    kernel: Statement, small: Trial, s: Strategy, device: Device, seeds: Sequence[int] = SEEDS
) -> Emulation:
    """Emulate a lowered kernel that was built for an emulation problem."""
    ptx = write(kernel, device)
    launch = family(s.family).launch(small.problem, s, device)
    began, outcome = time.process_time(), Outcome()
    hazards = dict[str, int]()  # with the first schedule that showed it
    for seed in seeds:
        outcome = attempt(ptx, launch, Attempt(small.problem, seed, small.blocks))
        hazards = {text: seed for text in map(str, outcome.report.hazards)} | hazards
        if outcome.error:
            break
    noted = tuple(f"{quoted(h, ptx)} (schedule {seed})" for h, seed in sorted(hazards.items()))
    seconds, error = time.process_time() - began, outcome.error
    axes = dict(small.problem.axes)
    return Emulation(axes, len(seeds), not error, seconds, error, noted, outcome.fault)
