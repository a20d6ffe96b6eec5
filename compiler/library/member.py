"""Compiled kernels as members of a library, and the library of a single one."""

from collections.abc import Iterable, Mapping
from typing import Any

from ptxflow.compiler.backend.runtime import CAPABILITY
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.device import Device
from ptxflow.compiler.library.manifest import Dispatch, File, Manifest, Member, Target


def target_of(device: Device) -> Target:
    return Target(device.name, device.arch, CAPABILITY[device.arch])


def contents(kernels: Iterable[CompiledKernel]) -> dict[str, bytes]:
    """The files of members, by name."""
    files = dict[str, bytes]()
    for kernel in kernels:
        key = kernel.strategy.key
        files |= {f"{key}.cubin": kernel.cubin, f"{key}.ptx": kernel.ptx.encode()}
    return files


def member(kernel: CompiledKernel, provenance: Mapping[str, Any]) -> Member:
    cubin, ptx = (File.of(name, data) for name, data in contents([kernel]).items())
    return Member(
        key=kernel.strategy.key,
        strategy=kernel.strategy.to_json(),
        launch=kernel.launch,
        cubin=cubin,
        ptx=ptx,
        registers=kernel.usage.registers,
        smem_bytes=kernel.launch.smem_bytes,
        provenance=provenance,
    )


def single(
    definition: Mapping[str, Any], kernel: CompiledKernel
) -> tuple[Manifest, dict[str, bytes]]:
    """The library of one kernel for all sizes of a definition (JSON), and its files by name."""
    only = (member(kernel, {"checked_at": dict(kernel.problem.axes)}),)
    manifest = Manifest(definition, target_of(kernel.device), {}, only, Dispatch((), (0,)))
    return manifest, contents([kernel])
