"""The decisions of a GEMM kernel, in construction order, and the rules that make them legal.

C[M,N] = A[M,K] B[N,K]^T, 16-bit operands, float32 accumulation. A block computes tiles of tile_m x
tile_n, in the terms of the MMA: tile_m rows of C by tile_n columns, or, with the operands swapped,
tile_m columns by tile_n rows. A CTA pair (cta_group 2) shares one MMA of 2*tile_m x tile_n.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.lower import TILE_ALIGN

WARPGROUP = 128
ELEMENT = 2  # bytes of a float16 or bfloat16
MAX_TILE_WASTE = 2  # a tile may be at most this much larger than the padded problem
MAX_ACCUMULATORS = 192  # of a thread: a full warpgroup of registers leaves room for no more
BARRIER_BYTES = 1024  # mbarriers and the TMEM slot live in one KiB ahead of the tiles
SWAPPED_BLOCK = 64  # columns of C that a warpgroup stages of a swapped tile
NARROW = 32  # columns: tiles with fewer are for swapped operands
SWAP_ROWS = 512  # of C at most, where swapped operands are offered
DIRECT, TMA, TMA_BLOCKS = "direct", "tma", "tma_blocks"
COOPERATIVE, PINGPONG = "cooperative", "pingpong"
CLUSTERS = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (1, 2)}
TILE_N = (8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256)

# sentences of rules that the wide space has otherwise, or not at all
SHARED = "shared memory of the ring and the staged tile exceeds what a block may have"
FEW_ROWS = f"swapped operands are for M up to {SWAP_ROWS}"
SMALLER = "a smaller tile_n would cover its side of the problem"
ROWS = f"a wgmma warpgroup needs 64 rows, and {MAX_ACCUMULATORS} registers at most to accumulate"
REGISTERS = "accumulators, epilogue and addresses exceed the registers of a consumer thread"
SWAPPED = "swapped operands leave C transposed in registers, from where it is written"
GROUPS = "a smaller group of tile rows would hold them all"
WALK = "swapped tiles walk along the tokens"

DECISIONS = (
    Decision("cta_group", (1, 2), "CTAs that issue one MMA together (tcgen05 cta_group)"),
    Decision("swap", (0, 1), "1: B's rows are the M side of the MMA, A's the N side (few tokens)"),
    Decision("tile_m", (64, 128, 256), "extent of a CTA's tile along the M side of the MMA"),
    Decision("tile_n", TILE_N, "extent along its N side, which one instruction covers"),
    Decision("consumers", (1, 2), "warpgroups: wgmma consumers on sm_90a, epilogue on sm_100a"),
    Decision(
        "schedule",
        (COOPERATIVE, PINGPONG),
        "wgmma warpgroups share each tile, or take turns: one stores while the other multiplies",
    ),
    Decision("tile_k", (32, 64, 128), "elements of K in one pipeline stage"),
    Decision("cluster", tuple(CLUSTERS), "CTAs along tile_m x tile_n; operands multicast"),
    Decision("split_k", (1, 2, 3, 4, 6, 8), "CTAs of a cluster that share the K loop of a tile"),
    Decision(
        "epilogue",
        (DIRECT, TMA, TMA_BLOCKS),
        "registers to global memory; or TMA-stored, the tile staged whole or by blocks of columns",
    ),
    Decision("num_stages", (2, 3, 4, 5, 6, 7), "depth of the shared-memory ring"),
    Decision("warp_specialized", (0, 1), "own warps for loading and issuing"),
    Decision("persistent", (0, 1), "one wave of blocks that loop over tiles"),
    Decision("acc_buffers", (1, 2), "accumulators in TMEM, to overlap epilogue and MMA"),
    Decision("producer_regs", (0, 24, 40), "setmaxnreg of the producer; 0: no register split"),
    Decision("raster_group", (1, 4, 8, 16), "rows of tiles walked together for L2 reuse"),
)


def _padded(extent: Any, unit: int) -> Any:
    return -(-extent // unit) * unit


def cluster_shape(f: Fields) -> tuple[Any, Any]:
    """CTAs along M and along N."""
    sizes = [
        np.select([f.cluster == c for c in CLUSTERS], [s[i] for s in CLUSTERS.values()])
        for i in (0, 1)
    ]
    return sizes[0], sizes[1]


def on_hopper(device: Device) -> bool:
    return not device.has_tmem


def stage_bytes(f: Fields) -> Any:
    """Shared memory of one stage: the CTA's rows of A, and its rows of B (half in a CTA pair)."""
    return (f.tile_m + f.tile_n // f.cta_group) * f.tile_k * ELEMENT


def swizzle(f: Fields) -> Any:
    """Bytes of the swizzle atom of a stage: a row of it, 128 at most."""
    return np.minimum(f.tile_k * ELEMENT, 128)


def sides(f: Fields, problem: Problem) -> tuple[Any, Any]:
    """Extents of the problem along the M side and the N side of the MMA."""
    m, n = problem["M"], problem["N"]
    return np.where(f.swap == 1, n, m), np.where(f.swap == 1, m, n)


def store_columns(f: Fields, device: Device) -> Any:
    """Columns of C that one of them stages: its own half where it holds half the columns."""
    halves = device.has_tmem & (f.consumers == 2) & (f.tile_m != 256)
    return f.tile_n // np.where(halves, 2, 1)


def store_block(columns: Any) -> Any:
    """Columns of a block of staged C, one swizzle atom: the widest that divides the columns."""
    return np.where(columns % 64 == 0, 64, np.where(columns % 32 == 0, 32, 16))


def staging_bytes(f: Fields, device: Device) -> Any:
    """Shared memory where C is staged: the whole tile, or two blocks of columns a warpgroup, of a
    swapped tile one."""
    columns = store_columns(f, device)
    whole = f.tile_m * f.tile_n * ELEMENT * tiles_at_once(f)
    blocks = whole // columns * 2 * store_block(columns)
    blocks = np.where(f.swap == 1, f.consumers * f.tile_n * SWAPPED_BLOCK * ELEMENT, blocks)
    return np.where(f.epilogue == TMA, whole, np.where(f.epilogue == TMA_BLOCKS, blocks, 0))


def split_piece(device: Device) -> int:
    """Accumulators of a thread that a K split sums and stores together: 8 columns of the tile."""
    return 4 if on_hopper(device) else 8


def reducers(f: Fields, device: Device) -> Any:
    """CTAs of a K split that sum: as many as can take even shares of a thread's pieces."""
    return np.gcd(f.split_k, accumulators(f, device) // split_piece(device))


def partial_bytes(f: Fields, device: Device) -> Any:
    """Shared memory of the float32 parts that the CTAs of a K split send to one that sums."""
    parts = f.tile_m * f.tile_n * 4 // reducers(f, device) * f.split_k
    return np.where(f.split_k > 1, parts, 0)


def smem_bytes(f: Fields, device: Device) -> Any:
    """Of a block: barriers, then each tile on its alignment (see compiler/lower.py)."""
    left = f.num_stages * f.tile_m * f.tile_k * ELEMENT
    right = _padded(f.num_stages * stage_bytes(f) - left, TILE_ALIGN)
    ring = left + right
    return BARRIER_BYTES + ring + staging_bytes(f, device) + partial_bytes(f, device)


def tiles(f: Fields, problem: Problem) -> Any:
    """Tiles of C."""
    along_m, along_n = sides(f, problem)
    return -(-along_m // f.tile_m) * -(-along_n // f.tile_n)


def warps(f: Fields, device: Device) -> Any:
    """Warps of a block: specialised kernels add one warpgroup that loads (and issues MMA)."""
    return 4 * (f.consumers + f.warp_specialized)


def tiles_at_once(f: Fields) -> Any:
    """Tiles whose accumulators a block's threads hold: one for each warpgroup that takes turns."""
    return np.where(f.schedule == PINGPONG, f.consumers, 1)


def accumulators(f: Fields, device: Device) -> Any:
    """float32 accumulators of a consumer thread: held (sm_90a), or read from TMEM (sm_100a)."""
    return f.tile_m * tiles_at_once(f) // f.consumers * f.tile_n // WARPGROUP


def consumer_regs(f: Fields) -> Any:
    """What the consumers get when the producer keeps `producer_regs` (0: no split).

    The pool is the launch allotment times the warpgroups: 240 x 2, 168 x 3 or 128 x 4.
    """
    given = np.where(f.producer_regs == 40, 232, 240) - 80 * (f.consumers == 3)
    return np.where(f.producer_regs == 0, 0, given)


def register_limit(f: Fields, device: Device) -> Any:
    """Registers a consumer thread can have: its setmaxnreg, or an even share of the file."""
    share = device.register_share(32 * warps(f, device))
    return np.where(f.producer_regs == 0, share, consumer_regs(f))


def registers_needed(f: Fields, device: Device) -> Any:
    """The registers a consumer thread cannot do without: accumulators, epilogue, addresses."""
    if on_hopper(device):
        held = accumulators(f, device)
        walking = 8 * ((held > 128) & (f.persistent == 1))
        return held + 40 + walking + 24 * ((held > 160) & (f.swap == 1))
    return 96 + 0 * f.tile_n


def registers_taken(f: Fields, device: Device) -> Any:
    """What ptxas takes where it is free to: it hoists addresses of stores.

    Above ptxas' own figure for 99% of uniform draws; eval/verify/survey.py counts the others.
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
    smem = smem_bytes(f, device)
    threads = 32 * warps(f, device)
    limit = register_limit(f, device)
    held = np.where(f.producer_regs == 0, registers_taken(f, device), limit)
    launch = np.where(
        f.producer_regs == 0, held, device.registers_per_sm // threads // 8 * 8
    )  # a split kernel is launched with an even share of the whole file
    columns = tmem_columns(f, device)
    resident = device.resident_blocks(smem, launch, threads, columns)
    return Resources(smem, held, threads, columns, resident)


def with_registers(f: Fields, plain: Resources, more: Any, device: Device) -> Resources:
    """A GEMM's resources where its threads hold so many more registers."""
    most = np.minimum(plain.registers + more, register_limit(f, device))
    held = np.where(f.producer_regs == 0, most, plain.registers)
    launch = np.where(f.producer_regs == 0, held, device.registers_per_sm // plain.threads // 8 * 8)
    resident = device.resident_blocks(plain.smem_bytes, launch, plain.threads)
    return replace(plain, registers=held, occupancy=np.minimum(plain.occupancy, resident))


def smaller_tile_n(f: Fields, device: Device) -> Any:
    """The next smaller choice of tile_n, 0 for the least there is."""
    least = np.where(f.swap == 1, 16 if device.has_tmem else 8, NARROW)
    below = np.array((0, *TILE_N[:-1]))[np.searchsorted(TILE_N, f.tile_n)]
    return np.where(below < least, 0, below)


def suffice(f: Fields, p: Problem, d: Device) -> Any:
    """Whether a consumer thread's registers do: of an only step of K ptxas makes no loop."""
    unrolled = 8 * on_hopper(d) * (p["K"] <= f.tile_k * f.split_k)
    return registers_needed(f, d) + unrolled <= register_limit(f, d)


RULES = (
    rule(
        "a CTA pair needs tcgen05 (sm_100a)",
        "cta_group",
        lambda f, p, d: (f.cta_group == 1) | d.has_tmem,
    ),
    rule(
        "a CTA pair is a 2x1 cluster; a single CTA on sm_100a may multicast in any",
        "cta_group cluster",
        lambda f, p, d: (f.cta_group == 1) | (f.cluster == "2x1"),
    ),
    rule(
        "an MMA of a CTA pair has M 256: tile_m 128",
        "cta_group tile_m",
        lambda f, p, d: (f.cta_group == 1) | (f.tile_m == 128),
    ),
    rule(FEW_ROWS, "swap", lambda f, p, d: (f.swap == 0) | (p["M"] <= SWAP_ROWS)),
    rule(
        "tile_m far beyond its side of the problem computes nothing useful",
        "swap tile_m",
        lambda f, p, d: f.tile_m <= np.maximum(64, MAX_TILE_WASTE * _padded(sides(f, p)[0], 64)),
    ),
    rule(SMALLER, "swap tile_n", lambda f, p, d: smaller_tile_n(f, d) < sides(f, p)[1]),
    rule(
        "tcgen05 takes N in steps of 16, a CTA pair in steps of 32",
        "cta_group tile_n",
        lambda f, p, d: (not d.has_tmem) | (f.tile_n % (16 * f.cta_group) == 0),
    ),
    rule(
        "narrow tiles are for swapped operands",
        "swap tile_n",
        lambda f, p, d: (f.swap == 1) | (f.tile_n >= NARROW),
    ),
    rule(
        "swapped tiles of tcgen05 fill all 128 lanes, once for each warpgroup",
        "swap tile_m consumers",
        lambda f, p, d: (
            (not d.has_tmem)
            | (f.swap == 0)
            | (f.tile_m == 128)
            | ((f.tile_m == 256) & (f.consumers == 2))
        ),
    ),
    rule(
        ROWS,
        "tile_m tile_n consumers schedule",
        lambda f, p, d: (
            d.has_tmem
            | (
                (f.tile_m * tiles_at_once(f) >= 64 * f.consumers)
                & (accumulators(f, d) <= MAX_ACCUMULATORS)
            )
        ),
    ),
    rule(
        "a cluster wider than the problem has CTAs without work",
        "swap tile_m tile_n cluster",
        lambda f, p, d: (
            (f.tile_m * (cluster_shape(f)[0] - 1) < sides(f, p)[0])
            & (f.tile_n * (cluster_shape(f)[1] - 1) < sides(f, p)[1])
        ),
    ),
    rule(
        "the CTAs of a cluster load shares of whole groups of eight rows",
        "tile_m tile_n cluster",
        lambda f, p, d: (
            (f.tile_m % (8 * cluster_shape(f)[1]) == 0)
            & (f.tile_n % (8 * cluster_shape(f)[0]) == 0)
        ),
    ),
    rule(
        "warpgroups take turns at the tiles of persistent wgmma kernels",
        "consumers schedule persistent",
        lambda f, p, d: (
            (f.schedule == COOPERATIVE)
            | ((not d.has_tmem) & (f.consumers == 2) & (f.persistent == 1))
        ),
    ),
    rule(
        "a cluster either splits K, or shares operands or MMAs",
        "cta_group cluster split_k",
        lambda f, p, d: (f.split_k == 1) | ((f.cta_group == 1) & (f.cluster == "1x1")),
    ),
    rule(
        "splitting K is for problems with fewer tiles than the device has SMs",
        "swap tile_m tile_n split_k",
        lambda f, p, d: (f.split_k == 1) | (tiles(f, p) < d.sms),
    ),
    rule(
        "every CTA of a K split needs two steps of its own",
        "tile_k split_k",
        lambda f, p, d: (f.split_k == 1) | (-(-p["K"] // f.tile_k) >= 2 * f.split_k),
    ),
    rule(
        "a K split writes C from registers, once a launch, with no register split",
        "split_k epilogue persistent producer_regs",
        lambda f, p, d: (
            (f.split_k == 1)
            | ((f.epilogue == DIRECT) & (f.persistent == 0) & (f.producer_regs == 0))
        ),
    ),
    rule(SWAPPED, "swap epilogue", lambda f, p, d: (f.swap == 0) | (f.epilogue == DIRECT)),
    rule(
        "a TMA store needs rows of C that are a multiple of 16 bytes",
        "epilogue",
        lambda f, p, d: (f.epilogue == DIRECT) | (p["N"] * ELEMENT % 16 == 0),
    ),
    rule(
        "stages deeper than the K loop are never filled",
        "tile_k split_k num_stages",
        lambda f, p, d: (f.num_stages <= -(-p["K"] // f.tile_k) // f.split_k) | (f.num_stages == 2),
    ),
    rule(
        SHARED,
        "cta_group swap tile_m tile_n consumers schedule tile_k split_k epilogue num_stages",
        lambda f, p, d: smem_bytes(f, d) <= d.smem_per_block,
    ),
    rule(
        "a persistent kernel specialises its warps",
        "warp_specialized persistent",
        lambda f, p, d: (f.persistent == 0) | (f.warp_specialized == 1),
    ),
    rule(
        "a persistent kernel needs more tiles than the device has SMs",
        "swap tile_m tile_n persistent",
        lambda f, p, d: (f.persistent == 0) | (tiles(f, p) > d.sms),
    ),
    rule(
        "two accumulators are for persistent tcgen05 kernels",
        "persistent acc_buffers",
        lambda f, p, d: (f.acc_buffers == 1) | (d.has_tmem & (f.persistent == 1)),
    ),
    rule(
        "the accumulators exceed the 512 columns of TMEM",
        "tile_m tile_n acc_buffers",
        lambda f, p, d: (not d.has_tmem) | (tmem_columns(f, d) <= d.tmem_columns),
    ),
    rule(
        "two epilogue warpgroups share the columns in blocks of 16",
        "tile_m tile_n consumers",
        lambda f, p, d: (not d.has_tmem) | (store_columns(f, d) % 16 == 0),
    ),
    rule(
        "a tile of one or two blocks of columns is staged whole",
        "swap tile_m tile_n consumers epilogue",
        lambda f, p, d: (
            (f.epilogue != TMA_BLOCKS)
            | (f.swap == 1)
            | (store_columns(f, d) > 2 * store_block(store_columns(f, d)))
        ),
    ),
    rule(
        "C has at most 2^32 elements, which a direct epilogue counts in 32 bits",
        "epilogue",
        lambda f, p, d: (f.epilogue != DIRECT) | (p["M"] * p["N"] < 2**32),
    ),
    rule(
        "a register split needs a producer warpgroup",
        "warp_specialized producer_regs",
        lambda f, p, d: (f.producer_regs == 0) | (f.warp_specialized == 1),
    ),
    rule(
        REGISTERS,
        "swap tile_m tile_n consumers schedule tile_k split_k epilogue warp_specialized persistent "
        "producer_regs",
        suffice,
    ),
    rule(
        GROUPS,
        "swap tile_m raster_group",
        lambda f, p, d: (
            (f.raster_group == 1) | (f.raster_group < 2 * -(-sides(f, p)[0] // f.tile_m))
        ),
    ),
    rule(WALK, "swap raster_group", lambda f, p, d: (f.swap == 0) | (f.raster_group == 1)),
)
