"""The decisions of a prefill kernel, in construction order, and their rules.

A block takes a tile of queries: 64 rows for each of its consumer warpgroups, 128 with tcgen05, a
row being a token in a head. It walks over tiles of keys and values, which a producer brings through
two rings.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT

HEADS, TILES = "heads", "tiles"
ALWAYS, LAZY = "always", "lazy"
TOKEN, TILE = "token", "tile"  # what a box of queries is of
WARPGROUP, WARPGROUP_ROWS, TMEM_ROWS = 128, 64, 128
MMA_K = 16
BOX_ROWS = 8  # rows of a page, at least, for it to come as a box of its own
BARRIER_BYTES = 1024
POOL = {1: 480, 2: 504, 3: 512}  # registers of a lane, summed over warpgroups, by consumers

OUTGROWN = "output, scores and weights exceed the registers of a consumer"
SHARED = "queries, keys and values exceed the shared memory of a block"
COPIED = (
    "rows that are copied come in groups of eight to each of four warps, two stages at least; "
    "those that TMA gathers by 128 at most"
)
COLUMNS = "scores, weights and outputs exceed tensor memory"
DECISIONS = (
    Decision("consumers", (1, 2, 3), "warpgroups with rows of their own: 64, or 128 with tcgen05"),
    Decision("share", (1, 2, 4, 8, 16), "heads of a group whose queries share a tile"),
    Decision("tile_kv", (32, 64, 96, 128, 160, 176, 192), "keys of a step"),
    Decision("stages", (1, 2, 3, 4), "depth of the rings of keys and of values"),
    Decision("overlap", (0, 1), "the next step's scores are computed under this step's softmax"),
    Decision("pin", (0, 1), "the assembler may not put a softmax off till outputs are there"),
    Decision("turns", (0, 1), "warpgroups multiply by turns: one's softmax under another's MMA"),
    Decision(
        "rescale", (ALWAYS, LAZY), "outputs follow each new maximum, or ones far above the last"
    ),
    Decision("order", (HEADS, TILES), "what neighbouring blocks differ in"),
)


def tile_rows(f: Fields, device: Device) -> Any:
    return (TMEM_ROWS if device.has_tmem else WARPGROUP_ROWS) * f.consumers


def smem_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Barriers, queries, and the rings of keys and values."""
    rows = tile_rows(f, device) + 2 * f.stages * f.tile_kv
    return BARRIER_BYTES + rows * problem["head_dim"] * ELEMENT


def producer_registers(f: Fields, device: Device) -> Any:
    """What a producer keeps under setmaxnreg; with tcgen05 its warpgroup issues products too."""
    alone = (f.consumers == 1) & (f.get("resident", 1) == 1)
    if device.has_tmem:
        return np.where(alone, 160, 56)
    return np.where(alone, 96, np.where(f.consumers == 3, 32, 40))


def register_limit(f: Fields, device: Device) -> Any:
    """What consumers get: even shares of what the producer leaves, 240 at most."""
    pool = np.select([f.consumers == c for c in POOL], list(POOL.values()))
    groups, resident = f.consumers + 1, f.get("resident", 1)
    shared = begun_with(f, device) * groups
    pool = np.where(resident == 1, pool, shared)
    split = (pool - producer_registers(f, device)) // f.consumers // 8 * 8
    return np.minimum(np.where(lean(f), begun_with(f, device), split), 240)


def begun_with(f: Fields, device: Device) -> Any:
    """Registers that a block's threads begin with: warps of blocks spread over four parts of an SM,
    each of which has its own."""
    warps = threads(f) // 32 * f.get("resident", 1)
    return device.register_share(WARPGROUP * (-(-warps // 4))) // 8 * 8


def lean(f: Fields) -> Any:
    """Whether the producer is one warp, and registers are not split."""
    return f.get("producer_warps", 4) == 1


def threads(f: Fields) -> Any:
    return WARPGROUP * f.consumers + 32 * f.get("producer_warps", 4)


def registers(f: Fields, problem: Problem) -> Any:
    """Of a consumer thread: at least what it cannot do without. Output and scores, beside them the
    weights that are being multiplied, and what surrounds them; where registers are not split, which
    part of the keys it has, and what scores wider than outputs waste, as far as ptxas spills."""
    scores, past = f.tile_kv // 2, np.maximum(f.tile_kv - problem["head_dim"], 0)
    cut = (f.get("parts", 1) > 1) * (7 + 6 * f.overlap * (past > 0))
    beside = np.where(f.overlap == 1, f.tile_kv // 4 + 32, 40)
    copying = np.where(boxes(problem, f.tile_kv), 0, 8)  # what producers hold counts, too
    return problem["head_dim"] // 2 + scores + beside + copying + (cut + past // 32 - 8) * lean(f)


def row_registers(f: Fields) -> Any:
    """Of a thread that holds a row of scores, and weights where the last ones may still be read."""
    return f.tile_kv + 88


def held(f: Fields, problem: Problem, device: Device) -> Any:
    """Registers of a consumer thread."""
    return row_registers(f) if device.has_tmem else registers(f, problem)


def weight_columns(f: Fields) -> Any:
    """Of tensor memory, for weights beside their scores; by 32, so that all else begins at one."""
    return np.where(f.overlap == 1, -(-f.tile_kv // 64) * 32, 0)


def tmem_columns(f: Fields, problem: Problem) -> Any:
    """Of tensor memory, a power of two: for each tile of rows its scores and outputs; weights lie
    over their scores, or beside them where the next scores come before they have been read."""
    columns = f.consumers * (f.tile_kv + weight_columns(f) + problem["head_dim"])
    return 2 ** np.ceil(np.log2(columns)).astype(int)


def fitting(f: Fields, problem: Problem, device: Device) -> Any:
    """Blocks of which shared memory has room on an SM, and for one."""
    smem = smem_bytes(f, problem, device)
    most = device.smem_per_sm // (smem + device.smem_reserved)
    return np.where(smem <= device.smem_per_block, most, 0)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM."""
    smem, lanes = smem_bytes(f, problem, device), threads(f)
    fits = fitting(f, problem, device)
    limit = register_limit(f, device)
    columns = tmem_columns(f, problem) if device.has_tmem else 0 * lanes
    return Resources(smem, limit, lanes, columns, np.minimum(fits, f.get("resident", 1)))


def group(problem: Problem) -> int:
    """Query heads that share keys."""
    return problem["num_qo_heads"] // problem["num_kv_heads"]


def output_bytes(problem: Problem) -> int:
    return problem["total_q"] * problem["num_qo_heads"] * problem["head_dim"] * ELEMENT


def boxes(problem: Problem, tile_kv: Any) -> Any:
    """Whether tiles of keys are whole pages, or parts of one."""
    page = dict(problem.axes).get("page_size", 0)
    if not page:
        return tile_kv > 0
    return (page >= BOX_ROWS) & ((tile_kv % page == 0) | (page % tile_kv == 0))


def copied(f: Fields, problem: Problem, device: Device) -> Any:
    """Whether rows can be copied, or tiles are boxes: a warp copies on before it hands over."""
    fits = f.tile_kv <= 128
    if not device.has_tmem:
        fits = (f.tile_kv % 32 == 0) & (f.stages > 1)
    return boxes(problem, f.tile_kv) | fits


RULES = (
    rule(
        "tcgen05 takes one or two tiles of rows, and keys by 32",
        "consumers tile_kv",
        lambda f, p, d: ((f.consumers <= 2) & (f.tile_kv % 32 == 0)) | (not d.has_tmem),
    ),
    rule(
        COLUMNS,
        "consumers tile_kv overlap",
        lambda f, p, d: (not d.has_tmem) | (tmem_columns(f, p) <= d.tmem_columns),
    ),
    rule(
        "turns and pinning are for wgmma, lazy rescaling for tcgen05",
        "pin turns rescale",
        lambda f, p, d: f.pin + f.turns == 0 if d.has_tmem else f.rescale == ALWAYS,
    ),
    rule(
        "heads that share a tile share their keys", "share", lambda f, p, d: group(p) % f.share == 0
    ),
    rule(COPIED, "tile_kv stages", lambda f, p, d: copied(f, p, d)),
    rule(
        OUTGROWN, "consumers tile_kv overlap", lambda f, p, d: held(f, p, d) <= register_limit(f, d)
    ),
    rule(
        SHARED, "consumers tile_kv stages", lambda f, p, d: smem_bytes(f, p, d) <= d.smem_per_block
    ),
    rule(
        "a softmax is pinned where outputs are computed beside it",
        "overlap pin",
        lambda f, p, d: (f.pin == 0) | (f.overlap == 1),
    ),
    rule(
        "warpgroups that take turns are two at least, and overlap their own steps",
        "consumers overlap turns",
        lambda f, p, d: (f.turns == 0) | ((f.consumers > 1) & (f.overlap == 1)),
    ),
)
