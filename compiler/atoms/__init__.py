"""Atoms: every instruction the compiler can emit, written `at.mbar_wait(bar, parity)`."""

from ptxflow.compiler.atoms import (  # noqa: F401  importing them fills the table
    arithmetic,
    at,
    blackwell,
    blocks,
    candidates,
    common,
    copies,
    hopper,
    indexing,
    matrix,
    reductions,
    registers,
    softmax,
    threads,
)
from ptxflow.compiler.atoms.table import Access, Atom, Lanes, Rule, Scope, all_atoms, atom

__all__ = ["Access", "Atom", "Lanes", "Rule", "Scope", "all_atoms", "at", "atom"]
