"""The decoder of examples/: its ways to make a step agree, references standing for kernels."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptxflow.env.tasks.definition import load

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import decoder  # type: ignore[import-not-found]

    yield decoder
    for name in ("decoder", "decoder_timing", "decoder_libraries"):
        sys.modules.pop(name, None)


def reference(name: str) -> Any:
    space: dict[str, Any] = {}
    exec(load(name).source, space)
    return space["run"]


def flashinfer(attend: Any, slots: torch.Tensor) -> Any:
    """What the decoder calls of FlashInfer, by its documentation."""

    class Wrapper:
        def __init__(self, room: torch.Tensor, layout: str, use_tensor_cores: bool):
            assert layout == "NHD"

        def plan(self, indptr: Any, indices: Any, last: Any, *sizes: int, **how: Any) -> None:
            assert sizes == (8, 2, 32, 64)

        def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = attend(q, *cache)[0]
            return out

    def add_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float) -> None:
        residual += x
        x.copy_(torch.rms_norm(residual, (256,), w, eps))

    def append(k: Any, v: Any, rows: Any, at: Any, cache: Any, *pages: Any) -> None:
        for held, new in zip(cache, (k, v), strict=True):
            held.view(-1, *new.shape[1:])[slots] = new

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, silu_and_mul=silu_and_mul,
        fused_add_rmsnorm=add_norm, append_paged_kv_cache=append,
        rmsnorm=lambda x, w, eps: torch.rms_norm(x, (256,), w, eps),
    )  # fmt: skip


def product(x: torch.Tensor, weight: torch.Tensor, residual: Any = 0) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight) + residual


def test_a_step_by_libraries_is_torchs(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = decoder.Model(decoder.Shape(256, 8, 2, 32, 512, 500), 2, 3, 128, "cpu")
    hidden = torch.randn(3, 256).bfloat16()
    before = [cache.clone() for i in range(2) for cache in model.caches(i)]
    exact = decoder.Torch(model, torch.float32).step(hidden)[0]
    ours = object.__new__(decoder.Ptxflow)
    ours.model, ours.scale = model, 32**-0.5
    ours.products = dict.fromkeys(model.shape.products, product)
    ours.normed = reference("rmsnorm_h4096")
    ours.attended = reference("gqa_paged_decode_h32_kv8_d128_ps64")
    given = model.index
    attend = partial(reference("gqa_paged_decode_h32_kv8_d128_ps64"), kv_indptr=given["indptr"],
                     kv_indices=given["indices"], kv_last_page_len=given["last_len"],
                     sm_scale=32**-0.5)  # fmt: skip
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(attend, given["slot"]))
    for ops in (decoder.Torch(model), ours, decoder.FlashInfer(model)):
        logits, probs = ops.step(hidden)
        assert float((logits - exact).norm() / exact.norm()) < 0.02
        torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    after = [cache for i in range(2) for cache in model.caches(i)]
    written = [int((a != b).flatten(2).any(-1).sum()) for a, b in zip(before, after, strict=True)]
    assert written == [3, 3, 3, 3]  # the newest of each sequence


def test_the_libraries_that_it_asks_for_can_be_made(decoder: Any, tmp_path: Path) -> None:
    import decoder_libraries  # type: ignore[import-not-found]

    from ptxflow.eval.sample.ranges import find_ranges

    shape = decoder.Shape()
    wanted = decoder_libraries.wanted(shape, tmp_path)
    assert wanted.keys() == {
        "norm", "sampling", "attention", "n6144_k4096", "n4096_k4096_residual", "n28672_k4096",
        "n4096_k14336_residual", "n128256_k4096",
    }  # fmt: skip
    for definition, *asked in wanted.values():
        at = asked.index("--chain")
        found = load(definition)
        assert {*asked[at + 1 :]} <= found.inputs.keys()
        ranges, remark = find_ranges(found, asked[:at])
        assert not remark and max(high for _, high in ranges.free.values()) >= 64
