"""sample.py --library: what is chosen and written, that it goes on where it stopped, what it
refuses. The policy is untrained, the reward the analytic model, and nothing is compiled.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import sample
from ptxflow.compiler.compilation import CompiledKernel, Job
from ptxflow.compiler.device import H100, H200, Device
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.compiler.library.manifest import Manifest, read_manifest
from ptxflow.env.measurements import SCREEN
from ptxflow.env.reward import ModelReward
from ptxflow.env.space import digits, sizes_of
from ptxflow.env.tasks.definition import load, names, parse
from ptxflow.eval.bench.measurer import Measurer
from ptxflow.eval.bench.records import Record, read_records
from ptxflow.eval.sample import held_out, library, library_run
from ptxflow.eval.sample.library_timing import GpuTiming, spread
from ptxflow.eval.sample.looks import Judge, Look
from ptxflow.eval.sample.ranges import bounds, find_ranges, looks, spaced
from ptxflow.eval.sample.solution import read_solution
from ptxflow.eval.sample.time_model import SCREENED, TimeModel
from ptxflow.eval.sample.widened import WideReward, around, nearest, widened
from tests.builders import LAUNCH, compiled, refused, space_at, untrained
from tests.scripted_gpu import MADE, scripted_gpu
from tests.simulated_gpu import Rehearsal, Simulated

NAME, AXIS, HIGH = "rmsnorm_h128", "batch_size", 2048


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("policy") / "p", space_at(NAME, {AXIS: 17}))


def text_of(problem: Problem, strategy: Strategy, device: Device) -> Any:
    return f"// {strategy.key}\n", LAUNCH


def fake_compile(jobs: Sequence[Job], device: Device, workers: int | None) -> list[Any]:
    return [compiled(p, s, device, f"// {s.key}\n") for p, s in jobs]


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "compile_all", fake_compile)
    monkeypatch.setattr(library, "text_of", text_of)
    for name, value in (
        ("LOOKS", 8),
        ("CELLS", 24),
        ("BETWEEN", 12),
        ("HELD_OUT", 3),
        ("EVERY", 500),
    ):
        monkeypatch.setattr(library, name, value)


def argv(checkpoint: Path, out: Path, *more: str) -> list[str]:
    given = ["--definition", NAME, "--axes", f"{AXIS}=1:{HIGH}", "--device", "h200", "--measure",
             "no", "--no-emulate", "-k", "4", "--checkpoint", str(checkpoint)]  # fmt: skip
    return [*given, "--library", str(out), *more]


def judge() -> Judge:
    ranges, _ = find_ranges(load(NAME), [f"{AXIS}=1:{HIGH}"])
    return Judge(family("rmsnorm"), H200, ranges, ModelReward())


def codes_of(found: Manifest, at: Judge) -> np.ndarray:
    """The members' codes, whether they are legal anywhere or not."""
    out = []
    for member in found.members:
        row = [d.choices.index(member.strategy["choices"][d.name]) for d in at.family.decisions]
        out.append(int(np.dot(row, at.space({AXIS: 17}).strides[1:])))
    return np.array(out)


def test_each_size_is_served_by_the_best_of_few(checkpoint: Path, tmp_path: Path) -> None:
    assert sample.main(argv(checkpoint, tmp_path / "a", "--members", "3")) == 0
    found, at = read_manifest(tmp_path / "a"), judge()
    assert 1 < len(found.members) <= 3 and found.ranges == {AXIS: (1, HIGH)}
    codes, low = codes_of(found, at), 1
    for high in bounds(at.ranges, 24, looks(at.ranges, 8))[AXIS]:
        assert len({found.serving({AXIS: n}) for n in range(low, high + 1)}) == 1
        serving = found.serving({AXIS: high})
        for size in {low, high, (low + high) // 2}:
            assert np.isfinite(at.seconds({AXIS: size}, codes)[serving])
        middle = round((low * high) ** 0.5)
        both = np.log([at.seconds({AXIS: size}, codes) for size in {high, middle}]).mean(0)
        assert both[serving] <= both.min() + 1e-9
        low = high + 1
    assert [p.name for p in tmp_path.iterdir()] == ["a"]  # no state is left
    page = (tmp_path / "a" / "library.md").read_text()
    for piece in (found.members[0].key, "## Sizes looked at", f"| {HIGH} |", "checkpoint"):
        assert piece in page
    assert (tmp_path / "a" / "library.png").is_file()
    made = read_solution(tmp_path / "a" / "solution.json")
    texts = {source["path"]: source["content"] for source in made["sources"]}
    assert Manifest.from_json(json.loads(texts["manifest.json"])) == found


def test_it_goes_on_where_it_stopped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = list[int]()
    look = Judge.look

    def counting(self: Judge, sizes: Any, *rest: Any) -> Look:
        if len(made) == 5:
            made.append(0)
            raise KeyboardInterrupt
        made.append(sizes[AXIS])
        return look(self, sizes, *rest)

    monkeypatch.setattr(Judge, "look", counting)
    assert sample.main(argv(checkpoint, tmp_path / "a")) == 130
    assert "the same command goes on" in capsys.readouterr().err
    (state,) = tmp_path.iterdir()
    state.write_text(state.read_text() + '{"sizes": {"batch')  # as a kill would leave it
    assert sample.main(argv(checkpoint, tmp_path / "a")) == 0
    assert len(made) == len(set(made))  # nothing was looked at twice
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    before = read_manifest(tmp_path / "a").dispatch
    assert sample.main(argv(checkpoint, tmp_path / "a")) == 0  # replaces it
    assert read_manifest(tmp_path / "a").dispatch == before


def test_a_refused_kernel_is_replaced_and_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    told = list[str]()

    def first_refused(jobs: Sequence[Job], device: Device, workers: int | None) -> list[Any]:
        made: list[CompiledKernel | Exception] = fake_compile(jobs, device, workers)
        if not told:
            told.append(jobs[0][1].key)
            made[0] = HazardError("a race")
        return made

    monkeypatch.setattr(library, "compile_all", first_refused)
    assert sample.main(argv(checkpoint, tmp_path / "a")) == 0
    assert f"refused {told[0]}: HazardError: a race" in capsys.readouterr().err
    assert told[0] not in {m.key for m in read_manifest(tmp_path / "a").members}


def test_a_member_serves_no_size_for_which_its_text_is_another(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(problem: Problem, s: Strategy, device: Device) -> Any:
        other = s.choices and int(s.key[0], 16) % 2 and problem[AXIS] > 100
        return f"// {s.key}{' for many' * bool(other)}\n", LAUNCH

    monkeypatch.setattr(library, "text_of", texts)
    assert sample.main(argv(checkpoint, tmp_path / "a")) == 0
    found = read_manifest(tmp_path / "a")
    for size in range(128, HIGH + 1):
        assert int(found.members[found.serving({AXIS: size})].key[0], 16) % 2 == 0


def test_times_are_measured_once_where_there_is_a_gpu(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = scripted_gpu(monkeypatch, tmp_path)
    gpu = SimpleNamespace(name="NVIDIA H200")
    monkeypatch.setattr(sample, "choose_gpu", lambda *_: gpu)
    monkeypatch.setattr(library, "LOOKS", 3)
    monkeypatch.setattr(library, "EDGES", 2)
    out = tmp_path / "a"
    try:
        assert sample.main(argv(checkpoint, out, "--members", "2")) == 0
    finally:
        worker.stop()
    found = read_manifest(out)
    records = read_records(tmp_path / "a.records.jsonl")
    right = {r.key: r.latency_us["median"] for r in records if r.status == "ok" and r.latency_us}
    # times are of the key alone: one kernel is the best at all sizes it can serve
    assert all(m.key in right and m.key[0] not in "df" for m in found.members)
    assert min(right.values()) == min(right[m.key] for m in found.members)
    assert "by measurement on NVIDIA H200" in (out / "library.md").read_text()
    assert max(MADE.values()) == 1  # compiled once, for all sizes
    first, before = len(records), sum(MADE.values())
    assert sample.main(argv(checkpoint, out, "--members", "2")) == 0
    again = read_records(tmp_path / "a.records.jsonl")
    screened = [r.identity for r in again if r.timing_pass == SCREEN]
    assert len({*screened}) == len(screened) and len(again) < 1.2 * first  # nothing is done twice
    assert sum(MADE.values()) < before + 5


def test_what_one_machine_looks_at_another_measures_and_a_third_chooses_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(library, "LOOKS", 3)
    monkeypatch.setattr(library, "EDGES", 0)
    out, kept = tmp_path / "a", ["--members", "2", "--looks", str(tmp_path / "looks")]
    given, look = argv(checkpoint, out, *kept), Judge.look
    assert sample.main(given) == 0
    monkeypatch.setattr(Judge, "look", None)  # nothing is looked at anew
    recorded = [*given, "--measure", "recorded"]
    capsys.readouterr()
    assert "no measurements" in refused(sample.main, capsys, *recorded)
    worker = scripted_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(sample, "choose_gpu", lambda measure, _: (
        SimpleNamespace(name="NVIDIA H200") if measure == "yes" else None))  # fmt: skip
    records = tmp_path / "a.records.jsonl"
    try:
        assert sample.main([*given, "--measure", "yes", "--time-limit", "1e-9"]) == 0
        first = len(records.read_text())  # of one size
        assert sample.main([*given, "--measure", "yes"]) == 0
        assert 0 < first < len(records.read_text()) / 2
        monkeypatch.setattr(Judge, "look", look)
        monkeypatch.setattr(held_out, "require_gpu", lambda _: SimpleNamespace(name="NVIDIA H200"))
        judged = [out, "--sizes", 5, "-k", 4, "--checkpoint", checkpoint, *kept[2:]]
        capsys.readouterr()
        assert held_out.main([*map(str, judged), "--time-limit", "1e-9"]) == 2
        assert "none of these sizes was measured" in capsys.readouterr().err
        assert held_out.main([*map(str, judged)]) == 0
    finally:
        worker.stop()
    said = capsys.readouterr().out
    assert held_out.main([*map(str, judged), "--measure", "recorded"]) == 0
    assert capsys.readouterr().out == said
    assert held_out.main([str(tmp_path / "a.held-out.jsonl")]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1] == said.splitlines()[-1]
    rows = [
        line.split("|") for line in said.splitlines() if line[:3] == "|  " or line[2:3].isdigit()
    ]
    known = {row[AXIS] for m in read_manifest(out).members for row in m.provenance["us"]}
    sizes = {int(row[1]) for row in rows}
    assert len(sizes) == 5 and not sizes & known and max(sizes) <= HIGH
    for row in rows:  # times are of the key alone, the library's 16 us
        key = read_manifest(out).members[int(row[2])].key
        assert float(row[3]) == pytest.approx(5 + int(key[:4], 16) / 4096, abs=0.01)
        assert float(row[5]) == pytest.approx(16 / float(row[3]), rel=0.01)
        assert float(row[6]) <= float(row[3])
    measured, text = read_manifest(out), records.read_text()
    assert sample.main(recorded) == 0
    found = read_manifest(out)
    assert found.dispatch == measured.dispatch and records.read_text() == text
    assert [m.key for m in found.members] == [m.key for m in measured.members]
    assert found.members[0].provenance["times_by"] == "measurement on NVIDIA H200"


def model_of(at: Judge) -> tuple[TimeModel, np.ndarray]:
    """Errors that strategies share, measured at a few sizes, and two strategies' codes."""
    model, codes = TimeModel(at), at.space({AXIS: 64}).codes[:40]
    for size in (40, 48, 64, 100, 128, 160):
        known = codes[np.isfinite(at.seconds({AXIS: size}, codes))]
        off = 1.3 + 0.1 * (known % 3) + 0.05 * np.log2(size)
        model.add({AXIS: size}, known, at.seconds({AXIS: size}, known) * off, SCREENED)
    return model, codes


def test_what_is_measured_tells_what_is_not() -> None:
    at = judge()
    model, codes = model_of(at)
    left, own = model.left_out()
    assert np.abs(left).mean() < 0.4 * np.abs(own).mean()
    log, sd = model.table([{AXIS: 64}, {AXIS: 80}], codes)
    said = np.log([at.seconds({AXIS: size}, codes) for size in (64, 80)])
    right = np.log(1.3 + 0.1 * (codes % 3) + 0.05 * np.log2([[64], [80]]))
    assert np.abs(log - said - right).max() < 0.03
    assert sd[0].max() < sd[1].min() and sd[1].max() < 0.1
    before = len(model.seen)
    model.add({AXIS: 64}, codes[:1], 2 * np.exp(log[0, :1]), 0.001)  # more exact
    model.add({AXIS: 64}, codes[1:2], 2 * np.exp(log[0, 1:2]), 0.5)  # less
    after = model.table([{AXIS: 64}], codes[:2])[0][0]
    assert len(model.seen) == before
    assert after[0] - log[0, 0] > 0.6 and abs(after[1] - log[0, 1]) < 0.1


def test_a_race_leaves_what_the_reward_was_wrong_of() -> None:
    """What it likes best is slow."""
    at = judge()
    own = {d.name: i for i, d in enumerate(at.family.decisions)}["unroll"]

    def look(sizes: dict[str, int]) -> Look:
        return at.look(sizes, lambda s: np.zeros(len(s)), lambda p: np.arange(4), "both")

    every = np.unique([c for n in (1, 8, 64, 300, HIGH) for c in look({AXIS: n}).codes])
    held = digits(every, sizes_of(at.family))[:, own]
    first = digits(np.array(look({AXIS: 64}).best[:1]), sizes_of(at.family))[0, own]
    liked = every[held == first]

    def seconds(sizes: dict[str, int], codes: list[int]) -> Any:
        some = np.array(codes)
        return at.seconds(sizes, some) * np.where(np.isin(some, liked), 1.4, 1.0)

    gpu = Simulated(at, seconds)
    timing = GpuTiming(at, cast(Measurer, gpu), 2, {}, 10, clock=lambda: gpu.spent)
    said, measured = (Rehearsal(at, look, 2, timing=t).choice() for t in (None, timing))
    serving = [{c.code_at({AXIS: n}) for n in (1, 5, 64, 99, 500, HIGH)} for c in (said, measured)]
    assert serving[0] <= {*liked.tolist()} and not serving[1] & {*liked.tolist()}
    assert 5 < sum(timing.spent.values()) < 12


def test_what_others_recorded_is_a_candidate() -> None:
    at = judge()
    code = int(at.space({AXIS: 64}).codes[-1])
    strategy = at.space({AXIS: 64}).strategy(code)
    best = at.seconds({AXIS: 64}, at.space({AXIS: 64}).codes).min()
    record = Record(NAME, {AXIS: 64}, strategy.to_json(), strategy.key, "h200", "ok",
                    latency_us={"median": best * 0.9e6}, gpu={"name": "NVIDIA H200"})  # fmt: skip
    unknown = replace(record, strategy=record.strategy | {"choices": {"no": 1}}, key="1")
    wrong = replace(record, axes={AXIS: HIGH + 1}), replace(record, device="b200")
    timing = GpuTiming(at, None, 2, {}, elsewhere=[record, unknown, *wrong])
    found, times = timing([{AXIS: 64}], np.array([], np.int64))
    assert found.tolist() == [code] and times[0, 0] == pytest.approx(best * 0.9, rel=0.05)
    failed = replace(record, status="wrong", latency_us=None)
    again = GpuTiming(at, None, 2, {failed.identity: failed}, elsewhere=[record])
    assert not len(again([{AXIS: 64}], np.array([], np.int64))[0])
    assert record.key in again.faulty[code]


def test_times_on_a_like_device_are_carried_over_by_the_model() -> None:
    at = judge()
    codes = at.space({AXIS: HIGH}).codes[-1:]
    strategy, us = at.space({AXIS: HIGH}).strategy(int(codes[0])), 7.0
    record = Record(NAME, {AXIS: HIGH}, strategy.to_json(), strategy.key, "h100", "ok",
                    latency_us={"median": us}, gpu={"name": "NVIDIA H100"})  # fmt: skip
    timing = GpuTiming(at, None, 2, {}, elsewhere=[record])
    found, times = timing([{AXIS: HIGH}], np.array([], np.int64))
    here, there = (Judge(at.family, device, at.ranges, ModelReward()).seconds({AXIS: HIGH}, codes)
                   for device in (H200, H100))  # fmt: skip
    assert here[0] < there[0] and found.tolist() == codes.tolist()
    assert times[0, 0] == pytest.approx(us * 1e-6 * here[0] / there[0], rel=0.05)
    own = GpuTiming(at, None, 2, {record.identity: record})  # of this library's own records
    assert not own.model.seen


def test_definitions_of_the_same_sizes_are_alike() -> None:
    half = load("gemm_n4096_k4096").to_json() | {"name": "llama", "op_type": "gemm_epilogue"}
    half["inputs"]["residual"] = dict(half["outputs"]["C"])
    ranges, _ = find_ranges(parse(half), ["M=1:64"])
    at = Judge(family("gemm_epilogue"), H200, ranges, ModelReward())
    assert [name for name in ("llama", *names()) if at.alike(name)] == ["gemm_n4096_k4096"]


def test_any_first_few_are_spread_over_all() -> None:
    assert spread(1) == [0] and spread(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(spread(52)) == list(range(52))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--axes", f"{AXIS}=0:8"], "must be a positive integer, not '0'"),
        (["--axes", f"{AXIS}=9:8"], "the range ends before it begins"),
        (["--axes", f"{AXIS}=1:"], "must have the form NAME=VALUE"),
        (["--axes", f"{AXIS}=1:2:3"], "must be a positive integer, not '2:3'"),
        (["--axes", f"{AXIS}=1,2"], "must be a range"),
        (["--axes", "hidden_size=64:128"], "'hidden_size' is the constant 128, and has no range"),
        (["--axes", "Q=1:3"], "unknown axis 'Q'; the variable axes are batch_size"),
        (["--axes", f"{AXIS}=1:2", f"{AXIS}=1:2"], "axis 'batch_size' is given twice"),
        (["--members", "0"], "--members is of --library, from 1 to 64"),
        (["--out", "x"], "--out and --stop-at are of one workload's kernels"),
        (["--library", "/proc/x"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: Any, extra: list[str], message: str
) -> None:
    given = argv(checkpoint, tmp_path / "a", *extra)
    assert message in refused(sample.main, capsys, *given)
    assert list(tmp_path.iterdir()) == []


def test_foreign_folders_are_left_alone(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    refused(sample.main, capsys, *argv(checkpoint, tmp_path / "a"))
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["thesis.tex"]


def test_axes_that_follow_others_are_not_free() -> None:
    decode = load("gqa_paged_decode_h32_kv8_d128_ps64")
    ranges, said = find_ranges(decode, ["len_indptr=2:65"])
    assert ranges.free["batch_size"] == (1, 64) and set(ranges.free) == {
        "batch_size", "num_kv_indices"
    }  # fmt: skip
    assert "taking num_kv_indices=" in said
    axes = ranges.axes({"batch_size": 7, "num_kv_indices": 100})
    assert axes["len_indptr"] == 8 and axes["num_pages"] >= 100
    assert ranges.served["len_indptr"] == (2, 65) and "num_pages" not in ranges.served
    totals = [row["num_kv_indices"] % 7 for row in ranges.patterns(
        {"batch_size": 7, "num_kv_indices": 100})]  # fmt: skip
    assert totals == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="give 'batch_size' alone"):
        find_ranges(decode, ["batch_size=1:64", "len_indptr=2:64"])


def test_every_definition_has_ranges_that_bind() -> None:
    for name in names():
        definition = load(name)
        ranges, _ = find_ranges(definition, [])
        places = looks(ranges, 64)
        assert 1 < len(places) <= 64
        for sizes in (places[0], places[-1]):
            definition.bind(ranges.axes(sizes))
        cells = bounds(ranges, 512)
        assert np.prod([len(ends) for ends in cells.values()]) <= 512
        assert all(ends[-1] == ranges.free[n][1] for n, ends in cells.items())


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 2), (3, 1000), (17, 16384)])
def test_places_ascend_and_hold_powers_of_two(low: int, high: int) -> None:
    found = spaced(low, high, 8, 64)
    assert found[0] == low and found[-1] == high
    assert all(0 < b - a <= 64 for a, b in itertools.pairwise(found))
    assert {n for e in range(15) if low <= (n := 1 << e) <= high} <= set(found)


def test_the_judge_says_what_the_space_says() -> None:
    at = judge()
    space = at.space({AXIS: 100})
    assert at.legal({AXIS: 100}, space.codes).all()
    every = np.random.default_rng(0).integers(0, int(space.strides[0]), 20_000)
    every[:100] = space.codes[:100]
    assert (at.legal({AXIS: 100}, every) == np.isin(every, space.codes)).all()


def test_what_a_run_is_by_its_digest(checkpoint: Path, tmp_path: Path) -> None:
    ranges = judge().ranges
    one = library_run.Asked(tmp_path, ranges, H200, checkpoint)
    tools, norm = library_run._tools(one, ModelReward()), family("rmsnorm")
    other = library_run.Asked(tmp_path, ranges, H200, checkpoint, k=9)
    kept = library_run.Asked(tmp_path, ranges, H200, checkpoint, looks=tmp_path / "looks")
    of = [library_run._digest(asked, tools, norm) for asked in (one, other, kept)]
    assert len(set(of)) == 3
    tools["compiler"] = "changed"  # by another commit candidates of a kept file stay candidates
    of += [library_run._digest(asked, tools, norm) for asked in (one, kept)]
    assert of[3] != of[0] and of[4] == of[2]


def test_wide_strategies_stand_around_listed_ones() -> None:
    ranges, _ = find_ranges(load("gemm_n256_k7168"), ["M=1:64"])
    listed, model = family("gemm"), ModelReward()
    narrow = Judge(listed, H200, ranges, model)
    wide = Judge(listed.wide, H200, ranges, WideReward(model, listed))
    sizes = {"M": 40}
    space = narrow.space(sizes)
    some = space.codes[:: len(space) // 50]
    coded = widened(some, listed)
    keys = [space.strategy(int(c)).key for c in some]
    assert [wide.some(sizes, coded[[i]]).strategy(int(c)).key for i, c in enumerate(coded)] == keys
    assert (nearest(coded, listed) == some).all() and wide.legal(sizes, coded).all()
    assert wide.seconds(sizes, coded) == pytest.approx(narrow.seconds(sizes, some))
    near = around(coded[:1], listed, 1)
    rows = wide.some(sizes, near).indices()
    assert coded[0] in near and ((rows != wide.some(sizes, coded[:1]).indices()).sum(1) <= 1).all()
    look = wide.look(sizes, lambda space: np.zeros(len(space)), lambda _: np.arange(4), "both")
    best = np.array(look.best)
    assert wide.legal(sizes, best).all() and len(set(look.best)) == len(best)
    assert wide.seconds(sizes, best[:2]).min() <= look.seconds  # the best of the listed ones
    assert not np.isin(best, widened(space.codes, listed)).all()


def test_what_few_wide_strategies_do_is_looked_at() -> None:
    """One kernel, without sums of chunks, is best where all sequences are short."""
    decode = family("gqa_decode")
    ranges, _ = find_ranges(load("gqa_paged_decode_h32_kv8_d128_ps64"), ["num_kv_indices=1:64"])
    judged = Judge(decode.wide, H200, ranges, WideReward(ModelReward(), decode))
    sizes = {"batch_size": 137, "num_kv_indices": 6}
    look = judged.look(sizes, lambda space: np.zeros(len(space)), lambda _: np.arange(4), "both")
    best = judged.some(sizes, np.array(look.best[:1])).strategy(look.best[0])
    assert decode.launch(judged.problem(sizes), best, H200).then == ()
    assert judged.seconds(sizes, np.array(look.best[:1])) < look.seconds
