"""The validator proves moe programs, and misses what orders their copies, products and kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ptxflow.compiler.atoms import atom
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.errors import CompileError, SpecError
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.ir import Op, UOp, Use, edit, kernels_of, program, walk
from tests.moe_cases import B200, BLACKWELL, CASES, H200, HOPPER, IDS, MOE, problem

P = problem(local=3, hidden=512, inner=512)


def uses(kernel: UOp, name: str) -> list[tuple[tuple[int, ...], UOp]]:
    return [(p, n) for p, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == name]


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_proven(dev, name, s):  # type: ignore[no-untyped-def]
    lowered, trips = MOE.build(P, s, dev), MOE.trips(P, s, dev)
    assert len(check(lowered, trips, dev)) == len(trips) + len(kernels_of(lowered))
    check_launch(lowered, MOE.launch(P, s, dev))


@pytest.mark.parametrize(
    ("dev", "s", "which"),
    [
        (H200, HOPPER["columns"], "moe_up"),
        (H200, HOPPER["rows"], "moe_down"),
        (B200, BLACKWELL["rows of two groups"], "moe_up"),
    ],
    ids=["columns", "rows", "tcgen05"],
)
def test_every_wait_fence_and_arrival_is_needed(dev, s, which):  # type: ignore[no-untyped-def]
    kernels = list(kernels_of(MOE.build(P, s, dev)))
    number = next(i for i, k in enumerate(kernels) if k.arg.name == which)
    trips = [t for t in MOE.trips(P, s, dev) if t.entry == which]
    count, needless = 0, []
    for path, node in walk(kernels[number]):
        if node.op is not Op.ATOM or not atom(node.arg.atom).orders:
            continue
        edited = [*kernels[:number], edit(kernels[number], path, ()), *kernels[number + 1 :]]
        try:
            _check_one(edited, number, trips, dev)
        except CompileError as refusal:
            assert "; fix: " in str(refusal)
        else:
            needless.append(f"{node.arg.atom} at {node.site}")
        count += 1
    assert count >= 15 and not needless


def _check_one(kernels, number, trips, dev) -> None:  # type: ignore[no-untyped-def]
    """Prove one kernel of a program."""
    from ptxflow.compiler.check import Program, check_spec, execute
    from ptxflow.compiler.check.order import awaited
    from ptxflow.compiler.check.values import check_values

    kernel = kernels[number]
    check_spec(kernel, dev)
    check_values(kernel)
    ready = Program(kernel, awaited(kernels, kernel))
    for trip in trips:
        for schedule in ("eager", "late"):
            execute(ready, trip, schedule)


def _without_wait_for_the_grid(kernels: list[UOp]) -> None:
    (path, _), *_ = uses(kernels[1], "grid_wait")
    kernels[1] = edit(kernels[1], path, ())


def _without_meeting(kernels: list[UOp]) -> None:
    (path, _), *_ = uses(kernels[1], "cta_sync")
    kernels[1] = edit(kernels[1], path, ())


def _hands_over_early(kernels: list[UOp]) -> None:
    (path, node), *_ = uses(kernels[2], "copies_wait")
    later = Use("copies_wait", (("pending", node.arg.attr("pending") + 1),))
    kernels[2] = edit(kernels[2], path, (UOp(Op.ATOM, node.src, later, node.site),))


def _places_come_later(kernels: list[UOp]) -> None:
    kernels[1], kernels[2] = kernels[2], kernels[1]


PLANTED: dict[str, tuple[Callable[[list[UOp]], None], str]] = {
    "no wait for the grid before": (_without_wait_for_the_grid, "while the grids before may still"),
    "counts are read before all have counted": (_without_meeting, "cta_sync|not ordered|barrier"),
    "gathered rows are handed over early": (_hands_over_early, "token_tiles|scale_rows"),
    "rows before their places": (_places_come_later, "are launched as"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_refused(name: str) -> None:
    plant, message = PLANTED[name]
    s = HOPPER["columns"]
    kernels = list(kernels_of(MOE.build(P, s, H200)))
    plant(kernels)
    with pytest.raises(CompileError, match=message):
        _proven(kernels, s)


def _proven(kernels: list[UOp], s: Strategy) -> None:
    lowered = program(*kernels)
    check(lowered, MOE.trips(P, s, H200), H200)
    check_launch(lowered, MOE.launch(P, s, H200))


def test_a_row_tile_list_that_nobody_writes_is_not_read() -> None:
    s = HOPPER["columns"]
    kernels = list(kernels_of(MOE.build(P, s, H200)))
    stores = [p for p, n in uses(kernels[1], "st_global") if n.src[3].src[0].arg.name == "work"]
    kernels[1] = edit(kernels[1], stores[0], ())
    with pytest.raises(SpecError, match="work"):
        check_launch(program(*kernels), MOE.launch(P, s, H200))
