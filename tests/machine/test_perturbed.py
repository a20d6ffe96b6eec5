"""Wrong parities, counts, bytes, stages and scopes are found, not only missing statements."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.check import check
from ptxflow.compiler.errors import HazardError, SpecError
from ptxflow.compiler.ir import Buffer, Op, Role, UOp, edit, kernel, role, slot, walk
from tests.families.gemm import B200, BLACKWELL, H200, HOPPER, build


def find(tree: UOp, name: str, which: int = 0) -> tuple[tuple[int, ...], UOp]:
    found = [(p, n) for p, n in walk(tree) if n.op is Op.ATOM and n.arg.atom == name]
    return found[which]


def refused(tree, trips, dev, match):  # type: ignore[no-untyped-def]
    with pytest.raises((HazardError, SpecError), match=match):
        check(tree, trips, dev)


@pytest.fixture
def hopper():  # type: ignore[no-untyped-def]
    return build(H200, HOPPER["cooperative, staged, persistent"])


@pytest.fixture
def pair():  # type: ignore[no-untyped-def]
    return build(B200, BLACKWELL["pair"])


@pytest.mark.parametrize("which", [0, 1], ids=["consumer", "producer"])
def test_inverted_parity(hopper, which):  # type: ignore[no-untyped-def]
    tree, trips = hopper
    path, wait = find(tree, "mbar_wait", which)
    bad = at.mbar_wait(wait.src[0], wait.src[1] ^ 1)
    refused(edit(tree, path, (bad,)), trips, H200, "race|never written|deadlock|arrivals|waited")


def test_parity_not_taken_modulo_two(hopper):  # type: ignore[no-untyped-def]
    tree, trips = hopper
    path, wait = find(tree, "mbar_wait")
    turn = wait.src[1].src[0]  # the turn before `& 1`
    refused(edit(tree, path, (at.mbar_wait(wait.src[0], turn),)), trips, H200, "race|parity|never")


@pytest.mark.parametrize("factor", [0.5, 2])
def test_wrong_bytes(hopper, factor):  # type: ignore[no-untyped-def]
    tree, trips = hopper
    path, expect = find(tree, "mbar_arrive_expect")
    bad = at.mbar_arrive_expect(expect.src[0], bytes=int(expect.arg.attr("bytes") * factor))
    refused(edit(tree, path, (bad,)), trips, H200, "deadlock|race|never written|half way")


def test_bytes_of_a_pair_not_doubled(pair):  # type: ignore[no-untyped-def]
    tree, trips = pair
    path, expect = find(tree, "mbar_arrive_expect")
    bad = at.mbar_arrive_expect(expect.src[0], bytes=expect.arg.attr("bytes") // 2)
    refused(edit(tree, path, (bad,)), trips, B200, "race|never written|half way|deadlock")


def test_commit_that_signals_one_cta_of_a_pair(pair):  # type: ignore[no-untyped-def]
    tree, trips = pair
    path, commit = find(tree, "tcgen05_commit")
    bad = at.tcgen05_commit(commit.src[0], cta_group=2, mask=1)
    refused(edit(tree, path, (bad,)), trips, B200, "deadlock")


def test_relaxed_arrive_hands_over_tensor_memory(pair):  # type: ignore[no-untyped-def]
    """Harmless: tcgen05's own fences order accesses to TMEM; no other data is handed over here."""
    tree, trips = pair
    path, arrive = find(tree, "mbar_release_peer")
    assert check(edit(tree, path, (at.mbar_arrive_peer(*arrive.src),)), trips, B200)


def test_stage_released_too_early(hopper):  # type: ignore[no-untyped-def]
    tree, trips = hopper
    path, _ = find(tree, "wgmma_wait")
    refused(edit(tree, path, (at.wgmma_wait(pending=2),)), trips, H200, r"race on [ab]\[0\]")


def test_wrong_arrival_count(hopper):  # type: ignore[no-untyped-def]
    tree, trips = hopper

    def recount(node: UOp) -> UOp:
        arg = node.arg
        if node.op is Op.MBAR and arg.name == "ring_empty":
            arg = Buffer(arg.name, arg.size, arg.stages, arg.align, arg.dtype, arg.count - 1)
        return UOp(node.op, tuple(map(recount, node.src)), arg, node.site)

    bad = recount(tree)
    info = bad.arg
    storage = tuple(map(recount, info.storage))
    bad = kernel(type(info)(**{**info.__dict__, "storage": storage}), bad.src)
    refused(bad, trips, H200, "arrivals|half way|nobody waited")


def test_wrong_stage(hopper):  # type: ignore[no-untyped-def]
    tree, trips = hopper
    path, load = find(tree, "tma_load")
    a = load.src[0]
    moved = slot(a.src[0], (a.src[1] + 1) % a.src[0].arg.stages, a.src[2], a.arg)
    bad = at.tma_load(moved, *load.src[1:], **dict(load.arg.attrs))
    refused(edit(tree, path, (bad,)), trips, H200, "race|never written|before anyone read")


def test_tensor_memory_freed_before_the_last_load():
    tree, trips = build(B200, BLACKWELL["direct, one epilogue warpgroup"])
    path, _ = find(tree, "cta_sync", 1)
    refused(edit(tree, path, ()), trips, B200, "race on acc.*tmem_dealloc|is deallocated")


def test_tensor_memory_leak():
    tree, trips = build(B200, BLACKWELL["direct, one epilogue warpgroup"])
    path, _ = find(tree, "tmem_dealloc")
    refused(edit(tree, path, ()), trips, B200, "tensor memory allocated")


def test_a_skipped_store_is_a_value_that_nobody_uses():
    tree, trips = build(H200, HOPPER["direct, 64-byte rows, 80 columns"])
    path, _ = find(tree, "st_global", 3)
    refused(edit(tree, path, ()), trips, H200, r"overwrites out before anyone read what pack\(out")


def test_a_store_of_the_wrong_rows_is_a_hole_in_the_output():
    tree, trips = build(H200, HOPPER["direct, 64-byte rows, 80 columns"])
    path, other = find(tree, "st_global", 1)
    _, node = find(tree, "st_global", 3)
    bad = at.st_global(*node.src[:3], other.src[3], node.src[4], **dict(node.arg.attrs))
    path, _ = find(tree, "st_global", 3)
    refused(edit(tree, path, (bad,)), trips, H200, "C: rows .* are never written")


def test_reordering_inside_the_producer_is_harmless(hopper):  # type: ignore[no-untyped-def]
    """A pinned harmless move: the order in which the loads of one stage are issued."""
    tree, trips = hopper
    (path_a, load_a), (path_b, load_b) = find(tree, "tma_load", 0), find(tree, "tma_load", 1)
    swapped = edit(edit(tree, path_a, (load_b,)), path_b, (load_a,))
    assert check(swapped, trips, H200)


def test_expecting_bytes_after_the_loads_is_harmless(hopper):  # type: ignore[no-untyped-def]
    """A pinned harmless move: tx may run negative while the phase still awaits an arrival."""
    tree, trips = hopper
    (path_e, expect), (path_b, load_b) = find(tree, "mbar_arrive_expect"), find(tree, "tma_load", 1)
    moved = edit(edit(tree, path_b, (load_b, expect)), path_e, ())
    assert check(moved, trips, H200)


def test_register_pool():
    tree, trips = build(H200, HOPPER["cooperative, staged, persistent"])
    roles = tuple(
        role(Role(r.arg.name, r.arg.first, r.arg.warps, regs=240), r.src) if r.op is Op.ROLE else r
        for r in tree.src
    )
    refused(kernel(tree.arg, roles), trips, H200, "register pool: 720 registers")
