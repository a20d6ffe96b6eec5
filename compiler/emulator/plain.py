"""cp.async.bulk without a tensor map: runs of bytes between global and shared memory, reductions
of them, and prefetches, which have no effect that a program could see."""

from functools import partial

import numpy as np

from ptxflow.compiler.emulator import bulk
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT
from ptxflow.compiler.emulator.operands import Line, operation, per_lane
from ptxflow.compiler.emulator.warp import Step, Warp

_REDUCE = r"\.(add|min|max|inc|dec|and|or|xor)(?:\.noftz)?\.([usbf]\d\d|bf16)"
_HINT = r"(\.L2::cache_hint)?"


def run_of(at: int, size: int) -> Array:
    """The 16-byte chunks of a run of bytes."""
    if at % 16 or size % 16 or not size:
        raise Fault(f"{size} bytes at 0x{at:X}: both must be multiples of 16")
    return np.arange(at >> 4, at + size >> 4)


def _global(w: Warp, at: int, size: int) -> tuple[Array, bulk.Bytes]:
    """A view of global bytes [n, 16], and its granules."""
    chunks = run_of(at, size)
    buffer = w.cta.machine.memory.find(at, at + size)
    first = at - buffer.base
    view = buffer.data[first : first + size].reshape(-1, 16)
    return view, (buffer.shadow, chunks - (buffer.base >> 4), None)


def _operation(line: Line, how: str | None, kind: str | None) -> bool:
    """Whether it reduces, as it names an operation and a type, which must go together."""
    if bool(how) != line.ins.opcode.startswith("cp.reduce"):
        raise line.refuse("a reduction names its operation and type, a copy does not")
    if how and kind not in bulk.OPERATIONS[how]:
        raise line.refuse(f"{how} has the types {', '.join(bulk.OPERATIONS[how])}")
    if how == "add" and kind in ("f16", "bf16") and ".noftz" not in line.ins.opcode:
        raise line.refuse(f"add.{kind} needs .noftz")
    return bool(how)


@operation(
    r"cp\.async\.bulk\.(?:shared::cluster|shared::cta)\.global\.mbarrier::complete_tx::bytes"
    rf"(\.multicast::cluster)?{_HINT}"
)
def load(line: Line) -> Step:
    multicast = bool(line.match[1])
    line.count(4 + multicast + bool(line.match[2]))
    target, source, barrier = line.address(0), line.address(1), line.address(3)
    count = line.read(2, 32)
    mask = line.read(4, 16) if multicast else (lambda w: 0)

    def one(w: Warp, _: int, at: int, origin: int, size: int, bar: int, targets: int) -> None:
        view, reads = _global(w, origin, size)
        chunks = run_of(at & OFFSET_MASK, size)
        new = bulk.Load(at, chunks, size, reads, view.copy)
        bulk.load(w, line.ins.line, new, bar, bulk.ranks_of(w, at, targets, multicast))

    return per_lane(one, target, source, count, barrier, mask)


@operation(
    r"cp\.(?:async|reduce\.async)\.bulk\.shared::cluster\.shared::cta"
    rf"\.mbarrier::complete_tx::bytes(?:{_REDUCE})?"
)
def copy_to_peer(line: Line) -> Step:
    """Own shared memory to a CTA of the cluster: the source is read when it lands."""
    line.count(4)
    how, kind = line.match[1], line.match[2]
    if _operation(line, how, kind) and kind not in ("u32", "s32", "u64", "b32", "b64"):
        raise line.refuse("reduces integers in shared memory")
    combine = partial(bulk.reduced, how, kind) if how else None

    def one(w: Warp, _: int, at: int, origin: int, size: int, bar: int) -> None:
        chunks, own = run_of(at & OFFSET_MASK, size), _own(w, origin, size)
        shared = w.cta.shared
        new = bulk.Load(
            at, chunks, size, (shared.shadow, own, None), partial(shared.ready, own), combine
        )
        bulk.load(w, line.ins.line, new, bar, [at >> RANK_SHIFT])

    return per_lane(one, line.address(0), line.address(1), line.read(2, 32), line.address(3))


def _own(w: Warp, at: int, size: int) -> Array:
    if at >> RANK_SHIFT != w.cta.rank:
        raise Fault("the source is in another CTA")
    chunks = run_of(at & OFFSET_MASK, size)
    bulk.check_box(w.cta.shared.size, chunks)
    return chunks


@operation(
    rf"cp\.(?:async|reduce\.async)\.bulk\.global\.shared::cta\.bulk_group{_HINT}(?:{_REDUCE})?"
)
def store(line: Line) -> Step:
    line.count(3 + bool(line.match[1]))
    how, kind = line.match[2], line.match[3]
    _operation(line, how, kind)

    def one(w: Warp, lane: int, to: int, at: int, size: int) -> None:
        view, writes = _global(w, to, size)
        chunks = _own(w, at, size)

        def sink(data: Array, view: Array = view) -> None:
            view[:] = bulk.reduced(how, kind, view, data) if how else data

        new = bulk.Store(line.ins.line, chunks, np.ones((len(chunks), 16), np.bool_), sink)
        bulk.store(w, lane, new, writes, bool(how))

    return per_lane(one, line.address(0), line.address(1), line.read(2, 32))


@operation(rf"cp\.async\.bulk\.prefetch\.L2\.global{_HINT}")
def prefetch(line: Line) -> Step:
    """Bounds and alignment only."""
    line.count(2 + bool(line.match[1]))

    def one(w: Warp, _: int, at: int, size: int) -> None:
        _global(w, at, size)

    return per_lane(one, line.address(0), line.read(1, 32))
