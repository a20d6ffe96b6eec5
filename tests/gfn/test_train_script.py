"""train.py end to end: bad input, an interrupted run that goes on exactly, what is written."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import train
from ptxflow.gfn import checkpoint
from tests import builders

ROOT = Path(__file__).resolve().parents[2]
RUN = [
    "--preset", "demo", "--definitions", "gemm_n128_k2048", "--batch", "32", "--threads", "1",
    "--compute", "cpu", "--width", "32",
]  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    err = builders.refused(train.main, capsys, *argv)
    assert err.startswith("train.py: ")
    return err


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    """Rows of one kind, the last of each step, without what differs from run to run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = {r["step"]: r for r in map(json.loads, lines) if r["event"] == event}
    timing = "elapsed_s", "trajectories_per_s"
    return [{k: v for k, v in r.items() if k not in timing} for _, r in sorted(found.items())]


def test_help_and_bad_options_need_no_torch() -> None:
    """Nor do names that are not known: the answer is there at once."""
    tuned = ["--init", "README.md", "--export", "x", "--definition"]
    names = [
        ["--device", "b300"], ["--definitions", "rmsnrom"], ["--resume", "nowhere"],
        ["--init", "nowhere"], [*tuned, "rmsnrom", "--axes", "M=3"],
        [*tuned, "gemm_n128_k2048", "--axes", "N=3"],
    ]  # fmt: skip
    code = (
        "import sys, train\n"
        "train.parse(['--steps', '5'])\n"
        "slow = {'torch', 'gfn', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
        f"assert [train.main(argv) for argv in {names}] == [2] * {len(names)}\n"
        "assert not {'torch', 'gfn'} & set(sys.modules)\n"
    )
    done = builders.python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps", "-5"], "--steps"),
        (["--steps", "many"], "--steps"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--minutes", "inf"], "--minutes"),
        (["--tau", "nan"], "--tau"),
        (["--rate", "-1"], "--rate"),
        (["--batch", "0"], "--batch"),
        (["--batch", "1000000000"], "at most 1048576"),
        (["--width", "0"], "--width"),
        (["--threads", "0"], "--threads"),
        (["--threads", "1.5"], "--threads"),
        (["--threads", "100000"], "this process may use"),
        (["--measure", "0"], "--measure"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(1 << 64)], "--seed"),
        (["--steps", "5", "--minutes", "1"], "not both"),
        (["--resume", "x", "--tau", "0.1"], "--tau"),
        (["--compute", "cuda"], "PyTorch sees no GPU"),
        (["--device", "b300"], "b200, h200, h100"),
        (["--definitions", "gemm_n4096_k409"], "gemm_n4096_k4096"),
        (["--definitions", "rmsnrom"], "rmsnorm"),
        (["--definitions", str(ROOT / "tests/unbuilt.json")], "no kernel family"),
        (["--resume", "nowhere"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert said in refused(capsys, *argv)
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused(capsys, *RUN, "--out", str(tmp_path / "file" / "run"))
    line = refused(
        capsys, *RUN, "--out", str(tmp_path / "run"), "--export", str(tmp_path / "file" / "p")
    )
    assert "is not a folder" in line
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_processes_that_prepare_end_with_a_run_that_is_killed() -> None:
    code = (
        "import os, time\n"
        "from ptxflow.compiler.device import H200\n"
        "from ptxflow.env.reward import ModelReward, CachedReward\n"
        "from ptxflow.env.tasks import spaces\n"
        "def busy(number):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"  # at once, whoever else writes
        "    time.sleep(100)\n"
        "spaces._enumerated = busy\n"
        "spaces.spaces_of([None] * 4, H200, CachedReward(ModelReward()), 2)\n"
    )
    for how in (signal.SIGTERM, signal.SIGKILL):
        run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
        assert run.stdout is not None
        workers = [int(run.stdout.readline()) for _ in range(2)]
        run.send_signal(how)
        try:
            run.communicate(timeout=20)  # to the end of their output, which comes with their own
        except subprocess.TimeoutExpired:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
            raise


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_is_named_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, full = tmp_path / "whole", tmp_path / "full"
    argv = [*RUN, "--steps", "20"]
    assert train.main([*argv, "--out", str(whole)]) == 0
    calls = iter(range(100))

    def third(number: int) -> None:
        if next(calls) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", third)
        assert train.main([*argv, "--out", str(full)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"cannot write {full / 'checkpoint.safetensors'}: No space left on device" in error
    assert error.endswith(f"--resume {full}")
    assert 0 < checkpoint.read(full / "checkpoint.safetensors").config["step"] < 20
    with (full / "metrics.jsonl").open("a") as file:
        file.write('{"event": "st')  # as far as there was room
    assert train.main(["--resume", str(full)]) == 0
    for event in ("step", "measure", "promotion"):
        assert rows(full, event) == rows(whole, event), event
    results = [json.loads((f / "result.json").read_text()) for f in (full, whole)]
    assert results[0]["workloads"] == results[1]["workloads"]


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_ended_goes_on_for_longer(tmp_path: Path) -> None:
    assert train.main([*RUN, "--steps", "2", "--out", str(tmp_path)]) == 0
    state = tmp_path / "checkpoint.safetensors"
    before = checkpoint.read(state).config
    minutes = 10 * before["elapsed"] / 60
    assert train.main(["--resume", str(tmp_path), "--minutes", f"{minutes}"]) == 0
    assert checkpoint.read(state).config["step"] > before["step"] == 2


@pytest.mark.usefixtures("undrawn")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_metrics_that_cannot_be_written_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*RUN, "--steps", "2", "--out", str(tmp_path)]) == 0
    metrics = tmp_path / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to("/dev/full")
    said = capsys.readouterr().out
    assert "far from the target: " in said and said.endswith(f"--resume {tmp_path} --steps 8\n")
    assert train.main(["--resume", str(tmp_path), "--steps", "12"]) == 2
    assert f"cannot write {metrics}: No space left" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_stopped_by_ctrl_c_goes_on_exactly(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    without_plots: Callable[[], AbstractContextManager[object]],
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = [sys.executable, "train.py", *RUN, "--steps", "120", "--out", str(parts)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    metrics = parts / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and rows(parts, "step")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"--resume {parts}" in err.splitlines()[-1]
    stopped = rows(parts, "step")
    assert not (parts / "result.json").exists()
    assert stopped[-1]["step"] < 120, "it was to be stopped on the way"

    export = tmp_path / "policy.safetensors"
    with without_plots():
        assert train.main(["--resume", str(parts), "--export", str(export)]) == 0
    assert train.main([*RUN, "--steps", "120", "--out", str(whole)]) == 0
    assert "held-out axes" in capsys.readouterr().out
    for event in ("step", "measure", "promotion"):
        assert rows(parts, event) == rows(whole, event), event
    for row in rows(whole, "step"):
        steps = {name: own["steps"] for name, own in row["families"].items()}
        for figure in ("loss", "reward", "entropy", "masked"):
            mixed = sum(n * row["families"][f][figure] for f, n in steps.items())
            assert mixed / sum(steps.values()) == pytest.approx(row[figure])
    results = [json.loads((f / "result.json").read_text()) for f in (parts, whole)]
    assert results[0]["workloads"] == results[1]["workloads"]
    assert results[0]["trained"]["mean"] < 0.5
    last = rows(whole, "measure")[-1]
    assert last["step"] == 120
    assert last["trained"] == pytest.approx(results[1]["trained"]["mean"])
    names = {"loss.png", "distance.png", "reward.png", "entropy.png", "masked.png"}
    assert {p.name for p in (whole / "plots").iterdir()} == names
    assert export.stat().st_size < 3e6

    assert "holds a run" in refused(capsys, "--definitions", RUN[3], "--out", str(whole))
    assert "a policy alone" in refused(capsys, "--resume", str(export))
    state = whole / "checkpoint.safetensors"
    state.write_bytes(state.read_bytes()[:5000])
    assert "truncated" in refused(capsys, "--resume", str(whole))
