"""The size and shape of the repository, measured: `python -m tests.house`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "env", "gfn", "eval")
OWN = (*FOLDERS, "tests", "docs")
SCRIPTS = ("train.py", "sample.py")
#: what a room may import, each room itself and those before it
ROOMS = (
    "compiler", "env", "gfn", "eval/bench", "eval/verify", "eval/study", "eval/sample", "eval",
)  # fmt: skip
TABLE = re.compile(r"<!-- [\w -]+ -->\n.*?<!-- end[\w -]* -->", re.S)
GENERATED = ("eval/results/instructions.md",)  # made whole by a command
LONGEST = 500

Graph = Mapping[str, frozenset[str]]


def files(ending: str) -> list[Path]:
    """The repository's own files of an ending, symbolic links apart."""
    inside = (p for folder in OWN for p in (ROOT / folder).rglob(f"*{ending}"))
    found = (*ROOT.glob(f"*{ending}"), *(ROOT / "ptxflow").glob(f"*{ending}"), *inside)
    return sorted(p for p in found if not p.is_symlink() and "__pycache__" not in p.parts)


def module(path: Path) -> str:
    """`compiler/check/__init__.py` is `ptxflow.compiler.check`."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("ptxflow") else f"ptxflow.{name}"


def imported(source: str, modules: Mapping[str, Path]) -> Iterator[str]:
    """The modules of ours that a source imports, at any depth and for types alone, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names = (f"{node.module}.{alias.name}", node.module)
                yield from [name for name in names if name in modules][:1]


def imports() -> tuple[dict[str, Path], Graph]:
    """Our modules by name, and which of them each imports."""
    modules = {
        module(p): p for p in files(".py") if p.relative_to(ROOT).parts[0] in (*FOLDERS, *SCRIPTS)
    }
    return modules, {
        name: frozenset(imported(path.read_text(encoding="utf-8"), modules)) - {name}
        for name, path in modules.items()
    }


def cycles(graph: Graph) -> list[list[str]]:
    """The sets of modules that reach each other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            if len(stack) > at + 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in number:
            visit(name)
    return found


def room(path: Path) -> int:
    """Its place in ROOMS; the scripts stand above all."""
    name = path.relative_to(ROOT).as_posix()
    for place, folder in enumerate(ROOMS):
        if name.startswith(f"{folder}/") and (folder != "eval" or name.count("/") == 1):
            return place
    return len(ROOMS)


def upward() -> list[str]:
    """The imports of a room that lies above the importer's."""
    modules, graph = imports()
    return [
        f"{modules[name].relative_to(ROOT)} imports {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if room(modules[other]) > room(modules[name])
    ]


def prose() -> int:
    """Bytes of Markdown without what commands generate."""
    pages = (p for p in files(".md") if p.relative_to(ROOT).as_posix() not in GENERATED)
    return sum(len(TABLE.sub("", p.read_text(encoding="utf-8")).encode()) for p in pages)


@dataclass(frozen=True)
class House:
    """What is counted: see the labels of `lines`."""

    flat: tuple[str, ...]
    cycles: tuple[tuple[str, ...], ...]
    upward: tuple[str, ...]
    long: tuple[str, ...]
    python: int
    tests: int
    readme: int
    prose: int

    @staticmethod
    def measured() -> House:
        length = {
            p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8").count("\n")
            for p in files(".py")
        }
        return House(
            flat=tuple(sorted(p.name for p in (ROOT / "eval").glob("*.py"))),
            cycles=tuple(map(tuple, cycles(imports()[1]))),
            upward=tuple(upward()),
            long=tuple(name for name, lines in length.items() if lines > LONGEST),
            python=sum(length.values()),
            tests=sum(lines for name, lines in length.items() if name.startswith("tests/")),
            readme=(ROOT / "README.md").read_text(encoding="utf-8").count("\n"),
            prose=prose(),
        )

    def lines(self) -> str:
        return "\n".join(
            (
                f"flat modules of eval      {len(self.flat)}  {' '.join(self.flat)}",
                f"import cycles             {len(self.cycles)}",
                *(f"  {' '.join(c)}" for c in self.cycles),
                f"imports of a room above   {len(self.upward)}",
                *(f"  {line}" for line in self.upward),
                f"files over {LONGEST} lines      {len(self.long)}  {' '.join(self.long)}",
                f"lines of Python           {self.python:,} (tests {self.tests:,})",
                f"lines of README.md        {self.readme}",
                f"prose without tables      {self.prose / 1000:.0f} KB",
            )
        )


if __name__ == "__main__":
    print(House.measured().lines())
