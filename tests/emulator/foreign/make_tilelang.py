"""Kernels that TileLang lowers to CUDA C++ for sm_90a and sm_100a, and nvcc compiles: no GPU.

    pip install tilelang==0.1.15 apache-tvm-ffi==0.1.12 z3-solver==4.15.4 nvidia-cuda-cccl==13.0.85

nvcc, cicc and the headers are those of the wheels nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-crt
and nvidia-cuda-runtime of CUDA 13.0, all in one environment.
"""

# mypy: ignore-errors

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import tilelang
import tilelang.language as T
from cuda.pathfinder import find_nvidia_binary_utility
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
from tvm.target import Target

COMPILER = f"tilelang {tilelang.__version__}"
SWIZZLES = (0, 32, 64, 128)
WHERE = r'T\.call_packed\("{}", (.*)\)'


@dataclass(frozen=True)
class Case:
    """`make` gives the program; tensors and what they must be as in fixtures.py."""

    name: str
    arch: int
    make: Callable[[], object]
    tensors: dict[str, dict]
    expect: dict[str, dict]


def tensor(shape: tuple[int, ...], dtype: str, fill: str, seed: int = 0) -> dict:
    return {"shape": [*map(str, shape)], "dtype": dtype, "fill": fill, "seed": seed}


def gemm(arch, dtype, tile, sizes, stages, threads, b_rows_are_n, tmem=False) -> Case:
    (bm, bn, bk), (m, n, k) = tile, sizes
    b_shape, b_tile = ((n, k), (bn, bk)) if b_rows_are_n else ((k, n), (bk, bn))

    def make():
        @T.prim_func
        def kernel(
            a: T.Tensor((m, k), dtype), b: T.Tensor(b_shape, dtype), c: T.Tensor((m, n), dtype)
        ):
            with T.Kernel(T.ceildiv(n, bn), T.ceildiv(m, bm), threads=threads) as (x, y):
                a_tile, b_part = T.alloc_shared((bm, bk), dtype), T.alloc_shared(b_tile, dtype)
                out = T.alloc_fragment((bm, bn), "float32")
                if tmem:
                    sums, done = T.alloc_tmem((bm, bn), "float32"), T.alloc_barrier(1)
                else:
                    sums = out
                    T.clear(sums)
                for i in T.Pipelined(T.ceildiv(k, bk), num_stages=stages):
                    T.copy(a[y * bm, i * bk], a_tile)
                    if b_rows_are_n:
                        T.copy(b[x * bn, i * bk], b_part)
                    else:
                        T.copy(b[i * bk, x * bn], b_part)
                    if tmem:
                        T.gemm(a_tile, b_part, sums, transpose_B=b_rows_are_n, clear_accum=i == 0,
                               mbar=done)  # fmt: skip
                    else:
                        T.gemm(a_tile, b_part, sums, transpose_B=b_rows_are_n)
                if tmem:
                    T.copy(sums, out)
                T.copy(out, c[y * bm, x * bn])

        return kernel

    name = f"tilelang_gemm{'_tmem' * tmem}_{bm}x{bn}x{bk}_{dtype}_{stages}s_{threads}"
    return Case(
        f"{name}_{'kn'[b_rows_are_n]}_sm{arch}", arch, make,
        {"a": tensor((m, k), dtype, "integers", 1), "b": tensor(b_shape, dtype, "integers", 2),
         "c": tensor((m, n), dtype, "nan")},
        {"c": {"recipe": "matmul_nt" if b_rows_are_n else "matmul", "of": ["a", "b"]}},
    )  # fmt: skip


def attention(arch, dtype, tile, keys, stages, threads) -> Case:
    t, s, d = tile + 8, 3 * keys - 24, 64
    scale = 1.4426950408889634 / d**0.5

    def make():
        @T.prim_func
        def kernel(
            q: T.Tensor((t, d), dtype), k: T.Tensor((s, d), dtype),
            v: T.Tensor((s, d), dtype), o: T.Tensor((t, d), dtype),
        ):  # fmt: skip
            with T.Kernel(T.ceildiv(t, tile), threads=threads) as x:
                q_tile, k_tile = T.alloc_shared((tile, d), dtype), T.alloc_shared((keys, d), dtype)
                v_tile = T.alloc_shared((keys, d), dtype)
                scores = T.alloc_fragment((tile, keys), "float32")
                probs = T.alloc_fragment((tile, keys), dtype)
                out = T.alloc_fragment((tile, d), "float32")
                top, before = (
                    T.alloc_fragment((tile,), "float32"),
                    T.alloc_fragment((tile,), "float32"),
                )
                part, total = (
                    T.alloc_fragment((tile,), "float32"),
                    T.alloc_fragment((tile,), "float32"),
                )
                T.copy(q[x * tile, 0], q_tile)
                T.clear(out)
                T.clear(total)
                T.fill(top, -1e30)
                for i in T.Pipelined(T.ceildiv(s, keys), num_stages=stages):
                    T.copy(k[i * keys, 0], k_tile)
                    for r, j in T.Parallel(tile, keys):
                        scores[r, j] = T.if_then_else(i * keys + j < s, 0.0, -1e30)
                    T.gemm(q_tile, k_tile, scores, transpose_B=True)
                    T.copy(top, before)
                    T.reduce_max(scores, top, dim=1, clear=False)
                    for r in T.Parallel(tile):
                        before[r] = T.exp2((before[r] - top[r]) * scale)
                    for r, j in T.Parallel(tile, keys):
                        scores[r, j] = T.exp2((scores[r, j] - top[r]) * scale)
                    T.reduce_sum(scores, part, dim=1)
                    for r in T.Parallel(tile):
                        total[r] = total[r] * before[r] + part[r]
                    for r, j in T.Parallel(tile, d):
                        out[r, j] = out[r, j] * before[r]
                    T.copy(scores, probs)
                    T.copy(v[i * keys, 0], v_tile)
                    T.gemm(probs, v_tile, out)
                for r, j in T.Parallel(tile, d):
                    out[r, j] = out[r, j] / total[r]
                T.copy(out, o[x * tile, 0])

        return kernel

    shapes = {"q": (t, d), "k": (s, d), "v": (s, d), "o": (t, d)}
    return Case(
        f"tilelang_attention_{tile}x{keys}_{dtype}_{stages}s_{threads}_sm{arch}", arch, make,
        {x: tensor(shape, dtype, "nan" if x == "o" else "normal", i)
         for i, (x, shape) in enumerate(shapes.items(), 3)},
        {"o": {"recipe": "attention", "of": ["q", "k", "v"], "atol": 4e-3, "rtol": 2e-2}},
    )  # fmt: skip


def softmax(arch, dtype, rows, n, threads) -> Case:
    count = 2 * rows + 1

    def make():
        @T.prim_func
        def kernel(x: T.Tensor((count, n), dtype), y: T.Tensor((count, n), dtype)):
            with T.Kernel(T.ceildiv(count, rows), threads=threads) as i:
                own = T.alloc_fragment((rows, n), "float32")
                top, total = (
                    T.alloc_fragment((rows,), "float32"),
                    T.alloc_fragment((rows,), "float32"),
                )
                T.copy(x[i * rows, 0], own)
                T.reduce_max(own, top, dim=1)
                for r, j in T.Parallel(rows, n):
                    own[r, j] = T.exp2((own[r, j] - top[r]) * 1.4426950408889634)
                T.reduce_sum(own, total, dim=1)
                for r, j in T.Parallel(rows, n):
                    own[r, j] = own[r, j] / total[r]
                T.copy(own, y[i * rows, 0])

        return kernel

    return Case(
        f"tilelang_softmax_{rows}x{n}_{dtype}_{threads}_sm{arch}", arch, make,
        {"x": tensor((count, n), dtype, "normal", 7), "y": tensor((count, n), dtype, "nan")},
        {"y": {"recipe": "softmax", "of": ["x"], "atol": 4e-3, "rtol": 2e-2}},
    )  # fmt: skip


def added(arch, dtype, block, threads) -> Case:
    n = 3 * block - 40

    def make():
        @T.prim_func
        def kernel(x: T.Tensor((n,), dtype), y: T.Tensor((n,), dtype), z: T.Tensor((n,), dtype)):
            with T.Kernel(T.ceildiv(n, block), threads=threads) as i:
                for j in T.Parallel(block):
                    z[i * block + j] = x[i * block + j] + y[i * block + j]

        return kernel

    return Case(
        f"tilelang_sum_{block}_{dtype}_{threads}_sm{arch}", arch, make,
        {"x": tensor((n,), dtype, "integers", 8), "y": tensor((n,), dtype, "integers", 9),
         "z": tensor((n,), dtype, "nan")},
        {"z": {"recipe": "sum", "of": ["x", "y"]}},
    )  # fmt: skip


def cases() -> Iterator[Case]:
    for arch in (90, 100):
        tiles = ((64, 64, 32), (128, 64, 64), (128, 128, 32), (64, 128, 64))
        for i, (tile, stages, rows) in enumerate(product(tiles, (1, 2, 3), (True, False))):
            (m, n, k), dtype = tile, ("float16", "bfloat16")[i // 2 % 2]
            sizes = m + 8, n + 8 * (i % 3), 3 * k + 8 * (i % 2)
            yield gemm(arch, dtype, tile, sizes, stages, (128, 256)[i // 4 % 2], rows)
        for tile, stages, rows in product(tiles[1:3], (1, 2), (True, False)) if arch == 100 else ():
            sizes = 2 * tile[0], tile[1], 3 * tile[2]
            yield gemm(arch, "bfloat16", tile, sizes, stages, 128, rows, tmem=True)
        for tile, keys, stages, dtype in product((64, 128), (32, 64), (1, 2), ("float16",)):
            yield attention(arch, dtype, tile, keys, stages, 128)
        for dtype, rows, threads in product(("float32", "float16"), (1, 4), (128, 256)):
            yield softmax(arch, dtype, rows, 512, threads)
        for dtype, block in product(("float32", "bfloat16"), (256, 1024)):
            yield added(arch, dtype, block, 128)


def compile_case(case: Case) -> tuple[str, dict]:
    """PTX, and the launch that TileLang's own host code makes."""
    target = Target({"kind": "cuda", "arch": f"sm_{case.arch}a"})
    with target:
        made = tilelang.lower(case.make(), target=target)
    host, (entry, device) = str(made.host_mod), _only(made.device_mod)
    maps = {}
    for found in re.findall(WHERE.format("__tvm_tensormap_create_tiled"), host):
        name, _, rank, held, *numbers = [x.strip() for x in found.split(",")]
        n = int(rank)
        dims, strides, box = (numbers[i * n : i * n + n] for i in range(3))
        swizzle = SWIZZLES[int(numbers[4 * n + 1])]
        maps[name] = {
            "kind": "tensor_map", "tensor": held, "dtype": case.tensors[held]["dtype"],
            "dims": dims, "strides": strides[1:], "box": [*map(int, box)], "swizzle": swizzle,
        }  # fmt: skip
    (call,) = re.findall(WHERE.format(entry), host)
    told = [*device.attrs["tirx.kernel_launch_params"]]
    given = [x.strip() for x in call.split(",")]
    names, numbers = given[: -len(told)], dict(zip(told, given[-len(told) :], strict=True))
    size = {axis: [int(numbers.get(f"{axis}.{x}", 1)) for x in "xyz"]
            for axis in ("blockIdx", "threadIdx")}  # fmt: skip
    threads = size["threadIdx"][0] * size["threadIdx"][1] * size["threadIdx"][2]
    launch = {
        "entry": entry, "grid": [*map(str, size["blockIdx"])], "block": threads,
        "cluster": [1, 1, 1], "smem_bytes": int(numbers.get("tirx.use_dyn_shared_memory", 0)),
        "params": [maps.get(n, {"kind": "pointer", "tensor": n}) for n in names],
    }  # fmt: skip
    side = {"compiler": COMPILER, "launch": launch, "axes": {}, "tensors": case.tensors,
            "expect": case.expect}  # fmt: skip
    return assembled(made.kernel_source, case.arch), side


def _only(module):
    ((name, function),) = module.functions.items()
    return name.name_hint, function


def assembled(source: str, arch: int) -> str:
    """PTX of CUDA C++, without comments."""
    nvcc = Path(find_nvidia_binary_utility("nvcc"))
    include = nvcc.parents[1] / "include"
    folders = [TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR, include, include / "cccl"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(source)
        command = [nvcc, "-ptx", "-std=c++17", f"-arch=sm_{arch}a", "-w", "-o", "kernel.ptx"]
        done = subprocess.run(
            [*command, *(f"-I{x}" for x in folders), path.name], cwd=folder, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"nvcc: {done.stderr.strip().splitlines()[0][:200]}")
        text = (Path(folder) / "kernel.ptx").read_text()
    lines = (re.sub(r"//.*", "", line).rstrip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line.strip())
