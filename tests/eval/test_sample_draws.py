"""What a policy would try, as a campaign reads it."""

import json
from pathlib import Path

import pytest

from ptxflow.compiler.family import Strategy
from ptxflow.env.tasks import arguments
from ptxflow.env.tasks.arguments import read_strategies
from ptxflow.env.tasks.definition import load
from ptxflow.eval.sample import draws
from ptxflow.gfn.inference import load_policy, sample_distinct
from tests.builders import space_at, untrained

NAME = "rmsnorm_h128"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return untrained(tmp_path / "p.safetensors", space_at(NAME, {"batch_size": 1}))


def test_draws_are_those_of_the_policy_at_workloads_of_a_definition(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drawn.json"
    argv = ["--definition", NAME, "--workloads", "2", "-k", "3", "--seed", "5", "--jobs", "1",
            "--checkpoint", str(checkpoint), "--out", str(out)]  # fmt: skip
    assert draws.main(argv) == 0
    assert "6 strategies of 2 workloads" in capsys.readouterr().out
    rows = read_strategies(out)
    assert len(rows) == 6 and len({(a["batch_size"], s.key) for _, a, s in rows}) == 6
    axes = rows[0][1]
    space = space_at(NAME, axes)
    expected = sample_distinct(load_policy(checkpoint), space, 3, 5)
    keys = [space.strategy(int(c)).key for c in expected]
    assert [s.key for _, a, s in rows if a == axes] == keys


def test_a_definition_of_ones_own_at_axes_that_are_given(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is written needs no file beside it; fewer strategies than asked for are told."""
    mine, out = tmp_path / "mine.json", tmp_path / "drawn.json"
    own = load(NAME).to_json() | {"name": "mine"}
    mine.write_text(json.dumps(own))
    argv = ["--definition", str(mine), "--axes", "batch_size=2,3", "-k", "100000", "--jobs", "1",
            "--checkpoint", str(checkpoint), "--out", str(out)]  # fmt: skip
    assert draws.main(argv) == 0
    rows = read_strategies(out)
    mine.unlink()
    assert {(d.name, a["batch_size"]) for d, a, _ in rows} == {("mine", 2), ("mine", 3)}
    said = f"{len(rows)} strategies of 2 workloads, 2 of which have fewer than 100000, in {out}"
    assert said in capsys.readouterr().out


def test_a_space_that_is_not_listed_is_walked(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "LISTED", 10)
    place = (NAME, {"batch_size": 2})
    rows = draws.drawn(place, checkpoint, "h200", k=20, seed=0, sharpness=2.0)
    space = space_at(NAME, place[1])
    codes = {space.code(Strategy.from_json(row)) for row in rows}
    assert len(codes) == 20 and codes <= set(space.codes.tolist())


def test_all_workloads_once_and_few_of_them_spread() -> None:
    every = draws.places([NAME], None)
    assert len(every) == len({tuple(a.items()) for _, a in every})
    some = draws.places([NAME], 3)
    assert len(some) == 3 and all(place in every for place in some)
    name = "gqa_paged_decode_h32_kv8_d128_ps1"
    kinds = {kind: draws.places([name], None, kind) for kind in ("all", "public", "own")}
    assert kinds["all"] == kinds["public"] + kinds["own"] and kinds["public"] and kinds["own"]


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "x.json")
    assert draws.main(["--definition", "nothing", "--out", out]) == 2
    assert draws.main(["--checkpoint", str(tmp_path / "no"), "--definition", NAME,
                              "--jobs", "1", "--out", out]) == 2  # fmt: skip
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "nothing" in said[0] and "cannot read the checkpoint" in said[1]
