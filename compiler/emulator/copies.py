"""cp.async: a lane's small copies from global to shared memory, complete at a wait_group, or when
they arrive at an mbarrier by themselves."""

from dataclasses import dataclass, field

import numpy as np

from ptxflow.compiler.emulator.clocks import GENERIC, Clocks
from ptxflow.compiler.emulator.control import own
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array, all_of, any_of, lanes_in
from ptxflow.compiler.emulator.memory import LANDING, READY, SHIFT, Buffer, Places, span
from ptxflow.compiler.emulator.moves import own_offsets
from ptxflow.compiler.emulator.operands import Line, action, operation, uniform
from ptxflow.compiler.emulator.race import COPY
from ptxflow.compiler.emulator.touches import issue, stream, use_barrier
from ptxflow.compiler.emulator.warp import Step, Warp


@dataclass
class Copy:
    """One instruction's copies of `count` bytes each: their places in shared memory, counted in
    copies, and global sources: which of them, whence, from which bytes on, how many.

    Bytes that no source fills are zeros."""

    line: int
    count: int
    target: Array
    source: tuple[tuple[Array, Buffer, Array, int], ...]


@dataclass
class CopyGroups:
    """A warp's copies that are not committed, and its committed groups."""

    open: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)

    def commit(self, w: Warp) -> None:
        self.groups.append(self.open)
        self.open = []
        stream(w, COPY).clock += 1

    def left(self) -> str | None:
        for copy in [*self.open, *(c for group in self.groups for c in group)]:
            return f"the cp.async of line {copy.line} was never waited for"
        return None


@operation(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::\d+B)?")
def copy(line: Line) -> Step:
    operands = line.count(3, 4)
    count = line.immediate(2, "the size")
    if count not in (4, 8, 16):
        raise line.refuse("copies 4, 8 or 16 bytes")
    if line.match[1] == "cg" and count != 16:
        raise line.refuse(".cg copies 16 bytes")
    target, source = line.address(0), line.address(1)
    kept = line.read(3, 32) if operands == 4 else (lambda w: count)

    def run(w: Warp) -> None:
        lanes = lanes_in(w.mask)
        at, origin = (w.vector(x(w), 64)[lanes].astype(np.int64) for x in (target, source))
        bytes_kept = w.vector(kept(w), 32)[lanes]
        into, out_of = (Places.of(first, 1, count) for first in (at, origin))
        if not (into.aligned(count) and out_of.aligned(count)) or any_of(bytes_kept > count):
            raise Fault(f"addresses are not multiples of {count}, or the source is larger")
        shared, into = w.cta.shared, own_offsets(w, into)
        places = shared.index(into)[:, 0]
        states = shared.state.reshape(-1, count)
        held = states[places]
        if LANDING in held.tobytes():
            problem = shared.unreadable(held, into.bytes[:, 0], (READY,))
            raise Fault(f"writes: {problem}")
        states[places] = LANDING
        by = stream(w, COPY)
        issue(w, by, shared.shadow, *into.granules(), "w", GENERIC)
        sources = []
        for length in sorted({*bytes_kept.tolist()} - {0}):
            mine = bytes_kept == length
            whole = length == count and all_of(mine)
            runs = out_of if whole else Places.of(origin[mine], length, 1)
            buffer = w.cta.machine.memory.find(runs.low, runs.end)
            runs = runs.moved(-buffer.base)
            issue(w, by, buffer.shadow, *runs.granules(), "r", GENERIC)
            sources.append((mine, buffer, runs.first, length))
        w.actor.unfenced[shared.shadow.row] |= w.mask
        w.unit(CopyGroups).open.append(Copy(line.ins.line, count, places, tuple(sources)))

    return run


@action(r"cp\.async\.commit_group")
def commit(line: Line, w: Warp) -> None:
    w.unit(CopyGroups).commit(w)


@operation(r"cp\.async\.wait_(group|all)")
def wait(line: Line) -> Step:
    pending = line.immediate(0, "the number of groups") if line.match[1] == "group" else 0

    def run(w: Warp) -> None:
        groups = w.unit(CopyGroups)
        if line.match[1] == "all":
            groups.commit(w)
        done = max(len(groups.groups) - pending, 0)
        for group in groups.groups[:done]:
            for each in group:
                land(w, each)
        del groups.groups[:done]
        by = stream(w, COPY)
        w.actor.learn(GENERIC, by.agent, by.clock - 1 - pending)

    return run


@operation(r"cp\.async\.mbarrier\.arrive\.noinc\.shared(?:::cta)?\.b64")
def arrive(line: Line) -> Step:
    """Each lane arrives when all that it has copied so far has landed; as late as is legal."""
    address = line.address(0)

    def run(w: Warp) -> None:
        machine, groups = w.cta.machine, w.unit(CopyGroups)
        bar = w.cta.barrier(own(w, uniform(w, address(w), "the barrier")))
        use_barrier(w, bar)
        copies = [c for group in [*groups.groups, groups.open] for c in group]
        groups.open, groups.groups = [], []
        by, message, lanes = stream(w, COPY), Clocks(), w.mask.bit_count()
        message.learn(GENERIC, by.agent, by.clock)
        by.clock += 1

        def landed() -> None:
            for copy in copies:
                land(w, copy)
            bar.publish(message, False)
            machine.hazard(line.ins.line, bar.arrive(lanes))

        w.issue((w.cta.rank,), landed, (w.cta.rank, w.index))

    return run


def land(w: Warp, copy: Copy) -> None:
    """The bytes arrive."""
    shared = w.cta.shared
    data = np.zeros((len(copy.target), copy.count), np.uint8)
    for which, buffer, first, length in copy.source:
        if length == copy.count:
            whole = buffer.data[: len(buffer.data) // length * length].reshape(-1, length)
            data[which] = whole[first >> SHIFT[length]]
        else:
            data[which, :length] = buffer.data[first[:, None] + span(length)]
    shared.data.reshape(-1, copy.count)[copy.target] = data
    shared.state.reshape(-1, copy.count)[copy.target] = READY
