"""How a compiled kernel is launched: entry, grid, block, cluster, shared memory and parameters.

Everything that depends on a run-time axis is a Python expression over the definition's axis names
(`"-(-M // 128) * 32"`), so that one kernel serves every value of a variable axis, a launch can be
written to JSON, and a Solution can inline it. Nothing here touches a GPU.
"""

import ast
import functools
import operator
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, get_args

Expr = str  # over axis names, integers, + - * // % and min, max
ALIGNED_WORKSPACE = 256  # bytes, as the driver's own allocations and torch's have
MOST_BYTES = 1 << 35  # of a workspace: launches are checked up to there, and indices have 32 bits

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expr: Expr, axes: Mapping[str, int]) -> int:
    """The integer value of a launch expression, for axis values by name.

    Raises ValueError for an unknown axis and for anything that is not a launch expression.
    """

    def walk(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return walk(body)
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name) if name in axes:
                return axes[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -walk(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return int(_BINARY[type(op)](walk(left), walk(right)))
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=[]):
                return (min if name == "min" else max)(walk(a) for a in args)
        raise ValueError(f"launch expression {expr!r}: cannot evaluate {ast.dump(node)}")

    return walk(_parsed(expr))


@functools.lru_cache(4096)
def _parsed(expr: Expr) -> ast.Expression:
    return ast.parse(expr, mode="eval")


@dataclass(frozen=True)
class TensorMapParam:
    """A TMA tensor map (128 bytes, CUtensorMap) over one argument tensor.

    `dims` and `box` count elements, innermost first; `strides` are bytes, from the second dimension
    on. `swizzle` is bytes (0, 32, 64, 128). Out-of-bounds elements read as zero.
    """

    tensor: str
    dtype: str
    dims: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    box: tuple[int, ...]
    swizzle: int
    l2_promotion: int = 128
    kind: str = "tensor_map"


@dataclass(frozen=True)
class PointerParam:
    """The global address of an argument tensor (64 bit)."""

    tensor: str
    kind: str = "pointer"


@dataclass(frozen=True)
class ScalarParam:
    """An unsigned 32-bit value computed from the axes."""

    name: str
    value: Expr
    kind: str = "scalar"


@dataclass(frozen=True)
class InputParam:
    """A scalar input of the definition, by value in 32 bits; an absent one (None) counts as 0.

    `dtype` is float32, whose bits are passed, or int32.
    """

    name: str
    dtype: str
    kind: str = "input"


@dataclass(frozen=True)
class PresentParam:
    """1 where the caller gives an optional input tensor, 0 where its pointer is null."""

    tensor: str
    kind: str = "present"


@dataclass(frozen=True)
class RandomParam:
    """A word of the state of a counter-based generator: its seed's low and high word, 0 and 1, and
    its offset's, 2 and 3. A launch moves the offset on by RANDOM_STEP. The four words of the tensor
    GENERATOR are added where it is given: a CUDA graph's state, which is not known at its capture.
    """

    word: int
    kind: str = "random"


GENERATOR = "generator"
RANDOM_STEP = 4  # what offsets of torch's generator are multiples of
Param = TensorMapParam | PointerParam | ScalarParam | InputParam | PresentParam | RandomParam
_KINDS: dict[str, type[Param]] = {made.kind: made for made in get_args(Param)}


@dataclass(frozen=True)
class Arguments:
    """What a launch is given besides tensors: scalar inputs by name, and a generator's state."""

    scalars: Mapping[str, float | None] = field(default_factory=dict)
    seed: int = 0
    offset: int = 0

    def word(self, param: InputParam | RandomParam) -> int:
        """The 32 bits of a parameter passed by value. Raises KeyError for a missing input."""
        if isinstance(param, RandomParam):
            return (self.seed | self.offset << 64) >> 32 * param.word & 0xFFFFFFFF
        value = self.scalars[param.name] or 0
        code = {"float32": "<f", "int32": "<i"}[param.dtype]
        bits: int = struct.unpack("<I", struct.pack(code, value))[0]
        return bits


NO_ARGUMENTS = Arguments()


def _param(data: Mapping[str, Any]) -> Param:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return _KINDS[data["kind"]](**fields)


@dataclass(frozen=True)
class Workspace:
    """Memory that the kernels of a program hand on: a pointer parameter names it like a tensor.

    `bytes` is its size for given axes. Its content is undefined when a call begins, and nothing of
    it outlives the call.
    """

    name: str
    bytes: Expr


class Held(NamedTuple):
    """A tensor of a call at given axes: its bytes; and of whole numbers by which kernels find their
    way the greatest, whether each is no less than the one before, whether all ones name none, and
    how its definition says so."""

    bytes: int
    most: int | None = None
    ascending: bool = False
    missing: bool = False
    said: str = ""


#: all axes of some, and the tensors at these, by name
Tensors = Callable[[Mapping[str, int]], tuple[Mapping[str, int], dict[str, Held]]]


@dataclass(frozen=True)
class Launch:
    """A kernel launch, `params` in the order of the kernel's parameters, and those behind it.

    `grid` counts CTAs, `block` threads (along x), `cluster` CTAs along each axis; `smem_bytes` is
    dynamic shared memory of a CTA.
    `then` are the launches that follow in the same call, of other entries of the same module.
    `dependent`: the grid may start while the one before it in the call still runs; it waits for it
    itself. `workspace` belongs to the whole call and stands at its first launch.
    """

    entry: str
    grid: tuple[Expr, Expr, Expr]
    block: int
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: tuple[Param, ...]
    then: tuple["Launch", ...] = ()
    dependent: bool = False
    workspace: tuple[Workspace, ...] = ()

    def workspaces(self, axes: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Where each begins in the memory that the call needs for them, and the bytes of that.
        ValueError for one larger than MOST_BYTES."""
        places, size = dict[str, int](), 0
        for w in self.workspace:
            places[w.name], own = size, evaluate(w.bytes, axes)
            if own > MOST_BYTES:
                raise ValueError(
                    f"{self.entry}: workspace {w.name} takes {own} bytes for these axes, and its "
                    f"kernels are checked up to {MOST_BYTES}; take fewer sequences a call"
                )
            size += -(-own // ALIGNED_WORKSPACE) * ALIGNED_WORKSPACE
        return places, size

    def expressions(self, scalars: bool = True) -> list[Expr]:
        """Of the whole call, those of scalar parameters among them or not."""
        found = [w.bytes for w in self.workspace]
        for step in self.steps:
            found += step.grid
            for given in step.params:
                if isinstance(given, TensorMapParam):
                    found += [*given.dims, *given.strides]
                elif isinstance(given, ScalarParam) and scalars:
                    found.append(given.value)
        return found

    @property
    def steps(self) -> tuple["Launch", ...]:
        """All launches of the call, in order."""
        return (self, *self.then)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Launch":
        params = tuple(_param(p) for p in data["params"])
        return Launch(
            entry=data["entry"],
            grid=tuple(data["grid"]),
            block=data["block"],
            cluster=tuple(data["cluster"]),
            smem_bytes=data["smem_bytes"],
            params=params,
            then=tuple(map(Launch.from_json, data.get("then", ()))),
            dependent=data.get("dependent", False),
            workspace=tuple(Workspace(**w) for w in data.get("workspace", ())),
        )


def scalars_of(step: Launch, axes: Mapping[str, int]) -> dict[str, int]:
    """The scalar parameters of one launch that axes tell."""
    given = (p for p in step.params if isinstance(p, ScalarParam))
    return {p.name: evaluate(p.value, axes) for p in given}


Given = Mapping[str, Param | Expr]  # what parameters are passed, by name; of axes, expressions


def launch_of(
    entry: str, grid: Expr, warps: int, params: Iterable[tuple[str, str]],
    given: Given | None = None, smem_bytes: int = 0, cluster: int = 1, dependent: bool = False,
    then: tuple[Launch, ...] = (), workspace: tuple[Workspace, ...] = (),
) -> Launch:  # fmt: skip
    """The launch of a kernel from its own parameters, all of them along x.

    A parameter is passed what `given` has for its name; without that the pointer of its name where
    it is of kind ptr, else the axis.
    """

    def passed(name: str, kind: str) -> Param:
        found = (given or {}).get(name, name)
        if not isinstance(found, str):
            return found
        return PointerParam(found) if kind == "ptr" else ScalarParam(name, found)

    return Launch(
        entry=entry,
        grid=(grid, "1", "1"),
        block=32 * warps,
        cluster=(cluster, 1, 1),
        smem_bytes=smem_bytes,
        params=tuple(passed(*param) for param in params),
        then=then,
        dependent=dependent,
        workspace=workspace,
    )
