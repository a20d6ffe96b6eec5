"""The decisions of a gated-delta-net decoding kernel, in construction order, and their rules.

`row_threads` lanes share a row of the state, `warps` warps lie side by side on the rows of a head,
and every lane works on `rows_in_flight` such rows at a time. A head is cut over `head_ctas` CTAs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.gdn_decode.problem import STATE_BYTES

REGISTERS, BULK_LOAD, BULK = "registers", "bulk_load", "bulk"
TOGETHER, APART = "together", "apart"
WARP = 32
WIDE = 4  # elements of a 16-byte vector
FEW = 4  # lanes of a row, at least
MAX_ELEMENTS = 64  # of a row, held by a lane
MAX_BARRIERS = 64  # of the rings of a CTA: one thread initialises them

DECISIONS = (
    Decision("row_threads", (4, 8, 16, 32), "lanes that share a row of the state"),
    Decision("vector", (2, 4), "elements of one access: 8 or 16 bytes a lane"),
    Decision("rows_in_flight", (1, 2, 4, 8), "rows of a lane between two reductions"),
    Decision("warps", (1, 2, 4, 8, 16), "warps side by side on a head"),
    Decision("head_ctas", (1, 2, 4, 8, 16, 32), "CTAs that share a head"),
    Decision("ctas_per_sm", (0, 1, 2, 4, 8), "CTAs that stride over the heads; 0: no loop"),
    Decision(
        "path",
        (REGISTERS, BULK_LOAD, BULK),
        "how the state comes and goes: by loads and stores, by bulk loads, or both ways in bulk",
    ),
    Decision("stages", (1, 2, 3, 4, 6, 8), "buffers of a warp's ring of bulk copies"),
    Decision("reduction", (TOGETHER, APART), "S k and S q in one reduction, or S k and new S q"),
)


def threads(f: Fields) -> Any:
    """Of a CTA."""
    return WARP * f.warps


def warp_rows(f: Fields) -> Any:
    """Rows that a warp works on at a time; they follow each other."""
    return WARP // f.row_threads * f.rows_in_flight


def step_rows(f: Fields) -> Any:
    """Rows of a head that a CTA works on at a time."""
    return f.warps * warp_rows(f)


def passes(f: Fields, problem: Problem) -> Any:
    """Steps of a CTA on its part of a head."""
    return problem["head_size"] // np.maximum(f.head_ctas * step_rows(f), 1)


def tiles_per_row(f: Fields, problem: Problem) -> Any:
    """Tiles of a batch row: parts of its heads."""
    return problem["num_v_heads"] * f.head_ctas


def tiles(f: Fields, problem: Problem) -> Any:
    return problem["batch_size"] * tiles_per_row(f, problem)


def loops(f: Fields) -> Any:
    """Whether a CTA strides over tiles."""
    return f.ctas_per_sm > 0


def uses(f: Fields, problem: Problem, device: Device) -> Any:
    """Steps of the CTA that has the most."""
    ctas = np.maximum(device.sms * f.ctas_per_sm, 1)
    return passes(f, problem) * np.where(loops(f), -(-tiles(f, problem) // ctas), 1)


def elements(f: Fields, problem: Problem) -> Any:
    """Elements of a row that a lane holds."""
    return problem["head_size"] // f.row_threads


def bulk(f: Fields) -> Any:
    """Whether the state comes through shared memory."""
    return f.path != REGISTERS


def direct(f: Fields) -> Any:
    """Whether it comes by loads."""
    return f.path == REGISTERS


def buffer_bytes(f: Fields, problem: Problem) -> Any:
    """Of one stage of a warp's ring."""
    return warp_rows(f) * problem["head_size"] * STATE_BYTES


def smem_bytes(f: Fields, problem: Problem) -> Any:
    """The rings and their barriers."""
    return np.where(bulk(f), f.stages * f.warps * (buffer_bytes(f, problem) + 8), 0)


def registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread: at least what ptxas takes, fitted to kernels of the whole space.

    Rows are held once, and a part of them twice while they change; addresses in shared memory cost
    a register for each element, narrow accesses one for most.
    """
    times = 1.25 + bulk(f) + 0.25 * (f.path == BULK) + 0.75 * (f.vector < WIDE)
    rows = f.rows_in_flight * elements(f, problem) * times
    return np.asarray(rows + 3.25 * elements(f, problem) + 7 * f.rows_in_flight + 28).astype(int)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM."""
    held = -(-registers(f, problem) // 8) * 8
    smem = smem_bytes(f, problem)
    resident = device.resident_blocks(smem, held, threads(f))
    return Resources(smem, held, threads(f), 0 * f.warps, resident)


_STEP = "row_threads rows_in_flight warps"
_TILES = "head_ctas ctas_per_sm"
_ALL = "row_threads vector rows_in_flight warps path stages"
RULES = (
    rule(
        "lanes take whole vectors of a row, all of them as many",
        "row_threads vector",
        lambda f, p, d: p["head_size"] % (f.row_threads * f.vector) == 0,
    ),
    rule(
        "narrow vectors, and four lanes a row, are for heads that wider ones do not divide",
        "row_threads vector",
        lambda f, p, d: (
            ((f.vector == WIDE) | (p["head_size"] % (f.row_threads * WIDE) != 0))
            & ((f.row_threads > FEW) | (p["head_size"] % (2 * FEW * WIDE) != 0))
        ),
    ),
    rule(
        f"a lane holds at most {MAX_ELEMENTS} elements of a row",
        "row_threads",
        lambda f, p, d: elements(f, p) <= MAX_ELEMENTS,
    ),
    rule(
        "the rows of a step divide those of a head",
        _STEP,
        lambda f, p, d: p["head_size"] % step_rows(f) == 0,
    ),
    rule(
        "the CTAs of a head have as many steps each",
        f"{_STEP} head_ctas",
        lambda f, p, d: p["head_size"] % (f.head_ctas * step_rows(f)) == 0,
    ),
    rule(
        "a CTA that strides over tiles needs more of them than the first",
        _TILES,
        lambda f, p, d: (f.ctas_per_sm == 0) | (tiles(f, p) > d.sms * f.ctas_per_sm),
    ),
    rule(
        "bulk copies leave 16 bytes to a lane",
        "vector path",
        lambda f, p, d: (f.vector == WIDE) | direct(f),
    ),
    rule(
        "a ring is for bulk copies, and has no more stages than its warp has steps",
        f"{_STEP} {_TILES} path stages",
        lambda f, p, d: (f.stages == 1) | (bulk(f) & (f.stages <= uses(f, p, d))),
    ),
    rule(
        f"the rings of a CTA have at most {MAX_BARRIERS} stages",
        "warps path stages",
        lambda f, p, d: direct(f) | (f.stages * f.warps <= MAX_BARRIERS),
    ),
    rule(
        "the rings exceed the shared memory of a CTA",
        "row_threads rows_in_flight warps path stages",
        lambda f, p, d: smem_bytes(f, p) <= d.smem_per_block,
    ),
    rule(
        "rows and keys exceed the registers of a thread",
        _ALL,
        lambda f, p, d: registers(f, p) <= d.register_share(threads(f)),
    ),
    rule(
        "CTAs that stride over tiles are all resident",
        f"{_ALL} ctas_per_sm",
        lambda f, p, d: f.ctas_per_sm <= resources(f, p, d).occupancy,
    ),
)

#: decisions of earlier forms, which moved no time by more than its noise on an H200 ...
INDIFFERENT = ("gates", "load_cache", "load_prefetch", "store_cache")
#: ... and those of which one choice remains
SETTLED = {"heads": 1, "load_ahead": 0}


def revise(choices: Mapping[str, Choice]) -> Mapping[str, Choice] | None:
    """Recorded choices in today's decisions: several heads to a CTA and rows that are asked for
    ahead have no like."""
    if any(choices.get(name, kept) != kept for name, kept in SETTLED.items()):
        return None
    gone = {*INDIFFERENT, *SETTLED}
    return {name: choice for name, choice in choices.items() if name not in gone}
