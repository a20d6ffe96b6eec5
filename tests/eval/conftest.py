"""What several test modules of eval share."""

import contextlib
import ctypes
from pathlib import Path

import pytest

from ptxflow.eval.study import plots
from ptxflow.eval.study.search.replay import Replay, read_replays

MEASUREMENTS = Path(__file__).resolve().parents[2] / "eval" / "measurements"


@pytest.fixture
def driverless() -> None:
    """Skips on a machine that has NVIDIA's driver."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("this machine has a driver")


@pytest.fixture
def one_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports with a single plot, as all of them take longer than a small evaluation."""
    monkeypatch.setattr(plots, "PLOTS", {"gap": plots.PLOTS["gap"]})


@pytest.fixture(scope="session")
def held_out() -> Path:
    """Measurements of two gemms that were brute-forced, M=17 and M=1000."""
    return MEASUREMENTS / "h200-gemm-held-out.jsonl.xz"


@pytest.fixture(scope="session")
def replays(held_out: Path) -> list[Replay]:
    return read_replays([held_out])
