"""Definitions of 128 query heads are sampled with the policies that come with ptxflow."""

from __future__ import annotations

from pathlib import Path

import pytest

import sample
from ptxflow.env.tasks.arguments import read_strategies
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.attention_workloads import Batch, axes_of
from ptxflow.eval.sample import pipeline
from tests.eval.test_sample import fake_compile

FOLDER = Path(__file__).parents[1] / "definitions"
CHUNK = Batch(4, 4096, queries=64)  # of a prefill
CASES = [
    ("mla_paged_decode_h128_ckv512_kpe64_ps1", "b200", Batch(16, 4096)),
    ("mla_paged_decode_h128_ckv512_kpe64_ps64", "h200", Batch(64, 1024)),
    ("mla_paged_prefill_causal_h128_ckv512_kpe64_ps1", "h200", CHUNK),
    ("mla_paged_prefill_causal_h128_ckv512_kpe64_ps64", "b200", CHUNK),
    ("dsa_sparse_attention_h128_ckv512_kpe64_topk2048_ps64", "h200", None),
]


@pytest.mark.parametrize(("name", "device", "batch"), CASES, ids=[c[0] for c in CASES])
def test_strategies_are_sampled(
    name: str, device: str, batch: Batch | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "compile_all", fake_compile)
    path, out = FOLDER / f"{name}.json", tmp_path / "out"
    axes = axes_of(load(path), batch) if batch else {"num_tokens": 64, "num_pages": 8462}
    argv = ["--definition", str(path), "--axes", *(f"{n}={v}" for n, v in axes.items())]
    argv += ["--device", device, "-k", "4", "--measure", "no", "--no-emulate", "--out"]
    assert sample.main([*argv, str(out)]) == 0
    rows = read_strategies(out / "summary.json")
    assert len({s.key for _, _, s in rows}) == 4
    for definition, found, _ in rows:
        assert definition.name == name and found["num_qo_heads"] == 128
        assert {n: found[n] for n in axes} == axes
