"""Small problems for the emulator: inputs, and what outputs must be, exactly or between bounds.

One module for each kernel family, with a function `case(problem)`.
"""

from __future__ import annotations

from importlib import import_module

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases.case import Case


def case_of(problem: Problem) -> Case:
    """The case of the problem's family; ModuleNotFoundError where that has none."""
    case: Case = import_module(f"ptxflow.eval.verify.cases.{problem.family}").case(problem)
    return case
