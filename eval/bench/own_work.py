"""Kernels that borrow: torch's own operations are refused while a kernel is checked.

A Solution is Python code, and could call the reference that it is compared with. Inside `own_work`
tensors may be made, viewed and copied; whatever else torch is asked to compute is not the kernel's
own work. What a Solution launches through the driver is not seen here, and is what is wanted.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

#: what a launcher may ask torch for: memory, views of it, copies
MEMORY = """
    alias as_strided clone copy_ detach empty empty_like empty_strided expand fill_ full is_pinned
    lift_fresh new_empty new_empty_strided new_full new_zeros ones permute record_stream reshape
    resize_ select slice split squeeze t transpose unbind unsqueeze view zero_ zeros zeros_like
    _reshape_alias _to_copy _unsafe_view
"""
ALLOWED = frozenset(MEMORY.split())


class Borrowed(RuntimeError):
    """A kernel let torch compute; the message names the operation."""


class own_work(TorchDispatchMode):
    """Borrowed, at the first operation of torch that computes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        name = str(func).split(".")[1]
        if name not in ALLOWED:
            raise Borrowed(f"calls torch's {name}: what it returns is not its own work")
        return func(*args, **(kwargs or {}))
