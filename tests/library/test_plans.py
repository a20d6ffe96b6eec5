"""Every definition's kernels as plans: launches of real strategies, tensors without data."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from ptxflow.compiler.backend.runtime import Driver
from ptxflow.compiler.device import H200
from ptxflow.compiler.launch import Launch, PointerParam, TensorMapParam, evaluate
from ptxflow.compiler.library.plan import Builder, Plan, mapped_only
from ptxflow.compiler.library.signature import ArgumentError, Signature
from ptxflow.env.tasks.arguments import find_problem, find_space
from ptxflow.env.tasks.definition import Definition, load, names
from ptxflow.env.tasks.workload import workloads
from tests.library.fake import CONTEXT, FakeLibrary

META = torch.device("meta")


def tensors(definition: Definition, axes: Mapping[str, int]) -> list[Any]:
    """The inputs as tensors without data, optional ones as None."""
    return [
        (2 if t.dtype == "int32" else 0.5)
        if t.shape is None
        else None
        if t.optional
        else torch.empty([axes[a] for a in t.shape], dtype=getattr(torch, t.dtype), device=META)
        for t in definition.inputs.values()
    ]


def plan_of(definition: Definition, launch: Launch, arguments: Sequence[Any]) -> Plan:
    signature = Signature.of(definition.to_json())
    builder = Builder(
        signature, launch, signature.sizes(arguments), arguments, Driver(FakeLibrary({}))
    )
    functions = [ctypes.c_void_p(1 + i) for i in range(len(launch.steps))]
    return builder.plan(functions, CONTEXT, META)


@pytest.mark.parametrize("name", names())
def test_every_definition_has_plans(name: str) -> None:
    definition = load(name)
    row = next(w for w in workloads(name) if w.refusal is None and not w.degenerate)
    family, problem = find_problem(definition, row.axes)
    space = find_space(family, problem, H200)
    count = len(space.codes)
    for place in {0, count // 3, count // 2, count - 1}:
        strategy = space.strategy(int(space.codes[place]))
        launch = family.launch(problem, strategy, H200)
        check(definition, launch, row.axes, definition.bind(row.axes))


def check(
    definition: Definition, launch: Launch, var: Mapping[str, int], axes: Mapping[str, int]
) -> None:
    plan = plan_of(definition, launch, tensors(definition, axes))
    assert [len(s.offsets) for s in plan.steps] == [len(s.params) for s in launch.steps]
    params = [p for step in launch.steps for p in step.params]
    addressed = [p for p in params if isinstance(p, TensorMapParam | PointerParam)]
    assert len(plan.patches) == len(addressed) and plan.bytes <= 8192
    size = sum(-(-evaluate(w.bytes, axes) // 256) * 256 for w in launch.workspace)
    assert (plan.workspace or ((0,),))[0][0] == size
    for a, made in zip(definition.outputs.values(), plan.made, strict=True):
        assert made[0] == tuple(axes[n] for n in a.shape or ())


def gemm(**more: Any) -> Launch:
    maps = [TensorMapParam(n, "float16", ("K", r), ("2 * K",), (64, 64), 128)
            for n, r in (("A", "M"), ("B", "N"))]  # fmt: skip
    return Launch("k", ("1", "1", "1"), 128, (1, 1, 1), 0, (*maps, PointerParam("C")), **more)


def test_tensors_behind_maps_alone_may_be_wide() -> None:
    assert mapped_only(gemm()) == {"A", "B"}
    both = gemm(then=(Launch("l", ("1",) * 3, 32, (1, 1, 1), 0, (PointerParam("A"),)),))  # type: ignore[arg-type]
    assert mapped_only(both) == {"B"}


CACHE = load("gqa_paged_decode_h32_kv8_d128_ps64")


def over(dims: tuple[str, ...], strides: tuple[str, ...]) -> Launch:
    param = TensorMapParam("k_cache", "bfloat16", dims, strides, (64,) * len(dims), 128)
    return Launch("k", ("1", "1", "1"), 32, (1, 1, 1), 0, (param,))


@pytest.mark.parametrize(
    ("dims", "strides", "line"),
    [
        (("128", "8", "64", "num_pages"), ("256", "2048", "131072"), ""),
        (("128", "8", "64 * num_pages"), ("256", "2048"), "which have gaps"),
        (("1024", "64", "num_pages"), ("2048", "131072"), ""),
        (("64", "16", "64", "num_pages"), ("128", "2048", "131072"), ""),
        (("64", "2", "8 * 64 * num_pages"), ("128", "256"), "which have gaps"),
        (("96", "16", "64", "num_pages"), ("192", "2048", "131072"), ""),
    ],
)
def test_pages_between_others(dims: tuple[str, ...], strides: tuple[str, ...], line: str) -> None:
    """Keys and values in one cache: the pages of each lie two pages apart."""
    arguments = tensors(CACHE, {**CACHE.const_axes, "batch_size": 2, "num_pages": 5,
                                "len_indptr": 3, "num_kv_indices": 5})  # fmt: skip
    both = torch.empty(5, 2, 64, 8, 128, dtype=torch.bfloat16, device=META)
    arguments[1] = both[:, 0]
    launch = over(dims, strides)
    if line:
        with pytest.raises(ArgumentError, match=line):
            plan_of(CACHE, launch, arguments)
        return
    plan = plan_of(CACHE, launch, arguments)
    rank = len(dims)
    words = (ctypes.c_uint64 * 16).from_address(plan.block)
    assert words[8 + rank - 2] == 2 * 131072 and words[1] == rank
