"""The committed measurements are readable, and the table is a function of the records."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxflow.env.measurements import REFINE, SCREEN, Measurement, load_measurements
from ptxflow.env.tasks.definition import names
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.bench.choices import agreement_table, averaged, choices, delivered, untuned_table
from ptxflow.eval.bench.disagreement import describe, merge
from ptxflow.eval.bench.records import (
    Record,
    RecordError,
    RecordFile,
    libraries,
    pack,
    read_records,
    unpack,
)
from ptxflow.eval.bench.report import best_ratios, main, settled, summary
from tests.builders import gemm_record

MEASUREMENTS = Path(__file__).parents[2] / "eval" / "measurements"
FILES = sorted(MEASUREMENTS.glob("*.jsonl.xz"))
LARGE = 30_000  # bytes
MEASURED = [
    pytest.param(p, id=p.name, marks=[pytest.mark.slow] * (p.stat().st_size > LARGE)) for p in FILES
]


@pytest.mark.parametrize("path", MEASURED)
def test_committed_measurements(path: Path):
    records = read_records(path)
    assert records
    for r in records:
        assert r.ptxas and (r.status == "compile_error" or (r.gpu["name"] and r.gpu["driver"]))
        assert (r.status == "ok") == bool(r.correct)
        if r.status == "ok":
            assert r.latency_us is not None and r.peers and r.timing["sm_clock_mhz"]
            timed = libraries(r.definition, r.peers)
            assert set(r.peers) - set(timed) <= {"copy", "torch", "torch.chunked", "torch.grouped"}
            assert bool(timed) == (r.ratio is not None)
            if r.ratio is not None:
                fastest = min(timed.values())
                assert r.ratio == pytest.approx(fastest / r.latency_us["median"], rel=1e-3)
    assert {m.status for m in load_measurements([path])} == {r.status for r in records}
    once = settled(records)
    text = summary(records)
    assert f"{sum(r.status == 'ok' for r in once)} of {len(once)} right" in text


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert "no records there" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl.xz"
    broken.write_bytes(b"not xz")
    with pytest.raises(RecordError, match=r"broken\.jsonl\.xz"):
        read_records(broken)


PLACE = "gemm_n128_k2048", (("M", 6),)


def record(key: str, us: float, timing_pass: str, status: str = "ok") -> Record:
    return gemm_record(key, us, status=status, timing_pass=timing_pass)


def test_refined_times_speak_where_there_are_any():
    screens = [record("lucky", 4.0, SCREEN), record("fast", 5.0, SCREEN), record("x", 3.0, SCREEN)]
    assert best_ratios(screens) == {PLACE: 8 / 3}
    refined = [record("lucky", 6.4, REFINE), record("fast", 5.0, REFINE, "wrong")]
    assert best_ratios(settled([*screens, *refined])) == {PLACE: 8 / 6.4}
    text = summary([*screens, *refined])
    assert "2 of 3 right, 0 hangs, 1 wrong" in text and "2/3" in text and "1.25" in text


def test_times_of_a_disturbed_host_do_not_speak():
    screens = [record(key, 4.0, SCREEN) for key in "xy"]
    slow, other = record("x", 9.0, REFINE), record("y", 5.0, REFINE)
    assert slow.latency_us and settled([*screens, slow, other]) == [slow, other]
    disturbed = replace(slow, latency_us=slow.latency_us | {"q1": 4.0})
    found = settled([*screens, disturbed, other])  # timed in the same rounds
    assert [r.status for r in found] == ["ok", "ok"] and not best_ratios(found)
    later = replace(other, peers={"torch.mm": 7.9})
    assert settled([*screens, disturbed, later])[1] == later


def norm(batch: int, us: float, timing_pass: str = REFINE, **baselines: float) -> Record:
    return Record(
        "rmsnorm_h4096", {"batch_size": batch}, {"family": "rmsnorm", "choices": {"a": us}},
        str(us), "h200", "ok", correct=True, peers={"copy": 8.0, **baselines},
        latency_us={"median": us, "q1": us, "q3": us, "samples": 7},
        ratio=min(baselines.values()) / us if baselines else None, timing_pass=timing_pass,
        timing={"yardstick": "copy", "absent": {"flashinfer": "not there"}},
    )  # fmt: skip


def test_libraries_copies_and_several_families():
    libraries = {"torch.rms_norm": 12.0, "torch.compile": 10.5}
    records = [
        norm(1, 10.0, **libraries), norm(1, 12.0, **libraries), norm(1, 20.0, SCREEN),
        norm(7, 12.0, **libraries), record("fast", 5.0, REFINE),
    ]  # fmt: skip
    text = summary(records).splitlines()
    kinds = [line.split() for line in text if line.startswith(("rmsnorm  ", "gemm  "))]
    assert kinds[0][:7] == ["rmsnorm", "2", "0.96", "0.88", "1", "73%", "67%"]
    assert kinds[1] == ["gemm", "1", "1.60", "1.60", "0", "-", "-", "torch.mm", "1.60", "(1)"]
    assert "geometric mean of the best ratio of 3 workloads: 1.14; least 0.88, 1 under 0.97" in text
    each = "torch.rms_norm 1.10 (2), torch.compile 0.96 (2), torch.mm 1.60 (1)"
    assert f"beside each library (workloads): {each}" in text
    assert "bytes/s as a share of a copy's: geometric mean 73%, least 67%" in text
    assert "without flashinfer in 2 workloads: not there" in text
    rows = {cells[1]: cells[2:] for line in text if len(cells := line.split()) > 2}
    # of three kernels the median takes 12 us; the best library 10.5 in the refined rounds
    first = ["3/3", "10.0", "10.5", "1.05", "0.88", "80%", "1.05", "0.88"]
    assert rows["batch_size=1"] == first
    assert rows["batch_size=7"][3:6] == ["0.88", "0.88", "67%"] and rows["M=6"][3] == "1.60"


def decode(us: float, **baselines: Any) -> Record:
    one = norm(8, us, **baselines)
    return replace(one, definition="gdn_decode_qk16_v32_d128_k_last", ratio=None)


def test_an_eager_reference_stands_apart() -> None:
    """It is no best library, in no mean, and is labelled."""
    alone = [decode(10.0, torch=4000.0), decode(12.0, torch=4000.0)]
    (packed,) = (unpack(table) for table in pack(alone))
    assert all(r.ratio is None and r.peers["torch"] == 4000.0 for r in packed)
    text = summary(packed)
    head, row = text.splitlines()[1:3] if "SM clock" in text else text.splitlines()[:2]
    assert head.split()[-3:] == ["eager", "reference", "ratios"] and "best baseline us" in head
    assert row.split()[2:] == ["2/2", "10.0", "-", "-", "-", "80%", "400.00"]
    assert "geometric mean of the best ratio" not in text
    assert "beside an eager reference (workloads): torch 400.00 (1)" in text
    compiled: dict[str, Any] = {"torch.compile": 11.0}
    both = summary([*packed, norm(1, 10.0, **compiled)])
    assert "geometric mean of the best ratio of 1 workloads: 1.10" in both
    (line,) = (x for x in both.splitlines() if x.startswith("gdn_decode  "))
    assert line.split()[:5] == ["gdn_decode", "1", "-", "-", "-"]
    assert line.split()[7:] == ["-", "torch", "400.00", "(1)"]
    assert "eager" not in summary([norm(1, 10.0, fa2=9.0)])


def prefill(total_q: int, ratio: float) -> Record:
    axes = {"len_indptr": 2, "total_q": total_q, "num_kv_indices": 4, "num_pages": 9}
    one = replace(norm(1, 10.0, fa2=10.0 * ratio), axes=axes, ratio=ratio)
    return replace(one, definition="gqa_paged_prefill_causal_h32_kv8_d128_ps1")


def test_prefills_of_more_queries_than_keys_have_means_of_their_own() -> None:
    text = summary([prefill(4, 1.2), prefill(5, 1.5), prefill(6, 1.5)])
    rows = [line.split("  ") for line in text.splitlines() if line.startswith("gqa_paged_prefill")]
    found = {row[0]: [cell.strip() for cell in row if cell][1:3] for row in rows[-2:]}
    assert found == {
        "gqa_paged_prefill_causal": ["1", "1.20"],
        "gqa_paged_prefill_causal, queries > keys": ["2", "1.50"],
    }
    assert "of these 2 are prefills of more queries than keys: 1.50; the others 1.20" in text


def differing(batch: int, found: dict[str, Any]) -> Record:
    one = norm(batch, 10.0, fa2=9.0, fa3=12.0)
    return replace(one, timing={"yardstick": "copy", "disagree": {"fa2": found}})


def test_libraries_that_differ_count_and_are_named():
    """Also packed, and beside records from before such libraries were timed."""
    few = {"beyond": 3, "total": 2048, "error": 0.0012, "times": 5.0}
    many = {"beyond": 1800, "total": 2048, "error": 0.5, "times": 2000.0}
    old = [norm(9, 10.0, fa3=12.0)]
    records = [differing(1, {"lse": few}), differing(7, {"lse": many}), *old]
    for held in (records, [r for table in pack(records) for r in unpack(table)]):
        text = summary(held)
        assert "fa2 0.90 (2), fa3 1.20 (3)" in text and "least 0.90, 2 under" in text
        assert (
            "timed all the same: fa2 (lse: 1,803 of 4,096 elements beyond tolerance, off by 0.5 at "
            "most, 2e+03 times what it allows) in 2 of 2 workloads" in text
        )
    assert "timed all the same" not in summary(old)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([{"lse": None}, {"lse": None}], "lse: not computed"),
        (
            [{"s": {"beyond": 1, "total": 9, "error": None, "times": None}}] * 2
            + [{"s": {"beyond": 1, "total": 9, "error": 0.5, "times": 2.0}, "t": None}],
            "s: 3 of 27 elements beyond tolerance; t: not computed",
        ),
    ],
)
def test_differences_of_several_workloads(found: list[dict[str, Any]], text: str):
    assert describe(merge(found)) == text


def measured(key: str, us: float, timing_pass: str = SCREEN) -> Measurement:
    return Measurement(
        "d", {"M": 1}, "h200", "f", {"a": key}, "ok", timing_pass, us, baseline_us=8.0
    )


def test_two_campaigns_that_agree_and_that_do_not():
    a = [measured("p", 5.0), measured("q", 5.1), measured("p", 5.2, REFINE),
         measured("q", 5.3, REFINE)]  # fmt: skip
    b = [measured("p", 5.05), measured("q", 4.8), measured("p", 5.1, REFINE),
         measured("q", 5.0, REFINE)]  # fmt: skip
    assert [row["choices"] for row in choices(a, b)] == [{"a": "p"}, {"a": "q"}]
    assert [row["choices"] for row in choices(a, a)] == [{"a": "p"}]
    text = agreement_table(a, b, [a, b])
    assert "-1.89% +2.00%  +0.04%" in text
    assert "1 of 1 workloads: choices within 0.5% of each other, 0 of them the same kernel" in text
    assert text.endswith("a pair are 3.89% apart in the median, 3.89% at most")
    assert "0 of 1 workloads" in agreement_table(a, b, [b])
    short = [m for m in b if m.timing_pass == SCREEN or m.key != a[0].key]
    assert "+5.21%" in agreement_table(a, b, [short])  # by screening: not refined there
    assert "1 of 1 workloads" in (text := agreement_table(a, a, [a, b])) and "1 of them" in text
    assert "0 of 0 workloads" in agreement_table(a, b, [a[:1]])


def test_what_is_delivered() -> None:
    screened = [measured("p", 5.0), measured("q", 4.0)]
    refined = [measured("p", 5.0, REFINE), measured("q", 5.004, REFINE), measured("r", 6, REFINE)]
    p, q, r = (m.key for m in refined)
    assert delivered(screened) == q and delivered([*screened, *refined]) == p
    assert delivered(refined, q) == q  # of kernels as good as each other the default
    assert delivered(refined, r) == p and delivered([]) is delivered([], p) is None
    last = [replace(m, final_us=us) for m, us in zip(refined, (5.02, 5.0), strict=False)]
    assert delivered([*last, refined[2]]) == delivered([*last, refined[2]], p) == q
    assert delivered([replace(refined[0], status="wrong"), refined[2]], p) == r


def test_the_mean_of_runs_decides() -> None:
    def run(name: str, **us: float) -> list[Measurement]:
        return [replace(measured(k, t, REFINE), run=name, final_us=t) for k, t in us.items()]

    one, two = run("1", p=5.0, q=5.01, r=5.02), run("2", p=5.1, q=5.0)  # r was not near there
    p, q = one[0].key, one[1].key
    assert delivered(one) == p and delivered(two) == delivered([*one, *two]) == q
    screened = [replace(m, run="0", timing_pass=SCREEN, final_us=None) for m in one]
    assert delivered([*screened, *one, *two]) == q  # a run that was cut short says nothing
    text = agreement_table(one, two, [[*one, *two]])
    assert "+0.89%" in text  # the mean of -0.2% and +2.0%, of p over q


def test_tuned_beside_untuned() -> None:
    tuning = [measured("p", 5.0, REFINE), measured("q", 5.2, REFINE), measured("r", 5.3, REFINE)]
    p, q, r = (m.key for m in tuning)
    place = "d", (("M", 1),)
    joint = [measured("p", 5.1, REFINE), measured("q", 5.0, REFINE), measured("r", 5.6, REFINE)]
    assert [row["choices"] for row in choices(tuning, [], {place: r})] == [{"a": "r"}, {"a": "p"}]
    gained = untuned_table([tuning], [joint], {place: r})
    assert "+9.80%" in gained and "1 of 1 tuned kernels of 1 workloads are not slower" in gained
    lost = untuned_table([tuning], [joint], {place: q})
    assert "0 of 1 tuned" in lost and "1 slower by more than 0.5%, the slowest by 1.96%" in lost
    assert "1 of 1" in untuned_table([tuning], [joint], {place: p})  # it is the default itself
    assert "0 of 0" in untuned_table([tuning], [joint], {})


def test_ranks_choose_alike_by_the_mean_of_their_times() -> None:
    one = [measured("p", 5.0, REFINE), measured("q", 5.1, REFINE), measured("x", 1.0, SCREEN)]
    two = [measured("p", 5.4, REFINE), measured("q", 5.2, REFINE), measured("r", 4.0, REFINE)]
    p, q = one[0].key, one[1].key
    assert delivered(one) == p and delivered(two) == two[2].key  # each alone would take another
    for ranks in ([one, two], [two, one]):
        rows, said = averaged(ranks)
        assert [row["choices"] for row in rows] == [{"a": "q"}]
        assert "1 workloads, one choice each for 2 ranks: 1 of 2 times a rank's own" in said
        assert said.endswith("behind it by 2.00% at most")
    assert [row["choices"] for row in averaged([one, one])[0]] == [{"a": "p"}]
    close = [[replace(m, latency_us=5.0 if m.key == p else 5.003) for m in one[:2]]] * 2
    assert averaged(close, {("d", (("M", 1),)): q})[0][0]["choices"] == {"a": "q"}  # the default
    final = [[replace(m, final_us=us) for m, us in zip(one, (5.2, 5.1), strict=False)], one]
    assert averaged(final)[0][0]["choices"] == {"a": "p"}  # not all have it: by the refined
    assert averaged([one, []])[0] == []


def test_kernels_a_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four workloads; the second GPU waits for its first kernel."""
    runs = {"one": [("a", m, float(m)) for m in range(4)],
            "two": [("a", 0, 0.0), ("b", 1, 1.5), ("a", 2, 1.0), ("b", 3, 2.0)]}  # fmt: skip
    for name, rows in runs.items():
        with RecordFile(tmp_path / name) as file:
            for gpu, m, at in rows:
                r = gemm_record("k", 5.0, m + 1, gpu={"uuid": gpu})
                file.append(replace(r, time=f"2026-11-21T10:00:0{at:.3f}+00:00"))
            file.append(replace(file.records[-1], timing_pass=REFINE))
    assert main(["--rates", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert table == [["one", "1", "4", "3.0", "1.33", "1.000", "1.00", "1.000"],
                     ["two", "2", "4", "2.0", "2.00", "1.500", "1.60", "1.600"]]  # fmt: skip


def test_agree_names_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["--agree", "/nowhere.jsonl", "/nowhere.jsonl"]) == 2
    assert "report: /nowhere.jsonl: no such file" in capsys.readouterr().err


SAMPLES = 16
Place = tuple[str, frozenset[tuple[str, int]]]


def sampled(device: str) -> Counter[Place]:
    """Kernels of policies, by workload: different strategies that were measured on the device."""
    kernels = set()
    for path in sorted(MEASUREMENTS.glob(f"{device}-*policy.jsonl.xz")):
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
