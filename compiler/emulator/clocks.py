"""Vector clocks: what a warp, or a barrier's message, knows to have happened before it.

An agent is a warp, or a stream of asynchronous work that completes in order (the loads that signal
one mbarrier, one thread's bulk groups, a warpgroup's wgmmas, a thread's tcgen05 operations). A
table has a row of clocks for each proxy that an access may use, and one for what even a relaxed
arrival hands on (PTX ISA 8.9 and 9.7.13.4).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

GENERIC, SHARED_ASYNC, GLOBAL_ASYNC, HANDED = range(4)  # rows
ROWS = 4
ROOM = 64  # agents that a table grows by
WARP = "warp"  # the kind of the agents that are not streams
WIDE = ("cluster", "gpu", "sys")  # scopes beyond the CTA


class Clocks:
    """The latest known clock of every agent from `first` on, [rows, agents]; of all others 0."""

    def __init__(self, rows: npt.NDArray[Any] | None = None, first: int = 0):
        self.rows: npt.NDArray[Any] = np.zeros((ROWS, 0), np.int32) if rows is None else rows
        self.first = first

    def reach(self, agent: int) -> None:
        """Make room for an agent. Those of other clusters are far away, and seldom known."""
        held = self.rows.shape[1]
        if not held:
            self.first, self.rows = agent, np.zeros((ROWS, ROOM), np.int32)
        elif agent >= self.first + held:
            more = np.zeros((ROWS, -(-(agent + 1 - self.first - held) // ROOM) * ROOM), np.int32)
            self.rows = np.concatenate([self.rows, more], axis=1)
        elif agent < self.first:
            more = np.zeros((ROWS, self.first - agent), np.int32)
            self.first, self.rows = agent, np.concatenate([more, self.rows], axis=1)

    def copy(self) -> "Clocks":
        return Clocks(self.rows.copy(), self.first)

    def join(self, other: "Clocks") -> None:
        """Learn what the other knows."""
        count = other.rows.shape[1]
        if not count:
            return
        if not self.rows.shape[1]:
            self.rows, self.first = other.rows.copy(), other.first
            return
        self.reach(other.first)
        self.reach(other.first + count - 1)
        at = other.first - self.first
        mine = self.rows[:, at : at + count]
        np.maximum(mine, other.rows, out=mine)

    def handed(self) -> "Clocks":
        """What a relaxed arrival hands on: completed asynchronous accesses, published barriers."""
        out = np.zeros_like(self.rows)
        out[HANDED] = self.rows[HANDED]
        return Clocks(out, self.first)

    def completed(self, agent: int, clock: int) -> None:
        """An asynchronous stream has come that far: known to every proxy."""
        self.reach(agent)
        column = self.rows[:, agent - self.first]
        np.maximum(column, clock, out=column)

    def learn(self, row: int, agent: int, clock: int) -> None:
        self.reach(agent)
        at = agent - self.first
        self.rows[row, at] = max(self.rows[row, at], clock)

    def knows(self, row: int, agent: int, clock: int) -> bool:
        at = agent - self.first
        return 0 <= at < self.rows.shape[1] and bool(self.rows.item(row, at) >= clock)


class Actor(Clocks):
    """A warp's clocks. Its own clock counts what it published, or fenced."""

    def __init__(self, agent: int):
        super().__init__()
        self.agent = agent
        self.reach(agent)
        self.rows[GENERIC, self._own] = 1
        self.unfenced = [0] * ROWS  # lanes with generic writes that no proxy fence followed, by row
        self.released: Clocks | None = None  # what it knew at its last fence of a wide scope
        self.released_cta: Clocks | None = None
        self.observed = Clocks()  # released by others where relaxed reads saw it, to be fenced
        self.segment = 0  # times that the lanes of the warp synchronised

    @property
    def _own(self) -> int:
        """Its column."""
        return self.agent - self.first

    @property
    def now(self) -> int:
        return int(self.rows.item(GENERIC, self._own))

    def _tick(self) -> None:
        self.rows[GENERIC, self._own] += 1

    def publish(self) -> Clocks:
        """The message of a release."""
        out = self.copy()
        self._tick()
        return out

    def publish_relaxed(self) -> Clocks:
        """The message of a relaxed arrival: with a fence before it, what that released."""
        out = self.handed()
        if self.released is not None:
            out.join(self.released)
        return out

    def fence(self, scope: str) -> None:
        """fence.acq_rel or stronger: makes later relaxed writes release, earlier reads acquire."""
        self.join(self.observed)
        self.released_cta = self.copy()
        if scope in WIDE:
            self.released = self.released_cta
        self._tick()

    def fence_proxy(self, lanes: int, rows: tuple[int, ...]) -> None:
        """Generic accesses so far come before later asynchronous ones.

        The warp's own count once every lane that wrote has executed the fence.
        """
        for row in rows:
            self.unfenced[row] &= ~lanes
            own = self.rows[row, self._own]
            np.maximum(self.rows[row], self.rows[GENERIC], out=self.rows[row])
            if self.unfenced[row]:
                self.rows[row, self._own] = own
        self._tick()

    def publish_barriers(self) -> None:
        """fence.mbarrier_init: even a relaxed arrival hands on what was initialised."""
        self.rows[HANDED, self._own] = self.now
        self._tick()
