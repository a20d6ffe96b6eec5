"""What a call needs of a device: its driver, contexts, streams and modules.

`Cuda` is the real one; a test stands another in for it that has the same members.
"""

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ptxflow.compiler.backend.runtime import Driver, LaunchError, LoadedKernel
from ptxflow.compiler.launch import Launch
from ptxflow.compiler.library.manifest import LibraryError, Target

_CAPTURE_MODE_RELAXED = 2
#: of a cubin, that this GPU or driver does not take it: the PTX may do
_NOT_FOR_HERE = ("CUDA_ERROR_NO_BINARY_FOR_GPU", "CUDA_ERROR_INVALID_IMAGE")


class Cuda:
    """torch's CUDA devices. Raises RuntimeUnavailable without driver or GPU."""

    kind = "cuda"
    device_type = 2  # kDLCUDA

    def __init__(self) -> None:
        self.driver = Driver()
        self._contexts: dict[int, int] = {}

    def stream(self, index: int) -> int:
        """The handle of torch's current stream of a device."""
        return int(torch._C._cuda_getCurrentRawStream(index))  # as inductor's code asks for it

    def context(self, index: int) -> int:
        """The primary context of a device, which is torch's."""
        if index not in self._contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.driver("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            self.driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[index] = context.value or 0
        return self._contexts[index]

    def check_any(self, target: Target) -> None:
        """LibraryError unless one of the devices runs code for the target."""
        faults = [self._fault(target, index) for index in range(torch.cuda.device_count())]
        if all(faults):
            none = f"made for {target.name}, and torch sees no GPU here"
            raise LibraryError(faults[0] if faults else none)

    def _fault(self, target: Target, index: int) -> str:
        found, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
        if found == target.capability:
            return ""
        return (
            f"made for {target.name} (compute capability {_dotted(target.capability)}), and "
            f"device {index} is {name} ({_dotted(found)}): make a library for it"
        )

    def check(self, target: Target, index: int) -> None:
        """LibraryError unless the device runs code for the target; a warning for another device of
        its kind, which the kernels were not chosen for."""
        if fault := self._fault(target, index):
            raise LibraryError(fault)
        name = torch.cuda.get_device_name(index)
        if target.name.upper() not in name.upper():
            warnings.warn(
                f"these kernels were chosen for {target.name}, and this is {name}: right, and "
                "perhaps not the fastest",
                stacklevel=4,
            )

    def random(self, index: int, step: int) -> tuple[int, int]:
        """Seed and offset of torch's generator of a device, which moves on by `step`."""
        generator = torch.cuda.default_generators[index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + step)
        return seed, offset

    def random_state(self, index: int) -> torch.Tensor:
        """A seed and an offset [2] on the device, drawn by torch's generator in stream order."""
        return torch.empty(2, dtype=torch.int64, device=torch.device("cuda", index)).random_()

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return bool(torch.cuda.is_current_stream_capturing())


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@contextmanager
def in_context(driver: Driver, context: int) -> Iterator[None]:
    """The context is current inside; what a capture of this thread forbids is allowed there."""
    mode, popped = ctypes.c_int(_CAPTURE_MODE_RELAXED), ctypes.c_void_p()
    driver("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
    driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        driver("cuCtxPopCurrent_v2", ctypes.byref(popped))


def load_kernel(driver: Driver, launch: Launch, cubin: bytes, ptx: bytes) -> LoadedKernel:
    """A member in the current context, from its cubin, or else from its PTX with a warning."""
    try:
        return LoadedKernel(launch, cubin, driver)
    except LaunchError as error:
        if error.error not in _NOT_FOR_HERE:
            raise
        warnings.warn(f"{error}: the driver translates the PTX, which takes a while", stacklevel=2)
        return LoadedKernel(launch, ptx, driver)
