"""The state of one abstract run: its warps, events, histories of storage, and barriers."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ptxflow.compiler.check import state
from ptxflow.compiler.check.arithmetic import MAX
from ptxflow.compiler.check.program import Agent, Event, Program
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import Op, Statement, Storage

_BAND = 8  # rows of a global tensor that share a history


class Run:
    """A program, a trip class, a schedule, and what has happened so far."""

    def __init__(self, program: Program, trip: Trip, schedule: str):
        self.program, self.info, self.trip, self.schedule = program, program.info, trip, schedule
        self.events: list[Event] = []
        self.histories: dict[tuple[Any, ...], state.History] = {}
        #: registers of which all that is written must be read
        self.demanded = program.private - program.unread if trip.outputs else frozenset[Storage]()
        self.barriers: dict[tuple[Any, ...], state.Barrier] = {}
        self.rendezvous: dict[tuple[Any, ...], state.Rendezvous] = {}
        self.landing: list[Callable[[], None]] = []
        self.foreign = [0] * self.info.cluster  # events that reach into a CTA
        self.sent = [0] * self.info.cluster  # stores of a CTA into others, on their way
        self.handed = 0  # events that even a relaxed arrival hands over: see Message.relaxed
        self.asynchronous = 0  # asynchronous accesses to shared memory
        self.observations = 0  # events of waits that succeeded
        self.grid_waits = 0
        self.tmem = [state.TensorMemory() for _ in range(self.info.cluster)]
        self.free_registers = [0] * self.info.cluster  # a lane, summed over warps
        #: by warp, storage -> number of its state
        self.private = [
            defaultdict[Storage, int](int) for _ in range(self.info.cluster * self.info.warps)
        ]
        self.steps = 0
        values = {name: value & MAX for name, value in trip.values}
        base = values.pop("ctaid", 0) * self.info.cluster
        self.agents = [
            Agent(
                i,
                i // self.info.warps,
                i % self.info.warps,
                {
                    "ctas": self.info.cluster,
                    **values,
                    "ctaid": base + i // self.info.warps,
                    "cta_rank": i // self.info.warps,
                    "warp": i % self.info.warps,
                    "lane": 0,
                },
                trip.name,
                program.kernel,
                registers=program.launched,
            )
            for i in range(self.info.cluster * self.info.warps)
        ]

    def _event(self, agent: Agent, node: Statement) -> int:
        self.events.append(Event(agent, agent.who(), node))
        return 1 << (len(self.events) - 1)

    def event_of(self, what: state.Past | state.Unread) -> Event:
        """What happened, with its own statement: like accesses share an event."""
        return self.events[what.event]._replace(node=what.node)

    def _history(self, key: tuple[Any, ...], name: str) -> state.History:
        """The history of one stage of a storage; the key starts with the storage's Op."""
        found = self.histories.get(key)
        if found is None:
            found = self.histories[key] = state.History(name, key[0])
        return found

    def bands(
        self, name: str, first: int, column: int, rows: int, columns: int
    ) -> list[tuple[state.History, state.Region]]:
        """A rectangle of a global tensor, cut into bands of rows to keep histories short."""
        out = []
        for band in range(first // _BAND, -(-(first + rows) // _BAND)):
            lo, hi = max(first, band * _BAND), min(first + rows, (band + 1) * _BAND)
            history = self._history((Op.GLOBAL, name, band), name)
            out.append((history, (lo, hi, column, column + columns)))
        return out
