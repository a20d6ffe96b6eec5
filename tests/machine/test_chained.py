"""Calls that begin while what is before them in the stream runs: they wait, all but for weights."""

from dataclasses import replace

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import Op, Statement, edit, kernels_of, program, walk
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify.emulation import emulate_kernel, run_emulation
from tests.families import ROWS, gemm
from tests.given import H200
from tests.row import Case

FIRST = [case for row in ROWS for case in {c.device: c for c in row.cases[::-1]}.values()]
RUN = (
    "cooperative, staged, persistent", "not specialised", "turns", "K over four CTAs",
    "swapped, multicast, persistent",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] * (c.device is not H200)) for c in FIRST],
    ids=lambda case: f"{case.strategy.family} {case.label}",
)
def test_every_family_waits_for_what_is_before_the_call(case: Case) -> None:
    maker, p = family(case.strategy.family), replace(case.problem, chained=())
    lowered = maker.build(p, case.strategy, case.device)
    assert check(lowered, maker.trips(p, case.strategy, case.device), case.device)
    check_launch(lowered, maker.launch(p, case.strategy, case.device))
    first, last = kernels_of(lowered)[0], kernels_of(lowered)[-1]
    assert first.arg.dependent and named(last, "grid_launch_dependents")
    (wait,) = named(first, "grid_wait")
    bad = edit(first, wait, ())
    changed = program(bad, *lowered.src[1:]) if lowered.op is Op.PROGRAM else bad
    with pytest.raises(HazardError, match=r"while the grids before|without griddepcontrol"):
        check(changed, maker.trips(p, case.strategy, case.device), case.device)


def named(kernel: Statement, name: str) -> list[tuple[int, ...]]:
    """Where an instruction stands."""
    return [p for p, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == name]


@pytest.mark.parametrize(
    "name", [n if n in RUN else pytest.param(n, marks=pytest.mark.slow) for n in gemm.HOPPER]
)
def test_a_gemm_loads_weights_before_it_waits(name: str) -> None:
    s = gemm.HOPPER[name]
    p = replace(gemm.problem_for(s), chained=("B",))
    lowered, trips = gemm.build(H200, s, p)
    assert check(lowered, trips, H200)
    order = [n.arg.atom for _, n in walk(lowered) if n.op is Op.ATOM]
    loads = [i for i, name in enumerate(order) if name.startswith("tma_load")]
    waits = [i for i, name in enumerate(order) if name == "grid_wait"]
    assert loads[0] < waits[-1] < loads[-1]
    strict = Statement(lowered.op, lowered.src, replace(lowered.arg, chained=()), lowered.site)
    with pytest.raises(HazardError, match="while the grids before"):
        check(strict, trips, H200)


@pytest.mark.parametrize(
    "name", [RUN[2], *(pytest.param(n, marks=pytest.mark.slow) for n in RUN[:2] + RUN[3:])]
)
def test_the_emulator_finds_a_chained_gemm_right_and_one_that_does_not_wait(name: str) -> None:
    s = gemm.HOPPER[name]
    p = replace(gemm.problem_for(s), chained=("B",))
    assert run_emulation(p, s, H200).right
    small = family("gemm").trial(p, s, H200)
    kernel = family("gemm").build(small.problem, s, H200)
    for path in reversed(named(kernel, "grid_wait")):
        kernel = edit(kernel, path, ())
    assert "griddepcontrol.wait" in " ".join(emulate_kernel(kernel, small, s, H200).complaints)


def test_the_next_launch_of_a_call_may_not_begin_before_the_first_has_waited() -> None:
    case = next(c for c in FIRST if c.strategy.family == "gqa_decode" and c.device is H200)
    maker, p = family("gqa_decode"), replace(case.problem, chained=())
    s = case.strategy.replace(dependent=1)
    lowered = maker.build(p, s, H200)
    assert check(lowered, maker.trips(p, s, H200), H200)
    first, *others = lowered.src
    body = (at.grid_launch_dependents(), *first.src)
    early = program(Statement(first.op, body, first.arg, first.site), *others)
    with pytest.raises(HazardError, match="lets the next launch begin"):
        check(early, maker.trips(p, s, H200), H200)
