"""What README says of the committed records: every workload, 16 kernels of a policy, all right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ptxflow.eval.definition import names
from ptxflow.eval.records import read_records
from ptxflow.eval.workload import workloads

FOLDER = Path(__file__).resolve().parents[2] / "eval" / "measurements"
SAMPLES = 16
Place = tuple[str, frozenset[tuple[str, int]]]


@pytest.fixture(scope="module")
def sampled() -> Counter[Place]:
    """Kernels of policies, by workload: different strategies that were measured."""
    kernels = set()
    for path in sorted(FOLDER.glob("*-policy.jsonl.xz")):
        for record in read_records(path):
            assert record.status == "ok", (path.name, record.definition, record.axes, record.detail)
            kernels.add((record.definition, frozenset(record.axes.items()), record.key))
    return Counter((definition, axes) for definition, axes, _ in kernels)


@pytest.mark.parametrize("name", names())
def test_every_workload_was_sampled(name: str, sampled: Counter[Place]) -> None:
    places = {(name, frozenset(w.axes.items())) for w in workloads(name) if not w.refusal}
    missing = {place: sampled[place] for place in places if sampled[place] < SAMPLES}
    assert places and not missing
