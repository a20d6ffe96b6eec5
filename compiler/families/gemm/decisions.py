"""The decisions of a GEMM kernel, in construction order, and the rules that make them legal.

C[M,N] = A[M,K] B[N,K]^T, 16-bit operands, float32 accumulation. A block computes tiles of
tile_m x tile_n; a CTA pair (cta_group 2) shares one MMA of 2*tile_m x tile_n.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.strategy import Decision, Fields, Problem, Resources, Rule

WARPGROUP = 128
ELEMENT = 2  # bytes of a float16 or bfloat16
MAX_TILE_WASTE = 2  # a tile may be at most this much larger than the padded problem
BARRIER_BYTES = 1024  # mbarriers and the TMEM slot live in one KiB ahead of the tiles
DIRECT, TMA = "direct", "tma"

DECISIONS = (
    Decision("cta_group", (1, 2), "CTAs that issue one MMA together (tcgen05 cta_group)"),
    Decision("tile_m", (64, 128, 256), "rows of C a CTA computes at a time"),
    Decision("tile_n", (64, 128, 192, 256), "columns of C a CTA computes at a time"),
    Decision("mma_n", (64, 128, 192, 256), "N of one MMA instruction"),
    Decision("consumers", (1, 2), "warpgroups: wgmma consumers on sm_90a, epilogue on sm_100a"),
    Decision("tile_k", (32, 64, 128), "elements of K in one pipeline stage"),
    Decision("swizzle", (64, 128), "bytes of the shared-memory swizzle atom"),
    Decision("cluster", ("1x1", "2x1", "1x2"), "CTAs of a cluster along M x N; operands multicast"),
    Decision("split_k", (1, 2, 4, 8), "CTAs of a cluster that share the K loop of a tile"),
    Decision("epilogue", (DIRECT, TMA), "registers to global memory, or staged and TMA-stored"),
    Decision("num_stages", (2, 3, 4, 5, 6, 7), "depth of the shared-memory ring"),
    Decision("warp_specialized", (0, 1), "own warps for loading and issuing"),
    Decision("persistent", (0, 1), "one wave of blocks that loop over tiles"),
    Decision("acc_buffers", (1, 2), "accumulators in TMEM, to overlap epilogue and MMA"),
    Decision("producer_regs", (0, 24, 40, 56), "setmaxnreg of the producer; 0: no register split"),
    Decision("raster_group", (1, 8), "rows of tiles walked together for L2 reuse"),
)


def cluster_shape(f: Fields) -> tuple[Any, Any]:
    """CTAs along M and along N."""
    return np.where(f.cluster == "2x1", 2, 1), np.where(f.cluster == "1x2", 2, 1)


def on_hopper(device: Device) -> bool:
    return not device.has_tmem


def stage_bytes(f: Fields) -> Any:
    """Shared memory of one stage: the CTA's rows of A, and its rows of B (half in a CTA pair)."""
    return (f.tile_m + f.tile_n // f.cta_group) * f.tile_k * ELEMENT


def staging_bytes(f: Fields) -> Any:
    """Shared memory of the output tile where it is TMA-stored."""
    return np.where(f.epilogue == TMA, f.tile_m * f.tile_n * ELEMENT, 0)


def split_piece(device: Device) -> int:
    """Accumulators of a thread that a K split sums and stores together: 8 columns of C."""
    return 4 if on_hopper(device) else 8


def partial_bytes(f: Fields) -> Any:
    """Shared memory of the float32 partial tile that CTAs of a K split exchange."""
    return np.where(f.split_k > 1, f.tile_m * f.tile_n * 4, 0)


def smem_bytes(f: Fields) -> Any:
    return BARRIER_BYTES + f.num_stages * stage_bytes(f) + staging_bytes(f) + partial_bytes(f)


def tiles(f: Fields, problem: Problem) -> Any:
    """Tiles of C."""
    return -(-problem["M"] // f.tile_m) * -(-problem["N"] // f.tile_n)


def warps(f: Fields, device: Device) -> Any:
    """Warps of a block: specialised kernels add one warpgroup that loads (and issues MMA)."""
    return 4 * (f.consumers + f.warp_specialized)


def accumulators(f: Fields, device: Device) -> Any:
    """float32 accumulators of a consumer thread: held (sm_90a), or read from TMEM (sm_100a)."""
    return f.tile_m // f.consumers * f.tile_n // WARPGROUP


def consumer_regs(f: Fields) -> Any:
    """What the consumers get when the producer keeps `producer_regs` (0: no split).

    The pool is the launch allotment times the warpgroups: 168 x 3 for three, 240 x 2 for two.
    """
    three = np.where(f.producer_regs == 56, 224, np.where(f.producer_regs == 40, 232, 240))
    two = np.where(f.producer_regs == 24, 240, np.where(f.producer_regs == 40, 232, 224))
    return np.where(f.producer_regs == 0, 0, np.where(f.consumers == 2, three, two))


def register_limit(f: Fields, device: Device) -> Any:
    """Registers a consumer thread can have: its setmaxnreg, or an even share of the file."""
    threads = 32 * warps(f, device)
    share = np.minimum(device.registers_per_sm // threads // 8 * 8, device.registers_per_thread)
    return np.where(f.producer_regs == 0, share, consumer_regs(f))


def registers_needed(f: Fields, device: Device) -> Any:
    """The registers a consumer thread cannot do without: accumulators, epilogue, addresses."""
    if on_hopper(device):
        held = accumulators(f, device)
        return held + 40 + 8 * ((held > 128) & (f.persistent == 1))
    return 96 + 0 * f.tile_n


def registers_taken(f: Fields, device: Device) -> Any:
    """What ptxas takes where it is free to: it hoists addresses of stores.

    Above ptxas' own figure for 99% of uniform draws; eval/survey.py counts the others.
    """
    hoisted = np.where(f.epilogue == DIRECT, 16 + 32 * f.persistent, 16 * f.persistent)
    parts = np.where(f.split_k > 1, split_piece(device) * f.split_k, 0)
    return np.minimum(registers_needed(f, device) + hoisted + parts, register_limit(f, device))


def tmem_columns(f: Fields, device: Device) -> Any:
    """TMEM columns allocated: a power of two from 32 that holds every accumulator."""
    if on_hopper(device):
        return 0 * f.tile_n
    needed = np.maximum(f.tile_m // 128, 1) * f.tile_n * f.acc_buffers
    return np.maximum(32, 2 ** np.ceil(np.log2(needed)).astype(np.int64))


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """Shared memory, registers, threads, TMEM columns and resident blocks per SM."""
    smem = smem_bytes(f)
    threads = 32 * warps(f, device)
    limit = register_limit(f, device)
    held = np.where(f.producer_regs == 0, registers_taken(f, device), limit)
    launch = np.where(
        f.producer_regs == 0, held, device.registers_per_sm // threads // 8 * 8
    )  # a split kernel is launched with an even share of the whole file
    by_smem = device.smem_per_sm // (smem + device.smem_reserved)
    by_regs = device.registers_per_sm // (launch * threads)
    by_warps = device.warps_per_sm * 32 // threads
    columns = tmem_columns(f, device)
    by_tmem = np.where(
        columns > 0, device.tmem_columns // np.maximum(columns, 1), device.blocks_per_sm
    )
    occupancy = np.minimum(np.minimum(by_smem, by_regs), np.minimum(by_warps, by_tmem))
    return Resources(smem, held, threads, columns, occupancy)


def _padded(extent: int, unit: int) -> int:
    return -(-extent // unit) * unit


def _rule(sentence: str, reads: str, legal: Any) -> Rule:
    return Rule(sentence, tuple(reads.split()), legal)


RULES = (
    _rule(
        "a CTA pair needs tcgen05 (sm_100a)",
        "cta_group",
        lambda f, p, d: (f.cta_group == 1) | d.has_tmem,
    ),
    _rule(
        "a CTA pair is a 2x1 cluster; a single CTA on sm_100a may multicast in any",
        "cta_group cluster",
        lambda f, p, d: (f.cta_group == 1) | (f.cluster == "2x1"),
    ),
    _rule(
        "an MMA of a CTA pair has M 256: tile_m 128",
        "cta_group tile_m",
        lambda f, p, d: (f.cta_group == 1) | (f.tile_m == 128),
    ),
    _rule(
        "tile_m beyond the padded M computes nothing useful",
        "tile_m",
        lambda f, p, d: f.tile_m <= max(64, MAX_TILE_WASTE * _padded(p["M"], 64)),
    ),
    _rule(
        "tile_n beyond the padded N computes nothing useful",
        "tile_n",
        lambda f, p, d: f.tile_n <= _padded(p["N"], 64),
    ),
    _rule(
        "one or two MMA instructions cover tile_n",
        "tile_n mma_n",
        lambda f, p, d: (f.tile_n == f.mma_n) | (f.tile_n == 2 * f.mma_n),
    ),
    _rule(
        "an MMA of a CTA pair covers tile_n, since each CTA holds one half of B's rows",
        "cta_group tile_n mma_n",
        lambda f, p, d: (f.cta_group == 1) | (f.tile_n == f.mma_n),
    ),
    _rule(
        "each wgmma warpgroup needs 64 rows, and its accumulators must fit 192 registers",
        "tile_m tile_n consumers",
        lambda f, p, d: d.has_tmem | ((f.tile_m >= 64 * f.consumers) & (accumulators(f, d) <= 192)),
    ),
    _rule(
        "the swizzle atom divides a row of the stage",
        "tile_k swizzle",
        lambda f, p, d: f.tile_k * ELEMENT % f.swizzle == 0,
    ),
    _rule(
        "a cluster wider than the problem has CTAs without work",
        "tile_m tile_n cluster",
        lambda f, p, d: (
            ((f.cluster != "2x1") | (f.tile_m < p["M"]))
            & ((f.cluster != "1x2") | (f.tile_n < p["N"]))
        ),
    ),
    _rule(
        "a cluster either splits K, or shares operands or MMAs",
        "cta_group cluster split_k",
        lambda f, p, d: (f.split_k == 1) | ((f.cta_group == 1) & (f.cluster == "1x1")),
    ),
    _rule(
        "splitting K is for problems with fewer tiles than the device has SMs",
        "tile_m tile_n split_k",
        lambda f, p, d: (f.split_k == 1) | (tiles(f, p) < d.sms),
    ),
    _rule(
        "every CTA of a K split needs two steps of its own",
        "tile_k split_k",
        lambda f, p, d: (f.split_k == 1) | (-(-p["K"] // f.tile_k) >= 2 * f.split_k),
    ),
    _rule(
        "the CTAs of a K split reduce even slices of each thread's accumulators",
        "tile_m tile_n consumers split_k",
        lambda f, p, d: (f.split_k == 1) | (accumulators(f, d) % (split_piece(d) * f.split_k) == 0),
    ),
    _rule(
        "a K split writes C from registers, once a launch, with no register split",
        "split_k epilogue persistent producer_regs",
        lambda f, p, d: (
            (f.split_k == 1)
            | ((f.epilogue == DIRECT) & (f.persistent == 0) & (f.producer_regs == 0))
        ),
    ),
    _rule(
        "a TMA store needs rows of C that are a multiple of 16 bytes",
        "epilogue",
        lambda f, p, d: (f.epilogue == DIRECT) | (p["N"] * ELEMENT % 16 == 0),
    ),
    _rule(
        "stages deeper than the K loop are never filled",
        "tile_k split_k num_stages",
        lambda f, p, d: (f.num_stages <= -(-p["K"] // f.tile_k) // f.split_k) | (f.num_stages == 2),
    ),
    _rule(
        "shared memory of the ring and the staged tile exceeds what a block may have",
        "cta_group tile_m tile_n tile_k split_k epilogue num_stages",
        lambda f, p, d: smem_bytes(f) <= d.smem_per_block,
    ),
    _rule(
        "a persistent kernel specialises its warps",
        "warp_specialized persistent",
        lambda f, p, d: (f.persistent == 0) | (f.warp_specialized == 1),
    ),
    _rule(
        "a persistent kernel needs more tiles than the device has SMs",
        "tile_m tile_n persistent",
        lambda f, p, d: (f.persistent == 0) | (tiles(f, p) > d.sms),
    ),
    _rule(
        "two accumulators are for persistent tcgen05 kernels",
        "persistent acc_buffers",
        lambda f, p, d: (f.acc_buffers == 1) | (d.has_tmem & (f.persistent == 1)),
    ),
    _rule(
        "the accumulators exceed the 512 columns of TMEM",
        "tile_m tile_n acc_buffers",
        lambda f, p, d: (not d.has_tmem) | (tmem_columns(f, d) <= d.tmem_columns),
    ),
    _rule(
        "two epilogue warpgroups that stage C share its 64-column blocks evenly",
        "tile_m tile_n consumers epilogue",
        lambda f, p, d: (
            (not d.has_tmem)
            | (f.consumers == 1)
            | (f.epilogue == DIRECT)
            | (f.tile_m == 256)
            | (f.tile_n % 128 == 0)
        ),
    ),
    _rule(
        "C has at most 2^32 elements, which a direct epilogue counts in 32 bits",
        "epilogue",
        lambda f, p, d: (f.epilogue == TMA) | (p["M"] * p["N"] < 2**32),
    ),
    _rule(
        "a register split needs a producer warpgroup",
        "warp_specialized producer_regs",
        lambda f, p, d: (f.producer_regs == 0) | (f.warp_specialized == 1),
    ),
    _rule(
        "accumulators, epilogue and addresses exceed the registers of a consumer thread",
        "tile_m tile_n consumers epilogue warp_specialized persistent producer_regs",
        lambda f, p, d: registers_needed(f, d) <= register_limit(f, d),
    ),
    _rule(
        "grouping rows of tiles needs at least two rows of tiles",
        "tile_m raster_group",
        lambda f, p, d: (f.raster_group == 1) | (f.tile_m < p["M"]),
    ),
)
