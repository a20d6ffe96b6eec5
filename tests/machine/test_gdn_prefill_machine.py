"""The validator proves gdn_prefill kernels, and misses every statement that is taken out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import Atom, atom
from ptxflow.compiler.check import check
from ptxflow.compiler.errors import CompileError, HazardError
from ptxflow.compiler.ir import Op, UOp, const, edit, slot, walk
from ptxflow.compiler.kernels.gdn_prefill.kernel import Kernel
from tests.gdn_prefill_cases import CASES, H200, IDS, PATHS, PREFILL, problem

KEPT = 12  # of the statements that are not there for order: the whole takes minutes


def atoms(kernel: UOp) -> list[tuple[tuple[int, ...], UOp]]:
    return [(path, node) for path, node in walk(kernel) if node.op is Op.ATOM]


def _row(node: UOp) -> Atom:
    return atom(node.arg.atom)


def _in_place(node: UOp) -> bool:
    accesses = _row(node).accesses
    written = [_row(node).operand(node, a.operand) for a in accesses if a.mode != "r"]
    read = [_row(node).operand(node, a.operand) for a in accesses if a.mode != "w"]
    return any(place in read for place in written)


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_every_path_is_proven(dev, name, s):  # type: ignore[no-untyped-def]
    p = problem()
    trips = PREFILL.trips(p, s, dev)
    assert len(check(PREFILL.build(p, s, dev), trips, dev)) == len(trips) + 1


def test_every_statement_is_needed() -> None:
    p, s = problem(), PATHS["one block of two units"]
    kernel = PREFILL.build(p, s, H200)
    trips = PREFILL.trips(p, s, H200)
    held = atoms(kernel)
    ordering = [path for path, node in held if _row(node).orders]
    # what changes registers in place is not missed: they hold something before, too
    fresh = [path for path, node in held if not _in_place(node)]
    few = fresh[:: max(1, len(fresh) // KEPT)]
    needless = []
    for path in dict.fromkeys([*ordering, *few]):
        try:
            check(edit(kernel, path, ()), trips, H200)
        except CompileError as refusal:
            assert "; fix: " in str(refusal)
        else:
            needless.append(next(node for found, node in held if found == path))
    assert not needless


def test_the_classes_of_trips_take_every_turn() -> None:
    """No chunk, a part of one, two, as many as stages, and past the ring's second turn."""
    p, s = problem(), PATHS["two tiles a warp"]
    ends = {dict(t.values)["end"] for t in PREFILL.trips(p, s, H200)}
    assert {-(-end // s.chunk) for end in ends} == {0, 1, 2, s.stages, 2 * s.stages + 1}
    assert any(0 < end < s.chunk for end in ends)


class Late(Kernel):
    """Copies come into the place of the chunk that main warps still read."""

    def ask_ahead(self, n: UOp):  # type: ignore[no-untyped-def]
        return super().ask_ahead(n + 1)


class Single(Kernel):
    """What helpers hand over has one buffer, which main warps still read."""

    def gate(self, n, which):  # type: ignore[no-untyped-def]
        return _first(super().gate(n, which))

    def _gate_part(self, n, which, i):  # type: ignore[no-untyped-def]
        return _first(super()._gate_part(n, which, i))


def _first(place: UOp) -> UOp:
    return slot(place.src[0], const(0), place.src[2], place.arg)


@pytest.mark.parametrize(
    ("planted", "fact"), [(Late, "queries|keys|values|in flight"), (Single, "gates")]
)
def test_planted_bugs_are_refused(planted: type[Kernel], fact: str) -> None:
    p, s = problem(), PATHS["one block, in pairs"]
    with pytest.raises(HazardError, match=fact):
        check(planted(p, s, H200).build(), PREFILL.trips(p, s, H200), H200)
