"""Who may import whom, and how large things may be: what `python -m tests.house` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house import ROOT, House, cycle, imported, room

HOUSE = House.measured()


def test_nothing_lies_flat_in_eval() -> None:
    assert HOUSE.flat == ("__main__.py",)


def test_no_room_imports_one_above() -> None:
    assert not HOUSE.upward, "\n".join(HOUSE.upward)


def test_no_modules_import_each_other() -> None:
    assert not HOUSE.cycle, " -> ".join(HOUSE.cycle)


def test_no_file_is_long() -> None:
    assert not HOUSE.long


def test_pages_and_code_stay_small() -> None:
    assert HOUSE.readme <= 150
    assert HOUSE.prose <= 125_000
    assert HOUSE.python <= 104_000  # 80,000 once kernels share a tile layer


def test_cycles_are_found() -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"})}
    assert set(cycle(graph)) == {"b", "c"}
    assert not cycle({"a": frozenset({"b"}), "b": frozenset()})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from p.a import b", ["p.a.b"]),
        ("from p.a import f", ["p.a"]),
        ("def g():\n    import p.a", ["p.a"]),
        ("if TYPE_CHECKING:\n    from p.a.b import C", ["p.a.b"]),
        ("import os", []),
    ],
)
def test_imports_are_seen(source: str, expected: list[str]) -> None:
    modules = {"p.a": Path("p/a/__init__.py"), "p.a.b": Path("p/a/b.py")}
    assert list(imported(source, modules)) == expected


def test_rooms_are_told_apart() -> None:
    order = ("compiler/layout.py", "env/tasks/workload.py", "gfn/run.py", "eval/bench/worker.py",
             "eval/verify/survey.py", "eval/study/runs.py", "eval/sample/plot.py",
             "eval/__main__.py", "sample.py")  # fmt: skip
    places = [room(ROOT / name) for name in order]
    assert places == list(range(len(places)))
