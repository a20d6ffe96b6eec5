"""Faults of launches: what a mistake in a family's `launch` would give, by name."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ptxflow.compiler.launch import Launch, ScalarParam, TensorMapParam

Fault = tuple[str, Launch]
_ALIKE = {"float16": "bfloat16", "bfloat16": "float16", "uint8": "float8_e4m3fn"}


def faults(launch: Launch) -> Iterator[Fault]:
    """Launches with one fault each; those that change nothing a kernel computes are not here."""
    steps = launch.steps
    for i, step in enumerate(steps):
        for what, bad in (*_shapes(step), *_parameters(step)):
            yield f"{step.entry}: {what}", _call(launch, [*steps[:i], bad, *steps[i + 1 :]])
    for i in range(len(steps) if len(steps) > 1 else 0):
        yield f"{steps[i].entry} left out", _call(launch, [*steps[:i], *steps[i + 1 :]])
    for i, (one, other) in enumerate(pairwise(steps)):
        turned = [*steps[:i], other, one, *steps[i + 2 :]]
        yield f"{one.entry} behind {other.entry}", _call(launch, turned)
    for name, part in (("a quarter", "// 4"), ("half", "// 2"), ("thrice", "* 3")):
        for i, w in enumerate(launch.workspace):
            changed = _put(launch.workspace, i, replace(w, bytes=f"({w.bytes}) {part}"))
            yield f"workspace {w.name}: {name}", replace(launch, workspace=changed)


def _call(launch: Launch, steps: list[Launch]) -> Launch:
    first, *rest = (replace(step, then=(), workspace=()) for step in steps)
    return replace(first, then=tuple(rest), workspace=launch.workspace)


def _put(all_: tuple[Any, ...], i: int, new: Any) -> tuple[Any, ...]:
    return (*all_[:i], new, *all_[i + 1 :])


def _swapped(all_: tuple[Any, ...], i: int, j: int) -> tuple[Any, ...]:
    return _put(_put(all_, i, all_[j]), j, all_[i])


def _shapes(step: Launch) -> Iterator[Fault]:
    cluster, grid = step.cluster[0], step.grid[0]
    yield "a warp more", replace(step, block=step.block + 32)
    yield "a warp less", replace(step, block=step.block - 32)
    yield "clusters twice", replace(step, cluster=(2 * cluster, 1, 1))
    yield "clusters along y", replace(step, cluster=(1, max(cluster, 2), 1))
    yield "grid twice along y", replace(step, grid=(grid, "2", "1"))
    yield "grid half", replace(step, grid=(f"-(-({grid}) // {2 * cluster}) * {cluster}", "1", "1"))
    yield "grid twice", replace(step, grid=(f"({grid}) * 2", "1", "1"))
    yield (
        "not dependent" if step.dependent else "dependent",
        replace(step, dependent=not step.dependent),
    )
    if step.smem_bytes:
        yield "shared memory half", replace(step, smem_bytes=step.smem_bytes // 2)


def _parameters(step: Launch) -> Iterator[Fault]:
    for i, given in enumerate(step.params):
        alike = [j for j in range(i) if step.params[j].kind == given.kind]
        for j in alike[-1:]:
            yield (
                f"parameters {j}, {i} exchanged",
                replace(step, params=_swapped(step.params, j, i)),
            )
        if isinstance(given, ScalarParam):
            changed = replace(given, value=f"({given.value}) + 1")
            yield f"{given.name} and one", replace(step, params=_put(step.params, i, changed))
        if isinstance(given, TensorMapParam):
            for what, bad in _maps(given):
                yield (
                    f"map of {given.tensor}: {what}",
                    replace(step, params=_put(step.params, i, bad)),
                )


def _maps(given: TensorMapParam) -> Iterator[tuple[str, TensorMapParam]]:
    for d, (dim, side) in enumerate(zip(given.dims, given.box, strict=True)):
        yield f"dimension {d} half", replace(given, dims=_put(given.dims, d, f"({dim}) // 2"))
        yield f"dimension {d} twice", replace(given, dims=_put(given.dims, d, f"({dim}) * 2"))
        yield f"box {d} twice", replace(given, box=_put(given.box, d, 2 * side))
        if side > 1:
            yield f"box {d} half", replace(given, box=_put(given.box, d, side // 2))
    for d, stride in enumerate(given.strides):
        yield f"stride {d} twice", replace(given, strides=_put(given.strides, d, f"({stride}) * 2"))
        yield (
            f"dimensions {d}, {d + 1} exchanged",
            replace(given, dims=_swapped(given.dims, d, d + 1)),
        )
        if given.box[d] != given.box[d + 1]:
            yield f"box {d}, {d + 1} exchanged", replace(given, box=_swapped(given.box, d, d + 1))
    for d in range(len(given.strides) - 1):
        yield (
            f"strides {d}, {d + 1} exchanged",
            replace(given, strides=_swapped(given.strides, d, d + 1)),
        )
    for swizzle in {0, 32, 64, 128} - {given.swizzle}:
        yield f"swizzle {swizzle}", replace(given, swizzle=swizzle)
    yield "a wider dtype", replace(given, dtype="float32")
    yield "another dtype", replace(given, dtype=_ALIKE[given.dtype])
