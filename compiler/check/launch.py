"""The validator of launches: what starts a kernel against what the kernel's tree says of itself.

Expressions over axes are evaluated at two assignments: sizes at which tiles are full, and primes.
What only data tells (swizzles that no descriptor reads, coordinates) is left to the emulator.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from ptxflow.compiler.atoms.table import atom
from ptxflow.compiler.check.order import read_after_write, read_unwritten, touched
from ptxflow.compiler.check.reach import Threads, reads_special
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import KernelInfo, Op, Statement, kernels_of, show, walk
from ptxflow.compiler.launch import (
    MOST_BYTES,
    InputParam,
    Launch,
    Param,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
    evaluate,
    scalars_of,
)
from ptxflow.compiler.lower import layout

Axes = Mapping[str, int]
#: what fills tiles, 840 = 2^3 * 3 * 5 * 7 those of all usual sizes, and primes; the first at which
#: workspaces are no larger than a launch may have
SIZES = (
    (840, (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)),
    (120, (101, 103, 107, 109, 113, 127, 131, 137)),
    (8, (11, 13, 17, 19, 23, 29, 31, 37)),
    (1, (2, 3, 5, 7, 11, 13, 17, 19)),
)
ALIGNED = 16  # bytes: a workspace may end so far behind what is written, less one
_KINDS: dict[str, tuple[type[Param], ...]] = {
    "map": (TensorMapParam,),
    "ptr": (PointerParam,),
    "u32": (ScalarParam, InputParam, PresentParam, RandomParam),
}
_RANDOM = ("seed_low", "seed_high", "offset_low", "offset_high")
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}  # by the number that ends a dtype's first word
#: the bits from which a matrix descriptor's layout type stands, and the swizzles that they mean
#: (PTX ISA 9.7.15.5.1 and 9.7.16.4.1)
_LAYOUTS = {
    "sm_90a": (62, {0: 0, 1: 128, 2: 64, 3: 32}),
    "sm_100a": (61, {0: 0, 2: 128, 4: 64, 6: 32}),
}


def check_launch(lowered: Statement, launch: Launch) -> None:
    """Raise SpecError unless each kernel has its launch, in order: block, cluster, grid, shared
    memory, parameters, tensor maps and workspace as the kernel takes them."""
    kernels = kernels_of(lowered)
    entries = [k.arg.name for k in kernels], [step.entry for step in launch.steps]
    if entries[0] != entries[1]:
        raise SpecError(
            f"kernels {entries[0]} are launched as {entries[1]}; fix: a launch of each, in order"
        )
    samples = _samples(launch)
    _check_scalars(launch, samples[0])
    for kernel, step in zip(kernels, launch.steps, strict=True):
        _check_shape(kernel.arg, step)
        _check_parameters(kernel, step)
        scalars = [scalars_of(step, axes) for axes in samples]
        for axes, values in zip(samples, scalars, strict=True):
            _check_grid(kernel, step, axes, values)
        for (name, kind), given in zip(kernel.arg.params, step.params, strict=True):
            if kind == "map" and isinstance(given, TensorMapParam):
                _check_map(kernel, name, given, samples)
    _check_workspace(kernels, launch, samples[0])


def _refuse(where: str, what: str, fix: str) -> None:
    raise SpecError(f"launch of {where}: {what}; fix: {fix}")


# -- expressions ----------------------------------------------------------------------------------


def _samples(launch: Launch) -> tuple[Axes, Axes]:
    """All axes that the launch names: at sizes that fill tiles, and at primes."""
    names = {
        node.id
        for text in launch.expressions()
        for node in ast.walk(ast.parse(text, mode="eval"))
        if isinstance(node, ast.Name) and node.id not in ("min", "max")
    }
    ordered = sorted(names)
    for unit, primes in SIZES:
        full = {name: unit * (i + 1) for i, name in enumerate(ordered)}
        odd = {name: primes[i % len(primes)] for i, name in enumerate(ordered)}
        if all(evaluate(w.bytes, a) <= MOST_BYTES for w in launch.workspace for a in (full, odd)):
            break
    return full, odd


def _at(axes: Axes) -> str:
    return ", ".join(f"{name} = {value}" for name, value in axes.items())


# -- block, cluster, grid -------------------------------------------------------------------------


def _check_shape(info: KernelInfo, step: Launch) -> None:
    if step.block != 32 * info.warps:
        _refuse(
            step.entry,
            f"{step.block} threads in a block, and its roles have {info.warps} warps",
            f"a block of {32 * info.warps}",
        )
    if step.cluster != (info.cluster, 1, 1):
        _refuse(
            step.entry,
            f"clusters of {step.cluster}, and the kernel's are of {info.cluster} along x",
            f"clusters of {(info.cluster, 1, 1)}",
        )
    needed = layout(info).smem_bytes
    if step.smem_bytes < needed:
        raise SpecError(
            f"{step.entry} is launched with {step.smem_bytes} bytes of shared memory, and its "
            f"storage ends at {needed}; fix: count every tile on its alignment"
        )
    if step.dependent != info.dependent:
        raise SpecError(
            f"{step.entry} is {'' if step.dependent else 'not '}launched as dependent, and its "
            f"kernel is {'' if info.dependent else 'not '}so; fix: one says what the other does"
        )


def _check_grid(kernel: Statement, step: Launch, axes: Axes, scalars: Mapping[str, int]) -> None:
    """Whole clusters along x, of which the last writes something."""
    x, *others = (evaluate(side, axes) for side in step.grid)
    cluster = kernel.arg.cluster
    if x < 1 or x % cluster or others != [1, 1]:
        _refuse(
            step.entry,
            f"a grid of {(x, *others)} at {_at(axes)}, and the kernel numbers whole clusters of "
            f"{cluster} CTAs along x",
            "a multiple of the cluster, and 1 along y and z",
        )
    if reads_special(kernel, "ctas"):
        return  # it works through whatever grid there is
    last = Threads(kernel, list(range(x - cluster, x)), x, scalars)
    if not any(touch.mode != "r" for touch in last.touches()):
        _refuse(
            step.entry,
            f"a grid of {x} at {_at(axes)}, and its last cluster writes nothing",
            "as many CTAs as the kernel's bounds leave work for",
        )


# -- parameters -----------------------------------------------------------------------------------


def _check_parameters(kernel: Statement, step: Launch) -> None:
    declared = kernel.arg.params
    if len(declared) != len(step.params):
        _refuse(
            step.entry,
            f"{len(step.params)} parameters, and the kernel has {len(declared)}",
            "one for each, in order",
        )
    for (name, kind), given in zip(declared, step.params, strict=True):
        if not isinstance(given, _KINDS[kind]):
            _refuse(step.entry, f"parameter {name} is a {kind}, given a {given.kind}", f"a {kind}")
        if not _means(name, given):
            _refuse(
                step.entry,
                f"parameter {name} is given the {given.kind} {_called(given)}",
                "what its name says, in the kernel's order",
            )


def _check_scalars(launch: Launch, axes: Axes) -> None:
    """One named as an axis is that axis; another is what a grid, a map or the workspace counts by,
    or what another kernel is given by its name, so that two places must agree on it."""
    expressions = " ".join(launch.expressions(scalars=False))
    for step in launch.steps:
        others = (g for other in launch.steps if other is not step for g in other.params)
        told = {g.name: g.value for g in others if isinstance(g, ScalarParam)}
        for given in step.params:
            if not isinstance(given, ScalarParam):
                continue
            named = given.name if given.name in axes else ""
            counted = re.search(rf"(?<!\w){re.escape(given.value)}(?!\w)", expressions)
            agreed = counted or told.get(given.name) == given.value
            if given.value != named and (named or not agreed):
                _refuse(
                    step.entry,
                    f"parameter {given.name} is given {given.value}",
                    "the axis of its name"
                    if named
                    else "what a grid, a map, the workspace or another kernel counts by",
                )


def _called(given: Param) -> str:
    match given:
        case RandomParam(word):
            return _RANDOM[word]
        case ScalarParam() | InputParam():
            return given.name
    return given.tensor


def _means(name: str, given: Param) -> bool:
    """Whether a parameter's name says what it is given: N the tensor, scalar or word N, N_present
    whether N is there, N_map a map over a tensor of whose name N is a word."""
    called = _called(given)
    match given:
        case TensorMapParam():
            return f"_{name.removesuffix('_map')}_" in f"_{called}_"
        case PresentParam():
            return name == f"{called}_present"
    return name == called


# -- tensor maps ----------------------------------------------------------------------------------


def _check_map(
    kernel: Statement, name: str, given: TensorMapParam, samples: Sequence[Axes]
) -> None:
    where = f"{kernel.arg.name}, map {name} over {given.tensor}"
    rank = len(given.dims)
    if len(given.box) != rank or len(given.strides) != rank - 1:
        _refuse(
            where,
            f"{rank} dimensions, {len(given.strides)} strides, a box of {len(given.box)}",
            "a side of the box for each dimension, a stride for all but the first",
        )
    copies = [node for _, node in walk(kernel) if node.op is Op.ATOM and _copies(node, name)]
    if not copies:
        _refuse(where, "no copy of the kernel goes by it", "leave it out, or name it where it goes")
    for node in copies:
        _check_copy(where, node, given)
    _check_swizzle(where, kernel, copies, given)
    for axes in samples:
        _check_dense(where, given, axes)


def _copies(node: Statement, name: str) -> bool:
    row = atom(node.arg.atom)
    kinds = dict(row.operands)
    moves = bool(row.accesses) or node.arg.attr("box") is not None
    return "map" in kinds and moves and row.operand(node, "map").arg == name


def _check_copy(where: str, node: Statement, given: TensorMapParam) -> None:
    """Rank, box, element and tensor as one copy takes them."""
    row, who = atom(node.arg.atom), f"{show(node)} at {node.site}"
    names = [name for name, _ in row.operands]
    apart = sum(name[0] == "r" and name[1:].isdigit() for name in names)  # rows of a gather
    rank = sum(name[0] == "c" and name[1:].isdigit() for name in names) + bool(apart)
    if rank != len(given.dims):
        _refuse(where, f"{len(given.dims)} dimensions, and {who} has {rank}", "its coordinates'")
    wide, tall = node.arg.attr("box")
    if given.box[0] != wide or prod(given.box[1:]) * max(apart, 1) != tall:
        _refuse(
            where,
            f"a box of {given.box}, and {who} fills {tall} rows of {wide} elements",
            "the box that its tile and barrier count",
        )
    element = node.arg.attr("element")
    if _element(where, given) != element:
        _refuse(
            where,
            f"elements of {given.dtype}, and those of {who} have {element} bytes",
            "the tensor's dtype",
        )
    for (_, kind), operand in zip(row.operands, node.src, strict=True):
        if kind == "global" and operand.src[0].arg.name != given.tensor:
            _refuse(where, f"{who} goes to {operand.src[0].arg.name}", "a map over that tensor")


def _element(where: str, given: TensorMapParam) -> int:
    bits = "".join(c for c in given.dtype.split("_")[0] if c.isdigit())
    if bits not in _BYTES:
        _refuse(where, f"unknown dtype {given.dtype}", "a number of 8, 16, 32 or 64 bits")
    return _BYTES[bits]


def _check_swizzle(
    where: str, kernel: Statement, copies: Sequence[Statement], given: TensorMapParam
) -> None:
    """As the descriptors take it by which MMAs read what the map's boxes fill."""
    shift, meaning = _LAYOUTS[kernel.arg.arch]
    filled = {s.src[0] for n in copies for s in n.src if s.op is Op.SLOT and s.src[0].op is Op.SMEM}
    row_bytes = given.box[0] * _element(where, given)
    if given.swizzle not in (0, row_bytes):
        _refuse(
            where,
            f"{given.swizzle} bytes swizzled of box rows of {row_bytes}",
            "a swizzle as wide as the box",
        )
    for _, node in walk(kernel):
        for name, kind in atom(node.arg.atom).operands if node.op is Op.ATOM else ():
            operand = atom(node.arg.atom).operand(node, name)
            if kind != "desc" or operand.src[0] not in filled:
                continue
            assumed = meaning.get(node.arg.attr(f"{name}_desc") >> shift)
            if assumed != given.swizzle:
                _refuse(
                    where,
                    f"a swizzle of {given.swizzle} bytes, and {show(node)} at {node.site} reads "
                    f"{operand.src[0].arg.name} by a descriptor of {assumed}",
                    "one swizzle for both",
                )


def _check_dense(where: str, given: TensorMapParam, axes: Axes) -> None:
    """Its dimensions count every element of the tensor once: each stride is the one below it times
    that dimension."""
    dims = [evaluate(d, axes) for d in given.dims]
    strides = [_element(where, given), *(evaluate(s, axes) for s in given.strides)]
    ordered = sorted(zip(strides, dims, strict=True))
    for (stride, dim), (following, _) in pairwise(ordered):
        if stride * dim != following:
            _refuse(
                where,
                f"dimensions {dims} at strides of {strides} bytes, of which {following} is not "
                f"{dim} times {stride}, at {_at(axes)}",
                "dimensions and strides in one order, innermost first",
            )


# -- workspace ------------------------------------------------------------------------------------


def _check_workspace(kernels: Sequence[Statement], launch: Launch, axes: Axes) -> None:
    handed = {w.name for w in launch.workspace}
    for unwritten in sorted(read_unwritten(kernels, handed)):
        raise SpecError(
            f"workspace {unwritten}: a kernel reads it before any has written it; fix: launch "
            "what writes it first"
        )
    for unread in sorted(handed - read_after_write(kernels)):
        raise SpecError(
            f"workspace {unread}: no kernel reads there what one before it wrote; fix: leave it out"
        )
    sizes = {w.name: evaluate(w.bytes, axes) for w in launch.workspace}
    for kernel, step in zip(kernels, launch.steps, strict=True):
        reads, writes = touched(kernel)
        if handed & (reads | writes):
            _check_reach(kernel, step, sizes, axes)
        for given in step.params:
            if isinstance(given, TensorMapParam) and given.tensor in sizes:
                _check_whole(step, given, sizes[given.tensor], axes)


def _check_reach(kernel: Statement, step: Launch, sizes: Mapping[str, int], axes: Axes) -> None:
    """As far as no data decides where they write, the first and the last cluster stay inside, and
    reach the end."""
    grid, cluster = evaluate(step.grid[0], axes), kernel.arg.cluster
    ctas = sorted({*range(cluster), *range(grid - cluster, grid)})
    ends = dict[str, int | None]()
    for touch in Threads(kernel, ctas, grid, scalars_of(step, axes)).touches():
        if touch.tensor not in sizes:
            continue
        size, where = sizes[touch.tensor], f"{step.entry}, workspace {touch.tensor}"
        if touch.least > size:
            _refuse(
                where,
                f"{size} bytes at {_at(axes)}, and {show(touch.node)} at {touch.node.site} "
                f"reaches byte {touch.least}",
                "room for every CTA of the grid",
            )
        if touch.mode != "r":
            before = ends.get(touch.tensor, 0)
            known = touch.exact and before is not None
            ends[touch.tensor] = max(before or 0, touch.least) if known else None
    for tensor, end in ends.items():
        if end is not None and sizes[tensor] >= end + ALIGNED:
            _refuse(
                f"{step.entry}, workspace {tensor}",
                f"{sizes[tensor]} bytes at {_at(axes)}, and a grid of {grid} writes {end}",
                "a grid and a workspace of one size",
            )


def _check_whole(step: Launch, given: TensorMapParam, size: int, axes: Axes) -> None:
    where = f"{step.entry}, workspace {given.tensor}"
    spans = prod(evaluate(d, axes) for d in given.dims) * _element(where, given)
    if spans != size:
        _refuse(
            where,
            f"{size} bytes at {_at(axes)}, and the tensor map spans {spans}",
            "the map's dimensions are the workspace's",
        )
