"""Emulator against hardware: the same kernels of emulation problems on a GPU.

Each sampled strategy's kernel runs in the emulator and on the GPU, on integer-valued data (the bits
must be equal) and on random normal data (sums differ by their order: the difference is in units of
its bound, one rounding of C and float32 accumulation).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.command import Parser, reports
from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.backend.runtime import LoadedKernel, RuntimeUnavailable, require_gpu
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.arguments import find_device, natural_int, parse_axes, positive_int
from ptxflow.env.tasks.definition import names
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.draws import draw

TIMEOUT = 60.0  # seconds for one kernel, emulation included


@dataclass(frozen=True)
class Agreement:
    """One kernel: bits that differ on integers, and the largest error of both on normal data."""

    key: str
    different: int
    normal_error: float  # largest |GPU - emulator| over the bound of the sum's order


def compare(task: tuple[Problem, Strategy, Device]) -> Agreement:
    """Run one strategy's kernel in both, on both kinds of data."""
    problem, strategy, device = task
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    ptx = write(maker.build(small.problem, strategy, device), device)
    launch = maker.launch(small.problem, strategy, device)
    if small.blocks is not None:
        launch = replace(launch, grid=(str(small.blocks), "1", "1"))
    axes = dict(small.problem.axes)
    kernel = LoadedKernel(launch, cache.assemble(ptx, device.arch).cubin)
    case = case_of(small.problem)
    tensors, (output,) = case.tensors, case.expected
    rng = np.random.default_rng(axes["K"])
    normal = {
        name: t if name == output else rng.standard_normal(t.shape).astype(t.dtype)
        for name, t in tensors.items()
    }
    results = []
    for data in (tensors, normal):
        emulated = {name: t.copy() for name, t in data.items()}
        emulate(ptx, launch, emulated, axes)
        results.append((emulated[output], _on_gpu(kernel, data, output, axes)))
    (ours, theirs), (ours_n, theirs_n) = results
    different = int((ours.view(np.uint16) != theirs.view(np.uint16)).sum())
    error = np.abs(ours_n.astype(np.float64) - theirs_n.astype(np.float64))
    bound = 2.0**-10 * np.abs(ours_n.astype(np.float64)) + axes["K"] * 2.0**-23 * 8
    return Agreement(strategy.key, different, float((error / bound).max()))


def _on_gpu(
    kernel: LoadedKernel, data: dict[str, NDArray[np.generic]], output: str, axes: dict[str, int]
) -> NDArray[np.generic]:
    import torch

    tensors = {name: torch.from_numpy(t.copy()).cuda() for name, t in data.items()}
    call = kernel.bind({name: t.data_ptr() for name, t in tensors.items()}, axes)
    call(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return tensors[output].cpu().numpy()


def arguments() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ptxflow agree",
        description=__doc__,
        epilog="example: ptxflow agree --definition gemm_n4096_k4096 --axes M=77 --samples 8",
    )
    gemms = [name for name in names() if name.startswith("gemm_")]
    add = parser.add_argument
    add("--definition", nargs="+", default=gemms, metavar="NAME|PATH", help="default: every gemm")
    add("--axes", nargs="+", default=["M=1,1000"], metavar="M=1,17", help="default: M=1,1000")
    add("--device", default="h200", help="h200 or h100 (default: h200)")
    add("--samples", type=positive_int, default=50,
        help="strategies, drawn uniformly (default: 50)")  # fmt: skip
    add("--seed", type=natural_int, default=0, help="of the draw (default: 0)")
    add("--jobs", type=positive_int, default=min(4, os.cpu_count() or 1),
        help="processes (default: 4)")  # fmt: skip
    return parser


@reports("agree", RuntimeUnavailable, ptxas.ToolMissing)
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if all bits agree on integers, 1 if not, 2 where it cannot run."""
    args = arguments().parse_args(argv)
    try:
        device = find_device(args.device)
        gpu = require_gpu(device)
        jobs = draw(args.definition, parse_axes(args.axes), device, args.samples, args.seed)
        found: list[Agreement] = []
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(compare, (p, s, device)) for p, s in jobs]
            done = as_completed(futures, timeout=TIMEOUT * len(jobs))
            for future in tqdm(done, total=len(jobs), desc="compare", unit="kernel"):
                found.append(future.result())
    except TimeoutError:
        print(f"agree: a kernel hangs: {len(found)} of {len(jobs)} came back", file=sys.stderr)
        os._exit(1)  # the pool would wait for it
    equal = sum(a.different == 0 for a in found)
    worst = max(a.normal_error for a in found)
    print(f"{gpu.name}, driver {gpu.driver}: {equal} of {len(found)} kernels agree bit for bit on")
    print("integer-valued data; on random normal data the largest difference is")
    print(f"{worst:.2f} of the bound (one rounding of C, and float32 sums in another order)")
    for a in found:
        if a.different:
            print(f"  {a.key}: {a.different} elements differ")
    return 0 if equal == len(found) else 1
