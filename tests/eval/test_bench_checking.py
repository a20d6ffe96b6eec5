"""Kernels that cheat must be rejected, each for what it did, and honest ones accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.checking import Bench, Case, Verdict, check, compare
from ptxflow.eval.bench.own_work import Borrowed, own_work
from ptxflow.eval.bench.references import load_reference, source
from ptxflow.eval.bench.tolerance import Tolerance
from tests.eval.benches import CPU, bench_of

GEMM = load("gemm_n128_k2048")
M, N, K = 33, 48, 64
Kernel = Callable[[Mapping[str, Tensor]], None]


def small_case() -> Case:
    def inputs(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            "A": torch.randn(M, K, generator=generator).half(),
            "B": torch.randn(N, K, generator=generator).half(),
        }

    return Case(
        inputs=inputs,
        reference=lambda t: {"C": (t["A"].float() @ t["B"].float().T).half()},
        outputs={"C": ((M, N), torch.float16)},
        tolerance={"C": Tolerance(2.0**-10, 1e-3, "test")},
    )


def verdict(kernel: Kernel, seeds: tuple[int, ...] = (1, 2)) -> Verdict:
    return checked(kernel, Bench(small_case(), CPU, seeds))


def checked(kernel: Kernel, bench: Bench) -> Verdict:
    return check(lambda: kernel(bench.tensors), bench)


def honest(t: Mapping[str, Tensor]) -> None:
    t["C"].copy_((t["A"].float() @ t["B"].float().T).half())


def storage_of(tensor: Tensor) -> Tensor:
    """All the memory that the tensor lies in, as a stray address would reach it."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def test_an_honest_kernel_passes() -> None:
    result = verdict(honest)
    assert result.correct, result.reason
    assert result.max_error_ratio is not None and result.max_error_ratio <= 1


def skip_rows(t: Mapping[str, Tensor]) -> None:
    t["C"][: M - 1] = (t["A"].float() @ t["B"].float().T).half()[: M - 1]


def skip_one_element(t: Mapping[str, Tensor]) -> None:
    keep = t["C"][5, 7].clone()
    honest(t)
    t["C"][5, 7] = keep


def modify_input(t: Mapping[str, Tensor]) -> None:
    honest(t)
    t["A"][0, 0] += 1


def write_at(byte: int) -> Kernel:
    """Also writes a byte, counted from where C begins."""

    def kernel(t: Mapping[str, Tensor]) -> None:
        honest(t)
        storage_of(t["C"])[t["C"].storage_offset() * 2 + byte] = 0

    return kernel


def one_step_of_k_missing(t: Mapping[str, Tensor]) -> None:
    t["C"].copy_((t["A"][:, :-1].float() @ t["B"][:, :-1].float().T).half())


class Cached:
    """Right on the first data, and the same ever after."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def __call__(self, t: Mapping[str, Tensor]) -> None:
        if self.kept is None:
            honest(t)
            self.kept = t["C"].clone()
        t["C"].copy_(self.kept)


class Unstable:
    """Within tolerance, but not the same twice: the mark of a race."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, t: Mapping[str, Tensor]) -> None:
        honest(t)
        self.calls += 1
        t["C"][3, 3] *= 1 + 2.0**-10 * (self.calls % 2)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (skip_rows, r"C: 48 of 1584 elements out of tolerance, the first at \[32, 0\]: nan"),
        (skip_one_element, r"C: 1 of 1584 .* \[5, 7\]"),
        (modify_input, "input A was modified"),
        (write_at(M * N * 2), "wrote outside C: 1 bytes after it"),
        (write_at((M + 200) * N * 2), "wrote outside C: 1 bytes after it"),  # row 200 past the end
        (write_at(-1), "wrote outside C: 1 bytes before it"),
        (one_step_of_k_missing, "out of tolerance"),
        (Cached(), "seed 2: C: .* out of tolerance"),
        (Unstable(), "C differs between two runs on the same inputs"),
        (lambda t: None, "C: 1584 of 1584 elements out of tolerance"),
    ],
)
def test_a_cheat_is_rejected(kernel: Kernel, reason: str) -> None:
    result = verdict(kernel)
    assert not result.correct
    assert re.search(reason, result.reason), result.reason


def test_infinities_must_agree_and_nan_references_ask_nothing() -> None:
    inf, nan = torch.inf, torch.nan
    ref = torch.tensor([inf, -inf, nan, 1.0])
    tolerance = Tolerance(0.0, 1e-3, "test")
    assert compare(torch.tensor([inf, -inf, 7.0, 1.0]), ref, tolerance).wrong == 0
    assert compare(torch.tensor([inf, inf, 7.0, nan]), ref, tolerance).wrong == 2


def test_the_definition_s_own_case_accepts_a_plain_product() -> None:
    bench = bench_of(GEMM, {"M": 5}, 1)
    assert checked(honest, bench).correct
    assert not checked(one_step_of_k_missing, bench).correct


def test_a_sample_must_be_drawable() -> None:
    definition = load("top_k_sampling_from_probs_v128256").resized(vocab_size=1000)
    bench = bench_of(definition, {"batch_size": 3}, 1)

    def draws(which: Callable[[Tensor], Tensor]) -> Verdict:
        def kernel(t: Mapping[str, Tensor]) -> None:
            t["samples"].copy_(which(t["probs"]))

        return checked(kernel, bench)

    assert draws(lambda probs: probs.argmax(-1)).correct
    said = draws(lambda probs: probs.argmin(-1)).reason
    assert re.match(r"seed 1: samples: 3 of 3 draws are of probability 0, the first at \[0\]", said)
    assert not draws(lambda probs: probs.argmax(-1) + 1000).correct  # no such token
    assert not draws(lambda probs: torch.full((3,), -1)).correct


def test_numbers_are_inputs_beside_the_tensors() -> None:
    definition = load("gdn_decode_qk16_v32_d128_k_last").resized(num_q_heads=1, num_k_heads=1)
    bench = bench_of(definition, {"batch_size": 2})
    assert list(bench.scalars) == ["scale"] and "scale" not in bench.tensors
    run = load_reference(definition)

    def kernel(scale: float) -> Kernel:
        def call(t: Mapping[str, Tensor]) -> None:
            given = {**t, "scale": scale}
            made = run(*(given[name] for name in definition.inputs))
            for name, value in zip(definition.outputs, made, strict=True):
                t[name].copy_(value)

        return call

    right = bench.scalars["scale"]
    assert right is not None
    assert checked(kernel(right), bench).correct
    assert "output: " in checked(kernel(2 * right), bench).reason


def one_shape(t: Mapping[str, Tensor]) -> None:
    """Has the number of rows that it was tuned at written into it."""
    t["C"][:16] = (t["A"][:16].float() @ t["B"].float().T).half()


def test_a_kernel_right_at_one_shape_passes_there_alone() -> None:
    """Which is why workloads are checked at their own axes."""
    at_16, at_17 = (bench_of(GEMM, {"M": m}) for m in (16, 17))
    assert checked(one_shape, at_16).correct and checked(honest, at_17).correct
    refused = checked(one_shape, at_17)
    assert not refused.correct
    assert re.search(r"C: 128 of 2176 elements .* \[16, 0\]: nan", refused.reason)


def test_calling_the_reference_is_borrowing() -> None:
    space: dict[str, Callable[..., Tensor]] = {}
    exec(source(GEMM) or "", space)
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
