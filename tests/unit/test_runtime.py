"""What reaches the driver: tensor maps, parameters, cluster attribute and errors, byte by byte.

A stand-in for libcuda records the calls and reads the structures as the driver would.
"""

import ctypes
from dataclasses import replace
from typing import Any

import pytest

from ptxflow.compiler import launch
from ptxflow.compiler.backend.runtime import (
    Driver,
    GpuInfo,
    LaunchError,
    LoadedKernel,
    RuntimeUnavailable,
    encode_tensor_map,
    gpu_info,
)
from ptxflow.compiler.device import B200, H100, H200
from ptxflow.compiler.launch import Launch, PointerParam

LAUNCH = Launch(
    entry="gemm",
    grid=("-(-M // 128) * 2", "N // 64", "1"),
    block=384,
    cluster=(2, 1, 1),
    smem_bytes=200_000,
    params=(
        launch.TensorMapParam("A", "float16", ("K", "M"), ("2 * K",), (64, 128), 128),
        PointerParam("C"),
        launch.ScalarParam("m", "M"),
    ),
)
AXES = {"M": 300, "N": 256, "K": 4096}
ADDRESSES = {"A": 0x7F00_0000_1000, "C": 0x7F00_0000_2000}


def values(array: Any) -> list[int]:
    return list(array)


class FakeCuda:
    """libcuda as far as the runtime uses it. `fail` maps a call to the code it returns."""

    def __init__(self, **fail: int):
        self.fail = fail
        self.calls: list[str] = []
        self.map: dict[str, Any] = {}
        self.launch: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name in self.fail:
                return self.fail[name]
            getattr(self, f"on_{name}", lambda *a: None)(*args)
            return 0

        if name.startswith("cu"):
            return call
        raise AttributeError(name)

    def on_cuGetErrorName(self, code: Any, out: Any) -> None:
        names = {1: b"CUDA_ERROR_INVALID_VALUE", 100: b"CUDA_ERROR_NO_DEVICE"}
        out._obj.value = names.get(code.value)

    def on_cuModuleGetFunction(self, out: Any, module: Any, name: Any) -> None:
        out._obj.value = 0xF00D

    def on_cuDeviceGetName(self, out: Any, size: Any, device: Any) -> None:
        out.value = b"NVIDIA H200"

    def on_cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = 13000

    def on_cuDeviceGetAttribute(self, out: Any, attribute: Any, device: Any) -> None:
        out._obj.value = {16: 132, 38: 60 << 20, 75: 9, 76: 0}[attribute.value]

    def on_cuTensorMapEncodeTiled(self, *args: Any) -> None:
        start, dtype, rank, address, dims, strides, box, steps, *options = args
        self.map = {
            "start": start.value, "dtype": dtype.value, "rank": rank.value,
            "address": address.value, "dims": values(dims), "strides": values(strides),
            "box": values(box), "steps": values(steps), "options": [o.value for o in options],
        }  # fmt: skip
        ctypes.memset(start.value, 0xAB, 128)

    def on_cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> None:
        raw = ctypes.string_at(ctypes.addressof(config._obj), 56)
        words = (ctypes.c_uint32 * 14).from_buffer_copy(raw)
        attribute = (ctypes.c_uint32 * 18).from_address(
            ctypes.c_uint64.from_buffer_copy(raw, 40).value
        )
        self.launch = {
            "grid": values(words[:3]), "block": values(words[3:6]), "smem": words[6],
            "stream": ctypes.c_uint64.from_buffer_copy(raw, 32).value,
            "attributes": words[12], "attribute": values(attribute[:5]),
            "map": ctypes.string_at(params[0], 128), "map_at": params[0],
            "pointer": ctypes.c_uint64.from_address(params[1]).value,
            "scalar": ctypes.c_uint32.from_address(params[2]).value,
            "extra": extra, "function": function.value,
        }  # fmt: skip


def test_a_tensor_map_is_encoded_into_aligned_storage() -> None:
    cuda = FakeCuda()
    _, start = encode_tensor_map(Driver(cuda), LAUNCH.params[0], ADDRESSES["A"], AXES)  # type: ignore[arg-type]
    assert start % 128 == 0 and cuda.map["start"] == start
    assert cuda.map["address"] == ADDRESSES["A"] and cuda.map["rank"] == 2
    assert cuda.map["dims"] == [4096, 300] and cuda.map["strides"] == [8192]
    assert cuda.map["box"] == [64, 128] and cuda.map["steps"] == [1, 1]
    assert cuda.map["dtype"] == 6  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    assert cuda.map["options"] == [0, 3, 2, 0]  # no interleave, 128 B swizzle, 128 B to L2, zeros


def test_a_launch_carries_grid_cluster_stream_and_parameters() -> None:
    cuda = FakeCuda()
    LoadedKernel(LAUNCH, b"\x7fELF", Driver(cuda)).bind(ADDRESSES, AXES)(stream=0x55)
    seen = cuda.launch
    assert seen["grid"] == [6, 4, 1] and seen["block"] == [384, 1, 1] and seen["smem"] == 200_000
    assert seen["stream"] == 0x55 and seen["function"] == 0xF00D and seen["extra"] is None
    assert seen["attributes"] == 1 and seen["attribute"] == [4, 0, 2, 1, 1]  # cluster dimension
    assert seen["map"] == b"\xab" * 128 and seen["map_at"] % 128 == 0
    assert seen["pointer"] == ADDRESSES["C"] and seen["scalar"] == 300
    assert "cuFuncSetAttribute" in cuda.calls


def test_no_cluster_no_attribute() -> None:
    cuda = FakeCuda()
    plain = Launch("gemm", ("1", "1", "1"), 128, (1, 1, 1), 0, LAUNCH.params)
    bound = LoadedKernel(plain, b"\x7fELF", Driver(cuda)).bind(ADDRESSES, AXES)
    assert bound.steps[0].config.attribute_count == 0
    assert "cuFuncSetAttribute" not in cuda.calls


SUMS = Launch("sums", ("M", "1", "1"), 64, (1, 1, 1), 0, (PointerParam("B"),), dependent=True)
PROGRAM = Launch(
    entry="chunks",
    grid=("2 * M", "1", "1"),
    block=128,
    cluster=(1, 1, 1),
    smem_bytes=0,
    params=(PointerParam("A"),),
    then=(SUMS,),
    workspace=(launch.Workspace("A", "M * 4"), launch.Workspace("B", "M * 300")),
)


class ProgramCuda(FakeCuda):
    """Remembers every launch, and what was allocated and freed."""

    def __init__(self, **fail: int):
        super().__init__(**fail)
        self.launches: list[tuple[int, list[int], int]] = []
        self.sizes: list[int] = []
        self.freed: list[int] = []

    def on_cuMemAlloc_v2(self, out: Any, size: Any) -> None:
        self.sizes.append(size.value)
        out._obj.value = 0x5000_0000

    def on_cuMemFree_v2(self, address: Any) -> None:
        self.freed.append(address.value)

    def on_cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> None:
        raw = ctypes.string_at(ctypes.addressof(config._obj), 56)
        words = (ctypes.c_uint32 * 14).from_buffer_copy(raw)
        attribute: list[int] = []
        if words[12]:
            start = ctypes.c_uint64.from_buffer_copy(raw, 40).value
            attribute = values((ctypes.c_uint32 * 18).from_address(start)[:3])
        pointer = ctypes.c_uint64.from_address(params[0]).value
        self.launches.append((words[0], attribute, pointer))


def test_a_workspace_beyond_what_launches_are_checked_for_is_refused() -> None:
    most = launch.MOST_BYTES // 300
    assert PROGRAM.workspaces({"M": most})[0]["B"] == -(-most * 4 // 256) * 256
    cuda = ProgramCuda()
    kernel = LoadedKernel(PROGRAM, b"\x7fELF", Driver(cuda))
    with pytest.raises(ValueError, match=r"chunks: workspace B takes \d+ bytes for these axes"):
        kernel.bind({}, {"M": most + 1})
    assert not cuda.sizes


def test_a_program_launches_its_kernels_in_order_over_one_workspace() -> None:
    cuda = ProgramCuda()
    kernel = LoadedKernel(PROGRAM, b"\x7fELF", Driver(cuda))
    call = kernel.bind({}, {"M": 100})
    call()
    first, second = cuda.launches
    assert first == (200, [], 0x5000_0000)
    assert second[:2] == (100, [6, 0, 1])  # programmatic stream serialization
    begin = second[2] - 0x5000_0000
    assert begin >= 400 and begin % 256 == 0 and cuda.sizes == [-(-30000 // 256) * 256 + begin]
    call.free()
    kernel.unload()
    assert cuda.freed == [0x5000_0000]  # once
    assert [c for c in cuda.calls if c in ("cuMemFree_v2", "cuModuleUnload")][
        -1
    ] == "cuModuleUnload"


def test_a_module_that_goes_takes_its_workspaces_along() -> None:
    cuda = ProgramCuda()
    kernel = LoadedKernel(PROGRAM, b"\x7fELF", Driver(cuda))
    for m in (1, 2):
        kernel.bind({}, {"M": m})
    kernel.unload()
    assert len(cuda.freed) == 2


def test_a_workspace_that_does_not_fit_is_named() -> None:
    kernel = LoadedKernel(PROGRAM, b"\x7fELF", Driver(ProgramCuda(cuMemAlloc_v2=1)))
    with pytest.raises(LaunchError, match=r"workspace of chunks: \d+ bytes"):
        kernel.bind({}, {"M": 100})


def test_a_refused_tensor_map_names_the_tensor_and_its_numbers() -> None:
    driver = Driver(FakeCuda(cuTensorMapEncodeTiled=1))
    with pytest.raises(LaunchError, match=r"INVALID_VALUE: tensor A, dims \[4096, 300\]") as info:
        encode_tensor_map(driver, LAUNCH.params[0], 0, AXES)  # type: ignore[arg-type]
    assert info.value.error == "CUDA_ERROR_INVALID_VALUE"


def test_a_tensor_map_of_the_wrong_rank_is_refused_before_the_driver() -> None:
    param = launch.TensorMapParam("A", "float16", ("K", "M"), (), (64, 128), 128)
    with pytest.raises(ValueError, match="rank 2 needs 1 strides"):
        encode_tensor_map(Driver(FakeCuda()), param, 0, AXES)


def test_no_gpu_is_one_line() -> None:
    with pytest.raises(RuntimeUnavailable, match="no usable GPU: cuInit: CUDA_ERROR_NO_DEVICE"):
        Driver(FakeCuda(cuInit=100))


def test_the_gpu_says_what_it_is_and_what_it_runs() -> None:
    info = gpu_info(driver=Driver(FakeCuda()))
    assert (info.name, info.cuda, info.capability, info.sms) == ("NVIDIA H200", "13.0", (9, 0), 132)
    assert info.kind == "h200" and info.runs(H200) and not info.runs(B200)
    assert not info.runs(H100)  # of the same capability, but its records would be called an H100's
    assert replace(info, name="NVIDIA H20").runs(H100)


def test_a_gpu_outside_the_table_has_no_kind() -> None:
    info = GpuInfo("NVIDIA GeForce RTX 4090", "580", "13.0", (8, 9), 128, 0, None, None)
    assert info.kind is None and not info.runs(H200)
