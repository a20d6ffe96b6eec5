"""The validator proves gqa_decode programs, and misses what orders their copies and kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError, HazardError, SpecError
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.ir import (
    Op,
    UOp,
    Use,
    edit,
    frag,
    global_tensor,
    kernels_of,
    param,
    program,
    rectangle,
    slot,
    smem,
    walk,
)
from tests.gqa_decode_cases import (
    B200,
    CASES,
    DECODE,
    GROUP_CASES,
    GROUP_IDS,
    GROUP_PATHS,
    H200,
    IDS,
    PATHS,
    problem,
    strategy,
)
from tests.machine.truth import Options, block, table


def proven(kernels: list[UOp], s: Strategy) -> list[str]:
    return check(program(*kernels), DECODE.trips(problem(64, 4096), s, H200), H200)


def built(s: Strategy) -> list[UOp]:
    return list(kernels_of(DECODE.build(problem(64, 4096), s, H200)))


def uses(kernel: UOp, name: str) -> list[tuple[tuple[int, ...], UOp]]:
    return [(p, n) for p, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == name]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_proven(dev, name, s, page_size):  # type: ignore[no-untyped-def]
    p = problem(64, 4096, page_size)
    lowered, trips = DECODE.build(p, s, dev), DECODE.trips(p, s, dev)
    assert len(check(lowered, trips, dev)) == len(trips) + 2
    check_launch(lowered, DECODE.launch(p, s, dev))


@pytest.mark.parametrize(("dev", "page_size", "s"), GROUP_CASES, ids=GROUP_IDS)
@pytest.mark.parametrize("group", [1, 4, 9])
def test_every_path_of_a_warpgroup_is_proven(dev, page_size, s, group):  # type: ignore[no-untyped-def]
    p = problem(64, 4096, page_size, group=group, size=64)
    assert not DECODE.refusals(p, s, dev)
    lowered, trips = DECODE.build(p, s, dev), DECODE.trips(p, s, dev)
    assert len(check(lowered, trips, dev)) == len(trips) + 2
    check_launch(lowered, DECODE.launch(p, s, dev))


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.arch)
@pytest.mark.parametrize("name", ["copied rows, values later", "parts of pages, values later"])
def test_all_that_orders_a_warpgroup_is_needed(dev: Device, name: str) -> None:
    """Waits, arrivals, fences, commits and meetings of its kernel, each left out."""
    page_size, s = GROUP_PATHS[name]
    p = problem(64, 4096, page_size, size=64)
    first, combine = kernels_of(DECODE.build(p, s, dev))
    trips, spared = DECODE.trips(p, s, dev), list[str]()
    for path, node in walk(first):
        if node.op is Op.ATOM and atom(node.arg.atom).orders:
            try:
                check(program(edit(first, path, ()), combine), trips, dev)
                spared.append(node.arg.atom)
            except CompileError:
                continue
    # a fence for TMA, commits and peers, of which wgmma on copied rows has none
    assert set(spared) <= {"fence_mbar_init"}


@pytest.mark.parametrize("name", ["a warp alone, values later", "chunks are shared"])
def test_every_wait_and_meeting_is_needed(name: str) -> None:
    """Of copies, warps, the CTA and the kernel before; a wait for one group fewer, too."""
    s = PATHS[name].replace(dependent=1)
    chunks, combine = built(s)
    count = 0
    for which, kernel in enumerate((chunks, combine)):
        for path, node in walk(kernel):
            if node.op is not Op.ATOM or not atom(node.arg.atom).orders:
                continue
            new: list[tuple[UOp, ...]] = [()]
            if node.arg.atom == "copies_wait":
                later = Use("copies_wait", (("pending", node.arg.attr("pending") + 1),))
                new.append((UOp(Op.ATOM, node.src, later, node.site),))
            for put in new:
                kernels = [chunks, combine]
                kernels[which] = edit(kernel, path, put)
                with pytest.raises(CompileError, match="; fix: "):
                    proven(kernels, s)
                count += 1
    assert count >= 10


def _without_wait_for_the_grid(kernels: list[UOp]) -> None:
    (path, _), *_ = uses(kernels[1], "grid_wait")
    kernels[1] = edit(kernels[1], path, ())


def _changes_places(kernels: list[UOp]) -> None:
    kernels.reverse()


def _has_the_name_of_the_other(kernels: list[UOp]) -> None:
    kernels.append(kernels[1])


PLANTED: dict[str, tuple[Callable[[list[UOp]], None], str]] = {
    "no wait for the grid before": (_without_wait_for_the_grid, "while the grids before may still"),
    "sums come first": (_changes_places, "launched first and dependent"),
    "the same twice": (_has_the_name_of_the_other, "share a name"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_refused(name: str) -> None:
    plant, message = PLANTED[name]
    kernels = built(strategy())
    plant(kernels)
    with pytest.raises((HazardError, SpecError), match=message):
        proven(kernels, strategy())


def test_sums_that_nobody_writes_are_not_read() -> None:
    p, s = problem(64, 4096), strategy()
    chunks, combine = built(s)
    while stores := [path for path, n in uses(chunks, "st_global") if _tensor(n) == "sums"]:
        chunks = edit(chunks, stores[0], ())
    with pytest.raises(SpecError, match="sums"):
        check_launch(program(chunks, combine), DECODE.launch(p, s, H200))


def _tensor(node: UOp) -> str:
    return str(node.src[3].src[0].arg.name)


SIZE = 512  # of a copy by each lane
TILE, HELD = smem("tile", SIZE, 1, align=16), frag("held", 4, "b32")


def _copy() -> UOp:
    place = rectangle(global_tensor("A"), 0, 0, 1, 1)
    return at.copy_async(slot(TILE), 0, param("C"), 0, place)


def _read() -> UOp:
    return at.ld_shared_v4(slot(HELD), slot(TILE), 0)


def test_copies_are_read_when_all_lanes_have_theirs() -> None:
    """Each lane waits for its own; the others' have landed once all have met."""

    def build(o: Options) -> UOp:
        body = [
            _copy(),
            *o("commit", at.copies_commit()),
            *o("wait", at.copies_wait(pending=0)),
            *o("sync", at.warp_sync()),
            _read(),
        ]
        return block(H200, (TILE, HELD), *body, warps=1)  # type: ignore[arg-type]

    table("commit wait sync", build, lambda o: len(o.on) == 3, H200)


def test_a_wait_leaves_as_many_groups_as_it_says() -> None:
    """`more` is a group behind the copy's, `empty` one before; one may be pending."""

    def build(o: Options) -> UOp:
        body = [
            *o("empty", at.copies_commit()),
            _copy(),
            at.copies_commit(),
            *o("more", at.copies_commit()),
            at.copies_wait(pending=1),
            at.warp_sync(),
            _read(),
        ]
        return block(H200, (TILE, HELD), *body, warps=1)  # type: ignore[arg-type]

    table("empty more", build, lambda o: o.more, H200)


def test_a_tile_is_read_by_all_before_copies_take_its_place() -> None:
    """A lane that comes first would overwrite what others read."""

    def build(o: Options) -> UOp:
        arrive = [at.copies_commit(), at.copies_wait(pending=0), at.warp_sync()]
        body = [_copy(), *arrive, *o("read", _read()), *o("sync", at.warp_sync()), _copy(), *arrive]
        return block(H200, (TILE, HELD), *body, _read(), warps=1)  # type: ignore[arg-type]

    table("read sync", build, lambda o: o.sync or not o.read, H200)
