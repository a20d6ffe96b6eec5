"""What an abstract run needs of a kernel: values as functions, who uses what, and the warps."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, NoReturn

from ptxflow.compiler.atoms.table import READ_ONLY, Access, Atom, atom
from ptxflow.compiler.check.arithmetic import Arithmetic
from ptxflow.compiler.check.order import touched
from ptxflow.compiler.check.private import Moves, private_storages
from ptxflow.compiler.check.state import Knowledge, Message
from ptxflow.compiler.check.values import every_value
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import KernelInfo, Op, Slot, Statement, Storage, Value, show, walk
from ptxflow.compiler.lower import launch_registers, layout

MEETINGS = ("cta_sync", "warp_sync", "cluster_arrive", "cluster_wait")  # of all
Env = dict[str, int]
Steps = Generator[Statement, None, None]


def registers_at_launch(info: KernelInfo, largest: int) -> int:
    """Registers of a lane at launch; `largest` is the kernel's greatest setmaxnreg.

    With two warpgroups ptxas launches with that value, with more the blocks fill the file.
    """
    threads = 32 * info.warps * info.resident
    return min(launch_registers(threads), largest if info.warps == 8 else 255)


class Program:
    """A kernel with its values compiled to functions of an environment, shared by many runs."""

    def __init__(self, kernel: Statement, awaited: frozenset[str] | None = None, last: bool = True):
        """`awaited`: the tensors that a dependent launch must wait for; None: all. `last`: of its
        call."""
        self.kernel, self.info, self.awaited, self.last = kernel, kernel.arg, awaited, last
        self.users: dict[Storage, list[Statement]] = {}  # storage -> instructions that name it
        self.row_bytes: dict[Storage, int] = {}  # shared storage -> bytes in a row of its TMA boxes
        self.copied: set[Storage] = set()  # shared storage that cp.async fills
        for _, node in walk(kernel):
            if node.op is Op.ATOM:
                row = atom(node.arg.atom)
                copies = (a.operand for a in row.accesses if a.done == "copies")
                self.copied |= {row.operand(node, name).src[0] for name in copies}
                for operand in node.src:
                    if operand.op is Op.SLOT:
                        self.users.setdefault(operand.src[0], []).append(node)
                        if operand.src[0].op is Op.SMEM and node.arg.attr("box"):
                            columns = node.arg.attr("box")[0] * node.arg.attr("element")
                            self.row_bytes[operand.src[0]] = columns
        self.plan = layout(kernel.arg)
        self.in_step = _in_step(kernel)
        self.private = private_storages(kernel)
        held = every_value(kernel)
        self.unread = frozenset(s for s in self.private if s.arg.name in held)
        self.moves = Moves()
        self.fixed: dict[
            Slot, int
        ] = {}  # offsets of private operands that are constant, and inside
        self._accesses: dict[Statement, tuple[tuple[Access, Slot, bool], ...]] = {}
        self._parts: dict[tuple[Statement, ...], list[Statement | Straight]] = {}
        asked = [
            node.arg.attr("registers")
            for _, node in walk(kernel)
            if node.op is Op.ATOM and atom(node.arg.atom).effect == "registers"
        ]
        self.launched = registers_at_launch(kernel.arg, max(asked, default=0))
        self._values: dict[Value, Callable[[Env], int]] = {}
        self._arithmetic = Arithmetic(kernel.arg)

    def value(self, node: Value) -> Callable[[Env], int]:
        found = self._values.get(node)
        if found is None:
            found = eval(f"lambda e: {self._arithmetic.source(node)}", {"min": min})
            self._values[node] = found
        return found

    def accesses(self, node: Statement, row: Atom) -> tuple[tuple[Access, Slot, bool], ...]:
        """An instruction's, with what names their places, and whether it is private; but those of
        tensors that nothing in the kernel writes, which of what is read-only is a static rule."""
        found = self._accesses.get(node)
        if found is None:
            mine = [a for a in row.accesses if a.proxy != READ_ONLY]
            named = [(a, operand := row.operand(node, a.operand), operand.src[0]) for a in mine]
            found = tuple(
                (a, operand, held in self.private)
                for a, operand, held in named
                if held.op is not Op.GLOBAL or held.arg.name in touched(self.kernel)[1]
            )
            self._accesses[node] = found
        return found

    def parts(self, body: tuple[Statement, ...]) -> list["Statement | Straight"]:
        """Statements, those in a row that touch constant places of private registers together."""
        found = self._parts.get(body)
        if found is None:
            found = self._parts[body] = []
            for plain, some in groupby(body, self._is_plain):
                row = tuple(some)
                if plain and len(row) > 1:
                    places = (o.src[0] for n in row for o in n.src if o.op is Op.SLOT)
                    found.append(Straight(row, [*dict.fromkeys(places)]))
                else:
                    found += row
        return found

    def _is_plain(self, node: Statement) -> bool:
        """An instruction that changes nothing but private registers, in a way that nothing but
        their state decides."""
        if node.op is not Op.ATOM:
            return False
        row = atom(node.arg.atom)
        if row.effect or row.orders or any(name == "accumulate" for name, _ in row.operands):
            return False
        slots = [operand for operand in node.src if operand.op is Op.SLOT]
        return all(
            s.src[0] in self.private and s.src[1].op is s.src[2].op is Op.CONST for s in slots
        ) and not any(kind == "map" for _, kind in row.operands)

    def writers(self, storage: Storage) -> str:
        """The instructions that write a storage, for a message."""
        return _list(
            node
            for node in self.users.get(storage, [])
            for access in atom(node.arg.atom).accesses
            if access.mode != "r"
            and atom(node.arg.atom).operand(node, access.operand).src[0] is storage
        )

    def arrivers(self, bar: Storage) -> str:
        """The instructions that complete phases of a barrier, for a message."""
        return _list(
            node
            for node in self.users.get(bar, [])
            if atom(node.arg.atom).effect
            in ("mbar_arrive", "tma_load", "bulk_load", "tcgen05_commit")
        )


def _in_step(kernel: Statement) -> bool:
    """Whether nothing is asynchronous, and warps wait only where all of the CTA or cluster do."""
    for _, node in walk(kernel):
        if node.op is Op.ATOM:
            row = atom(node.arg.atom)
            if row.effect and row.effect not in MEETINGS:
                return False
            if any(access.done != "now" for access in row.accesses):
                return False
    return True


def _list(nodes: Iterable[Statement]) -> str:
    return ", ".join(dict.fromkeys(f"{show(n)} at {n.site}" for n in nodes)) or "no instruction"


@dataclass(frozen=True)
class Straight:
    """Instructions one after the other, and what they make of states of the registers that they
    touch, by whether these must be read: told once, it holds for every warp and turn."""

    body: tuple[Statement, ...]
    places: list[Storage]
    made: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)


@dataclass
class Group:
    """Asynchronous operations of one pipe: events in memory, in registers, and in global memory.

    `after` is what their issuer knew: it is complete whenever they are.
    """

    local: int = 0
    registers: int = 0
    remote: int = 0
    after: int = 0
    last: Statement | None = None

    def flying(self) -> int:
        """What must be complete before the warp may leave."""
        return self.local | self.registers


@dataclass
class Agent:
    """One warp of one CTA.

    `every` is what each of its lanes knows, `one` what the elected lane knows; `knows` is that of
    the lanes that run now. A lane knows only its own part of the events in `apart`: those were
    issued by all lanes, and nothing has ordered the lanes since.
    """

    index: int
    cta: int
    warp: int
    env: Env
    trip: str  # the name of its class
    node: Statement  # the statement that it is at
    role: str = "prologue"
    every: Knowledge = field(default_factory=Knowledge)
    one: Knowledge = field(default_factory=Knowledge)
    apart: int = 0
    landed: int = 0  # copies of which every lane knows its own to be complete, and no other's
    fenced: int = 0  # accesses of which every lane fenced its own, and has not met others since
    own: dict[tuple[Op, bool], int] = field(default_factory=dict)  # generic events by storage, lane
    open: dict[str, Group] = field(default_factory=dict)  # not yet committed, by pipe
    groups: dict[str, list[Group]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)  # barrier -> newest phase observed
    epoch: dict[tuple[Any, ...], int] = field(default_factory=dict)  # see Accesses._shared_event
    cluster_arrivals: int = 0
    cluster_waits: int = 0
    registers: int = 0
    has_address: bool = False
    knows: Knowledge = field(init=False)

    def __post_init__(self) -> None:
        self.knows = self.every

    def enter(self, role: str) -> None:
        """Go on as another role: no event has two names."""
        if role != self.role:
            self.role = role
            self.epoch.clear()

    def elect(self) -> None:
        """One lane goes on alone: it knows what every lane knows, of joint events only its part."""
        self.one.include(self.every, self.apart, self.fenced)
        self.knows = self.one

    def rejoin(self) -> None:
        """All lanes go on; what the elected one learned is its own until something syncs them."""
        self.knows = self.every

    def sync_lanes(self) -> None:
        """All lanes meet: each learns what the others know."""
        self.apart = self.fenced = 0
        self.every.generic |= self.landed
        self.landed = 0
        self.every.learn(self.one.message())
        self.one.learn(self.every.message())

    def message(self, lanes: int) -> Message:
        """What these lanes publish when they arrive somewhere with release semantics."""
        out = self.knows.message()
        if lanes > 1:
            out.add(self.one.message())
            out.generic |= self.landed
            return out
        return out.without(self.apart)

    def learn(self, message: Message) -> None:
        """Take over what a barrier published; joint events in it were published by all lanes."""
        self.knows.learn(message)
        self.apart &= ~(message.generic | message.async_ | message.tensor)
        self.fenced &= ~message.async_

    def known(self) -> int:
        """Events that some lane knows, in whatever proxy."""
        out = self.landed
        for k in (self.every, self.one):
            out |= k.generic | k.async_ | k.tensor | k.tensor_seen
        return out

    def refuse(self, fact: str, fix: str, node: Statement | None = None) -> NoReturn:
        """HazardError that names the warp's statement, or an earlier one's work that lands now."""
        where = node or self.node
        raise HazardError(
            f"{show(where)} at {where.site} by {self.who()}: {fact} [{self.trip}]; fix: {fix}"
        )

    def who(self) -> str:
        return f"{self.role} warp {self.warp}" + (f" of CTA {self.cta}" if self.cta >= 0 else "")


class Event(NamedTuple):
    """Something a warp did: one access or arrival."""

    agent: Agent
    who: str
    node: Statement

    def __str__(self) -> str:
        if self.node.op is Op.KERNEL:
            return f"the registers' contents at entry of {self.who}"
        return f"{show(self.node)} at {self.node.site} by {self.who}"
