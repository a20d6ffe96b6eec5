"""Kernels that Helion writes for Triton, which compiles them for sm_90a and sm_100a: no GPU.

    pip install helion==1.1.0 filecheck rich triton torch

Helion asks PyTorch what GPU there is: it is told of one, and given tensors without data.
"""

# mypy: ignore-errors

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from types import SimpleNamespace

os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"}

import torch

CAPABILITY = {90: (9, 0), 100: (10, 0)}
HERE = SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    warp_size=32, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472, gcnArchName="",
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip
torch.cuda.get_device_properties = lambda *_, **__: HERE
torch.cuda.get_device_capability = lambda *_, **__: (HERE.major, HERE.minor)
torch.cuda.get_device_name = lambda *_: HERE.name
torch.cuda.current_device, torch.cuda.device_count = lambda: 0, lambda: 1
torch.cuda.is_available, torch.cuda._lazy_init = lambda: True, lambda: None

import helion  # noqa: E402
import helion.language as hl  # noqa: E402
import triton  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests.emulator.foreign.make_triton import strip, tensor  # noqa: E402

COMPILER = f"helion {version('helion')}, triton {triton.__version__}"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def added(x, y):
    out = torch.empty_like(x)
    for t in hl.tile(x.size(0)):
        out[t] = x[t] + y[t]
    return out


def softmax(x):
    out = torch.empty_like(x)
    for t in hl.tile(x.size(0)):
        out[t, :] = torch.softmax(x[t, :].to(torch.float32), dim=1).to(x.dtype)
    return out


def matmul(a, b):
    out = torch.empty([a.size(0), b.size(1)], dtype=a.dtype, device=a.device)
    for m, n in hl.tile([a.size(0), b.size(1)]):
        total = hl.zeros([m, n], dtype=torch.float32)
        for k in hl.tile(a.size(1)):
            total = torch.addmm(total, a[m, k], b[k, n])
        out[m, n] = total.to(a.dtype)
    return out


@dataclass(frozen=True)
class Case:
    """`expect` is as in fixtures.py; the last tensor is what the kernel returns."""

    name: str
    arch: int
    function: Callable
    config: dict
    dtype: str
    tensors: dict[str, dict]
    expect: dict[str, dict]


def cases() -> Iterator[Case]:
    def case(arch, function, dtype, config, shapes, fill, recipe):
        tensors = {x: tensor([*map(str, s)], dtype, fill if i < len(shapes) - 1 else "nan", i)
                   for i, (x, s) in enumerate(shapes.items())}  # fmt: skip
        *inputs, out = shapes
        blocks = "x".join(map(str, config["block_sizes"]))
        name = f"helion_{function.__name__}_{blocks}_{dtype}_{config['num_warps']}w"
        expect = {out: {"recipe": recipe, "of": inputs}}
        if fill == "normal":
            expect[out] |= {"atol": 4e-3, "rtol": 2e-2}
        return Case(f"{name}_sm{arch}", arch, function, config, dtype, tensors, expect)

    for arch in (90, 100):
        for dtype, block, warps in product(DTYPES, (128, 1024), (1, 4)):
            config, n = {"block_sizes": [block], "num_warps": warps}, (3 * block - 40,)
            yield case(arch, added, dtype, config, {"x": n, "y": n, "z": n}, "integers", "sum")
        for dtype, rows, warps in product(DTYPES, (1, 4), (1, 4)):
            config, shape = {"block_sizes": [rows], "num_warps": warps}, (2 * rows + 1, 500)
            yield case(arch, softmax, dtype, config, {"x": shape, "y": shape}, "normal", "softmax")
        tiles = ((16, 32, 32), (64, 64, 32), (64, 128, 64), (128, 64, 64), (128, 128, 32))
        for i, (dtype, (m, n, k)) in enumerate(product(("fp16", "bf16"), tiles)):
            config = {"block_sizes": [m, n, k], "num_warps": (4, 8)[i % 2], "num_stages": 2 + i % 3,
                      "indexing": ("pointer", "tensor_descriptor")[i % 2]}  # fmt: skip
            depth = 2 * k + 16
            shapes = {"a": (m + 8, depth), "b": (depth, n + 16), "c": (m + 8, n + 16)}
            yield case(arch, matmul, dtype, config, shapes, "integers", "matmul")


def compile_case(case: Case) -> tuple[str, dict]:
    """PTX, and the launch that Helion's own host code makes."""
    HERE.major, HERE.minor = CAPABILITY[case.arch]
    *inputs, out = case.tensors
    kernel = helion.kernel(case.function, config=helion.Config(**case.config))
    with FakeTensorMode():
        held = {x: torch.empty([*map(int, case.tensors[x]["shape"])], dtype=DTYPES[case.dtype],
                               device="cuda") for x in inputs}  # fmt: skip
        bound = kernel.bind(tuple(held.values()))
        told = []
        code = bound.to_triton_code(bound._config or helion.Config(**case.config))
        space = _module(code)
        result = space[case.function.__name__](
            *held.values(), _launcher=lambda k, grid, *args, **options: told.append(
                (k, grid, args, options))
        )  # fmt: skip
    ((jitted, grid, args, options),) = told
    named = {id(t): x for x, t in (held | {out: result}).items()}
    signature, constants, params = {}, {}, []
    for parameter, value in zip(jitted.params, args, strict=True):
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{case.dtype}"
            params.append({"kind": "pointer", "tensor": named[id(value)]})
        else:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values())
               if kind[0] == "*"}  # fmt: skip
    source = ASTSource(jitted, signature, constants, aligned)
    options = {n: x for n, x in options.items() if n in ("num_warps", "num_stages")}
    made = triton.compile(source, GPUTarget("cuda", case.arch, 32), options)
    zero, tensors = {"kind": "scalar", "value": "0"}, dict(case.tensors)
    scratch = zero | {"name": "global_scratch"}
    if size := made.metadata.global_scratch_size:  # tensor maps that CTAs make
        tensors["scratch"] = {"shape": [str(size * grid[0] // 4)], "dtype": "int32",
                              "fill": "zeros", "seed": 0}  # fmt: skip
        scratch = {"kind": "pointer", "tensor": "scratch"}
    launch = {
        "entry": made.metadata.name, "grid": [*map(str, (*grid, 1, 1)[:3])],
        "block": made.metadata.num_warps * 32, "cluster": [1, 1, 1],
        "smem_bytes": made.metadata.shared,
        "params": [*params, scratch, zero | {"name": "profile_scratch"}],
    }  # fmt: skip
    side = {"compiler": COMPILER, "launch": launch, "axes": {}, "tensors": tensors,
            "expect": case.expect}  # fmt: skip
    return strip(made.asm["ptx"]), side


def _module(code: str) -> dict:
    """Triton reads the sources of its functions from files."""
    import importlib.util
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(code)
    spec = importlib.util.spec_from_file_location("written", file.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)
