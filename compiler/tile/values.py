"""Registers of a lane as values, traced: an operation emits an instruction into fresh registers.

What is emitted goes to the innermost open `trace`. `a += b`, `a *= b` and `a.set(b)` write the
registers that there are. Numbers of shared memory, loops and branches are values of the IR:
`UInt32.value` is one.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.table import Constructor, Operand
from ptxflow.compiler.atoms.threads import float_bits
from ptxflow.compiler.ir import Body, elect, flatten, frag, loop, part, slot, value_of, when
from ptxflow.compiler.ir.nodes import Scalar, Slot, Statement, Storage, Value, const

# -- statements --------------------------------------------------------------------------------


class _Open(threading.local):
    def __init__(self) -> None:
        self.blocks: list[list[Statement]] = []


_OPEN = _Open()


def emit(*body: Body) -> None:
    """Appends statements to the innermost block. IndexError where none is open."""
    _OPEN.blocks[-1].extend(flatten(list(body)))


class trace:
    """`with trace() as body:` puts what is emitted inside into the list `body`; with `wrap`, the
    statement that it makes of them goes to the block around it."""

    def __init__(self, wrap: Callable[[list[Statement]], Body] | None = None):
        self.wrap, self.body = wrap, list[Statement]()

    def __enter__(self) -> list[Statement]:
        _OPEN.blocks.append(self.body)
        return self.body

    def __exit__(self, kind: object, *_: object) -> None:
        _OPEN.blocks.pop()
        if self.wrap and kind is None:
            emit(self.wrap(self.body))


def traced(function: Callable[..., None], *args: object) -> list[Statement]:
    """What a function emits."""
    with trace() as body:
        function(*args)
    return body


def repeat(
    index: Value, stop: Scalar, start: Scalar = 0, step: Scalar = 1, rolled: bool = False
) -> trace:
    """A counted loop around what is emitted inside: see `ir.loop`."""
    return trace(lambda body: loop(index, stop, body, start=start, step=step, rolled=rolled))


def where(condition: Value | None) -> trace:
    """What is emitted inside runs where the warp-uniform condition holds; None: always."""
    return trace(lambda body: body if condition is None else when(condition, body))


def elected(condition: Value | None = None) -> trace:
    """What is emitted inside is run by one lane of each warp for which the condition holds."""
    return trace(lambda body: elect(const(1) if condition is None else condition, body))


# -- registers ---------------------------------------------------------------------------------


class Registers:
    """The registers of a kernel, or of the roles of one `prefix`, declared when first asked for."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix, self.held = prefix, dict[str, Storage]()

    def __call__(self, name: str, width: int, dtype: str = "b32") -> Slot:
        """All `width` registers of that name. ValueError where it has another number of them."""
        found = self.held.get(name)
        if found is None:
            found = self.held[name] = frag(self.prefix + name, width, dtype)
        if found.arg.size != width:
            raise ValueError(f"{name} has {found.arg.size} registers, not {width}")
        return slot(found)

    def fresh(self, width: int, dtype: str = "b32") -> Slot:
        """`width` registers that nothing else has."""
        return self(f"t{len(self.held)}_", width, dtype)

    def float32(self, width: int = 1, name: str = "", dtype: str = "b32") -> "Float32":
        """Floats in fresh registers, or in those of that name."""
        return Float32(self, self(name, width, dtype) if name else self.fresh(width, dtype))

    def constant(self, number: float, width: int = 1, **attrs: Any) -> "Float32":
        """A number in each of some registers."""
        out = self.float32(width)
        emit(at.mov(out.slot, float_bits(number), **attrs))
        return out

    def uint32(self, value: Scalar | None = None, name: str = "", width: int = 1) -> "UInt32":
        """A register or more, with a value if one is given."""
        out = UInt32(self, self(name, width) if name else self.fresh(width))
        if value is not None:
            emit(at.mov(out.slot, value))
        return out

    def of(self, atom: Constructor, *operands: Operand, n: int = 1, **attrs: Any) -> "UInt32":
        """What an instruction leaves in `n` fresh registers, its first operand."""
        out = self.uint32(width=n)
        emit(atom(out, *operands, **attrs))
        return out

    def either(self, condition: Value, yes: Scalar, no: Scalar) -> "UInt32":
        """One of two values, as a condition of the lane holds or not."""
        return self.of(at.either, yes, no, condition)

    def together(self, values: Sequence[Scalar]) -> "UInt32":
        """Values in neighbouring registers."""
        out = self.uint32(width=len(values))
        for i, held in enumerate(values):
            emit(at.mov(out[i], held))
        return out

    @property
    def storage(self) -> tuple[Storage, ...]:
        return tuple(self.held.values())


@dataclass(frozen=True, eq=False)
class Vector:
    """`n` registers of each lane. `by_row`: they go with a lane's rows of a fragment, of which
    register i is in row (i >> 1) & 1; else with its registers in turn."""

    registers: Registers
    slot: Slot
    by_row: bool = False

    @property
    def n(self) -> int:
        return int(self.slot.arg)

    def __getitem__(self, index: int | slice) -> Self:
        if isinstance(index, int):
            return type(self)(self.registers, part(self.slot, index, 1), self.by_row)
        first, last, _ = index.indices(self.n)
        return type(self)(self.registers, part(self.slot, first, last - first), self.by_row)

    def __iter__(self) -> Iterator[Self]:
        return (self[i] for i in range(self.n))

    def each(self) -> list[Self]:
        """Its registers, each apart, as those whose values are used must be."""
        return [self[i].apply(at.copy) for i in range(self.n)]

    def fresh(self, n: int = 0) -> Self:
        """As many registers, or `n`, that nothing else has."""
        return type(self)(self.registers, self.registers.fresh(n or self.n), self.by_row)

    def set(self, other: "Vector", **attrs: Any) -> None:
        emit(at.copy(self.slot, other.slot, **attrs))

    def apply(self, atom: Constructor, *others: "Vector", n: int = 0, **attrs: object) -> Self:
        """An instruction's result of these registers and others: `n`, or as many as these."""
        out = self.fresh(n)
        emit(atom(out.slot, self.slot, *(other.slot for other in others), **attrs))
        return out


V = TypeVar("V", bound=Vector)


@dataclass(frozen=True, eq=False)
class UInt32(Vector):
    """Integers, or whatever 32 bits there are."""

    @property
    def value(self) -> Value:
        """Of the one register, as places and conditions take it: see `ir.value_of`."""
        return value_of(self.slot)

    def __iadd__(self, other: "UInt32") -> Self:
        emit(at.sum_u32(self, self, other))
        return self

    def unpack(self, dtype: str, **attrs: Any) -> "Float32":
        """Of pairs of 16 bits in a register, each of them."""
        out = self.registers.float32(2 * self.n)
        emit(at.unpack(out.slot, self.slot, dtype=dtype, **attrs))
        return out


@dataclass(frozen=True, eq=False)
class Float32(Vector):
    """Floats. A second operand is as wide as the first; a factor may be taken in turn, too."""

    def __add__(self, other: "Float32") -> Self:
        return self.apply(at.sum_f32, other)

    def __sub__(self, other: "Float32") -> Self:
        return self.apply(at.sub_f32, other)

    def __truediv__(self, other: "Float32") -> Self:
        return self.apply(at.div_f32, other)

    def __mul__(self, factor: "Float32") -> Self:
        return self.apply(at.scale_f32, factor)

    def __iadd__(self, other: "Float32") -> Self:
        emit(at.add_f32(self.slot, other.slot))
        return self

    def __imul__(self, factor: "Float32") -> Self:
        rows = factor.by_row and self.n > factor.n
        emit((at.rescale_rows if rows else at.rescale)(self.slot, factor.slot))
        return self

    def rows(self) -> Self:
        """The same registers, as values for a lane's two rows."""
        return replace(self, by_row=True)

    @property
    def bits(self) -> Value:
        """Of the one register. Bits of numbers from 0 on compare as they do; those of NaN are above
        all."""
        return value_of(self.slot)

    def pack(self, dtype: str, into: UInt32 | None = None, **attrs: Any) -> UInt32:
        """Rounded to 16 bits, two to a register, or to e4m3, of which four are in one."""
        n = self.n // (4 if dtype == "e4m3" else 2)
        out = into or self.registers.uint32(width=n)
        emit(at.pack(out.slot, self.slot, dtype=dtype, **attrs))
        return out

    def terms(self, dtype: str, count: int, **attrs: Any) -> list[UInt32]:
        """Rounded to 16 bits and, of two terms, what rounding left out."""
        out = [self.pack(dtype, **attrs)]
        if count > 1:
            out.append(out[0].fresh())
            for i, (rounded, rest) in enumerate(zip(*out, strict=True)):
                (self[2 * i : 2 * i + 2] - rounded.unpack(dtype)).pack(dtype, rest, **attrs)
        return out


def maximum(a: V, b: V) -> V:
    return a.apply(at.max_u32 if isinstance(a, UInt32) else at.max_f32, b)


def minimum(a: Float32, b: Float32) -> Float32:
    return a.apply(at.min_f32, b)


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c with one rounding; b and c as wide as a, or in turn."""
    return a.apply(at.fma_f32, b, c)


def dot(a: Float32, b: Float32, n: int, begin: Float32 | None = None) -> Float32:
    """Sums of products of registers i, i + n, ... for each i below n: an addition need not wait for
    the one before."""
    total = begin or a[:n] * b[:n]
    for i in range(0 if begin else n, a.n, n):
        total = fma(a[i : i + n], b[i : i + n], total)
    return total


def times(a: Float32, factor: float, plus: float = 0.0) -> Float32:
    """a factor + plus, of constants, with one rounding."""
    return a.apply(at.fma_constants, factor=float_bits(factor), summand=float_bits(plus))


def exponential(a: Float32, sign: float = 1.0) -> Float32:
    """exp(sign a)."""
    return exp2(times(a, sign / math.log(2)))


def sigmoid(a: Float32) -> Float32:
    """1 / (1 + exp(-a))."""
    return reciprocal(times(exponential(a, -1.0), 1.0, 1.0))


def exp2(a: Float32) -> Float32:
    """Relative error 2^-22.5; subnormals count as zero."""
    return a.apply(at.exp2_f32)


def log2(a: Float32) -> Float32:
    return a.apply(at.log2_f32)


def reciprocal(a: Float32) -> Float32:
    return a.apply(at.reciprocal_f32)


def finite_or_zero(a: Float32, b: Float32) -> Float32:
    """a, or 0 where b is minus infinity."""
    return a.apply(at.unless_equal, b)


def inverse_or_zero(a: Float32) -> Float32:
    """1 / a, or 0 where a is 0 and that is infinity."""
    inverse = reciprocal(a)
    return inverse.apply(at.unless_equal, inverse, number=0x7F800000)


def select(condition: UInt32, a: Float32, b: Float32) -> Float32:
    """a where a register is not 0, else b."""
    out = a.fresh()
    emit(at.choose(out.slot, condition.slot, a.slot, b.slot))
    return out


def shuffle_xor(a: Float32, lanes: int) -> Float32:
    """What the lane has whose number differs in the bits of `lanes`."""
    return a.apply(at.shuffle_xor, lanes=lanes)


def shuffle_from(a: Float32, lane: Scalar) -> Float32:
    """What a lane has that each lane names."""
    out = a.fresh()
    emit(at.shuffle_from(out.slot, a.slot, lane))
    return out


def count_lanes(registers: Registers, condition: Value, name: str = "") -> UInt32:
    """The number of lanes of the warp for which a condition holds, to all of them."""
    out = registers.uint32(name=name)
    emit(at.popc(out, registers.of(at.ballot, condition)))
    return out
