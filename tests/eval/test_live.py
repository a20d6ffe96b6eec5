"""Searches of spaces that nobody lists: nearest strategies, what is asked, a folder played."""

from pathlib import Path

import numpy as np
import pytest

from ptxflow.env.relation import RelationSpace
from ptxflow.env.search import Search as Evolution
from ptxflow.eval.sample import live
from ptxflow.eval.study.search.unlisted import Parzen, Pattern, nearest
from tests.builders import refused
from tests.eval.test_search_play import SPACE
from tests.scripted_gpu import scripted_gpu

RELATED = RelationSpace.of(SPACE)


def test_the_nearest_strategy_is_that_of_a_list() -> None:
    rows, rng = SPACE.indices(), np.random.default_rng(0)
    for row in rng.integers(RELATED.sizes, size=(50, 4)):
        found = nearest(RELATED, row, rng)
        assert (rows == found).all(1).any()
        assert (found != row).sum() == (rows != row).sum(1).min()


@pytest.mark.parametrize("method", [Pattern(), Parzen()])
def test_a_search_asks_for_what_is_new_and_finds_what_is_fast(method: Pattern | Parzen) -> None:
    def time(codes: np.ndarray) -> np.ndarray:  # the fewer its indices, the faster; 3 columns fail
        rows = RELATED.indices(codes)
        return np.where(rows[:, 1] == 3, np.inf, 1.0 + rows.sum(1))

    best = []
    for seed in range(2):
        run, asked = method.search(RELATED, np.random.default_rng(seed)), list[int]()
        codes = next(run)
        while len(asked) < 48:
            assert len(codes) <= 4
            asked += codes.tolist()
            codes = run.send(time(codes))
        assert len(set(asked)) == len(asked) and set(asked) <= set(SPACE.codes.tolist())
        best.append(time(np.array(asked)).min())
    assert np.mean(best) <= np.sort(time(SPACE.codes))[3]


@pytest.mark.slow
def test_a_folder_is_played_gone_on_with_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "EACH", {"gqa_decode": 1})
    monkeypatch.setattr(live, "EVOLUTION", Evolution(200, 1, 4))
    monkeypatch.setattr(live, "POOL", 64)
    every = live.spread()
    assert all("decode" in name for name, _ in every)
    monkeypatch.setattr(live, "spread", lambda: every[:1])
    monkeypatch.setattr(live, "SEEDS", 2)
    scripted_gpu(monkeypatch, tmp_path)
    folder = tmp_path / "u"
    assert live.main([str(folder)]) == 0
    said = capsys.readouterr().out
    replays, runs = live.judged(folder / "records.jsonl", folder / "runs.jsonl")
    assert len(replays) == 1 and len(runs) == 9
    for run in runs:
        assert run.asked.shape == (2, 32) and all(len({*row}) == 32 for row in run.asked.tolist())
    assert "1 workloads" in said and all(f"| {r.method} |" in said for r in runs)
    before = (folder / "records.jsonl").read_bytes()
    assert live.main([str(folder)]) == 0 and (folder / "records.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "give a folder"),
        (("out", "--judge", "a", "b"), "give a folder"),
        (("out", "--definition", "gemm_n5120_k2048", "--axes", "N=1"), "no value is given for M"),
        (("--judge", "none.jsonl", "none.jsonl"), "none.jsonl"),
    ],
)
def test_bad_input_is_one_line(
    given: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(live.main, capsys, *given)
