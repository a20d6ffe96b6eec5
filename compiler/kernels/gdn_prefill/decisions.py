"""The decisions of a gated-delta-net prefill kernel, in construction order, and their rules.

A CTA goes through a sequence for some rows of one value head's state, `chunk` tokens at a time.
Each of its main warps holds `16 * row_tiles` rows of the state in registers; `helpers` more warps
copy the next chunks and work out what tokens of a chunk do to each other.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT
from ptxflow.compiler.lower import TILE_ALIGN

WARP = 32
UNIT = 16  # tokens, rows and keys of an MMA
LINE = 512  # bytes that a warp copies at a time: 16 of each lane; a block as lanes hold it
SWIZZLE = 128  # bytes of a row of an operand of tcgen05, which has blocks of columns
PAD = 16  # bytes between rows in shared memory, so that eight of them lie in different banks
HALF, PAIRS = "half", "pairs"
ONE, TWO = "one", "two"
MMA_SYNC, WGMMA = "mma_sync", "wgmma"
BLOCK_PITCH = UNIT * ELEMENT + PAD  # bytes between rows of a 16 x 16 block of 16-bit elements
BLOCK_BYTES = UNIT * BLOCK_PITCH
NEAR_PITCH = (UNIT + 4) * 4  # and of one in float32
NEAR_BYTES = UNIT * NEAR_PITCH
GATES = 6  # arrays of a chunk: see shape.Gate
HOARD = 1.3  # registers that ptxas takes, at most, over those that it needs
#: more registers for states as two terms, by head size; and the chunk from which on
TERMS = {64: (8, 64), 128: (0, 16), 256: (38, 32)}
BUFFERS = 2  # of what helpers hand to main warps
BARRIERS = 48  # bytes of what tcgen05 completes, and of where its memory is
WARPGROUP_ROWS = 64  # of a state, by wgmma
GATE_BUFFERS = 3  # of gates, which are a chunk further ahead

DECISIONS = (
    Decision("kernels", (ONE, TWO), "two: the first relates the tokens of all chunks at once"),
    Decision("products", (MMA_SYNC, WGMMA), "with a state: by a warp, or 64 rows of four warps"),
    Decision("chunk", (16, 32, 64), "tokens that are worked on at a time"),
    Decision("rows", (16, 32, 64, 128), "rows of a head's state in a CTA"),
    Decision("row_tiles", (1, 2), "16 rows each, of a main warp"),
    Decision("helpers", (1, 2, 3, 4, 6), "warps that copy chunks and relate their tokens"),
    Decision("stages", (2, 3, 4), "chunks in shared memory: used, related, on their way"),
    Decision(
        "operands",
        (HALF, PAIRS),
        "states and updates as operands of MMAs: rounded to float16, or as two terms of 16 bits",
    ),
    Decision("solve", ("once", PAIRS), "the same within a chunk: one term, or two and three MMAs"),
    Decision("solve_block", (16, 32), "tokens whose equations are solved in float32"),
    Decision("order", ("heads", "sequences"), "what neighbouring CTAs differ in"),
)
SPLIT = 216, 72  # registers of 8 main warps by wgmma, and of 4 helpers


def main_warps(f: Fields) -> Any:
    """Warps that hold the state."""
    return f.rows // (UNIT * f.row_tiles)


def warps(f: Fields) -> Any:
    return main_warps(f) + f.helpers


def by_wgmma(f: Fields) -> Any:
    """Whether sm_90a multiplies with a state by wgmma."""
    return f.products == WGMMA


def by_tcgen05(f: Fields, problem: Problem, device: Device) -> Any:
    """Whether sm_100a multiplies with a state by tcgen05: 64 rows of four warps, or 128."""
    whole = (f.rows == 128) | (f.rows == 64) & (f.row_tiles == 1)
    return whole & (tmem_columns(f, problem) <= device.tmem_columns)


def in_pairs(f: Fields) -> Any:
    """Whether wgmma multiplies keys and queries together."""
    return by_wgmma(f) & (f.kernels == TWO) & (f.rows == 2 * WARPGROUP_ROWS)


def tmem_columns(f: Fields, problem: Problem) -> Any:
    """Of tensor memory, a power of two: terms of states and updates, and products of a chunk."""
    size = problem["head_size"]
    count = (size + f.chunk) // 2 * parts(f, "operands") + size + f.chunk
    return 2 ** np.ceil(np.log2(count)).astype(int)


def key_pitch(problem: Problem) -> int:
    """Bytes from a token's query or key in shared memory to the next."""
    return problem["head_size"] * ELEMENT + PAD


def value_pitch(f: Fields) -> Any:
    """The same of values, which wgmma's warps swizzle."""
    return f.rows * ELEMENT + np.where(by_wgmma(f), 0, PAD)


def gate_bytes(f: Fields) -> Any:
    """Of one of the arrays of a chunk: a lane each, at least."""
    return 4 * np.maximum(f.chunk, WARP)


def blocks(f: Fields) -> Any:
    """16 x 16 blocks on and below the diagonal of a chunk's square."""
    count = f.chunk // UNIT
    return count * (count + 1) // 2


def solves(f: Fields) -> Any:
    """Blocks of tokens of a chunk that are solved one after another."""
    return f.chunk // f.solve_block


def far(f: Fields) -> Any:
    """Whether tokens of a chunk are related outside the blocks that are solved in float32."""
    return f.chunk > f.solve_block


def parts(f: Fields, name: str) -> Any:
    """Terms of an operand."""
    return np.where(getattr(f, name) == PAIRS, 2, 1)


def square(f: Fields) -> Any:
    """16 x 16 blocks of a block of tokens that is solved at a time."""
    return (f.solve_block // UNIT) ** 2


def numbers_bytes(f: Fields) -> Any:
    """Of room for a chunk's arrays of gates in a packet, which does not need them all."""
    return (GATES - 1) * gate_bytes(f) + 4 * WARP


def packet_lines(f: Fields) -> Any:
    """Of what a chunk's tokens do to each other, for a value head: see `packets.blocks`."""
    handed = blocks(f) * (parts(f, "operands") + parts(f, "solve"))
    return handed + -(-numbers_bytes(f) // LINE)


def heads_each(problem: Problem) -> int:
    """Value heads of one key head in a CTA that relates tokens."""
    return 1 if problem["num_v_heads"] // problem["num_q_heads"] % 2 else 2


def relating_warps(f: Fields) -> Any:
    """Of a CTA that relates tokens: one for each block, and one more where these are few."""
    return blocks(f) + (f.chunk <= 2 * UNIT)


def relating_bytes(f: Fields, problem: Problem) -> Any:
    """Of the layout of `packets.Relate`."""
    solved = solves(f) * square(f) * (BLOCK_BYTES * parts(f, "solve") + NEAR_BYTES)
    of_head = GATES * gate_bytes(f) + solved
    return 2 * f.chunk * key_pitch(problem) + heads_each(problem) * of_head


def smem_bytes(f: Fields, problem: Problem, device: Device) -> Any:
    """Of the layout in `kernel.Shape`, or of `packets.Carry`, the larger of two kernels'; what
    tcgen05 reads is not padded, and comes last, on its alignment."""
    if_two = f.stages * (f.chunk * value_pitch(f) + LINE * packet_lines(f))
    handed = blocks(f) * BLOCK_BYTES * parts(f, "operands")
    handed = handed + np.where(far(f), blocks(f) * BLOCK_BYTES * parts(f, "solve"), 0)
    handed = handed + solves(f) * square(f) * BLOCK_BYTES * parts(f, "solve")
    near = solves(f) * square(f) * NEAR_BYTES
    one = BUFFERS * handed + GATE_BUFFERS * GATES * gate_bytes(f) + near
    one = one + f.stages * f.chunk * value_pitch(f)
    rest = np.where(f.kernels == ONE, one, if_two)
    ring, pads = f.stages * f.chunk * 2 * key_pitch(problem), f.stages * f.chunk * 2 * PAD
    by_one_thread = by_tcgen05(f, problem, device)
    aligned = -(-(rest + BARRIERS * by_one_thread) // TILE_ALIGN) * TILE_ALIGN
    return ring + np.where(by_one_thread | by_wgmma(f), aligned - pads, rest)


def registers(f: Fields, problem: Problem, device: Device) -> Any:
    """Registers that a thread cannot do without, fitted to where ptxas begins to spill."""
    held = f.row_tiles * (problem["head_size"] / 2 + 1.15 * f.chunk)
    more = 8 * ((f.operands == HALF) & (f.solve == PAIRS))
    more = more + 4 * ((f.operands == PAIRS) & (f.row_tiles == 2))
    once = (f.solve != PAIRS) & (f.solve_block == 2 * UNIT)
    more = more + 15 * ((f.operands == PAIRS) & (f.row_tiles == 1) & once)
    terms, chunk = TERMS[problem["head_size"]]
    more = more + terms * ((f.operands == PAIRS) & (f.row_tiles == 1) & (f.chunk >= chunk))
    found = held + f.chunk / 8 + 50 + more
    if device.has_tmem:
        by_state = f.row_tiles * (problem["head_size"] / 2 + f.chunk) + 32 + kept(f)
        by_state = by_state + 32 * ((f.chunk == 64) & (problem["head_size"] == 256))
        found = np.where(by_tcgen05(f, problem, device), by_state, found)
    return np.asarray(found).astype(int)


def kept(f: Fields) -> Any:
    """Registers that helpers of a single kernel keep over a chunk, as gates of the next: main warps
    run the same program, so that they have them beside a state. Fitted to where ptxas spills."""
    pairs = (f.operands == PAIRS) & ((f.solve == PAIRS) | (f.helpers == 6))
    more = 9 * ((f.chunk == 64) & (pairs | (f.helpers == 1))) + 8 * (f.solve_block == 2 * UNIT)
    return more * (f.kernels == ONE)


def wgmma_registers(f: Fields, problem: Problem, turns: int) -> Any:
    """Registers that a main warp cannot do without where wgmma is given the state in so many turns,
    fitted to where ptxas begins to spill."""
    size, terms = problem["head_size"], parts(f, "operands")
    more = 16 * ((f.chunk == 32) & (f.row_tiles == 1)) + 26 * ((f.chunk == 64) & (terms == 2))
    tight = (f.chunk == 32) & (f.row_tiles == 2) & ((f.solve == PAIRS) | (f.helpers == 1))
    more = more + 8 * (f.solve == PAIRS) + 16 * tight + 68 - 22 * turns
    return f.row_tiles * (size / 2 + f.chunk) + (size / turns + f.chunk) / 4 * terms + more


def turns(f: Fields, problem: Problem, device: Device) -> Any:
    """In how many wgmma is given the state: one has less latency, two take fewer registers."""
    return 2 - (wgmma_registers(f, problem, 1) <= main_registers(f, device))


def splits(f: Fields) -> Any:
    """Whether helpers leave main warps by wgmma some of their registers."""
    return (main_warps(f) == 8) & (f.helpers == 4)


def main_registers(f: Fields, device: Device) -> Any:
    """Registers that a main warp by wgmma may have."""
    return np.where(splits(f), SPLIT[0], register_limit(f, device))


def register_limit(f: Fields, device: Device) -> Any:
    quarter = -(-warps(f) // 4)  # of the SM's registers, which so many warps share
    return device.register_share(4 * WARP * quarter)


def suffice(f: Fields, problem: Problem, device: Device) -> Any:
    """Whether registers do; a helper that solves 32 tokens has a column of them there."""
    by_mma = registers(f, problem, device) <= register_limit(f, device)
    columns = splits(f) & (f.solve_block == 2 * UNIT) & (f.kernels == ONE)
    enough = wgmma_registers(f, problem, 2) <= main_registers(f, device)
    # beside heads that no shift divides, ptxas spills for sm_100a what it holds for sm_90a
    odd = device.has_tmem and (problem["num_v_heads"] // problem["num_q_heads"]).bit_count() > 1
    full = (f.chunk == 64) & (f.operands == PAIRS) & (f.solve == PAIRS) & (f.kernels == TWO)
    by_mma = by_mma & np.logical_not(odd & full & (f.solve_block == 2 * UNIT))
    return np.where(by_wgmma(f), enough & np.logical_not(columns), by_mma)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM; ptxas takes registers that it could do without."""
    held = np.minimum(HOARD * registers(f, problem, device), register_limit(f, device)).astype(int)
    held = -(-held // 8) * 8
    held = np.where(by_wgmma(f), register_limit(f, device), held)
    smem, threads = smem_bytes(f, problem, device), WARP * warps(f)
    tmem = tmem_columns(f, problem) * by_tcgen05(f, problem, device)
    resident = device.resident_blocks(smem, held, threads, tmem)
    return Resources(smem, held, threads, tmem, resident)


RULES = (
    rule(
        "the rows of a CTA divide those of a state",
        "rows",
        lambda f, p, d: p["head_size"] % f.rows == 0,
    ),
    rule(
        "the rows of a warp divide those of a CTA",
        "rows row_tiles",
        lambda f, p, d: f.rows % (UNIT * f.row_tiles) == 0,
    ),
    rule(
        "what is solved at a time divides a chunk",
        "chunk solve_block",
        lambda f, p, d: f.chunk % f.solve_block == 0,
    ),
    rule(
        "most helpers have blocks of tokens to relate",
        "chunk helpers",
        lambda f, p, d: f.helpers <= 2 * blocks(f),
    ),
    rule(
        "chunks exceed the shared memory of a CTA",
        "kernels products chunk rows row_tiles stages operands solve solve_block",
        lambda f, p, d: smem_bytes(f, p, d) <= d.smem_per_block,
    ),
    rule(
        "states and sums exceed the registers of a thread",
        "kernels products chunk rows row_tiles helpers operands solve solve_block",
        suffice,
    ),
    rule(
        "wgmma is of sm_90a, and of four or eight main warps",
        "products rows row_tiles",
        lambda f, p, d: (f.products != WGMMA) | (not d.has_tmem and main_warps(f) % 4 == 0),
    ),
)


def revise(choices: Mapping[str, Choice]) -> Mapping[str, Choice]:
    """Strategies that name neither are of one kernel, and by mma.sync."""
    return {"kernels": ONE, "products": MMA_SYNC, **choices}
