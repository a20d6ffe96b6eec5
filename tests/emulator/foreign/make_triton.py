"""Compile the Triton kernels beside this file to PTX fixtures; needs no GPU and no torch.

    python3 -m venv /tmp/triton && /tmp/triton/bin/pip install triton==3.6.0
    /tmp/triton/bin/python tests/emulator/foreign/make_triton.py

Each fixture is NAME.ptx, with comments stripped and no line information, and NAME.json: the launch
as ptxflow.compiler.launch writes it, the axes, and recipes of the tensors and the expected result.
"""

# mypy: ignore-errors

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"}

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

import triton_kernels  # isort: skip

try:
    import gluon_kernels  # isort: skip
except ImportError:  # Gluon's names change from release to release; these are of 3.6
    gluon_kernels = None

HERE = Path(__file__).parent
COMPILER = f"triton {triton.__version__}"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
RECIPES = {(True, True): "matmul_nt", (True, False): "matmul", (False, True): "matmul_tt"}
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Case:
    """One fixture. `arguments`: name -> `tensordesc<dtype[block]>`, `*dtype` or an axis."""

    name: str
    arch: int
    kernel: str
    arguments: dict[str, str]
    constants: dict[str, int | float | bool]
    grid: str
    axes: dict[str, int]
    tensors: dict[str, dict]
    expect: dict[str, dict]
    options: dict[str, int] = field(default_factory=dict)


def tensor(shape: list[str], dtype: str, fill: str, seed: int = 0) -> dict:
    return {"shape": shape, "dtype": DTYPES[dtype], "fill": fill, "seed": seed}


def gemm(arch, kind, dtype, tile, mnk, warps, stages, a_rows_are_m=True, b_rows_are_n=True) -> Case:
    """A matrix product of small integers: the expected result is exact."""
    m, n, k = tile
    a_shape = ["M", "K"] if a_rows_are_m else ["K", "M"]
    b_shape = ["N", "K"] if b_rows_are_n else ["K", "N"]
    constants = {"BM": m, "BN": n, "BK": k}
    if kind == "pointers":
        arguments = {f"{x}_ptr": f"*{dtype}" for x in "abc"}
    else:
        sizes = {"M": m, "N": n, "K": k}
        shapes = {"a": a_shape, "b": b_shape, "c": ["M", "N"]}
        blocks = {x: [sizes[axis] for axis in shape] for x, shape in shapes.items()}
        arguments = {f"{x}_desc": f"tensordesc<{dtype}{block}>" for x, block in blocks.items()}
    if kind == "specialised":
        del arguments["c_desc"]
        arguments["c_ptr"] = f"*{dtype}"
    if kind == "tma":
        constants |= {"A_ROWS_ARE_M": a_rows_are_m, "B_ROWS_ARE_N": b_rows_are_n}
    tiles = f"(-(-M // {m})) * (-(-N // {n}))"
    name = f"triton_{kind}_{m}x{n}x{k}_{dtype}_sm{arch}"
    return Case(
        name, arch, f"matmul_{kind}", arguments | {x: x for x in "MNK"}, constants,
        "2" if kind == "persistent" else tiles,
        dict(zip("MNK", mnk, strict=True)),
        {
            "a": tensor(a_shape, dtype, "integers", 1),
            "b": tensor(b_shape, dtype, "integers", 2),
            "c": tensor(["M", "N"], dtype, "nan"),
        },
        {"c": {"recipe": RECIPES[a_rows_are_m, b_rows_are_n], "of": ["a", "b"]}},
        {"num_warps": warps, "num_stages": stages},
    )  # fmt: skip


def attention(arch: int, dtype: str, tile: int, keys: int, warps: int) -> Case:
    block = {"q": tile, "k": keys, "v": keys, "o": tile}
    sizes = {"q": "T", "k": "S", "v": "S", "o": "T"}
    tensors = {
        x: tensor([rows, "D"], dtype, "nan" if x == "o" else "normal", i)
        for i, (x, rows) in enumerate(sizes.items(), 3)
    }
    return Case(
        f"triton_attention_{tile}x{keys}_{dtype}_sm{arch}", arch, "attention",
        {f"{x}_desc": f"tensordesc<{dtype}[{b}, 64]>" for x, b in block.items()} | {"S": "S"},
        {"BM": tile, "BN": keys, "D": 64, "SCALE_LOG2": LOG2_E / 8},
        f"-(-T // {tile})", {"T": tile + 8, "S": 3 * keys - 24, "D": 64}, tensors,
        {"o": {"recipe": "attention", "of": ["q", "k", "v"], "atol": 4e-3, "rtol": 1e-2}},
        {"num_warps": warps, "num_stages": 2},
    )  # fmt: skip


def softmax(arch: int, dtype: str) -> Case:
    return Case(
        f"triton_softmax_{dtype}_sm{arch}", arch, "softmax",
        {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "N": "N"}, {"BLOCK": 1024},
        "R", {"R": 3, "N": 800},
        {"x": tensor(["R", "N"], dtype, "normal", 7), "y": tensor(["R", "N"], dtype, "nan")},
        {"y": {"recipe": "softmax", "of": ["x"], "atol": 1e-6, "rtol": 2e-3}},
        {"num_warps": 4},
    )  # fmt: skip


def reduction(arch: int) -> Case:
    return Case(
        f"triton_reduction_fp32_sm{arch}", arch, "reduction",
        {"x_ptr": "*fp32", "rows_ptr": "*fp32", "columns_ptr": "*fp32", "M": "M", "N": "N"},
        {"BM": 32, "BN": 128}, "-(-M // 32)", {"M": 70, "N": 112},
        {
            "x": tensor(["M", "N"], "fp32", "integers", 8),
            "rows": tensor(["M"], "fp32", "nan"),
            "columns": tensor(["N"], "fp32", "zeros"),
        },
        {"rows": {"recipe": "row_max", "of": ["x"]},
         "columns": {"recipe": "column_sum", "of": ["x"]}},
        {"num_warps": 8},
    )  # fmt: skip


def pair(m: int, n: int, k: int) -> Case:
    """cta_group::2: a pair of CTAs multiplies a tile of m rows; two programs of one tile."""
    return Case(
        f"gluon_pair_{m}x{n}x{k}_bf16_sm100", 100, "matmul_pair",
        {f"{x}_ptr": "*bf16" for x in "abc"}, {"BM": m, "BN": n, "BK": k},
        "2", {"M": 2 * m, "N": n, "K": k},
        {
            "a": tensor(["M", "K"], "bf16", "integers", 9),
            "b": tensor(["K", "N"], "bf16", "integers", 10),
            "c": tensor(["M", "N"], "bf16", "nan"),
        },
        {"c": {"recipe": "matmul", "of": ["a", "b"]}},
        {"num_warps": 4, "num_ctas": 2},
    )  # fmt: skip


CASES = [
    case
    for arch in (90, 100)
    for case in (
        gemm(arch, "tma", "fp16", (128, 128, 64), (136, 128, 328), 4, 3),
        gemm(arch, "tma", "bf16", (64, 64, 64), (64, 120, 200), 4, 2, b_rows_are_n=False),
        gemm(arch, "tma", "bf16", (128, 256, 64), (120, 264, 264), 8, 4),
        gemm(arch, "tma", "fp16", (128, 64, 32), (136, 64, 168), 4, 3, a_rows_are_m=False),
        # For sm_90, Triton 3.6 splits a specialised tile of 128 rows between two warpgroups, but
        # reports the whole tile's TMA box, loads halves, and stores the lower one at row 128.
        gemm(arch, "specialised", "fp16", (64 if arch == 90 else 128, 128, 64), (128, 136, 264),
             4, 3),
        gemm(arch, "pointers", "fp16", (16 if arch == 90 else 128, 64, 64), (40, 80, 208), 4, 3,
             b_rows_are_n=False),
        attention(arch, "fp16" if arch == 90 else "bf16", 64 if arch == 90 else 128, 64, 4),
    )
] + [
    gemm(100, "persistent", "fp16", (128, 64, 64), (264, 120, 136), 4, 3),
    pair(256, 128, 64),
    pair(128, 128, 64),
    softmax(90, "fp32"),
    reduction(90),
]  # fmt: skip


def parameters(case: Case, metadata) -> list[dict]:
    """The kernel's parameters in order, with those that Triton's launcher adds."""
    out: list[dict] = []
    maps = iter(metadata.tensordesc_meta or ())

    def scalar(name: str, value: str) -> None:
        out.append({"kind": "scalar", "name": name, "value": value})

    for argument, kind in case.arguments.items():
        if not kind.startswith(("tensordesc", "*")):
            scalar(argument, kind)
            continue
        name = argument.rpartition("_")[0]
        if kind.startswith("*"):
            out.append({"kind": "pointer", "tensor": name})
            continue
        declared, held = case.tensors[name], next(maps)
        rows, columns = declared["shape"]
        out.append({
            "kind": "tensor_map", "tensor": name, "dtype": declared["dtype"],
            "dims": [columns, rows], "strides": [f"{columns} * {held['elem_size']}"],
            "box": held["block_size"][::-1], "swizzle": (0, 32, 64, 128)[held["swizzle"]],
        })  # fmt: skip
        for axis, size in enumerate((rows, columns)):
            scalar(f"{name}_shape_{axis}", size)
        scalar(f"{name}_stride_0", columns)
        scalar(f"{name}_stride_1", "1")
    assert not metadata.global_scratch_size and not metadata.profile_scratch_size
    scalar("global_scratch", "0")
    scalar("profile_scratch", "0")
    return out


def strip(ptx: str) -> str:
    """PTX without comments, trailing blanks and empty lines."""
    lines = (re.sub(r"//.*", "", line).rstrip() for line in ptx.splitlines())
    return "".join(f"{line}\n" for line in lines if line.strip())


def compile_case(case: Case) -> tuple[str, dict]:
    signature = {
        name: kind if kind.startswith(("tensordesc", "*")) else "i32"
        for name, kind in case.arguments.items()
    } | dict.fromkeys(case.constants, "constexpr")
    aligned = {  # what Triton's launcher finds out about pointers and multiples of 16
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(case.arguments.values())
        if kind.startswith("*") or case.axes.get(kind, 1) % 16 == 0
    }
    module, ast = triton_kernels, ASTSource
    if case.name.startswith("gluon"):
        module, ast = gluon_kernels, GluonASTSource
    source = ast(getattr(module, case.kernel), signature, case.constants, aligned)
    kernel = triton.compile(source, GPUTarget("cuda", case.arch, 32), case.options)
    metadata = kernel.metadata
    grid = case.grid if metadata.num_ctas == 1 else f"({case.grid}) * {metadata.num_ctas}"
    launch = {
        "entry": metadata.name, "grid": [grid, "1", "1"], "block": metadata.num_warps * 32,
        "cluster": [metadata.num_ctas, 1, 1], "smem_bytes": metadata.shared,
        "params": parameters(case, metadata),
    }  # fmt: skip
    side = {
        "compiler": COMPILER, "kernel": case.kernel,
        "constants": case.constants, "options": case.options, "launch": launch,
        "axes": case.axes, "tensors": case.tensors, "expect": case.expect,
    }  # fmt: skip
    return strip(kernel.asm["ptx"]), side


def main() -> None:
    for case in CASES:
        ptx, side = compile_case(case)
        (HERE / f"{case.name}.ptx").write_text(ptx)
        (HERE / f"{case.name}.json").write_text(json.dumps(side, indent=1) + "\n")
        print(f"{case.name}: {len(ptx)} bytes, {side['launch']['block']} threads")


if __name__ == "__main__":
    main()
