"""Cases hold what is right: the references of definitions, and float32 with rounded probabilities;
a token, a page or a rule that is missed lies outside."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.compiler.emulator.values import decode, e4m3_bits
from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.references import load_reference
from ptxflow.eval.bench.references import sampling_integers as integers
from ptxflow.eval.bench.references.gdn import gdn_decode, gdn_prefill
from ptxflow.eval.bench.references.moe import moe, route
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.attention import choose
from ptxflow.eval.verify.cases.case import Case, plain, stored
from ptxflow.eval.verify.cases.causal import case as causal
from ptxflow.eval.verify.cases.moe import ORDERED, shares
from ptxflow.eval.verify.cases.rmsnorm import ROOT_ERROR
from ptxflow.eval.verify.cases.sampling import OFFSET, SEED
from tests.emulation import outside
from tests.families import dsa_indexer, gemm_fp8, rmsnorm, sampling
from tests.families.gdn_decode import problem as step
from tests.families.gdn_prefill import problem as packed
from tests.families.moe import problem as experts
from tests.families.moe import strategy as of_experts
from tests.given import H200
from tests.reference_check import as_torch

GQA = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
MLA = {"num_qo_heads": 4, "head_dim_ckv": 64, "head_dim_kpe": 16}
PAGES = {"num_pages": 20, "len_indptr": 4, "num_kv_indices": 15}
DECODE, PACKED = PAGES | {"batch_size": 3}, PAGES | {"total_q": 20}
PROBLEMS = {  # family and name of a definition, and its axes
    ("gqa_decode", "gqa_paged_decode_h32_kv8_d128_ps1"): GQA | DECODE,
    ("gqa_decode", "gqa_paged_decode_h32_kv4_d128_ps64"): GQA | DECODE | {"page_size": 4},
    ("gqa_prefill", "gqa_paged_prefill_causal_h32_kv8_d128_ps1"): GQA | PACKED,
    ("gqa_prefill", "gqa_paged_prefill_causal_h32_kv8_d128_ps64"): GQA
    | PACKED
    | {"batch_size": 3, "page_size": 4},
    ("gqa_prefill", "gqa_ragged_prefill_causal_h32_kv4_d128"): GQA
    | {"len_indptr": 4, "total_q": 30, "total_kv": 40},
    ("mla_decode", "mla_paged_decode_h16_ckv512_kpe64_ps1"): MLA | DECODE,
    ("mla_decode", "mla_paged_decode_h16_ckv512_kpe64_ps64"): MLA | DECODE | {"page_size": 4},
    ("mla_prefill", "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1"): MLA
    | PACKED
    | {"total_q": 11},
    ("mla_prefill", "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64"): MLA
    | PACKED
    | {"batch_size": 3, "page_size": 4},
}


def problem(key: tuple[str, str], dtype: str = "bfloat16", **changed: int) -> Problem:
    definition = load(key[1])
    axes = dict(definition.const_axes) | PROBLEMS[key] | changed
    return Problem(key[0], key[1], tuple(axes.items()), dtype, 1.0, 1.0)


def reference(key: tuple[str, str], p: Problem, case: Case) -> dict[str, Any]:
    """What the definition's own reference makes of the tensors."""
    definition = load(key[1])
    definition = definition.resized(**{n: p[n] for n in definition.const_axes})
    given: dict[str, Any] = {n: as_torch(t) for n, t in case.tensors.items()}
    given |= dict(case.arguments.scalars)
    out = load_reference(definition)(*(given[n] for n in definition.inputs))
    return {n: t.float().numpy() for n, t in zip(definition.outputs, out, strict=True)}


@pytest.mark.parametrize("key", PROBLEMS)
@pytest.mark.parametrize("seed", range(4))
def test_references_lie_inside(key: tuple[str, str], seed: int) -> None:
    p = problem(key)
    case = causal(p, seed=seed)
    definition = load(key[1])
    shapes = definition.shapes({**definition.inputs, **definition.outputs}, dict(p.axes))
    for name, tensor in case.tensors.items():
        assert tensor.shape == shapes[name], name
    assert set(case.tensors) == set(shapes) - {"sm_scale"}
    assert set(case.expected) == {"output", "lse"}
    assert not outside(case, reference(key, p, case))
    low, high = case.expected["lse"]
    live = np.isfinite(low)
    assert not live.all() and live.any()  # some query sees nothing
    assert (high[live] - low[live]).max() < 0.01
    if seed == 0:
        again = case_of(p)
        assert all(t.tobytes() == again.tensors[n].tobytes() for n, t in case.tensors.items())


def attend(
    p: Problem, case: Case, weights: Callable[[Any], Any], drop: int | None = None
) -> dict[str, Any]:
    """Decoding in float32 as kernels do it, block after block, with a token left out, if any."""
    t: dict[str, Any] = {n: plain(x) for n, x in case.tensors.items()}
    t |= {n: t[n].astype(np.float32) for n in ("q", "k_cache", "v_cache")}
    page, share = p["page_size"], p["num_qo_heads"] // p["num_kv_heads"]
    scale = np.float32((case.arguments.scalars["sm_scale"] or 0) * math.log2(math.e))
    output, lse = np.zeros_like(t["output"]), np.full(t["lse"].shape, -np.inf)
    for b, h in np.ndindex(lse.shape):
        first, end = t["kv_indptr"][b : b + 2]
        length = (end - first) * page
        if page > 1 and end > first:
            length += t["kv_last_page_len"][b] - page
        slots = [(t["kv_indices"][first + i // page], i % page) for i in range(length)]
        slots = [s for i, s in enumerate(slots) if i != drop]
        if not slots:
            continue
        k, v = (np.stack([t[n][*s, h // share] for s in slots]) for n in ("k_cache", "v_cache"))
        top, total, acc = np.float32(-np.inf), np.float32(0), np.zeros(v.shape[1], np.float32)
        for i in range(0, len(slots), 8):
            x = (k[i : i + 8] @ t["q"][b, h]) * scale
            new = max(top, x.max())
            w = np.exp2(x - new)
            total = total * np.exp2(top - new) + w.sum()
            acc = acc * np.exp2(top - new) + weights(w) @ v[i : i + 8]
            top = new
        output[b, h], lse[b, h] = acc / total, top + np.log2(total)
    return {"output": plain(stored(output, p.dtype)), "lse": lse.astype(np.float32)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("key", [k for k in PROBLEMS if k[0] == "gqa_decode"])
def test_rounded_probabilities_lie_inside_and_a_missing_token_outside(
    key: tuple[str, str], dtype: str
) -> None:
    p = problem(key, dtype, num_kv_indices=200, num_pages=220)
    for seed in range(4):
        case = causal(p, seed=seed)
        fine = attend(p, case, lambda w: w)
        rounded = attend(p, case, lambda w: plain(stored(w, dtype)))
        assert not outside(case, fine) and not outside(case, rounded)
        short = outside(case, attend(p, case, lambda w: w, drop=3))  # which all have
        assert short["output"] > 100 and short["lse"] > 2
        coarse = attend(p, case, lambda w: np.round(w * 64) / 64)
        assert outside(case, coarse)["output"] > 20


def test_sequences_are_those_asked_for() -> None:
    key = ("gqa_decode", "gqa_paged_decode_h32_kv4_d128_ps64")
    p = problem(key, num_kv_indices=6)
    tensors = causal(p, lengths=(9, 0, 10)).tensors
    assert tensors["kv_indptr"].tolist() == [0, 3, 3, 6]
    assert tensors["kv_last_page_len"].tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="fill 5 pages of 4 in 3 sequences; the axes say 6"):
        causal(p, lengths=(9, 0, 8))
    idle = causal(p, seed=1).tensors  # a page that holds no token
    assert np.diff(idle["kv_indptr"])[1] == 1
    assert idle["kv_last_page_len"][1] == 0
    with pytest.raises(ValueError, match="own 15 pages and the cache has 9"):
        causal(problem(key, num_pages=9))


def test_prefills_have_every_kind_of_sequence() -> None:
    paged = problem(("gqa_prefill", "gqa_paged_prefill_causal_h32_kv8_d128_ps64"))
    case = causal(paged)
    tensors: dict[str, Any] = dict(case.tensors)
    queries, pages = (np.diff(tensors[n]) for n in ("qo_indptr", "kv_indptr"))
    keys = pages * 4 - np.where(pages > 0, 4 - tensors["kv_last_page_len"], 0)
    assert queries[1] == 2 and keys[1] == 0  # queries without keys
    assert (queries > keys)[keys > 0].any() and (queries < keys).any()
    exact = causal(paged, lengths=(40, 3, 16), queries=(10, 5, 5))
    assert np.isneginf(exact.expected["lse"][0][10:12]).all()  # 5 queries of 3 keys: 2 see none
    assert not np.isneginf(exact.expected["lse"][0][12:]).any()
    latent = problem(("mla_prefill", "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1"))
    with pytest.raises(ValueError, match="are not total_q=11 in 3 rows"):
        causal(latent, queries=(1, 2, 3))


@pytest.mark.parametrize("key", [key for key in PROBLEMS if "prefill" in key[0]], ids=str)
@pytest.mark.parametrize("changed", [{}, {"num_kv_indices": 90, "num_pages": 100, "total_q": 5}])
def test_some_queries_of_a_sequence_with_keys_see_none(
    key: tuple[str, str], changed: dict[str, int]
) -> None:
    """However many keys there are beside few queries."""
    held = dict(problem(key).axes)
    sizes: dict[str, Any] = {n: v for n, v in changed.items() if n in held}
    p = problem(key, **sizes)
    given = choose(p, None, None, 0)
    assert ((given.queries > given.keys) & (given.keys > 0)).any() and (given.keys == 0).any()
    assert given.queries.sum() == p["total_q"]


SMALL = {"local": 3, "hidden": 256, "inner": 128}


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(("state", "scale"), [(True, 0.25), (False, 0.0)])
def test_gdn_is_the_reference(prefill: bool, state: bool, scale: float) -> None:
    """Of the definition itself, in torch, and the bounds leave little room."""
    if prefill:
        made = case_of(packed(90, 3, 64, 1, 2), lengths=(30, 0, 60), given=state, scale=scale)
    else:
        made = case_of(step(3, 64, 2, 4), given=state, scale=scale)
    names = ("q", "k", "v", "state", "A_log", "a", "dt_bias", "b", *["cu_seqlens"] * prefill)
    inputs: list[Any] = [as_torch(made.tensors[n]) if n in made.tensors else None for n in names]
    found = (gdn_prefill if prefill else gdn_decode)(*[*inputs, scale])
    for (name, (low, high)), value in zip(made.expected.items(), found, strict=True):
        ours = value.float().numpy()
        # where a gate is shut, the reference rounds what it adds and takes away again
        assert (np.abs(ours - np.clip(ours, low, high)) <= 2.0 ** (-20 if prefill else -21)).all()
        if prefill:
            assert (high - low).max() <= 0.1 * np.abs(ours).max(), name
        else:
            room = (2.0**-7 if name == "output" else 2.0**-16) * np.abs(ours) + 2.0**-13
            assert (high - low <= room).all(), name
    assert not prefill or not found[1][1].any()  # a sequence without tokens drops its state


def test_rmsnorm_is_the_reference() -> None:
    """Of the definition itself, in torch: the bounds hold it, and are an ulp apart at most."""
    for name in ("rmsnorm_h512", "fused_add_rmsnorm_h2048"):
        definition = load(name)
        p = rmsnorm.RMSNORM.problem(definition.to_json(), definition.bind({"batch_size": 9}))
        tensors = case_of(p).tensors
        low, high = case_of(p).expected["output"]
        inputs = [as_torch(tensors[n]) for n in definition.inputs]
        expected = load_reference(definition)(*inputs).float().numpy()
        assert ((low <= expected) & (expected <= high)).all()
        assert (high - low <= 2.0**-7 * np.maximum(np.abs(low), np.abs(high))).all()
        assert (low != high).mean() < 4 * ROOT_ERROR * 2**8  # near a tie of two roundings


def narrow(values: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    """A case's array as torch has it: bytes are float8, 16-bit words bfloat16."""
    if values.dtype == np.uint8:
        return torch.from_numpy(values.copy()).view(torch.float8_e4m3fn)
    return as_torch(values)


def test_e4m3_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=4000) * 10.0 ** np.linspace(-4, 3, 4000)
    steps = decode(np.arange(127, dtype=np.uint8), "e4m3")
    values = np.concatenate([values, steps, (steps[:-1] + steps[1:]) / 2, [1e9]]).astype("f4")
    kept = torch.from_numpy(np.clip(values, -448, 448)).to(torch.float8_e4m3fn)
    assert (e4m3_bits(values) == kept.view(torch.uint8).numpy()).all()


def test_routing_of_the_case_is_that_of_the_reference() -> None:
    made = case_of(experts(50, **SMALL), seed=3).tensors
    logits = torch.from_numpy(made["routing_logits"].copy())
    bias = torch.from_numpy(plain(made["routing_bias"]).copy())
    chosen, share = route(logits, bias)
    expected = np.zeros((50, 256))
    np.put_along_axis(expected, chosen.numpy(), 2.5 * share.numpy(), 1)
    assert np.allclose(shares(made["routing_logits"], plain(made["routing_bias"])), expected)


@pytest.mark.parametrize("local", [1, 5, 11, 32, 256])
def test_tokens_choose_among_any_number_of_local_experts(local: int) -> None:
    """Without a tie at which the choice of groups turns, or drawing would not end."""
    made = case_of(experts(58, **SMALL | {"local": local}), seed=1).tensors
    scores = 1 / (1 + np.exp(-made["routing_logits"].astype(float))) + plain(made["routing_bias"])
    best = np.sort(scores.reshape(58, 8, 32), -1)[..., -2:]
    groups, order = np.sort(best.sum(-1), -1), np.argsort(best.sum(-1), -1)
    assert (np.diff(groups)[:, 3] > 1e-4).all() and {*order[-ORDERED:, 4]} == {*range(8)}
    assert (2 * best[-ORDERED:, :, 1] > groups[-ORDERED:, 4:5]).all()


def test_every_lane_has_an_expert_with_tokens_and_every_warp_a_token() -> None:
    """Of all problems of a mixture of experts; whose sums are emulated has one in the largest, and
    tokens of a warp share one."""
    seen, warps = np.zeros(32, bool), set[int]()
    for size in family("moe").trials(experts(), of_experts(route="joined"), H200).sizes:
        tokens = size.axes["seq_len"]
        case = case_of(experts(tokens, **SMALL | {"local": 32}))
        share = shares(case.tensors["routing_logits"], plain(case.tensors["routing_bias"]))
        first = case.arguments.scalars["local_expert_offset"] or 0
        own = np.roll(share, -int(first), 1)[:, :32] > 0
        seen |= own.any(0)
        if size.some:
            summed = np.linspace(0, tokens - 1, size.some[-1]).round().astype(int)
            assert own[summed].any(1).all()
            warps |= set(summed // 32 % 32)
            pairs = np.array([own[i : i + 32].sum(0).max() > 1 for i in range(0, tokens, 32)])
    assert seen.all() and len(warps) == 32 and pairs[:-1].mean() > 0.9


def test_moe_is_the_reference() -> None:
    made = case_of(experts(20, **SMALL), seed=2)
    inputs: list[Any] = [narrow(t) for name, t in made.tensors.items() if name != "output"]
    found = moe(*inputs, *made.arguments.scalars.values()).float().numpy()
    low, high = made.expected["output"]
    assert ((low <= found) & (found <= high)).all()
    assert np.median((high - low) / np.abs(found).mean()) < 0.7  # what rounding leaves room for


def test_of_equal_scores_the_first_are_chosen() -> None:
    p = dsa_indexer.problem(4, 11, 30, topk=32)
    given = case_of(p, lengths=(70, 0, 600, 701))
    own = given.tensors["block_table"][3, 0] * 64
    assert (given.expected["topk_indices"][0][3] == own + np.arange(32)).all()
    assert (given.expected["topk_indices"][0][1] == -1).all()


@pytest.mark.parametrize("filters", [sampling.K, sampling.P, sampling.EACH])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_draws_fall_on_the_first_or_last_unit_of_an_element(
    filters: tuple[str, ...], batch: int
) -> None:
    """Of the rows that are rare, and of the first; with most of what is kept before them. Of
    several rows where p alone filters the first keeps one element."""
    given = case_of(sampling.problem(65536, batch, filters))
    probs, *limits = (torch.from_numpy(given.tensors[n]) for n in ("probs", *filters))
    kept = integers.kept(probs, **dict(zip(filters, limits, strict=True)))
    sums = (integers.integers(probs) * kept).cumsum(-1).tolist()
    samples, alone = given.expected["samples"][0], filters == sampling.P and batch > 1
    assert kept.sum(1)[0] > 1 or (alone and samples[0] == probs[0].argmax())
    for i, found in [*enumerate(samples.tolist())][alone:]:
        draw = integers.philox(SEED, OFFSET, i) * sums[i][-1] >> 64
        assert draw in (sums[i][found - 1], sums[i][found] - 1) and 2 * draw > sums[i][-1]
    assert alone or batch != 2 or np.bitwise_xor(*samples) == 0xFFFF  # all bits differ


@pytest.mark.parametrize("name", ["A_scale", "B_scale"])
def test_scales_are_unlike_their_neighbours(name: str) -> None:
    """One that is read at the place beside its own shows."""
    scales = case_of(gemm_fp8.problem(37, 384, 1152)).tensors[name]
    assert min(scales.shape) > 2
    assert all((np.diff(scales, axis=axis) != 0).all() for axis in (0, 1))
