"""What nvMatmulHeuristics says of GEMMs: `python -m ptxflow.eval.study.judge --out FILE.tsv`.

An optional peer, NVIDIA's own model of its GPUs (`pip install nvidia-matmul-heuristics==0.1.0.27`,
CPU only, its own licence): its output is committed, numbers alone, so that `b200_page` needs
nothing of it. Of each workload, row-major operands of 16 bits and float32 accumulation: the best
that it proposes, of the product and of the product transposed, and its estimate of each tile.
"""

import argparse
import ctypes
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.files import write_whole
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.training_set import GEMM

TILES = tuple(itertools.product((64, 128), (32, 64, 96, 128, 160, 192, 224, 256)))
CLUSTERS = ((1, 1), (2, 1), (1, 2))  # that our kernels have, too
ROWS = (16, 128, 512, 1024, 4096)
GPUS = {"b200": "B200", "h200": "H200_SXM"}
ALL = 4096  # more than it ever proposes
PRECISION = b"HSH"
HEAD = ("gpu", "m", "n", "k", "best", "transposed", *(f"{m}x{n}" for m, n in TILES))


@dataclass(frozen=True)
class Estimate:
    """Of one GPU and workload, in microseconds: the best proposal, that of the transposed product,
    and by tile (rows, columns of a CTA) the best of CLUSTERS, splits apart."""

    gpu: str
    shape: tuple[int, int, int]  # M, N, K
    best: float
    transposed: float
    tiles: dict[tuple[int, int], float]


def workloads() -> Iterator[tuple[int, int, int]]:
    """(M, N, K) of 40 products: ROWS of each GEMM definition."""
    for name in GEMM.definitions:
        constant = load(name).const_axes
        yield from ((m, constant["N"], constant["K"]) for m in ROWS)


def read(path: Path) -> list[Estimate]:
    """BadInput where the file is not one of these tables."""
    try:
        head, *rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
        if tuple(head) != HEAD:
            raise ValueError("other columns")
        return [Estimate(gpu, (int(m), int(n), int(k)), float(best), float(transposed),
                         dict(zip(TILES, map(float, tiles), strict=True)))
                for gpu, m, n, k, best, transposed, *tiles in rows]  # fmt: skip
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: no estimates: {error}") from None


class Judge:
    """The library for one GPU."""

    def __init__(self, gpu: str):
        try:
            import nvMatmulHeuristics as nv
        except ImportError:
            raise BadInput("pip install nvidia-matmul-heuristics==0.1.0.27") from None
        self.layout = nv.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
        self.lib: Any = nv.NvMatmulHeuristicsInterfaceEx(
            backend=nv.NvMatmulHeuristicsTarget.CUTLASS3,
            flags=nv.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
            gpu=nv.NvMatmulHeuristicsNvidiaGpu[gpu],
        )
        self.lib.loadInternalDiscoverySet(self.layout, PRECISION.decode())

    def best(self, m: int, n: int, k: int) -> float:
        """Microseconds of the fastest configuration that it proposes."""
        problem = self.lib.makeNvMatmulHeuristicsProblem(m, n, k, self.layout)
        found = self.lib.get(problem, ALL, precision=PRECISION.decode())
        return min(item["runtime"] for item in found) * 1e6

    def tile(self, m: int, n: int, k: int, tile: tuple[int, int]) -> float:
        """Microseconds of the fastest with this tile; it answers 0 to warps that do not fit."""
        problem = self.lib.makeNvMatmulHeuristicsProblem(m, n, k, self.layout)
        warps = itertools.product((8, 16, 32, 64, tile[1]), (32, 64))
        walks = itertools.product((1, 2, 4, 8), (0, 1))
        found = []
        for cluster, (columns, depth), (walk, order) in itertools.product(CLUSTERS, warps, walks):
            c = self.lib.nvmmhKernelConfiguration()
            c.cta[:], c.warp[:], c.instr[:] = (*tile, 64), (64, columns, depth), (64, 8, 16)
            c.cluster[:], c.gridSwizzle, c.ctaOrder = cluster, walk, order
            c.splitK, c.loadStages = 1, 4  # of which the estimate is independent
            found.append(self.lib.nvMatmulHeuristicsEstimateRuntime(
                self.lib.handle, PRECISION, ctypes.c_int(self.lib.target), ctypes.byref(problem),
                ctypes.byref(c), self.lib.hardware_descriptor))  # fmt: skip
        return min(filter(None, found)) * 1e6


@reports("judge")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.study.judge", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tsv")
    args = parser.parse_args(argv)
    lines = ["\t".join(HEAD)]
    for gpu, name in GPUS.items():
        judge = Judge(name)
        for m, n, k in workloads():
            best = judge.best(m, n, k), judge.best(n, m, k)
            us = (f"{v:.2f}" for v in (*best, *(judge.tile(m, n, k, t) for t in TILES)))
            lines.append("\t".join(map(str, (gpu, m, n, k, *us))))
    write_whole(args.out, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
