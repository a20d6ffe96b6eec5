"""Small libraries that no compiler made, for tests without a GPU."""

import ctypes
from pathlib import Path

import numpy as np

from ptxflow.compiler.launch import (
    GENERATOR,
    InputParam,
    Launch,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
    Workspace,
)
from ptxflow.compiler.library.call import Kernel
from ptxflow.compiler.library.manifest import (
    Dispatch,
    DispatchAxis,
    File,
    Manifest,
    Member,
    Target,
    write_library,
)
from ptxflow.env.tasks.definition import Definition, load, parse
from tests.library.fake import FakeDevice, FakeLibrary, Launched

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


def gemm(k: Launched) -> None:
    a, b = k.map(0, np.float16), k.map(1, np.float16)
    c = k.at(2, (k.word(3), 128), np.float16)
    c[:] = (a.astype(np.float32) @ b.astype(np.float32).T).astype(np.float16)


#: y = x * scale (+ state), in two kernels with a workspace; z counts rows; `rounds` is whole
AFFINE = parse(
    {
        "name": "affine",
        "op_type": "test",
        "axes": {"M": {"type": "var"}, "M1": {"type": "var"}, "N": {"type": "const", "value": 8}},
        "constraints": ["M1 == M + 1"],
        "inputs": {
            "x": {"shape": ["M", "N"], "dtype": "float32"},
            "marks": {"shape": ["M1"], "dtype": "int32"},
            "state": {"shape": ["M", "N"], "dtype": "float32", "optional": True},
            "scale": {"shape": None, "dtype": "float32"},
            "rounds": {"shape": None, "dtype": "int32"},
        },
        "outputs": {
            "y": {"shape": ["M", "N"], "dtype": "float32"},
            "z": {"shape": ["M"], "dtype": "int32"},
        },
    }
)
SMALL = {"block": 32, "cluster": (1, 1, 1), "smem_bytes": 0}
AFFINE_LAUNCH = Launch(
    entry="scaled", grid=("M", "1", "1"), **SMALL,  # type: ignore[arg-type]
    params=(PointerParam("x"), PointerParam("sums"), InputParam("scale", "float32"),
            ScalarParam("m", "M")),
    then=(
        Launch(
            entry="added", grid=("M", "1", "1"), **SMALL,  # type: ignore[arg-type]
            params=(PointerParam("sums"), PointerParam("state"), PresentParam("state"),
                    PointerParam("y"), PointerParam("z"), InputParam("rounds", "int32"),
                    ScalarParam("m", "M")),
        ),
    ),
    workspace=(Workspace("pad", "100"), Workspace("sums", "M * N * 4")),
)  # fmt: skip


def scaled(k: Launched) -> None:
    m = k.word(3)
    k.at(1, (m, 8), np.float32)[:] = k.at(0, (m, 8), np.float32) * k.word(2, ctypes.c_float)


def added(k: Launched) -> None:
    m = k.word(6)
    state = k.at(1, (m, 8), np.float32) if k.word(2) else 0
    k.at(3, (m, 8), np.float32)[:] = k.at(0, (m, 8), np.float32) + state
    k.at(4, (m,), np.int32)[:] = k.word(5, ctypes.c_int32)


def one_member(definition: Definition, launch: Launch, **ranges: tuple[int, int]) -> Manifest:
    made = member("only", launch)
    return Manifest(definition.to_json(), H200, ranges, (made,), Dispatch((), (0,)))


DRAW_LAUNCH = Launch(
    entry="draw", grid=("M", "1", "1"), **SMALL,  # type: ignore[arg-type]
    params=(PointerParam("x"), PointerParam("n"), *(RandomParam(w) for w in range(4))),
)  # fmt: skip
STATE_LAUNCH = Launch(
    entry="draw_state", grid=("M", "1", "1"), **SMALL,  # type: ignore[arg-type]
    params=(PointerParam("x"), PointerParam("n"), PointerParam(GENERATOR),
            *(RandomParam(w) for w in range(4)), PresentParam(GENERATOR)),
)  # fmt: skip
DRAW = parse(
    {
        "name": "draw_offset",
        "op_type": "test",
        "axes": {"M": {"type": "var"}},
        "inputs": {"x": {"shape": ["M"], "dtype": "float32"}},
        "outputs": {"n": {"shape": ["M"], "dtype": "int64"}},
    }
)


def draw(k: Launched) -> None:
    k.at(1, (4,), np.int64)[:] = [k.word(2 + w) for w in range(4)]


def draw_state(k: Launched) -> None:
    held = k.at(2, (4,), np.uint32).tolist() if k.word(7) else [0] * 4
    assert bool(k.word(2, ctypes.c_uint64)) == bool(k.word(7))
    k.at(1, (4,), np.int64)[:] = [k.word(3 + w) + held[w] for w in range(4)]


KERNELS = {
    "gemm_16": gemm,
    "gemm_128": gemm,
    "scaled": scaled,
    "added": added,
    "draw": draw,
    "draw_state": draw_state,
}


def loaded(
    folder: Path, manifest: Manifest, launcher: str = "ctypes", opaque: bool = False
) -> tuple[Kernel, FakeLibrary]:
    """A library written to a folder and loaded onto the device that is none."""
    write_library(folder, manifest, contents(manifest))
    library = FakeLibrary(KERNELS, opaque)
    return Kernel(folder, FakeDevice(library), launcher), library
