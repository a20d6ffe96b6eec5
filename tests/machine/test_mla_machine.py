"""The validator proves latent attention kernels, and misses every statement that is taken out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError, HazardError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import (
    LANE,
    Op,
    UOp,
    edit,
    flatten,
    frag,
    global_tensor,
    kernels_of,
    mbar,
    param,
    program,
    rectangle,
    slot,
    smem,
    walk,
)
from tests.machine.truth import Options, block, table
from tests.mla_cases import B200, CASES, H200, IDS, decode, family_of, prefill, problem, wgmma

SMALL = {"heads": 16, "latent": 128, "rope": 64}
FREE = ("fence_mbar_init",)  # threads arrive and wait behind a barrier: nobody else would need it
KEPT = 24  # of the statements that write shared or global memory: the whole takes minutes


def small(s: Strategy) -> Problem:
    return problem(s.family == "mla_prefill", 16, **SMALL)


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_kernels_and_launches_are_proven(dev, name, s):  # type: ignore[no-untyped-def]
    p, maker = small(s), family_of(s)
    lowered, trips = maker.build(p, s, dev), maker.trips(p, s, dev)
    assert len(check(lowered, trips, dev)) == len(trips) + len(kernels_of(lowered))
    check_launch(lowered, maker.launch(p, s, dev))


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_kernels_that_share_heads_are_proven(dev: Device) -> None:
    """Each CTA of 128 heads writes its own."""
    kinds = [decode(chunk=0, warps=8), decode(warps=8), prefill(warps=8), prefill(warps=8, parts=2)]
    kinds += [wgmma(queries=1), wgmma(queries=1, parts=4)] if dev is H200 else []
    for s in kinds:
        p, maker = problem(s.family == "mla_prefill", 16, **(SMALL | {"heads": 128})), family_of(s)
        lowered, trips = maker.build(p, s, dev), maker.trips(p, s, dev)
        assert {rows for t in trips for name, rows, _ in t.outputs if name == "output"} == {64}
        assert len(check(lowered, trips, dev)) == len(trips) + len(kernels_of(lowered))
        check_launch(lowered, maker.launch(p, s, dev))


@pytest.mark.parametrize(
    "s",
    [
        decode(chunk=256, dependent=1),
        prefill(queries=2, warps=8, scores="dims"),
        prefill(queries=2, warps=8, parts=2, dependent=1, sum_chunks=2),
    ],
    ids=["decode", "prefill", "prefill in parts"],
)
def test_every_statement_is_needed(s: Strategy) -> None:
    p, maker = small(s), family_of(s)
    lowered, trips = maker.build(p, s, H200), maker.trips(p, s, H200)
    for number, kernel in enumerate(kernels_of(lowered)):
        atoms = [(path, n) for path, n in walk(kernel) if n.op is Op.ATOM]
        asked = [q for q, n in atoms if atom(n.arg.atom).orders and n.arg.atom not in FREE]
        writes = [q for q, n in atoms if _writes(n)]
        for path in [*asked, *writes[:: max(1, len(writes) // KEPT)]]:
            with pytest.raises(CompileError, match="; fix: "):
                check(_with(lowered, number, edit(kernel, path, ())), trips, H200)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_orders_warpgroups_is_needed(parts: int) -> None:
    """One of all statements alike: how maxima, weights and tiles are handed over and back."""
    s = wgmma(tile=32, lead=1, pieces=2, rescale="lazy", parts=parts)
    p, maker = small(s), family_of(s)
    lowered, trips = maker.build(p, s, H200), maker.trips(p, s, H200)
    sites = {
        (n.site, n.arg): path
        for path, n in walk(lowered)
        if n.op is Op.ATOM and atom(n.arg.atom).orders and n.arg.atom not in (*FREE, "warp_sync")
    }
    assert len(sites) > 20
    for path in sites.values():
        with pytest.raises(CompileError, match="; fix: "):
            check(edit(lowered, path, ()), trips, H200)


def _writes(node: UOp) -> bool:
    """Whether an instruction writes memory, not registers alone."""
    row = atom(node.arg.atom)
    targets = (row.operand(node, a.operand).src[0] for a in row.accesses if a.mode == "w")
    return any(t.op in (Op.SMEM, Op.GLOBAL) for t in targets)


def _with(lowered: UOp, number: int, kernel: UOp) -> UOp:
    kernels = list(kernels_of(lowered))
    kernels[number] = kernel
    return program(*kernels) if len(kernels) > 1 else kernel


def _instead(s: Strategy, name: str, planted: UOp, which: int = 0) -> UOp:
    """The lowered kernels with another statement in the place of one of that name."""
    lowered = family_of(s).build(small(s), s, H200)
    first = kernels_of(lowered)[0]
    paths = [q for q, n in walk(first) if n.op is Op.ATOM and n.arg.atom == name]
    return _with(lowered, 0, edit(first, paths[which], (planted,)))


@pytest.mark.parametrize(
    ("name", "planted", "message"),
    [
        ("named_sync", at.named_sync(id=1, threads=96), "barrier|arrives|warps"),
        ("named_sync", at.warp_sync(), "race|never written"),
    ],
)
def test_planted_bugs_are_refused(name: str, planted: UOp, message: str) -> None:
    s = decode(chunk=128)
    with pytest.raises(HazardError, match=message):
        check(_instead(s, name, planted), family_of(s).trips(small(s), s, H200), H200)


TILE, HELD = smem("tile", 512, 1, align=16), frag("held", 4, "b32")


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_copies_that_arrive_by_themselves(dev) -> None:  # type: ignore[no-untyped-def]
    """Who waits at the barrier at which copies arrive may read them; a wait for the group tells
    the issuing lane alone."""
    bar = mbar("bar", 1, 32)

    def build(o: Options) -> UOp:
        place = rectangle(global_tensor("A"), 0, 0, 1, 256)
        body = [
            at.copy_async(slot(TILE), LANE << 4, param("C"), LANE, place),
            *o("arrive", at.copies_arrive(slot(bar))),
            *o("wait", at.mbar_wait(slot(bar), 0)),
            at.ld_shared_v4(slot(HELD), slot(TILE), 0),
        ]
        return block(dev, (TILE, bar, HELD), *flatten(body), warps=1)

    table("arrive wait", build, lambda o: len(o.on) == 2, dev)
