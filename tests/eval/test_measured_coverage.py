"""What README says of the committed records: 16 kernels of a policy, all right, for every workload
on an H200, and for three workloads of each definition on an H100."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ptxflow.env.tasks.definition import names
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.bench.records import read_records

FOLDER = Path(__file__).resolve().parents[2] / "eval" / "measurements"
SAMPLES = 16
Place = tuple[str, frozenset[tuple[str, int]]]


def sampled(device: str) -> Counter[Place]:
    """Kernels of policies, by workload: different strategies that were measured on the device."""
    kernels = set()
    for path in sorted(FOLDER.glob(f"{device}-*policy.jsonl.xz")):
        for record in read_records(path):
            assert record.status == "ok", (path.name, record.definition, record.axes, record.detail)
            assert record.device == device, path.name
            kernels.add((record.definition, frozenset(record.axes.items()), record.key))
    return Counter((definition, axes) for definition, axes, _ in kernels)


@pytest.fixture(scope="module")
def on_h200() -> Counter[Place]:
    return sampled("h200")


@pytest.fixture(scope="module")
def on_h100() -> Counter[Place]:
    return sampled("h100")


def places(name: str) -> set[Place]:
    return {(name, frozenset(w.axes.items())) for w in workloads(name) if not w.refusal}


@pytest.mark.parametrize("name", names())
def test_every_workload_was_sampled_on_an_h200(name: str, on_h200: Counter[Place]) -> None:
    missing = {p: on_h200[p] for p in places(name) if on_h200[p] < SAMPLES}
    assert places(name) and not missing


@pytest.mark.parametrize("name", names())
def test_three_workloads_were_sampled_on_an_h100(name: str, on_h100: Counter[Place]) -> None:
    assert sum(on_h100[p] >= SAMPLES for p in places(name)) >= 3
