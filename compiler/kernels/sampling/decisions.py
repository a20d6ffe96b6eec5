"""The decisions of a sampling kernel, in construction order, and the rules that make them legal.

A cluster of `ctas` CTAs shares a row; every warp has a run of it, every lane of a warp takes
vectors of that run in turn, and those in flight together are a segment.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.atoms.candidates import SHARE, SLOT, TALLY
from ptxflow.compiler.atoms.reductions import KEY_BITS
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision, Fields, Problem, Resources, rule
from ptxflow.compiler.kernels.sampling.problem import ELEMENT

REGISTERS, SHARED, REREAD = "registers", "shared", "reread"
DEFAULT = "default"
WARP = 32
LINE = 512  # bytes that a warp zeroes at once
ALIGN = 16

DECISIONS = (
    Decision("ctas", (1, 2, 4, 8), "CTAs of a cluster that share a row"),
    Decision("threads", (256, 512, 1024), "threads of a CTA"),
    Decision("vector", (1, 2, 4), "elements of one load: 4, 8 or 16 bytes a lane"),
    Decision("residency", (REGISTERS, SHARED, REREAD), "where a row waits for its second pass"),
    Decision("unroll", (1, 4, 8), "vectors in flight where a row is not in registers"),
    Decision("bits", (10, 11, 12), "of the first digit, which all elements are counted by"),
    Decision("copies", (1, 2, 4), "of the first histogram, each for some of the lanes"),
    Decision("candidates", (1024, 2048, 4096), "elements near a threshold that are listed"),
    Decision("group", (1, 2, 4), "vectors that a vote skips together"),
    Decision("resident", (1, 2, 3, 4), "CTAs that the registers of an SM must hold"),
    Decision("load_cache", (DEFAULT, "no_allocate"), "L1 priority of what is read"),
    Decision("load_prefetch", (0, 128), "bytes that a miss brings into L2 around it"),
)


def later_digits(bits: int) -> tuple[int, int]:
    """Bits of the two digits behind the first."""
    rest = KEY_BITS - bits
    return rest - rest // 2, rest // 2


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


def segments(f: Fields, problem: Problem) -> Any:
    """Parts of a row whose mass is known each."""
    return f.ctas * (f.threads // WARP) * (vectors(f, problem) // at_once(f, problem))


def slots(f: Fields) -> Any:
    """Candidates that a warp's list has room for."""
    return f.candidates // (f.ctas * (f.threads // WARP))


def _aligned(size: Any) -> Any:
    return -(-size // ALIGN) * ALIGN


def _lines(size: Any) -> Any:
    """Bytes of storage that is zeroed by whole warps."""
    return -(-size // LINE) * LINE


def smem_bytes(f: Fields, problem: Problem) -> Any:
    """Bins and what is found in them; lists, tallies, shares; the row itself."""
    warps, n = f.threads // WARP, segments(f, problem)
    rest = KEY_BITS - f.bits
    later = (4 << (rest - rest // 2)) + (4 << (rest // 2))
    first = (f.copies * 4 << f.bits) + _aligned(4 * warps)
    bins = first + later * selections(problem) + LINE
    found = 3 * ALIGN
    if selections(problem) == 2:  # p's first digit, of what k leaves
        bins, found = bins + (4 << f.bits) + _aligned(4 * warps), found + 3 * ALIGN
    lists = _aligned(f.ctas * warps * slots(f) * SLOT) + _aligned(f.ctas * warps * TALLY)
    shares = _aligned(n * SHARE) + _lines(n * SHARE)
    row = np.where(f.residency == SHARED, vectors(f, problem) * f.vector * f.threads * ELEMENT, 0)
    return bins + found + lists + shares + row


def registers(f: Fields, problem: Problem) -> Any:
    """Registers that a thread cannot do without: what is held of the row, and the work on it.

    Bounds of what ptxas was seen to take.
    """
    held = at_once(f, problem) * f.vector
    both = np.where(f.ctas > 1, 36, 8) if selections(problem) == 2 else 0
    whole = np.where(f.residency == REGISTERS, np.maximum(held // 2, 16), 0)
    few = np.where(held < 4, 8, 0)  # short rows: spilled before the draw was traced
    return held + held // 8 + 32 + both + whole + few


def resources(f: Fields, problem: Problem, device: Device) -> Resources:
    """What strategies take of an SM."""
    asked = -(-registers(f, problem) // 8) * 8 + np.where(f.resident == 1, 32, 0)
    held = np.minimum(asked, device.register_share(f.threads * f.resident))
    smem = smem_bytes(f, problem)
    resident = device.resident_blocks(smem, held, f.threads)
    return Resources(smem, held, f.threads, 0 * f.threads, resident)


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
        "the cluster exceeds what the device takes", "ctas", lambda f, p, d: f.ctas <= d.max_cluster
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
        "a lane adds up more than 32 bins and copies of the cluster's",
        "ctas threads bits copies",
        lambda f, p, d: (f.copies * f.ctas << f.bits) // f.threads <= 32,
    ),
    rule(
        "a vote decides on a part of the vectors",
        "ctas threads vector residency unroll group",
        lambda f, p, d: (f.group == 1) | (at_once(f, p) % f.group == 0),
    ),
    rule(
        "a list has fewer than 16 slots", "ctas threads candidates", lambda f, p, d: slots(f) >= 16
    ),
    rule(
        "the draw chooses among more than 1024 segments",
        "ctas threads vector residency unroll",
        lambda f, p, d: segments(f, p) <= 1024,
    ),
    rule(
        "a thread holds more than 64 elements",
        "ctas threads vector residency unroll",
        lambda f, p, d: at_once(f, p) * f.vector <= 64,
    ),
    rule(
        "row and temporaries exceed the registers of a thread",
        "ctas threads vector residency unroll resident",
        lambda f, p, d: registers(f, p) <= d.register_share(f.threads * f.resident),
    ),
    rule(
        "threads and shared memory of so many CTAs exceed those of an SM",
        "ctas threads vector residency unroll bits copies candidates resident",
        lambda f, p, d: (
            (f.resident * f.threads <= d.warps_per_sm * WARP)
            & (f.resident * (smem_bytes(f, p) + d.smem_reserved) <= d.smem_per_sm)
        ),
    ),
    rule(
        "row and histograms exceed the shared memory of a block",
        "ctas threads vector residency unroll bits copies candidates",
        lambda f, p, d: smem_bytes(f, p) <= d.smem_per_block,
    ),
)
