"""The decisions of a sampling kernel, in construction order, and the rules that make them legal.

A cluster of `ctas` CTAs shares a row; every warp has a run of it, and every lane of a warp takes
vectors of that run in turn. The threshold of a filter is found digit by digit, from the top.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxflow.compiler.atoms.reductions import KEY_BITS
from ptxflow.compiler.device import Device
from ptxflow.compiler.families.sampling.problem import ELEMENT
from ptxflow.compiler.strategy import Decision, Fields, Problem, Resources, rule

REGISTERS, SHARED, REREAD = "registers", "shared", "reread"
ALL, BOUNDED = "all", "bounded"
BRANCH, DUMP = "branch", "dump"
DEFAULT = "default"
WARP = 32
LINE = 512  # bytes that a warp zeroes at once
WARPS = 32  # of a CTA at most, each with a share of the draw
MOST_BITS = 10  # of a digit: a warp scans 32 chunks of 32 bins

DECISIONS = (
    Decision("ctas", (1, 2, 4, 8), "CTAs of a cluster that share a row"),
    Decision("threads", (256, 512, 1024), "threads of a CTA"),
    Decision("vector", (1, 2, 4), "elements of one load: 4, 8 or 16 bytes a lane"),
    Decision("residency", (REGISTERS, SHARED, REREAD), "where a row waits between its passes"),
    Decision("unroll", (1, 4, 8), "vectors in flight where a row is not in registers"),
    Decision("digits", ("10-10-10", "8-8-7-7", "9-7-7-7"), "bits of each round"),
    Decision("copies", (1, 4, 8, 16), "of the first histogram, each for some of the lanes"),
    Decision("first", (ALL, BOUNDED), "who is counted first: all, or what the largest leave over"),
    Decision("group", (0, 2, 4), "vectors that a vote skips together; 0: no votes"),
    Decision("aside", (BRANCH, DUMP), "how an element that a round leaves out is kept out of it"),
    Decision("resident", (1, 2, 3), "CTAs that the registers of an SM must hold"),
    Decision("load_cache", (DEFAULT, "no_allocate"), "L1 priority of what is read"),
    Decision("load_prefetch", (0, 128), "bytes that a miss brings into L2 around it"),
)


def digits(choice: str) -> tuple[int, ...]:
    """Bits of each round, from the top."""
    out = tuple(map(int, choice.split("-")))
    assert sum(out) == KEY_BITS and max(out) <= MOST_BITS, choice
    return out


def of_digits(f: Fields, number: Any) -> Any:
    """A function of a choice of digits, over one choice or an array of them."""
    if isinstance(f.digits, str):
        return number(digits(f.digits))
    choices, where = np.unique(f.digits, return_inverse=True)
    return np.array([number(digits(str(c))) for c in choices])[where]


def selections(problem: Problem) -> int:
    """Thresholds that are searched: one for each filter."""
    return int(problem.constant("top_k") + problem.constant("top_p"))


def vectors(f: Fields, problem: Problem) -> Any:
    """Vectors of a row that a lane takes; a whole number of those in flight together."""
    least = -(-problem["vocab_size"] // (f.ctas * f.threads * f.vector))
    return np.where(f.residency == REGISTERS, least, -(-least // f.unroll) * f.unroll)


def at_once(f: Fields, problem: Problem) -> Any:
    """Vectors of a lane that a pass holds in registers at a time."""
    return np.where(f.residency == REGISTERS, vectors(f, problem), f.unroll)


def _lines(size: Any) -> Any:
    """Bytes of storage that is zeroed by whole warps."""
    return -(-size // LINE) * LINE


def zeroed_bytes(f: Fields, problem: Problem) -> Any:
    """Histograms and totals of all rounds, the shares of the warps, the dump and the sample."""
    first = _lines(of_digits(f, lambda d: 4 << d[0]) * f.copies)
    later = of_digits(f, lambda d: sum(int(_lines(4 << bits)) for bits in d[1:]))
    totals = of_digits(f, len) * LINE
    bound = of_digits(f, lambda d: int(_lines(4 << d[0])) + LINE)
    rounds = (first + later + totals) * selections(problem)
    return rounds + np.where(f.first == BOUNDED, bound, 0) + 3 * LINE


def smem_bytes(f: Fields, problem: Problem) -> Any:
    first = of_digits(f, lambda d: 4 << d[0])
    ordered = of_digits(f, lambda d: sum(4 << bits for bits in d)) * selections(problem)
    ordered = ordered + np.where(f.first == BOUNDED, first, 0)
    folded = np.where(f.copies > 1, first * selections(problem), 0)
    row = np.where(f.residency == SHARED, vectors(f, problem) * f.vector * f.threads * ELEMENT, 0)
    return zeroed_bytes(f, problem) + folded + ordered + 16 + row


def registers(f: Fields, problem: Problem) -> Any:
    """Registers that a thread cannot do without: what is held of the row, and a group's work.

    Where two filters follow each other ptxas keeps what it worked out of each element for both,
    but for the plain form, without votes and branches. Bounds of what it was seen to take.
    """
    held = at_once(f, problem) * f.vector
    grouped = np.where(f.group == 0, 4, f.group * f.vector)
    needed = held + held // 8 + np.minimum(grouped, 16) + 28
    if selections(problem) == 1:
        return needed
    return needed + np.where(f.group > 0, held, np.where(f.aside == DUMP, 8, held + 28))


def register_limit(f: Fields, device: Device) -> Any:
    share = device.registers_per_sm // (f.threads * f.resident) // 8 * 8
    return np.minimum(share, device.registers_per_thread)


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM."""
    asked = -(-registers(f, problem) // 8) * 8 + np.where(f.resident == 1, 32, 0)
    held = np.minimum(asked, register_limit(f, device))
    by_registers = device.registers_per_sm // (held * f.threads)
    by_warps = device.warps_per_sm * WARP // f.threads
    by_smem = device.smem_per_sm // (smem_bytes(f, problem) + device.smem_reserved)
    occupancy = np.minimum(np.minimum(by_registers, by_warps), by_smem)
    return Resources(
        smem_bytes(f, problem), held, f.threads, 0 * f.threads,
        np.minimum(occupancy, device.blocks_per_sm),
    )  # fmt: skip


RULES = (
    rule(
        "the vocabulary is a multiple of the vector",
        "vector",
        lambda f, p, d: p["vocab_size"] % f.vector == 0,
    ),
    rule(
        "a lane loads single elements of odd rows alone",
        "vector",
        lambda f, p, d: (f.vector > 1) | (p["vocab_size"] % 2 == 1),
    ),
    rule(
        "the cluster exceeds what the device takes",
        "ctas",
        lambda f, p, d: f.ctas <= d.max_cluster,
    ),
    rule(
        "half as many CTAs would cover the row",
        "ctas threads vector",
        lambda f, p, d: (f.ctas == 1) | (f.ctas // 2 * f.threads * f.vector < p["vocab_size"]),
    ),
    rule(
        "half as many threads would cover the row",
        "ctas threads vector",
        lambda f, p, d: (f.threads == 256) | (f.ctas * f.threads // 2 * f.vector < p["vocab_size"]),
    ),
    rule(
        "a row that stays in registers is loaded whole",
        "residency unroll",
        lambda f, p, d: (f.residency != REGISTERS) | (f.unroll == 1),
    ),
    rule(
        "a thread has fewer vectors than are unrolled",
        "ctas threads vector unroll",
        lambda f, p, d: (
            (f.unroll == 1) | (f.unroll * f.ctas * f.threads * f.vector < 2 * p["vocab_size"])
        ),
    ),
    rule(
        "only the k largest are bounded by the largest of each thread",
        "first",
        lambda f, p, d: (f.first == ALL) | bool(p.constant("top_k")),
    ),
    rule(
        "a vote decides on more vectors than there are",
        "ctas threads vector residency unroll group",
        lambda f, p, d: (f.group <= 1) | (f.group <= at_once(f, p)),
    ),
    rule(
        "row and temporaries exceed the registers of a thread",
        "ctas threads vector residency unroll group aside resident",
        lambda f, p, d: registers(f, p) <= register_limit(f, d),
    ),
    rule(
        "a thread adds up at most 32 copies of bins, and 4 merged ones",
        "threads digits copies",
        lambda f, p, d: (
            ((f.copies == 1) | (of_digits(f, lambda x: 1 << x[0]) * f.copies <= 32 * f.threads))
            & (of_digits(f, lambda x: 1 << max(x)) <= 4 * f.threads)
        ),
    ),
    rule(
        "threads and shared memory of so many CTAs exceed those of an SM",
        "ctas threads vector residency unroll digits copies first resident",
        lambda f, p, d: (
            (f.resident * f.threads <= d.warps_per_sm * WARP)
            & (f.resident * (smem_bytes(f, p) + d.smem_reserved) <= d.smem_per_sm)
        ),
    ),
    rule(
        "row and histograms exceed the shared memory of a block",
        "ctas threads vector residency unroll digits copies first",
        lambda f, p, d: smem_bytes(f, p) <= d.smem_per_block,
    ),
)
