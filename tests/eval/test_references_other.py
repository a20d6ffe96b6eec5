"""References other than attention against loops in float64, with every case the texts name."""

import itertools
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.env.tasks.definition import load, names
from ptxflow.eval.bench.references import dsa, load_reference, moe, sampling
from tests.reference_check import f64, unchanged

INDEXER = "dsa_topk_indexer_fp8_h64_d128_topk256_ps64"
MOE = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"
DECODE, PREFILL = "gdn_decode_qk16_v32_d128_k_last", "gdn_prefill_qk16_v32_d128_k_last"


def normal(
    rng: np.random.Generator, *shape: int, dtype: Any = torch.bfloat16, scale: float = 1.0
) -> Any:
    return torch.from_numpy(rng.standard_normal(shape) * scale).to(dtype)


# matrix products


@pytest.mark.parametrize("name", [n for n in names() if load(n).op_type == "gemm"])
def test_gemm(name: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (normal(rng, n, 37, dtype=torch.float16) for n in (3, 5))
    c = unchanged(load(name).resized(N=5, K=37), a, b)
    wide = [[sum(x * y for x, y in zip(r, s, strict=True)) for s in f64(b)] for r in f64(a)]
    assert c.dtype == torch.float16
    np.testing.assert_allclose(f64(c), np.array(wide), rtol=2.0**-11, atol=2.0**-20)


def test_gemm_accumulates_in_float32() -> None:
    """2048 is where float16 stops counting ones."""
    ones = torch.ones(1, 4096, dtype=torch.float16)
    assert load_reference(load("gemm_n4096_k4096").resized(N=1))(ones, ones).item() == 4096.0


# norms


@pytest.mark.parametrize("name", [n for n in names() if load(n).op_type == "rmsnorm"])
@pytest.mark.parametrize("size", [1.0, 2e-3])  # small rows are where eps counts
def test_rmsnorm(name: str, size: float) -> None:
    definition = load(name)
    hidden = 48
    eps = 1e-5 if "h4096" in name else 1e-6
    rng = np.random.default_rng(2)
    x, weight = normal(rng, 40, hidden, scale=size), normal(rng, hidden)
    x[3] = 0.0
    inputs, summed = [x, weight], f64(x)
    if "residual" in definition.inputs:
        residual = normal(rng, 40, hidden, scale=size * 2.0**-7)
        residual[3] = 0.0
        inputs, summed = [x, residual, weight], f64(x) + f64(residual)
    out = unchanged(definition.resized(hidden_size=hidden), *inputs)
    wide = np.zeros((40, hidden))
    for row in range(40):
        mean = sum(v * v for v in summed[row]) / hidden
        for h in range(hidden):
            wide[row, h] = summed[row, h] / math.sqrt(mean + eps) * f64(weight)[h]
    assert out.dtype == torch.bfloat16
    np.testing.assert_allclose(f64(out), wide, rtol=2.0**-8 * 1.01, atol=0)
    assert np.mean(f64(out) == f64(torch.from_numpy(wide).to(torch.bfloat16))) > 0.999


# gated delta rule


def slow_step(state: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, scale: Any) -> Any:
    """One head, one token: state [V][K] as lists."""
    size = len(v)
    out = []
    for i in range(size):
        row = [decay * s for s in state[i]]
        u = sum(s * x for s, x in zip(row, k, strict=True))
        row = [s + beta * (v[i] - u) * x for s, x in zip(row, k, strict=True)]
        state[i] = row
        out.append(scale * sum(s * x for s, x in zip(row, q, strict=True)))
    return out


def slow_gate(log: Any, a: Any, bias: Any, b: Any) -> Any:
    x = a + bias
    soft = x if x > 20 else math.log1p(math.exp(x))
    return math.exp(-math.exp(log) * soft), 1 / (1 + math.exp(-b))


def delta_inputs(rng: np.random.Generator, lead: Any) -> Any:
    """q, k, v, A_log, a, dt_bias, b with `lead` leading sizes; one gate is past softplus's bend."""
    heads, value_heads, size = 2, 4, 6
    q, k = (normal(rng, *lead, heads, size, scale=0.4) for _ in range(2))
    a = normal(rng, *lead, value_heads)
    a.view(-1)[1] = 30.0
    gate = [normal(rng, value_heads, dtype=torch.float32, scale=s) for s in (0.5, 0.3)]
    return (
        q, k, normal(rng, *lead, value_heads, size), gate[0] - 2, a, gate[1],
        normal(rng, *lead, value_heads),
    )  # fmt: skip


def slow_tokens(state: Any, tokens: list[Any], gate: list[Any], scale: float) -> Any:
    """The recurrence over the first axis, all value heads; state [HV, V, K] is updated."""
    (q, k, v), (A_log, a, dt_bias, b) = tokens, gate
    out = np.zeros(v.shape)
    group = v.shape[1] // q.shape[1]
    for t in range(len(q)):
        for n in range(v.shape[1]):
            decay, beta = slow_gate(A_log[n], a[t, n], dt_bias[n], b[t, n])
            head = state[n].tolist()
            out[t, n] = slow_step(
                head, q[t, n // group], k[t, n // group], v[t, n], decay, beta, scale
            )
            state[n] = head
    return out


@pytest.mark.parametrize(("given", "used"), [(0.25, 0.25), (0.0, 6**-0.5), (None, 6**-0.5)])
@pytest.mark.parametrize("with_state", [True, False])
def test_gdn_decode(given: Any, used: Any, with_state: bool) -> None:
    rng = np.random.default_rng(7)
    batch, heads, size = 3, 4, 6
    q, k, v, A_log, a, dt_bias, b = delta_inputs(rng, (batch, 1))
    state = normal(rng, batch, heads, size, size, dtype=torch.float32) if with_state else None
    definition = load(DECODE).resized(num_q_heads=2, num_k_heads=2, num_v_heads=4, head_size=size)
    out, new = unchanged(definition, q, k, v, state, A_log, a, dt_bias, b, given)
    assert (out.dtype, new.dtype) == (torch.bfloat16, torch.float32)
    for row in range(batch):
        now = f64(state)[row] if state is not None else np.zeros((heads, size, size))
        tokens = [f64(x)[row] for x in (q, k, v)]
        gate = [f64(A_log), f64(a)[row], f64(dt_bias), f64(b)[row]]
        expected = slow_tokens(now, tokens, gate, used)
        np.testing.assert_allclose(f64(out)[row], expected, rtol=2.0**-8, atol=1e-6)
        np.testing.assert_allclose(f64(new)[row], now, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_state", [True, False])
def test_gdn_prefill(with_state: bool) -> None:
    rng = np.random.default_rng(8)
    heads, size, total = 4, 6, 12
    bounds = [1, 6, 6, 7, 11]  # a sequence without tokens; rows 0 and 11 belong to none
    q, k, v, A_log, a, dt_bias, b = delta_inputs(rng, (total,))
    state = normal(rng, 4, heads, size, size, dtype=torch.float32) if with_state else None
    definition = load(PREFILL).resized(num_q_heads=2, num_k_heads=2, num_v_heads=4, head_size=size)
    cu_seqlens = torch.tensor(bounds)
    out, new = unchanged(definition, q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, 0.3)
    expected, expected_state = np.zeros(v.shape), np.zeros((4, heads, size, size))
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        if first == end:
            continue  # its state is dropped: zeros
        now = f64(state)[s] if state is not None else np.zeros((heads, size, size))
        tokens = [f64(x)[first:end] for x in (q, k, v)]
        gate = [f64(A_log), f64(a)[first:end], f64(dt_bias), f64(b)[first:end]]
        expected[first:end] = slow_tokens(now, tokens, gate, 0.3)
        expected_state[s] = now
    np.testing.assert_allclose(f64(out), expected, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_allclose(f64(new), expected_state, rtol=1e-4, atol=1e-6)


# top-k indexer


def test_topk_indexer() -> None:
    heads, dim, page_size, topk, pages = 3, 8, 4, 6, 9
    definition = load(INDEXER).resized(
        num_index_heads=heads,
        index_head_dim=dim,
        page_size=page_size,
        topk=topk,
        head_dim_with_scale=dim + 4,
    )
    rng = np.random.default_rng(9)
    keys = normal(rng, pages, page_size, dim).to(torch.float8_e4m3fn)
    scales = rng.uniform(0.1, 3.0, (pages, page_size)).astype(np.float32)
    raw = bytearray()
    for p in range(pages):
        raw += bytes(keys[p].view(torch.uint8).flatten().tolist())
        raw += b"".join(struct.pack("<f", scale) for scale in scales[p])
    cache = torch.frombuffer(raw, dtype=torch.int8).reshape(pages, page_size, 1, dim + 4)
    lengths = [0, 3, 6, 7, 16]  # none, fewer than top-k, as many, one more, a full row
    q = normal(rng, len(lengths), heads, dim).to(torch.float8_e4m3fn)
    weights = normal(rng, len(lengths), heads, dtype=torch.float32)
    assert (weights < 0).any()
    table = torch.full((len(lengths), 4), 10**6, dtype=torch.int32)  # past the end: never read
    for b, length in enumerate(lengths):
        used = -(-length // page_size)
        table[b, :used] = torch.from_numpy(rng.permutation(pages)[:used])
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    chosen = unchanged(definition, q, cache, weights, seq_lens, table)
    assert (chosen.dtype, tuple(chosen.shape)) == (torch.int32, (len(lengths), topk))
    wide = f64(keys) * scales.astype(np.float64)[..., None]
    for b, length in enumerate(lengths):
        scores: dict[int, float] = {}
        for j in range(length):
            page, slot = int(table[b, j // page_size]), j % page_size
            dots = (sum(x * y for x, y in zip(f64(q)[b, h], wide[page, slot], strict=True))
                    for h in range(heads))  # fmt: skip
            total = sum(float(w) * max(0.0, d) for w, d in zip(weights[b], dots, strict=True))
            scores[page * page_size + slot] = total
        best = sorted(scores, key=lambda slot: scores[slot], reverse=True)[:topk]
        assert chosen[b].tolist() == best + [-1] * (topk - len(best))


def test_index_keys_read_scales_behind_the_rows() -> None:
    cache = torch.zeros(1, 64, 1, 132, dtype=torch.int8)
    flat = cache.view(torch.uint8).view(-1)
    flat[5 * 128 + 7] = 0x38  # 1.0 in float8_e4m3fn
    flat[8192 + 4 * 5 : 8192 + 4 * 6] = torch.tensor(list(struct.pack("<f", 2.5)))
    keys = dsa.index_keys(cache, torch.tensor([0]), 128)
    assert keys[5, 7] == 2.5
    assert keys.count_nonzero() == 1


# mixture of experts


def slow_route(logits: Any, bias: Any, groups: Any, kept: Any, top_k: Any) -> Any:
    """Chosen experts of one token and their shares."""
    s = [1 / (1 + math.exp(-x)) for x in logits]
    c = [x + y for x, y in zip(s, bias, strict=True)]
    size = len(s) // groups
    score = [sum(sorted(c[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    keep = sorted(range(groups), key=lambda g: score[g])[-kept:]
    allowed = [e for e in range(len(s)) if e // size in keep]
    chosen = sorted(allowed, key=lambda e: c[e])[-top_k:]
    total = sum(s[e] for e in chosen) + 1e-20
    return {e: s[e] / total for e in chosen}


def fp8(rng: np.random.Generator, *shape: int) -> Any:
    return normal(rng, *shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("offset", [0, 8, 36, -2])  # the last two reach past the experts
def test_moe(offset: int) -> None:
    tokens, experts, local, hidden, inner, block = 9, 40, 8, 8, 6, 2
    definition = load(MOE).resized(
        num_experts=experts, num_local_experts=local, hidden_size=hidden, intermediate_size=inner,
        gemm1_out_size=2 * inner, num_hidden_blocks=hidden // block,
        num_intermediate_blocks=inner // block, num_gemm1_out_blocks=2 * inner // block,
    )  # fmt: skip
    rng = np.random.default_rng(10)
    logits = normal(rng, tokens, experts, dtype=torch.float32)
    bias = normal(rng, experts, scale=0.3)  # enough to change the choice
    logits[4, :] = torch.linspace(-9, -8, experts)  # a token that avoids every local expert
    logits[4, 8 * (offset == 0) :: 5] += 14
    x, w1, w2 = fp8(rng, tokens, hidden), fp8(rng, local, 2 * inner, hidden), None
    w2 = fp8(rng, local, hidden, inner)
    scale = {
        "x": torch.from_numpy(rng.uniform(0.5, 2, (hidden // block, tokens))).float(),
        "w1": torch.from_numpy(rng.uniform(0.5, 2, (local, inner, hidden // block))).float(),
        "w2": torch.from_numpy(
            rng.uniform(0.5, 2, (local, hidden // block, inner // block))
        ).float(),
    }
    out = unchanged(
        definition, logits, bias, x, scale["x"], w1, scale["w1"], w2, scale["w2"], offset, 2.5
    )
    expected = np.zeros((tokens, hidden))
    for t in range(tokens):
        a = [f64(x)[t, h] * f64(scale["x"])[h // block, t] for h in range(hidden)]
        for e, share in slow_route(f64(logits)[t], f64(bias), 8, 4, 8).items():
            n = e - offset
            if not 0 <= n < local:
                continue
            g = [
                sum(a[h] * f64(w1)[n, o, h] * f64(scale["w1"])[n, o // block, h // block]
                    for h in range(hidden))
                for o in range(2 * inner)
            ]  # fmt: skip
            mid = [g[i] * g[inner + i] / (1 + math.exp(-g[inner + i])) for i in range(inner)]
            for h in range(hidden):
                expected[t, h] += 2.5 * share * sum(
                    mid[i] * f64(w2)[n, h, i] * f64(scale["w2"])[n, h // block, i // block]
                    for i in range(inner)
                )  # fmt: skip
    idle = [t for t in range(tokens) if not expected[t].any()]
    assert out.dtype == torch.bfloat16
    assert all((out[t] == 0).all() for t in idle)
    assert len(idle) < tokens
    np.testing.assert_allclose(f64(out), expected, rtol=2.0**-8 + 1e-5, atol=1e-4)


def test_moe_without_a_local_expert_is_zero() -> None:
    definition = load(MOE).resized(
        num_experts=16, num_local_experts=2, hidden_size=4, intermediate_size=2, gemm1_out_size=4,
        num_hidden_blocks=2, num_intermediate_blocks=1, num_gemm1_out_blocks=2,
    )  # fmt: skip
    rng = np.random.default_rng(11)
    logits = torch.linspace(4, -4, 16).repeat(3, 1)  # the first half wins
    inputs = [logits, torch.zeros(16, dtype=torch.bfloat16), fp8(rng, 3, 4), torch.ones(2, 3)]
    inputs += [fp8(rng, 2, 4, 4), torch.ones(2, 2, 2), fp8(rng, 2, 4, 2), torch.ones(2, 2, 1)]
    assert (load_reference(definition)(*inputs, 14, 2.5) == 0).all()
    assert (load_reference(definition)(*inputs, 0, 2.5) != 0).any()


def test_routing_shares_use_scores_without_bias() -> None:
    logits, bias = torch.zeros(1, 16), torch.zeros(16)
    logits[0, 3] = 2.0
    bias[:8] = 1.0  # the first four groups win, whatever the scores
    chosen, share = moe.route(logits, bias)
    assert sorted(chosen[0].tolist()) == list(range(8))
    s3 = 1 / (1 + math.exp(-2.0))
    assert share[0][chosen[0] == 3].item() == pytest.approx(s3 / (s3 + 7 * 0.5), rel=1e-6)


# sampling


def slow_filter(row: Any, k: Any, p: Any) -> Any:
    """The filtered row, by lists; which of several equal probabilities stay is left open."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    row = list(row)
    if k is not None and 0 < k < len(row):
        kept = sum(row[i] for i in order[:k])
        row = [x / kept if i in order[:k] else 0.0 for i, x in enumerate(row)]
    if p is not None and p <= 0:
        return [1.0 if i == order[0] else 0.0 for i in range(len(row))]
    if p is not None and p < 1:
        keep: list[int] = []
        total = 0.0
        for i in order:
            if keep and total > p:
                break
            keep.append(i)
            total += row[i]
        kept = sum(row[i] for i in keep)
        row = [x / kept if i in keep else 0.0 for i, x in enumerate(row)]
    return row


DYADIC = [0.125, 0.25, 0.0, 0.5, 0.0625, 0.0625]  # cumulative sums are exact
ROWS = [DYADIC, [0.25, 0.25, 0.25, 0.25, 0.0, 0.0], [0.32, 0.06, 0.19, 0.13, 0.11, 0.19]]
KS = [-3, 0, 1, 2, 3, 5, 6, 7]
PS = [-1.0, 0.0, 0.3, 0.5, 0.75, 0.8751, 0.999, 1.0, 2.0]


@pytest.mark.parametrize("row", ROWS)
def test_filtered_distribution(row: Any) -> None:
    cases = [(k, p) for k in [None, *KS] for p in [None, *PS]]
    for k, p in cases:
        args = {
            "top_k": None if k is None else torch.tensor([k, 1], dtype=torch.int32),
            "top_p": None if p is None else torch.tensor([p, 0.9]),
        }
        probs = torch.tensor([row, [1.0, 0, 0, 0, 0, 0]])
        got = sampling.filtered(probs, **args)
        assert got.dtype == torch.float32
        assert got[1].tolist() == [1.0, 0, 0, 0, 0, 0]  # rows do not mix
        expected = slow_filter(probs[0].tolist(), k, p)
        np.testing.assert_allclose(
            sorted(got[0].tolist()), sorted(expected), atol=1e-6, err_msg=f"k={k} p={p}"
        )
        for i, j in [(i, j) for i in range(6) for j in range(6) if row[i] > row[j]]:
            assert got[0, i] >= got[0, j], (k, p)


def test_filters_in_their_order_and_their_bounds() -> None:
    probs = torch.tensor([DYADIC])

    def kept(k: Any = None, p: Any = None) -> Any:
        top_k = None if k is None else torch.tensor([k])
        top_p = None if p is None else torch.tensor([p])
        return sampling.filtered(probs, top_k, top_p)[0]

    assert kept(p=0.5).count_nonzero() == 2  # 0.5 does not exceed 0.5: the next one is kept too
    assert kept(p=0.4999).count_nonzero() == 1
    assert kept(k=2, p=0.6).count_nonzero() == 1  # 0.5 of 0.75 is over 0.6; of 1 it is not
    assert kept(p=0.6).count_nonzero() == 2
    assert torch.equal(kept(k=0), probs[0])
    assert torch.equal(kept(k=6), probs[0])
    probs *= 0.5  # a filter that does not apply does not normalise either
    assert torch.equal(kept(k=6, p=1.0), probs[0])
    assert torch.equal(kept(k=0, p=1.5), probs[0])
    assert kept(k=5).sum() == 1.0
    assert kept(p=0.4).sum() == 1.0
    assert kept(p=-1.0).tolist() == [0, 0, 0, 1.0, 0, 0]


@pytest.mark.parametrize("name", [n for n in names() if load(n).op_type == "sampling"])
def test_samples_follow_the_filtered_distribution(name: str) -> None:
    definition = load(name).resized(vocab_size=6)
    draws = 4000
    probs = torch.tensor(ROWS[2]).repeat(draws, 1)
    filters = {"top_k": torch.full((draws,), 4), "top_p": torch.full((draws,), 0.75)}
    inputs = {n: filters[n] for n in definition.inputs if n != "probs"}
    torch.manual_seed(12)
    samples = load_reference(definition)(probs, **inputs)
    assert (samples.dtype, tuple(samples.shape)) == (torch.int64, (draws,))
    expected = sampling.filtered(probs[:1], **{n: x[:1] for n, x in inputs.items()})[0].double()
    count = torch.bincount(samples, minlength=6)
    assert (count[expected == 0] == 0).all()
    live = expected > 0
    chi2 = ((count - draws * expected) ** 2 / (draws * expected))[live].sum()
    assert chi2 < 25  # at most 5 degrees of freedom: one seed in 7,000
