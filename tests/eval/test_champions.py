"""What a knowledge base keeps of workloads, and how sessions begin at it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.device import H100, H200
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.kernels import FAMILIES
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.study.ablation import MEASUREMENTS
from ptxflow.eval.tune import knowledge, session
from ptxflow.eval.tune.benches import OnGpu
from ptxflow.eval.tune.champions import COMMITTED, Champion, alternating, legal, nearest, of_records
from ptxflow.eval.tune.knowledge import Entry, Knowledge, from_lines, to_lines
from tests.scripted_gpu import scripted_gpu


@pytest.fixture(scope="module")
def committed() -> list[Champion]:
    return [r for r in knowledge.read(COMMITTED) if isinstance(r, Champion)]


def space_of(name: str, **axes: int) -> RelationSpace:
    family, problem = find_problem(load(name), axes)
    return relate(family, problem, H200)


def champion(name: str, m: int, us: float, strategy: Strategy, device: str = "h200") -> Champion:
    choices = dict(strategy.choices)
    return Champion(name, {"M": m}, device, strategy.family, choices, us, 0.5)


def drawn(space: RelationSpace, n: int) -> list[Strategy]:
    codes = space.sample_uniform(n, np.random.default_rng(0))
    return [space.strategy(int(c)) for c in codes]


def test_a_champion_is_itself_where_it_is_legal_and_near_where_not() -> None:
    space = space_of("gemm_n256_k7168", M=64)
    for strategy in drawn(space, 20):
        assert legal(space, dict(strategy.choices)) == strategy
        split = {**dict(strategy.choices), "num_stages": 99, "unknown": 3}
        assert space.code(legal(space, split)) >= 0
    few = space.given({"num_stages": (2, 3), "split_k": (1,)})
    for strategy in drawn(space.given({"num_stages": (6,)}), 20):
        found = legal(few, dict(strategy.choices))
        assert found.split_k == 1 and found.num_stages in (2, 3)
        if strategy.split_k == 1 and found.tile_k == strategy.tile_k:
            assert found.num_stages == 3  # the nearest of the row


def test_every_committed_champion_leads_to_a_strategy(committed: list[Champion]) -> None:
    assert FAMILIES.keys() - {r.family for r in committed} <= {"gemm_fp8", "gemm_epilogue"}
    assert {r.device for r in committed} == {"h100", "h200"} and len(committed) > 1400
    for name in sorted({r.family for r in committed}):
        rows = [r for r in committed if r.family == name]
        family, problem = find_problem(load(rows[0].definition), rows[0].axes)
        for own in {family.name: family, "wide": family.wide}.values():
            space = relate(own, problem, H200)
            for row in rows[:: max(1, len(rows) // 5)]:
                assert space.code(legal(space, row.choices)) >= 0


def test_committed_champions_are_those_of_the_records(committed: list[Champion]) -> None:
    found = of_records([MEASUREMENTS / "h100-policy.jsonl.xz"])
    assert found == [r for r in committed if r.device == "h100"]
    assert all(r.share > 0 and r.us > 0 for r in found)


def test_the_nearest_workloads_come_first() -> None:
    space = space_of("gemm_n4096_k4096", M=64)
    a, b, c, d = drawn(space, 4)
    rows = [
        champion("gemm_n4096_k4096", 8192, 9.0, d),
        champion("gemm_n6144_k4096", 128, 9.0, c),
        champion("gemm_n4096_k4096", 64, 9.0, b, "h100"),
        champion("gemm_n4096_k4096", 64, 9.0, a),
        champion("gemm_n4096_k4096", 65, 9.0, a),
        replace(champion("gemm_n4096_k4096", 64, 9.0, d), family="moe"),
        champion("no such definition", 64, 9.0, d),
    ]
    assert nearest(space, rows, 9) == [rows[3], rows[2], rows[1], rows[0]]
    assert nearest(space, rows, 1) == [rows[3]] and nearest(space, rows, 0) == []
    assert nearest(replace(space, device=H100), rows, 2) == [rows[2], rows[3]]
    assert alternating([a, b], [c, a, d], 3) == [a, c, b]
    assert alternating([], [c, d], 3) == [c, d]


def test_a_base_keeps_the_fastest_of_each_workload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = drawn(space_of("gemm_n256_k7168", M=64), 2)
    slow, fast = champion("gemm_n256_k7168", 64, 9.0, a), champion("gemm_n256_k7168", 64, 8.0, b)
    other = champion("gemm_n256_k7168", 64, 12.0, a, "h100")
    base, entry = Knowledge(tmp_path / "k.sqlite"), Entry("s", "m", "h200", 1, 1, 0.1, 0.01)
    assert base.learn("one", "h200", [], [slow]) and base.learn("two", "h200", [], [fast])
    assert not base.learn("two", "h200", [], [replace(fast, us=1.0)])
    base.merge([slow, other, entry])
    assert base.champions() == [other, fast]
    assert from_lines(to_lines(base.champions()), "x") == base.champions()
    assert knowledge.main(["show", str(base.path)]) == 0
    assert "gemm_n256_k7168  M=64  h200    8.00   50.0%" in capsys.readouterr().out
    packed, again = tmp_path / "k.jsonl.xz", Knowledge(tmp_path / "again.sqlite")
    assert knowledge.main(["pack", str(packed), str(base.path), str(base.path)]) == 0
    assert knowledge.main(["import", str(again.path), str(packed)]) == 0
    assert again.champions() == [other, fast]
    assert again.entries() == [replace(entry, tried=2, helped=2, gain=0.2, squares=0.02)]


def test_a_session_begins_at_champions_and_leaves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(session, "deliver", lambda *_: None)  # kernels are names here
    monkeypatch.setattr(OnGpu, "alike", lambda *_: False)
    base = tmp_path / "k.sqlite"

    def played(m: int, name: str, *more: str) -> tuple[dict[str, Any], list[Champion]]:
        state = tmp_path / name
        common = ["--definition", "gemm_n256_k7168", "--axes", f"M={m}", "--profiler", "no"]
        assert session.main([*common, "--budget", "8", "--state", str(state), *more]) == 0
        kept = knowledge.read(state / "knowledge.jsonl")
        return json.loads((state / "session.json").read_text()), [
            r for r in kept if isinstance(r, Champion)
        ]

    assert played(64, "without", "--knowledge", "no")[1] == []
    ended, known = played(64, "with", "--knowledge", str(base))
    assert len(known) == 4 and {r.family for r in known} == {"gemm"}
    (learnt,) = Knowledge(base).champions()
    assert learnt.axes == {"M": 64} and learnt.us == pytest.approx(
        ended["champion"]["us"], abs=1e-3
    )
    _, next_known = played(64, "next", "--knowledge", str(base))
    assert learnt in next_known
    assert next_known[0].axes == {"M": 64}
