"""Who may import whom, and how large things may be: what `python -m tests.house` prints."""

from pathlib import Path

import pytest

from tests.house import ROOT, House, cycle, imported, room


def test_the_house_is_in_order() -> None:
    """Nothing lies flat in eval, no room imports one above, no modules import each other."""
    house = House.measured()
    assert house.flat == ("__main__.py",)
    assert not house.upward, "\n".join(house.upward)
    assert not house.cycle, " -> ".join(house.cycle)
    assert not house.long
    assert house.readme <= 150 and house.prose <= 124_000
    assert house.python <= 121_000  # 80,000 once kernels share a tile layer


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
             "eval/tune/loop.py", "eval/agents/desk.py", "eval/__main__.py",
             "sample.py")  # fmt: skip
    places = [room(ROOT / name) for name in order]
    assert places == list(range(len(places)))
