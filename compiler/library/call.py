"""`ptxflow.load(folder)`: the kernels of a library as one function of tensors.

A call checks its arguments, takes the member that serves its sizes, and launches on torch's current
stream. It never waits for the device, and allocates through torch alone.
"""

import ctypes
import functools
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ptxflow.compiler.backend.runtime import LaunchError, LoadedKernel
from ptxflow.compiler.launch import RANDOM_STEP, Arguments, RandomParam
from ptxflow.compiler.library.device import Cuda, in_context, load_kernel
from ptxflow.compiler.library.manifest import LibraryError, read_file, read_manifest
from ptxflow.compiler.library.native import Native, NoLauncher
from ptxflow.compiler.library.plan import Builder, Plan, mapped_only
from ptxflow.compiler.library.signature import ALIGNMENT, INT32, Signature
from ptxflow.compiler.library.torch_op import register, traced

MAX_PLANS = 1024  # shapes that a library remembers
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, float, int, type(None)})
LAUNCHERS = ("native", "ctypes")


def load(folder: str | os.PathLike[str], *, launcher: str | None = None) -> "Kernel":
    """The library in a folder. Its files are checked here; a device gets its kernels at the first
    call there.

    `launcher` is "native" (C, built once), "ctypes" (Python alone), or by default the first that
    this machine has. Raises LibraryError for a library that is damaged or for other devices,
    RuntimeUnavailable without an NVIDIA driver, NoLauncher where "native" cannot be had.
    """
    return Kernel(Path(folder), Cuda(), launcher)


class Kernel:
    """A loaded library, called like the definition's reference: see `__call__`."""

    def __init__(self, folder: Path, device: Cuda, launcher: str | None = None):
        if launcher not in (None, *LAUNCHERS):
            raise LibraryError(f"launcher must be one of {', '.join(LAUNCHERS)}, not {launcher!r}")
        self.manifest = read_manifest(folder)
        self.name = self.manifest.name
        device.check_any(self.manifest.target)
        self._images = [
            (m.launch, read_file(folder, m.cubin), read_file(folder, m.ptx))
            for m in self.manifest.members
        ]
        try:
            self.signature = Signature.of(self.manifest.definition)
        except (KeyError, TypeError, AttributeError, SyntaxError) as error:
            raise LibraryError(f"{folder}: its definition is none: {error!r}") from None
        self._count = len(self.signature.inputs)
        self._counts = (self._count, self._count + len(self.signature.outputs))
        self._mapped = [mapped_only(m.launch) for m in self.manifest.members]
        self._device, self._lock = device, threading.Lock()
        self._kernels: dict[int, list[LoadedKernel]] = {}
        self._plans: dict[Any, Plan] = {}
        self._native = _native(self.signature, device, launcher)
        self._fast = self._native.call if self._native else self._python
        self.launcher = "native" if self._native else "ctypes"
        self.op = register(self)

    def __repr__(self) -> str:
        ranges = ", ".join(f"{n} {lo}..{hi}" for n, (lo, hi) in self.manifest.ranges.items())
        return f"<{self.name}: {len(self.manifest.members)} kernels, {ranges}>"

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest, and so of all that the library is."""
        data = json.dumps(self.manifest.to_json(), sort_keys=True)
        return hashlib.sha256(data.encode()).hexdigest()

    def __call__(self, *args: Any, out: Any = None, **named: Any) -> Any:
        """Run on the current stream of the tensors' device: inputs in the definition's order or by
        name, outputs as it orders them (one, or a tuple).

        `out` is the output tensor, or all of them, which is then returned. Raises ArgumentError for
        what no kernel reads, LibraryError for sizes that no member serves, LaunchError.
        """
        if torch.compiler.is_compiling():
            return traced(self, self.signature.order(args, named, out))
        if named or (out is not None and (len(args) != self._count or isinstance(out, Mapping))):
            args = self.signature.order(args, named, out)
        elif out is not None:
            args = (*args, *out) if isinstance(out, tuple | list) else (*args, out)
        result = self._fast(*args)
        if result is NotImplemented:
            result = self._python(*args)
        return result

    def _python(self, *args: Any) -> Any:
        """Any call, in Python: arguments in the definition's order, outputs behind them."""
        if len(args) not in self._counts:
            out = args[self._count :] or None
            args = self.signature.order(args[: self._count] if out else args, {}, out)
        if not _PLAIN.issuperset(map(type, args)) and any(
            isinstance(a, torch.Tensor) and type(a) not in _PLAIN for a in args
        ):
            return traced(self, args)
        return self.run(args)

    def run(self, args: Sequence[Any]) -> Any:
        """What `_python` does for tensors that have memory of their own."""
        key = tuple(
            [
                (a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else type(a)
                for a in args
            ]
        )
        plan = self._plans.get(key)
        places = None if plan is None else self._places(plan, args)
        if plan is None or places is None:
            plan = self._plan(key, args)
            places = [t.data_ptr() if isinstance(t, torch.Tensor) else 0 for t in args]
        made = args[self._count :]
        if not made:
            made = [
                torch.empty_strided(shape, strides, dtype=dtype, device=device)
                for shape, strides, dtype, device in plan.made
            ]
            places += [t.data_ptr() for t in made]
        space = None
        if plan.workspace:
            shape, strides, dtype, device = plan.workspace
            space = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        places.append(0 if space is None else space.data_ptr())
        self._launch(plan, places, args)
        return made[0] if len(made) == 1 else tuple(made)

    def _places(self, plan: Plan, args: Sequence[Any]) -> list[int] | None:
        """The addresses of a call's arguments where what its plan does not know is certainly right:
        alignment, gradients, range, overlap. Else None: all is checked again."""
        places = []
        for a in args:
            place = 0
            if isinstance(a, torch.Tensor):
                place = a.data_ptr()
                if place % ALIGNMENT or (a.requires_grad and torch.is_grad_enabled()):
                    return None
            elif isinstance(a, int) and a not in INT32:
                return None
            places.append(place)
        for i in range(self._count, len(args)):
            low, high = places[i], places[i] + plan.spans[i]
            for j in range(i):
                if low < places[j] + plan.spans[j] and places[j] < high:
                    return None
        return places

    def _plan(self, key: Any, args: Sequence[Any]) -> Plan:
        """The plan of a call whose arguments are all checked, from here on known for its shapes."""
        axes = self.signature.sizes(args)
        member = self.manifest.serving(axes)
        place = self.signature.check(args, self._mapped[member], self._device.kind)
        plan = self._plans.get(key)
        if plan is None:
            index = place.index or 0
            kernel = self._loaded(index)[member]
            builder = Builder(self.signature, kernel.launch, axes, args, self._device.driver)
            plan = builder.plan(kernel.functions, self._device.context(index), place)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        if self._native:
            self._native.insert(args, plan)
        return plan

    def _loaded(self, index: int) -> list[LoadedKernel]:
        """The members on a device. Raises LibraryError for one that cannot run them."""
        with self._lock:
            if index not in self._kernels:
                self._device.check(self.manifest.target, index)
                driver = self._device.driver
                with in_context(driver, self._device.context(index)):
                    self._kernels[index] = [load_kernel(driver, *i) for i in self._images]
            return self._kernels[index]

    def _launch(self, plan: Plan, places: Sequence[int], arguments: Sequence[Any]) -> None:
        """The launch by ctypes."""
        driver, index = self._device.driver, plan.device.index or 0
        random, state = self._random(plan, index) if plan.words else (None, None)
        places = (*places, 0 if state is None else state.data_ptr())
        stream, current = self._device.stream(index), ctypes.c_void_p()
        driver("cuCtxGetCurrent", ctypes.byref(current))
        if current.value != plan.context:
            driver("cuCtxPushCurrent_v2", ctypes.c_void_p(plan.context))
        try:
            with plan.lock:
                self._write(plan, places, arguments, random)
                for s in plan.steps:
                    s.config.stream = stream
                    config = ctypes.byref(s.config)
                    driver("cuLaunchKernelEx", config, s.function, s.params, None, note=s.entry)
        finally:
            if current.value != plan.context:
                driver("cuCtxPopCurrent_v2", ctypes.byref(current))

    def _write(
        self, plan: Plan, places: Sequence[int], arguments: Sequence[Any], random: Any
    ) -> None:
        for p in plan.patches:
            address = places[p.source] + p.add if places[p.source] else 0
            if p.replace:
                place = ctypes.c_void_p(plan.block + p.offset)
                self._device.driver("cuTensorMapReplaceAddress", place, ctypes.c_void_p(address))
            else:
                plan.write(p.offset, ctypes.c_uint64, address)
        for offset, number, floating in plan.scalars:
            value = arguments[number] or 0
            if floating:
                plan.write(offset, ctypes.c_float, float(value))
            else:
                plan.write(offset, ctypes.c_int32, value)
        for offset, param in plan.words:
            by_value = isinstance(param, RandomParam)
            plan.write(offset, ctypes.c_uint32, random.word(param) if by_value else places[-1] != 0)

    def _random(self, plan: Plan, index: int) -> tuple[Arguments, torch.Tensor | None]:
        """The state of torch's generator by value; in a capture one on the device, which torch
        draws anew at every replay. Raises LaunchError there for kernels that read none."""
        if not self._device.capturing():
            seed, offset = self._device.random(index, RANDOM_STEP)
            return Arguments(seed=seed, offset=offset), None
        if all(isinstance(param, RandomParam) for _, param in plan.words):
            raise LaunchError(
                self.name,
                "it draws random numbers from a state that is passed by value",
                "a CUDA graph would repeat them at every replay; make the library anew, or call it "
                "outside the graph",
            )
        return Arguments(), self._device.random_state(index)

    def empty(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Outputs of the shapes that a call has, and nothing in them: for tensors without data."""
        axes = self.signature.sizes(args)
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        return [
            torch.empty([axes[n] for n in a.shape or ()], dtype=a.dtype, device=device)
            for a in self.signature.outputs
        ]


def _native(signature: Signature, device: Cuda, launcher: str | None) -> Native | None:
    if launcher == "ctypes":
        return None
    try:
        return Native(signature, device)
    except (NoLauncher, OSError):
        if launcher == "native":
            raise
        return None
