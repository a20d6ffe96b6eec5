"""Atoms: every instruction the compiler can emit, written `at.mbar_wait(bar, parity)`."""

from __future__ import annotations

from collections.abc import Callable

from ptxflow.compiler.atoms import (  # noqa: F401  importing them fills the table
    arithmetic,
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
from ptxflow.compiler.atoms.table import (
    CONSTRUCTORS,
    Access,
    Atom,
    Lanes,
    Rule,
    Scope,
    all_atoms,
    atom,
)
from ptxflow.compiler.ir import UOp

__all__ = ["Access", "Atom", "Lanes", "Rule", "Scope", "all_atoms", "at", "atom"]


class _Constructors:
    """The constructors of all atoms by name: operands by position, attributes by keyword."""

    def __getattr__(self, name: str) -> Callable[..., UOp]:
        try:
            return CONSTRUCTORS[name]
        except KeyError:
            raise AttributeError(f"no atom {name!r}; known: {', '.join(CONSTRUCTORS)}") from None


at = _Constructors()
