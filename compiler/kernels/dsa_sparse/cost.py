"""What a sparse latent attention strategy asks of the machine, for the analytic model."""

import math
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Fields, Problem, costs_of
from ptxflow.compiler.kernels.dsa_sparse.decisions import DECISIONS, chunks, span
from ptxflow.compiler.kernels.mla import cost as mla
from ptxflow.compiler.kernels.mla import decisions
from ptxflow.compiler.kernels.mla.problem import head_ctas
from ptxflow.compiler.kernels.waves import choices, compared, spread

FIRST = 1200.0  # cycles to load a list's first entries; there are no sequences to find
CHUNKS = choices(DECISIONS, "chunk")
COSTS = {
    "h200": mla.Costs(start=FIRST),
    "h100": mla.Costs(start=FIRST),
    "b200": mla.Costs(start=FIRST, mma=0.31),
}


def demand(f: Fields, problem: Problem, device: Device) -> Demand:
    """The load of each strategy; a tile is a CTA's part of a list, a step a tile of the ring."""
    c = costs_of("dsa_sparse", COSTS, device)
    parts = chunks(f, problem)
    rows = problem["num_tokens"] * head_ctas(problem)  # of each CTA that shares heads
    blocks = rows * problem["head_dim_ckv"] // decisions.MMA_DIMS // decisions.SUM_WARPS
    then = mla.sums_load(f, np.where(f.chunk > 0, blocks, 0), parts, c)
    steps, moved = np.ceil(span(f, problem) / f.tile), _dram(f, problem) * c.dram
    ctas = {"blocks": rows * parts, "steps": steps}
    return mla.of_tiles(f, problem, device, c, **ctas, dram_bytes=moved, following=then)


def _dram(f: Fields, problem: Problem) -> Any:
    """Bytes; what chunks hand on is written, and read from L2."""
    handed = chunks(f, problem) * problem["num_tokens"] * problem["num_qo_heads"] * 4
    return problem.bytes + np.where(f.chunk > 0, handed, 0) * problem["head_dim_ckv"]


def features(problem: Problem, device: Device) -> dict[str, float]:
    """Sizes, how much of the cache lists could name, and for each chunk how CTAs spread, and what
    the busiest SM reads beside those of other chunks."""
    tokens, rows = problem["num_tokens"], problem["num_pages"] * problem["page_size"]
    out = {
        "log2_tokens": (math.log2(tokens) - 6) / 4,
        "log2_topk": (math.log2(problem["topk"]) - 8) / 2,
        "log2_heads": (math.log2(problem["num_qo_heads"]) - 4) / 2,
        "log2_share": math.log2(tokens * problem["topk"] / rows) / 4,
    }
    read = {}
    for chunk in CHUNKS:
        f = Fields({"chunk": chunk})
        blocks = tokens * int(chunks(f, problem)) * head_ctas(problem)
        read[str(chunk)] = math.ceil(blocks / device.sms) * float(span(f, problem))
        out |= spread(str(chunk), blocks, device)
    return out | compared("read", read)
