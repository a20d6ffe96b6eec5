"""Loads and stores of a warp's lanes, from and to tensors in global memory by their names."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import UOp, Value, anywhere, global_tensor, param, rectangle

Place = UOp | tuple[Value, Value, int, int]  # row, column, rows, columns: what a warp accesses


def _region(tensor: str, place: Place | None) -> UOp:
    if isinstance(place, tuple):
        return rectangle(global_tensor(tensor), *place)
    return anywhere(tensor) if place is None else place


def load_global(
    target: UOp,
    tensor: str,
    index: Value,
    inside: Value = 1,
    place: Place | None = None,
    element: int = 4,
    **attrs: Any,
) -> UOp:
    """A lane's registers from `index` of the tensor, in units of `element` bytes; zeros where not
    `inside`. `place` is for the validator: without one, anywhere in the tensor."""
    attrs["element"] = element
    return at.ld_global(target, param(tensor), index, inside, _region(tensor, place), **attrs)


def store_global(
    tensor: str,
    index: Value,
    source: UOp,
    place: Place,
    inside: Value = 1,
    element: int = 4,
    **attrs: Any,
) -> UOp:
    """A lane's registers to `index` of the tensor, in units of `element` bytes, if `inside`."""
    attrs["element"] = element
    return at.st_global(param(tensor), index, inside, _region(tensor, place), source, **attrs)
