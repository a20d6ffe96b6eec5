"""The decisions of an RMSNorm kernel, in construction order, and the rules that make them legal.

`ctas_per_row` CTAs of a cluster share a row, with `row_threads` threads each; `rows` rows lie side
by side in a CTA, and every thread works on `rows_in_flight` such rows at a time. A thread takes
vectors of a row, strided by the row's threads in all its CTAs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.rmsnorm.problem import PER_THREAD

REGISTERS, REREAD = "registers", "reread"
KEPT, EARLY, LATE = "kept", "early", "late"
DEFAULT = "default"
CACHES = (DEFAULT, "no_allocate", "evict_first")
ALL, ROW = "cta", "row"
WARP = 32
QUAD = 4  # sums in an access to shared memory of 16 bytes

_POWERS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MULTIPLES = (96, 192, 384, 768, 160, 320, 640, 224, 448, 896)  # three, five and seven warps, ...
ROW_THREADS = tuple(sorted((*_POWERS, *_MULTIPLES)))
DECISIONS = (
    Decision("ctas_per_row", (1, 2, 4, 8), "CTAs of a cluster that share a row"),
    Decision("row_threads", ROW_THREADS, "of a CTA, that share a row"),
    Decision("rows", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64), "rows side by side in a CTA"),
    Decision("vector", (4, 8), "elements of one load: 8 or 16 bytes a lane"),
    Decision("rows_in_flight", (1, 2, 3, 4, 6, 8), "rows of a thread between two reductions"),
    Decision("residency", (REGISTERS, REREAD), "where a row waits for its mean square"),
    Decision("unroll", (1, 2, 3, 4, 6, 8), "vectors in flight where a row is read again"),
    Decision("ctas_per_sm", (0, 1, 2, 3, 4, 6, 8), "CTAs that stride over the rows; 0: no loop"),
    Decision("load_ahead", (0, 1), "the next rows are asked for before these are reduced"),
    Decision("barrier", (ALL, ROW), "who meets to reduce a row: all warps of the CTA, or its own"),
    Decision("weights", (KEPT, EARLY, LATE), "loaded once, or by row before or after its sum"),
    Decision("load_cache", CACHES, "L1 priority of a row that is read again"),
    Decision("load_prefetch", (0, 256), "bytes that a miss of such a row brings into L2 around it"),
)


def threads(f: Fields) -> Any:
    """Of a CTA."""
    return f.row_threads * f.rows


def group_rows(f: Fields) -> Any:
    """Rows that a CTA normalises at a time."""
    return f.rows * f.rows_in_flight


def groups(f: Fields, problem: Problem) -> Any:
    return -(-problem["batch_size"] // group_rows(f))


def vectors(f: Fields, problem: Problem) -> Any:
    """Vectors of a row that a thread takes."""
    return -(-problem["hidden_size"] // (f.ctas_per_row * f.row_threads * f.vector))


def row_warps(f: Fields) -> Any:
    """Warps of a CTA that share a row; 1 where a warp holds whole rows."""
    return np.maximum(f.row_threads // WARP, 1)


def piece(f: Fields) -> Any:
    """Sums of warps that a lane takes in one access."""
    return np.where(row_warps(f) % QUAD == 0, QUAD, 1)


def sharers(f: Fields) -> Any:
    """Lanes over which the pieces of a row are dealt out: as many as a butterfly can add up."""
    pieces = row_warps(f) // piece(f)
    return pieces & -pieces


def taken(f: Fields) -> Any:
    """Sums of warps that a lane takes of a row."""
    return np.where(row_warps(f) > 1, row_warps(f) // sharers(f) * f.ctas_per_row, 0)


def loops(f: Fields) -> Any:
    """Whether a CTA strides over groups of rows."""
    return f.ctas_per_sm > 0


def smem_bytes(f: Fields) -> Any:
    """One float32 for each warp of a row; twice where the next rows may overtake."""
    sums = 4 * group_rows(f) * row_warps(f) * np.where(loops(f), 2, 1)
    return np.where(row_warps(f) > 1, sums, 0)


def registers(f: Fields, problem: Problem) -> Any:
    """Registers of a thread: what is held of its rows and of the weight, addresses, temporaries.

    Rows are kept in float32: ptxas widens a packed row once, whatever it is told.
    """
    n, packed = vectors(f, problem), f.vector // 2
    summands = 1 + int(problem.constant("residual"))
    ahead = packed * summands * f.load_ahead  # of the next rows, as they are loaded
    held = f.rows_in_flight * n * (f.vector + ahead)
    rows = np.where(f.residency == REGISTERS, held, packed * f.unroll * summands)
    weights = packed * np.where(f.residency == REGISTERS, n, f.unroll)
    addresses = np.where((f.residency == REGISTERS) & (n >= 16), 24, 0)
    sums = f.rows_in_flight * np.maximum(taken(f), 1)
    return addresses + rows + weights + 2 * f.vector + 28 + 3 * f.rows_in_flight + sums


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM."""
    held = -(-registers(f, problem) // 8) * 8
    resident = device.resident_blocks(smem_bytes(f), held, threads(f))
    return Resources(smem_bytes(f), held, threads(f), 0 * f.rows, resident)


_SHAPE = "ctas_per_row row_threads rows vector rows_in_flight residency unroll load_ahead weights"
RULES = (
    rule(
        "CTAs that share a row have four warps of it each, or a multiple of four",
        "ctas_per_row row_threads",
        lambda f, p, d: (f.ctas_per_row == 1) | (row_warps(f) % QUAD == 0),
    ),
    rule(
        "a CTA has 32 to 1024 threads, in whole warps",
        "row_threads rows",
        lambda f, p, d: (threads(f) % WARP == 0) & (threads(f) <= d.threads_per_block),
    ),
    rule(
        "the hidden size is a multiple of the vector",
        "vector",
        lambda f, p, d: p["hidden_size"] % f.vector == 0,
    ),
    rule(
        "half as many threads would cover the row",
        "ctas_per_row row_threads vector",
        lambda f, p, d: (
            (f.ctas_per_row * f.row_threads // 2 * f.vector < p["hidden_size"])
            | (f.row_threads == 4)
        ),
    ),
    rule(
        f"a thread takes at most {PER_THREAD} elements of a row",
        "ctas_per_row row_threads vector",
        lambda f, p, d: vectors(f, p) * f.vector <= PER_THREAD,
    ),
    rule(
        "half as many rows would hold the batch",
        "rows rows_in_flight row_threads",
        lambda f, p, d: (
            (group_rows(f) < 2 * p["batch_size"]) | ((threads(f) <= WARP) & (f.rows_in_flight == 1))
        ),
    ),
    rule(
        "CTAs share rows that are too few for the SMs",
        "ctas_per_row rows rows_in_flight",
        lambda f, p, d: (f.ctas_per_row == 1) | (groups(f, p) < d.sms),
    ),
    rule(
        "rows that are read again come one at a time",
        "residency rows_in_flight",
        lambda f, p, d: (f.residency == REGISTERS) | (f.rows_in_flight == 1),
    ),
    rule(
        "a row that stays in registers is loaded whole",
        "residency unroll",
        lambda f, p, d: (f.residency == REREAD) | (f.unroll == 1),
    ),
    rule(
        "a thread has fewer vectors than are unrolled",
        "ctas_per_row row_threads vector unroll",
        lambda f, p, d: (f.unroll == 1) | (f.unroll <= vectors(f, p)),
    ),
    rule(
        "a CTA that strides over the rows shares none",
        "ctas_per_row ctas_per_sm",
        lambda f, p, d: (f.ctas_per_row == 1) | (f.ctas_per_sm == 0),
    ),
    rule(
        "rows are asked for ahead where a CTA has many and keeps them in registers",
        "residency ctas_per_sm load_ahead",
        lambda f, p, d: (f.load_ahead == 0) | ((f.residency == REGISTERS) & loops(f)),
    ),
    rule(
        "a barrier of a row is for several rows of several warps, and there are 15",
        "ctas_per_row row_threads rows barrier",
        lambda f, p, d: (
            (f.barrier == ALL)
            | (
                (row_warps(f) > 1)
                & (f.rows > 1)
                & (f.rows < d.named_barriers)
                & (f.ctas_per_row == 1)
            )
        ),
    ),
    rule(
        "how caches keep a row matters where it is read again",
        "residency load_cache load_prefetch",
        lambda f, p, d: (
            (f.residency == REREAD) | ((f.load_cache == DEFAULT) & (f.load_prefetch == 0))
        ),
    ),
    rule(
        "weights are kept where rows are, and a CTA has many",
        "residency weights ctas_per_sm",
        lambda f, p, d: (f.weights != KEPT) | ((f.residency == REGISTERS) & loops(f)),
    ),
    rule(
        "a row that is read again meets its weights then",
        "residency weights",
        lambda f, p, d: (f.residency == REGISTERS) | (f.weights == LATE),
    ),
    rule(
        "rows and weights exceed the registers of a thread",
        _SHAPE,
        lambda f, p, d: registers(f, p) <= d.register_share(threads(f)),
    ),
    rule(
        "a CTA that strides over the rows needs more of them than the first",
        "rows rows_in_flight ctas_per_sm",
        lambda f, p, d: (f.ctas_per_sm == 0) | (groups(f, p) > d.sms * f.ctas_per_sm),
    ),
    rule(
        "CTAs that stride over the rows are all resident",
        f"{_SHAPE} ctas_per_sm",
        lambda f, p, d: f.ctas_per_sm <= resources(f, p, d).occupancy,
    ),
)

#: decisions of earlier forms, which moved no time by more than its noise on an H200
INDIFFERENT = ("parts", "store_cache")


def revise(choices: Mapping[str, Choice]) -> Mapping[str, Choice]:
    """Recorded choices in today's decisions. How caches keep a row that stays in registers made no
    difference either, nor did 128 bytes around a miss."""
    kept = {name: choice for name, choice in choices.items() if name not in INDIFFERENT}
    if kept.get("residency") == REGISTERS:
        return kept | {"load_cache": DEFAULT, "load_prefetch": 0}
    return kept | ({"load_prefetch": 0} if kept.get("load_prefetch") == 128 else {})
