"""Emulation problems: their inputs, and what outputs must be, exactly or between bounds.

One module for each kernel family, or for several, with a function `case(problem)`.
"""

from importlib import import_module
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.eval.verify.cases.case import Case

#: families whose cases differ in their axes alone
MODULES = dict.fromkeys(("gqa_decode", "gqa_prefill", "mla_decode", "mla_prefill"), "causal")


def case_of(problem: Problem, **given: Any) -> Case:
    """The case of the problem's family, of the lengths, scales or whatever else its `case` takes;
    ModuleNotFoundError where there is none."""
    name = MODULES.get(problem.family, problem.family)
    case: Case = import_module(f"ptxflow.eval.verify.cases.{name}").case(problem, **given)
    return case
