"""Branches and everything that synchronises threads: warps, CTAs, clusters, mbarriers, fences."""

from typing import Any

import numpy as np

from ptxflow.compiler.emulator.barrier import MBarrier
from ptxflow.compiler.emulator.clocks import GENERIC, GLOBAL_ASYNC, SHARED_ASYNC
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.grid import Unit
from ptxflow.compiler.emulator.lanes import LANES, lanes_in
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT, UNWRITTEN
from ptxflow.compiler.emulator.operands import Line, action, by_lane, operation, per_lane, uniform
from ptxflow.compiler.emulator.parse import Pair, Register, Sink
from ptxflow.compiler.emulator.touches import present, stream, touch_bytes, use_barrier
from ptxflow.compiler.emulator.warp import Step, Wait, Warp

TENSOR = "tensor memory"  # stream of a warp's tcgen05.ld and st; a fence hands on what is complete


class Order(Unit):
    """What tcgen05's fences order: lanes that synchronised, and accesses that were completed."""

    def __init__(self) -> None:
        self.synced = 0  # lanes that passed an mbarrier since their last fence::after_thread_sync
        self.joined = 0  # the same of barriers of the CTA or the cluster
        self.used = 0  # lanes that accessed TMEM since their last fence::before_thread_sync
        self.barriers: list[MBarrier] = []  # initialised, not yet fenced


def joined(w: Warp) -> None:
    w.unit(Order).joined |= w.mask


# -- branches and warps ---------------------------------------------------------------------------


@operation(r"bra(\.uni)?")
def branch(line: Line) -> Step:
    target = line.ins.targets[0]
    if line.ins.guard is None:
        return lambda w: w.branch(w.mask, target)
    taken = line.guard()
    if target <= line.index:
        taken = line.program.coverage.branch(line.index, taken)
    return lambda w: w.branch(taken(w), target)


@operation(r"brx\.idx(\.uni)?")
def branch_table(line: Line) -> Step:
    """The index must be the same in all active lanes."""
    index, targets = line.read(0, 32), line.ins.targets
    if line.ins.guard is not None:
        raise line.refuse("a guarded table branch is not modelled")

    def run(w: Warp) -> None:
        chosen = uniform(w, index(w), "the branch index")
        if chosen >= len(targets):
            raise Fault(f"branch index {chosen} of {len(targets)} targets")
        w.branch(w.mask, targets[chosen])

    return run


@operation(r"ret|exit")
def leave(line: Line) -> Step:
    if line.ins.guard is None:
        return lambda w: w.exit()
    going = line.guard()

    def run(w: Warp) -> Wait | None:
        lanes = going(w)
        if lanes == w.mask:
            return w.exit()
        w.alive &= ~lanes
        w.set_mask(w.mask & ~lanes)
        return None

    return run


@operation(r"bar\.warp\.sync")
def sync_warp(line: Line) -> Step:
    members = line.read(0, 32)

    def run(w: Warp) -> Wait | None:
        needed = uniform(w, members(w), "the member mask")
        if w.mask & ~needed:
            raise Fault(f"lanes 0x{w.mask & ~needed:X} are not in the member mask")
        if needed & ~w.alive:
            raise Fault(f"lanes 0x{needed & ~w.alive:X} of the member mask have exited")
        if w.mask == needed:
            w.actor.segment += 1
            return None
        w.pc = w.at
        return Wait(lambda: False, "the other lanes of its warp", parked=True)

    return run


@operation(r"elect\.sync")
def elect(line: Line) -> Step:
    pair = line.operand(0)
    if not isinstance(pair, Pair) or not isinstance(pair.second, Register):
        raise line.refuse("writes a lane and a predicate")
    slot = line.register(pair.second, 1).slot
    lane_slot = None if isinstance(pair.first, Sink) else line.register(pair.first, 32).slot
    members = line.read(1, 32)

    def run(w: Warp) -> None:
        needed = uniform(w, members(w), "the member mask")
        if needed != w.mask:
            raise Fault(f"lanes 0x{w.mask:X} execute it, the member mask is 0x{needed:X}")
        leader = w.cta.machine.leader
        if not needed >> leader & 1:
            leader = (needed & -needed).bit_length() - 1
        chosen = np.zeros(LANES, np.bool_)
        chosen[leader] = True
        w.put(slot, chosen)
        if lane_slot is not None:
            w.put(lane_slot, leader)

    return run


@operation(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32")
def set_registers(line: Line) -> Step:
    count, increase = line.immediate(0, "the count"), line.match[1] == "inc"
    if count % 8 or not 24 <= count <= 256:
        raise line.refuse("the count is 24..256 in steps of 8")

    def run(w: Warp) -> Wait | None:
        w.converged()
        pool = w.cta.pool
        if not increase:
            pool.decrease(w.index, count)
            return None
        if pool.increase(w.index, count):
            return None
        w.pc = w.at
        need = count - pool.held.get(w.index, pool.launch)
        return Wait(lambda: pool.free >= need, lambda: f"{need} registers, {pool.free} are free")

    return run


# -- CTA and cluster barriers ---------------------------------------------------------------------


@operation(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def barrier_sync(line: Line) -> Step:
    operands = line.count(1, 2)
    waits = line.match[1] == "sync"
    which = line.read(0, 32)
    threads = line.read(1, 32) if operands == 2 else None
    if not waits and threads is None:
        raise line.refuse("an arrive needs the number of threads")

    def run(w: Warp) -> Wait | None:
        w.converged()
        index = uniform(w, which(w), "the barrier")
        if index >= 16:
            raise Fault(f"there is no barrier {index}")
        bar, name = w.cta.named[index], f"barrier {index}"
        bar.line = line.ins.line
        if threads is None:
            live = 32 * w.cta.live
            mine = bar.arrive(w.index, 0, name, live, w.actor, waits)
        else:
            count = uniform(w, threads(w), "the number of threads")
            if count % 32 or not 0 < count <= w.cta.machine.launch.block:
                raise Fault(f"{name} for {count} threads of {w.cta.machine.launch.block}")
            mine = bar.arrive(w.index, count, name, count, w.actor, waits)
        joined(w)
        if not waits or bar.generation > mine:
            return None
        return Wait(
            lambda: bar.generation > mine, lambda: f"{name}: {32 * len(bar.arrived)} threads came"
        )

    return run


@operation(r"barrier\.cluster\.(arrive|wait)(\.release|\.relaxed|\.acquire)?(?:\.aligned)?")
def cluster_barrier(line: Line) -> Step:
    waits = line.match[1] == "wait"
    if waits and line.match[2] in (".release", ".relaxed"):
        raise line.refuse("a wait acquires")

    def run(w: Warp) -> Wait | None:
        w.converged()
        bar = w.cta.machine.cluster_barrier
        if not waits:
            relaxed = line.match[2] == ".relaxed"
            message = w.actor.publish_relaxed() if relaxed else w.actor.publish()
            bar.arrive(w.cta.rank << 8 | w.index, message)
            return None
        mine = bar.wait(w.cta.rank << 8 | w.index, w.actor)
        joined(w)
        if bar.generation > mine:
            return None
        return Wait(lambda: bar.generation > mine, "the cluster barrier")

    return run


# -- mbarriers ------------------------------------------------------------------------------------


def own(w: Warp, address: int) -> int:
    """A shared::cta address as an offset in the CTA's window."""
    if address >> RANK_SHIFT != w.cta.rank:
        raise Fault(f"shared address 0x{address:X} is not in this CTA's window")
    return address & OFFSET_MASK


@operation(r"mbarrier\.init(?:\.shared(?:::cta)?)\.b64")
def init(line: Line) -> Step:
    line.count(2)

    def one(w: Warp, _: int, at: int, n: int) -> None:
        offset = own(w, at)
        if offset in w.cta.barriers:
            where = w.cta.barriers[offset].where
            w.cta.machine.hazard(line.ins.line, f"initialises {where} again, with no inval")
        w.unit(Order).barriers.append(w.cta.init_barrier(offset, n, present(w, "w")))
        touch_bytes(w, w.cta.shared.shadow, offset, 8, "w")

    return per_lane(one, line.address(0), line.read(1, 32))


@operation(
    r"mbarrier\.arrive(\.expect_tx)?(?:\.(release|relaxed)\.(cta|cluster))?"
    r"\.shared(::cta|::cluster)?\.b64"
)
def arrive(line: Line) -> Step:
    """Without a count operand: one arrival for every active lane."""
    operands = line.count(2, 3)
    if not isinstance(line.operand(0), Sink):
        raise line.refuse("the state that an arrive returns is not modelled")
    expects, remote = bool(line.match[1]), line.match[4] == "::cluster"
    relaxed, wide = line.match[2] == "relaxed", line.match[3] == "cluster"
    if expects and operands != 3:
        raise line.refuse("expect_tx needs its byte count")
    address = line.address(1)
    third: Any = line.read(2, 32) if operands == 3 else (lambda w: 1)

    def one(w: Warp, _: int, at: int, n: int) -> None:
        rank, bar = at >> RANK_SHIFT, _barrier(w, line, at, remote)
        if relaxed or (rank != w.cta.rank and not wide):
            bar.publish(w.actor.publish_relaxed(), rank != w.cta.rank)
        else:
            bar.publish(w.actor.publish(), rank != w.cta.rank)
        if expects:
            bar.expect(n)
        w.cta.machine.hazard(line.ins.line, bar.arrive(1 if expects else n))

    return per_lane(one, address, third)


def _barrier(w: Warp, line: Line, at: int, remote: bool) -> MBarrier:
    """The mbarrier that an instruction uses: `remote` ones may be another CTA's."""
    if not remote:
        own(w, at)
    _, bar = w.cta.machine.barrier(at)
    use_barrier(w, bar)
    return bar


@operation(
    r"mbarrier\.(expect|complete)_tx(?:\.relaxed\.(?:cta|cluster))?\.shared(::cta|::cluster)?\.b64"
)
def change_tx(line: Line) -> Step:
    """Bytes to come, or bytes that came: no arrival, and nothing is published (PTX ISA
    9.7.13.15.11 and .12: the semantics are relaxed)."""
    line.count(2)
    expects, remote = line.match[1] == "expect", line.match[2] == "::cluster"

    def one(w: Warp, _: int, at: int, n: int) -> None:
        bar = _barrier(w, line, at, remote)
        if expects:
            bar.expect(n)
        else:
            bar.complete(n)

    return per_lane(one, line.address(0), line.read(1, 32))


@operation(
    r"mbarrier\.(try|test)_wait\.parity(?:\.(acquire|relaxed)\.(cta|cluster))?"
    r"\.shared(?:::cta)?\.b64"
)
def try_wait(line: Line) -> Step:
    """False the first time that the phase is not complete; asked again at once, it suspends."""
    line.count(3, 4)
    scope = "relaxed" if line.match[2] == "relaxed" else line.match[3] or "cta"
    write, address, parity = line.write(0, 1), line.address(1), line.read(2, 32)

    def run(w: Warp) -> Wait | None:
        asked = []
        out = np.zeros(LANES, np.bool_)
        for lane, (at, p) in _asked(w, address(w), parity(w)):
            if p > 1:
                w.cta.machine.hazard(line.ins.line, f"parity 0x{p:X} is neither 0 nor 1")
                p &= 1
            bar = w.cta.barrier(own(w, at))
            asked.append((bar, p))
            use_barrier(w, bar)
            if bar.passed(p):
                bar.seen = True
                bar.teach(w.actor, scope)
                out[lanes_in(w.mask) if lane < 0 else lane] = True
        passed = w.lanes(out)
        write(w, out if 0 < passed < w.mask else bool(passed))
        if passed:
            w.unit(Order).synced |= passed
            w.actor.segment += passed == w.alive
            w.asked = -1
            return None
        if w.asked != w.at:
            w.asked = w.at
            return None
        return Wait(
            lambda: any(bar.passed(p) for bar, p in asked),
            lambda: "; ".join(f"parity {p} of {bar}" for bar, p in asked[:2]),
        )

    return run


def _asked(w: Warp, address: Any, parity: Any) -> list[tuple[int, tuple[int, ...]]]:
    """By lane, or once with lane -1 for the whole warp when all lanes ask the same."""
    if address.__class__ is np.ndarray or parity.__class__ is np.ndarray:
        return by_lane(w, address, parity)
    return [(-1, (address, parity))]


@operation(r"mbarrier\.inval\.shared(?:::cta)?\.b64")
def invalidate(line: Line) -> Step:
    def one(w: Warp, _: int, at: int) -> None:
        offset = own(w, at)
        bar = w.cta.barrier(offset)
        if bar.tx:
            raise Fault(f"{bar}: bytes are in flight")
        touch_bytes(w, w.cta.shared.shadow, offset, 8, "w")
        del w.cta.barriers[offset]
        w.cta.shared.state[offset : offset + 8] = UNWRITTEN

    return per_lane(one, line.address(0))


# -- fences ---------------------------------------------------------------------------------------


@action(r"fence\.mbarrier_init\.release\.cluster")
def fence_init(line: Line, w: Warp) -> None:
    order = w.unit(Order)
    for bar in order.barriers:
        bar.published = True
    order.barriers.clear()
    w.actor.publish_barriers()


@operation(r"fence\.proxy\.async(?:\.(shared::cta|shared::cluster|global))?")
def fence_proxy(line: Line) -> Step:
    """Generic accesses that the executing lanes know of come before later asynchronous ones."""
    space = (line.match[1] or "").split("::")[0]
    every = {"": (SHARED_ASYNC, GLOBAL_ASYNC), "shared": (SHARED_ASYNC,), "global": (GLOBAL_ASYNC,)}
    rows = every[space]

    def run(w: Warp) -> None:
        w.actor.fence_proxy(w.mask, rows)
        if SHARED_ASYNC in rows:  # an mbarrier's init is a generic access, too
            for bar in w.cta.barriers.values():
                made = bar.created
                own = made.agent == w.actor.agent
                bar.published |= own or w.actor.knows(GENERIC, made.agent, made.clock)

    return run


@operation(r"fence\.(?:acq_rel|sc)\.(cta|cluster|gpu|sys)|membar\.(cta|gl|sys)")
def fence(line: Line) -> Step:
    scope = line.match[1] or {"gl": "gpu"}.get(line.match[2], line.match[2])
    return lambda w: w.actor.fence(scope)


@action(r"tcgen05\.fence::(before|after)_thread_sync")
def fence_tensor(line: Line, w: Warp) -> None:
    order = w.unit(Order)
    if line.match[1] == "before":
        order.used &= ~w.mask
        if not order.used:
            done = stream(w, TENSOR)
            w.actor.completed(done.agent, done.clock)
            done.clock += 1
    else:
        order.synced &= ~w.mask
        order.joined &= ~w.mask


@action(r"griddepcontrol\.(wait|launch_dependents)", operands=0)
def dependent_grids(line: Line, w: Warp) -> None:
    """The grids before have completed, known to who waits, and nobody runs after this one."""
    before = w.cta.machine.races.before
    if line.match[1] == "wait" and before >= 0:
        w.actor.completed(before, 1)
