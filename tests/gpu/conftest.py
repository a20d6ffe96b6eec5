"""Tests here need a GPU of compute capability 9.0 and are skipped without one."""

from collections.abc import Iterator

import pytest

from ptxflow.compiler.backend.runtime import GpuInfo, RuntimeUnavailable, gpu_info
from ptxflow.eval.bench.worker import Worker


@pytest.fixture(scope="session")
def gpu() -> GpuInfo:
    try:
        info = gpu_info()
    except RuntimeUnavailable as error:
        pytest.skip(str(error))
    return info if info.capability == (9, 0) else pytest.skip(f"{info.name} runs no sm_90a")


@pytest.fixture(scope="module")
def worker(gpu: GpuInfo) -> Iterator[Worker]:
    made = Worker()
    yield made
    made.stop()
