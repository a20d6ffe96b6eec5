"""The work of a gdn_decode problem, and strategies as they were recorded before."""

from __future__ import annotations

from ptxflow.env.tasks.definition import load
from tests.families.gdn_decode import B200, GDN, H200, NAME, strategy


def test_work_is_counted() -> None:
    given = load(NAME)
    p = GDN.problem(given.to_json(), given.bind({"batch_size": 64}))
    elements = 64 * 32 * 128 * 128
    assert p.flops == 7 * elements and p.dtype == "bfloat16"
    assert p.bytes == 8 * elements + 2 * 64 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 8 * 32
    assert p.bound(H200) == p.bound(B200) == "memory"


def test_measurements_of_decisions_that_made_no_difference_are_kept() -> None:
    today = dict(strategy().choices)
    hints: dict[str, int | str] = {"load_cache": "evict_first", "load_prefetch": 256}
    before: dict[str, int | str] = {
        **hints,
        "store_cache": "default",
        **today,
        "gates": "after",
        "heads": 1,
        "load_ahead": 0,
    }
    assert GDN.revise(before) == today
    assert GDN.revise({**before, "heads": 2}) is None
