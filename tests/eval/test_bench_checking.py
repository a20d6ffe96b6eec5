"""Kernels that cheat must be rejected, each for what it did, and honest ones accepted."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.checking import Bench, Case, Verdict, check, compare
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.own_work import Borrowed, own_work
from ptxflow.eval.bench.references import load_reference, source
from ptxflow.eval.bench.session import case_of, scored
from ptxflow.eval.bench.tolerance import TOPK, Tolerance, tolerance
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


def test_what_a_kernel_wrote_outside_is_not_the_next_one_s() -> None:
    bench = Bench(small_case(), CPU, (1, 2))
    assert [checked(k, bench).correct for k in (write_at(-1), honest)] == [False, True]


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


LONG = Path(__file__).parents[1] / "definitions/dsa_topk_indexer_fp8_h64_d128_topk2048_ps64.json"
RULE = Tolerance(0.0, 0.1, "test", TOPK)
#: two rows of six tokens: slot and score; the second has two tokens
SCORED = torch.tensor(
    [
        [[7, 1.0], [3, 5.0], [8, 5.05], [2, -1.0], [9, 2.0], [4, 0.0]],
        [[6, -3.0], [5, 2.0], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        ([8, 3, 9], [5, 6, -1], False),
        ([3, 9, 8], [6, 5, -1], False),  # the order is not compared
        ([8, 3, 7], [5, 6, -1], True),  # 1.0 in the place of 2.0
        ([8, 3, 3], [5, 6, -1], True),  # twice
        ([8, 3, 6], [5, 6, -1], True),  # of another sequence
        ([8, 3, -1], [5, 6, -1], True),
        ([8, 3, 9], [5, -1, -1], True),
        ([8, 3, 9], [5, 6, 6], True),
        ([8, 3, 9], [5, 6, 0], True),
        ([8, 3, 9], [5, 6, -2], True),
        ([8, 3, 9], [-1, 5, 6], True),  # padding comes last
    ],
)
def test_choices(first: list[int], second: list[int], wrong: bool) -> None:
    out = torch.tensor([first, second], dtype=torch.int32)
    assert bool(compare(out, SCORED, RULE).wrong) == wrong


def test_a_nearly_equal_score_is_as_good() -> None:
    out = torch.tensor([[3], [5]], dtype=torch.int32)
    found = compare(out, SCORED, RULE)
    assert not found.wrong and 0.04 < found.max_abs_error < 0.06


def test_the_reference_is_right_and_the_tolerance_tells_a_missing_token() -> None:
    definition = load("dsa_topk_indexer_fp8_h64_d128_topk256_ps64")
    axes = {"batch_size": 3, "max_num_pages": 24, "num_pages": 40}
    inputs = make_inputs(definition, axes, 4)
    (expected,) = case_of(definition, axes, torch.device("cpu")).reference(inputs).values()
    assert torch.equal(expected, scored(inputs))
    chosen = load_reference(definition)(*inputs.values())
    rule = tolerance(definition)
    assert not compare(chosen, expected, rule).wrong
    for dropped in (0, 100, 200):  # the 257th best instead
        kept = expected[0, expected[0, :, 0] >= 0]
        order = kept[:, 1].argsort(descending=True)
        worse = chosen.clone()
        place = (chosen[0] == kept[order[dropped], 0]).nonzero()[0, 0]
        worse[0, place] = int(kept[order[256], 0])
        assert compare(worse, expected, rule).wrong


@pytest.mark.parametrize("dropped", [0, 500, 1500, 1900])
def test_a_long_choice_is_compared_with_its_end(dropped: int) -> None:
    """Among many tokens neighbours are so near that those behind a missing one hardly differ."""
    definition = load(LONG)
    axes = {"batch_size": 2, "max_num_pages": 64, "num_pages": 100}
    inputs = make_inputs(definition, axes, 1)
    expected, rule = scored(inputs), tolerance(definition)
    chosen = load_reference(definition)(*inputs.values())
    assert chosen.shape == (2, 2048) and not compare(chosen, expected, rule).wrong
    order = expected[0, :, 1].argsort(descending=True)
    gap = float(expected[0, order[dropped], 1] - expected[0, order[2047], 1])
    assert gap > rule.atol
    place = (chosen[0] == expected[0, order[dropped], 0]).nonzero()[0, 0]
    chosen[0, place] = int(expected[0, order[2048], 0])  # the next best instead
    found = compare(chosen, expected, rule)
    assert found.wrong and found.max_abs_error == pytest.approx(gap)


def test_ties_may_fall_either_way() -> None:
    """Which of equal scores at the end are chosen is not defined."""
    scores = torch.tensor([9.0, 5.0, 5.0, 5.0, 1.0], dtype=torch.float64)
    ref = torch.stack([torch.arange(5.0, dtype=torch.float64), scores], -1)[None]
    for chosen, wrong in (([0, 1, 3], False), ([3, 2, 0], False), ([1, 2, 3], True)):
        out = torch.tensor([chosen], dtype=torch.int32)
        assert bool(compare(out, ref, RULE).wrong) == wrong
