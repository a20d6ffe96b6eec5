"""Loads and stores of a warp's lanes, from and to tensors in global memory by their names; zeros in
shared memory."""

from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import anywhere, global_tensor, rectangle, slot, when
from ptxflow.compiler.ir.nodes import WARP, Scalar, Slot, Statement, Storage, alu, param

LINE = 512  # bytes that a warp zeroes at once
Place = Slot | tuple[Scalar, Scalar, int, int]  # row, column, rows, columns: what a warp accesses


def _region(tensor: str, place: Place | None) -> Slot:
    if isinstance(place, tuple):
        return rectangle(global_tensor(tensor), *place)
    return anywhere(tensor) if place is None else place


def load_global(
    target: Slot,
    tensor: str,
    index: Scalar,
    inside: Scalar = 1,
    place: Place | None = None,
    element: int = 4,
    **attrs: Any,
) -> Statement:
    """A lane's registers from `index` of the tensor, in units of `element` bytes; zeros where not
    `inside`. `place` is for the validator: without one, anywhere in the tensor. `handed`: by a
    kernel before, or by this one."""
    load = at.ld_global_coherent if attrs.pop("handed", False) else at.ld_global
    attrs["element"] = element
    return load(target, param(tensor), index, inside, _region(tensor, place), **attrs)


def store_global(
    tensor: str,
    index: Scalar,
    source: Slot,
    place: Place,
    inside: Scalar = 1,
    element: int = 4,
    **attrs: Any,
) -> Statement:
    """A lane's registers to `index` of the tensor, in units of `element` bytes, if `inside`."""
    attrs["element"] = element
    return at.st_global(param(tensor), index, inside, _region(tensor, place), source, **attrs)


def zero_shared(storage: Storage, lines: int, warps: int, begun: bool = False) -> list[Statement]:
    """Zeros over the first lines of 512 bytes of storage, by the warps of a CTA; `begun`: sums."""
    out = list[Statement]()
    for first in range(0, lines, warps):
        zero = at.zero_shared(slot(storage, 0, (WARP + first) * LINE, LINE), begun=begun)
        left = lines - first
        out.append(zero if left >= warps else when(alu("lt", WARP, left), zero))
    return out


def meet(ctas: int) -> list[Statement]:
    """All threads of a cluster of so many CTAs."""
    return [at.cluster_arrive(), at.cluster_wait()] if ctas > 1 else [at.cta_sync()]
