"""Options and profiles of the whole suite."""

import gc

import pytest
from hypothesis import HealthCheck, settings

from ptxflow.compiler.processes import SELDOM

gc.set_threshold(*SELDOM)
settings.register_profile(
    "ptxflow",
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ptxflow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite what tests/golden expects, and what tests say in verification.md",
    )
