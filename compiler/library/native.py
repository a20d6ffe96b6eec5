"""The fast path in C: launcher.c, built once by the machine's compiler into the cache.

It is optional: without a C compiler, or a torch whose tensors have no DLPack exchange API, `build`
or `Native` says why not, and calls go through Python. The structures are launcher.c's.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ptxflow.compiler.backend.runtime import LaunchConfig, LaunchError
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.library.device import Cuda
from ptxflow.compiler.library.plan import Plan
from ptxflow.compiler.library.signature import Signature

_SOURCE = Path(__file__).with_name("launcher.c").read_text()  # a Solution's folder may go
MAX_ARGS, MAX_OUT, MAX_PARAMS, BLOCK_BYTES = 24, 4, 64, 8192  # launcher.c's
_API_MAJOR = 1  # of DLPack's exchange API
_DEVICES = {"cpu": 1, "cuda": 2}  # and DLPack's codes of types
_CODES = {
    torch.int32: 0, torch.int64: 0, torch.uint8: 1, torch.float16: 2, torch.float32: 2,
    torch.bfloat16: 4, torch.float8_e4m3fn: 10,
}  # fmt: skip
_u32, _ptr, _object = ctypes.c_uint32, ctypes.c_void_p, ctypes.py_object


class NoLauncher(RuntimeError):
    """Why the fast path cannot be had on this machine; one line."""


class _Patch(ctypes.Structure):
    _fields_ = (("offset", _u32), ("source", _u32), ("add", ctypes.c_uint64), ("replace", _u32),
                ("pad", _u32))  # fmt: skip


class _Scalar(ctypes.Structure):
    _fields_ = (("offset", _u32), ("arg", _u32), ("floating", _u32), ("pad", _u32))


class _Step(ctypes.Structure):
    _fields_ = (("config", ctypes.POINTER(LaunchConfig)), ("function", _ptr),
                ("params", ctypes.POINTER(_u32)), ("count", ctypes.c_uint64))  # fmt: skip


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor."""

    _fields_ = (("data", _ptr), ("device_type", ctypes.c_int32), ("device", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", _ptr), ("byte_offset", ctypes.c_uint64))  # fmt: skip


class _Plan(ctypes.Structure):
    _fields_ = (
        ("owner", _object), ("context", _ptr), ("block", _ptr),
        ("patches", ctypes.POINTER(_Patch)), ("scalars", ctypes.POINTER(_Scalar)),
        ("steps", ctypes.POINTER(_Step)), ("outputs", ctypes.POINTER(_Tensor)),
        ("workspace", ctypes.POINTER(_Tensor)), ("spans", ctypes.POINTER(ctypes.c_uint64)),
        ("block_bytes", _u32), ("patch_count", _u32), ("scalar_count", _u32),
        ("step_count", _u32), ("device", ctypes.c_int32), ("pad", ctypes.c_int32),
    )  # fmt: skip


class _Setup(ctypes.Structure):
    _fields_ = (
        *((name, _ptr) for name in ("allocate", "wrap", "tensor", "work_stream", "launch",
                                    "get_context", "push_context", "pop_context",
                                    "replace_address")),
        *((name, _object) for name in ("tensor_type", "parameter_type", "requires_grad",
                                       "grad_enabled", "failed", "out_of_memory")),
        ("inputs", _u32), ("outputs", _u32), ("device_type", ctypes.c_int32),
        ("pad", ctypes.c_int32), ("scalars", ctypes.c_uint64),
    )  # fmt: skip


_DRIVER = {
    "launch": "cuLaunchKernelEx", "get_context": "cuCtxGetCurrent",
    "push_context": "cuCtxPushCurrent_v2", "pop_context": "cuCtxPopCurrent_v2",
    "replace_address": "cuTensorMapReplaceAddress",
}  # fmt: skip


def build() -> Path:
    """The compiled launcher in the cache ($PTXFLOW_CACHE or ~/.cache/ptxflow); takes 0.2 s once.

    Raises NoLauncher without a C compiler, or where it fails.
    """
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise NoLauncher(f"torch {torch.__version__} has no DLPack exchange API")
    if "t" in sys.abiflags or sys.implementation.name != "cpython":
        raise NoLauncher("it is for CPython with its global lock")
    key = hashlib.sha256(f"{_SOURCE}{sys.version}{os.uname().machine}".encode()).hexdigest()
    root = os.environ.get("PTXFLOW_CACHE") or Path.home() / ".cache" / "ptxflow"
    built = Path(root) / "launcher" / f"{key[:32]}.so"
    if built.is_file():
        return built
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NoLauncher("no C compiler (cc) on this machine")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "launcher.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(made), "-x", "c", "-"]
        done = subprocess.run(command, input=_SOURCE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoLauncher(f"{compiler} failed: {done.stderr.strip().splitlines()[-1:]}")
        write_whole(built, made.read_bytes())
    return built


def _exchange_api() -> dict[str, int]:
    """The addresses of torch's functions, by the names that launcher.c has for them."""
    get = ctypes.PYFUNCTYPE(_ptr, _object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    table = get(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    major = _u32.from_address(table).value
    words = (ctypes.c_uint64 * 7).from_address(table)
    if major != _API_MAJOR or not words[5]:
        raise NoLauncher(f"torch's DLPack exchange API is version {major}")
    return {"allocate": words[2], "wrap": words[4], "tensor": words[5], "work_stream": words[6]}


def _failed(code: int, plan: Plan) -> None:
    entries = ", ".join(step.entry for step in plan.steps)
    raise LaunchError("cuLaunchKernelEx", plan.error_name(code), entries)


class Native:
    """The plans of a library in C. `call(*arguments)` runs one it knows, else it returns
    NotImplemented; `insert` makes one known. Raises NoLauncher."""

    def __init__(self, signature: Signature, device: Cuda):
        count = len(signature.inputs) + len(signature.outputs)
        if count > MAX_ARGS or len(signature.outputs) > MAX_OUT:
            raise NoLauncher(f"{signature.name} has {count} arguments")
        library = ctypes.PyDLL(str(build()))
        library.create.restype = library.function.restype = _object
        library.create.argtypes, library.function.argtypes = [_ptr], [_object]
        self._insert = library.insert
        self._insert.argtypes = [_object, ctypes.POINTER(_object), ctypes.c_ssize_t, _ptr]
        pointers = _exchange_api() | {
            field: ctypes.cast(getattr(device.driver.library, name), _ptr).value
            for field, name in _DRIVER.items()
        }
        scalars = sum(1 << i for i, a in enumerate(signature.inputs) if a.shape is None)
        self._setup = _Setup(
            **pointers, tensor_type=torch.Tensor, parameter_type=torch.nn.Parameter,
            requires_grad="requires_grad", grad_enabled=torch.is_grad_enabled, failed=_failed,
            out_of_memory=torch.OutOfMemoryError, inputs=len(signature.inputs),
            outputs=len(signature.outputs), device_type=device.device_type, scalars=scalars,
        )  # fmt: skip
        self._state = library.create(ctypes.addressof(self._setup))
        self.call = library.function(self._state)

    def insert(self, arguments: Sequence[Any], plan: Plan) -> None:
        """Give a plan to calls like this one, unless it is one that C does not do."""
        if plan.words or plan.bytes > BLOCK_BYTES or any(m[2] not in _CODES for m in plan.made):
            return
        if max(len(step.offsets) for step in plan.steps) > MAX_PARAMS:
            return
        if plan.native is None:
            plan.native = _native(plan)
        objects = (_object * len(arguments))(*arguments)
        self._insert(self._state, objects, len(arguments), ctypes.addressof(plan.native))


def _like(shape: Sequence[int], _: Any, dtype: torch.dtype, device: torch.device) -> _Tensor:
    """What C is to allocate, without gaps."""
    return _Tensor(
        device_type=_DEVICES[device.type], device=device.index or 0, ndim=len(shape),
        code=_CODES[dtype], bits=8 * dtype.itemsize, lanes=1,
        shape=(ctypes.c_int64 * max(len(shape), 1))(*shape),
    )  # fmt: skip


def _native(plan: Plan) -> _Plan:
    """The plan as launcher.c reads it; it lives as long as the plan, which `owner` names without
    holding it: C holds the plan while it knows it."""

    def array(kind: Any, values: Sequence[Any]) -> Any:
        return (kind * max(len(values), 1))(*values)

    steps = [
        _Step(ctypes.pointer(s.config), s.function, array(_u32, s.offsets), len(s.offsets))
        for s in plan.steps
    ]
    native = _Plan(
        context=plan.context,
        block=plan.block,
        patches=array(_Patch, [_Patch(p.offset, p.source, p.add, p.replace) for p in plan.patches]),
        scalars=array(_Scalar, [_Scalar(*s) for s in plan.scalars]),
        steps=array(_Step, steps),
        outputs=array(_Tensor, [_like(*output) for output in plan.made]),
        workspace=array(_Tensor, [_like(*plan.workspace)]) if plan.workspace else None,
        spans=array(ctypes.c_uint64, plan.spans),
        block_bytes=plan.bytes,
        patch_count=len(plan.patches),
        scalar_count=len(plan.scalars),
        step_count=len(plan.steps),
        device=plan.device.index or 0,
    )
    _ptr.from_buffer(native, _Plan.owner.offset).value = id(plan)  # borrowed: no cycle
    return native
