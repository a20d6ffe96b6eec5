"""What kernels pass on a GPU, on the CPU: a definition's inputs, its reference, its tolerances."""

from typing import Any

import numpy as np
import torch

from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.launch import Arguments
from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.verify.cases.case import Case
from tests.emulation import run


def f64(tensor: torch.Tensor) -> Any:
    """The values as numpy has them."""
    return tensor.double().numpy()


def unchanged(definition: Definition, *inputs: Any, **named: Any) -> Any:
    """The reference's result, having checked that it left its inputs alone."""
    tensors = [x for x in (*inputs, *named.values()) if isinstance(x, torch.Tensor)]
    before = [x.clone() for x in tensors]
    result = load_reference(definition)(*inputs, **named)
    for x, y in zip(before, tensors, strict=True):
        assert torch.equal(x.view(torch.uint8).flatten(), y.view(torch.uint8).flatten())
    return result


def as_torch(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """A case's array as torch has it: 16-bit words are bfloat16."""
    if values.dtype == np.uint16:
        return torch.from_numpy(values.copy().view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def assert_as_reference(
    p: Problem,
    s: Strategy,
    given: Definition,
    made: Case,
    within: float = 1.0,
    steeper: float = 1.0,
) -> None:
    """The strategy's kernels for an H200 on the definition's inputs of seed 1, put in place of the
    case's: no element wrong, and errors below `within` tolerances. Scalars are times `steeper`."""
    inputs = make_inputs(given, {n: p[n] for n in given.var_axes if n in dict(p.axes)}, 1)
    inputs |= {n: v * steeper for n, v in inputs.items() if isinstance(v, float)}
    tensors = {name: values.copy() for name, values in made.tensors.items()}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            narrow = value.dtype == torch.bfloat16
            words = value.view(torch.int16).numpy().view("u2") if narrow else value.numpy()
            tensors[name] = words.copy()
    scalars = {n: v for n, v in inputs.items() if isinstance(v, float)}
    found = run(p, s, Case(tensors, {}, Arguments(scalars)))
    expected = load_reference(given)(*inputs.values())
    for name, value in zip(given.outputs, expected, strict=True):
        compared = compare(as_torch(found[name]), value, tolerance(given, name))
        assert not compared.wrong and compared.max_error_ratio < within, (name, compared)
