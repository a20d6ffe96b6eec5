"""Which sub-spaces count as brute-forced, and what a replay knows of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptxflow.env.measurements import Measurement, by_workload, load_measurements
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.eval.study.search.replay import (
    Replay,
    brute_forced,
    kind_of,
    outdated,
    read_replays,
    relative_times,
)

FOLDER = Path(__file__).resolve().parents[2] / "eval" / "measurements"
HELD_OUT, SAMPLES = FOLDER / "h200-gemm-held-out.jsonl.xz", FOLDER / "h200-gemm-policy.jsonl.xz"


@pytest.fixture(scope="module")
def measured() -> list[Measurement]:
    """One workload that was brute-forced, with what later campaigns measured of it."""
    groups = by_workload(load_measurements([HELD_OUT, SAMPLES]))
    ((_, found),) = [(w, g) for w, g in groups.items() if dict(w[1]) == {"M": 17} and len(g) > 1500]
    return found


@pytest.fixture(scope="module")
def replay(measured: list[Measurement]) -> Replay:
    found = brute_forced(measured, 1500)
    assert found is not None
    return found


def test_the_campaign_that_left_no_hole_speaks_and_no_other(
    measured: list[Measurement], replay: Replay
) -> None:
    runs = {run: [m for m in measured if m.run == run] for run in {m.run for m in measured}}
    assert len(runs) > 1
    whole = max(runs.values(), key=len)
    times = relative_times(whole)
    assert len(replay.times) == len(times) < len({m.key for m in measured})
    assert replay.optimum == min(times.values()) and np.isfinite(replay.times).all()
    assert replay.kind == "held_out"
    assert replay.choices["swap"] == (1,) and replay.choices["producer_regs"] == (0,)
    assert replay.top.sum() == round(len(times) / 100)
    best = replay.space.strategy(int(replay.space.codes[np.argmin(replay.times)]))
    assert times[tuple(sorted(best.choices))] == replay.optimum


def at(definition: str, **sizes: int) -> Measurement:
    """A measurement at axes that follow from sizes, as `train.py` has them."""
    axes = axes_of(load(definition), sizes)
    return Measurement(definition, axes, "h200", "family", {}, "ok")


@pytest.mark.parametrize(
    ("definition", "trained", "held_out"),
    [
        ("gqa_paged_decode_h32_kv8_d128_ps64", {"sequences": 16, "length": 1024},
         {"sequences": 20, "length": 3000}),
        ("mla_paged_prefill_causal_h16_ckv512_kpe64_ps1",
         {"sequences": 4, "queries": 256, "prefix": 300},
         {"sequences": 3, "queries": 700, "prefix": 512}),
        ("gqa_ragged_prefill_causal_h32_kv4_d128",
         {"sequences": 4, "queries": 256, "prefix": 300},
         {"sequences": 3, "queries": 700, "prefix": 512}),
        ("dsa_topk_indexer_fp8_h64_d128_topk256_ps64", {"sequences": 4, "length": 512},
         {"sequences": 6, "length": 700}),
        ("gdn_prefill_qk16_v32_d128_k_last", {"sequences": 4, "length": 512},
         {"sequences": 6, "length": 200}),
        ("dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps1",
         {"num_tokens": 64, "num_pages": 131072}, {"num_tokens": 100, "num_pages": 262144}),
    ],
)  # fmt: skip
def test_axes_that_follow_from_sizes_are_known(
    definition: str, trained: dict[str, int], held_out: dict[str, int]
) -> None:
    """A workload that was trained must not pass for one that was held out, whatever its cache."""
    for sizes, kind in ((trained, "trained"), (held_out, "held_out")):
        one = at(definition, **sizes)
        assert kind_of(one) == kind
        cache = one.axes.get("num_pages", 0)
        larger = replace(one, axes={**one.axes, **({"num_pages": cache + 9} if cache else {})})
        if cache and "num_pages" not in sizes and "max_num_pages" not in one.axes:
            assert kind_of(larger) == kind
        longest = max(one.axes, key=lambda axis: one.axes[axis])
        other = next(a for a in ("num_kv_indices", "total_kv", "total_seq_len", "num_pages",
                                 longest) if a in one.axes)  # fmt: skip
        if other != "num_pages" or "num_pages" in sizes:
            assert kind_of(replace(one, axes={**one.axes, other: one.axes[other] + 1})) == "unseen"


def test_a_hole_disqualifies(measured: list[Measurement], replay: Replay) -> None:
    """A strategy that was not measured; one that failed was."""
    whole = [m for m in measured if m.run == max({m.run for m in measured}, key=lambda r: sum(
        m.run == r for m in measured))]  # fmt: skip
    victim = whole[len(whole) // 2].key
    assert brute_forced([m for m in whole if m.key != victim], 1500) is None
    failed = [replace(m, status="wrong") if m.key == victim else m for m in whole]
    found = brute_forced(failed, 1500)
    assert found is not None and len(found.times) == len(replay.times)
    assert np.isinf(found.times).sum() == 1 and found.slowest < np.inf
    assert (found.tflops() == 0).sum() == 1


def test_samples_alone_are_no_space() -> None:
    for group in list(by_workload(load_measurements([SAMPLES])).values())[::15]:
        assert brute_forced(group, 8) is None


def test_every_committed_space_is_found_and_named_once(replays: list[Replay]) -> None:
    assert len(replays) == len({r.name for r in replays}) == 2
    assert all(len(r.times) == len(r.space) >= 1500 for r in replays)
    assert all(not r.space.codes.flags.writeable for r in replays)


def test_choices_that_are_no_more_are_left_out_and_counted(
    measured: list[Measurement], replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a sub-space is still whole."""
    choice = max(m.choices["num_stages"] for m in measured)
    old = [replace(m, choices={**m.choices, "num_stages": 99})
           if m.choices["num_stages"] == choice else m for m in measured]  # fmt: skip
    count = sum(m.choices["num_stages"] == 99 for m in old)
    monkeypatch.setattr("ptxflow.eval.study.search.replay.load_measurements", lambda paths: old)
    assert outdated([HELD_OUT]) == {"gemm": (count, 1)}
    (found,) = read_replays([HELD_OUT], 1000)
    assert 1000 <= len(found.times) < len(replay.times)
    monkeypatch.setattr(
        "ptxflow.eval.study.search.replay.load_measurements", lambda paths: measured
    )
    assert outdated([HELD_OUT]) == {}
