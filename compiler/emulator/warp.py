"""A warp: 32 lanes as numpy vectors, active masks, divergence and reconvergence, blocking.

A register holds one Python number while all its defined lanes agree, a vector of 32 otherwise;
`defined` has a bit for each lane that wrote it. Diverged parts of a warp are fragments: the one
with the lowest program counter that can go on runs first, and meets the others where they stand.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxflow.compiler.emulator.clocks import WARP, Actor
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.grid import Cta, Landing, Owner
from ptxflow.compiler.emulator.lanes import FULL, Array, Value, broadcast, lanes_in, mask_of
from ptxflow.compiler.emulator.stretch import Stretch

END = 1 << 60


@dataclass
class Wait:
    """What a fragment waits for, as it stands when it is told; `parked`: for other lanes of its own
    warp."""

    ready: Callable[[], bool]
    what: str | Callable[[], str]
    parked: bool = False

    def said(self) -> str:
        return self.what if isinstance(self.what, str) else self.what()


@dataclass
class Fragment:
    pc: int
    mask: int
    wait: Wait | None = None

    @property
    def meets(self) -> bool:
        return self.wait is None or self.wait.parked


Step = Callable[["Warp"], "Wait | None"]


class Warp(Owner):
    """One warp's registers and control state. `at` is the instruction being executed."""

    def __init__(self, cta: Cta, index: int):
        super().__init__()
        p, self.cta, self.index = cta.machine.program, cta, index
        self.code: list[Step] = p.code
        self.stretches: list[Stretch | None] = p.stretches
        self.widths, self.regs, self.defined = p.widths, p.values.copy(), p.defined.copy()
        self.flight: dict[int, str] = {}  # register slot -> what is to write it
        self.halves: dict[int, tuple[int, int]] = {}  # of registers: lanes with one undefined
        self.pc = self.at = 0
        self.alive = FULL
        self.mask = FULL
        self.single = -1  # the lane, when one is active
        self.others: list[Fragment] = []
        self.wait: Wait | None = None
        self.limit = END
        self.ahead = 0  # instructions that it executed beyond its turn
        self.done = False
        self.missing = self.missing_slot = 0  # lanes whose operands are not defined, one register
        self.trips: dict[int, int] = {}  # by backward branch: how often taken in a row
        self.asked = -1  # the try_wait that was last answered false
        self.actor = Actor(cta.machine.races.agent(WARP))

    # -- registers ----------------------------------------------------------------------------

    def get(self, slot: int) -> Value:
        """The register's value; lanes that are not active hold anything.

        Lanes that never wrote it become `missing`: what the instruction computes from them is not
        defined either, and `sure` stops the run where such a value would matter.
        """
        if self.mask & ~self.defined[slot]:
            if slot in self.flight:
                raise Fault(f"reads {self.name(slot)}, {self.flight[slot]}")
            self.missing |= self.mask & ~self.defined[slot]
            self.missing_slot = slot
            if self.regs[slot] is None:
                return False if self.widths[slot] == 1 else 0
        if self.halves and slot in self.halves:
            self.missing |= (self.halves[slot][0] | self.halves[slot][1]) & self.mask
            self.missing_slot = slot
        held = self.regs[slot]
        if self.single >= 0 and held.__class__ is np.ndarray:
            return held[self.single].item()
        return held

    def put(self, slot: int, value: Value) -> None:
        """Write the active lanes."""
        if self.flight and slot in self.flight:
            raise Fault(f"writes {self.name(slot)}, {self.flight[slot]}")
        if self.halves and slot in self.halves:
            low, high = self.halves.pop(slot)
            if (low | high) & ~self.mask:
                self.halves[slot] = low & ~self.mask, high & ~self.mask
        kept = self.defined[slot] & ~self.mask
        if kept:
            old = self.regs[slot]
            if old.__class__ is np.ndarray or value.__class__ is np.ndarray or old != value:
                merged = self.vector(old, self.widths[slot]).copy()
                active = lanes_in(self.mask)
                merged[active] = self.vector(value, self.widths[slot])[active]
                value = merged
        self.regs[slot] = value
        self.defined[slot] = (kept | self.mask) & ~self.missing

    def put_halves(self, slot: int, value: Value, low: int, high: int) -> None:
        """As `put`, where the low and the high half are not defined in some lanes."""
        self.missing = low & high
        self.put(slot, value)
        if (low ^ high) & self.mask:
            old = self.halves.get(slot, (0, 0))
            self.halves[slot] = old[0] | low & self.mask, old[1] | high & self.mask

    def sure(self) -> None:
        """The operands read so far must be defined: an address, a predicate, stored data."""
        if self.missing & self.mask:
            raise Fault(
                f"reads {self.name(self.missing_slot)}, which lanes "
                f"0x{self.missing & self.mask:X} never wrote"
            )

    @staticmethod
    def vector(value: Value, width: int) -> Array:
        """A value as a vector of 32, not to be written."""
        held: Array = value if value.__class__ is np.ndarray else broadcast(value, width)
        return held

    def name(self, slot: int) -> str:
        return self.cta.machine.module.registers[slot].name

    def poison(self, slots: tuple[int, ...], what: str) -> None:
        """An asynchronous instruction is to write these registers."""
        for slot in slots:
            self.defined[slot] = 0
            self.flight[slot] = what

    def land(self, slots: tuple[int, ...], values: Array) -> None:
        """Its results, one row of 32 lanes a register."""
        for slot, row in zip(slots, values, strict=True):
            self.flight.pop(slot, None)
            self.regs[slot] = row
            self.defined[slot] = self.alive

    # -- control ------------------------------------------------------------------------------

    def set_mask(self, mask: int) -> None:
        self.mask = mask
        self.single = mask.bit_length() - 1 if mask & (mask - 1) == 0 else -1

    def lanes(self, predicate: Value) -> int:
        """The active lanes in which a predicate holds."""
        self.sure()
        if predicate.__class__ is np.ndarray:
            return mask_of(predicate) & self.mask
        return self.mask if predicate else 0

    def converged(self) -> None:
        """An .aligned or .sync instruction needs all live lanes."""
        if self.mask != self.alive:
            raise Fault(
                f"is executed by lanes 0x{self.mask:X} of 0x{self.alive:X}: it needs the warp "
                "converged (bar.warp.sync before it)"
            )
        self.actor.segment += 1

    def branch(self, taken: int, target: int) -> None:
        if taken == self.mask:
            self.pc = target
        elif taken:
            self.others.append(Fragment(target, taken))
            self.set_mask(self.mask & ~taken)
        if self.others:
            self._relimit()

    def exit(self) -> Wait | None:
        self.alive &= ~self.mask
        if not self.alive:
            self.done = True
            self.cta.live -= 1
        elif self._switch(keep=False):
            return None
        return Wait(lambda: False, "has exited")

    def _relimit(self) -> None:
        """Where the running fragment must look at the others."""
        self.limit = END
        for f in self.others:
            if f.wait is None:
                self.limit = min(self.limit, max(f.pc, self.pc))
            elif f.wait.parked and f.pc >= self.pc:
                self.limit = min(self.limit, f.pc)

    def _meet(self) -> None:
        """Join the fragments that stand here; let one that is behind go first."""
        for f in [f for f in self.others if f.pc == self.pc and f.meets]:
            self.others.remove(f)
            self.set_mask(self.mask | f.mask)
        if any(f.wait is None and f.pc < self.pc for f in self.others):
            self._switch(keep=True)
        self._relimit()

    def _switch(self, keep: bool) -> bool:
        """Run another fragment; False if none can."""
        able = [f for f in self.others if f.wait is None or (not f.wait.parked and f.wait.ready())]
        if not able:
            return False
        chosen = min(able, key=lambda f: f.pc)
        self.others.remove(chosen)
        if keep:
            self.others.append(Fragment(self.pc, self.mask, self.wait))
        self.pc, self.wait = chosen.pc, None
        self.set_mask(chosen.mask)
        self._relimit()
        return True

    def runnable(self) -> bool:
        """Whether the warp, or a part of it, can go on now."""
        if self.done:
            return False
        if self.wait is None:
            return True
        if not self.wait.parked and self.wait.ready():
            self.wait = None
            return True
        return bool(self.others) and self._switch(keep=True)

    def run(self, budget: int) -> int:
        """Execute until every fragment waits or the budget is spent; instructions executed. A
        stretch, of which nobody else sees anything, may begin in one turn and count in the next."""
        code, stretches, hits = self.code, self.stretches, self.cta.machine.coverage.hits
        count, self.ahead = self.ahead, 0
        while count < budget:
            if self.pc >= self.limit:
                self._meet()
            self.at = at = self.pc
            stretch = stretches[at]
            if stretch and stretch.run(self):
                count += stretch.count
                continue
            self.pc = at + 1
            self.missing = 0
            hits[at] += 1
            count += 1
            wait = code[at](self)
            if wait is not None:
                self.wait = wait
                if self.done or not self._switch(keep=True):
                    break
        self.ahead = max(count - budget, 0)
        return count - self.ahead

    def stands(self) -> list[tuple[int, int, str]]:
        """(instruction, lanes, what it waits for) of every fragment, for a deadlock report."""
        parts = [(self.at, self.mask, self.wait)] + [(f.pc, f.mask, f.wait) for f in self.others]
        return [(pc, mask, wait.said() if wait else "can go on") for pc, mask, wait in parts]

    # -- asynchronous work --------------------------------------------------------------------

    def __str__(self) -> str:
        return f"CTA {self.cta.index} (rank {self.cta.rank}) warp {self.index}"

    def issue(
        self, ctas: tuple[int, ...], land: Callable[[], None], thread: tuple[int, ...] | None = None
    ) -> None:
        """An asynchronous operation of the instruction that runs: see Landing."""
        machine = self.cta.machine
        ins = machine.module.code[self.at]
        machine.landings.append(Landing(self, ins, ctas, land, thread))
