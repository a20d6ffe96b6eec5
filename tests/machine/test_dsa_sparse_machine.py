"""The validator proves sparse attention kernels, and misses what makes lists data."""

from __future__ import annotations

import pytest

from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Op, UOp, edit, kernels_of, walk
from tests.dsa_cases import CASES, H200, IDS, SPARSE, problem, strategy


def small(topk: int) -> Problem:
    return problem(16, latent=128, topk=topk)


@pytest.mark.parametrize(("dev", "name", "s", "topk"), CASES, ids=IDS)
def test_kernels_and_launches_are_proven(dev: Device, name: str, s: Strategy, topk: int) -> None:
    p = small(topk)
    lowered, trips = SPARSE.build(p, s, dev), SPARSE.trips(p, s, dev)
    assert len(check(lowered, trips, dev)) == len(trips) + len(kernels_of(lowered))
    check_launch(lowered, SPARSE.launch(p, s, dev))


def _paths(kernel: UOp, name: str) -> list[tuple[int, ...]]:
    return [q for q, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == name]


@pytest.mark.parametrize(
    ("name", "count"),
    [("ld_global", 2), ("copy_or_zero", 8), ("copies_arrive", 1), ("mbar_wait", 2)],
)
def test_statements_of_lists_are_needed(name: str, count: int) -> None:
    """Entries as warps that multiply load them, rows, and the order between them and readers."""
    p, s = small(250), strategy(chunk=0)
    lowered, trips = SPARSE.build(p, s, H200), SPARSE.trips(p, s, H200)
    paths = _paths(lowered, name)
    assert len(paths) >= count
    for path in paths[-count:]:
        with pytest.raises(CompileError, match="; fix: "):
            check(edit(lowered, path, ()), trips, H200)


def test_runs_have_the_tiles_that_ctas_have() -> None:
    """A whole list, its first and its last chunk; if long, as far as past a ring's second turn."""

    def runs(topk: int, **choices: int) -> list[str]:
        return [trip.name for trip in SPARSE.trips(small(topk), strategy(**choices), H200)]

    assert runs(256, chunk=0) == ["part 0 of 1 of 160 entries"]
    assert runs(100, chunk=0) == ["part 0 of 1 of 100 entries"]
    cut = ["part 0 of 3 of 160 entries", "part 2 of 3 of 250 entries", "3 chunks"]
    assert runs(250, chunk=96) == cut
