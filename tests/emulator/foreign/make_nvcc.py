"""Compile the CUDA C++ kernels beside this file to PTX fixtures, with nvcc 13.0.

    python tests/emulator/foreign/make_nvcc.py [path of nvcc]

Each fixture is NAME.ptx, with comments stripped, and NAME.json, as make_triton.py writes them.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE / "nvcc_kernels.cu"


@dataclass(frozen=True)
class Case:
    """One fixture. `arguments`, in order: a tensor's name, or `axis` of a 32-bit value."""

    kernel: str
    arch: str
    arguments: str
    grid: str
    block: int
    axes: dict[str, int]
    tensors: dict[str, dict[str, Any]]
    expect: dict[str, dict[str, Any]]
    cluster: int = 1
    smem_bytes: int = 0


def tensor(shape: str, dtype: str, fill: str, seed: int = 0) -> dict[str, Any]:
    return {"shape": shape.split(), "dtype": dtype, "fill": fill, "seed": seed}


def gemm(kernel: str, dtypes: str, tile: tuple[int, int], mnk: tuple[int, int, int]) -> Case:
    """A matrix product of small integers: the expected result is exact."""
    a, c = dtypes.split()
    return Case(
        kernel, "sm_90a", "a b c M N K", f"(-(-M // {tile[0]})) * (-(-N // {tile[1]}))",
        256 if kernel == "matmul_tiled" else 128, dict(zip("MNK", mnk, strict=True)),
        {"a": tensor("M K", a, "integers", 1), "b": tensor("K N", a, "integers", 2),
         "c": tensor("M N", c, "nan")},
        {"c": {"recipe": "matmul", "of": ["a", "b"]}},
    )  # fmt: skip


CASES = [
    gemm("matmul_tiled", "float32 float32", (16, 16), (20, 36, 40)),
    gemm("matmul_wmma", "float16 float32", (32, 32), (32, 64, 48)),
    gemm("matmul_mma", "bfloat16 bfloat16", (64, 32), (64, 64, 160)),
    Case(
        "reduction", "sm_90a", "x total counts N", "-(-N // 256)", 256, {"N": 600},
        {"x": tensor("N", "float32", "integers", 3), "total": tensor("1", "float32", "zeros"),
         "counts": tensor("2", "int32", "zeros")},
        {"total": {"recipe": "total", "of": ["x"]}, "counts": {"recipe": "counts", "of": ["x"]}},
    ),
    Case(
        "softmax", "sm_90a", "x y N", "R", 256, {"R": 2, "N": 1096},
        {"x": tensor("R N", "float16", "normal", 4), "y": tensor("R N", "float16", "nan")},
        {"y": {"recipe": "softmax", "of": ["x"], "atol": 1e-6, "rtol": 2e-3}},
    ),
    Case(
        "copy_async", "sm_90a", "x y N parts", "-(-N // (512 * parts))", 128,
        {"N": 3600, "parts": 3},
        {"x": tensor("N", "int32", "integers", 5), "y": tensor("N", "int32", "nan")},
        {"y": {"recipe": "copy", "of": ["x"]}}, smem_bytes=4096,
    ),
    Case(
        "bit_counts", "sm_90a", "x y N", "-(-N // 64)", 64, {"N": 200},
        {"x": tensor("N", "int32", "words", 11), "y": tensor("N 8", "int32", "nan")},
        {"y": {"recipe": "bit_counts", "of": ["x"]}},
    ),
    Case(
        "cluster_sum", "sm_100a", "x sums M N", "4", 128, {"M": 30, "N": 128},
        {"x": tensor("M N", "float32", "integers", 6), "sums": tensor("N", "float32", "nan")},
        {"sums": {"recipe": "column_sum", "of": ["x"]}}, cluster=4,
    ),
]  # fmt: skip


def strip(ptx: str) -> str:
    """PTX without comments, trailing blanks and empty lines."""
    lines = (re.sub(r"//.*", "", line).rstrip() for line in ptx.splitlines())
    return "".join(f"{line}\n" for line in lines if line.strip())


def main(nvcc: str) -> None:
    version = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True)
    release = version.stdout.split("release ")[1].split(",")[0]
    for case in CASES:
        command = [nvcc, "-ptx", "-std=c++17", f"-arch={case.arch}"]
        command += [f"-D{case.kernel}={case.kernel}", str(SOURCE), "-o", "-"]
        ptx = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        params = [
            {"kind": "pointer", "tensor": name} if name in case.tensors
            else {"kind": "scalar", "name": name, "value": name}
            for name in case.arguments.split()
        ]  # fmt: skip
        side = {
            "compiler": f"nvcc {release}", "kernel": case.kernel,
            "launch": {
                "entry": case.kernel, "grid": [case.grid, "1", "1"], "block": case.block,
                "cluster": [case.cluster, 1, 1], "smem_bytes": case.smem_bytes, "params": params,
            },
            "axes": case.axes, "tensors": case.tensors, "expect": case.expect,
        }  # fmt: skip
        name = f"nvcc_{case.kernel}_{case.arch.removesuffix('a').replace('_', '')}"
        (HERE / f"{name}.ptx").write_text(strip(ptx))
        (HERE / f"{name}.json").write_text(json.dumps(side, indent=1) + "\n")
        print(f"{name}: {len(ptx)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["nvcc"])
