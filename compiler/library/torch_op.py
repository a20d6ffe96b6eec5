"""Each library as `torch.ops.ptxflow.NAME`, for torch.compile and whatever else traces.

NAME is the definition's; a second, other library of the same definition in a process is NAME_ and
the first 8 digits of its digest. `NAME_out` writes given outputs. Eager calls do not pass here.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ptxflow.compiler.launch import RandomParam
from ptxflow.compiler.library.manifest import Manifest
from ptxflow.compiler.library.signature import Argument, Signature

NAMESPACE = __name__.partition(".")[0]  # ptxflow, or the name that a Solution's copy has
_library: Any = getattr(torch.library, "Library")(NAMESPACE, "FRAGMENT")  # noqa: B009  untyped
_lock = threading.Lock()
_registered: dict[str, "Kernel"] = {}  # by operator


@dataclass(frozen=True)
class Op:
    """The two operators of a library: one that makes its outputs, one that is given them."""

    name: str
    make: Any
    out: Any


class Kernel(Protocol):
    """A loaded library, as far as its operators use it: see `call.Kernel`."""

    name: str
    manifest: Manifest
    signature: Signature
    op: Op

    @property
    def digest(self) -> str: ...

    def run(self, args: Sequence[Any]) -> Any: ...

    def empty(self, args: Sequence[Any]) -> list[torch.Tensor]: ...


def register(kernel: Kernel) -> Op:
    """The operators of a library; one that is loaded again takes those it had."""
    name = kernel.name
    with _lock:
        if name in _registered and _registered[name].digest != kernel.digest:
            name = f"{name}_{kernel.digest[:8]}"
        new = name not in _registered
        _registered[name] = kernel  # and so it lives on, for who calls the operator by its name
        if new:
            _define(kernel, name)
    ops = getattr(torch.ops, NAMESPACE)
    return Op(name, getattr(ops, name).default, getattr(ops, f"{name}_out").default)


def traced(kernel: Kernel, args: Sequence[Any]) -> Any:
    """A call through the operators: arguments in order, outputs behind them where given."""
    count = len(kernel.signature.inputs)
    if len(args) == count:
        return kernel.op.make(*args)
    kernel.op.out(*args)
    return args[count] if len(args) == count + 1 else tuple(args[count:])


def _typed(a: Argument) -> str:
    kind = "Tensor" if a.shape is not None else "float" if a.dtype.is_floating_point else "int"
    return f"{kind}{'?' if a.optional else ''} {a.name}"


def _define(kernel: Kernel, name: str) -> None:
    signature = kernel.signature
    inputs = ", ".join(_typed(a) for a in signature.inputs)
    outputs = ", ".join(f"Tensor({chr(97 + i)}!) {a.name}" for i, a in enumerate(signature.outputs))
    result = ", ".join("Tensor" for _ in signature.outputs)
    tags = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order]
    steps = [s for m in kernel.manifest.members for s in m.launch.steps]
    if any(isinstance(p, RandomParam) for s in steps for p in s.params):
        tags.append(torch.Tag.nondeterministic_seeded)
    _library.define(f"{name}({inputs}) -> ({result})", tags=tags)
    _library.define(f"{name}_out({inputs}, {outputs}) -> ()", tags=tags)

    def run(*args: Any) -> Any:
        return _registered[name].run(args)

    def write(*args: Any) -> None:
        _registered[name].run(args)

    def fake(*args: Any) -> Any:
        made = _registered[name].empty(args)
        return made[0] if len(made) == 1 else tuple(made)

    def no_gradient(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"torch.ops.{NAMESPACE}.{name} has no backward")

    for key in ("CUDA", "CPU"):
        _library.impl(name, run, key)
        _library.impl(f"{name}_out", write, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    torch.library.register_fake(f"{NAMESPACE}::{name}_out", lambda *args: None, lib=_library)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", no_gradient, lib=_library)
