"""Attention baselines are planned once, hold for every seed, and compute the definitions."""

import json
import sys
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ptxflow.env.measurements import COPY
from ptxflow.env.tasks.definition import load, names
from ptxflow.eval.bench.baselines import registry as baselines
from ptxflow.eval.bench.baselines.registry import Baselines
from ptxflow.eval.bench.disagreement import named
from ptxflow.eval.bench.references import attention as reference
from tests.eval.benches import beside, install

OP_TYPES = ("gqa_paged", "gqa_ragged", "mla_paged")
NAMES = [n for n in names() if load(n).op_type in OP_TYPES]
SIZES = {
    "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_ckv": 16, "head_dim_kpe": 8,
    "page_size": 4,
}  # fmt: skip
AXES = {  # 18 sequences, by an exponential pattern: one is empty
    "batch_size": 18, "len_indptr": 19, "num_pages": 80, "num_kv_indices": 55, "total_q": 37,
    "total_kv": 56,
}  # fmt: skip


class Wrapper:
    """A wrapper of the library, computed on the CPU by the reference with what was planned."""

    made: ClassVar[list["Wrapper"]] = []
    indices: Tensor
    factor, shift, strays = 1.0, 0.0, 0  # what makes out wrong, and all lse, and lse here and there

    def __init__(self, workspace: Tensor, layout: str = "NHD", **options: Any):
        self.options, self.plans = options, 0
        Wrapper.made.append(self)

    def remember(self, scale: float | None, **lengths: Tensor | None) -> None:
        """Lengths are copied, as to the host; page ids are not."""
        self.plans += 1
        self.scale: Any = scale
        self.lengths: dict[str, Any] = {
            n: None if t is None else t.clone() for n, t in lengths.items()
        }

    def finish(self, results: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> Any:
        out.copy_(results[0] * Wrapper.factor)
        lse.copy_(results[1].clamp(min=-5e4) + Wrapper.shift)
        lse.view(-1)[-Wrapper.strays or lse.numel() :] += 0.01
        return out, lse


class Paged(Wrapper):
    def run(self, q: Tensor, kv: Any, out: Tensor, lse: Tensor, return_lse: bool) -> Any:
        bounds, pages, last = (self.lengths[n] for n in ("queries", "pages", "last"))
        full: list[Any] = [q, *kv, bounds, pages, self.indices, last, self.scale]
        return self.finish(reference.gqa_paged_prefill_pages(*full), out, lse)


class Decode(Paged):
    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, *sizes: int, sm_scale: float,
        **dtypes: Any,
    ) -> None:  # fmt: skip
        assert sizes[:3] == (4, 2, 16) and set(dtypes) == {"q_data_type", "kv_data_type"}
        self.remember(sm_scale, queries=torch.arange(len(indptr)), pages=indptr, last=last)
        self.indices = indices


class Prefill(Paged):
    def plan(
        self, queries: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, *sizes: int,
        causal: bool, sm_scale: float, **dtypes: Any,
    ) -> None:  # fmt: skip
        assert sizes[:3] == (4, 2, 16) and causal
        assert set(dtypes) == {"q_data_type", "kv_data_type"}
        self.remember(sm_scale, queries=queries, pages=indptr, last=last)
        self.indices = indices


class Ragged(Wrapper):
    def plan(
        self, queries: Tensor, keys: Tensor, *sizes: int, causal: bool, sm_scale: float,
        **dtypes: Any,
    ) -> None:  # fmt: skip
        assert sizes == (4, 2, 16) and causal and set(dtypes) == {"q_data_type", "kv_data_type"}
        self.remember(sm_scale, queries=queries, keys=keys)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, return_lse: bool
    ) -> Any:
        bounds = (self.lengths["queries"], self.lengths["keys"])
        return self.finish(reference.gqa_ragged_prefill(q, k, v, *bounds, self.scale), out, lse)


class Mla(Wrapper):
    def plan(
        self, queries: Tensor, indptr: Tensor, indices: Tensor, keys: Tensor, *rest: Any
    ) -> None:
        heads, dim, rope, page, self.causal, sm_scale, *dtypes = rest
        assert (heads, dim, rope) == (4, 16, 8) and dtypes == [torch.bfloat16] * 2
        last = torch.where(keys > 0, (keys - 1) % page + 1, 0)
        self.remember(sm_scale, queries=queries, pages=indptr, last=last)
        self.indices = indices

    def run(
        self, q: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, out: Tensor, lse: Tensor,
        return_lse: bool,
    ) -> Any:  # fmt: skip
        bounds, pages, last = (self.lengths[n] for n in ("queries", "pages", "last"))
        full: list[Any] = [q, q_pe, ckv, kpe, bounds, pages, self.indices, last, self.scale]
        return self.finish(reference.mla_paged_prefill_pages(*full), out, lse)


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    Wrapper.made = []
    install(
        monkeypatch,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        mla__BatchMLAPagedAttentionWrapper=Mla,
    )


def small(name: str, **changed: int) -> Baselines:
    definition = load(name)
    sizes = {a: SIZES[a] for a, value in definition.const_axes.items() if value != 1}
    definition = definition.resized(**sizes)
    return beside(definition, {a: changed.get(a, AXES[a]) for a in definition.var_axes})


def expected_baselines(name: str) -> list[str]:
    if "prefill" not in name and name.startswith("gqa"):
        return ["flashinfer", "flashinfer-tensor-cores"]
    return ["flashinfer-fa2", "flashinfer-fa3"]


@pytest.mark.parametrize("name", NAMES)
def test_every_baseline_computes_it_on_every_seed(name: str) -> None:
    found = small(name)
    calls = found.calls(every=True)
    assert [n for n in calls if n.startswith("flashinfer")] == expected_baselines(name)
    assert next(iter(calls)) == COPY == found.yardstick
    assert all(wrapper.plans == 1 for wrapper in Wrapper.made)
    options = [w.options for w in Wrapper.made]
    if expected_baselines(name)[0] == "flashinfer":
        assert options == [{"use_tensor_cores": False}, {"use_tensor_cores": True}]
    else:
        assert options == [{"backend": "fa2"}, {"backend": "fa3"}]
    _, expected = found.bench.fill(2)  # other values and pages, the same lengths
    for baseline in expected_baselines(name):
        made: Any = calls[baseline]()
        out, lse = made
        live = expected["lse"].isfinite()
        assert live.any() and (live.all() == ("total_q" in found.definition.var_axes))
        torch.testing.assert_close(out[live], expected["output"][live], rtol=2**-7, atol=1e-5)
        torch.testing.assert_close(lse[live], expected["lse"][live], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_library_is_absent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wrapper, "factor", 1.1)
    found = small(name)
    calls = found.calls(every=True)
    for baseline in expected_baselines(name):
        assert baseline not in calls
        assert found.absent[baseline].startswith("wrong: output: ")
        assert baseline not in found.disagree  # it is not timed: it has no ratio


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_who_is_wrong_in_lse_alone_is_timed_and_says_so(
    shift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wrapper, "strays", 3)
    monkeypatch.setattr(Wrapper, "shift", shift)
    name = "mla_paged_decode_h16_ckv512_kpe64_ps1"
    found = small(name)
    assert set(expected_baselines(name)) <= set(found.calls(every=True))
    lse = found.bench.fill(1)[1]["lse"]
    live = int(lse.isfinite().sum())
    held = found.about()["disagree"]
    assert list(held) == expected_baselines(name) and set(held["flashinfer-fa2"]) == {"lse"}
    off = held["flashinfer-fa2"]["lse"]
    assert off["total"] == live and off["beyond"] == (live if shift else 3)
    assert off["error"] == pytest.approx(shift + 0.01, rel=1e-2)
    allowed = 4 * (2**-14 + 2**-20 * float(lse[lse.isfinite()].abs().max()))
    assert off["times"] >= 0.99 * off["error"] / allowed
    assert json.loads(json.dumps(held)) == held
    text = f"flashinfer-fa2 (lse: {off['beyond']} of {live} elements beyond tolerance, off by "
    assert named("flashinfer-fa2", held).startswith(text)
    assert named("copy", held) == "copy" and "absent" not in found.about()


def test_rows_that_see_nothing_are_not_compared() -> None:
    name = "gqa_paged_prefill_causal_h32_kv8_d128_ps1"
    found = small(name, total_q=90)
    lse = found.bench.fill(1)[1]["lse"]
    assert lse.isneginf().any()
    assert set(expected_baselines(name)) <= set(found.calls(every=True))


def test_decoding_without_the_library_keeps_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]
    found = small("gqa_paged_decode_h32_kv8_d128_ps64")
    assert list(found.calls(every=True)) == [COPY, "torch"]
    assert found.absent["flashinfer"].startswith("ModuleNotFoundError: ")


def test_fused_attention_of_torch_takes_even_whole_prefills() -> None:
    name = "gqa_ragged_prefill_causal_h32_kv8_d128"
    whole = small(name, len_indptr=5, total_q=40, total_kv=40)
    assert "torch.sdpa" in whole.calls(every=True)
    assert named("torch.sdpa", whole.disagree) == "torch.sdpa (lse: not computed)"
    for axes in ({"total_q": 41, "total_kv": 41}, {"total_q": 40, "total_kv": 80}):
        found = small(name, len_indptr=5, **axes)
        assert "torch.sdpa" not in found.calls(every=True)
        assert found.absent["torch.sdpa"] == "it takes sequences of one length, without a prefix"


def test_every_definition_has_a_library_beside_it() -> None:
    for name in names():
        assert len(baselines.makers_of(load(name))) > 1
