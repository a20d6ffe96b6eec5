"""GEMM kernels with one statement left out or wrong: parities, counts, bytes, stages, scopes. The
message names what is wrong; a few changes are harmless, and accepted."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.check import check
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.ir import Role, edit, kernel, mbar, role, slot
from ptxflow.compiler.ir.nodes import Buffer, Op, Slot, Statement, Storage, UOp, Value
from ptxflow.eval.verify.mutants import mutants
from tests.families.gemm import B200, BLACKWELL, H200, HOPPER, build
from tests.machine.truth import TILE, A, B, atoms, block, expect, load, one, read, refusal

STAGED, DIRECT, PAIR = (
    (H200, HOPPER["cooperative, staged, persistent"]),
    (H200, HOPPER["direct, 64-byte rows, 80 columns"]),
    (B200, BLACKWELL["pair"]),
)
EPILOGUE = B200, BLACKWELL["direct, one epilogue warpgroup"]
Change = Callable[[Statement], Statement]


def instead(name: str, which: int, new: Callable[[Statement], Statement | None]) -> Change:
    """Another statement, or none, in the place of one of that name."""

    def change(tree: Statement) -> Statement:
        path, node = atoms(tree, name)[which]
        made = new(node)
        return edit(tree, path, () if made is None else (made,))

    return change


def without(name: str, which: int = 0) -> Change:
    return instead(name, which, lambda node: None)


def expecting(factor: float) -> Change:
    return instead(
        "mbar_arrive_expect",
        0,
        lambda n: at.mbar_arrive_expect(n.src[0], bytes=int(n.arg.attr("bytes") * factor)),
    )


def parity(which: int, new: Callable[[Value], Value]) -> Change:
    return instead("mbar_wait", which, lambda n: at.mbar_wait(n.src[0], new(n.src[1])))


def next_stage(load: Statement) -> Statement:
    a = load.src[0]
    moved = slot(a.src[0], (a.src[1] + 1) % a.src[0].arg.stages, a.src[2], a.arg)
    return at.tma_load(moved, *load.src[1:], **dict(load.arg.attrs))


def stage_before(name: str) -> Change:
    """Readers take the stage before theirs: `use + -1` wraps at 2^32, which 3 does not divide."""

    def moved(operand: UOp) -> UOp:
        if not isinstance(operand, Slot) or operand.src[0].op is not Op.SMEM:
            return operand
        storage, stage, offset = operand.src
        assert storage.arg.stages == 3
        return slot(storage, (stage.src[0] + -1) % 3, offset, operand.arg)

    def change(tree: Statement) -> Statement:
        for path, node in atoms(tree, name):
            bad = Statement(node.op, tuple(map(moved, node.src)), node.arg, node.site)
            tree = edit(tree, path, (bad,))
        return tree

    return change


def one_arrival_fewer(tree: Statement) -> Statement:
    def recount(node: UOp) -> Any:
        arg = node.arg
        if node.op is Op.MBAR and arg.name == "ring_empty":
            arg = Buffer(arg.name, arg.size, arg.stages, arg.align, arg.dtype, arg.count - 1)
        return UOp(node.op, tuple(map(recount, node.src)), arg, node.site)

    bad = recount(tree)
    storage = tuple(map(recount, bad.arg.storage))
    return kernel(type(bad.arg)(**{**bad.arg.__dict__, "storage": storage}), bad.src)


def other_rows(tree: Statement) -> Statement:
    (_, other), (path, node) = (atoms(tree, "st_global")[i] for i in (1, 3))
    bad = Statement(Op.ATOM, (*node.src[:3], other.src[3], node.src[4]), node.arg, node.site)
    return edit(tree, path, (bad,))


def many_registers(tree: Statement) -> Statement:
    roles = tuple(
        role(Role(r.arg.name, r.arg.first, r.arg.warps, regs=240), r.src) if r.op is Op.ROLE else r
        for r in tree.src
    )
    return kernel(tree.arg, roles)


def loads_exchanged(tree: Statement) -> Statement:
    (path_a, load_a), (path_b, load_b) = atoms(tree, "tma_load")[:2]
    return edit(edit(tree, path_a, (load_b,)), path_b, (load_a,))


def bytes_expected_late(tree: Statement) -> Statement:
    """The count may run negative while the phase still awaits an arrival."""
    (path_e, expect), (path_b, load_b) = (
        atoms(tree, "mbar_arrive_expect")[0], atoms(tree, "tma_load")[1]
    )  # fmt: skip
    return edit(edit(tree, path_b, (load_b, expect)), path_e, ())


LOST = "race|never written|deadlock|arrivals|waited"
PART = "deadlock|race|never written|half way"
REFUSED = {
    "parity of the consumer": (STAGED, parity(0, lambda p: p ^ 1), LOST),
    "parity of the producer": (STAGED, parity(1, lambda p: p ^ 1), LOST),
    "turns for a parity": (STAGED, parity(0, lambda p: p.src[0]), "race|parity|never"),
    "half of the bytes": (STAGED, expecting(0.5), PART),
    "twice the bytes": (STAGED, expecting(2), PART),
    "a stage released too early": (
        STAGED, instead("wgmma_wait", 0, lambda n: at.wgmma_wait(pending=2)), r"race on [ab]\[0\]"
    ),
    "an arrival fewer": (STAGED, one_arrival_fewer, "arrivals|half way|nobody waited"),
    "another stage": (
        STAGED, instead("tma_load", 0, next_stage), "race|never written|before anyone read"
    ),
    "the stage before, of wgmma": (STAGED, stage_before("wgmma"), "nobody reads what tma_load"),
    "the stage before, of tcgen05.mma": (
        EPILOGUE, stage_before("tcgen05_mma"), "nobody reads what tma_load"
    ),
    "tensor memory freed too early": (
        EPILOGUE, without("cta_sync", 1), "race on acc.*tmem_dealloc|is deallocated"
    ),
    "tensor memory kept": (EPILOGUE, without("tmem_dealloc"), "tensor memory allocated"),
    "a value that nobody stores": (
        DIRECT, without("st_global", 3), r"overwrites out before anyone read what pack\(out"
    ),
    "a hole in the output": (DIRECT, other_rows, "C: rows .* are never written"),
    "more registers than there are": (STAGED, many_registers, "register pool: 720 registers"),
    "no wait of the reader": (
        STAGED, without("mbar_wait"), r"wgmma.* never written: tma_load\(a, .* at compiler/"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_statements_are_refused(name: str) -> None:
    (dev, s), change, message = REFUSED[name]
    tree, trips = build(dev, s)
    with pytest.raises(CompileError, match=message):
        check(change(tree), trips, dev)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("wgmma_fence", ("wgmma", "tma_load", "not to its wgmmas")),
        ("wgmma_commit", ("pack", "wgmma", "in flight")),
        ("fence_proxy_async", ("tma_store", "stmatrix_x4", "generic proxy only")),
        ("mbar_arrive_expect", ("mbar_wait(ring_full)", "tma_load", "outstanding")),
        ("fence_mbar_init", ("tma_load", "mbar_init", "not ordered")),
        ("bulk_wait_read", ("stmatrix_x4", "tma_store", "not known to be complete")),
    ],
)
def test_both_statements_and_the_missing_ordering_are_named(
    missing: str, named: tuple[str, ...]
) -> None:
    tree, trips = build(*STAGED)
    with pytest.raises(CompileError) as refusal:
        check(without(missing)(tree), trips, H200)
    assert all(re.search(re.escape(part), str(refusal.value)) for part in named), refusal.value


@pytest.mark.parametrize("tile", [A, B])
def test_a_race_names_the_statement_that_touches_the_tile(tile: Storage) -> None:
    """The reads of both tiles are one event: no statement between them orders anything. They are
    handed over without a fence."""
    first, second, empty = mbar("first", 1, 1), mbar("second", 1, 1), mbar("empty", 1, 4)
    fill = [expect(first, 2 * TILE), load(A, first), load(B, first)]
    refill = [at.mbar_wait(slot(empty), 0), expect(second), load(tile, second)]
    release = [at.warp_sync(), one(at.mbar_arrive(slot(empty)))]
    work = [at.mbar_wait(slot(first), 0), read(A), read(B), *release]
    both = (
        role(Role("producer", 4, 1, elected=True), fill, refill),
        role(Role("consumer", 0, 4), work, at.mbar_wait(slot(second), 0), read(tile)),
    )
    told = refusal(block(H200, *both), H200)
    name = tile.arg.name
    assert told is not None and f"race on {name}[0]: tma_load({name}, " in told, told
    assert f"is not ordered after ld_shared(out, {name}) at " in told, told
    assert " by consumer warp" in told, told


#: what a refusal says of a place, and of the statements that touch it
BLAMED = tuple(map(re.compile, (
    r"race on (?P<x>\w+)(?:\[\d+\])?: (?P<a>\w+\(.*?\)) at .* is not ordered after "
    r"(?P<b>\w+\(.*?\)) at ",
    r"(?P<a>\w+\(.*?\)) at .*: reads (?P<x>\w+)(?:\[\d+\])?, of which part was never written: "
    r"(?P<b>\w+\(.*?\)) at ",
    r"(?P<a>\w+\(.*?\)) at .*: overwrites (?P<x>\w+)(?:\[\d+\])? before anyone read what "
    r"(?P<b>\w+\(.*?\)) at ",
    r"nobody reads what (?P<a>(?P<b>\w+\(.*?\))) at .* put into (?P<x>\w+)",
)))  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(STAGED, marks=pytest.mark.slow), DIRECT, EPILOGUE])
def test_refusals_name_statements_that_touch_what_they_blame(case: tuple[Device, Strategy]) -> None:
    tree, trips = build(*case)
    seen = 0
    for mutant in [*mutants(tree)][::4]:
        try:
            check(mutant.tree, trips, case[0])
        except CompileError as refusal:
            found = next(filter(None, (b.match(str(refusal)) for b in BLAMED)), None)
            if found:
                place = re.compile(rf"\b{found['x']}\b|tmem_dealloc")
                assert place.search(found["a"]) and place.search(found["b"]), (mutant, refusal)
                seen += 1
    assert seen > 5


EQUIVALENT = {
    # tcgen05's own fences order accesses to TMEM; no other data is handed over here
    "a relaxed arrive for tensor memory": (
        PAIR, instead("mbar_arrive_peer", 0, lambda n: at.mbar_arrive_peer(*n.src))
    ),
    "the order of a stage's loads": (STAGED, loads_exchanged),
    "bytes expected after their loads": (STAGED, bytes_expected_late),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUIVALENT)
def test_harmless_changes_are_accepted(name: str) -> None:
    (dev, s), change = EQUIVALENT[name]
    tree, trips = build(dev, s)
    assert check(change(tree), trips, dev)
