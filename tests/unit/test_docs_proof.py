"""verification.md: its tables are those of the committed results, and of the tests themselves.

`pytest tests/unit/test_docs_proof.py --update-golden` writes the sections that the tests make;
`python -m ptxflow.eval.verify.page eval/results/*.json --into PAGE` those of the results.
"""

import inspect
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ptxflow.command import BadInput
from ptxflow.compiler.device import device
from ptxflow.env.tasks.definition import names, own_names
from ptxflow.eval.bench.markdown import markdown, placed, quoted
from ptxflow.eval.verify import mutation, real, survey, value_mutation
from ptxflow.eval.verify.draws import draw_families, draw_shapes, drawn, places
from ptxflow.eval.verify.page import main, sections
from ptxflow.eval.verify.results import kernel_digest, kernels_digest, read
from ptxflow.eval.verify.strategies import arguments
from tests.emulator.foreign.fixtures import NAMES
from tests.emulator.test_foreign import HAZARDS
from tests.machine import test_truth_blackwell, test_truth_cluster, test_truth_hopper
from tests.machine.test_shipped_bugs import BUGS
from tests.machine.truth import Options, refusal

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "eval" / "results" / "verification.md"
FAMILIES = set(places())
OF_THE_46 = {name for name, found in places().items() if found[0][0].name in names()}
RESULTS = sorted((ROOT / "eval" / "results").glob("*.json"))


# -- what the tests say ---------------------------------------------------------------------------


def cases(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The arguments of a test function, from its marks."""
    marks = [m.args for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    names = [name for name, _ in marks]
    for values in itertools.product(*(held for _, held in marks)):
        yield dict(zip(names, values, strict=True))


def truth_rows(module: ModuleType) -> list[tuple[str, str, str, str]]:
    """Device, hazard class, optional statements, and how many combinations are safe."""
    rows = []
    for name, test in inspect.getmembers(module, lambda found: hasattr(found, "table")):
        options, safe, dev = test.table
        for case in cases(test):
            told = name.removeprefix("test_").replace("_", " ")
            told += "".join(f", {n} {v}" for n, v in case.items())
            chosen = itertools.product((False, True), repeat=len(options))
            on = [frozenset(itertools.compress(options, c)) for c in chosen]
            count = sum(bool(safe(Options(o), **case)) for o in on)
            rows.append((dev.arch, told, ", ".join(options), f"{count} of {len(on)}"))
    return rows


def truth_tables() -> str:
    modules = (test_truth_hopper, test_truth_cluster, test_truth_blackwell)
    rows = [row for module in modules for row in truth_rows(module)]
    combinations = sum(int(row[-1].split()[-1]) for row in rows)
    head = f"{len(rows)} tables, {combinations} kernels:"
    columns = ("target", "what is handed over", "optional statements", "safe")
    return f"{head}\n\n{markdown(columns, rows, None)}"


def rule(told: str) -> tuple[str, str]:
    """The rule and the fix of a refusal, without warps, places and trip counts."""
    head, _, fix = told.rpartition("; fix: ")
    if head.startswith("deadlock"):
        stuck = dict.fromkeys(re.findall(r" at (\w+\([^)]*\)) at \S+:\d+", head))
        return f"deadlock at {', '.join(stuck)}", fix
    head = re.sub(r" at \S+:\d+|(?: by [a-z ]+warp \d+)?(?: of CTA \d+)| \[[^]]*\]$", "", head)
    return head.replace("|", ""), fix


def shipped_bugs() -> str:
    rows = []
    for name, (make, _) in BUGS.items():
        kernel, trips, dev = make(True)
        told = refusal(kernel, dev, trips)
        assert told is not None, name
        rows.append((name, dev.arch, *rule(told)))
    return markdown(("bug", "target", "refused because", "fix"), rows, None)


def foreign() -> str:
    def plain(pattern: str) -> str:
        """A pattern as a reader would quote it: gaps as dots, no escapes."""
        gaps = re.sub(r"\\[wS]\+|\.\*", " ... ", pattern)
        return " ".join(re.sub(r"[\\`@]", "", gaps).split())

    rows = []
    for name in NAMES:
        seen = [plain(h) for h, where in HAZARDS.items() if any(fnmatch(name, w) for w in where)]
        rows.append((name, "; ".join(seen) or "none"))
    return markdown(("kernel", "hazards, in the words of the emulator"), rows, None)


MADE = {"truth-tables": truth_tables, "shipped-bugs": shipped_bugs, "foreign": foreign}


@pytest.mark.parametrize("name", MADE)
def test_sections_that_tests_make(name: str, request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    wanted = placed(page, {name: MADE[name]()})
    if request.config.getoption("--update-golden"):
        PAGE.write_text(wanted, encoding="utf-8")
        return
    assert page == wanted, "run pytest tests/unit/test_docs_proof.py --update-golden"


# -- what the committed results say ---------------------------------------------------------------


def test_sections_are_those_of_the_committed_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    made = sections(map(read, RESULTS))
    assert set(made) >= {"verify", "mutation"}
    assert placed(page, made) == page, (
        "run python -m ptxflow.eval.verify.page eval/results/*.json --into PAGE"
    )


def test_what_the_committed_results_claim() -> None:
    """Both targets and every definition; every strategy right, and every instruction executed;
    the list of equivalent mutants is right both ways, and of GEMM's mutants none is caught by the
    emulator alone."""
    kinds = set()
    for summary in map(read, RESULTS):
        kinds.add((summary["kind"], summary["arch"]))
        if summary["kind"] == "verify":
            assert not summary["failures"]
            assert set(summary["all"]["passed"].values()) == {summary["all"]["strategies"]}
            assert set(summary["definitions"]) == {*names(), *own_names()}
        elif summary["kind"] == "verify-real":
            assert {row["family"] for row in summary["rows"]} == FAMILIES
        elif summary["kind"] == "survey":
            assert set(summary["families"]) == FAMILIES and not summary["failures"]
        elif summary["kind"] == "mutate-values":
            assert set(summary["families"]) == FAMILIES and not summary["escaped"]
        else:
            assert set(summary["families"]) >= OF_THE_46
            assert summary["emulated"]["right"] > 0
            assert not summary["refused"] and not summary["wrong"]
            gemm = summary["families"]["gemm"]
            assert gemm["emulated"]["wrong"] == 0 < gemm["emulated"]["right"]
            assert gemm["all"]["survived"] <= gemm["all"]["killed"] / 500
    wanted = {(k, a) for k in ("verify", "mutation") for a in ("sm_90a", "sm_100a")}
    assert kinds >= wanted | {("verify-real", "sm_90a")}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printing and placing give the same text; what cannot be used is one line."""
    results = [str(path) for path in RESULTS]
    assert main(results) == 0
    printed = capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text("<!-- table verify -->\nold\n<!-- end -->\n", encoding="utf-8")
    verified = [r for r in results if read(Path(r))["kind"] == "verify"]
    assert main([*verified, "--into", str(page)]) == 0
    placed_text = quoted(page.read_text(encoding="utf-8"))["verify"]
    assert placed_text in printed and "verified for sm_90a" in placed_text
    assert main([*results, "--into", str(page)]) == 2  # no section for mutation
    assert main([str(page)]) == 2
    assert capsys.readouterr().err.count("page: ") == 2


def test_placing_needs_the_marks() -> None:
    with pytest.raises(BadInput, match="no table verify"):
        placed("a page", {"verify": "text"})


@pytest.mark.parametrize("target", ["b200", "h200"])
@pytest.mark.parametrize("name", [
    "rmsnorm", "gdn_decode",
    *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)
      if name not in ("rmsnorm", "gdn_decode")),
])  # fmt: skip
def test_the_kernels_that_were_verified_are_today_s(name: str, target: str) -> None:
    summary = read(PAGE.with_name(f"verify-{target}.json"))
    args = arguments().parse_args(shlex.split(summary["command"])[2:])
    dev = device(target)
    jobs = draw_families([name], dev, args.samples, args.seed)
    today = kernels_digest(kernel_digest(*job, dev) for job in jobs)
    assert today == summary["rows"][name]["kernels"], (
        f"kernels have changed: run {summary['command']} --out eval/results/verify-{target}.json, "
        "then python -m ptxflow.eval.verify.page eval/results/*.json --into "
        "eval/results/verification.md"
    )


def kernels_of(summary: dict[str, Any]) -> dict[str, str]:
    """By family, what a result says of the kernels that it is of."""
    match summary["kind"]:
        case "verify-real":
            return {row["family"]: row["kernel"] for row in summary["rows"]}
        case "survey":
            return {name: row["kernels"] for name, row in summary["families"].items()}
    held: dict[str, str] = summary["digests"]
    return held


def kernels_today(summary: dict[str, Any]) -> dict[str, str]:
    """The same of the kernels that its command would take today."""
    kind, dev = summary["kind"], device(summary["device"])
    module = {"mutation": mutation, "mutate-values": value_mutation, "verify-real": real,
              "survey": survey}[kind]  # fmt: skip
    args = module.arguments().parse_args(shlex.split(summary["command"])[2:])
    if kind == "verify-real":
        return {p.family: kernel_digest(p, s, dev) for p, s in real.chosen([], dev, args.seed)}
    if kind == "survey":
        few = survey.DIGESTED
        jobs, _ = draw_shapes([], dev, 2 * few, args.seed)
        texts = {n: [job for job in jobs if job[1].family == n][:few] for n in places()}
        return {n: kernels_digest(kernel_digest(*j, dev) for j in own) for n, own in texts.items()}
    jobs = mutation.chosen_structures(drawn(args, dev, args.draws), dev, args.kernels)
    return mutation.digests(jobs, dev)


@pytest.mark.slow
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_of_today_s_kernels(path: Path) -> None:
    summary = read(path)
    if summary["kind"] != "verify":  # whose rows have a test each
        assert kernels_today(summary) == kernels_of(summary), f"run {summary['command']} anew"
