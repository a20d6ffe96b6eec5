"""Small libraries that no compiler made, for tests without a GPU."""

from __future__ import annotations

from ptxflow.compiler.launch import Launch, PointerParam, ScalarParam, TensorMapParam
from ptxflow.compiler.library.manifest import (
    Dispatch,
    DispatchAxis,
    File,
    Manifest,
    Member,
    Target,
)
from ptxflow.env.tasks.definition import load

H200 = Target("h200", "sm_90a", (9, 0))


def member(key: str, launch: Launch) -> Member:
    cubin, ptx = (File.of(f"{key}.{end}", f"{end} of {key}".encode()) for end in ("cubin", "ptx"))
    return Member(key, {"family": "test"}, launch, cubin, ptx, 64, launch.smem_bytes)


def contents(manifest: Manifest) -> dict[str, bytes]:
    """The files of members made by `member`."""
    return {
        f.name: f"{f.name.rpartition('.')[2]} of {f.name.rpartition('.')[0]}".encode()
        for f in manifest.files
    }


def gemm_launch(tile: int) -> Launch:
    """A product that maps A and B and stores C by its address."""
    return Launch(
        entry=f"gemm_{tile}",
        grid=(f"-(-M // {tile})", "N // 64", "1"),
        block=384,
        cluster=(2, 1, 1),
        smem_bytes=100_000,
        params=(
            TensorMapParam("A", "float16", ("K", "M"), ("2 * K",), (64, tile), 128),
            TensorMapParam("B", "float16", ("K", "N"), ("2 * K",), (64, 64), 128),
            PointerParam("C"),
            ScalarParam("m", "M"),
        ),
    )


GEMM = Manifest(
    definition=load("gemm_n128_k2048").to_json(),
    target=H200,
    ranges={"M": (1, 4096)},
    members=(member("a", gemm_launch(16)), member("b", gemm_launch(128))),
    dispatch=Dispatch((DispatchAxis("M", (64, 4096)),), (0, 1)),
    tools={"ptxflow": "0.1.0"},
)
FILES = contents(GEMM)
