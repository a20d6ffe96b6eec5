"""What a gdn_prefill strategy asks of the machine, for the analytic model; what a policy sees.

A sequence is one chain of chunks: a chunk takes the longer of what a main warp and a helper need
for it, and the tensor cores' time of all. Sequences are taken to be of equal length.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.problem import ELEMENT
from ptxflow.compiler.kernels.waves import choices, compared, filled, spread


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given."""

    mma: float = 1.7  # of an SM's tensor cores, for a warp's m16n8k16
    issue: float = 7.0  # of a warp alone, from one to the next
    matrix: float = 6.0  # and for an ldmatrix
    solve: float = 260.0  # of a main warp, for a block of tokens: a chain of products
    store: float = 12.0  # for 8 tokens of a tile: packed, turned, stored
    turn: float = 350.0  # of a chunk: the barrier, gates, and what surrounds its loops
    copy: float = 14.0  # of a helper, for 16 bytes of each lane
    convert: float = 40.0  # for as much that becomes float16
    relate: float = 220.0  # for a 16 x 16 block, beside its products
    column: float = 28.0  # for a column that is eliminated
    gates: float = 450.0  # for a chunk's gates
    start: float = 3000.0  # of a CTA, before its first chunk
    dram: float = 1.0  # the time of DRAM traffic over what the device's rates say
    flight: float = 70.0  # from a warpgroup's last wgmma to what it leaves
    # by tcgen05: estimates, no B200 has run any
    trip: float = 250.0  # from a thread's first MMA to what a warp loads, beside the MMAs' time
    move: float = 1.0  # of a register of each lane, to or from tensor memory


CHUNKS = choices(decisions.DECISIONS, "chunk")
RELATING_REGISTERS = 96  # that the first of two kernels takes
#: cycles of the tensor core for what m16n8k16 has: 128 or 64 lanes take N / 2 for K = 16; of an
#: SM's for the same by wgmma
TCGEN05, WGMMA = 4.0, 1.0
CUTS = (1, 2, 4, 8)  # CTAs that share a head
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs()}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy: a tile is a CTA's sequence, a step a chunk of it."""
    c = costs_of("gdn_prefill", COSTS, device)
    size, sequences = problem["head_size"], problem["num_seqs"]
    count = sequences * problem["num_v_heads"] * (size // f.rows)
    steps = np.ceil(problem["total_seq_len"] / sequences / f.chunk)
    taken = decisions.resources(f, problem, device)
    by_tcgen05 = decisions.by_tcgen05(f, problem, device)
    by_wgmma, warps = decisions.by_wgmma(f), decisions.main_warps(f)
    tiles = f.rows // decisions.UNIT * by_wgmma
    state, cross = _state_products(f, size), _cross_products(f)
    own = cross + np.where(by_tcgen05 | by_wgmma, 0, state)
    apart = np.where(by_tcgen05, state * TCGEN05, 0) + tiles * state * WGMMA
    shared = decisions.blocks(f) * (size // decisions.UNIT) * 4
    alone = f.kernels == decisions.ONE
    asked = f, problem, c, f.helpers
    shared, packet = np.where(alone, shared, 0), np.where(alone, 0, _packet(f))
    products = warps * f.row_tiles * own + shared
    state_bytes = 8 * f.rows * size
    row_bytes = ELEMENT * (2 * size + 2 * f.rows)
    return Demand(
        blocks=count,
        resident=np.maximum(taken.occupancy, 1),
        steps=steps + 1,
        stages=np.maximum(f.stages - 1, 1),
        mma_cycles=c.mma * products + apart,
        smem_bytes=512 * (warps * _matrices(f, size, by_tcgen05 | by_wgmma) + 0.75 * shared)
        + f.chunk * (2 * decisions.key_pitch(problem) + decisions.value_pitch(f))
        + tiles / 4 * 3 * f.chunk * size * ELEMENT * decisions.parts(f, "operands"),
        l2_bytes=f.chunk * row_bytes + packet,
        issue_cycles=np.maximum(
            _main(f, size, c, own, by_tcgen05), np.where(alone, _helper(*asked), _copies(*asked))
        ),
        epilogue_cycles=state_bytes / 32,
        dram_bytes=problem.bytes * c.dram,
        setup_cycles=c.start + state_bytes / 32,
        following=None if alone is True else _relating(f, problem, device, c, alone),
    )


def _packet(f: Fields) -> Any:
    """Bytes of what tokens of a chunk do to each other, between two kernels."""
    return decisions.LINE * decisions.packet_lines(f)


def _relating(f: Fields, problem: Problem, device: Device, c: Costs, alone: Any) -> Demand:
    """The load of the kernel that relates tokens, which is launched first; a tile is a chunk."""
    heads, size = problem["num_v_heads"], problem["head_size"]
    each = decisions.heads_each(problem)
    count = (problem["total_seq_len"] // f.chunk + problem["num_seqs"]) * (heads // each)
    smem = decisions.relating_bytes(f, problem)
    warps = decisions.relating_warps(f)
    return Demand(
        blocks=np.where(alone, 0, count),
        resident=np.maximum(
            device.resident_blocks(smem, RELATING_REGISTERS, decisions.WARP * warps), 1
        ),
        mma_cycles=c.mma * 4 * decisions.blocks(f) * (size // decisions.UNIT),
        l2_bytes=2 * ELEMENT * f.chunk * size + _packet(f),
        issue_cycles=_helper(f, problem, c, warps),
        setup_cycles=c.start,
    )


def _state_products(f: Fields, size: int) -> Any:
    """MMAs of a tile of 16 rows with a state, for a chunk."""
    units, steps = f.chunk // decisions.UNIT, size // decisions.UNIT
    return 6 * units * steps * decisions.parts(f, "operands")


def _cross_products(f: Fields) -> Any:
    """The same with what tokens do to each other: all pairs of terms, but the last with the
    last."""
    units = f.chunk // decisions.UNIT
    terms = 2 * decisions.parts(f, "operands") - 1 + 2 * decisions.parts(f, "solve") - 1
    return units * (units + 1) * terms


def _matrices(f: Fields, size: int, apart: Any) -> Any:
    """ldmatrix instructions of a main warp for a chunk; `apart`: keys and queries take none."""
    units, steps = f.chunk // decisions.UNIT, size // decisions.UNIT
    related = decisions.blocks(f) * (decisions.parts(f, "operands") + decisions.parts(f, "solve"))
    return np.where(apart, 0, 3 * units * steps) + related + units * f.row_tiles


def _main(f: Fields, size: int, c: Costs, products: Any, by_tcgen05: Any) -> Any:
    """Cycles of a main warp alone for a chunk; S K^T and X^T K are a round trip each."""
    by_wgmma = decisions.by_wgmma(f)
    work = f.row_tiles * products * c.issue
    work = work + _matrices(f, size, by_tcgen05 | by_wgmma) * c.matrix
    apart = f.row_tiles * 4 * WGMMA * _state_products(f, size) / 3
    work = work + by_wgmma * 2 * (c.flight + apart)
    stores = f.row_tiles * (f.chunk // 8) * c.store
    moved = f.chunk + size / 2 + (f.chunk + size) / 4 * decisions.parts(f, "operands")
    work = work + np.where(by_tcgen05, 2 * c.trip + f.row_tiles * moved * c.move, 0)
    return work + stores + decisions.solves(f) * decisions.parts(f, "solve") * c.solve + c.turn


def _helper(f: Fields, problem: Problem, c: Costs, warps: Any) -> Any:
    """Cycles of one of so many helpers alone for a chunk."""
    size = problem["head_size"]
    mine = np.ceil(decisions.blocks(f) / warps)
    columns = np.ceil(f.chunk / decisions.WARP / warps) * f.solve_block
    related = mine * (c.relate + size // decisions.UNIT * (4 * c.issue + 3 * c.matrix))
    return c.gates + _copies(f, problem, c, warps) + related + columns * c.column


def _copies(f: Fields, problem: Problem, c: Costs, warps: Any) -> Any:
    """Of it what copies take."""
    size = problem["head_size"]
    keys = f.chunk * 2 * size * ELEMENT / 16 / decisions.WARP / warps
    values = f.chunk * f.rows * ELEMENT / 16 / decisions.WARP / warps
    convert = np.where((f.operands == decisions.HALF) & (problem.dtype != "float16"), c.convert, 0)
    return (keys + values) * c.copy + keys * convert + c.turn


def features(problem: Problem, device: Device) -> dict[str, float]:
    """What a policy sees beside the axes: lengths, heads; of each chunk how full it is, and how
    many tokens a CTA goes through beside those of others; of each cut of a head how it spreads."""
    heads, size = problem["num_v_heads"], problem["head_size"]
    pairs, length = problem["num_seqs"] * heads, problem["total_seq_len"] / problem["num_seqs"]
    out = {
        "log2_length": (math.log2(max(length, 1)) - 8) / 4,
        "log2_pairs": (math.log2(pairs) - 6) / 3,
        "log2_head_size": (math.log2(size) - 7) / 2,
        "value_heads_each": math.log2(heads / problem["num_q_heads"]) / 3,
    }
    out |= {f"filled_{chunk}": filled(length, chunk) for chunk in CHUNKS}
    out |= compared("tokens", {str(c): (math.ceil(length / c) + 1) * c for c in CHUNKS})
    for cuts in CUTS:
        out |= spread(str(cuts), pairs * cuts, device)
    return out | compared("rows", {str(n): math.ceil(pairs * n / device.sms) / n for n in CUTS})
