"""The decisions of a gqa_decode program, in construction order, and their rules.

The first kernel cuts sequences into chunks: each of `warps` warps of a CTA takes `tiles` tiles of
`tile` tokens of one, for `heads` key heads, through a ring of its own of `stages` tiles. Where MMAs
are asynchronous, a warpgroup takes them together, from a ring that other warps fill. The second
kernel adds up what the chunks of a sequence come to.

A warpgroup's MMAs have 64 tokens, then 64 dims, as rows, and the query heads of a key head as
columns: wgmma on sm_90a, tcgen05 on sm_100a. Producers, a warp to each stage of the ring, bring
keys and values.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.gqa_decode.problem import COLUMNS, ELEMENT, columns

WARP = 32
SYNC, ASYNC = "sync", "async"
COPY, TMA = "cp_async", "tma"
ROWS = 64  # of an MMA
MMA_K = 16
GROUP_WARPS = 4
LINE = 128  # bytes of a row of a column block, which the swizzle permutes
TOGETHER, APART = "together", "apart"
TOKENS, HEADS = "tokens", "heads"
BOX_ROWS = 8  # rows of a page, at least, for it to come as a box of its own: a swizzle's repeat
TMEM_BARRIERS = 5  # beside the ring
MMA_TOKENS, MMA_DIMS = 16, 16
PAD = 16  # bytes between rows in shared memory, so that eight of them lie in different banks

DECISIONS = (
    Decision("mma", (SYNC, ASYNC), "mma.sync of a warp; wgmma or tcgen05 of a warpgroup"),
    Decision("gather", (COPY, TMA), "lanes copy tokens' rows, or TMA brings pages"),
    Decision("warps", (1, 2, 4, 8), "warps of a CTA, each with tokens of its own; or a warpgroup"),
    Decision("tile", (16, 32, 64, 128), "tokens of a step of a warp, or warpgroup"),
    Decision("tiles", (1, 2, 4, 8, 16, 32, 64), "tiles of a warp"),
    Decision("heads", (1, 2, 4), "key heads that a warp takes from a token's rows"),
    Decision("stages", (1, 2, 3, 4, 6), "tiles of a warp's ring"),
    Decision(
        "arrival",
        (TOGETHER, APART),
        "keys and values of a tile are awaited together, or values later",
    ),
    Decision("order", ("heads", "places"), "what neighbouring CTAs differ in"),
    Decision("dependent", (0, 1), "the second kernel starts while the first still runs"),
    Decision("sum_warps", (1, 2, 4, 8), "warps of a CTA of the second kernel"),
    Decision("sum_chunks", (2, 4, 8), "chunks that a warp of it loads at a time"),
    Decision("sum_split", (0, 1), "the warps of such a CTA share the chunks of one block"),
)


GROUP = "asynchronous MMAs are a warpgroup's, of 64 tokens or more"
TWO_STAGES = "a ring that other warps fill has two stages at least, where there are two tiles"
DIVIDE = "the key heads of a warp divide those of a token"
LONGEST = "a chunk is no longer than the longest sequence there can be"
FULL_RING = "a ring has no more stages than its warp has tiles"
SHARED = "the rings exceed the shared memory of a CTA"


def columns_of_warp(f: Fields, problem: Problem) -> Any:
    """How many columns a warp has sums for: all, unless they would take half its registers."""
    many = problem["head_dim"] * columns(problem) > 256
    return np.where((f.mma == SYNC) & many, 1, columns(problem))


def rings(f: Fields) -> Any:
    """Of a CTA, each with tokens of its own: a warp's, or a warpgroup's."""
    return np.where((f.mma == SYNC) & (f.get("own", TOKENS) == TOKENS), f.warps, 1)


def cta_heads(f: Fields) -> Any:
    """Key heads of a CTA."""
    return f.heads * np.where(f.get("own", TOKENS) == TOKENS, 1, f.warps)


def chunk(f: Fields) -> Any:
    """Tokens of a CTA, or of a cluster that shares them; where it takes whole sequences, of a step
    of it."""
    return f.get("cluster", 1) * rings(f) * f.tile * f.tiles


def pitch(f: Fields, problem: Problem) -> Any:
    """Bytes from a token's row in shared memory to the next."""
    return f.heads * problem["head_dim"] * ELEMENT + PAD


def stage_bytes(f: Fields, problem: Problem) -> Any:
    """Of a warp's keys, or values, of a tile."""
    return f.tile * pitch(f, problem)


def heads_wide(problem: Problem) -> int:
    """Columns of an MMA: the query heads of a key head, and what fills them up."""
    return COLUMNS * columns(problem)


def sums(f: Fields, problem: Problem) -> Any:
    """Registers of a thread."""
    return f.heads * problem["head_dim"] // ROWS * heads_wide(problem) // 2


def scores(f: Fields, problem: Problem) -> Any:
    """Registers of a thread."""
    return f.heads * f.tile // ROWS * heads_wide(problem) // 2


def group_smem_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Barriers, what warps tell each other and weights of a tile; queries and the ring."""
    row, wide = problem["head_dim"] * ELEMENT, heads_wide(problem)
    bars = 8 * f.stages * np.where(f.arrival == TOGETHER, 2, 4)
    if device.has_tmem:
        bars = bars + 8 * TMEM_BARRIERS
    told = 3 * 4 * GROUP_WARPS * 4 * f.heads * wide // 4
    small = _up(_up(bars, 16) + told, 128) + f.heads * f.tile * wide * ELEMENT
    small = small + handed_bytes(f, problem)
    if device.has_tmem:
        small = small + 16  # where tensor memory is
    return _up(small, 1024) + f.heads * (2 * f.stages * f.tile + wide) * row


def _up(size: Any, unit: int) -> Any:
    return -(-size // unit) * unit


def group_registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread: at least what ptxas takes, fitted to kernels of the whole space."""
    held = 1.6 * sums(f, problem) + 2.4 * scores(f, problem)
    return np.asarray(held + 45).astype(int)


def tmem_columns(f: Fields, problem: Problem) -> Any:
    """Of tensor memory, a power of two: scores of two tiles, and what one adds to the sums."""
    count = 2 * (2 * scores(f, problem) + sums(f, problem))
    return 2 ** np.ceil(np.log2(np.maximum(count, 32))).astype(int)


def boxes(problem: Problem, tile: Any) -> Any:
    """Whether a tile is whole pages, or a part of one."""
    page = problem["page_size"]
    return (page >= BOX_ROWS) & ((tile % page == 0) | (page % tile == 0))


def smem_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Of all rings, where what warps hand to each other takes their place; or of a
    warpgroup's ring and weights."""
    rings = 2 * f.stages * f.warps * stage_bytes(f, problem) + handed_bytes(f, problem)
    return np.where(f.mma == SYNC, rings, group_smem_bytes(f, problem, device))


def handed_bytes(f: Fields, problem: Problem) -> Any:
    """Sums, maxima and row sums of all units, which the CTAs of a cluster hand to each other."""
    unit = problem["head_dim"] // MMA_DIMS * 16 * WARP + 64
    return (f.get("cluster", 1) > 1) * f.heads * columns_of_warp(f, problem) * unit


def copies(f: Fields, problem: Problem) -> Any:
    """Of 16 bytes by each lane, for the keys, or the values, of a tile."""
    return f.tile * f.heads * problem["head_dim"] * ELEMENT // (16 * WARP)


def registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread: at least what ptxas takes, fitted to kernels of the whole space."""
    across = columns_of_warp(f, problem) * f.heads
    sums = problem["head_dim"] // MMA_DIMS * 4 * across
    scores = f.tile // MMA_TOKENS * 4 * across
    own = np.asarray(1.16 * sums + 1.65 * scores + 1.95 * copies(f, problem) + 66).astype(int)
    return np.where(f.mma == SYNC, own, group_registers(f, problem))


def threads(f: Fields, device: Device) -> Any:
    """Of a CTA of the first kernel: of a warpgroup's with producers, and with tcgen05 one that
    multiplies."""
    return WARP * np.where(f.mma == SYNC, f.warps, GROUP_WARPS + f.stages + device.has_tmem)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM; of the first kernel."""
    held = -(-registers(f, problem) // 8) * 8
    smem, lanes = smem_bytes(f, problem, device), threads(f, device)
    tmem = np.where((f.mma == ASYNC) & device.has_tmem, tmem_columns(f, problem), 0)
    resident = device.resident_blocks(smem, held, lanes, tmem)
    return Resources(smem, held, lanes, tmem, resident)


RULES = (
    rule(
        GROUP,
        "mma warps tile",
        lambda f, p, d: (f.mma == SYNC) | ((f.warps == GROUP_WARPS) & (f.tile >= ROWS)),
    ),
    rule(
        TWO_STAGES,
        "mma tiles stages",
        lambda f, p, d: (f.mma == SYNC) | (f.stages > 1) | (f.tiles == 1),
    ),
    rule(
        "for asynchronous MMAs TMA brings whole pages, or parts of one; on sm_100a it gathers rows",
        "mma gather tile",
        lambda f, p, d: (f.gather == COPY) | ((f.mma == ASYNC) & (boxes(p, f.tile) | d.has_tmem)),
    ),
    rule(
        "a step of a warp is of 64 tokens, over all its key heads, at most",
        "mma tile heads",
        lambda f, p, d: (f.mma != SYNC) | (f.tile * f.heads <= 64),
    ),
    rule(DIVIDE, "heads", lambda f, p, d: p["num_kv_heads"] % f.heads == 0),
    rule(
        "every warp has dims to add up for all",
        "warps",
        lambda f, p, d: f.warps <= p["head_dim"] // MMA_DIMS,
    ),
    rule(FULL_RING, "tiles stages", lambda f, p, d: f.stages <= f.tiles),
    rule(
        LONGEST,
        "mma warps tile tiles",
        lambda f, p, d: (
            (chunk(f) <= p["num_kv_indices"] * p["page_size"])
            | ((f.tiles == 1) & ((rings(f) == 1) | (rings(f) * f.tile <= 64)))
        ),
    ),
    rule(
        SHARED,
        "mma warps tile heads stages arrival",
        lambda f, p, d: smem_bytes(f, p, d) <= d.smem_per_block,
    ),
    rule(
        "sums, scores and copies exceed the registers of a thread",
        "mma warps tile heads stages",
        lambda f, p, d: registers(f, p) <= d.register_share(threads(f, d)),
    ),
    rule(
        "several warps share chunks",
        "sum_warps sum_split",
        lambda f, p, d: f.sum_warps > f.sum_split,
    ),
)
