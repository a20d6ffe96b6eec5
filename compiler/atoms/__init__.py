"""Atoms: every instruction the compiler can emit. Import them as `from ...atoms import at`."""

from ptxflow.compiler.atoms import blackwell, common, hopper
from ptxflow.compiler.atoms.table import Access, Atom, Lanes, Rule, Scope, all_atoms, atom

__all__ = ["Access", "Atom", "Lanes", "Rule", "Scope", "all_atoms", "at", "atom"]


class at:  # noqa: N801  reads as a namespace: at.mbar_wait(...)
    """The constructors of all atoms."""


for _module in (common, hopper, blackwell):
    for _row in all_atoms():
        if hasattr(_module, _row.name):
            setattr(at, _row.name, staticmethod(getattr(_module, _row.name)))
