"""Bulk copies of the asynchronous proxy: what tensor copies and plain ones have in common.

A load's bytes are in flight from its issue until it lands, then its barriers count them all. A
store reads its source when the issuing thread waits for its group, and writes its target last.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT, READY, RESERVED
from ptxflow.compiler.emulator.operands import Line, action, by_lane, operation
from ptxflow.compiler.emulator.race import Shadow, masks_of
from ptxflow.compiler.emulator.touches import Stream, issue, stream, use_barrier
from ptxflow.compiler.emulator.values import from_bfloat16, to_bfloat16
from ptxflow.compiler.emulator.warp import Step, Warp

READ, WRITE = "bulk read", "bulk write"  # streams of a thread's stores
Bytes = tuple[Shadow, Array, Array | None]  # a memory's granules, for the race detector


# -- loads ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """A copy into shared memory: target chunks, and `fetch` of their bytes [n, 16] when it lands.

    `combine`: what a reduction makes of the target's bytes and these.
    """

    at: int  # shared::cluster address
    chunks: Array
    bytes: int
    reads: Bytes
    fetch: Callable[[], Array]
    combine: Callable[[Array, Array], Array] | None = None


def ranks_of(w: Warp, at: int, targets: int, multicast: bool) -> list[int]:
    """The CTAs that a copy writes to."""
    ranks = [i for i in range(16) if targets >> i & 1] if multicast else [at >> RANK_SHIFT]
    if not ranks:
        raise Fault("multicast to no CTA")
    if multicast and at >> RANK_SHIFT != w.cta.rank:
        raise Fault("the address of a multicast copy is in another CTA")
    return ranks


def load(w: Warp, line: int, new: Load, bar: int, ranks: list[int], pair: bool = False) -> None:
    """Issue a load that completes on the mbarrier at `bar`, or at its offset in each CTA."""
    machine = w.cta.machine
    home, bar_rank = new.at >> RANK_SHIFT, bar >> RANK_SHIFT
    if bar_rank != home and not (pair and bar_rank == home ^ 1):
        raise Fault(f"the mbarrier is in CTA {bar_rank}, the data in CTA {home}")
    signals = []
    for rank in ranks:
        cta = machine.peer(rank)
        check_box(cta.shared.size, new.chunks)
        at_rank = (rank & ~1 | bar_rank & 1) if pair else rank
        signal = machine.peer(at_rank).barrier(bar & OFFSET_MASK)
        if not signal.published:
            machine.hazard(line, f"{signal.where} was not fenced after its init")
        use_barrier(w, signal)
        by = Stream(signal.agent, signal.phase + 1)
        if not new.combine:
            machine.hazard(line, cta.retire((new.chunks[:, None] * 16 + np.arange(16)).ravel()))
            cta.shared.begin_write(new.chunks)
        issue(w, by, cta.shared.shadow, new.chunks, None, "a" if new.combine else "w")
        issue(w, by, *new.reads, "r")
        signals.append((at_rank, signal))

    def land() -> None:
        data = new.fetch()
        for rank in ranks:
            shared = machine.ctas[rank].shared
            if new.combine:
                data = new.combine(shared.ready(new.chunks), data)
            shared.end_write(new.chunks, data)
        for _, signal in signals:
            signal.complete(new.bytes)

    w.issue(tuple(sorted({*ranks, *(r for r, _ in signals)})), land)


def check_box(size: int, chunks: Array) -> None:
    first, last = int(chunks.min()) * 16, int(chunks.max()) * 16 + 16
    if first < RESERVED or last > size:
        raise Fault(f"a box at 0x{first:X}..0x{last:X} is outside shared memory 0x{size:X}")


# -- stores ---------------------------------------------------------------------------------------


@dataclass
class Store:
    """A copy out of shared memory: source chunks, which of their bytes are used, and the target."""

    line: int
    chunks: Array
    used: Array  # [n, 16]
    sink: Callable[[Array], None]
    data: Array | None = None


@dataclass
class BulkGroups:
    """One warp's bulk groups by lane: stores not committed, and committed groups."""

    open: dict[int, list[Store]] = field(default_factory=dict)
    groups: dict[int, list[list[Store]]] = field(default_factory=dict)

    def left(self) -> str | None:
        unread = [s for group in self.open.values() for s in group]
        unread += [s for gs in self.groups.values() for g in gs for s in g if s.data is None]
        if unread:
            return f"the bulk store of line {unread[0].line} may still read shared memory"
        for groups in self.groups.values():
            for group in groups:
                write(group)
        return None


def store(w: Warp, lane: int, new: Store, target: Bytes, updates: bool) -> None:
    """A lane issues a store (or a reduction, which `updates`)."""
    check_box(w.cta.shared.size, new.chunks)
    some = new.used.any(1)
    if some.any():
        shadow, used = w.cta.shared.shadow, new.used[some]
        issue(w, stream(w, READ, lane), shadow, new.chunks[some], masks_of(used), "r")
        issue(w, stream(w, WRITE, lane), *target, "a" if updates else "w")
    w.unit(BulkGroups).open.setdefault(lane, []).append(new)


@action(r"cp\.async\.bulk\.commit_group")
def commit(line: Line, w: Warp) -> None:
    groups = w.unit(BulkGroups)
    for lane, _ in by_lane(w):
        groups.groups.setdefault(lane, []).append(groups.open.pop(lane, []))
        for kind in (READ, WRITE):
            stream(w, kind, lane).clock += 1


@operation(r"cp\.async\.bulk\.wait_group(\.read)?")
def wait(line: Line) -> Step:
    pending = line.immediate(0, "the number of groups")
    only_read = bool(line.match[1])

    def run(w: Warp) -> None:
        groups = w.unit(BulkGroups)
        for lane, _ in by_lane(w):
            mine = groups.groups.get(lane, [])
            for group in mine[: len(mine) - pending]:
                for s in group:
                    read(w, s)
                if not only_read:
                    write(group)
            if not only_read and len(mine) > pending:
                del mine[: len(mine) - pending]
            for kind in (READ,) if only_read else (READ, WRITE):
                over = stream(w, kind, lane)
                w.actor.completed(over.agent, over.clock - 1 - pending)

    return run


def read(w: Warp, s: Store) -> None:
    """The store reads its source: late, so that an overwriting shows."""
    if s.data is not None:
        return
    shared = w.cta.shared
    state = shared.state.reshape(-1, 16)[s.chunks]
    if ((state != READY) & s.used).any():
        at = s.chunks[:, None] * 16 + np.arange(16)
        problem = shared.unreadable(np.where(s.used, state, READY), at, (READY,))
        raise Fault(f"the bulk store of line {s.line} reads: {problem}")
    s.data = shared.data.reshape(-1, 16)[s.chunks]


def write(group: list[Store]) -> None:
    for s in group:
        if s.data is not None:
            s.sink(s.data)
    group.clear()


# -- reductions -----------------------------------------------------------------------------------

_INTEGERS, _HALVES = ("u32", "s32", "u64"), ("f16", "bf16")
OPERATIONS = {
    "add": (*_INTEGERS, *_HALVES, "f32", "f64"),
    "min": (*_INTEGERS, "s64", *_HALVES),
    "max": (*_INTEGERS, "s64", *_HALVES),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
_TYPES = {"u": "u", "s": "i", "b": "u", "f": "f"}
_COMPUTE: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "min": np.fmin,
    "max": np.fmax,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
}


def reduced(how: str, kind: str, old: Array, new: Array) -> Array:
    """Bytes of `old` combined with those of `new`, element by element, rounded to nearest even."""
    compute, shape = _COMPUTE[how], old.shape
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in (old, new))
    if kind == "bf16":
        both = (from_bfloat16(x.view(np.uint16)) for x in (a, b))
        return to_bfloat16(compute(*both)).view(np.uint8).reshape(shape)
    dtype = f"{_TYPES[kind[0]]}{int(kind[1:]) // 8}"
    out = compute(a.view(dtype), b.view(dtype)).astype(dtype)
    return np.asarray(out.view(np.uint8).reshape(shape))
