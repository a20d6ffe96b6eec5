"""A libcuda whose calls succeed and do nothing; subclasses say what some of them do."""

from typing import Any


class Cuda:
    """`asked` is what a subclass remembers of calls."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            return lambda *args: 0
        raise AttributeError(name)
