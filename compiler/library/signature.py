"""What a definition's call takes and gives, and the refusal of whatever its kernels cannot read.

A refused call is an `ArgumentError` of one line; nothing was launched. Shapes are read here only
the first time a call has them: `call` keeps a plan for each.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptxflow.compiler.launch import evaluate

ALIGNMENT = 16  # bytes: what a tensor map needs of an address and of strides
INT32 = range(-(2**31), 2**31)


class ArgumentError(ValueError):
    """A call with arguments that no kernel of the library can read; the message is one line."""


@dataclass(frozen=True)
class Argument:
    """An input or output: the axes of its shape (None: a scalar), dtype, whether None is taken."""

    name: str
    shape: tuple[str, ...] | None
    dtype: torch.dtype
    optional: bool


@dataclass(frozen=True)
class Signature:
    """The arguments of a definition, in its order; `constants` are axes of fixed size."""

    name: str
    axes: tuple[str, ...]
    constants: Mapping[str, int]
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    equalities: tuple[tuple[str, str], ...]

    @staticmethod
    def of(definition: Mapping[str, Any]) -> "Signature":
        """From FlashInfer-Bench JSON; KeyError, TypeError or AttributeError where it is not."""
        axes, text = definition["axes"], definition.get("reference") or ""

        def arguments(key: str) -> tuple[Argument, ...]:
            return tuple(
                Argument(
                    name,
                    None if t["shape"] is None else tuple(t["shape"]),
                    getattr(torch, t["dtype"]),
                    # a scalar has no `optional`: the reference says what None means
                    bool(t.get("optional")) or (t["shape"] is None and f"{name} is None" in text),
                )
                for name, t in definition[key].items()
            )

        return Signature(
            definition["name"],
            tuple(axes),
            {n: a["value"] for n, a in axes.items() if a["type"] == "const"},
            arguments("inputs"),
            arguments("outputs"),
            tuple(p for c in definition.get("constraints", ()) for p in _equality(c)),
        )

    def order(self, args: Sequence[Any], named: Mapping[str, Any], out: Any) -> tuple[Any, ...]:
        """The inputs in the definition's order, and the outputs behind them where `out` is given.

        Raises ArgumentError for one that is missing, unknown or given twice.
        """
        names = [a.name for a in self.inputs]
        if len(args) > len(names):
            raise self.fault(f"takes {len(names)} inputs ({', '.join(names)}), not {len(args)}")
        given = dict(zip(names, args, strict=False))
        for name, value in named.items():
            if name not in names:
                raise self.fault(f"has no input {name!r}; there are {', '.join(names)}")
            if name in given:
                raise self.fault(f"was given {name} twice")
            given[name] = value
        for a in self.inputs:
            if a.name not in given and not a.optional:
                raise self.fault(f"needs {a.name}")
        inputs = tuple(given.get(name) for name in names)
        return inputs if out is None else (*inputs, *self.destinations(out))

    def destinations(self, out: Any) -> tuple[Any, ...]:
        """The output tensors of `out`: one, a sequence in the definition's order, or by name."""
        names = [a.name for a in self.outputs]
        if isinstance(out, Mapping) and set(out) == set(names):
            return tuple(out[name] for name in names)
        if isinstance(out, torch.Tensor):
            out = (out,)
        if not isinstance(out, tuple | list) or len(out) != len(names):
            raise self.fault(f"out must be {' and '.join(names)}: {len(names)} in all")
        return tuple(out)

    def fault(self, text: str) -> ArgumentError:
        return ArgumentError(f"{self.name}: {text}")

    def sizes(self, tensors: Sequence[Any]) -> dict[str, int]:
        """Every axis by name, from the arguments in order (inputs, or inputs and outputs).

        Raises ArgumentError for ranks, sizes that disagree, and axes that nothing tells.
        """
        found: dict[str, int] = dict(self.constants)
        told: dict[str, str] = {n: "by definition" for n in found}
        for a, tensor in zip((*self.inputs, *self.outputs), tensors, strict=False):
            if a.shape is None or (tensor is None and a.optional):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise self.fault(f"{a.name} must be a tensor, not {_kind(tensor)}")
            shape = tuple(tensor.shape)
            if len(shape) != len(a.shape):
                raise self.fault(f"{a.name} must have {len(a.shape)} dimensions, not {len(shape)}")
            if 0 in shape:
                raise self.fault(f"{a.name} is empty: {shape}")
            for axis, size in zip(a.shape, shape, strict=True):
                if found.setdefault(axis, size) != size:
                    raise self.fault(
                        f"{a.name} has {axis}={size} in its shape {shape}, and {axis} is "
                        f"{found[axis]} {told[axis]}"
                    )
                told.setdefault(axis, f"in {a.name}")
        return self._equal(found)

    def _equal(self, found: dict[str, int]) -> dict[str, int]:
        """Solves equalities for an axis that no tensor tells, and checks the others."""
        for left, right in self.equalities:
            names = {n.id for n in ast.walk(ast.parse(right)) if isinstance(n, ast.Name)}
            if left not in self.axes or not names <= set(self.axes):
                continue
            unknown = names - set(found)
            if left in found and len(unknown) == 1:  # len_indptr == batch_size + 1
                (axis,) = unknown
                found[axis] = found[left] - evaluate(right, {**found, axis: 0})
            value = evaluate(right, found) if names <= set(found) else None
            if value is not None and found.setdefault(left, value) != value:
                facts = ", ".join(f"{n}={found[n]}" for n in (left, *sorted(names)))
                raise self.fault(f"{left} must be {right} ({facts})")
        for axis in self.axes:
            if axis not in found:
                raise self.fault(f"no tensor that is given tells {axis}")
        return found

    def check(self, arguments: Sequence[Any], mapped: frozenset[str], kind: str) -> torch.device:
        """Refuse what the kernels cannot read, behind `sizes`; returns the tensors' device.

        `mapped` are the tensors that only tensor maps read: their strides may be wide. `kind` is
        the type of device. Raises ArgumentError.
        """
        place: torch.device | None = None
        for number, (a, value) in enumerate(
            zip((*self.inputs, *self.outputs), arguments, strict=False)
        ):
            if a.shape is None:
                self._scalar(a, value)
                continue
            if value is None and a.optional:
                continue
            self._tensor(a, value, a.name in mapped, kind)
            if place is not None and value.device != place:
                raise self.fault(f"{a.name} is on {value.device}, and others on {place}")
            place = value.device
            if number >= len(self.inputs):
                self._apart(a, value, arguments[:number])
        if place is None:
            raise self.fault("no tensor is given")
        return place

    def _scalar(self, a: Argument, value: Any) -> None:
        whole = not a.dtype.is_floating_point
        if value is None and a.optional:
            return
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise self.fault(f"{a.name} must be a Python {kinds[-1].__name__}, not {_kind(value)}")
        if whole and value not in INT32:
            raise self.fault(f"{a.name} must fit 32 bits, not {value}")

    def _tensor(self, a: Argument, value: Any, mapped: bool, kind: str) -> None:
        if value.layout != torch.strided:
            raise self.fault(f"{a.name} must be dense, not {value.layout}")
        if value.dtype != a.dtype:
            raise self.fault(f"{a.name} must be {a.dtype}, not {value.dtype}")
        if value.device.type != kind:
            raise self.fault(f"{a.name} must be on a {kind} device, not {value.device}")
        if value.requires_grad and torch.is_grad_enabled():
            raise self.fault(
                f"{a.name} requires grad, and the kernel has no backward: call it under "
                f"torch.no_grad(), or with {a.name}.detach()"
            )
        if value.data_ptr() % ALIGNMENT:
            raise self.fault(
                f"{a.name} begins {value.data_ptr() % ALIGNMENT} bytes after a multiple of "
                f"{ALIGNMENT}: the kernel reads {ALIGNMENT} bytes at a time; clone it"
            )
        if not mapped and not value.is_contiguous():
            raise self.fault(
                f"{a.name} must be contiguous, not of strides {value.stride()}: the kernel reads "
                f"it by address; give {a.name}.contiguous()"
            )

    def _apart(self, a: Argument, value: torch.Tensor, others: Sequence[Any]) -> None:
        low, high = extent(value)
        for other, tensor in zip((*self.inputs, *self.outputs), others, strict=False):
            if isinstance(tensor, torch.Tensor):
                begin, end = extent(tensor)
                if low < end and begin < high:
                    raise self.fault(f"out {a.name} overlaps {other.name} in memory")


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one behind its last."""
    begin = tensor.data_ptr()
    return begin, begin + span(tensor)


def span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * s for n, s in steps)) * tensor.element_size()


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor on {value.device}"
    return "None" if value is None else f"a {type(value).__name__}"


def _equality(constraint: str) -> list[tuple[str, str]]:
    """`left == right` as a pair, where left is an axis and right an expression without calls."""
    match ast.parse(constraint, mode="eval").body:
        case ast.Compare(left=ast.Name(id=left), ops=[ast.Eq()], comparators=[right]):
            if not any(isinstance(n, ast.Call | ast.Attribute) for n in ast.walk(right)):
                return [(left, ast.unparse(right))]
    return []
