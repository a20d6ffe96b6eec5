"""Output folders: nothing is left of runs that end badly, also of those that are killed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ptxflow.eval.sample.folder import OutputFolder

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, time
from pathlib import Path
from ptxflow.eval.sample.folder import OutputFolder
with OutputFolder(Path(sys.argv[1]), "marker") as folder:
    (folder / "half").write_text("half")
    print("written", flush=True)
    time.sleep(100)
"""


def killed(out: Path, how: signal.Signals) -> None:
    """A run that a signal ends when half of it is written."""
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(out)], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == b"written\n"
    run.send_signal(how)
    run.wait()
    run.stdout.close()


def test_a_terminated_run_leaves_nothing(tmp_path: Path) -> None:
    killed(tmp_path / "out", signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    other = tmp_path / ".out-notes"  # somebody else's
    other.mkdir()
    killed(tmp_path / "out", signal.SIGKILL)
    assert len(list(tmp_path.iterdir())) == 2
    with OutputFolder(tmp_path / "out", "marker") as folder:
        (folder / "marker").write_text("whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out-notes", "out"]


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    with OutputFolder(tmp_path / "out", "marker") as first:
        (first / "marker").write_text("first")
        with OutputFolder(tmp_path / "out", "marker") as second:
            (second / "marker").write_text("second")
        assert first.exists() and (tmp_path / "out" / "marker").read_text() == "second"
    assert (tmp_path / "out" / "marker").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_result_that_was_moved_away_and_not_replaced_comes_back(tmp_path: Path) -> None:
    """As a run that is killed between the two leaves it."""
    old = tmp_path / ".out.ptxflow-abcdefgh-old"
    old.mkdir()
    (old / "marker").write_text("of yesterday")
    with pytest.raises(RuntimeError), OutputFolder(tmp_path / "out", "marker"):
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "marker").read_text() == "of yesterday"
