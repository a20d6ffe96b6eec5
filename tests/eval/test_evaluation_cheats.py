"""Kernels that cheat in the ways that a comparison of methods would not notice by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.checking import Bench, Verdict, check
from ptxflow.eval.bench.own_work import Borrowed, own_work
from ptxflow.eval.bench.references import source
from ptxflow.eval.bench.session import case_of

DEFINITION = load("gemm_n128_k2048")
CPU = torch.device("cpu")
Kernel = Callable[[Mapping[str, Tensor]], None]


def verdict(kernel: Kernel, m: int) -> Verdict:
    bench = Bench(case_of(DEFINITION, {"M": m}, CPU), CPU, (1, 2))
    return check(lambda: kernel(bench.tensors), bench)


def honest(t: Mapping[str, Tensor]) -> None:
    t["C"].copy_((t["A"].float() @ t["B"].float().T).half())


class Previous:
    """Returns what it computed when it was first called."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, t: Mapping[str, Tensor]) -> None:
        if self.kept is None:
            honest(t)
            self.kept = t["C"].clone()
        t["C"].copy_(self.kept)


def nothing(t: Mapping[str, Tensor]) -> None:
    """Writes nothing."""


def destructive(t: Mapping[str, Tensor]) -> None:
    """Normalises its input in place."""
    honest(t)
    t["A"].div_(2)


def one_shape(t: Mapping[str, Tensor]) -> None:
    """Has the number of rows that it was tuned at written into it."""
    t["C"][:16] = (t["A"][:16].float() @ t["B"].float().T).half()


@pytest.mark.parametrize(
    ("kernel", "m", "reason"),
    [
        (Previous(), 16, "seed 2: C: .* out of tolerance"),
        (nothing, 16, "C: 2048 of 2048 elements out of tolerance"),
        (destructive, 16, "input A was modified"),
        (one_shape, 17, r"C: 128 of 2176 elements .* \[16, 0\]: nan"),
    ],
)
def test_cheating_kernels_are_refused(kernel: Kernel, m: int, reason: str) -> None:
    found = verdict(kernel, m)
    assert not found.correct and re.search(reason, found.reason), found.reason


def test_a_kernel_right_at_one_shape_passes_there_alone() -> None:
    """Which is why workloads are checked at their own axes."""
    assert verdict(one_shape, 16).correct and verdict(honest, 17).correct


def test_calling_the_reference_is_borrowing() -> None:
    space: dict[str, Callable[..., Tensor]] = {}
    exec(source(DEFINITION) or "", space)
    a, b = torch.randn(4, 2048).half(), torch.randn(128, 2048).half()
    said = r"calls torch's \w+: what it returns is not its own work"
    with pytest.raises(Borrowed, match=said), own_work():
        space["run"](a, b)
    with pytest.raises(Borrowed, match="calls torch's mm"), own_work():
        torch.mm(a, b.T)


def test_memory_and_views_are_a_launcher_s_own_business() -> None:
    with own_work():
        out = torch.empty(4, 8, dtype=torch.float16)
        out.zero_()
        kept = out[1:3, 4:].T.contiguous().view(-1)
        out.copy_(torch.zeros(4, 8))
    assert kept.shape == (8,) and out.data_ptr()
