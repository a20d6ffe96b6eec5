"""Launches one PTX kernel from Python: CUDA driver API by ctypes, PyTorch tensors, nothing else.

What lies between the markers is copied into every Solution, so it imports nothing of ptxflow. The
constants at the end are those that each Solution sets for its kernel.
"""

# ---- copied from here ----
import ctypes
from pathlib import Path
from typing import Any

import torch

BYTES = 0  # CU_TENSOR_MAP_DATA_TYPE_UINT8
DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9, torch.float32: 7, torch.float8_e4m3fn: BYTES}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes -> CUtensorMapSwizzle
L2_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # bytes -> CUtensorMapL2promotion
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAP_ALIGNMENT = 128


class LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint32),
    )


Place = tuple[int, Any]  # a parameter's host address, and what keeps it alive

words = (ctypes.c_uint32 * 4)()  # of the generator's state at this launch: seed, offset
cuda: Any = None  # libcuda, once it is needed
functions: dict[int, Any] = {}  # by device index: the kernels loaded there
launches: dict[tuple[Any, ...], Any] = {}  # by tensor addresses and shapes: prepared launches
MAX_LAUNCHES = 256


def driver(call: str, *args: Any) -> None:
    """One driver call; RuntimeError with the CUDA error's name unless it succeeds."""
    code = getattr(cuda, call)(*args)
    if code:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{STEPS[0][0]}: {call}: {(name.value or b'unknown').decode()}")


def load(device: torch.device) -> list[Any]:
    """The kernels on a device; the driver translates the PTX beside this file."""
    global cuda
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        raise RuntimeError(
            f"{STEPS[0][0]} needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    cuda = cuda or ctypes.CDLL("libcuda.so.1")
    torch.cuda.current_stream().synchronize()  # makes the device's context current
    ptx = (Path(__file__).parent / "kernel.ptx").read_bytes() + b"\0"
    module, loaded = ctypes.c_void_p(), []
    driver("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx))
    for entry, _, _, smem_bytes, _ in STEPS:
        function = ctypes.c_void_p()
        name = ctypes.c_char_p(entry.encode())
        driver("cuModuleGetFunction", ctypes.byref(function), module, name)
        driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, ctypes.c_int(smem_bytes))
        loaded.append(function)
    return loaded


def room_for_map() -> Place:
    storage = ctypes.create_string_buffer(128 + MAP_ALIGNMENT)
    return -(-ctypes.addressof(storage) // MAP_ALIGNMENT) * MAP_ALIGNMENT, storage


def tensor_map(tensor: torch.Tensor, **shape: Any) -> Place:
    """A TMA tensor map over a tensor, in aligned storage: see `encode`."""
    place = room_for_map()
    encode(place[0], DATA_TYPES[tensor.dtype], tensor.data_ptr(), **shape)
    return place


def encode(
    start: int,
    data_type: int,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
    l2_promotion: int,
) -> None:
    """Write a tensor map to a host address; dims and box innermost first, strides in bytes."""
    rank = len(dims)
    driver(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(start),
        data_type,
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,  # no interleave
        SWIZZLES[swizzle],
        L2_PROMOTIONS[l2_promotion],
        0,  # zeros out of bounds
    )


def pointer(tensor: torch.Tensor | None) -> Place:
    value = ctypes.c_uint64(0 if tensor is None else tensor.data_ptr())
    return ctypes.addressof(value), value


def scalar(number: int) -> Place:
    value = ctypes.c_uint32(number)
    return ctypes.addressof(value), value


def given(value: float | None, kind: Any) -> Place:
    """A scalar input in 32 bits; None counts as 0."""
    held = kind(0 if value is None else value)
    return ctypes.addressof(held), held


def random(word: int) -> Place:
    """A word of the generator's state; every launch puts the present one there."""
    return ctypes.addressof(words) + 4 * word, words


def draw(device: torch.device) -> None:
    """Take the state of torch's generator of the device, and move its offset on."""
    generator = torch.cuda.default_generators[device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + RANDOM_STEP)
    words[:] = [n & 0xFFFFFFFF for n in (seed, seed >> 32, offset, offset >> 32)]


class Workspace:
    """Memory that the kernels of one launch hand on; it comes anew with each launch.

    Torch gives a freed block again only to work behind that of the stream it was taken on, so the
    tensor may go as soon as the kernels are launched.
    """

    def __init__(self, size: int):
        self.size, self.address = size, ctypes.c_uint64()
        self.maps: list[tuple[int, dict[str, Any]]] = []

    def take(self, device: torch.device) -> torch.Tensor:
        """The bytes of a launch, which the kernels' parameters point to from now on."""
        tensor = torch.empty(self.size, dtype=torch.uint8, device=device)
        if tensor.data_ptr() != self.address.value:
            self.address.value = tensor.data_ptr()
            for start, shape in self.maps:
                encode(start, BYTES, self.address.value, **shape)
        return tensor

    def map(self, **shape: Any) -> Place:
        """A tensor map over its bytes, which is written when they are taken."""
        place = room_for_map()
        self.maps.append((place[0], shape))
        return place

    @property
    def place(self) -> Place:
        return ctypes.addressof(self.address), self


def prepare(step: Any, grid: tuple[int, ...], parameters: list[Place]) -> tuple[Any, Any, Any]:
    """A launch that can be repeated: its configuration, and the parameters it points to."""
    _, block, across, smem_bytes, dependent = step
    config, attributes = LaunchConfig(), []
    config.grid[:], config.block[:] = grid, (block, 1, 1)
    config.smem_bytes = smem_bytes
    if across != (1, 1, 1):
        attributes.append(LaunchAttribute(id=CLUSTER_DIMENSION))
        attributes[-1].value[:3] = across
    if dependent:
        attributes.append(LaunchAttribute(id=PROGRAMMATIC))
        attributes[-1].value[0] = 1
    if attributes:
        config.attributes = (LaunchAttribute * len(attributes))(*attributes)
        config.attribute_count = len(attributes)
    addresses = (ctypes.c_void_p * len(parameters))(*(place for place, _ in parameters))
    return config, addresses, parameters


def launch(geometry: Any, arguments: tuple[Any, ...]) -> None:
    """Run the kernels on the current stream; `geometry(*arguments)` gives their workspaces, and
    grid and parameters of each.

    Arguments are tensors, the first of them given, and numbers; either may be None.
    """
    device = arguments[0].device
    with torch.cuda.device(device):
        if device.index not in functions:
            functions[device.index] = load(device)
        key = tuple((a.data_ptr(), *a.shape) if hasattr(a, "shape") else a for a in arguments)
        if key not in launches:
            if len(launches) >= MAX_LAUNCHES:
                launches.clear()
            spaces, places = geometry(*arguments)
            steps = zip(STEPS, places, strict=True)
            launches[key] = spaces, [prepare(step, *place) for step, place in steps]
        if RANDOM_STEP:
            draw(device)
        spaces, prepared = launches[key]
        _taken = [space.take(device) for space in spaces]  # kept until all is launched
        stream = torch.cuda.current_stream().cuda_stream
        for function, ready in zip(functions[device.index], prepared, strict=True):
            config, addresses, _ = ready
            config.stream = stream
            driver("cuLaunchKernelEx", ctypes.byref(config), function, addresses, None)


def axis(name: str, tensor: torch.Tensor | None, rank: int, dimension: int) -> int:
    """The size of one dimension of a tensor whose rank is checked."""
    if tensor is None:
        raise ValueError(f"{name} must be given")
    if tensor.ndim != rank:
        raise ValueError(f"{name} must have {rank} dimensions, not {tensor.ndim}")
    return tensor.shape[dimension]


def expect(name: str, tensor: torch.Tensor | None, dtype: Any, shape: tuple[int, ...]) -> None:
    """ValueError unless the tensor is what the kernel reads: type, shape, layout, place."""
    if tensor is None:
        raise ValueError(f"{name} must be given")
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be {dtype} of shape {shape}, not {tensor.dtype} of {tuple(tensor.shape)}"
        )
    if not tensor.is_cuda:
        raise ValueError(f"{name} must be on a CUDA device, not {tensor.device}")
    if not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise ValueError(f"{name} must be contiguous and begin at a multiple of 16 bytes")
    if 0 in shape:
        raise ValueError(f"{name} is empty: {shape}")


# ---- copied to here ----
STEPS: tuple[Any, ...] = ()  # of each launch: entry, block, cluster, shared bytes, dependent
CAPABILITY, RANDOM_STEP = (0, 0), 0
