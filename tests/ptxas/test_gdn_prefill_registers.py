"""Gated delta nets that the masks allow have registers for states as two terms."""

from __future__ import annotations

import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.backend.ptxas import assemble, check
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from tests.families.gdn_prefill import B200, H200, PREFILL, problem, strategy

LARGE = strategy(chunk=32, helpers=4, stages=4, operands="pairs", solve="pairs", order="sequences")
SMALL = strategy(chunk=64, rows=64, helpers=6, operands="pairs", order="sequences")


def complaints(s: Strategy, size: int, dev: Device) -> list[str]:
    kernel = PREFILL.build(problem(512, 8, size, 2, 16), s, dev)
    return check(assemble(write(kernel, dev), dev.arch))


@pytest.mark.parametrize(("dev", "size", "s"), [(B200, 256, LARGE), (H200, 64, SMALL)])
def test_states_in_two_terms_that_would_spill_are_refused(
    dev: Device, size: int, s: Strategy
) -> None:
    (refusal,) = PREFILL.refusals(problem(512, 8, size, 2, 16), s, dev)
    assert "states and sums exceed the registers of a thread" in refusal
    assert any("registers spill" in line for line in complaints(s, size, dev))


@pytest.mark.parametrize(
    ("dev", "size", "s"),
    [
        (H200, 256, LARGE.replace(chunk=16, helpers=2)),
        (B200, 256, LARGE.replace(operands="half")),
        (B200, 64, SMALL.replace(operands="half")),
    ],
)
def test_the_like_that_are_allowed_do_not_spill(dev: Device, size: int, s: Strategy) -> None:
    assert not PREFILL.refusals(problem(512, 8, size, 2, 16), s, dev)
    assert complaints(s, size, dev) == []
