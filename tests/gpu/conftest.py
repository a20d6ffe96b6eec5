"""Tests here need a GPU of compute capability 9.0 and are skipped without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ptxflow.compiler.backend.runtime import GpuInfo, RuntimeUnavailable, require_gpu
from ptxflow.compiler.device import H200
from ptxflow.eval.bench.worker import Worker


@pytest.fixture(scope="session")
def gpu() -> GpuInfo:
    try:
        return require_gpu(H200)
    except RuntimeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def worker(gpu: GpuInfo) -> Iterator[Worker]:
    made = Worker()
    yield made
    made.stop()
