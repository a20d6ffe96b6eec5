"""Which kernels stand for all in the golden tests: `python -m tests.golden.kernels`.

For each family and target strategies are drawn uniformly at workloads of all its definitions until
no further draw reaches a new branch of the builders; a small set that reaches the same branches is
kept, in `kernels.json`. Prints the lines of the builders that no draw reaches.
"""

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

from ptxflow.compiler.device import B200, DEVICES, H200, Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Statement
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.arguments import find_problem, find_space
from ptxflow.env.tasks.definition import load, names, own_names
from ptxflow.env.tasks.training_set import typical_axes
from ptxflow.eval.sample.draws import places
from ptxflow.eval.verify.draws import definitions

TARGETS = (H200, B200)
KERNELS = Path(__file__).with_name("kernels.json")
ROOT = Path(__file__).resolve().parents[2]
#: definitions of more heads and longer lists than those that come with ptxflow
MORE = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests" / "definitions").glob("*.json"))]
BUILDERS = "/compiler/kernels/"
ELSEWHERE = ("__init__.py", "problem.py", "decisions.py", "cost.py", "work.py", "waves.py")
WORKLOADS = 3  # of each definition
DRY = 60  # draws without a new branch, after which a family is exhausted
Branch = tuple[str, int, int]  # file, line, and the line before it in the same call


@dataclass(frozen=True)
class Kernel:
    """A strategy at a workload of a definition, for a device."""

    definition: str
    axes: dict[str, int]
    device: str
    family: str
    choices: dict[str, int | str]

    def bound(self) -> tuple[Problem, Strategy, Device]:
        path = self.definition
        definition = load(str(ROOT / path) if path.endswith(".json") else path)
        _, problem = find_problem(definition, self.axes)
        return problem, Strategy(self.family, tuple(self.choices.items())), DEVICES[self.device]

    def build(self) -> Statement:
        """The lowered kernel."""
        problem, strategy, device = self.bound()
        return family(self.family).build(problem, strategy, device)

    def __str__(self) -> str:
        axes = " ".join(f"{n}={v}" for n, v in self.axes.items())
        return f"{self.device} {self.definition} {axes} {self.bound()[1].key}"


def read() -> list[Kernel]:
    """The chosen kernels."""
    return [Kernel(**row) for row in json.loads(KERNELS.read_text())]


def branches(build: Callable[[], Statement]) -> set[Branch]:
    """The branches of the builders that a build takes."""
    seen: set[Branch] = set()

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if BUILDERS not in name:
            return None
        before = 0

        def stepped(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before
            if event == "line":
                seen.add((name.partition(BUILDERS)[2], frame.f_lineno, before))
                before = frame.f_lineno
            return stepped

        return stepped

    sys.settrace(called)
    try:
        build()
    finally:
        sys.settrace(None)
    return seen


def draws(name: str, device: Device, seed: int) -> Iterator[Kernel]:
    """Strategies of a family, uniform at one workload after the other, without end."""
    rng = np.random.default_rng(seed)
    more = [(path, typical_axes(load(path)) or {}) for path in MORE]
    spaces = []
    for definition, axes in [*places((*names(), *own_names()), WORKLOADS), *more]:
        maker, problem = find_problem(load(definition), axes)
        if maker.name == name:
            spaces.append((definition, axes, find_space(maker, problem, device)))
    while True:
        for definition, axes, space in spaces:
            strategy = space.strategy(int(rng.choice(space.codes)))
            yield Kernel(definition, axes, device.name, name, dict(strategy.choices))


def chosen(name: str, device: Device, seed: int = 0) -> tuple[list[Kernel], set[Branch]]:
    """A small set of kernels that takes every branch that any draw takes, and these branches."""
    held: list[tuple[Kernel, set[Branch]]] = []
    reached: set[Branch] = set()
    dry = 0
    for kernel in draws(name, device, seed):
        new = branches(kernel.build)
        dry = 0 if new - reached else dry + 1
        if new - reached:
            held.append((kernel, new))
            reached |= new
        if dry == DRY:
            break
    kept, missing = [], set(reached)
    while missing:
        kernel, new = max(held, key=lambda item: len(item[1] & missing))
        kept.append(kernel)
        missing -= new
    return kept, reached


def lines_of(path: Path) -> set[int]:
    """The lines inside of functions that a run can reach."""
    found: set[int] = set()

    def walk(code: CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                if inner.co_flags & inspect.CO_OPTIMIZED:  # a function, not the body of a class
                    found.update(n for *_, n in inner.co_lines() if n and n > inner.co_firstlineno)
                walk(inner)

    walk(compile(path.read_text(), str(path), "exec"))
    return found


def uncovered(reached: set[Branch]) -> dict[str, list[int]]:
    """By file, the lines of builders that no draw reaches."""
    import ptxflow.compiler.kernels as families

    root = Path(families.__file__).resolve().parent
    seen: dict[str, set[int]] = {}
    for file, line, _ in reached:
        seen.setdefault(file, set()).add(line)
    return {
        file: sorted(lines_of(root / file) - lines)
        for file, lines in sorted(seen.items())
        if Path(file).name not in ELSEWHERE
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="+", help="choose anew for these alone (default: all)")
    asked = parser.parse_args(argv).family or list(definitions())
    found = [k for k in read() if k.family not in asked] if KERNELS.exists() else []
    reached: set[Branch] = set()
    for name in asked:
        for device in TARGETS:
            kept, new = chosen(name, device)
            found += kept
            reached |= new
            print(f"{name} on {device.name}: {len(kept)} kernels, {len(new)} branches", flush=True)
    for file, lines in uncovered(reached).items():
        print(f"{file}: not reached: {', '.join(map(str, lines)) or 'none'}")
    rows = ",\n".join(json.dumps(vars(k)) for k in sorted(found, key=lambda k: k.family))
    KERNELS.write_text(f"[\n{rows}\n]\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
