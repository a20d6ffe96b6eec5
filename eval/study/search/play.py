"""The rules of play: a method is shown a space, proposes strategies, and is told their times.

A method is a generator. It yields the index of a strategy in the space's codes and is sent that
strategy's time; a measurement is a measurement, whatever it returns and however often it is asked.
Times never reach it otherwise. That nothing else did is checked: `interference` replays a method on
the same answers while the optimum is moved elsewhere, which an honest method cannot notice.
"""

import sys
import zlib
from collections.abc import Generator
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.space import Space
from ptxflow.eval.study.search.replay import Replay

Search = Generator[int, float, None]
Indices = NDArray[np.int64]

#: what reads other people's objects and files of times
WALKS = ("gc.get_objects", "gc.get_referrers", "gc.get_referents")
STORES = (".jsonl", ".jsonl.xz")


class Foul(Exception):
    """A method broke the rules; the message says who, on what, and which rule."""


class Method(Protocol):
    """A search. `seeded` is False where every seed plays alike."""

    @property
    def name(self) -> str: ...

    @property
    def seeded(self) -> bool: ...

    def search(self, space: Space, rng: np.random.Generator) -> Search:
        """Yields indices into `space.codes`; is sent the time of each (infinite: it failed)."""
        ...


@runtime_checkable
class Costly(Method, Protocol):
    """A method that costs more than what it has measured."""

    def cost(self, replay: Replay, asked: Indices) -> dict[str, Any]:
        """Of the run that asked for these, in order: JSON data."""
        ...


class Game:
    """One run of a method under the rules. `asked` are its questions so far, in order.

    The numbers depend on the method's name, the workload and the seed alone, not on what was
    played before.
    """

    def __init__(self, method: Method, space: Space, workload: str, seed: int):
        key = [zlib.crc32(text.encode()) for text in (method.name, workload)]
        self.asked: list[int] = []
        self._size = len(space)
        self._watch = _Watch(f"{method.name} on {workload}")
        self._search = method.search(space, np.random.default_rng([seed, *key]))

    def next(self, answer: float | None = None) -> int | None:
        """The first question, or the next one after the answer to the last; None where the method
        has no more. Foul where it broke a rule."""
        try:
            with self._watch:
                at = next(self._search) if answer is None else self._search.send(answer)
        except StopIteration:
            return None
        if not 0 <= at < self._size:
            raise Foul(f"{self._watch.who}: {at} is no strategy of the {self._size} there are")
        self.asked.append(int(at))
        return int(at)

    def close(self) -> None:
        self._search.close()


def play(method: Method, replay: Replay, budget: int, seed: int) -> Indices:
    """[at most `budget`] what the method measured, in order; Foul where it broke a rule."""
    game = Game(method, replay.space, replay.name, seed)
    try:
        at = game.next()
        while at is not None and len(game.asked) < budget:
            at = game.next(float(replay.times[at]))
    finally:
        game.close()
    return np.array(game.asked, np.int64)


def interference(method: Method, replay: Replay, first: Indices, seed: int = 0) -> str | None:
    """Why the method, which measured `first` with this seed, is not to be trusted, or None.

    It plays again, on times that agree on all of these but are reversed on the rest, the slowest
    now the fastest of all. The same answers must lead to the same questions.
    """
    times = replay.times.copy()
    rest = np.setdiff1d(np.argsort(times, kind="stable"), first, assume_unique=True)
    times[rest] = times[rest][::-1]
    times[rest[-1:]] = 0.1 * replay.optimum
    moved = Replay(replay.name, replay.space, times, replay.yardstick, replay.kind)
    second = play(method, moved, len(first), seed)
    if np.array_equal(first, second):
        return None
    at = int(np.argmax(first[: len(second)] != second[: len(first)]))
    return (
        f"{method.name} on {replay.name}: measurement {at + 1} depends on times that it was not "
        f"told: with the same answers it asked for {first[at]} and then for {second[at]}"
    )


class _Watch:
    """While a method thinks, opening stored measurements and walking the heap is a foul."""

    active: "_Watch | None" = None
    installed = False

    def __init__(self, who: str):
        self.who = who

    def __enter__(self) -> None:
        if not _Watch.installed:  # an audit hook cannot be removed, so there is one
            sys.addaudithook(_audit)
            _Watch.installed = True
        _Watch.active = self

    def __exit__(self, *_: object) -> None:
        _Watch.active = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _Watch.active
    if watch is None:
        return
    if event in WALKS:
        raise Foul(f"{watch.who}: walks the heap ({event}); a method knows what it was told")
    appended = event == "open" and "a" in str(arguments[1])  # a transcript: nothing is read
    if event == "open" and not appended and str(arguments[0]).endswith(STORES):
        raise Foul(f"{watch.who}: opens {arguments[0]}; a method knows what it was told")
