"""What the pages say of the trained policies is what the committed checkpoints say, and their code
runs and prints what it says.

`pytest tests/unit/test_docs_figures.py --update-golden` writes the table of distances.
"""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import H200, device
from ptxflow.env.reward import Reward, target
from ptxflow.env.reward_source import build
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.arguments import find_device, find_problem, find_whole_space
from ptxflow.env.tasks.definition import Definition, load, parse
from ptxflow.eval.bench.markdown import markdown, placed
from ptxflow.eval.bench.markdown import quoted as sections_of
from ptxflow.eval.sample import live
from ptxflow.eval.sample.draws import scored, takes_wide, usual_checkpoint
from ptxflow.eval.sample.selection import Chosen, choose
from ptxflow.eval.study.training_plots import KINDS
from ptxflow.gfn.checkpoint import read
from ptxflow.gfn.inference import SHARPNESS, load_policy, log_probs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMPILER = (ROOT / "compiler" / "README.md").read_text(encoding="utf-8")
POLICIES = ROOT / "gfn" / "README.md"
CHECKPOINTS = sorted((ROOT / "checkpoints").glob("[bh]*.safetensors"))
WORST = re.compile(r"(\S+)'s worst is\s+`(\w+)`\s+at\s+(\w+)=(\d+),\s+(0\.\d+)")
WORST_OF = WORST.findall(POLICIES.read_text(encoding="utf-8"))
SAMPLE = re.compile(
    r"^\$ python sample\.py --definition (\w+) --axes (\w+)=(\d+)(?: --device (\w+))?.*\n"
    r"((?:(?!```).*\n)*)",
    re.M,
)


def space(definition: str, axis: str, size: int, name: str) -> Space:
    return enumerate_space(*find_problem(load(definition), {axis: size}), device(name))


def reward_of(config: dict[str, Any], name: str) -> Reward:
    """The reward that a policy was trained on, from the files it was trained on."""
    return build(config["settings"]["reward"], name)[0]


def distances() -> str:
    """A row for each family of each policy, from the headers of the checkpoints."""
    heads = [f"{name}{figure}" for name in KINDS.values() for figure in ("", " mean", " max")]
    rows = []
    for path in CHECKPOINTS:
        for family, kinds in read(path).config["result"]["families"].items():
            cells = [path.stem.upper(), family]
            for r in map(kinds.get, KINDS):
                cells += [str(r["workloads"]), f"{r['mean']:.4f}", f"{r['max']:.4f}"] if r else [
                    "-", "-", "-"]  # fmt: skip
            rows.append(cells)
    return markdown(("policy", "family", *heads), rows, 2)


def test_distances_are_those_in_the_headers(request: pytest.FixtureRequest) -> None:
    page = POLICIES.read_text(encoding="utf-8")
    wanted = placed(page, {"distances": distances()})
    if request.config.getoption("--update-golden"):
        POLICIES.write_text(wanted, encoding="utf-8")
        return
    assert page == wanted and "| B200 | gemm |" in page


@pytest.mark.parametrize(("name", "definition", "axis", "size", "distance"), WORST_OF)
def test_the_worst_distance_is_what_the_policy_gives(
    name: str, definition: str, axis: str, size: str, distance: str
) -> None:
    path = ROOT / "checkpoints" / f"{name.lower()}.safetensors"
    where = space(definition, axis, int(size), name.lower().partition("-")[0])
    config = read(path).config
    exact, _ = target(where, reward_of(config, where.device.name), config["train"]["tau"])
    ours = log_probs(load_policy(path), where)
    measured = 0.5 * np.abs(np.exp(ours) - np.exp(exact)).sum()
    assert measured == pytest.approx(float(distance), abs=1e-3)
    held_out = config["result"]["families"][where.family.name]["held_out"]
    assert measured == pytest.approx(held_out["max"], abs=1e-3)


def sampled(
    name: str, definition: Definition, axes: dict[str, int], k: int
) -> tuple[Space, Chosen, int]:
    """As sample.py has it on a device: strategies, those chosen, how many a search asks for."""
    family, problem = find_problem(definition, axes)
    wide = takes_wide(None, None, name, definition)
    whole = find_whole_space(family.wide if wide else family, problem, find_device(name))
    policy = load_policy(usual_checkpoint(name, definition, axes, wide=wide))
    pool, asked, sure = scored(policy, whole, k, 0, SHARPNESS)
    drawn = pool.log_probs, pool.drawn
    return pool.space, choose(policy.about, definition, pool.space, *drawn, k, listed=sure), asked


@pytest.mark.parametrize(("definition", "axis", "size", "name", "output"), SAMPLE.findall(README))
def test_quoted_samples_are_what_the_policy_draws(
    definition: str, axis: str, size: str, name: str, output: str
) -> None:
    """Key, source, time, share of the best, log-probability and TFLOP/s of every quoted kernel."""
    name = name or "b200"
    row = r"^\d+ +(\w{16}) +(\w+) +([\d.]+) +([\d.]+)% +(-[\d.]+) +([\d.]+) "
    rows = re.findall(row, output, re.M)
    assert len(rows) == 8 and "TFLOP/s  of tensor peak" in output
    where, chosen, _ = sampled(name, load(definition), {axis: int(size)}, 8)
    assert chosen.remarks == ()
    places = {where.strategy(int(where.codes[p])).key: int(p) for p in chosen.places}
    drawn = set(chosen.places[: chosen.drawn].tolist())
    for key, source, us, share, log_prob, tflops in rows:
        assert key in places, "README.md: run the command again and quote what it prints"
        at = places[key]
        assert source == ("policy" if at in drawn else "reward")
        assert chosen.predicted[at] == pytest.approx(float(tflops), abs=0.06)
        assert where.problem.flops / float(us) / 1e6 == pytest.approx(float(tflops), rel=5e-3)
        of_best = 100 * chosen.predicted[at] / chosen.predicted.max()
        assert of_best == pytest.approx(float(share), abs=0.06)
        assert chosen.log_probs[at] == pytest.approx(float(log_prob), abs=0.02)


def test_the_sizes_of_the_spaces() -> None:
    found = re.search(r"M = 4096: ([\d,]+) on B200 and\s+([\d,]+) on H200", COMPILER)
    assert found is not None
    sizes = [len(space("gemm_n4096_k4096", "M", 4096, name)) for name in ("b200", "h200")]
    assert [int(text.replace(",", "")) for text in found.groups()] == sizes


def test_live_runs_are_what_the_page_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "gfn" / "README.md").read_text(encoding="utf-8")
    command = re.search(r"`ptxflow (live --judge [^`]*)`", page)
    assert command is not None
    name, *rest = command[1].split()
    given = [str(ROOT / part) if "/" in part else part for part in rest]
    assert name == "live" and live.main(given) == 0
    assert sections_of(page)["live"] in capsys.readouterr().out


def test_figures_are_quoted() -> None:
    assert CHECKPOINTS and SAMPLE.search(README) and len(WORST_OF) == 2


API, TUTORIAL = (ROOT / "docs" / f"{n}.md" for n in ("api", "tutorial"))
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


def test_the_definition_of_the_tutorial_is_one() -> None:
    (block,) = DEFINITION.findall(TUTORIAL.read_text(encoding="utf-8"))
    assert parse(json.loads(block)).name == "my_gemm"


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
    family, problem = find_problem(definition, {"M": 77})
    assert f"{len(enumerate_space(family, problem, H200)):,} listed" in " ".join(page.split())
    space, chosen, asked = sampled("h200", definition, {"M": 77}, 4)
    assert f" {asked:,} that a search" in quoted
    best = sorted(map(int, chosen.places), key=lambda p: -chosen.predicted[p])
    drawn = set(chosen.places[: chosen.drawn].tolist())
    assert {key for key, _, _ in rows} == {space.strategy(int(space.codes[p])).key for p in best}
    assert [source for _, source, _ in rows] == ["policy" if p in drawn else "reward" for p in best]
    for (_, _, us), place in zip(rows, best, strict=True):
        modelled = space.problem.flops / chosen.predicted[place] / 1e6
        assert modelled == pytest.approx(float(us), rel=5e-3)
