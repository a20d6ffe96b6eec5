"""GEMM: C[M,N] = A[M,K] B[N,K]^T in float16 or bfloat16, on sm_90a and sm_100a."""

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.ir import Statement, program
from ptxflow.compiler.kernels.gemm import blackwell, cost, decisions, hopper
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.problem import SCHEMA
from ptxflow.compiler.kernels.gemm.tiling import SUM_ENTRY, SUMMED, Tiling
from ptxflow.compiler.kernels.gemm.wide import WIDE

FAR = 37  # clusters, of which the last ones have greater numbers than lanes


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernel, one builder per tensor-core generation; and what adds up parts of K."""
    make = blackwell.Kernel if device.has_tmem else hopper.Kernel
    t = Tiling(p, s, device)
    first = make(t, Plain()).build()
    return first if t.parts == 1 else program(first, hopper.Sum(t).build())


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Trip-count classes: K shorter than the ring, equal, and past its second turn; the tiles of a
    persistent block likewise against the accumulator buffers and turns, and none at all; the last
    CTA that adds up parts of the first tile."""
    t = Tiling(p, s, device)
    stages: int = s.num_stages
    shares = s.split_k * t.parts
    if shares > 1:  # each CTA's share; the last class is uneven
        plan = [(k * shares, 1) for k in sorted({1, stages, 2 * stages + 1})]
        plan.append(((stages + 1) * shares + 1, 1))
    elif not s.persistent:
        plan = [(k, 1) for k in sorted({1, stages - 1, stages, 2 * stages + 1})]
    else:
        wrap = 2 * s.acc_buffers * t.at_once + 1
        plan = [(1, 0), (1, wrap), (stages - 1 or 1, 2), (stages, wrap), (2 * stages + 1, 2)]
    out = []
    for k, tiles in plan:
        rows, columns = tiles * t.cluster_rows, t.cluster_columns
        values = {"k_trips": k, "tiles_n": 1, "M": rows}
        written = ("C", rows, columns)
        if t.parts > 1:
            written = ("parts", t.cluster_size, s.tile_m * s.tile_n)
        name = f"K {k} steps, {tiles} tile{'s' * (tiles != 1)}, {stages} stages"
        out.append(Trip(name, tuple(values.items()), (written,) * (tiles > 0), t.entry))
    if t.parts > 1:
        summed = (("C", 8, 64) if t.swapped else ("C", 64, 8),)
        last = t.cluster_size * s.tile_m * s.tile_n // SUMMED - 1  # CTA of the first tile
        held = ("tiles_n", 1), ("M", t.cluster_rows), ("ctaid", last)
        out.append(Trip("sums", held, summed, SUM_ENTRY))
    return out


def steps(s: Strategy) -> int:
    """K steps of trials: past a ring's first turn, and another stage than half as many end at."""
    return {2: 5, 3: 4}.get(int(s.num_stages), int(s.num_stages) + 2)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Tails along M, N and K, the ring past its first turn, two columns of tiles (so that their
    order matters), and two persistent clusters for six tiles, three each."""
    t = Tiling(p, s, device)
    m = t.cluster_rows * (2 if s.persistent else 1) + 13
    n = 2 * t.cluster_columns - 8
    k = steps(s) * s.split_k * t.parts * s.tile_k - 24  # not N
    small = replace(
        p, axes=(("M", m), ("N", n), ("K", k)), flops=2.0 * m * n * k, bytes=2.0 * (m + n) * k
    )
    return Trial(small, 2 * t.cluster_size if s.persistent else None)


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """As many columns of tiles as have the same divisions; last tiles with one row of C, of 37 and
    of two clusters; with all, and some of a warpgroup's second 64 (the trial's: of a warp's second
    8); two raster groups of rows and a part of a third that lacks a row, by seven clusters, the
    last of which has fewer tiles; a whole group, behind which is no tile; a ring beyond its 32nd
    turn."""
    t = Tiling(p, s, device)
    step = s.split_k * t.parts * s.tile_k
    tail = -(-p["N"] // t.cluster_columns) * t.cluster_columns - p["N"]
    short, long = (n * step - p["K"] % s.tile_k for n in (steps(s), 33 * s.num_stages + 2))
    columns = range(2 + (tail > 0), 33)  # the second one whole
    shapes = tuple({"N": n * t.cluster_columns - tail, "K": short} for n in columns)
    rows = t.cluster_rows
    half = min(64, int(s.tile_n if t.swapped else s.tile_m) // 2)
    one = t.cluster_size if s.persistent else None
    sizes = (
        Size({"M": (FAR - 1) * rows + 1}, one and FAR * one, (2,)),
        Size({"M": half + 5}, one),
        Size({"M": rows}, one),
        Size({"M": rows + 1}, one),
        Size({"M": (2 * s.raster_group + 2) * rows - 1}, one and 7 * one),
        Size({"M": s.raster_group * rows}, one and 7 * one, (1,)),
        Size({"M": rows, "K": long}, one and 4 * one, (1,)),
    )
    return Trials((*shapes, {"N": p["N"], "K": p["K"]}), sizes)


GEMM = Family.of(
    SCHEMA,
    ("gemm",),
    decisions,
    cost,
    Kernels(build, trips, lambda p, s, d: Tiling(p, s, d).launch(), trial, trials),
    more=WIDE,
)
