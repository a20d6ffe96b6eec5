"""The pages: links, commands, flags, paths and figures agree with what is there."""

import contextlib
import functools
import importlib
import importlib.util
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean

import pytest

from ptxflow.__main__ import MODULES as INSTALLED
from ptxflow.compiler.atoms import document
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.check import check
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import Op, edit, walk
from ptxflow.compiler.kernels import family, family_for
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_family, find_problem
from ptxflow.env.tasks.definition import load, names
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import row_of
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.bench.report import SLOWER, best_ratios, settled
from ptxflow.eval.study import data_path, families_table
from tests.families.gemm import H200, build, strategy

ROOT = Path(__file__).resolve().parents[2]
README, COMPILER = ROOT / "README.md", ROOT / "compiler" / "README.md"
ROOMS = [ROOT / folder / "README.md" for folder in ("compiler", "env", "gfn", "eval")]
PAGES = [README, *ROOMS, *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("eval/results/*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
each_room = pytest.mark.parametrize("page", ROOMS, ids=lambda p: p.parent.name)

FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
COMMAND = re.compile(
    r"python (?:(train|sample)\.py|-m (ptxflow[\w.]+))|^(?:\$ )?ptxflow ([a-z][a-z-]*)"
)
FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z-]*|-k)(?![\w-])")
FOLDERS = ("compiler", "env", "gfn", "eval")
SCRIPTS = ("train.py", "sample.py")
#: bare names of modules; main.py is what a Solution holds
MODULES = {*SCRIPTS, "main.py"} | {
    path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
}
PLACE = re.compile(
    r"(?<![\w./-])((?:compiler|env|gfn|eval|docs|tests|checkpoints|\.ci)/[\w./-]*\w|\w+\.py)\b"
)
#: a module or folder in code quotes, of the page's folder or the root; capitals are any name
QUOTED = re.compile(r"`([\w-]+(?:/[\w-]+)*(?:/|\.py))`")
ANY = re.compile(r"\b[A-Z]+\b")


def anchors(text: str) -> set[str]:
    """The fragments that headings give."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(script or module, arguments) of every command in a fenced block or in code quotes."""
    code = [*FENCE.findall(text), *re.findall(r"`([^`\n]+)`", FENCE.sub("", text))]
    for line in "\n".join(code).replace("\\\n", " ").splitlines():
        for found in COMMAND.finditer(line):
            module = INSTALLED[found[3]] if found[3] else found[1] or found[2]
            name = module if module.startswith("ptxflow") else f"ptxflow.{module}"
            name = f"{module}.py" if f"{module}.py" in SCRIPTS else name
            yield name, re.split(r" [|>#]|   ", line[found.end() :])[0]


@functools.cache
def help_of(name: str) -> str:
    module = name if name.startswith("ptxflow") else f"ptxflow.{name.removesuffix('.py')}"
    module += ".__main__" if module in ("ptxflow", "ptxflow.eval") else ""
    check = ["check"] if module == "ptxflow.eval.sample.solution" else []
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*check, "--help"])
    return told.getvalue()


def flags(text: str) -> set[str]:
    return set(FLAG.findall(text))


@each_page
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link:
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if fragment:
            assert fragment in anchors(target.read_text(encoding="utf-8")), f"{page.name}: {link}"


@each_page
def test_commands_and_their_flags_exist(page: Path) -> None:
    for name, arguments in commands(page.read_text(encoding="utf-8")):
        if name.endswith(".py"):
            assert (ROOT / name).exists()
        else:
            assert importlib.util.find_spec(name) is not None, f"{page.name}: {name}"
        if asked := flags(arguments):
            assert asked <= flags(help_of(name)), f"{page.name}: {name} {asked}"


@each_page
def test_flags_in_prose_exist(page: Path) -> None:
    """A flag that stands alone in code quotes belongs to one of our commands."""
    known = set[str]().union(
        *(
            flags(help_of(n))
            for n in (
                "train.py",
                "sample.py",
                "ptxflow.eval",
                "ptxflow.eval.bench.campaign",
                "ptxflow.eval.bench.report",
                "ptxflow.eval.sample.solution",
                "ptxflow.eval.agents.server",
            )
        )
    )
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for code in re.findall(r"`(-[^`\n]+)`", prose):
        assert flags(code) <= known | {"--update-golden"}, f"{page.name}: {code}"


@each_page
def test_paths_exist(page: Path) -> None:
    text = re.sub(r"--(?:export|out) \S+", "", page.read_text(encoding="utf-8"))
    for place in PLACE.findall(text):
        if "/" in place:
            assert [*ROOT.glob(ANY.sub("*", place))], f"{page.name} names {place}"
        else:
            assert place in MODULES, f"{page.name} names {place}"


@each_room
def test_a_room_begins_with_where_a_change_goes(page: Path) -> None:
    heads = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.M)
    assert heads[:2] == ["Where a change goes", "What lives here"]


@each_room
def test_the_page_of_a_room_names_what_is_in_it(page: Path) -> None:
    """Every module and folder that it quotes is there, and every module at its top is quoted."""
    folder = page.parent
    head = page.read_text(encoding="utf-8").partition("\n## What lives here\n")
    quoted = set(QUOTED.findall(head[0] + head[2].partition("\n## ")[0]))
    for name in quoted:
        pattern = ANY.sub("*", name).rstrip("/")
        assert [*folder.rglob(pattern), *ROOT.glob(pattern)], f"{page}: {name}"
    assert {p.name for p in folder.glob("*.py") if not p.name.startswith("__")} <= quoted


@each_page
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(encoding="utf-8"), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
def test_make_says_that_it_downloads_and_lets_pip_show_it() -> None:
    for target in ("demo", "test"):
        command = ["make", "--dry-run", target, "VENV=nowhere"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert said.index("pip downloads") < said.index("pip install ") and " -q" not in said


def test_the_atom_page_and_signatures_are_what_the_rows_say() -> None:
    made = {
        "eval/results/instructions.md": document.page(),
        "compiler/atoms/at.pyi": document.stub(),
    }
    for name, text in made.items():
        said = (ROOT / name).read_text(encoding="utf-8")
        assert said == text, f"{name}: run python -m ptxflow.compiler.atoms.document"


def section(title: str, page: Path = README) -> str:
    """The part of a page under a heading."""
    text = page.read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def built() -> dict[str, list[str]]:
    """Definitions by the family that builds kernels for them; those of no family under ""."""
    out: dict[str, list[str]] = {}
    for name in names():
        given = load(name)
        try:
            found = family_for(given.op_type, given.inputs).name
        except KeyError:
            found = ""
        out.setdefault(found, []).append(name)
    return out


def test_the_families_of_the_readme_are_those_that_are_registered() -> None:
    families = {f: str(len(definitions)) for f, definitions in built().items()}
    none = int(families.pop("", "0"))
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", section("Families"), re.M)
    assert dict(rows) == families and len(rows) == len(families)
    whole = len(names())
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"{len(rows)} [kernel families](#families) cover {whole - none} of the {whole} " in text
    assert not none or f"The other {none}, " in text


TARGETS = [
    (name, arch, path)
    for name, *paths in re.findall(
        r"^\| (\w+) \| \d+ \| ([\w., ]+) \| ([\w., ]+) \|", section("Families"), re.M
    )
    for arch, path in zip(("sm_90a", "sm_100a"), paths, strict=True)
]


@pytest.mark.parametrize(("name", "arch", "path"), TARGETS)
def test_kernels_multiply_by_what_the_readme_says(name: str, arch: str, path: str) -> None:
    """wgmma, tcgen05 or mma.sync in a kernel's PTX; "none" where no strategy is valid."""
    device = next(d for d in DEVICES.values() if d.arch == arch)
    definition = load(built()[name][0])
    row = row_of(definition)
    assert row is not None
    problem = find_problem(definition, axes_of(definition, row.typical))[1]
    if path == "none":
        with pytest.raises(ValueError, match="no strategy is valid"):
            enumerate_space(family(name), problem, device)
        return
    space = enumerate_space(family(name), problem, device)
    paths, found = path.split(", "), set[str]()
    last = len(space.codes) - 1
    places = [last // 2] if len(paths) == 1 else [last * i // 15 for i in range(16)]
    for code in space.codes[places]:
        text = write(family(name).build(problem, space.strategy(int(code)), device), device)
        found |= {p for p in ("wgmma", "tcgen05", "mma.sync") if f"{p}." in text}
    assert found == set(paths) - {"threads"}


def test_the_decisions_of_the_page_are_those_of_the_family() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([^|]+) \|", section("The decisions of a GEMM", COMPILER), re.M
    )
    gemm = family("gemm")
    assert rows == [(d.name, ", ".join(map(str, d.choices))) for d in gemm.decisions]


def test_the_readme_names_every_device() -> None:
    text = README.read_text(encoding="utf-8")
    assert all(name.upper() in text for name in DEVICES)


def test_the_results_of_the_readme_are_those_of_the_records(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    assert families_table.main(["--into", str(page)]) == 0
    assert page.read_text("utf-8") == README.read_text("utf-8"), "run families_table again"
    rows = re.findall(
        r"^\| (\w+)(?:, queries > keys)? \| [^|]+(?:\| [\d.-]+ ){8}\|", section("Results"), re.M
    )
    assert set(rows) == set(built()) - {""}


def test_what_loses_is_what_the_records_say() -> None:
    """Every "is behind on" of the limits, by family or by kind of definition."""
    found = best_ratios(families_table.records("H200"))
    told = " ".join(section("Limits").split())
    behind = re.findall(r"`(\w+)` is behind on (\d+) of (\d+) workloads \(least ([\d.]+)", told)
    for name, losses, workloads, least in behind:
        ratios = [
            r
            for (definition, _), r in found.items()
            if definition.startswith(name) or find_family(load(definition)).name == name
        ]
        assert (len(ratios), sum(r < SLOWER for r in ratios)) == (int(workloads), int(losses)), name
        assert f"{min(ratios):.2f}" == least, name
    slower = {find_family(load(name)).name for (name, _), r in found.items() if r < SLOWER}
    assert {name for name, *_ in behind} == slower
    heavy = read_records(families_table.FOLDER / "measurements" / "h100-deepseek.jsonl.xz")
    decode = [r for (d, _), r in best_ratios(settled(heavy)).items() if "mla_paged_decode" in d]
    assert f"reaches {geometric_mean(decode):.2f} of FlashInfer's fa3" in told


def test_the_figure_of_the_readme_names_modules_that_are_there(tmp_path: Path) -> None:
    for stage in data_path.STAGES.values():
        assert (ROOT / stage.where).exists() and stage.folder in data_path.COLOURS
    assert {name for pair in data_path.ARROWS for name in pair} == set(data_path.STAGES)
    made = tmp_path / "plots" / "path.png"
    assert data_path.main(["--out", str(made)]) == 0
    assert made.read_bytes().startswith(b"\x89PNG")
    assert "(plots/data_path.png)" in README.read_text("utf-8")


def test_the_refusal_of_the_page_is_what_the_validator_says() -> None:
    """But for line numbers, which move."""
    tree, trips = build(H200, strategy())
    path = next(p for p, n in walk(tree) if n.op is Op.ATOM and n.arg.atom == "fence_proxy_async")
    with pytest.raises(HazardError) as refusal:
        check(edit(tree, path, ()), trips, H200)
    text = " ".join(COMPILER.read_text(encoding="utf-8").split())
    assert re.sub(r"py:\d+", "py", str(refusal.value)) in re.sub(r"py:\d+", "py", text)
