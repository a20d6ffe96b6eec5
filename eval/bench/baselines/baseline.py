"""What baselines are made from, and what a maker returns."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptxflow.env.tasks.definition import Definition

Call = Callable[[], object]


@dataclass(frozen=True)
class Given:
    """What baselines are made from: a definition, its inputs in place, and the outputs' tensors.

    `bytes` are those that the problem cannot do without, `constants` what else its mathematics
    fixes.
    """

    definition: Definition
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, float | None]
    bytes: int
    constants: Mapping[str, float] = field(default_factory=dict)

    def arguments(self) -> list[Any]:
        """The inputs in the definition's order."""
        inputs = {**self.tensors, **self.scalars}
        return [inputs[name] for name in self.definition.inputs]


@dataclass(frozen=True)
class Baseline:
    """`call` is what is timed. `outputs` computes the definition's outputs, or the first of them,
    from the inputs that are in place now; None where there is nothing to compare. Only `rows` of
    the first axis are compared where there are some that the library defines otherwise."""

    call: Call
    outputs: Callable[[], Sequence[Tensor]] | None = None
    rows: Callable[[], Tensor] | None = None


Maker = Callable[[Given], Baseline]


class Unsupported(Exception):
    """A library has nothing for these inputs; the message says what it takes."""


def computing(call: Callable[[], Any], rows: Callable[[], Tensor] | None = None) -> Baseline:
    """A baseline whose call returns its outputs."""

    def outputs() -> Sequence[Tensor]:
        made = call()
        return made if isinstance(made, tuple | list) else (made,)

    return Baseline(call, outputs, rows)


def host_us(call: Call) -> float:
    """Microseconds that the host takes for a call while the GPU has nothing else to do."""
    taken = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return 1e6 * min(taken)


def replay(ready: Baseline, shapes: Sequence[torch.Size]) -> Baseline | None:
    """The same launches from a CUDA graph; None where a call cannot be captured, or returns no
    tensors of an output's shape."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            returned = ready.call()
    except RuntimeError:
        return None
    made = returned if isinstance(returned, tuple | list) else (returned,)
    if any(t is None or t.shape != shape for t, shape in zip(made, shapes, strict=False)):
        return None
    kept = ready, made  # the graph has their addresses

    def call() -> Sequence[Tensor]:
        graph.replay()
        return kept[1]

    return computing(call, ready.rows)
