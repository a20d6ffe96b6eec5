"""All of a call that its shapes decide, made once: parameters, grids, maps, and where addresses go.

What is left for a call is to write addresses, scalars and random words into the parameters, and to
launch. A plan is not changed once it is made, but for its own block under its lock.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ptxflow.compiler.backend.runtime import (
    TENSOR_MAP_ALIGNMENT,
    TENSOR_MAP_BYTES,
    Driver,
    LaunchConfig,
    address_aligned,
    configure,
    encode_tensor_map,
)
from ptxflow.compiler.launch import (
    GENERATOR,
    InputParam,
    Launch,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
    evaluate,
)
from ptxflow.compiler.library.signature import ALIGNMENT, Signature, span


@dataclass(frozen=True)
class Patch:
    """An address in the parameters: `offset` bytes in, that of tensor `source` plus `add`.

    `replace`: it is inside a tensor map, and the driver has to write it.
    """

    offset: int
    source: int
    add: int = 0
    replace: bool = False


@dataclass(frozen=True)
class Step:
    """A launch: its configuration, the kernel, where in the block its parameters are, and `params`,
    their addresses."""

    entry: str
    config: LaunchConfig
    function: ctypes.c_void_p
    offsets: tuple[int, ...]
    params: Any


@dataclass(eq=False)
class Plan:
    """See the module. `block` is the address of `bytes` bytes of parameters, at 128-byte steps.

    Sources are the arguments in order (inputs, outputs), and behind them the workspace and the
    state of a generator, where they are. `made` has
    shape, strides, dtype and device of each output; `workspace` the same of its bytes, or None.
    """

    device: torch.device
    context: int
    storage: Any
    block: int
    bytes: int
    steps: tuple[Step, ...]
    patches: tuple[Patch, ...]
    scalars: tuple[tuple[int, int, bool], ...]  # offset, argument, floating
    words: tuple[tuple[int, RandomParam | PresentParam], ...]  # and whether a state is given
    made: tuple[tuple[Any, ...], ...]
    workspace: tuple[Any, ...] | None
    spans: tuple[int, ...]
    error_name: Callable[[int], str]
    lock: Any = field(default_factory=threading.Lock)
    native: Any = None  # what native.py makes of it

    def write(self, offset: int, kind: Any, value: float) -> None:
        kind.from_address(self.block + offset).value = value


def mapped_only(launch: Launch) -> frozenset[str]:
    """The tensors that are read or written through tensor maps alone."""
    params = [p for step in launch.steps for p in step.params]
    plain = {p.tensor for p in params if isinstance(p, PointerParam)}
    return frozenset(p.tensor for p in params if isinstance(p, TensorMapParam)) - plain


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a tensor without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def wide(signature: Signature, param: TensorMapParam, tensor: Any, axes: Mapping[str, int]) -> Any:
    """The parameter with the byte strides that a tensor really has.

    Raises ArgumentError for a layout that no tensor map of these dimensions expresses.
    """
    if tensor is None or tensor.is_contiguous():
        return param
    size, shape, strides = tensor.element_size(), tuple(tensor.shape), tensor.stride()
    plain = contiguous(shape)

    def refuse(why: str) -> Exception:
        return signature.fault(
            f"{param.tensor} has strides {strides}, and {why}; give {param.tensor}.contiguous()"
        )

    if shape[-1] > 1 and strides[-1] != 1:
        raise refuse("its last dimension must be dense")
    out = []
    for k, (stride, extent) in enumerate(
        zip((size, *(evaluate(s, axes) for s in param.strides)), param.dims, strict=True)
    ):
        step, left = stride // size, evaluate(extent, axes)
        j = next((i for i, n in enumerate(shape) if plain[i] <= step < plain[i] * n), None)
        if j is None or step % plain[j]:
            if left > 1:
                raise refuse("the kernel reads across its dimensions")
            out.append(stride)
            continue
        out.append(step // plain[j] * strides[j] * size)
        left *= step // plain[j]  # in steps of dimension j
        while left > shape[j]:
            left = -(-left // shape[j])
            outer = next((i for i in range(j - 1, -1, -1) if shape[i] > 1), None)
            if outer is None or strides[outer] != strides[j] * shape[j]:
                raise refuse("the kernel reads some of its dimensions as one, which have gaps")
            j = outer
        if k and (out[-1] <= 0 or out[-1] % ALIGNMENT):
            raise refuse(f"a stride of {out[-1]} bytes is no positive multiple of {ALIGNMENT}")
    return replace(param, dims=param.dims, strides=tuple(map(str, out[1:])))


class Builder:
    """Makes the plan of one call, from its arguments; `tensors` are addresses and layouts."""

    def __init__(
        self,
        signature: Signature,
        launch: Launch,
        axes: Mapping[str, int],
        arguments: Sequence[Any],
        driver: Driver,
    ):
        self.signature, self.launch, self.axes, self.driver = signature, launch, axes, driver
        self.arguments = arguments
        declared = (*signature.inputs, *signature.outputs)
        self.source = {a.name: i for i, a in enumerate(declared)}
        self.add = {name: 0 for name in self.source}
        places, self.size = launch.workspaces(axes)  # of the workspace
        self.source |= dict.fromkeys(places, len(declared))
        self.add |= places
        self.source[GENERATOR], self.add[GENERATOR] = len(declared) + 1, 0
        self.patches: list[Patch] = []
        self.scalars: list[tuple[int, int, bool]] = []
        self.words: list[tuple[int, RandomParam | PresentParam]] = []
        self.values: list[tuple[int, bytes]] = []
        self.end = 0

    def plan(self, functions: Sequence[ctypes.c_void_p], context: int, device: Any) -> Plan:
        """Raises ArgumentError for strides, LaunchError where the driver refuses a map."""
        offsets = [tuple(self._place(p) for p in step.params) for step in self.launch.steps]
        storage, block = address_aligned(max(self.end, 1), TENSOR_MAP_ALIGNMENT)
        for offset, data in self.values:
            ctypes.memmove(block + offset, data, len(data))
        made = []
        for a in self.signature.outputs:
            shape = tuple(self.axes[n] for n in a.shape or ())
            made.append((shape, contiguous(shape), a.dtype, device))
        given = self.arguments[len(self.signature.inputs) :]
        spans = [span(t) if isinstance(t, torch.Tensor) else 0 for t in self.arguments]
        spans += [] if given else [math.prod(m[0]) * m[2].itemsize for m in made]
        return Plan(
            device=device,
            context=context,
            storage=storage,
            block=block,
            bytes=self.end,
            steps=tuple(
                Step(
                    step.entry,
                    configure(step, self.axes),
                    function,
                    places,
                    (ctypes.c_void_p * max(len(places), 1))(*(block + o for o in places)),
                )
                for step, function, places in zip(
                    self.launch.steps, functions, offsets, strict=True
                )
            ),
            patches=tuple(self.patches),
            scalars=tuple(self.scalars),
            words=tuple(self.words),
            made=tuple(made),
            workspace=((self.size,), (1,), torch.uint8, device) if self.size else None,
            spans=tuple(spans),
            error_name=self.driver.error_name,
        )

    def _room(self, size: int) -> int:
        offset = -(-self.end // size) * size
        self.end = offset + size
        return offset

    def _place(self, param: Any) -> int:
        """The offset of a parameter's value, which is written there or patched by a call."""
        match param:
            case TensorMapParam():
                return self._map(param)
            case PointerParam(tensor=name):
                offset = self._room(8)
                self.patches.append(Patch(offset, self.source[name], self.add[name]))
                return offset
        offset = self._room(4)
        match param:
            case ScalarParam(value=expr):
                self.values.append((offset, evaluate(expr, self.axes).to_bytes(4, "little")))
            case PresentParam(tensor=name) if name != GENERATOR:
                present = self.arguments[self.source[name]] is not None
                self.values.append((offset, int(present).to_bytes(4, "little")))
            case InputParam(name=name, dtype=dtype):
                self.scalars.append((offset, self.source[name], dtype == "float32"))
            case RandomParam() | PresentParam():
                self.words.append((offset, param))
        return offset

    def _map(self, param: TensorMapParam) -> int:
        """A tensor map, encoded at two addresses: where they differ is where the address is."""
        source, add = self.source[param.tensor], self.add[param.tensor]
        tensor = self.arguments[source] if source < len(self.arguments) else None
        param = wide(self.signature, param, tensor, self.axes)
        offset = self._room(TENSOR_MAP_BYTES)
        maps = []
        for address in (1 << 32, 5 << 33):
            storage, start = encode_tensor_map(self.driver, param, address, self.axes)
            maps.append(ctypes.string_at(start, TENSOR_MAP_BYTES))
            del storage
        self.values.append((offset, maps[0]))
        word = address_word(maps, (1 << 32, 5 << 33))
        place = offset + (word or 0)
        self.patches.append(Patch(place, source, add, replace=word is None))
        return offset


def address_word(maps: Sequence[bytes], addresses: Sequence[int]) -> int | None:
    """Where two tensor maps that differ in their addresses alone hold them, as 8 bytes that are
    nothing else; None if they do not."""
    differ = {i // 8 * 8 for i, (a, b) in enumerate(zip(*maps, strict=True)) if a != b}
    if len(differ) != 1:
        return None
    (word,) = differ
    held = [int.from_bytes(m[word : word + 8], "little") for m in maps]
    return word if held == list(addresses) else None
