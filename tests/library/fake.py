"""A device without a GPU: tensors on the CPU, and a driver whose kernels are Python functions.

Its tensor map is words: address, rank, sizes and byte strides, innermost first.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ptxflow.compiler.backend.runtime import Driver
from ptxflow.compiler.library.device import Cuda
from ptxflow.compiler.library.manifest import Target
from tests.libcuda import Cuda as Libcuda

CONTEXT, STREAM = 0xC0, 0
_pointer = ctypes.c_void_p
KernelFunction = Callable[["Launched"], None]


class Launched:
    """What a kernel is given: `params` are the addresses of its parameters' values."""

    def __init__(self, config: int, params: int):
        self.grid = tuple((ctypes.c_uint32 * 3).from_address(config))
        self.stream = ctypes.c_uint64.from_address(config + 32).value
        self.params = (ctypes.c_uint64 * 64).from_address(params)

    def word(self, i: int, kind: Any = ctypes.c_uint32) -> Any:
        return kind.from_address(self.params[i]).value

    def at(self, i: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """The dense tensor that a pointer parameter names."""
        return array(self.word(i, ctypes.c_uint64), shape, dtype)

    def map(self, i: int, dtype: Any) -> Any:
        """The tensor that a map names, outermost dimension first."""
        words = (ctypes.c_uint64 * 16).from_address(self.params[i])
        rank = words[1]
        sizes, strides = words[2 : 2 + rank], (np.dtype(dtype).itemsize, *words[8 : 7 + rank])
        room = (ctypes.c_uint8 * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
                                  + np.dtype(dtype).itemsize)).from_address(words[0])  # fmt: skip
        flat = np.frombuffer(memoryview(room), dtype=np.uint8)
        return np.lib.stride_tricks.as_strided(
            flat[: np.dtype(dtype).itemsize].view(dtype), sizes[::-1], strides[::-1]
        )


def array(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = (ctypes.c_uint8 * size).from_address(address)
    return np.frombuffer(memoryview(room), dtype=dtype).reshape(shape)


class FakeLibrary(Libcuda):
    """libcuda, with kernels by entry. `replaced` counts calls that write an address into a map;
    `opaque` hides where a map keeps it, so that those are needed. `failing` is what launches say.
    """

    def __init__(self, kernels: Mapping[str, KernelFunction], opaque: bool = False):
        super().__init__()
        self.kernels, self.opaque, self.failing = kernels, opaque, 0
        self.entries: list[str] = []
        self.loaded: list[bytes] = []
        self.bad_images: tuple[bytes, ...] = ()
        self.current, self.pushes, self.replaced, self.launches = [CONTEXT], 0, 0, 0
        kind = ctypes.CFUNCTYPE
        self.cuLaunchKernelEx = kind(ctypes.c_int, _pointer, _pointer, _pointer, _pointer)(
            self._launch
        )
        self.cuCtxGetCurrent = kind(ctypes.c_int, ctypes.POINTER(_pointer))(self._current)
        self.cuCtxPushCurrent_v2 = kind(ctypes.c_int, _pointer)(self._push)
        self.cuCtxPopCurrent_v2 = kind(ctypes.c_int, ctypes.POINTER(_pointer))(self._pop)
        self.cuTensorMapReplaceAddress = kind(ctypes.c_int, _pointer, _pointer)(self._replace)

    def _launch(self, config: int, function: int, params: int, extra: Any) -> int:
        if not self.failing:
            self.launches += 1
            self.kernels[self.entries[function - 1]](Launched(config, params))
        return self.failing

    def _current(self, out: Any) -> int:
        out[0] = self.current[-1]
        return 0

    def _push(self, context: int) -> int:
        self.current.append(context)
        self.pushes += 1
        return 0

    def _pop(self, out: Any) -> int:
        out[0] = self.current.pop()
        return 0

    def _replace(self, place: int, address: int) -> int:
        self.replaced += 1
        ctypes.c_uint64.from_address(place).value = address
        return 0

    def cuModuleLoadData(self, module: Any, image: Any) -> int:
        self.loaded.append(image.value)
        return 209 if image.value in self.bad_images else 0

    def cuGetErrorName(self, code: Any, out: Any) -> int:
        out._obj.value = {209: b"CUDA_ERROR_NO_BINARY_FOR_GPU", 719: b"CUDA_ERROR_LAUNCH_FAILED"}[
            code.value
        ]
        return 0

    def cuModuleGetFunction(self, out: Any, module: Any, name: Any) -> int:
        self.entries.append(name.value.decode())
        out._obj.value = len(self.entries)
        return 0

    def cuTensorMapEncodeTiled(self, start: Any, *args: Any) -> int:
        _, rank, address, dims, strides, *_ = args
        words = (ctypes.c_uint64 * 16).from_address(start.value)
        words[0], words[1] = address.value, rank.value
        words[2 : 2 + rank.value] = list(dims)
        words[8 : 7 + rank.value] = list(strides)[: rank.value - 1]
        words[15] = address.value if self.opaque else 0
        return 0


class FakeDevice(Cuda):
    """The CPU as torch device, with `library` as its driver."""

    kind = "cpu"
    device_type = 1  # kDLCPU

    def __init__(self, library: FakeLibrary):
        self.driver, self.library, self.offset = Driver(library), library, 0
        self.in_capture = False

    def stream(self, index: int) -> int:
        return STREAM

    def context(self, index: int) -> int:
        return CONTEXT

    def check_any(self, target: Target) -> None:
        pass

    def check(self, target: Target, index: int) -> None:
        pass

    def random(self, index: int, step: int) -> tuple[int, int]:
        self.offset += step
        return 7, self.offset - step

    def random_state(self, index: int) -> torch.Tensor:
        return torch.tensor([21, 1 << 32 | 8])

    def capturing(self) -> bool:
        return self.in_capture
