"""What kernel families share: the full/empty ring of a producer and its consumers."""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import UOp, Value, loop, mbar, slot, value, var


@dataclass(frozen=True)
class Ring:
    """`stages` slots handed from producers to consumers and back through two mbarriers each.

    Use n of the ring (n = 0, 1, 2, ...) is slot n % stages in turn n // stages. Consumers wait for
    parity turn % 2; producers wait for the other one, which a fresh barrier lets pass.
    """

    stages: int
    full: UOp
    empty: UOp

    @staticmethod
    def of(name: str, stages: int, full_count: int, empty_count: int) -> Ring:
        return Ring(
            stages,
            mbar(f"{name}_full", stages, full_count),
            mbar(f"{name}_empty", stages, empty_count),
        )

    def stage(self, use: Value) -> UOp:
        return value(use) % self.stages

    def parity(self, use: Value) -> UOp:
        return (value(use) // self.stages) & 1

    def wait_full(self, use: Value) -> UOp:
        return at.mbar_wait(slot(self.full, self.stage(use)), self.parity(use))

    def wait_empty(self, use: Value) -> UOp:
        return at.mbar_wait(slot(self.empty, self.stage(use)), self.parity(use) ^ 1)

    def drain(self, uses: Value) -> UOp:
        """After `uses` uses: wait until every one has been released, in all CTAs that do so."""
        i = var("drain")
        return loop(i, self.stages, self.wait_empty(value(uses) + i))
