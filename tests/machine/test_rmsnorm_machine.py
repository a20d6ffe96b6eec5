"""The validator proves RMSNorm kernels, and misses every barrier and value that is taken out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.check import check
from ptxflow.compiler.errors import CompileError, SpecError
from ptxflow.compiler.ir import (
    Op,
    UOp,
    const,
    edit,
    global_tensor,
    loop,
    param,
    rectangle,
    slot,
    walk,
)
from tests.alike import alike
from tests.rmsnorm_cases import CASES, H200, IDS, RMSNORM, problem, strategy


@pytest.mark.parametrize(("dev", "name", "hidden", "residual", "s"), CASES, ids=IDS)
def test_every_statement_is_needed(dev, name, hidden, residual, s):  # type: ignore[no-untyped-def]
    p = problem(hidden, 4096, residual)
    kernel, trips = RMSNORM.build(p, s, dev), RMSNORM.trips(p, s, dev)
    assert len(check(kernel, trips, dev)) == len(trips) + 1
    atoms = [(path, node) for path, node in walk(kernel) if node.op is Op.ATOM]
    barriers = [path for path, node in atoms if atom(node.arg.atom).orders]
    meetings = s.rows if s.barrier == "row" else 1
    if s.ctas_per_row > 1:
        meetings = 4  # arrive and wait for the parts, and before a CTA leaves
    assert len(barriers) == meetings * (s.row_threads > 32)
    if dev is not H200 and alike(p, s):
        return  # the same statements
    few = atoms if len(atoms) < 150 else atoms[:: len(atoms) // 50]
    for path in {*barriers, *(path for path, _ in few)}:
        with pytest.raises(CompileError, match="; fix: "):
            check(edit(kernel, path, ()), trips, dev)


def _kernel() -> tuple[UOp, list]:  # type: ignore[type-arg]
    p, s = problem(512), strategy(ctas_per_sm=2)
    return RMSNORM.build(p, s, H200), RMSNORM.trips(p, s, H200)


def _find(kernel: UOp, name: str) -> tuple[int, ...]:
    return next(p for p, n in walk(kernel) if n.op is Op.ATOM and n.arg.atom == name)


def test_one_buffer_for_the_parts_is_a_race() -> None:
    """The next rows' parts overtake warps that still read the last ones."""
    kernel, trips = _kernel()
    for path, node in list(walk(kernel)):
        if node.op is Op.ATOM and node.arg.atom in ("st_shared", "ld_shared"):
            at_place = 0 if node.arg.atom == "st_shared" else 1
            place = node.src[at_place]
            same = slot(place.src[0], 0, place.src[2], place.arg)
            changed = UOp(
                Op.ATOM, tuple(same if s is place else s for s in node.src), node.arg, node.site
            )
            kernel = edit(kernel, path, (changed,))
    with pytest.raises(CompileError, match=r"st_shared\(parts"):
        check(kernel, trips, H200)


def test_a_sum_is_not_added_to_once_it_was_read() -> None:
    p, s = problem(1024), strategy(residency="reread")
    kernel, trips = RMSNORM.build(p, s, H200), RMSNORM.trips(p, s, H200)
    squares, read = _find(kernel, "sum_squares"), _find(kernel, "sum_f32")
    statements = dict(walk(kernel))
    widen = next(n for n in statements.values() if n.op is Op.ATOM and n.arg.atom == "unpack")
    load = dict(walk(kernel))[_find(kernel, "ld_global")]
    begun = UOp(
        Op.ATOM, (*statements[squares].src[:2], const(1)), statements[squares].arg, "here:1"
    )
    chunk = statements[squares[:-1]].src[0]
    late = loop(chunk, 1, load, widen, begun)
    with pytest.raises(CompileError, match="adds to sum, which was read already"):
        check(edit(kernel, read, (statements[read], late)), trips, H200)


def test_what_is_read_as_constant_is_not_written() -> None:
    kernel, trips = _kernel()
    path = _find(kernel, "ld_global")
    load = dict(walk(kernel))[path]
    place = rectangle(global_tensor("output"), 0, 0, 1, 8)
    operands = (load.src[0], param("output"), const(0), const(1), place)
    planted = at.ld_global(*operands, element=2)
    with pytest.raises(SpecError, match="reads as constant what st_global"):
        check(edit(kernel, path, (load, planted)), trips, H200)
