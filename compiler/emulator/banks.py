"""Conflicts of shared memory's banks: 32 of them, of 4 bytes each, one word of a bank at a time."""

from dataclasses import dataclass

import numpy as np

from ptxflow.compiler.emulator.lanes import Array

BANKS, WORD = 32, 4


@dataclass
class Banks:
    """Of a launch's generic accesses: `asked`, which lanes that ask for 128 bytes together make one
    of, and `taken`, the wavefronts that they took, one for each word of the busiest bank."""

    asked: int = 0
    taken: int = 0

    def add(self, first: Array, run: int, lanes: Array | None) -> None:
        """Runs of `run` bytes at offsets `first` [n], of lanes [n] (those from 0 on if None)."""
        together = max(1, BANKS * WORD // max(run, WORD))
        group = (np.arange(len(first)) if lanes is None else lanes) // together
        word = first[:, None] // WORD + np.arange(max(1, run // WORD))
        pairs = np.unique(np.stack([np.broadcast_to(group[:, None], word.shape), word], -1)
                          .reshape(-1, 2), axis=0)  # fmt: skip
        busy = np.zeros((int(group.max()) + 1, BANKS), np.int64)
        np.add.at(busy, (pairs[:, 0], pairs[:, 1] % BANKS), 1)
        self.asked += len(np.unique(group))
        self.taken += int(busy.max(1).sum())
