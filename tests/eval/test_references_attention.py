"""Attention references against loops in float64, on small axes with every case the texts name."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.env.tasks.definition import Definition, load, names
from ptxflow.eval.bench.references import load_reference
from tests.reference_check import f64, unchanged

NAN = float("nan")
GQA_PAGED = [n for n in names() if load(n).op_type == "gqa_paged"]
GQA_RAGGED = [n for n in names() if load(n).op_type == "gqa_ragged"]
MLA_PAGED = [n for n in names() if load(n).op_type == "mla_paged"]
SPARSE = [n for n in names() if n.startswith("dsa_sparse")]


def bf16(rng: np.random.Generator, *shape: int) -> Any:
    return torch.from_numpy(rng.standard_normal(shape)).to(torch.bfloat16)


def one_row(query: Any, keys: Any, values: Any, scale: float) -> Any:
    """One query and head against a list of visible keys: output and base-2 lse, by loops."""
    if not keys:
        return np.full(len(values[0]), NAN) if values else None, -math.inf
    z = [scale * sum(float(a) * float(b) for a, b in zip(query, k, strict=True)) for k in keys]
    top = max(z)
    weights = [math.exp(x - top) for x in z]
    total = sum(weights)
    out = sum(w / total * v for w, v in zip(weights, values[: len(keys)], strict=True))
    return out, (top + math.log(total)) / math.log(2)


def check(actual: Any, expected_output: Any, expected_lse: Any) -> None:
    output, lse = actual
    assert output.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    np.testing.assert_allclose(f64(output), expected_output, rtol=2.0**-8, atol=1e-6)
    np.testing.assert_allclose(f64(lse), expected_lse, rtol=1e-5, atol=2e-5)
    exact = np.nan_to_num(f64(torch.from_numpy(expected_output).to(torch.bfloat16)))
    assert np.mean(np.nan_to_num(f64(output)) == exact) > 0.97  # one rounding, not two


def bounds_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


class Paged:
    """A page table with scattered pages, a cache whose unused places are NaN, and its tokens."""

    def __init__(
        self, rng: np.random.Generator, page_size: int, lengths: Any, empty_pages: Any = ()
    ) -> None:
        self.page_size = page_size
        counts = [-(-n // page_size) for n in lengths]
        for b in empty_pages:
            counts[b] = 1
        self.indptr = np.concatenate([[0], np.cumsum(counts)])
        self.num_pages = int(self.indptr[-1]) + 5
        self.indices = rng.permutation(self.num_pages)[: self.indptr[-1]]
        self.last = [
            n - page_size * (c - 1) if c else 0 for n, c in zip(lengths, counts, strict=True)
        ]
        self.lengths = lengths

    def slots(self, b: int) -> Any:
        """(page, slot) of each token of sequence b."""
        return [
            (self.indices[self.indptr[b] + t // self.page_size], t % self.page_size)
            for t in range(self.lengths[b])
        ]

    def cache(self, rng: np.random.Generator, *inner: int) -> Any:
        """NaN but for the tokens of the sequences."""
        cache = torch.full((self.num_pages, self.page_size, *inner), NAN, dtype=torch.bfloat16)
        for b in range(len(self.lengths)):
            for page, slot in self.slots(b):
                cache[page, slot] = bf16(rng, *inner)
        return cache

    def inputs(self, definition: Definition, queries: list[int]) -> Any:
        made = {
            "qo_indptr": bounds_of(queries),
            "kv_indptr": torch.tensor(self.indptr, dtype=torch.int32),
            "kv_indices": torch.tensor(self.indices, dtype=torch.int32),
            "kv_last_page_len": torch.tensor(self.last, dtype=torch.int32),
        }
        return {name: value for name, value in made.items() if name in definition.inputs}


def lengths_for(definition: Definition, page_size: int) -> Any:
    """Cached tokens and queries of each sequence: empty ones, one token, partial and full pages,
    more queries than tokens (rows that see nothing), queries without keys and the reverse."""
    if "qo_indptr" in definition.inputs:
        return [5, 0, 3, 2 * page_size, 1, 0, 6], [5, 2, 5, 3, 1, 0, 0]
    lengths = [0, 1, 2 * page_size, 5, 3 * page_size - 1, 0]
    return lengths, [1] * len(lengths)


def expect(queries: Any, lengths: Any, heads: int, dim: int, attend_row: Any) -> Any:
    """Expected output and lse of so many queries of each sequence, over so many keys: of none
    they are 0 and -inf."""
    total = sum(queries)
    output, lse = np.zeros((total, heads, dim)), np.full((total, heads), -math.inf)
    row = 0
    for b, count in enumerate(queries):
        for i in range(count):
            n = min(lengths[b], i + 1 + lengths[b] - queries[b])
            for h in range(heads):
                if n > 0:
                    output[row, h], lse[row, h] = attend_row(b, row, h, n)
            row += 1
    return output, lse


@pytest.mark.parametrize("name", GQA_PAGED)
@pytest.mark.parametrize("seed", range(2))
def test_gqa_paged(name: str, seed: int) -> None:
    page_size = 4 if name.endswith("ps64") else 1
    heads, kv_heads, dim = (6, 2, 8) if "kv8" in name else (8, 1, 8)
    definition = load(name).resized(
        num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim, page_size=page_size
    )
    rng = np.random.default_rng(seed)
    lengths, queries = lengths_for(definition, page_size)
    # A page with no token in it (length 0 by kv_last_page_len) is like no page.
    table = Paged(rng, page_size, lengths, empty_pages=[5] if page_size > 1 else [])
    k, v = table.cache(rng, kv_heads, dim), table.cache(rng, kv_heads, dim)
    q = bf16(rng, sum(queries), heads, dim)
    inputs = (
        {"q": q, "k_cache": k, "v_cache": v} | table.inputs(definition, queries) | {"sm_scale": 0.4}
    )

    def attend_row(b: int, row: Any, h: int, n: int) -> Any:
        g = h // (heads // kv_heads)
        where = table.slots(b)[:n]
        keys, values = ([f64(c)[p, s, g] for p, s in where] for c in (k, v))
        return one_row(f64(q)[row, h], keys, values, 0.4)

    check(unchanged(definition, **inputs), *expect(queries, lengths, heads, dim, attend_row))


@pytest.mark.parametrize("name", GQA_RAGGED)
def test_gqa_ragged(name: str) -> None:
    heads, kv_heads, dim = 4, 2, 8
    definition = load(name).resized(num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
    rng = np.random.default_rng(3)
    keys, queries = [4, 0, 7, 2, 3, 1, 0], [4, 2, 3, 5, 0, 1, 0]
    q = bf16(rng, sum(queries), heads, dim)
    k, v = bf16(rng, sum(keys), kv_heads, dim), bf16(rng, sum(keys), kv_heads, dim)
    starts = np.concatenate([[0], np.cumsum(keys)])
    bounds = {"qo_indptr": bounds_of(queries), "kv_indptr": bounds_of(keys)}
    inputs = {"q": q, "k": k, "v": v, **bounds, "sm_scale": 0.3}

    def attend_row(b: int, row: Any, h: int, n: int) -> Any:
        g, rows = h // 2, range(starts[b], starts[b] + n)
        keys_of, values_of = ([f64(x)[t, g] for t in rows] for x in (k, v))
        return one_row(f64(q)[row, h], keys_of, values_of, 0.3)

    check(unchanged(definition, **inputs), *expect(queries, keys, heads, dim, attend_row))


@pytest.mark.parametrize("name", MLA_PAGED)
def test_mla_paged(name: str) -> None:
    page_size = 4 if name.endswith("ps64") else 1
    heads, dim, rope = 3, 8, 4
    definition = load(name).resized(
        num_qo_heads=heads, head_dim_ckv=dim, head_dim_kpe=rope, page_size=page_size
    )
    rng = np.random.default_rng(4)
    lengths, queries = lengths_for(definition, page_size)
    table = Paged(rng, page_size, lengths, empty_pages=[5] if page_size > 1 else [])
    ckv, kpe = table.cache(rng, dim), table.cache(rng, rope)
    q_nope, q_pe = bf16(rng, sum(queries), heads, dim), bf16(rng, sum(queries), heads, rope)
    inputs = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe}
    inputs |= table.inputs(definition, queries) | {"sm_scale": 0.3}

    def attend_row(b: int, row: Any, h: int, n: int) -> Any:
        where = table.slots(b)[:n]
        values = [f64(ckv)[p, s] for p, s in where]
        keys = [np.concatenate([f64(ckv)[p, s], f64(kpe)[p, s]]) for p, s in where]
        query = np.concatenate([f64(q_nope)[row, h], f64(q_pe)[row, h]])
        return one_row(query, keys, values, 0.3)

    check(unchanged(definition, **inputs), *expect(queries, lengths, heads, dim, attend_row))


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention(name: str) -> None:
    page_size = 4 if name.endswith("ps64") else 1
    heads, dim, rope, topk, pages = 3, 8, 4, 6, 8
    definition = load(name).resized(
        num_qo_heads=heads, head_dim_ckv=dim, head_dim_kpe=rope, page_size=page_size, topk=topk
    )
    rng = np.random.default_rng(5)
    slots = pages * page_size
    used = rng.permutation(slots)[: slots - 2]
    # all valid; padding in places; a slot twice counts twice; nothing at all; one alone at the end
    a, b, c = used[:3]
    rows: list[Any] = [used[:topk], [-1, a, -1, b, c, -1], [a, a, b, -1, -1, -1], [-1] * topk]
    rows.append([-1] * (topk - 1) + [c])
    ckv = torch.full((pages, page_size, dim), NAN, dtype=torch.bfloat16)
    kpe = torch.full((pages, page_size, rope), NAN, dtype=torch.bfloat16)
    for slot in used[:topk]:
        ckv[slot // page_size, slot % page_size] = bf16(rng, dim)
        kpe[slot // page_size, slot % page_size] = bf16(rng, rope)
    q_nope, q_pe = bf16(rng, len(rows), heads, dim), bf16(rng, len(rows), heads, rope)
    inputs = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe}
    inputs |= {"sparse_indices": torch.tensor(np.array(rows), dtype=torch.int32), "sm_scale": 0.5}
    result = unchanged(definition, **inputs)
    output, lse = np.zeros((len(rows), heads, dim)), np.full((len(rows), heads), -math.inf)
    flat_c, flat_p = f64(ckv).reshape(slots, dim), f64(kpe).reshape(slots, rope)
    for t, row in enumerate(rows):
        real = [slot for slot in row if slot != -1]
        for h in range(heads if real else 0):
            keys = [np.concatenate([flat_c[s], flat_p[s]]) for s in real]
            query = np.concatenate([f64(q_nope)[t, h], f64(q_pe)[t, h]])
            output[t, h], lse[t, h] = one_row(query, keys, [flat_c[s] for s in real], 0.5)
    check(result, output, lse)


def test_long_prefills_go_in_slices() -> None:
    """Slices of queries (to bound memory) do not change the mask."""
    definition = load("gqa_ragged_prefill_causal_h32_kv8_d128").resized(
        num_qo_heads=2, num_kv_heads=1, head_dim=4
    )
    rng = np.random.default_rng(6)
    q, k, v = bf16(rng, 9, 2, 4), bf16(rng, 11, 1, 4), bf16(rng, 11, 1, 4)
    bounds = [torch.tensor([0, n], dtype=torch.int32) for n in (9, 11)]
    whole: Any = load_reference(definition)
    sliced: Any = load_reference(definition)
    sliced.__wrapped__.__globals__["MAX_SCORES"] = 2 * 11 * 2  # two queries at a time
    for a, b in zip(whole(q, k, v, *bounds, 0.5), sliced(q, k, v, *bounds, 0.5), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
