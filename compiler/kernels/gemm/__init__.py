"""GEMM: C[M,N] = A[M,K] B[N,K]^T in float16 or bfloat16, on sm_90a and sm_100a."""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.ir import UOp, program
from ptxflow.compiler.kernels.gemm import blackwell, cost, decisions, hopper
from ptxflow.compiler.kernels.gemm.combine import CTAS as COMBINING
from ptxflow.compiler.kernels.gemm.combine import ENTRY as COMBINE
from ptxflow.compiler.kernels.gemm.combine import Combine
from ptxflow.compiler.kernels.gemm.epilogue import Plain
from ptxflow.compiler.kernels.gemm.problem import SCHEMA
from ptxflow.compiler.kernels.gemm.tail import PARTS, gains
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gemm.wide import WIDE
from ptxflow.compiler.launch import Launch, Workspace


def kernel(p: Problem, s: Strategy, device: Device) -> hopper.Kernel | blackwell.Kernel:
    """The only kernel, or the first one: a builder per tensor-core generation."""
    make = blackwell.Kernel if device.has_tmem else hopper.Kernel
    return make(Tiling(p, s, device), Plain())


FAR = 37  # clusters, of which the last ones have greater numbers than lanes


def build(p: Problem, s: Strategy, device: Device) -> UOp:
    """The lowered kernel; and another where clusters share tiles."""
    k = kernel(p, s, device)
    return program(k.build(), Combine(k).build()) if k.t.share else k.build()


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grids and parameters, as expressions over M; twice as many parts as there are clusters."""
    k = kernel(p, s, device)
    only, clusters = k.t.launch(), k.t.launched
    if not k.t.share:
        return only
    size = 2 * k.t.cluster_size * s.tile_m * s.tile_n * 4
    parts = Workspace(PARTS, f"({clusters}) * {size}")
    return replace(only, then=(Combine(k).launch(clusters),), workspace=(parts,))


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Trip-count classes: K shorter than the ring, equal, and past its second turn; the tiles of a
    persistent block likewise against the accumulator buffers and turns, and none at all."""
    t = Tiling(p, s, device)
    stages: int = s.num_stages
    if t.split:  # each CTA's share; the last class is uneven
        plan = [(k * s.split_k, 1) for k in sorted({1, stages, 2 * stages + 1})]
        plan.append(((stages + 1) * s.split_k + 1, 1))
    elif not s.persistent:
        plan = [(k, 1) for k in sorted({1, stages - 1, stages, 2 * stages + 1})]
    else:
        wrap = 2 * s.acc_buffers * t.at_once + 1
        plan = [(1, 0), (1, wrap), (stages - 1 or 1, 2), (stages, wrap), (2 * stages + 1, 2)]
    out = []
    for k, tiles in plan:
        rows, columns = tiles * t.cluster_rows, t.cluster_columns
        values = {"k_trips": k, "tiles_n": 1, "M": rows}
        outputs = (("C", rows, columns),) if tiles else ()
        name = f"K {k} steps, {tiles} tile{'s' * (tiles != 1)}, {stages} stages"
        entry = t.entry if t.share else ""
        out.append(Trip(name, tuple(values.items()), outputs, entry))
    return out + (_shared(t) if t.share else [])


def _shared(t: Tiling) -> list[Trip]:
    """Behind whole tiles: parts of fewer steps than stages and of more, parts of two tiles, none, a
    whole tile. Sums: of nothing, of two parts, of the most."""
    stages, most, size, out = int(t.s.num_stages), int(t.s.tail), t.cluster_size, list[Trip]()

    def add(k: int, tiles: int, ctas: int, cluster: int, written: tuple[int, int], by: str) -> None:
        values = {"k_trips": k, "tiles_n": 1, "M": tiles * t.cluster_rows}
        values |= {"ctas": ctas * size, "ctaid": cluster}
        outputs = (("C", *written),) if all(written) else ()
        name = f"{by}, K {k} steps, cluster {cluster} of {ctas}, {tiles} tiles, {stages} stages"
        out.append(Trip(name, tuple(values.items()), outputs, by))

    first = t.cluster_rows, t.cluster_columns
    plan = [(2, 3, 2, 0), (2 * stages + 2, 5, 2, 0), (2 * stages + 1, 3, 2, 1), (stages, 7, 4, 1)]
    for k, tiles, clusters, cluster in (*plan, (2, most + 3, most + 2, most), (2, 9, 5, 0)):
        add(k, tiles, clusters, cluster, first if cluster == 0 else (0, 0), t.entry)
    for clusters in sorted({2, most}):
        written = (8, 64) if t.swapped else (64, 8)
        add(2 * most, 1, clusters * COMBINING, 0, written, COMBINE)
    add(2 * most, 2, 2 * COMBINING, 0, (0, 0), COMBINE)
    return out


def steps(s: Strategy) -> int:
    """K steps of trials: past a ring's first turn, and another stage than half as many end at; no
    fewer than who shares them."""
    found = {2: 5, 3: 4}.get(int(s.num_stages), int(s.num_stages) + 2)
    return max(found, int(s.get("tail", 1)))


def clusters_of(t: Tiling, count: int) -> int | tuple[int, ...]:
    """CTAs of so many clusters, and those that add up their parts."""
    ctas = count * t.cluster_size
    return (ctas, COMBINING * ctas) if t.share else ctas


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Tails along M, N and K, the ring past its first turn, two columns of tiles (so that their
    order matters), and two persistent clusters for six tiles, three each; five of eight tiles, of
    which three are shared."""
    t = Tiling(p, s, device)
    m = t.cluster_rows * (3 if t.share else 2 if s.persistent else 1) + 13
    n = 2 * t.cluster_columns - 8
    k = steps(s) * s.split_k * s.tile_k - 24  # not N
    small = replace(
        p, axes=(("M", m), ("N", n), ("K", k)), flops=2.0 * m * n * k, bytes=2.0 * (m + n) * k
    )
    return Trial(small, clusters_of(t, 5 if t.share else 2) if s.persistent else None)


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """As many columns of tiles as have the same divisions; last tiles with one row of C, of the
    last of 37 clusters; with all of them, and some of a warpgroup's second 64 (the trial's has some
    of a warp's second 8); two raster groups of rows and a part of a third that lacks a row, by
    seven clusters, the last of which has fewer tiles; a ring beyond its 32nd turn. Shared tiles:
    also one of eight; six of 14 by eight clusters, as many as three quarters of a wave; none of
    four by five, which is more."""
    t = Tiling(p, s, device)
    step = s.split_k * s.tile_k
    tail = -(-p["N"] // t.cluster_columns) * t.cluster_columns - p["N"]
    short, long = (n * step - p["K"] % s.tile_k for n in (steps(s), 33 * s.num_stages + 2))
    columns = range(2 + (tail > 0), 33)  # the second one whole
    shapes = tuple({"N": n * t.cluster_columns - tail, "K": short} for n in columns)
    rows = t.cluster_rows
    half = min(64, int(s.tile_n if t.swapped else s.tile_m) // 2)
    left = {n: 4 * (s.raster_group + 1) % n for n in (7, 5, 6, 8)}  # of two columns
    most = next((n for n in left if left[n] and gains(left[n], n)), 7) if t.share else 7
    one, several, four = (clusters_of(t, n) if s.persistent else None for n in (1, most, 4))
    far = clusters_of(t, FAR) if s.persistent else None
    sizes: tuple[Size, ...] = (
        Size({"M": (FAR - 1) * rows + 1}, far, (2,)),
        Size({"M": half + 5}, one),
        Size({"M": rows}, one),
        Size({"M": (2 * s.raster_group + 2) * rows - 1}, several),
        Size({"M": rows, "K": long}, clusters_of(t, 2) if t.share else four, (1,)),
    )
    if t.share:
        more = ((rows + 1, 5), (3 * rows + 5, 7), (7 * rows, 8))
        sizes = (*sizes, *(Size({"M": m}, clusters_of(t, n)) for m, n in more))
    return Trials((*shapes, {"N": p["N"], "K": p["K"]}), sizes)


GEMM = Family.of(
    SCHEMA,
    ("gemm",),
    decisions,
    cost,
    Kernels(build, trips, launch, trial, trials),
    more=WIDE,
)
