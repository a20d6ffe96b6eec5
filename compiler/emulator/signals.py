"""Release and acquire: what CTAs released at words of memory, and who may see it."""

from dataclasses import dataclass

from ptxflow.compiler.emulator.clocks import Clocks

Place = tuple[int, int]  # of a CTA: its cluster, its rank


@dataclass(frozen=True)
class Left:
    """What one CTA released at an address, to threads inside a scope."""

    by: Place
    scope: str
    message: Clocks


class Signals:
    """What was released, by the shadow and offset of the word."""

    def __init__(self) -> None:
        self.at: dict[tuple[int, int], list[Left]] = {}

    def release(self, me: Place, key: tuple[int, int], scope: str, message: Clocks) -> None:
        here = self.at.setdefault(key, [])
        for left in here:
            if (left.by, left.scope) == (me, scope):
                left.message.join(message)
                return
        here.append(Left(me, scope, message.copy()))

    def seen(self, me: Place, key: tuple[int, int], scope: str) -> Clocks:
        """What an access of that scope can see of it."""
        out = Clocks()
        for left in self.at.get(key, ()):
            if _within(left.scope, left.by, me) and _within(scope, me, left.by):
                out.join(left.message)
        return out


def _within(scope: str, cta: Place, other: Place) -> bool:
    return cta == other if scope == "cta" else scope != "cluster" or cta[0] == other[0]
