"""Benches of definitions on the CPU, and modules that stand in for FlashInfer."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.baselines.baseline import Given
from ptxflow.eval.bench.baselines.registry import Baselines, makers_of
from ptxflow.eval.bench.checking import Bench
from ptxflow.eval.bench.session import case_of

CPU = torch.device("cpu")


def bench_of(definition: Definition, axes: dict[str, int], *seeds: int) -> Bench:
    """Of seeds 1 and 2 where none is given."""
    return Bench(case_of(definition, axes, CPU), CPU, seeds or (1, 2))


def beside(definition: Definition, axes: dict[str, int], *seeds: int) -> Baselines:
    return Baselines(definition, axes, bench_of(definition, axes, *seeds))


def given(definition: Definition, inputs: dict[str, Any]) -> Given:
    """Inputs as baselines get them: tensors apart from scalars."""
    tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    scalars = {n: x for n, x in inputs.items() if isinstance(x, int | float)}
    return Given(definition, tensors, scalars, 0)


def ready(name: str, held: Given) -> Any:
    """The baseline of that name, on these inputs."""
    return makers_of(held.definition)[name](held)


def install(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """A FlashInfer of these functions, each in `flashinfer` or, after `MODULE__`, in a module."""
    modules: dict[str, dict[str, Any]] = {"flashinfer": {}}
    for name, function in functions.items():
        module, _, own = name.rpartition("__")
        modules.setdefault(f"flashinfer.{module}".rstrip("."), {})[own] = function
    for name, held in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**held))  # type: ignore[arg-type]
