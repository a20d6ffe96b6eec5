"""The decisions of an indexer, in construction order, and their rules.

A CTA of the first kernel scores a span of a sequence's tokens, a tile of them at a time: tokens are
rows of an MMA, heads its columns. A cluster of the second kernel chooses the best of a sequence: it
counts keys by digits until at most `room` times topk of them are left, and ranks these; where topk
is above MAX_RANKED it sorts them, because ranks take as many comparisons as there are pairs.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.atoms.indexing import ENTRY, ENTRY_BITS, STATE
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.dsa_indexer.problem import SCALE

WARP = 32
WARPGROUP_ROWS, TMEM_ROWS = 64, 128  # of an MMA
LINE = 512  # bytes that a warp zeroes
MAX_ENTRIES = 4096
MAX_RANKED = 1024
COLUMNS = 32  # of tensor memory that a lane reads at a time

DECISIONS = (
    Decision("span", (64, 128, 256, 512, 1024, 2048), "tokens that a CTA scores"),
    Decision("tile", (64, 128, 256), "tokens of a stage"),
    Decision("consumers", (1, 2, 4), "warpgroups that weigh scores"),
    Decision("stages", (1, 2, 3, 4, 6, 8), "depth of the ring of keys and scales"),
    Decision("buffers", (1, 2, 4), "tiles of products in tensor memory"),
    Decision("ctas", (1, 2, 4, 8), "CTAs of a cluster, which chooses for a sequence"),
    Decision("threads", (256, 512, 1024), "of each of them"),
    Decision("loads", (1, 2, 4), "vectors of keys that a thread loads at a time"),
    Decision("bits", (10, 11, 12), "of a digit by which keys are counted"),
    Decision("room", (1, 2, 4), "times topk: entries that are ranked at the most"),
    Decision("dependent", (0, 1), "the second kernel starts while the first still runs"),
)


def mma_rows(device: Device) -> int:
    return TMEM_ROWS if device.has_tmem else WARPGROUP_ROWS


def score_smem(f: Fields, problem: Problem) -> Any:
    """Queries, keys and scales; barriers, and alignments."""
    dim = problem["index_head_dim"]
    held = problem["num_index_heads"] * dim + f.stages * f.tile * (dim + SCALE)
    return held + 2048


def score_threads(f: Fields, device: Device) -> Any:
    """Consumers, and a warp that loads; with tcgen05 one that multiplies."""
    return WARP * (4 * f.consumers + (2 if device.has_tmem else 1))


def score_registers(f: Fields, problem: Problem, device: Device) -> Any:
    """Of a thread of the first kernel: at least what ptxas takes."""
    heads = problem["num_index_heads"]
    if device.has_tmem:
        return heads + f.tile // (TMEM_ROWS * f.consumers) * min(heads, 60) + 12
    return f.tile // (WARPGROUP_ROWS * f.consumers) * (heads // 2 + 3) + heads // 4 + 20


def tmem_columns(f: Fields, problem: Problem) -> Any:
    """Of tensor memory, a power of two."""
    columns = f.tile // TMEM_ROWS * f.buffers * problem["num_index_heads"]
    return 2 ** np.ceil(np.log2(np.maximum(columns, 32))).astype(int)


def digits(bits: Any) -> Any:
    """Of an entry."""
    return -(-ENTRY_BITS // bits)


def entries(f: Fields, problem: Problem) -> Any:
    return f.room * problem["topk"]


def is_sorted(problem: Problem) -> bool:
    """Whether entries are sorted; if not, each one is compared with all others."""
    return problem["topk"] > MAX_RANKED


def places(f: Fields, problem: Problem) -> Any:
    """In the list of entries; a power of two where it is sorted."""
    slots = entries(f, problem)
    return slots if not is_sorted(problem) else 2 ** np.ceil(np.log2(slots)).astype(int)


def bin_bytes(f: Fields) -> Any:
    """Bins, and behind them the sums of their ranges."""
    return (4 << f.bits) + 4 * (f.threads // WARP)


def select_smem(f: Fields, problem: Problem) -> Any:
    chosen = 0 if is_sorted(problem) else -(-problem["topk"] * 4 // LINE)
    lines = -(-places(f, problem) * ENTRY // LINE) + chosen
    return lines * LINE + bin_bytes(f) + STATE + LINE + 512  # a count, alignments


def select_registers(f: Fields, problem: Problem) -> Any:
    """Of a thread of the second kernel: a lane holds its bins of all CTAs at a time; its entries,
    and as many others, where they are sorted."""
    own = (1 << f.bits) // f.threads
    held = np.maximum(56, own * f.ctas + 28)
    if not is_sorted(problem):
        return held
    return np.maximum(held, 4 * (places(f, problem) // f.threads) + 32)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM: of the first kernel, but the most registers of both."""
    threads = score_threads(f, device)
    held = -(-score_registers(f, problem, device) // 8) * 8
    smem = score_smem(f, problem)
    columns = tmem_columns(f, problem) if device.has_tmem else 0 * f.tile
    resident = device.resident_blocks(smem, held, threads, columns)
    most = np.maximum(held, select_registers(f, problem))
    return Resources(smem, most, threads, columns, resident)


RULES = (
    rule(
        "a span is whole tiles, of 32 pages at the most",
        "span tile",
        lambda f, p, d: (f.span % f.tile == 0) & (f.span <= WARP * p["page_size"]),
    ),
    rule(
        "consumers share the rows of a tile, an MMA's at least each",
        "tile consumers",
        lambda f, p, d: f.tile % (mma_rows(d) * f.consumers) == 0,
    ),
    rule(
        "a ring has no more stages than a span has tiles",
        "span tile stages",
        lambda f, p, d: f.stages * f.tile <= f.span,
    ),
    rule(
        "products lie in tensor memory where there is some, no more of them than a span has tiles",
        "span tile buffers",
        lambda f, p, d: f.buffers * f.tile <= f.span if d.has_tmem else f.buffers == 1,
    ),
    rule(
        "products exceed tensor memory",
        "tile buffers",
        lambda f, p, d: (not d.has_tmem) | (tmem_columns(f, p) <= d.tmem_columns),
    ),
    rule(
        "queries, keys and scales exceed the shared memory of a CTA",
        "tile stages",
        lambda f, p, d: score_smem(f, p) <= d.smem_per_block,
    ),
    rule(
        "products and weights exceed the registers of a thread",
        "tile consumers",
        lambda f, p, d: (
            score_registers(f, p, d)
            <= np.minimum(d.registers_per_sm // score_threads(f, d) // 8 * 8, 248)
        ),
    ),
    rule(
        f"at most {MAX_ENTRIES} entries are ranked, or topk",
        "room",
        lambda f, p, d: (f.room == 1) | (entries(f, p) <= MAX_ENTRIES),
    ),
    rule(
        "a cluster has no more threads than a sequence can have vectors of keys",
        "ctas threads loads",
        lambda f, p, d: (
            (f.ctas == 1) & (f.loads == 1)
            | (f.ctas * f.threads * f.loads * 4 <= p["max_num_pages"] * p["page_size"])
        ),
    ),
)
