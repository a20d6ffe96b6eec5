"""Runs a compiled kernel: loads the image, encodes tensor maps, launches, through the driver API.

The one module of the compiler that needs a GPU, and only when it is used: importing it needs
nothing. The driver is called by ctypes, because tensor maps must lie at 128-byte boundaries and the
CUtensorMap of cuda-bindings does not (it lands wherever Python's allocator puts the object).
"""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ptxflow.compiler.device import DEVICES, Device
from ptxflow.compiler.launch import (
    GENERATOR,
    NO_ARGUMENTS,
    Arguments,
    InputParam,
    Launch,
    Param,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
    evaluate,
)

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 128

# Values of the driver's enumerations (cuda.h).
_DATA_TYPE = {
    "uint8": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "uint32": 2, "int32": 3,
    "float16": 6, "float32": 7, "bfloat16": 9,
}  # fmt: skip
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION = {0: 0, 64: 1, 128: 2, 256: 3}
_INTERLEAVE_NONE = 0
_FILL_ZERO = 0
_ATTRIBUTE_MAX_DYNAMIC_SMEM = 8
_LAUNCH_ATTRIBUTE_CLUSTER = 4
_LAUNCH_ATTRIBUTE_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DEVICE_ATTRIBUTE = {"sms": 16, "l2_bytes": 38, "major": 75, "minor": 76}
CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


class RuntimeUnavailable(RuntimeError):
    """This machine cannot run the kernel: no driver, no GPU, or one of another kind."""


class LaunchError(RuntimeError):
    """A driver call failed. `error` is the CUDA error's name."""

    def __init__(self, call: str, error: str, note: str = ""):
        super().__init__(f"{call}: {error}{': ' + note if note else ''}")
        self.error = error


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint32),
    )


class Driver:
    """The CUDA driver's entry points, with every result checked.

    `library` stands in for libcuda.so.1 in tests. Raises RuntimeUnavailable without driver or GPU.
    """

    def __init__(self, library: Any = None):
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError:
                raise RuntimeUnavailable(
                    "no NVIDIA driver on this machine: libcuda.so.1 cannot be loaded"
                ) from None
        self.library = library
        code = int(library.cuInit(ctypes.c_uint(0)))
        if code:
            raise RuntimeUnavailable(f"no usable GPU: cuInit: {self.error_name(code)}")

    def error_name(self, code: int) -> str:
        """The CUDA error's name, as CUDA_ERROR_ILLEGAL_ADDRESS."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return text.value.decode() if text.value else f"CUDA error {code}"

    def __call__(self, call: str, *args: Any, note: str = "") -> None:
        """Make one driver call; raises LaunchError unless it succeeds."""
        code = int(getattr(self.library, call)(*args))
        if code:
            raise LaunchError(call, self.error_name(code), note)

    def use_context(self, ordinal: int = 0) -> None:
        """Leave a context current: the caller's (torch's), or else the device's primary one."""
        context = ctypes.c_void_p()
        self("cuCtxGetCurrent", ctypes.byref(context))
        if context.value:
            return
        handle = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(ordinal))
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self("cuCtxSetCurrent", context)

    def synchronize(self) -> None:
        """Wait for all work of the context. Raises LaunchError with what a kernel failed of."""
        self("cuCtxSynchronize")


def address_aligned(size: int, alignment: int) -> tuple[Any, int]:
    """Host storage of `size` bytes and the address in it that is a multiple of `alignment`."""
    storage = ctypes.create_string_buffer(size + alignment)
    return storage, -(-ctypes.addressof(storage) // alignment) * alignment


def encode_tensor_map(
    driver: Driver, param: TensorMapParam, address: int, axes: Mapping[str, int]
) -> tuple[Any, int]:
    """The 128-byte tensor map over the tensor at device address `address`.

    Returns the host storage, which must stay alive, and the address in it of the map. Raises
    ValueError for strides or a box of another rank than `dims`, LaunchError for limits broken.
    """
    dims = [evaluate(d, axes) for d in param.dims]
    strides = [evaluate(s, axes) for s in param.strides]
    rank = len(dims)
    if len(strides) != rank - 1 or len(param.box) != rank:
        raise ValueError(
            f"tensor map of {param.tensor}: rank {rank} needs {rank - 1} strides and a box of "
            f"{rank}, not {len(strides)} and {len(param.box)}"
        )
    storage, start = address_aligned(TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT)
    driver(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(start),
        ctypes.c_int(_DATA_TYPE[param.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*param.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_INTERLEAVE_NONE),
        ctypes.c_int(_SWIZZLE[param.swizzle]),
        ctypes.c_int(_L2_PROMOTION[param.l2_promotion]),
        ctypes.c_int(_FILL_ZERO),
        note=f"tensor {param.tensor}, dims {dims}, strides {strides}, box {list(param.box)}, "
        f"swizzle {param.swizzle}",
    )
    return storage, start


def configure(launch: Launch, axes: Mapping[str, int]) -> LaunchConfig:
    """Grid, block, shared memory and attributes of one launch; its stream is the caller's."""
    config = LaunchConfig()
    config.grid = (ctypes.c_uint32 * 3)(*(evaluate(g, axes) for g in launch.grid))
    config.block = (ctypes.c_uint32 * 3)(launch.block, 1, 1)
    config.smem_bytes = launch.smem_bytes
    attributes = []
    if launch.cluster != (1, 1, 1):
        cluster = _LaunchAttribute(id=_LAUNCH_ATTRIBUTE_CLUSTER)
        cluster.value[:3] = launch.cluster
        attributes.append(cluster)
    if launch.dependent:
        early = _LaunchAttribute(id=_LAUNCH_ATTRIBUTE_PROGRAMMATIC)
        early.value[0] = 1
        attributes.append(early)
    if attributes:
        config.attributes = (_LaunchAttribute * len(attributes))(*attributes)
        config.attribute_count = len(attributes)
    return config


class BoundLaunch:
    """One launch with its arguments in place: calling it is a single driver call, asynchronous.

    The argument tensors must outlive it and stay where they are.
    """

    def __init__(
        self,
        driver: Driver,
        function: ctypes.c_void_p,
        launch: Launch,
        addresses: Mapping[str, int | None],
        axes: Mapping[str, int],
        arguments: Arguments,
    ):
        self._driver, self._function, self._entry = driver, function, launch.entry
        self._storage: list[Any] = []
        places = [self._place(p, addresses, axes, arguments) for p in launch.params]
        self._params = (ctypes.c_void_p * max(len(places), 1))(*places)
        self.config = configure(launch, axes)

    def _place(
        self,
        param: Param,
        addresses: Mapping[str, int | None],
        axes: Mapping[str, int],
        arguments: Arguments,
    ) -> int:
        """Host address of the parameter's value; the value stays alive with this launch."""
        match param:
            case TensorMapParam():
                address = addresses[param.tensor] or 0
                storage, start = encode_tensor_map(self._driver, param, address, axes)
                self._storage.append(storage)
                return start
            case PointerParam():
                absent = param.tensor == GENERATOR and GENERATOR not in addresses
                value: Any = ctypes.c_uint64(0 if absent else addresses[param.tensor] or 0)
            case ScalarParam():
                value = ctypes.c_uint32(evaluate(param.value, axes))
            case PresentParam():
                value = ctypes.c_uint32(addresses.get(param.tensor) is not None)
            case InputParam() | RandomParam():
                value = ctypes.c_uint32(arguments.word(param))
        self._storage.append(value)
        return ctypes.addressof(value)

    def __call__(self, stream: int = 0) -> None:
        """Launch on a stream (a CUstream handle). Raises LaunchError."""
        self.config.stream = stream
        self._driver(
            "cuLaunchKernelEx",
            ctypes.byref(self.config),
            self._function,
            self._params,
            None,
            note=self._entry,
        )


class BoundCall:
    """All launches of a kernel with their arguments in place, and the workspace they share."""

    def __init__(self, steps: Sequence[BoundLaunch], driver: Driver, workspace: int):
        self.steps, self._driver, self._workspace = tuple(steps), driver, workspace

    def __call__(self, stream: int = 0) -> None:
        """Launch all kernels, in order, on a stream (a CUstream handle). Raises LaunchError."""
        for step in self.steps:
            step(stream)

    def free(self) -> None:
        """Give the workspace back, once no launch uses it any more."""
        if self._workspace:
            self._driver("cuMemFree_v2", ctypes.c_uint64(self._workspace))
        self._workspace = 0


class LoadedKernel:
    """A kernel's image (a cubin, or PTX for the driver to translate) in the current context; of a
    program, all its kernels. Raises LaunchError for an image that does not load.
    """

    def __init__(self, launch: Launch, image: bytes, driver: Driver | None = None):
        self.launch = launch
        self._driver = driver or Driver()
        self._driver.use_context()
        self._module = ctypes.c_void_p()
        self._bound: list[BoundCall] = []
        self._driver(
            "cuModuleLoadData",
            ctypes.byref(self._module),
            ctypes.c_char_p(image + b"\0"),
            note=launch.entry,
        )
        self.functions = [self._function(step) for step in launch.steps]

    def _function(self, launch: Launch) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._driver(
            "cuModuleGetFunction",
            ctypes.byref(function),
            self._module,
            ctypes.c_char_p(launch.entry.encode()),
            note=launch.entry,
        )
        if launch.smem_bytes:
            self._driver(
                "cuFuncSetAttribute",
                function,
                ctypes.c_int(_ATTRIBUTE_MAX_DYNAMIC_SMEM),
                ctypes.c_int(launch.smem_bytes),
                note=f"{launch.entry} asks for {launch.smem_bytes} bytes of shared memory",
            )
        return function

    def bind(
        self,
        addresses: Mapping[str, int | None],
        axes: Mapping[str, int],
        arguments: Arguments = NO_ARGUMENTS,
    ) -> BoundCall:
        """The call over the tensors at these device addresses, for these axis values.

        An optional tensor that is not given has the address None. The workspace is allocated here.
        Raises KeyError for a tensor or axis that is missing, ValueError for a workspace that is too
        large, LaunchError where the driver refuses.
        """
        places, size = self.launch.workspaces(axes)
        begin = self._allocate(size) if size else 0
        known = {**addresses, **{name: begin + place for name, place in places.items()}}
        steps = [
            BoundLaunch(self._driver, function, step, known, axes, arguments)
            for function, step in zip(self.functions, self.launch.steps, strict=True)
        ]
        self._bound.append(BoundCall(steps, self._driver, begin))
        return self._bound[-1]

    def _allocate(self, size: int) -> int:
        address, note = ctypes.c_uint64(), f"workspace of {self.launch.entry}: {size} bytes"
        self._driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size), note=note)
        return address.value

    def unload(self) -> None:
        """Free every call's workspace and the module; nothing bound may be in flight."""
        while self._bound:
            self._bound.pop().free()
        self._driver("cuModuleUnload", self._module)


@dataclass(frozen=True)
class GpuInfo:
    """The GPU that is here. Clocks are MHz; None where nothing on the machine can tell."""

    name: str
    driver: str
    cuda: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None

    @property
    def kind(self) -> str | None:
        """The device table's name for this GPU, if it is there."""
        upper = self.name.upper()
        for d in DEVICES.values():
            if d.name.upper() in upper and CAPABILITY[d.arch] == self.capability:
                return d.name
        return None

    def runs(self, device: Device) -> bool:
        """Whether code for the device's target runs here (sm_90a runs on capability 9.0 alone), and
        what is measured is the device's: an H200 is no H100."""
        return CAPABILITY[device.arch] == self.capability and self.kind in (None, device.name)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "capability": list(self.capability)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "GpuInfo":
        """Of `to_json`, with more in it perhaps."""
        named = {f.name: data.get(f.name) for f in fields(GpuInfo)}
        return GpuInfo(**named | {"capability": tuple(data["capability"])})


def gpu_info(ordinal: int = 0, driver: Driver | None = None) -> GpuInfo:
    """What the driver says of the GPU; raises RuntimeUnavailable where there is none."""
    driver = driver or Driver()
    handle, name, version = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
    try:
        driver("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(ordinal))
    except LaunchError as error:
        raise RuntimeUnavailable(f"no GPU: {error}") from None
    driver("cuDeviceGetName", name, ctypes.c_int(256), handle)
    driver("cuDriverGetVersion", ctypes.byref(version))
    values = {}
    for key, attribute in _DEVICE_ATTRIBUTE.items():
        value = ctypes.c_int()
        driver("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(attribute), handle)
        values[key] = value.value
    uuid = (ctypes.c_ubyte * 16)()
    driver("cuDeviceGetUuid_v2", uuid, handle)
    state = query_smi("driver_version,clocks.sm,clocks.max.sm", gpu=smi_name(bytes(uuid)))
    return GpuInfo(
        name=name.value.decode(),
        driver=state[0] if state else "unknown",
        cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        capability=(values["major"], values["minor"]),
        sms=values["sms"],
        l2_bytes=values["l2_bytes"],
        sm_clock_mhz=_integer(state[1]) if state else None,
        max_sm_clock_mhz=_integer(state[2]) if state else None,
    )


def require_gpu(device: Device) -> GpuInfo:
    """The GPU, if it runs code for `device`; else RuntimeUnavailable says what is here instead."""
    info = gpu_info()
    if not info.runs(device):
        major, minor = info.capability
        raise RuntimeUnavailable(
            f"{device.name} needs a GPU that runs {device.arch}; "
            f"this machine has {info.name} (compute capability {major}.{minor})"
            + (f": give --device {info.kind}" if info.kind else "")
        )
    return info


def smi_name(uuid: bytes) -> str:
    """The name nvidia-smi gives a GPU; its ordinals ignore CUDA_VISIBLE_DEVICES."""
    h = uuid.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def query_smi(fields: str, gpu: str) -> list[str] | None:
    """Values of nvidia-smi's query fields for one GPU; None where the tool does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = [v.strip() for v in done.stdout.strip().split(",")]
    return values if done.returncode == 0 and len(values) == len(fields.split(",")) else None


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() else None
