"""Registers that only a warp's own ordinary instructions touch: no order to check, only data.

All warps run the same statements over them, so what a statement makes of a state is worked out once
and remembered. What asynchronous instructions or an elected lane touch is not private.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from ptxflow.compiler.atoms.table import GENERIC, Access, atom
from ptxflow.compiler.check.state import COMMUTING, Region, inside, minus, overlap, uncovered
from ptxflow.compiler.ir import Op, Slot, Statement, Storage, show

Refuse = Callable[[str, str], NoReturn]  # what is wrong, and what would fix it
OVERWRITTEN = "consume every stage, sum and value that is produced"
UNWRITTEN = "wait for the data before reading it, on a barrier that expects all its bytes"
TAKEN = "read a sum when it is complete"


@dataclass(frozen=True)
class State:
    """A warp's part of a storage: what is written, written and unread, and read of sums."""

    written: tuple[Region, ...] = ()
    unread: tuple[tuple[Statement, Region], ...] = ()  # with the statement that put it there
    taken: tuple[Region, ...] = ()

    def read(self, region: Region) -> tuple[tuple[Statement, Region], ...]:
        """What is unread once a region has been read."""
        return tuple((node, rest) for node, u in self.unread for rest in minus(u, region))

    def after(
        self,
        node: Statement,
        access: Access,
        region: Region,
        adds: bool,
        must: bool,
        refuse: Refuse,
    ) -> "State":
        """The state after an access. `adds`: it goes on from what was there. `must`: what is
        written has to be read. What may not be goes to `refuse`."""
        name = storage_of(node, access).arg.name
        written, unread, taken = self.written, self.unread, self.taken
        if access.mode in "ra" or (access.mode == "rw" and adds):
            if uncovered(region, list(written)):
                refuse(f"reads {name}, of which part was never written", UNWRITTEN)
            unread = self.read(region)
        if access.mode != "r":
            for there, waiting in unread:
                if overlap(waiting, region):
                    put = f"{show(there)} at {there.site}"
                    refuse(f"overwrites {name} before anyone read what {put} put", OVERWRITTEN)
        if access.mode == "r":
            taken = (*taken, region)
        elif access.mode == "rw" and adds:
            if must and any(overlap(t, region) for t in taken):
                refuse(f"adds to {name}, which was read already", TAKEN)
        else:
            taken = tuple(t for t in taken if not overlap(t, region))
        if access.mode not in COMMUTING and not any(inside(region, w) for w in written):
            written = (*(w for w in written if not inside(w, region)), region)
        if node.arg.attr("last") == access.operand:
            written = tuple(rest for w in written for rest in minus(w, region))
        if must and access.mode != "r" and node.arg.attr("unread") != access.operand:
            unread = (*State(unread=unread).read(region), (node, region))
        return State(written, unread, tuple(dict.fromkeys(taken)))


class Moves:
    """States by number, and what each access has been found to make of them."""

    def __init__(self) -> None:
        self.states = [State()]
        self._numbers = {State(): 0}
        self._found: dict[tuple[int, Statement, str, int, bool, bool], int] = {}

    def after(
        self, state: int, node: Statement, access: Access, operand: Slot, offset: int, adds: bool,
        must: bool, refuse: Refuse,
    ) -> int:  # fmt: skip
        """The number of the state after an access at an offset: see State.after."""
        key = state, node, access.operand, offset, adds, must
        found = self._found.get(key)
        if found is None:
            region = (offset, offset + operand.arg, 0, 1)
            new = self.states[state].after(node, access, region, adds, must, refuse)
            found = self._numbers.setdefault(new, len(self.states))
            if found == len(self.states):
                self.states.append(new)
            self._found[key] = found
        return found


def storage_of(node: Statement, access: Access) -> Storage:
    place: Slot = atom(node.arg.atom).operand(node, access.operand)
    return place.src[0]


def private_storages(kernel: Statement) -> frozenset[Storage]:
    """The register storages of a kernel that are private in the sense above."""
    mine: set[Storage] = set()
    shared: set[Storage] = set()
    for node, elected in _atoms(kernel, False):
        for access in atom(node.arg.atom).accesses:
            storage = storage_of(node, access)
            if storage.op is Op.FRAG:
                plain = access.proxy == GENERIC and access.done == "now" and not elected
                (mine if plain else shared).add(storage)
    return frozenset(mine - shared)


def _atoms(node: Statement, elected: bool) -> Iterator[tuple[Statement, bool]]:
    """Every instruction below a statement, and whether an elected lane runs it."""
    if node.op is Op.ATOM:
        yield node, elected
        return
    elected |= (node.op is Op.IF and bool(node.arg)) or (
        node.op is Op.ROLE and bool(node.arg.elected)
    )
    for child in node.src:
        if child.op in (Op.ATOM, Op.IF, Op.LOOP, Op.ROLE):
            yield from _atoms(child, elected)
