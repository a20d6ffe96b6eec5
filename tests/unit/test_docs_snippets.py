"""docs/api.md and docs/tutorial.md: their Python runs and prints what the page says.

`pytest tests/unit/test_docs_snippets.py --update-golden` writes what api.md prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from ptxflow.compiler.device import H200
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import parse
from ptxflow.eval.sample.draws import default_checkpoint
from ptxflow.eval.sample.selection import choose
from ptxflow.gfn.inference import draw_distinct, load_policy, log_probs

ROOT = Path(__file__).resolve().parents[2]
API, TUTORIAL, SCHEMA = (ROOT / "docs" / f"{n}.md" for n in ("api", "tutorial", "schema"))
PRINTED = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.M | re.S)
DEFINITION = re.compile(r"^```json\n(.*?)^```", re.M | re.S)


def test_the_api_page_runs_and_prints_what_it_says(request: pytest.FixtureRequest) -> None:
    page, known = API.read_text(encoding="utf-8"), dict[str, object]()

    def ran(block: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block[1], str(API), "exec"), known)
        return f"```python\n{block[1]}```\n```text\n{printed.getvalue()}```\n"

    wanted = PRINTED.sub(ran, page)
    if request.config.getoption("--update-golden"):
        API.write_text(wanted, encoding="utf-8")
        return
    assert page == wanted, "run pytest tests/unit/test_docs_snippets.py --update-golden"


def test_every_definition_of_the_pages_is_one() -> None:
    blocks = [DEFINITION.findall(page.read_text(encoding="utf-8")) for page in (TUTORIAL, SCHEMA)]
    assert blocks[0] == blocks[1] and len(blocks[0]) == 1
    assert parse(json.loads(blocks[0][0])).name == "my_gemm"


def test_the_tutorial_unpacks_a_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block that needs no GPU; the next one imports what it wrote."""
    monkeypatch.chdir(tmp_path)
    unpack, call = (b for b, _ in PRINTED.findall(TUTORIAL.read_text(encoding="utf-8")))
    sources = [{"path": p, "content": "def run(a, b): ..."} for p in ("main.py", "kernel.ptx")]
    made = tmp_path / "out" / "my_gemm" / "solution.json"
    made.parent.mkdir(parents=True)
    made.write_text(json.dumps({"name": "one", "sources": sources}))
    exec(compile(unpack, str(TUTORIAL), "exec"), {})
    assert capsys.readouterr().out == "one ['kernel.ptx', 'main.py']\n"
    assert (made.parent / "solution" / "main.py").read_text() == sources[0]["content"]
    compile(call, str(TUTORIAL), "exec")


def test_the_tutorial_quotes_what_is_sampled() -> None:
    """Keys, sources, times and the remark of its first table."""
    page = TUTORIAL.read_text(encoding="utf-8")
    definition = parse(json.loads(DEFINITION.findall(page)[0]))
    quoted = page.partition("$ ptxflow sample ")[2].partition("```")[0]
    rows = re.findall(r"^\d+ +(\w{16}) +(\w+) +([\d.]+) ", quoted, re.M)
    space = enumerate_space(*find_problem(definition, {"M": 77}), H200)
    assert f"{len(space):,} valid strategies" in " ".join(page.split())
    policy = load_policy(default_checkpoint("h200"))
    scores = log_probs(policy, space)
    chosen = choose(policy.about, definition, space, scores, draw_distinct(scores, 4, seed=0), 4)
    best = sorted(map(int, chosen.places), key=lambda p: -chosen.predicted[p])
    drawn = set(chosen.places[: chosen.drawn].tolist())
    assert {key for key, _, _ in rows} == {space.strategy(int(space.codes[p])).key for p in best}
    assert [source for _, source, _ in rows] == ["policy" if p in drawn else "reward" for p in best]
    for (_, _, us), place in zip(rows, best, strict=True):
        modelled = space.problem.flops / chosen.predicted[place] / 1e6
        assert modelled == pytest.approx(float(us), rel=5e-3)
