"""The size and shape of the repository, measured: `python -m tests.house`."""

import ast
import functools
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from ptxflow.compiler.atoms import all_atoms
from ptxflow.eval.bench.markdown import SECTION

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "env", "gfn", "eval")
OWN = (*FOLDERS, "tests", "docs")
SCRIPTS = ("train.py", "sample.py")
#: what a room may import, each room itself and those before it
ROOMS = (
    "compiler", "env", "gfn", "eval/bench", "eval/verify", "eval/study", "eval/sample", "eval/tune",
    "eval/agents", "eval",
)  # fmt: skip
#: made whole by a command
WHOLE = "b200", "foreign", "harness-h200", "instructions"
GENERATED = tuple(f"eval/results/{page}.md" for page in WHOLE)
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


def named(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, at any depth and for types alone, too; relative ones
    begin with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imported(source: str, modules: Collection[str]) -> Iterator[str]:
    """The modules of ours that a source imports."""
    for _, name in named(source):
        yield from [n for n in (name, name.rpartition(".")[0]) if n in modules][:1]


@functools.cache
def imports() -> tuple[dict[str, Path], Graph]:
    """Our modules by name, and which of them each imports."""
    modules = {
        module(p): p for p in files(".py") if p.relative_to(ROOT).parts[0] in (*FOLDERS, *SCRIPTS)
    }
    return modules, {
        name: frozenset(imported(path.read_text(encoding="utf-8"), modules)) - {name}
        for name, path in modules.items()
    }


def cycle(graph: Graph) -> list[str]:
    """Modules that import each other in a ring, the first again at the end; empty without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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
    return sum(len(SECTION.sub("", p.read_text(encoding="utf-8")).encode()) for p in pages)


@dataclass(frozen=True)
class House:
    """What is counted: see the labels of `lines`."""

    flat: tuple[str, ...]
    cycle: tuple[str, ...]
    upward: tuple[str, ...]
    long: tuple[str, ...]
    python: int
    tests: int
    readme: int
    prose: int

    @staticmethod
    def measured() -> "House":
        length = {
            p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8").count("\n")
            for p in files(".py")
        }
        return House(
            flat=tuple(sorted(p.name for p in (ROOT / "eval").glob("*.py"))),
            cycle=tuple(cycle(imports()[1])),
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
                f"a cycle of imports        {' '.join(self.cycle) or 'none'}",
                f"imports of a room above   {len(self.upward)}",
                *(f"  {line}" for line in self.upward),
                f"files over {LONGEST} lines      {len(self.long)}  {' '.join(self.long)}",
                f"lines of Python           {self.python:,} (tests {self.tests:,})",
                f"lines of README.md        {self.readme}",
                f"prose without tables      {self.prose / 1000:.0f} KB",
            )
        )


def alike(hopper: Path) -> int:
    """Lines in runs of five or more that a family's file for the other target has, too."""
    other = hopper.with_name("blackwell.py")
    both = (p.read_text().split("\n") if p.exists() else [] for p in (hopper, other))
    ours, theirs = ([s for line in text if (s := line.strip())] for text in both)
    runs = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    return sum(run.size for run in runs if run.size >= 5)


def layer() -> Iterator[str]:
    """What kernels are written with, and what of it serves one family or escapes a tool."""
    kernels, known = ROOT / "compiler" / "kernels", dict[str, str]()
    shared = ROOT / "compiler" / "tile", ROOT / "compiler" / "atoms"
    for folder in (*sorted(p for p in kernels.iterdir() if p.is_dir()), *shared):
        if text := "".join(p.read_text() for p in folder.glob("*.py")):
            known[folder.name] = text
            yield f"lines of {folder.name:16} {text.count(chr(10)):,}"
    whole = "".join(known.values())
    yield f"lines of all             {whole.count(chr(10)):,}"
    of = {row.name: re.compile(rf"\bat\.{row.name}\b") for row in all_atoms()}
    tile = known.pop("tile")  # which is no family: what it uses, all may
    users = Counter(n for n, at in of.items() for text in known.values() if at.search(text))
    alone = sum(count == 1 and not of[n].search(tile) for n, count in users.items())
    yield f"atoms of one family      {alone} of {len(of)}"
    named = re.findall(r'\b(?:r|keep|value|_value|word)\(f?"', whole)
    yield f"registers by strings     {len(named)}"
    yield f"online softmaxes         {len(re.findall('^class .*Softmax', whole, re.MULTILINE))}"
    yield f"alike on both targets    {sum(map(alike, kernels.glob('*/hopper*.py')))}"
    for escape in ("fmt: skip", "type: ignore"):
        yield f"{escape:24} {whole.count('# ' + escape)}"


if __name__ == "__main__":
    print(House.measured().lines(), *layer(), sep="\n")
