"""The validator accepts the kernels of every family of the table, and misses every ordering
statement that is taken out of them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from ptxflow.compiler.atoms import atom
from ptxflow.compiler.check import check, check_bounds, check_launch
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem, Strategy, Trip
from ptxflow.compiler.ir import Op, Statement, kernels_of, walk
from ptxflow.eval.verify.equivalent import names
from tests.families import ROWS
from tests.given import BOTH
from tests.machine.truth import put
from tests.row import Case, Ordered, Row, cases, items

#: where a statement stands; a kernel that waits nowhere has none
SITE = re.compile(r"(?:compiler|tests)/[\w/]+\.py:\d+|without griddepcontrol.wait")
Path = tuple[int, ...]


@pytest.mark.parametrize(("row", "case"), cases(ROWS, "machine"))
def test_kernels_and_launches_are_accepted(row: Row, case: Case) -> None:
    """By one proof of the rules of each kernel, and one of each trip class."""
    maker, p, s, dev = row.family, case.problem, case.strategy, case.device
    lowered, trips = maker.build(p, s, dev), maker.trips(p, s, dev)
    kernels = kernels_of(lowered)
    assert all(map(names, kernels))  # a mutant's reason asks for these
    runs = sum(t.entry in ("", k.arg.name) for k in kernels for t in trips)
    assert len(check(lowered, trips, dev)) == runs + len(kernels)
    check_launch(lowered, launch := maker.launch(p, s, dev))
    assert len(check_bounds(lowered, launch, dict(p.axes), maker.held)) == len(kernels)


def tried(o: Ordered, lowered: Statement) -> Iterator[tuple[int, Path, Statement]]:
    """The ordering statements, and the others that are to be left out."""
    seen = set()
    for number, kernel in enumerate(kernels_of(lowered)):
        if o.kernels is not None and not {number, kernel.arg.name} & {*o.kernels}:
            continue
        atoms = [(path, node) for path, node in walk(kernel) if node.op is Op.ATOM]
        ordering = [(q, n) for q, n in atoms if atom(n.arg.atom).orders]
        if o.once:
            ordering = list({(n.site, n.arg): (q, n) for q, n in ordering}.values())
        others = [(q, n) for q, n in atoms if o.others(n)]
        few = others[:: max(1, len(others) // o.kept)] if o.kept else []
        for path, node in [*ordering, *few]:
            spared = o.missed is None and node.arg.atom in o.free
            if not spared and (number, path) not in seen:
                seen.add((number, path))
                yield number, path, node


def trips_of(o: Ordered, p: Problem, s: Strategy, row: Row) -> Sequence[Trip]:
    trips = row.family.trips(p, s, o.device)
    return trips[: -o.last_trips - 1 : -1] if o.last_trips else trips


@pytest.mark.parametrize("of", ["a site", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("row", "o"), items(ROWS, "ordered"))
def test_every_ordering_statement_is_needed(row: Row, o: Ordered, of: str) -> None:
    """One of a site, or all, as of loops that are unrolled."""
    p, s = o.problem, o.strategy
    lowered, trips = row.family.build(p, s, o.device), trips_of(o, p, s, row)
    proven = set[object]()  # kernels that are as they were
    check(lowered, trips, o.device, proven)
    missed = []
    for number, path, node in tried(replace(o, once=o.once or of == "a site"), lowered):
        try:
            check(put(lowered, number, path), trips, o.device, proven)
        except CompileError as refusal:
            message, orders = str(refusal), atom(node.arg.atom).orders
            assert "; fix: " in message and (SITE.search(message) or not orders), message
        else:
            missed.append((node.arg.atom, node.site))
    assert sum(atom(node.arg.atom).orders for _, _, node in tried(o, lowered)) >= o.least
    assert {name for name, _ in missed} <= o.free and len(missed) <= (o.missed or 0), missed


def test_every_family_has_a_row_for_both_targets() -> None:
    from ptxflow.eval.verify.draws import definitions

    found = {(row.family.name, case.device) for row in ROWS for case in row.cases}
    assert found == {(name, dev) for name in definitions() for dev in BOTH}
