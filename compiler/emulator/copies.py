"""cp.async: a lane's small copies from global to shared memory, complete at a wait_group, or when
they arrive at an mbarrier by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ptxflow.compiler.emulator.clocks import GENERIC, Clocks
from ptxflow.compiler.emulator.control import own
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array, lanes_in
from ptxflow.compiler.emulator.memory import LANDING, READY, Buffer
from ptxflow.compiler.emulator.moves import own_offsets
from ptxflow.compiler.emulator.operands import Line, action, operation, uniform
from ptxflow.compiler.emulator.race import COPY, granules
from ptxflow.compiler.emulator.touches import issue, stream, use_barrier
from ptxflow.compiler.emulator.warp import Step, Warp


@dataclass
class Copy:
    """One instruction's copies: byte addresses in shared memory [lanes, bytes], global sources.

    Bytes that no source fills are zeros."""

    line: int
    lanes: int
    target: Array
    source: tuple[
        tuple[Array, Buffer, Array], ...
    ]  # lanes, and the bytes [lanes, n] that they read


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
        at = np.broadcast_to(np.asarray(target(w)), 32)[lanes].astype(np.int64)
        origin = np.broadcast_to(np.asarray(source(w)), 32)[lanes].astype(np.int64)
        bytes_kept = np.broadcast_to(np.asarray(kept(w)), 32)[lanes].astype(np.int64)
        if (at % count).any() or (origin % count).any() or (bytes_kept > count).any():
            raise Fault(f"addresses are not multiples of {count}, or the source is larger")
        shared, first = w.cta.shared, own_offsets(w, at)
        shared.check(int(first.min()), int(first.max()) + count, count)
        where = first[:, None] + np.arange(count)
        if (shared.state[where] == LANDING).any():
            problem = shared.unreadable(shared.state[where], where, (READY,))
            raise Fault(f"writes: {problem}")
        shared.state[where] = LANDING
        by = stream(w, COPY)
        issue(w, by, shared.shadow, *granules(first, count), "w", GENERIC)
        sources = []
        for length in sorted(set(bytes_kept.tolist()) - {0}):
            mine = bytes_kept == length
            starts = origin[mine]
            buffer = w.cta.machine.memory.find(int(starts.min()), int(starts.max()) + length)
            starts -= buffer.base
            issue(w, by, buffer.shadow, *granules(starts, length), "r", GENERIC)
            sources.append((mine, buffer, starts[:, None] + np.arange(length)))
        w.actor.unfenced[shared.shadow.row] |= w.mask
        w.unit(CopyGroups).open.append(Copy(line.ins.line, w.mask, where, tuple(sources)))

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
    data = np.zeros(copy.target.shape, np.uint8)
    for lanes, buffer, at in copy.source:
        data[lanes, : at.shape[1]] = buffer.data[at]
    shared.data[copy.target] = data
    shared.state[copy.target] = READY
