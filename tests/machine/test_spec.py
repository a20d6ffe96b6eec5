"""The static rules: what no rule matches is illegal, and says where; trip classes."""

import pytest

from ptxflow.compiler.atoms import all_atoms, at, atom
from ptxflow.compiler.atoms.table import KINDS, Atom, Lanes, Scope, add
from ptxflow.compiler.backend import sass
from ptxflow.compiler.check import Machine, check, check_spec
from ptxflow.compiler.errors import HazardError, SpecError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir.nodes import LANE, WARP, Op, UOp, Use, const, var
from ptxflow.compiler.ir.statements import KernelInfo, Role, elect, kernel, loop, role, when
from ptxflow.compiler.ir.storage import frag, mbar, slot, smem, value_of
from tests.families import dsa_sparse, gdn_prefill, mla
from tests.given import B200, BOTH, H200

BAR, TILE, ACC = mbar("bar", 1, 1), smem("tile", 1024), frag("acc", 8, "f32")


def one(*body, dev=H200, warps=4, **info):  # type: ignore[no-untyped-def]
    spec = KernelInfo("k", dev.arch, warps, info.pop("cluster", 1), (), (BAR, TILE, ACC), **info)
    return check_spec(kernel(spec, role(Role("r", 0, warps), *body)), dev)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([at.mbar_init(slot(BAR))], "one lane issues this"),
        ([elect(const(1), at.wgmma_fence())], "all lanes issue this together"),
        ([when(WARP.eq(0), at.wgmma_fence())], "must not stand under a condition"),
        ([at.cta_sync()], "every warp of the block"),
        ([at.mbar_wait(slot(TILE), 0)], "must lie in MBAR"),
        ([at.mbar_wait(const(3), 0)], "must be of kind mbar, not CONST"),  # type: ignore[arg-type]
        ([at.tcgen05_fence_after()], "not an instruction of sm_90a"),
        ([at.named_sync(id=0, threads=128)], "a named barrier is 1..15"),
        ([at.named_sync(id=1, threads=100)], "whole warps"),
        ([at.set_max_registers(direction="inc", registers=100)], "steps of 8"),
        ([elect(const(1), at.mbar_arrive_expect(slot(BAR), bytes=1 << 20))], r"below 2\^20"),
        ([UOp(Op.ATOM, (), Use("warp_drive"), "here:1")], "unknown atom 'warp_drive'"),
        ([role(Role("inner", 0, 4))], "role inside a role"),
        ([when(LANE < 16, at.named_sync(id=1, threads=128))], "branches on the lane"),
        ([loop(var("i"), LANE, at.named_sync(id=1, threads=128))], "branches on the lane"),
    ],
)
def test_refusals(body, message):  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError, match=message):
        one(*body)


QUAD, HELD = frag("quad", 4, "b32"), frag("held", 1, "b32")
DIGIT = value_of(HELD)


@pytest.mark.parametrize(
    ("offset", "last"),
    [
        (LANE * 16, 512),
        ((LANE * 16) + WARP * 128, 896),
        ((DIGIT & 3) * 128 + LANE * 4, 524),  # whatever the register holds
        ((3 - (DIGIT & 3)) * 128 + LANE * 4, 524),
    ],
)
def test_lanes_offsets_end_in_their_slot(offset, last):  # type: ignore[no-untyped-def]
    def read(size, place):  # type: ignore[no-untyped-def]
        return check_spec(
            kernel(
                KernelInfo("k", H200.arch, 4, 1, (), (TILE, QUAD, HELD)),
                role(Role("r", 0, 4), at.ld_shared(slot(QUAD), slot(TILE, 0, 0, size), place)),
            ),
            H200,
        )

    assert read(last, offset) and read(1024, DIGIT * 4)  # nothing bounds that one
    with pytest.raises(SpecError, match=f"a lane's offset reaches byte {last} of its slot of tile"):
        read(last - 4, offset)


def test_one_cta_group_throughout():
    use = at.tmem_relinquish(cta_group=2)
    with pytest.raises(SpecError, match="cta_group must be 1 throughout"):
        one(use, dev=B200)


def test_a_role_asks_for_the_registers_it_counts_on():
    with pytest.raises(SpecError, match="role r is to have 40 registers: begin with setmaxnreg"):
        info = KernelInfo("k", H200.arch, 4, 1, (), ())
        asks = at.set_max_registers(direction="dec", registers=48)
        check_spec(kernel(info, role(Role("r", 0, 4, regs=40), asks)), H200)


def test_a_loop_needs_a_step():
    body = role(Role("r", 0, 4), loop(var("i"), 4, at.warp_sync(), step=0))
    with pytest.raises(HazardError, match="a loop has a step of 0; it must be 1 or more"):
        check(kernel(KernelInfo("k", H200.arch, 4, 1, (), ()), body), [Trip("a run", ())], H200)


def test_nothing_is_divided_by_zero():
    body = role(
        Role("r", 0, 4), loop(var("i"), 4, when((const(4) // var("i")).ne(0), at.warp_sync()))
    )
    with pytest.raises(HazardError, match="divides by zero"):
        check(kernel(KernelInfo("k", H200.arch, 4, 1, (), ()), body), [Trip("a run", ())], H200)


def test_budgets():
    with pytest.raises(SpecError, match="1056 exceed 1024"):
        one(warps=33)
    with pytest.raises(SpecError, match="exceed the portable 8"):
        one(cluster=16)
    with pytest.raises(SpecError, match="cta_group 2 in a cluster of 1"):
        one(dev=B200, cta_group=2)
    big = KernelInfo("k", H200.arch, 4, 1, (), (smem("tile", 1 << 18),))
    with pytest.raises(SpecError, match="262144 bytes exceed the 232448"):
        check_spec(kernel(big), H200)


@pytest.mark.parametrize("row", all_atoms(), ids=lambda r: r.name)
def test_rows_are_complete(row: Atom):
    assert row.isa[0].isdigit(), "the PTX ISA section it was read from"
    assert isinstance(row.scope, Scope) and isinstance(row.lanes, Lanes)
    assert all(kind in KINDS for _, kind in row.operands)
    names = {n for n, _ in row.operands}
    assert all(access.operand in names for access in row.accesses)
    if row.effect:
        assert callable(getattr(Machine, f"_do_{row.effect}"))
    if not callable(row.sass):
        assert all(sass.signature(t) for t in row.sass)


def test_the_table_refuses_duplicates_and_unknown_names():
    with pytest.raises(ValueError, match="defined twice"):
        add(atom("cta_sync"))
    with pytest.raises(KeyError, match="unknown atom 'nope'; known: abs_f32, add_f32"):
        atom("nope")
    with pytest.raises(TypeError, match=r"mbar_wait takes \(bar, parity\)"):
        at.mbar_wait(slot(BAR))


def test_chunks_of_a_recurrence_take_every_turn() -> None:
    """No chunk, a part of one, two, as many as stages, and past the ring's second turn."""
    p, s = gdn_prefill.problem(), gdn_prefill.PATHS["two tiles a warp"]
    ends = {dict(t.values)["end"] for t in gdn_prefill.PREFILL.trips(p, s, H200)}
    assert {-(-end // s.chunk) for end in ends} == {0, 1, 2, s.stages, 2 * s.stages + 1}
    assert any(0 < end < s.chunk for end in ends)


def test_lists_have_the_tiles_that_ctas_have() -> None:
    """A whole list, its first and its last chunk; if long, as far as past a ring's second turn."""

    def runs(topk: int, **choices: int) -> list[str]:
        p, s = dsa_sparse.problem(16, latent=128, topk=topk), dsa_sparse.strategy(**choices)
        return [trip.name for trip in dsa_sparse.SPARSE.trips(p, s, H200)]

    assert runs(256, chunk=0) == ["part 0 of 1 of 160 entries"]
    assert runs(100, chunk=0) == ["part 0 of 1 of 100 entries"]
    cut = ["part 0 of 3 of 160 entries", "part 2 of 3 of 250 entries", "3 chunks"]
    assert runs(250, chunk=96) == cut


def test_ctas_that_share_heads_write_their_own() -> None:
    for case in (*mla.DECODE_ROW.cases, *mla.PREFILL_ROW.cases):
        if case.name.startswith("128 heads"):
            maker = mla.DECODE if case.strategy.family == "mla_decode" else mla.PREFILL
            for dev in BOTH:
                trips = maker.trips(case.problem, case.strategy, dev)
                outputs = {out for t in trips for out in t.outputs}
                assert {rows for name, rows, _ in outputs if name == "output"} == {64}
