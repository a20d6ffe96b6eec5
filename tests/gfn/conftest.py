"""Two small families, problems of theirs and a reward, so that whole distributions fit a test."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.family import Decision, Family, Fields, Problem, Rule
from ptxflow.compiler.kernels.gemm.decisions import resources
from ptxflow.env.cost import attainable_tflops
from ptxflow.env.space import Space, StrategySpace, enumerate_space
from ptxflow.eval.study import training_plots
from tests.builders import toy_family

torch.set_num_threads(1)  # tests share the machine's cores with each other


def _fits(f: Fields, problem: Problem, device: Device) -> Any:
    return f.tile * f.depth <= 8 * problem["M"]


TOY = toy_family(
    "toy",
    (
        Decision("tile", (1, 2, 4, 8), ""),
        Decision("kind", ("a", "b"), ""),
        Decision("depth", (2, 3, 4, 6, 8), ""),
        Decision("unroll", (1, 2, 4), ""),
        Decision("fused", (0, 1), ""),
    ),
    (
        Rule("the tile at this depth is larger than M allows", ("tile", "depth"), _fits),
        Rule("kind b is never unrolled", ("kind", "unroll"),
             lambda f, p, d: (f.kind == "a") | (f.unroll == 1)),
        Rule("only kind b is fused", ("kind", "fused"),
             lambda f, p, d: (f.kind == "b") | (f.fused == 0)),
    ),
    resources=resources,
)  # fmt: skip
OTHER = toy_family(
    "other",
    (Decision("width", (16, 32, 64), ""), Decision("split", (1, 2), "")),
    (Rule("narrow ones are not split", ("width", "split"),
          lambda f, p, d: (f.width > 16) | (f.split == 1)),),
    resources=resources,
)  # fmt: skip


def toy_space(m: int, family: Family = TOY) -> Space:
    work = 2.0 * m * 4096 * 4096
    traffic = 2.0 * (2 * 4096 * m + 4096 * 4096)
    problem = Problem(
        family.name, f"{family.name}_k4096", (("M", m), ("K", 4096)), "float16", work, traffic
    )
    return enumerate_space(family, problem, H200)


@dataclass(frozen=True)
class ToyReward:
    """TFLOP/s that depend on every choice and on M, between none and all that is attainable."""

    name: str = "toy"

    def tflops(self, space: StrategySpace, codes: NDArray[np.int64]) -> NDArray[np.float64]:
        rows = space.indices(codes).astype(float)
        slope = np.arange(1, rows.shape[1] + 1)
        score = np.sin(rows @ slope + np.log2(space.problem["M"])) + np.cos(rows[:, 0] * rows[:, 1])
        return (score + 2) / 4 * attainable_tflops(space.problem, space.device)


@pytest.fixture(scope="session")
def toy() -> Callable[[int], Space]:
    return toy_space


@pytest.fixture(scope="session")
def other() -> Callable[[int], Space]:
    return lambda m: toy_space(m, OTHER)


@pytest.fixture(scope="session")
def toy_reward() -> ToyReward:
    return ToyReward()


@pytest.fixture(scope="session")
def without_plots() -> Callable[[], AbstractContextManager[object]]:
    """A context in which runs draw no plots, which takes longer than a short training."""

    @contextmanager
    def context() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(training_plots, "training_plots", lambda runs, folder: [])
            yield

    return context


@pytest.fixture
def undrawn(without_plots: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    with without_plots():
        yield
