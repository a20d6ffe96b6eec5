"""The decisions of latent attention, in construction order, and their rules.

A CTA takes the heads of a few queries as columns of its MMAs and tokens as rows: S^T = K Q^T,
O^T = V^T P^T; of more than 64 heads each of several CTAs takes some. `warps` warps lie on the
tokens of a tile and on the columns for the scores, and on the dims of the latent for the sums. In
decoding sequences are cut into chunks, and a second kernel adds up what the chunks of a sequence
come to; in a prefill it does so for tokens in parts. A prefill by wgmma: see `hopper_decisions`.

On sm_100a tcgen05 takes wgmma's place in a prefill, and in decoding that of mma.sync: `by_tcgen05`.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, Rule, either, rule
from ptxflow.compiler.kernels.mla import hopper_decisions as hopper
from ptxflow.compiler.kernels.mla.hopper_decisions import ALWAYS, LAZY, MMA_SYNC, WGMMA
from ptxflow.compiler.kernels.mla.problem import ELEMENT, PREFILL, cta_heads, head_ctas

WARP = 32
MMA_TOKENS, MMA_DIMS, MMA_COLUMNS = 16, 16, 8
PAD = 16  # bytes between rows in shared memory, so that eight of them lie in different banks
MAX_ROUNDS = 16  # of CTAs on an SM: more write and read more sums than keys
SUM_WARPS = 4  # warps of a CTA of the second kernel
MAX_SUMS = 32  # chunks of 8 heads each that a thread of it has registers for
MAX_HELD = 24  # times four registers, of maxima and row sums, and blocks that it loads at a time
SPLIT = 8  # warps that have other registers than those that gather:
MULTIPLY_REGS, GATHER_REGS = 224, 56  # of eight and of four, 65,536 in all at the most
COLUMNS, DIMS = "columns", "dims"
PARTS = 4  # of dims, where warps part these
SHARED, REGISTERS = "shared", "registers"
QUERY_STEPS = 4  # of a product, whose queries have registers at a time where they are not kept

TILING = (
    Decision("tile", (32, 64), "tokens of a step"),
    Decision("warps", (4, 8), "warps that multiply, besides those that ask for rows"),
    Decision("stages", (1, 2, 3, 4, 5), "tiles of the ring"),
    Decision("scores", (COLUMNS, DIMS), "what warps part for the scores, besides tokens"),
    Decision("operand", (SHARED, REGISTERS), "where queries are kept for the scores"),
)
SECOND = (
    Decision("dependent", (0, 1), "the second kernel starts while the first still runs"),
    Decision("sum_chunks", (1, 2, 4, 8), "chunks that the second kernel loads at a time"),
)
DECODE_DECISIONS = (
    Decision(
        "chunk",
        (0, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096),
        "tokens of a CTA; 0: all of a sequence",
    ),
    *TILING,
    *SECOND,
)
PREFILL_DECISIONS = (
    Decision("core", (MMA_SYNC, WGMMA), "the instruction that multiplies"),
    Decision("queries", (1, 2, 3, 4), "query tokens of a CTA"),
    *TILING,
    Decision("lead", (0, 1, 2, 3), "parts of a tile's scores before the values of the last one"),
    Decision("pieces", (1, 2), "of a tile's weights, handed over one by one"),
    Decision("rescale", (ALWAYS, LAZY), "sums follow each new maximum, or one far above the last"),
    Decision("parts", (1, 2, 4, 8, 16, 32), "CTAs that share the tokens of their queries"),
    *SECOND,
)


def decodes(problem: Problem) -> bool:
    """Whether every query has tokens of its own."""
    return problem.family != PREFILL


def columns(f: Fields, problem: Problem) -> Any:
    """Columns of a CTA's MMAs: its queries' heads."""
    each = 1 if decodes(problem) else f.queries
    return each * cta_heads(problem)


def groups(f: Fields) -> Any:
    """Groups of warps that take columns of their own for the scores."""
    return np.maximum(f.warps // (f.tile // MMA_TOKENS), 1)


def own(f: Fields, problem: Problem) -> Any:
    """MMAs side by side of a warp for the scores."""
    return columns(f, problem) // MMA_COLUMNS // groups(f)


def by_tcgen05(f: Fields, problem: Problem, device: Device) -> Any:
    """Whether sm_100a multiplies by tcgen05, whose operands are in shared memory: tokens of a tile
    of 64 and queries, by blocks of 128 bytes of their rows."""
    latent, rope = problem["head_dim_ckv"], problem["head_dim_kpe"]
    if not device.has_tmem or latent % 128 or rope % 64:
        return 0 * f.tile > 0
    shared = (f.tile == hopper.ROWS) & (f.scores == COLUMNS) & (f.operand == SHARED)
    wide = np.isin(columns(f, problem), hopper.rows_of_queries(device))
    return shared & wide & (f.stages < 3) & (f.get("core", WGMMA) == WGMMA)


def tmem_columns(f: Fields, problem: Problem) -> Any:
    """Of tensor memory, a power of two: scores of a tile, and what it adds to the sums."""
    count = columns(f, problem) * (1 + problem["head_dim_ckv"] // 128)
    return 2 ** np.ceil(np.log2(np.maximum(count, 32))).astype(int)


def partial_bytes(f: Fields, problem: Problem) -> Any:
    """Of scores in parts, float32."""
    size = PARTS * f.tile * columns(f, problem) * 4
    return np.where(f.scores == DIMS, size, 0)


def part_columns(f: Fields, problem: Problem) -> Any:
    """MMAs side by side of a warp for scores in parts: with eight warps half of the tokens or of
    the columns of four."""
    halved = (f.warps == SPLIT) & (f.tile == MMA_TOKENS * 2)
    return columns(f, problem) // MMA_COLUMNS // np.where(halved, 2, 1)


def part_registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread for its scores in parts, and for queries that it loads in turn."""
    steps = (problem["head_dim_ckv"] + problem["head_dim_kpe"]) // (PARTS * MMA_DIMS)
    scores = PARTS * f.tile * columns(f, problem) // (WARP * f.warps)
    return scores + 2 * min(steps, QUERY_STEPS) * part_columns(f, problem)


def latent_pitch(problem: Problem) -> int:
    """Bytes from a token's latent in shared memory to the next; a query's likewise."""
    return problem["head_dim_ckv"] * ELEMENT + PAD


def rope_pitch(problem: Problem) -> int:
    return problem["head_dim_kpe"] * ELEMENT + PAD


def weight_pitch(f: Fields, problem: Problem) -> Any:
    """Bytes from the weights of a token to those of the next: an odd number of chunks of 16."""
    return 16 * (own(f, problem) | 1)


def stage_bytes(f: Fields, problem: Problem) -> Any:
    return f.tile * (latent_pitch(problem) + rope_pitch(problem))


def smem_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Ring, queries, weights, and what warps hand to each other; alignments with them. What
    tcgen05 reads is not padded."""
    by_rows, row = by_tcgen05(f, problem, device), latent_pitch(problem) + rope_pitch(problem)
    weights = groups(f) * weight_pitch(f, problem)
    weights = np.where(by_rows, columns(f, problem) * ELEMENT, weights)
    row = row - 2 * PAD * by_rows
    held = (columns(f, problem) + f.stages * f.tile) * row + f.tile * weights
    handed = (2 + f.tile // MMA_TOKENS) * 4 * columns(f, problem)
    return held + partial_bytes(f, problem) + handed + 16 * f.stages + 1024


def sum_registers(f: Fields, problem: Problem) -> Any:
    """Accumulators of a thread."""
    blocks = problem["head_dim_ckv"] // MMA_DIMS // f.warps
    return blocks * columns(f, problem) // MMA_COLUMNS * 4


def query_registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread for queries, where they are kept there."""
    steps = (problem["head_dim_ckv"] + problem["head_dim_kpe"]) // MMA_DIMS
    across = np.where(f.scores == DIMS, part_columns(f, problem) / PARTS, own(f, problem))
    return np.where(f.operand == REGISTERS, 2 * steps * across, 0).astype(int)


def registers(f: Fields, problem: Problem, device: Device) -> Any:
    """Registers of a thread: at least what ptxas takes, fitted to kernels of the whole space; where
    it is told how many there are, at least what it makes do with."""
    held = sum_registers(f, problem) + query_registers(f, problem)
    mine, across = own(f, problem), columns(f, problem) // MMA_COLUMNS
    free = 24 * mine + 2 * mine * (f.tile // MMA_TOKENS) + 5 * across + 48
    told = 20 * mine + 2 * across + 32
    in_turn = (f.scores == DIMS) & (f.operand == SHARED)
    parts = part_registers(f, problem) + 5 * mine + across + 8
    told = np.maximum(told, np.where(in_turn, parts, 0))
    if device.has_tmem:  # ptxas takes more for its architecture
        by_rows = by_tcgen05(f, problem, device)
        more = 10 + 30 * ((mine > 1) & (held > 32))
        free = np.where(by_rows, held // 2 + 10 * mine + 16, free + more)
        alone = f.tile >= dict(problem.axes).get("topk", np.inf)  # a list's only tile: no loop
        told = np.where(by_rows, 12 * mine + 40 + 16 * alone, told)
    return np.asarray(held + np.where(f.warps == SPLIT, told, free)).astype(int)


def helpers(f: Fields) -> Any:
    """Warps that gather, 16 rows of a tile each; with eight that multiply always four, as registers
    are given to warps in fours, and two of three fours can have more than the third."""
    return np.where(f.warps == SPLIT, 4, f.tile // 16)


def threads(f: Fields) -> Any:
    return WARP * (f.warps + helpers(f))


def register_limit(f: Fields, device: Device) -> Any:
    """Of a warp that multiplies."""
    return np.where(f.warps == SPLIT, MULTIPLY_REGS, device.registers_per_thread)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM; of the first kernel."""
    alike = -(-registers(f, problem, device) // 8) * 8
    held = np.where(f.warps == SPLIT, device.registers_per_sm // threads(f) // 8 * 8, alike)
    smem = smem_bytes(f, problem, device)
    tmem = np.where(by_tcgen05(f, problem, device), tmem_columns(f, problem), 0)
    resident = device.resident_blocks(smem, held, threads(f), tmem)
    return Resources(smem, held, threads(f), tmem, resident)


def prefill_resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """The same of a prefill by either instruction."""
    by_wgmma, others = hopper.resources(f, problem, device), resources(f, problem, device)
    return others if device.has_tmem else either(f.core == WGMMA, by_wgmma, others)


def tiling_rules(first: str) -> tuple[Rule, ...]:
    """Rules of all; `first` is the decision that sets the columns, if there is one."""
    return (
        rule(
            "warps share the tokens of a tile evenly",
            "tile warps",
            lambda f, p, d: f.warps % (f.tile // MMA_TOKENS) == 0,
        ),
        rule(
            "groups of warps share the columns evenly",
            f"{first} tile warps",
            lambda f, p, d: columns(f, p) % (MMA_COLUMNS * groups(f)) == 0,
        ),
        rule(
            f"dims are in {PARTS} parts of whole MMAs, and columns in pairs of them",
            f"{first} tile warps scores",
            lambda f, p, d: (
                (f.scores == COLUMNS)
                | ((p["head_dim_kpe"] % (PARTS * MMA_DIMS) == 0) & (part_columns(f, p) % 2 == 0))
            ),
        ),
        rule(
            "warps share the dims of the latent evenly",
            "warps",
            lambda f, p, d: p["head_dim_ckv"] % (MMA_DIMS * f.warps) == 0,
        ),
        rule(
            "ring, queries and weights exceed the shared memory of a CTA",
            f"{first} tile warps stages scores operand",
            lambda f, p, d: smem_bytes(f, p, d) <= d.smem_per_block,
        ),
        rule(
            "sums and queries exceed the registers of a thread",
            f"{first} tile warps stages scores operand",
            lambda f, p, d: registers(f, p, d) <= register_limit(f, d),
        ),
    )


def tokens(problem: Problem) -> int:
    """Tokens that the pages have room for."""
    return problem["num_kv_indices"] * problem["page_size"]


def sum_blocks(f: Fields, problem: Problem, by_rows: Any) -> Any:
    """Blocks of dims of a warp of a prefill's second kernel; `by_rows`: of wgmma's sums."""
    wide = np.where(by_rows, MMA_TOKENS, MMA_COLUMNS)
    blocks = problem["head_dim_ckv"] // np.where(by_rows, MMA_COLUMNS, MMA_DIMS)
    most = MAX_HELD // (f.sum_chunks * np.maximum(cta_heads(problem) // wide, 1)) - 1
    most = np.minimum(most, blocks // SUM_WARPS)
    return np.where(most < 4, np.where(most < 2, 1, 2), 4)


SUMS_FIT = rule(
    "the chunks that the second kernel loads at a time exceed the registers of a thread",
    "sum_chunks",
    lambda f, p, d: f.sum_chunks * (cta_heads(p) // MMA_COLUMNS) <= MAX_SUMS,
)
DECODE_RULES = (
    *tiling_rules(""),
    rule(
        "a chunk has at least a tile, and no more tokens than there can be",
        "chunk tile",
        lambda f, p, d: (f.chunk == 0) | ((f.chunk >= f.tile) & (f.chunk <= 2 * tokens(p))),
    ),
    rule(
        f"there are at most {MAX_ROUNDS} chunks for each SM, if sequences are cut",
        "chunk",
        lambda f, p, d: (
            (f.chunk == 0)
            | (tokens(p) // np.maximum(f.chunk, 1) + p["batch_size"] <= MAX_ROUNDS * d.sms)
        ),
    ),
    rule(
        "a ring has no more stages than a chunk has tiles",
        "chunk tile stages",
        lambda f, p, d: (f.chunk == 0) | (f.stages * f.tile <= f.chunk),
    ),
    rule(
        "a second kernel is for sequences in chunks",
        "chunk dependent sum_chunks",
        lambda f, p, d: (f.chunk > 0) | ((f.dependent == 0) & (f.sum_chunks == 1)),
    ),
    SUMS_FIT,
)


def places(f: Fields, problem: Problem) -> Any:
    """The most tiles of queries there can be, none across sequences."""
    return problem["total_q"] // f.queries + problem["len_indptr"] - 1


PREFILL_RULES = (
    *(hopper.of_core(MMA_SYNC, each) for each in tiling_rules("queries")),
    *hopper.RULES,
    rule(
        f"there are at most {MAX_ROUNDS} CTAs for each SM, if tokens are in parts",
        "queries parts",
        lambda f, p, d: (
            (f.parts == 1) | (places(f, p) * head_ctas(p) * f.parts <= MAX_ROUNDS * d.sms)
        ),
    ),
    rule(
        "a second kernel is for tokens in parts, and loads no more than there are",
        "parts dependent sum_chunks",
        lambda f, p, d: (f.sum_chunks <= f.parts) & ((f.parts > 1) | (f.dependent == 0)),
    ),
    SUMS_FIT,
)
