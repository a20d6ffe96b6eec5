"""The campaign command against scripted children: what it plans, records, skips and refines."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.env.measurements import REFINE, SCREEN
from ptxflow.env.tasks import arguments
from ptxflow.env.tasks.arguments import UsageError, find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.workload import workloads as rows_of
from ptxflow.eval.bench import campaign, schedule
from ptxflow.eval.bench.candidates import sample_workload, strategies, subspace
from ptxflow.eval.bench.records import Record, read_records
from ptxflow.eval.bench.worker import Lost, Worker
from tests.builders import compiled, refused, space_at
from tests.scripted_gpu import script_gpus

NAME = "gemm_n128_k2048"
V32_INDEXER = "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64"  # in tests/definitions
HANG_M, WRONG_M, FAULT_M, REFUSED_M, BUG_M = 2, 3, 4, 5, 9

# Latency follows from the image, which holds the strategy's key and M
CHILD = """
import json, os, time
from ptxflow.eval.bench.worker import serve

def us(image, samples, m):
    key = open(image, "rb").read()
    assert key.endswith(b" M=%d" % m), "another workload's kernel"
    return {"median": 5.0 + key[0] / 16, "q1": 5.0, "q3": 25.0, "samples": samples}

def measure(job, stage):
    m = job["axes"]["M"]
    if "kernels" in job:
        stage("time")
        return {"status": "ok", "outcomes": [
            {"status": "ok", "detail": "", "check": {"correct": True, "seeds": job["seeds"]},
             "latency_us": us(k["image"], job["rounds"], m), "peers": {"torch.mm": 8.0}}
            for k in job["kernels"]]}
    stage("check")
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    if os.environ.get("FAKE_BROKEN") == os.environ["CUDA_VISIBLE_DEVICES"]:
        raise KeyError("this GPU's machinery is broken")
    if m == 12 and job["rounds"] == 7 and b"0" == open(job["image"], "rb").read()[:1]:
        raise KeyError("this kernel breaks the machinery")
    if m == 2:
        time.sleep(60)
    if m == 4:
        return {"status": "fault", "detail": "CUDA_ERROR_ILLEGAL_ADDRESS", "last": True}
    check = {"correct": m != 3, "reason": "C: off", "seeds": job["seeds"]}
    if m == 3:
        return {"status": "wrong", "detail": "C: off", "check": check}
    stage("time")
    return {"status": "ok", "check": check, "latency_us": us(job["image"], job["rounds"], m),
            "peers": {"torch.mm": 8.0}}

serve(measure, {"name": "NVIDIA H200", "uuid": "GPU-" + os.environ["CUDA_VISIBLE_DEVICES"]})
"""


def fake_compile(problem: Problem, s: Strategy, device: Device) -> schedule.Outcome:
    if problem["M"] == REFUSED_M:
        return HazardError("a race")
    if problem["M"] == BUG_M and s.key[0] in "01234567":
        raise ZeroDivisionError("a bug of a builder")
    return compiled(problem, s, device, image=f"{s.key} M={problem['M']}".encode())


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Worker]:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    workers: list[Worker] = []

    def fleet(device: Device) -> list[Worker]:
        command = [sys.executable, str(script)]
        workers[:] = [Worker(command, environment={"CUDA_VISIBLE_DEVICES": str(i)})
                      for i in range(2)]  # fmt: skip
        return workers

    script_gpus(monkeypatch, fleet, fake_compile)
    return workers


@pytest.fixture
def out(rig: list[Worker], tmp_path: Path) -> Path:
    """The records of a campaign on scripted GPUs."""
    return tmp_path / "r.jsonl"


def argv_of(out: Path, axes: str) -> list[str]:
    argv = ["--definition", NAME, "--axes", axes, "--samples", "4", "--refine", "2"]
    return [*argv, "--out", str(out)]


def call(out: Path, axes: str, *extra: str) -> int:
    return campaign.main([*argv_of(out, axes), *extra])


def passes(records: list[Record]) -> Counter[str]:
    return Counter(r.timing_pass for r in records)


def test_every_outcome_is_a_record_and_the_run_goes_on(out: Path, capsys: Any) -> None:
    assert call(out, "M=1,2,3,4,5,6", "--timeout", "0.5") == 1
    screens = [r for r in read_records(out) if r.timing_pass == SCREEN]
    by_m = {m: Counter(r.status for r in screens if r.axes["M"] == m) for m in range(1, 7)}
    expected = ["ok", "hang", "wrong", "fault", "compile_error", "ok"]
    assert by_m == {m: {status: 4} for m, status in enumerate(expected, 1)}
    shown = capsys.readouterr()
    assert shown.out.strip().endswith(
        "8 of 24 right, 4 hangs, 4 wrong, 4 faults, 4 did not compile"
    )
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in shown.err and "HazardError: a race" in shown.err


def test_the_best_are_timed_again_together(out: Path) -> None:
    assert call(out, "M=6") == 0
    records = read_records(out)
    assert passes(records) == {SCREEN: 4, REFINE: 2}
    assert [r.timing_pass for r in records[-2:]] == [REFINE, REFINE]
    by_time = sorted((r for r in records if r.timing_pass == SCREEN), key=latency)
    assert [r.key for r in records[-2:]] == [r.key for r in by_time[:2]]
    assert {r.latency_us["samples"] for r in records[-2:] if r.latency_us} == {40}


def latency(r: Record) -> float:
    assert r.latency_us is not None
    return r.latency_us["median"]


def test_a_record_holds_what_was_measured(out: Path) -> None:
    assert call(out, "M=6") == 0
    r = read_records(out)[0]
    assert r.ratio == pytest.approx(8.0 / latency(r)) and r.peers == {"torch.mm": 8.0}
    assert r.tflops == pytest.approx(2 * 6 * 128 * 2048 / latency(r) / 1e6)
    assert (r.ptxas, r.gpu["name"], r.sass_ok) == ("13.0.88", "NVIDIA H200", True)
    assert r.gpu["uuid"] in ("GPU-0", "GPU-1")
    assert r.correct and r.check["seeds"] == [1, 2]
    assert r.modelled_tflops and r.modelled_tflops > 0
    assert r.run["command"].startswith("ptxflow campaign --definition")
    assert len(r.run["code"]) == 12 and "gemm" in r.run["spaces"]


def test_a_second_run_measures_only_what_is_missing(out: Path, capsys: Any) -> None:
    second = out.with_name("s.jsonl")
    assert call(out, "M=6") == 0
    assert call(out, "M=6,7") == 0
    assert passes(read_records(out)) == {SCREEN: 8, REFINE: 4}
    assert "8 of 8 right, 0 hangs (4 of them recorded before)" in capsys.readouterr().out
    assert call(out, "M=6", "--again") == 0
    assert passes(read_records(out)) == {SCREEN: 12, REFINE: 6}
    assert call(second, "M=6,7", "--measured", str(out)) == 0
    assert read_records(second) == []
    assert call(out, "M=6", "--refine", "3") == 0  # what is screened is refined from there
    assert passes(read_records(out)) == {SCREEN: 12, REFINE: 9}


def test_workloads_spread_over_the_gpus(
    rig: list[Worker], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.05")
    assert call(out, "M=6,7,8,10") == 0
    gpus: dict[int, set[str]] = {}
    for r in read_records(out):
        gpus.setdefault(r.axes["M"], set()).add(r.gpu["uuid"])
    assert all(len(found) == 1 for found in gpus.values())  # a workload's ratios compare
    assert set.union(*gpus.values()) == {"GPU-0", "GPU-1"}
    assert [w.starts for w in rig] == [1, 1]


def test_gpus_do_not_mix_up_the_kernels_of_one_strategy(out: Path) -> None:
    chosen = sample_workload(load(NAME), {"M": 6}, H200, count=50).candidates
    rows = [
        {"definition": NAME, "axes": {"M": m}, **c.strategy.to_json()}
        for m in (6, 7)
        for c in chosen
        if not c.family.refusals(find_problem(load(NAME), {"M": m})[1], c.strategy, H200)
    ]
    path = out.with_name("s.json")
    path.write_text(json.dumps(rows))
    assert campaign.main(["--strategies", str(path), "--out", str(out)]) == 0
    assert {r.status for r in read_records(out)} == {"ok"}
    assert passes(read_records(out)) == {SCREEN: len(rows), REFINE: 2 * (32 + 1)}
    refined = {(r.axes["M"], r.key) for r in read_records(out) if r.timing_pass == REFINE}
    defaults = {row["axes"]["M"]: Strategy.from_json(row).key for row in reversed(rows)}
    assert set(defaults.items()) <= refined  # though the 32 fastest are others


def test_a_lost_gpu_hands_its_workload_to_the_other(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FAKE_BROKEN", "1")
    monkeypatch.setenv("FAKE_SECONDS", "0.05")
    assert call(out, "M=6,7,8") == 0
    assert {r.gpu["uuid"] for r in read_records(out)} == {"GPU-0"}
    assert passes(read_records(out)) == {SCREEN: 12, REFINE: 6}
    assert "lost a GPU, the others go on: KeyError: \"this GPU's" in capsys.readouterr().err


def test_a_kernel_that_breaks_the_machinery_costs_itself_alone(out: Path) -> None:
    assert call(out, "M=12", "--samples", "80") == 1
    screens = [r for r in read_records(out) if r.timing_pass == SCREEN]
    assert len(screens) == 80 and {r.key[0] == "0" for r in screens} == {True, False}
    assert all((r.status == "fault") == (r.key[0] == "0") for r in screens)
    assert all("failed twice: KeyError" in r.detail for r in screens if r.status == "fault")


def test_without_any_gpu_left_the_run_ends(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(schedule.Worker, "start", broken_start)
    assert call(out, "M=6") == 2
    assert capsys.readouterr().err.strip().endswith("campaign: no GPU here")


def test_a_gpu_that_is_gone_is_not_the_kernels_fault(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It is measured by another at once; where there is none it stays to be measured."""
    gone, runs = {"1"}, Worker.run

    def run(self: Worker, job: Any, timeout: float) -> Any:
        if self.environment["CUDA_VISIBLE_DEVICES"] in gone:
            raise Lost("the host is gone")
        return runs(self, job, timeout)

    monkeypatch.setattr(Worker, "run", run)
    assert call(out, "M=6,7") == 0
    assert {(r.status, r.gpu["uuid"]) for r in read_records(out)} == {("ok", "GPU-0")}
    gone.add("0")
    assert call(out, "M=6,8") == 2
    assert "the host is gone" in capsys.readouterr().err
    assert {r.axes["M"] for r in read_records(out)} == {6, 7}


def broken_start(self: Worker) -> None:
    raise schedule.WorkerError("no GPU here")


def test_a_time_limit_refines_what_is_screened_and_goes_on_later(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    limited = ("--samples", "60", "--time-limit", "3")
    assert call(out, "M=6", *limited) == campaign.STOPPED
    held = passes(read_records(out))
    assert 0 < held[SCREEN] < 60 and held[REFINE] == 2
    assert "strategies are not measured; the same command goes on" in capsys.readouterr().out
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert call(out, "M=6", "--samples", "60") == 0
    assert passes(read_records(out))[SCREEN] == 60
    assert len({r.key for r in read_records(out)}) == 60


def test_a_bug_in_a_builder_costs_its_own_strategies_alone(out: Path, capsys: Any) -> None:
    assert call(out, f"M={BUG_M}", "--samples", "40") == 1
    status = {r.key: r.status for r in read_records(out)}
    assert len(status) == 40
    assert all((s == "compile_error") == (k[0] in "01234567") for k, s in status.items())
    assert "ZeroDivisionError: a bug of a builder" in capsys.readouterr().err


def test_strategies_from_files(out: Path, capsys: Any) -> None:
    (candidate,) = sample_workload(load(NAME), {"M": 6}, H200, count=1, seed=9).candidates
    row = {"definition": NAME, "axes": {"M": 6}, **candidate.strategy.to_json()}
    path, listed = out.with_name("s.json"), out.with_name("w.json")
    path.write_text(json.dumps([row]))
    assert campaign.main(["--strategies", str(path), "--out", str(out)]) == 0
    assert {r.key for r in read_records(out)} == {candidate.strategy.key}
    listed.write_text(json.dumps([
        {"definition": NAME, "axes": {"M": 6}, "strategies": "s.json"},
        {"definition": NAME, "axes": {"M": [6, 7]}, "samples": 2, "fix": {"tile_k": 64}},
    ]))  # fmt: skip
    assert campaign.main(["--workloads", str(listed), "--out", str(out)]) == 0
    assert Counter(r.axes["M"] for r in read_records(out) if r.timing_pass == SCREEN) == {
        6: 3, 7: 2,
    }  # fmt: skip
    row["choices"]["tile_k"] = 77
    path.write_text(json.dumps(row))
    assert campaign.main(["--strategies", str(path), "--out", str(out)]) == 2
    assert "is not legal on h200: tile_k must be one of" in capsys.readouterr().err


def listed_row(name: str, axes: dict[str, int]) -> dict[str, Any]:
    space = space_at(name, axes)
    strategy = space.strategy(int(space.codes[0])).to_json()
    return {"definition": name, "axes": axes, **strategy}


def test_a_strategy_of_earlier_decisions_is_todays(tmp_path: Path, capsys: Any) -> None:
    """MLA prefill before it was cut into parts, as records of it are read."""
    name = "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64"
    axes = {"batch_size": 3, "len_indptr": 4, "num_kv_indices": 102, "num_pages": 143,
            "total_q": 300}  # fmt: skip
    axes = {a: n for a, n in axes.items() if a in load(name).var_axes}
    space = space_at(name, axes)
    f = space.fields()
    today = space.strategy(int(space.codes[(f.parts == 1).argmax()]))
    old = today.to_json()
    for gone in ("parts", "dependent", "sum_chunks"):
        del old["choices"][gone]
    path = tmp_path / "chosen.json"
    path.write_text(json.dumps([{"definition": name, "axes": axes, **old}]))
    ((_, _, read),) = arguments.read_strategies(path)
    assert read == today and read.key == today.key
    assert campaign.main(["--strategies", str(path), "--plan", "--out", str(tmp_path / "r")]) == 0
    assert "1 strategies to measure" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "axes", "changes", "message"),
    [
        (NAME, {"M": 64}, {"tile_k": None}, "a strategy of gemm that lacks decision 'tile_k'"),
        (NAME, {"M": 64}, {"tile": 3}, "a strategy of gemm that has the unknown decision 'tile'"),
        ("rmsnorm_h512", {"batch_size": 8}, {"residency": None},
         "a strategy of rmsnorm that lacks decision 'residency'"),
        ("gdn_decode_qk16_v32_d128_k_last", {"batch_size": 8}, {"heads": 2},
         "today's gdn_decode has no strategy that is like this one"),
    ],
)  # fmt: skip
def test_a_strategy_without_a_like_is_one_line(
    tmp_path: Path, capsys: Any, name: str, axes: dict[str, int], changes: Any, message: str
) -> None:
    row = listed_row(name, axes)
    choices = {**row["choices"], **changes}
    row["choices"] = {n: c for n, c in choices.items() if c is not None}
    path = tmp_path / "chosen.json"
    path.write_text(json.dumps([listed_row(name, axes), row]))
    out = str(tmp_path / "r.jsonl")
    assert campaign.main(["--strategies", str(path), "--plan", "--out", out]) == 2
    assert capsys.readouterr().err == f"campaign: {path}, strategy 2: {message}\n"


def test_a_strategy_of_another_family_is_one_line(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "chosen.json"
    path.write_text(json.dumps([{**listed_row(NAME, {"M": 64}), "family": "gem"}]))
    assert campaign.main(["--strategies", str(path), "--plan"]) == 2
    assert capsys.readouterr().err.endswith(f"{NAME} is built by gemm, not 'gem'\n")


def test_a_definition_that_comes_with_its_strategies(tmp_path: Path, capsys: Any) -> None:
    """DeepSeek-V3.2's indexer, which is not among the 46: rows bring the definition themselves."""
    definition = load(Path(__file__).parents[1] / f"definitions/{V32_INDEXER}.json")
    axes = {"batch_size": 64, "max_num_pages": 128, "num_pages": 8192}
    space = arguments.find_space(*find_problem(definition, axes), H200)
    rows = [
        {"definition": definition.to_json(), "axes": axes, **space.strategy(int(c)).to_json()}
        for c in space.codes[:4]
    ]
    path = tmp_path / "chosen.json"
    path.write_text(json.dumps(rows))
    assert campaign.main(["--strategies", str(path), "--plan", "--out", str(tmp_path / "r")]) == 0
    shown = capsys.readouterr().out
    assert f"{V32_INDEXER} batch_size=64 max_num_pages=128 num_pages=8192: 4, 4 to" in shown


def test_the_plan_needs_no_gpu(tmp_path: Path, capsys: Any) -> None:
    fixed = ("--fix", "tile_k=64", "--all", "--plan")
    assert call(tmp_path / "r.jsonl", "M=64", *fixed) == 0
    space = space_at(NAME, {"M": 64})
    size = int((space.fields().tile_k == 64).sum())
    shown = capsys.readouterr().out
    assert f"{NAME} M=64: {size} of {size} in the sub-space, {size} to measure" in shown


def test_what_is_not_named_follows_from_the_axes(tmp_path: Path, capsys: Any) -> None:
    def planned(*argv: str) -> list[str]:
        out = str(tmp_path / "r.jsonl")
        assert campaign.main([*argv, "--samples", "1", "--plan", "--out", out]) == 0
        return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()[:-1]]

    assert {line.split("_")[0] for line in planned("--axes", "M=64")} == {"gemm"}
    rows = planned("--axes", "batch_size=64")
    assert "rmsnorm_h4096 batch_size=64" in rows and not any("gemm" in row for row in rows)
    own = planned("--definition", "rmsnorm_h512")
    assert own == [
        f"rmsnorm_h512 batch_size={w.axes['batch_size']}" for w in rows_of("rmsnorm_h512")
    ]


def test_a_subspace_is_what_its_decisions_say() -> None:
    space = space_at(NAME, {"M": 64})
    at = space.decisions[0].name, space.decisions[-1].name
    fix = {name: [str(c) for c in space.decisions[i].choices[:2]]
           for name, i in zip(at, (0, -1), strict=True)}  # fmt: skip
    inside = {s.key for s in strategies(space, subspace(space, fix))}
    for s in strategies(space, space.codes[:: max(1, len(space) // 500)]):
        assert (s.key in inside) == all(str(getattr(s, n)) in fix[n] for n in at)
        assert space.strategy(space.code(s)) == s
    with pytest.raises(UsageError, match="no decision 'colour'"):
        subspace(space, {"colour": ["red"]})
    with pytest.raises(UsageError, match="has no choice '77'"):
        subspace(space, {at[0]: ["77"]})


def test_fixed_decisions_are_read() -> None:
    assert arguments.parse_fix(["a=1,b=x|y", "c=2"]) == {"a": ["1"], "b": ["x", "y"], "c": ["2"]}
    for text in ("a", "a=", "=1", "a=1|", "a=1,a=2"):
        with pytest.raises(UsageError):
            arguments.parse_fix([text])


def test_uniform_samples_are_distinct_and_depend_on_the_seed_alone() -> None:
    def keys(seed: int) -> list[str]:
        drawn = sample_workload(load(NAME), {"M": 128}, H200, count=20, seed=seed)
        return [c.strategy.key for c in drawn.candidates]

    assert len(set(keys(0))) == 20
    assert keys(0) == keys(0) != keys(1)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--axes", "M=1,0"], "axis 'M' must be a positive integer, not '0'"),
        (["--definition", "nothing"], "unknown definition 'nothing'"),
        (["--device", "h900"], "unknown device 'h900'"),
        (["--definition", "rmsnorm_h512"], "unknown axis 'M'; the axes are batch_size"),
        (["--fix", "colour=red"], "no decision 'colour'"),
        (["--strategies", "/nowhere.json"], "/nowhere.json: No such file"),
        (["--workloads", "/nowhere.json"], "/nowhere.json: No such file"),
        (["--out", "/proc/r.jsonl"], "/proc/r.jsonl"),
    ],
)
def test_bad_input_is_one_line(out: Path, capsys: Any, extra: list[str], message: str) -> None:
    assert message in refused(campaign.main, capsys, *argv_of(out, "M=6"), *extra)
    assert not out.exists()


@pytest.mark.usefixtures("driverless")
def test_no_gpu_is_one_line(tmp_path: Path, capsys: Any) -> None:
    said = refused(campaign.main, capsys, *argv_of(tmp_path / "r.jsonl", "M=6"))
    assert said.startswith("campaign: no NVIDIA driver on this machine: libcuda.so.1 cannot be")
