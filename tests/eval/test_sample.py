"""sample.py: what it writes, that the same seed writes the same bytes, and what it refuses.

Policies here are untrained networks, and compilation is replaced; what is under test is the script.
"""

import errno
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sample
from ptxflow.compiler.backend import ptxas
from ptxflow.compiler.compilation import CompiledKernel, Job
from ptxflow.compiler.device import DEVICES, H200, Device
from ptxflow.compiler.errors import HazardError
from ptxflow.env.features import describe_device
from ptxflow.env.relation import relate
from ptxflow.env.tasks import arguments
from ptxflow.env.tasks.arguments import UsageError, find_problem, read_strategies
from ptxflow.env.tasks.definition import load, names, own_names
from ptxflow.eval.bench.attention_workloads import Batch, axes_of
from ptxflow.eval.sample import draws, pipeline
from ptxflow.eval.sample.draws import default_checkpoint
from ptxflow.gfn import inference
from ptxflow.gfn.checkpoint import read
from tests.builders import absent, compiled, python, refused, space_at, untrained

UNBUILT = Path(__file__).parents[1] / "unbuilt.json"  # a definition that no kernel family builds

NAME = "gemm_n128_k2048"
Outcomes = list[CompiledKernel | Exception]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "gemm-h200.safetensors"
    return untrained(path, space_at(NAME, {"M": 17}))


def fake_compile(jobs: Sequence[Job], device: Device, workers: int | None) -> Outcomes:
    about: dict[str, Any] = {"techniques": {"HGMMA": 4}, "checks": ("no hazard for trips 0, 1",)}
    return [compiled(p, s, device, f"// {s.key}\n", **about) for p, s in jobs]


def argv_of(checkpoint: Path, out: Path) -> list[str]:
    argv = ["--definition", NAME, "--axes", "M=17", "--device", "h200", "-k", "3", "--no-emulate"]
    return [*argv, "--out", str(out), "--checkpoint", str(checkpoint), "--measure", "no"]


def call(checkpoint: Path, out: Path, *extra: str) -> int:
    return sample.main([*argv_of(checkpoint, out), *extra])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "compile_all", fake_compile)


@pytest.mark.usefixtures("built")
def test_the_same_seed_writes_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    assert call(checkpoint, tmp_path / "a") == 0
    assert call(checkpoint, tmp_path / "b") == 0
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    assert call(checkpoint, tmp_path / "b", "--seed", "1") == 0  # replaces an earlier run
    assert contents(tmp_path / "b").keys() != first.keys()
    kinds = {"".join(Path(name).suffixes) for name in first if name.startswith("rank-")}
    assert kinds == {".ptx", ".cubin", ".strategy.json", ".report.md"}
    assert {"report.md", "summary.json", "solution.json", "samples.png"} < first.keys()


@pytest.mark.usefixtures("built")
def test_what_is_written_agrees_with_itself(checkpoint: Path, tmp_path: Path) -> None:
    assert call(checkpoint, tmp_path / "a") == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    kernels = summary["kernels"]
    assert len({k["key"] for k in kernels}) == 3 and summary["ranked_by"] == "model"
    predicted = [k["predicted_tflops"] for k in kernels]
    assert predicted == sorted(predicted, reverse=True)
    flops = find_problem(load(NAME), {"M": 17})[1].flops
    assert [k["predicted_us"] * k["predicted_tflops"] * 1e6 for k in kernels] == [
        pytest.approx(flops)
    ] * 3
    assert summary["bound_by"] == "bandwidth" and all(
        k["predicted_share_of_bound"] == pytest.approx(floor / k["predicted_us"])
        for floor in [summary["floors_us"]["memory"]]
        for k in kernels
    )
    solution = json.loads((tmp_path / "a" / "solution.json").read_text())
    texts = {source["path"]: source["content"] for source in solution["sources"]}
    assert texts[f"{kernels[0]['key']}.ptx"] == f"// {kernels[0]['key']}\n"
    report = (tmp_path / "a" / f"{kernels[0]['file']}.report.md").read_text()
    for piece in ("no hazard for trips 0, 1", "HGMMA", "registers | 168", "TMEM columns", "policy"):
        assert piece in report
    rows = read_strategies(tmp_path / "a" / "summary.json")
    assert [(d.name, axes["M"], s.key) for d, axes, s in rows] == [
        (NAME, 17, k["key"]) for k in kernels
    ]


@pytest.mark.parametrize("refused", [1, 3], ids=["the first", "all"])
def test_a_refused_strategy_is_told_and_fails_the_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, refused: int
) -> None:
    def refusing(jobs: Sequence[Job], device: Device, workers: int | None) -> Outcomes:
        built = fake_compile(jobs[refused:], device, workers)
        return [*(HazardError("a race") for _ in jobs[:refused]), *built]

    monkeypatch.setattr(pipeline, "compile_all", refusing)
    assert call(checkpoint, tmp_path / "a") == 1
    assert "HazardError: a race" in capsys.readouterr().err
    assert "HazardError: a race" in (tmp_path / "a" / "report.md").read_text()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("source", "drawn"), [("policy", 3), ("reward", 0), ("both", 2)], ids=lambda v: str(v)
)
def test_half_from_the_policy_and_half_the_best_by_the_reward(
    checkpoint: Path, tmp_path: Path, capsys: Any, source: str, drawn: int
) -> None:
    assert call(checkpoint, tmp_path / "a", "--from", source) == 0
    kernels = json.loads((tmp_path / "a" / "summary.json").read_text())["kernels"]
    assert sum(k["from"] == "policy" for k in kernels) == drawn and len(kernels) == 3
    # the policy is untrained: no draw is among the best of thousands
    best = [k["place"] for k in kernels if k["from"] == "reward"]
    assert best == list(range(1, 4 - drawn)) or len(set(best)) < len(best)  # ties share a place
    lines = capsys.readouterr().out.splitlines()[2:5]
    assert [line.split()[2] for line in lines] == [k["from"] for k in kernels]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("source", ["policy", "both"])
def test_a_space_that_is_not_listed_is_walked(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, source: str
) -> None:
    """And what is said of the best is what is known."""
    size = len(space_at(NAME, {"M": 17}))
    monkeypatch.setattr(arguments, "LISTED", 100)
    monkeypatch.setattr(arguments, "enumerate_space", absent)
    monkeypatch.setattr(inference, "log_probs", absent)
    monkeypatch.setattr(inference, "POOL", 40)
    assert call(checkpoint, tmp_path / "a", "--from", source) == 0
    told = (
        rf"{size:,} strategies are valid: [\d,]+ that a search of the reward asked for and 40 draws"
    )
    assert re.search(told, capsys.readouterr().err)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["space"] == size and 40 < summary["scored"] <= 80
    kernels = summary["kernels"]
    assert [k["from"] for k in kernels].count("policy") == {"policy": 3, "both": 2}[source]
    assert len({k["key"] for k in kernels}) == 3 and all(1 <= k["place"] <= 80 for k in kernels)
    assert source == "policy" or min(k["place"] for k in kernels) == 1
    text = (tmp_path / "a" / "report.md").read_text()
    assert (
        f"3 of {size:,} valid strategies" in text
        and "the best of the strategies that were found" in text
    )


@pytest.mark.usefixtures("built")
def test_of_a_wide_space_that_can_be_listed_the_models_best_are_taken(
    checkpoint: Path, tmp_path: Path
) -> None:
    argv = ["--definition", "gqa_paged_prefill_causal_h32_kv8_d128_ps1", "--space", "wide"]
    argv += ["-k", "2", "--device", "h200", "--measure", "no", "--no-emulate"]
    argv += ["--checkpoint", str(checkpoint), "--out", str(tmp_path / "out")]
    assert sample.main(argv) == 0
    kernels = json.loads((tmp_path / "out" / "summary.json").read_text())["kernels"]
    assert all(k["from"] == "reward" for k in kernels) and "parts" in kernels[1]["choices"]


@pytest.mark.usefixtures("built")
def test_the_models_best_that_a_search_finds_in_a_wide_space(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    """Of those that do not name what is implied; strategies that a listed space has not."""
    assert call(checkpoint, tmp_path / "out", "--space", "wide", "--axes", "M=1063") == 0
    assert "that a search of the reward asked for are scored" in capsys.readouterr().err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    chosen = [k["choices"] for k in summary["kernels"]]
    listed = space_at(NAME, {"M": 1063}).family
    assert all(c.keys() == {d.name for d in listed.decisions} for c in chosen)
    assert any(c["tile_n"] % 16 for c in chosen)
    times = np.sort([k["predicted_us"] for k in summary["kernels"]])
    assert (np.diff(np.log(times)) > 1e-5).all()  # none alike
    argv = ("--definition", "rmsnorm_h4096", "--axes", "batch_size=17", "--space", "wide")
    assert "--space wide: rmsnorm has no wide space" in refused(sample.main, capsys, *argv)


@pytest.mark.usefixtures("built")
def test_a_policy_of_a_wide_space_draws_from_it_where_asked_or_given(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Half of the strategies are the reward's."""
    family = space_at(NAME, {"M": 17}).family
    space = relate(family.wide, space_at(NAME, {"M": 1063}).problem, H200)
    wide = untrained(tmp_path / "wide.safetensors", space)
    monkeypatch.setattr(draws, "WIDE", wide)
    monkeypatch.setattr(inference, "POOL", 40)

    def sampled(name: str, *extra: str) -> tuple[list[str], bool]:
        argv = ["--definition", NAME, "--axes", "M=1063", "--device", "h200", "-k", "4"]
        argv += ["--no-emulate", "--measure", "no", "--out", str(tmp_path / name)]
        assert sample.main([*argv, *extra]) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        chosen = [k["choices"] for k in summary["kernels"]]
        assert all(c.keys() == {d.name for d in family.decisions} for c in chosen)
        beyond = {d.name: d.choices for d in family.decisions}
        new = any(c[n] not in beyond[n] for c in chosen for n in beyond)
        return sorted(k["from"] for k in summary["kernels"]), new

    both = ["policy", "policy", "reward", "reward"]
    asked = sampled("asked", "--space", "wide")
    assert asked == sampled("given", "--checkpoint", str(wide)) == (both, True)
    assert sampled("told", "--space", "wide", "--temperature", "0.05") == (both, True)
    assert sampled("other", "--checkpoint", str(checkpoint)) == (both, False)
    assert sampled("usual") == (both, False)
    capsys.readouterr()
    argv = ("--definition", NAME, "--axes", "M=17", "--device", "h200", "--space", "wide",
            "--checkpoint", str(checkpoint), "--from", "policy")  # fmt: skip
    assert "no policy of wide gemm: take --from reward" in refused(sample.main, capsys, *argv)


def test_what_is_more_than_there_is_is_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def stop(*args: Any, **options: Any) -> Any:
        raise UsageError(f"{len(args[3].places)} chosen")

    monkeypatch.setattr(pipeline, "compile_and_rank", stop)
    monkeypatch.setattr(sample, "MOST", 10**6)
    assert call(checkpoint, tmp_path / "a", "-k", "1000000") == 2
    size = len(space_at(NAME, {"M": 17}))
    told, chosen = capsys.readouterr().err.splitlines()
    assert told == f"-k 1000000: taking all {size:,} valid strategies"
    assert chosen == f"sample: {size} chosen"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["-k", "0"], "-k must be from 1 to 10000, not 0"),
        (["-k", "100000"], "-k must be from 1 to 10000, not 100000"),
        (["--jobs", "0"], "--jobs must be positive, not 0"),
        (["--from", "reward", "--sharpness", "1"], "--sharpness is of the policy's draws"),
    ],
)
def test_counts_that_cannot_be(extra: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        sample.main(["--definition", NAME, *extra])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_the_definitions_are_listed(capsys: Any) -> None:
    assert sample.main(["--definition", "list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert listed == [*names(), *own_names()]


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = "set -o pipefail; $0 sample.py --definition list | true"
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], cwd=Path(sample.__file__).parent,
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


def own(folder: Path, name: str, free: str) -> Path:
    """A definition with another axis variable."""
    data = load(name).to_json()
    data |= {"name": "mine", "axes": {**data["axes"], free: {"type": "var"}}}
    data.pop("reference")
    (folder / "mine.json").write_text(json.dumps(data))
    return folder / "mine.json"


def test_axes_of_one_s_own_have_defaults_that_fit(tmp_path: Path, capsys: Any) -> None:
    gemm = load(own(tmp_path, NAME, "N"))
    assert sample.choose_axes(gemm, []) == {"M": 1024, "N": 128}
    pages = load(own(tmp_path, "gqa_paged_decode_h32_kv4_d128_ps64", "num_qo_heads"))
    usual = sample.choose_axes(pages, [])
    assert usual["num_qo_heads"] == 32 and usual["len_indptr"] == usual["batch_size"] + 1
    assert "--axes not given: taking" in capsys.readouterr().err


def test_missing_axes_are_named_at_once_with_values_that_fit() -> None:
    definition = load("gqa_paged_decode_h32_kv4_d128_ps64")
    with pytest.raises(UsageError) as refused:
        sample.choose_axes(definition, ["batch_size=3", "num_pages=9"])
    said, _, example = str(refused.value).partition("; such as --axes ")
    assert said.endswith("no value is given for len_indptr, num_kv_indices")
    fits = sample.choose_axes(definition, example.split())
    assert fits["len_indptr"] == fits["batch_size"] + 1


def test_names_and_axes_are_refused_before_torch_is_imported() -> None:
    code = "import sys, sample; " \
        "sample.main(['--definition', 'gemm_n128']); " \
        "sample.main(['--definition', 'gemm_n128_k2048', '--axes', 'Q=3']); " \
        "sample.main(['--definition', 'gemm_n128_k2048', '--device', 'a100']); " \
        "print('torch' in sys.modules)"  # fmt: skip
    done = python("-c", code)
    assert done.stdout == "False\n" and done.stderr.count("\n") == 3, done.stderr


def test_features_of_devices_have_gain_0_in_every_network() -> None:
    """As sample.py says where a policy serves another device."""
    of_device = [f"device.{name}" for name in describe_device(H200)]
    for path in {default_checkpoint(d) for d in DEVICES}:
        for policy in read(path).network.policies:
            gains = dict(zip(policy.shape.features, policy.gain, strict=True))
            assert [gains[name] for name in of_device] == [0.0] * len(of_device), path


def custom(folder: Path, **changes: Any) -> Path:
    data = load(NAME).to_json() | {"name": "mine"} | changes
    path = folder / "mine.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.usefixtures("built")
def test_a_definition_of_one_s_own(checkpoint: Path, tmp_path: Path) -> None:
    assert call(checkpoint, tmp_path / "a", "--definition", str(custom(tmp_path))) == 0
    ((definition, _, _), *_) = read_strategies(tmp_path / "a" / "summary.json")
    assert definition.name == "mine"  # the file can be measured without the definition's file


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--definition", "gemm_n128"], "unknown definition 'gemm_n128'; near names: gemm_n128_k2"),
        (["--axes", "M=0"], "axis 'M' must be a positive integer, not '0'"),
        (["--axes", "M=-4"], "axis 'M' must be a positive integer, not '-4'"),
        (["--axes", "M=many"], "axis 'M' must be a positive integer, not 'many'"),
        (["--axes", "M"], "axis 'M' must have the form NAME=VALUE"),
        (["--axes", "M=1,2"], "axis 'M' has 2 values"),
        (["--axes", "M=1", "M=2"], "axis 'M' is given twice"),
        (["--axes", "Q=3"], "unknown axis 'Q'; the axes are M, N, K"),
        (["--axes", "N=64", "M=1"], "axis 'N' is the constant 128, not 64"),
        (["--axes", "N=128"], "no value is given for M; such as --axes M=1024"),
        (["--device", "a100"], "unknown device 'a100'; known: b200, h200, h100"),
        (["--definition", str(UNBUILT)], "no kernel family builds"),
        (["--checkpoint", "/nowhere/p.safetensors"], "No such file"),
        (["--measure", "yes"], "--measure yes: "),
        (["--out", "/proc/x"], "--out /proc/x cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capsys: Any, extra: list[str], message: str
) -> None:
    if extra[0] == "--measure" and sample.choose_gpu("auto", "h200") is not None:
        pytest.skip("this machine has a GPU")
    argv = (*argv_of(checkpoint, tmp_path / "a"), *extra)
    assert message in refused(sample.main, capsys, *argv)
    assert list(tmp_path.iterdir()) == []


def test_no_ptxas_is_one_line(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv(ptxas.OVERRIDE, str(tmp_path / "missing"))
    assert call(checkpoint, tmp_path / "a") == 2
    assert "is not an executable file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON, line 1"),
        ("[]", "the definition must be a JSON object"),
        ('{"name": "x"}', '"op_type" must be a non-empty string'),
    ],
)
def test_malformed_definitions(
    checkpoint: Path, tmp_path: Path, capsys: Any, text: str, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert call(checkpoint, tmp_path / "a", "--definition", str(path)) == 2
    assert message in capsys.readouterr().err


def test_a_gemm_that_the_family_cannot_build(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    raw = load(NAME).to_json()
    for tensor in (*raw["inputs"].values(), *raw["outputs"].values()):
        tensor["dtype"] = "float32"
    assert call(checkpoint, tmp_path / "a", "--definition", str(custom(tmp_path, **raw))) == 2
    assert "must share one dtype of float16, bfloat16" in capsys.readouterr().err


@pytest.mark.usefixtures("built")
def test_foreign_output_folders_are_left_alone(
    checkpoint: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    assert call(checkpoint, tmp_path / "a") == 2
    assert "holds files that are not of an earlier run" in capsys.readouterr().err
    assert contents(tmp_path / "a") == {"thesis.tex": b"years of work"}
    assert call(checkpoint, tmp_path / "a" / "thesis.tex") == 2


def test_a_crash_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*args: Any) -> Outcomes:
        raise MemoryError

    monkeypatch.setattr(pipeline, "compile_all", crash)
    with pytest.raises(MemoryError):
        call(checkpoint, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("built")
def test_a_full_disk_is_one_line_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert call(checkpoint, tmp_path / "a") == 2
    assert capsys.readouterr().err == "sample: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def test_truncated_checkpoint(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "p.safetensors"
    path.write_bytes(checkpoint.read_bytes()[:-100])
    assert call(path, tmp_path / "a") == 2
    assert str(path) in capsys.readouterr().err


def test_every_device_has_a_default_checkpoint_by_name() -> None:
    found = {default_checkpoint(d) for d in DEVICES}
    assert {path.name for path in found} == {"b200.safetensors", "h200.safetensors"}
    assert all(path.exists() for path in found)


def test_help_and_usage_need_no_heavy_imports() -> None:
    code = "import sys, sample; sample.arguments(['--definition', 'x']); " \
        "print('torch' in sys.modules or 'numpy' in sys.modules)"  # fmt: skip
    done = python("-c", code)
    assert done.stdout == "False\n", done.stderr
    for argv in (["--definition", NAME, "-k", "0"], ["--definition", NAME, "-k", "x"], []):
        assert python("sample.py", *argv).returncode == 2


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
def test_definitions_of_128_heads_are_sampled(
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
