"""Deterministic inputs for every op type: `make_inputs(definition, axes, seed)`.

Values are drawn on the CPU, in fixed chunks that each have a stream of their own, so that they
depend on the definition's input names, the axes and the seed alone: not on the device, the number
of threads or the order of drawing. Index tensors are valid by construction.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptxflow.eval.definition import Definition, DefinitionError

CHUNK = 1 << 20  # elements drawn from one stream
FP8_MAX = 448.0  # largest float8_e4m3fn
RARE = 16  # where a case is rare, every 16th sequence or row has it

Inputs = dict[str, Any]
Ints = NDArray[np.int64]


class Draw:
    """Sources of randomness for one call: a stream per input name, addressed by chunk."""

    def __init__(self, definition: Definition, axes: Mapping[str, int], seed: int):
        if seed < 0:
            raise DefinitionError(f"{definition.name}: a seed must not be negative, not {seed}")
        self.definition, self.axes, self.seed = definition, axes, seed

    def rng(self, name: str, chunk: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), chunk])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.axes[axis] for axis in self.definition.inputs[name].shape or ())

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.definition.inputs[name].dtype)
        return dtype

    def normal(self, name: str, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        """A tensor of the input's shape and dtype, normal with that mean and deviation."""
        return self.fill(name, lambda rng, n: rng.standard_normal(n, np.float32) * scale + mean)

    def fill(self, name: str, values: Callable[[np.random.Generator, int], Any]) -> torch.Tensor:
        """A tensor of the input's shape and dtype whose chunks are `values(rng, count)`."""
        out = torch.empty(self.shape(name), dtype=self.dtype(name))
        flat = out.view(-1)

        def chunk(i: int) -> None:
            part = flat[i * CHUNK : (i + 1) * CHUNK]
            drawn = np.asarray(values(self.rng(name, i), part.numel()), np.float32)
            part.copy_(torch.from_numpy(drawn))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(chunk, range(-(-flat.numel() // CHUNK))))
        return out

    def ints(self, name: str, values: Any) -> torch.Tensor:
        """An integer tensor of the input's dtype; its shape must be the definition's."""
        tensor = torch.as_tensor(np.asarray(values), dtype=self.dtype(name))
        assert tuple(tensor.shape) == self.shape(name), (name, tensor.shape, self.shape(name))
        return tensor

    def fail(self, why: str) -> DefinitionError:
        axes = ", ".join(f"{n}={self.axes[n]}" for n in self.definition.var_axes)
        return DefinitionError(f"{self.definition.name}: {why} ({axes})")


def _gemm(d: Draw) -> Inputs:
    return {"A": d.normal("A"), "B": d.normal("B")}


GENERATORS: dict[str, Callable[[Draw], Inputs]] = {"gemm": _gemm}


def make_inputs(
    definition: Definition,
    axes: Mapping[str, int],
    seed: int,
    device: str | torch.device = "cpu",
    scalars: Mapping[str, float] | None = None,
) -> Inputs:
    """The inputs of a definition by name, in its order: tensors on `device`, scalars as numbers.

    `axes` binds the variable axes; `scalars` overrides scalar inputs (a workload's sm_scale).
    Raises DefinitionError for axes that no valid inputs have and for op types without a generator.
    """
    bound = definition.bind(axes)
    if definition.op_type not in GENERATORS:
        known = ", ".join(sorted(GENERATORS))
        raise DefinitionError(
            f"{definition.name}: no input generator for op_type {definition.op_type!r}; "
            f"there are {known}"
        )
    made = GENERATORS[definition.op_type](Draw(definition, bound, seed))
    for name, value in (scalars or {}).items():
        if name not in definition.inputs or definition.inputs[name].shape is not None:
            raise DefinitionError(f"{definition.name}: no scalar input {name!r}")
        made[name] = value
    missing = [name for name in definition.inputs if name not in made]
    if missing:
        raise DefinitionError(
            f"{definition.name}: the {definition.op_type} generator does not make "
            f"{', '.join(missing)}"
        )
    return {
        name: made[name].to(device) if isinstance(made[name], torch.Tensor) else made[name]
        for name in definition.inputs
    }
