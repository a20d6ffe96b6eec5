"""What a latent attention strategy asks of the machine, for the analytic model."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of, either
from ptxflow.compiler.kernels.mla import decisions
from ptxflow.compiler.kernels.mla import hopper_decisions as hopper
from ptxflow.compiler.kernels.mla.problem import ELEMENT, cta_heads, head_ctas
from ptxflow.compiler.kernels.mla.shares import AROUND, FEWEST, FINE, TRIED
from ptxflow.compiler.kernels.waves import choices, compared, filled, spread


@dataclass(frozen=True)
class Costs:
    """Cycles, or the unit that is given; estimates, which no measurement has checked."""

    # by wgmma
    weigh: float = 290.0  # from scores to the products of their weights, whatever the tile
    score: float = 4.5  # and for each token of 64 rows
    piece: float = 2.0  # of that, less where half of the weights comes first
    lead: float = 0.3  # of all, hidden by scores of the next tile that come before
    early: float = 0.5  # added by each further part of them that is not there yet
    rescale: float = 115.0  # for sums that follow new maxima, which later tiles have fewer of
    narrow: float = 0.33  # longer products with keys where a tile has fewer than 64 tokens
    ask: float = 500.0  # for queries, which are copied before the first product
    stage: float = 1000.0  # for outputs, which pass through shared memory
    # by tcgen05: no B200 has run any
    turn: float = 700.0  # of a tile, from its scores to products with values
    # by mma.sync, and of all
    mma: float = 0.62  # of the tensor core's rate, what mma.sync reaches
    meeting: float = 60.0  # of all warps
    instruction: float = 1.0  # of a warp, in a quarter of an SM
    chain: float = 18.0  # between two MMAs of one sum, of two sums in turn
    start: float = 3000.0  # to find a sequence, its pages and its first rows
    leave: float = 1500.0  # to sum up and store
    chunk: float = 900.0  # of the second kernel, for the chunks that it loads together
    dram: float = 1.08  # traffic, over what cannot be avoided


CHUNKS = choices(decisions.DECODE_DECISIONS, "chunk")
QUERIES = choices(decisions.PREFILL_DECISIONS, "queries")
TILES, CUTS = choices(decisions.TILING, "tile"), choices(decisions.PREFILL_DECISIONS, "parts")
MOST_TOKENS = 64  # of a step
COSTS = {"h200": Costs(), "h100": Costs(), "b200": Costs(mma=0.31)}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; a tile is a CTA's span of tokens, a step a tile of the ring."""
    c = costs_of("mla", COSTS, device)
    blocks, steps, imbalance = _spans(f, problem, device)
    return of_tiles(
        f,
        problem,
        device,
        c,
        blocks=blocks,
        steps=steps,
        dram_bytes=_dram(f, problem, blocks) * c.dram,
        imbalance=imbalance,
        following=_second(f, problem, device, c),
    )


def of_tiles(f: Fields, problem: Problem, device: Device, c: Costs, **more: Any) -> Demand:
    """The load of strategies whose steps are tiles of the ring; `more`: what else is known."""
    by_tcgen05 = decisions.by_tcgen05(f, problem, device)
    cycles, read = _of_tcgen05(f, problem)
    latency = 2 * c.meeting + _latency_cycles(f, problem, c)
    return Demand(
        resident=np.minimum(decisions.resources(f, problem, device).occupancy, 32),
        stages=f.stages,
        mma_cycles=np.where(by_tcgen05, cycles, _mma_cycles(f, problem, device, c)),
        smem_bytes=np.where(by_tcgen05, read, _shared_bytes(f, problem)),
        l2_bytes=decisions.stage_bytes(f, problem),
        issue_cycles=np.where(by_tcgen05, c.turn, latency),
        epilogue_cycles=c.leave,
        setup_cycles=c.start,
        special=f.tile * decisions.columns(f, problem),
        **more,
    )


def prefill_demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy of a prefill, by either instruction."""
    others = demand(f, problem, device)
    if device.has_tmem:
        return others
    by_wgmma = _by_wgmma(f, problem, device, costs_of("mla", COSTS, device), others)
    return either(f.core == hopper.WGMMA, by_wgmma, others)


def _by_wgmma(f: Fields, problem: Problem, device: Device, c: Costs, other: Demand) -> Demand:
    """The load of each strategy by wgmma; `other`: were it one by mma.sync, which has as many CTAs.

    The tensor core multiplies a tile of tokens with queries and weights with it, and stands still
    while scores become weights, as far as the next tile's scores cannot come before.
    """
    latent, row = problem["head_dim_ckv"], hopper.row_bytes(problem)
    keys = row // ELEMENT * np.where(f.tile < hopper.ROWS, 1 + c.narrow, 1.0)
    return replace(
        other,
        resident=np.maximum(hopper.resources(f, problem, device).occupancy, 1),
        mma_cycles=2 * f.tile * hopper.ROWS * (keys + latent) / device.mma_flops_per_cycle,
        smem_bytes=_passing(f, latent, row),
        l2_bytes=f.tile * row,
        issue_cycles=_exposed(f, c),
        epilogue_cycles=other.epilogue_cycles + np.where(f.parts > 1, 0.0, c.stage),
        setup_cycles=other.setup_cycles + c.ask,
        special=f.tile * hopper.ROWS,
    )


def _passing(f: Fields, latent: int, row: int) -> Any:
    """Bytes: tokens as they come, as keys with queries, as values; weights of one warpgroup for the
    other."""
    return (
        (2 * f.tile + hopper.ROWS) * row
        + f.tile * latent * ELEMENT
        + 2 * hopper.ROWS * f.tile * ELEMENT
    )


def _exposed(f: Fields, c: Costs) -> Any:
    """Cycles of a step in which nothing is multiplied. Of two stages one is being filled then, so
    that few of the next tile's scores can come before; of four they all can."""
    chain = c.weigh + (c.score - c.piece * (f.pieces - 1)) * f.tile
    chain = chain + c.rescale * (f.rescale == hopper.ALWAYS)
    two = 1 - c.lead * np.minimum(f.lead, 1) + c.early * np.maximum(f.lead - 1, 0)
    return chain * np.where(f.stages > 2, 1.0 * (f.lead < 2), two)


def _spans(f: Fields, problem: Problem, device: Device) -> tuple[Any, Any, Any]:
    """CTAs, tiles of each, and how much more the busiest SM has than they say, of sequences that
    are alike."""
    count, shared = problem["len_indptr"] - 1, head_ctas(problem)
    length = decisions.tokens(problem) / count
    if decisions.decodes(problem):
        chunk = np.where(f.chunk > 0, np.minimum(f.chunk, length), length)
        each = np.ceil(length / chunk)
        return count * each * shared, np.ceil(length / each / f.tile), 1.0 + 0 * f.tile
    mean = seen(problem)
    steps, parts = _shares(f, problem, device)
    blocks = count * np.ceil(problem["total_q"] / count / f.queries) * parts * shared
    rounds = np.maximum(blocks / device.sms, 1.0)
    return blocks, steps, 1 + (length / mean - 1) / rounds


def _shares(f: Fields, problem: Problem, device: Device) -> tuple[Any, Any]:
    """Tiles of a part of what a query of a prefill sees, and parts, of sequences that are alike:
    see `Shares`, and the launch."""
    tiles, count = np.ceil(seen(problem) / f.tile), problem["len_indptr"] - 1
    places = count * np.ceil(problem["total_q"] / count / f.queries)
    sms, asked = device.sms // head_ctas(problem), decisions.places(f, problem) * f.parts
    aim = np.maximum((asked + sms // 2) // sms * sms, np.minimum(asked, sms))
    least = np.maximum(np.ceil(places * tiles / np.maximum(aim - places // 2, 1)), FEWEST)
    sizes = [least + np.maximum(least // FINE, 1) * i for i in range(TRIED)]
    loads = [np.ceil(places * np.ceil(tiles / n) / sms) * (n + AROUND // f.tile) for n in sizes]
    parts = np.ceil(tiles / np.choose(np.argmin(loads, axis=0), sizes))
    parts = np.where(f.parts > 1, parts, 1)
    return np.ceil(tiles / parts), parts


def seen(problem: Problem) -> float:
    """Tokens that a query of a prefill sees, in the mean."""
    count = problem["len_indptr"] - 1
    length, asked = decisions.tokens(problem) / count, problem["total_q"] / count
    return max(length - (min(asked, length) - 1) / 2, 1.0)


def _mma_cycles(f: Fields, problem: Problem, device: Device, c: Costs) -> Any:
    size = 2 * problem["head_dim_ckv"] + problem["head_dim_kpe"]
    return 2 * f.tile * decisions.columns(f, problem) * size / (device.mma_flops_per_cycle * c.mma)


def _of_tcgen05(f: Fields, problem: Problem) -> tuple[Any, Any]:
    """Cycles of a tile, half a column each whatever the rows, and bytes: a tile comes, and an MMA
    reads 32 of each of its rows and columns; there are 64 rows of tokens, then 128 of dims."""
    latent, across = problem["head_dim_ckv"], decisions.columns(f, problem)
    keys, values = (latent + problem["head_dim_kpe"]) // 16, f.tile // 16 * (latent // 128)
    read = 32 * (keys * (64 + across) + values * (128 + across))
    return (keys + values) * across / 2, read + decisions.stage_bytes(f, problem)


def _shared_bytes(f: Fields, problem: Problem) -> Any:
    """Rows as they come, keys for each group, queries for each 16 tokens, values, weights; scores
    in parts are written and read once, for keys and queries that fewer warps read."""
    latent, rope = (problem[f"head_dim_{part}"] * ELEMENT for part in ("ckv", "kpe"))
    across = decisions.columns(f, problem)
    parted = f.scores == decisions.DIMS
    down = f.tile // decisions.MMA_TOKENS
    halves = across // decisions.MMA_COLUMNS // decisions.part_columns(f, problem)  # of the columns
    readers = np.where(parted, f.warps // decisions.PARTS // halves, down)
    queries = np.where(f.operand == decisions.REGISTERS, 0, readers * across * (latent + rope))
    keys = f.tile * (latent + rope) * (1 + np.where(parted, halves, decisions.groups(f)))
    weights = f.tile * across * ELEMENT * (1 + f.warps)
    return keys + f.tile * latent + queries + weights + 2 * decisions.partial_bytes(f, problem)


def _latency_cycles(f: Fields, problem: Problem, c: Costs) -> Any:
    """Of the chain of MMAs of a score, and of instructions that depend on each other."""
    steps = (problem["head_dim_ckv"] + problem["head_dim_kpe"]) // 16
    values = (
        problem["head_dim_ckv"]
        // 16
        // f.warps
        * (f.tile // 16)
        * decisions.columns(f, problem)
        // 8
    )
    chain = np.where(
        f.scores == decisions.DIMS, steps // decisions.PARTS * c.chain + c.meeting, steps * c.chain
    )
    return chain + values * 4 * c.instruction


def _dram(f: Fields, problem: Problem, blocks: Any) -> Any:
    """Bytes; what chunks or parts hand on is written, and read from L2."""
    whole = (problem["len_indptr"] - 1) * head_ctas(problem)
    split = blocks > whole if decisions.decodes(problem) else f.parts > 1
    handed = np.where(split, blocks * decisions.columns(f, problem) * 4, 0)
    return problem.bytes + handed * problem["head_dim_ckv"]


def _second(f: Fields, problem: Problem, device: Device, c: Costs) -> Demand:
    if not decisions.decodes(problem):
        return _parts_load(f, problem, device, c)
    length = decisions.tokens(problem) / problem["batch_size"]
    chunks = np.ceil(length / np.where(f.chunk > 0, f.chunk, length))
    blocks = (
        problem["batch_size"] * problem["head_dim_ckv"] // decisions.MMA_DIMS // decisions.SUM_WARPS
    )
    blocks *= head_ctas(problem)
    return sums_load(f, np.where(f.chunk > 0, blocks, 0), chunks, c)


def _parts_load(f: Fields, problem: Problem, device: Device, c: Costs) -> Demand:
    """The second kernel of a prefill, which more bytes pass; L2 may have no room for all."""
    _, parts = _shares(f, problem, device)
    heads, latent = 4 * cta_heads(problem), problem["head_dim_ckv"]  # bytes; dims
    rows = problem["total_q"] * head_ctas(problem)  # of each CTA that shares heads
    by_rows = (f.core == hopper.WGMMA) & (not device.has_tmem)
    dims = decisions.SUM_WARPS * np.where(by_rows, decisions.MMA_COLUMNS, decisions.MMA_DIMS)
    dims = dims * decisions.sum_blocks(f, problem, by_rows)
    return replace(
        sums_load(f, np.where(f.parts > 1, rows * latent // dims, 0), parts, c),
        l2_bytes=1.0 * np.minimum(f.sum_chunks, parts) * dims * heads,
        dram_bytes=np.maximum(rows * parts * latent * heads - device.l2_bytes, 0),
    )


def sums_load(f: Fields, blocks: Any, chunks: Any, c: Costs) -> Demand:
    """The second kernel, which few bytes pass: it waits for its loads."""
    return Demand(
        blocks=blocks,
        resident=8,
        steps=np.where(chunks > 1, np.ceil(chunks / f.sum_chunks), 1),
        mma_cycles=50.0,
        l2_bytes=1.0,
        issue_cycles=c.chunk * np.where(chunks > 1, 1.0, 0.0) + 30.0 * f.sum_chunks,
        epilogue_cycles=np.where(f.dependent == 1, 300.0, 1000.0),
        setup_cycles=600.0,
    )


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes of decoding, and of each chunk how full its tiles are, how CTAs spread, and what the
    busiest SM reads beside those of other chunks; and how CTAs of the second kernel spread."""
    count = problem["len_indptr"] - 1
    length = decisions.tokens(problem) / count
    out = {
        "log2_length": (math.log2(max(length, 1.0)) - 10) / 4,
        "log2_sequences": (math.log2(count) - 3) / 3,
        "log2_heads": (math.log2(problem["num_qo_heads"]) - 4) / 2,
    }
    read, shared = {}, head_ctas(problem)
    for chunk in CHUNKS:
        f = Fields({"chunk": chunk, "tile": MOST_TOKENS})
        blocks, steps, _ = (float(found) for found in _spans(f, problem, device))
        read[str(chunk)] = math.ceil(blocks / device.sms) * steps
        out[f"filled_{chunk}"] = 2 * length * count * shared / (blocks * steps * MOST_TOKENS) - 1
        out |= spread(str(chunk), blocks, device)
    out |= spread(
        "sums", count * shared * (problem["head_dim_ckv"] // 16 // decisions.SUM_WARPS), device
    )
    return out | compared("read", read)


def prefill_features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, how full tiles of tokens are, and for the queries of a CTA how full it is, how CTAs
    spread, and what the busiest SM does beside other choices: in steps, and in those of queries;
    and for the parts of what as many queries as fit see how CTAs spread, and their steps."""
    count = problem["len_indptr"] - 1
    length, each = decisions.tokens(problem) / count, problem["total_q"] / count
    out = {
        "log2_tokens": (math.log2(max(length, 1.0)) - 10) / 4,
        "log2_sequences": (math.log2(count) - 3) / 3,
        "log2_queries": (math.log2(max(each, 1.0)) - 8) / 4,
        "log2_heads": (math.log2(problem["num_qo_heads"]) - 4) / 2,
        "seen": length / max(length + each, 1.0),
    }
    out |= {f"filled_tile_{tile}": filled(seen(problem), tile) for tile in TILES}
    out |= compared("tile", {str(t): math.ceil(seen(problem) / t) * t for t in TILES})
    short, worth, parted = dict[str, float](), dict[str, float](), dict[str, float]()
    for queries in QUERIES:
        f = Fields({"queries": queries, "tile": MOST_TOKENS, "parts": 1})
        blocks, steps, imbalance = (float(found) for found in _spans(f, problem, device))
        short[str(queries)] = math.ceil(blocks / device.sms) * steps * imbalance
        worth[str(queries)] = short[str(queries)] * queries
        out[f"filled_{queries}"] = filled(each, queries)
        out |= spread(str(queries), blocks, device)
    most = min(max(MOST_TOKENS // cta_heads(problem), 1), QUERIES[-1])
    for cut in CUTS:
        f = Fields({"queries": most, "tile": MOST_TOKENS, "parts": cut})
        blocks, steps, imbalance = (float(found) for found in _spans(f, problem, device))
        parted[str(cut)] = math.ceil(blocks / device.sms) * steps * imbalance
        out |= spread(f"parts_{cut}", blocks, device)
    out |= compared("parts", parted)
    return out | compared("short", short) | compared("worth", worth)
