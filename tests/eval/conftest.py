"""What several test modules of eval share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptxflow.eval.study.search.replay import Replay, read_replays

MEASUREMENTS = Path(__file__).resolve().parents[2] / "eval" / "measurements"


@pytest.fixture(scope="session")
def held_out() -> Path:
    """Measurements of two gemms that were brute-forced, M=17 and M=1000."""
    return MEASUREMENTS / "h200-gemm-held-out.jsonl.xz"


@pytest.fixture(scope="session")
def replays(held_out: Path) -> list[Replay]:
    return read_replays([held_out])
