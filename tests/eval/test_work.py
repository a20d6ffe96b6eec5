"""The work of a workload is that of its inputs, counted one by one."""

from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import DefinitionError, load
from ptxflow.eval.bench.inputs import make_indices, make_inputs
from ptxflow.eval.bench.records import Record
from ptxflow.eval.bench.work import SEED, attended, counted, timed_on

PAGED = "gqa_paged_prefill_causal_h32_kv8_d128_ps64"
FLAT = "gqa_paged_prefill_causal_h32_kv4_d128_ps1"
RAGGED = "gqa_ragged_prefill_causal_h32_kv8_d128"
DECODE = "gqa_paged_decode_h32_kv8_d128_ps64"
MLA = "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1"
LISTS = "dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps64"
INDEXER = "dsa_topk_indexer_fp8_h64_d128_topk256_ps64"
MOE = "moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048"


def paged(total_q: int, sequences: int, pages: int, cache: int) -> dict[str, int]:
    return {"total_q": total_q, "len_indptr": sequences + 1, "num_kv_indices": pages,
            "num_pages": cache}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        (PAGED, {**paged(301, 3, 16, 40), "batch_size": 3}),  # uneven
        (PAGED, {**paged(2000, 4, 10, 7), "batch_size": 4}),  # masked rows, shared pages
        (FLAT, paged(90, 4, 33, 33)),  # more queries than keys
        (RAGGED, {"total_q": 50, "total_kv": 131, "len_indptr": 6}),
        (MLA, paged(21, 5, 77, 90)),
        (DECODE, {"batch_size": 6, "len_indptr": 7, "num_kv_indices": 20, "num_pages": 25}),
    ],
)
def test_pairs_queries_and_tokens_are_those_of_the_inputs(name: str, axes: dict[str, int]) -> None:
    definition = load(name)
    made = make_indices(definition, axes, SEED)
    page = definition.const_axes.get("page_size", 1)
    starts = made["kv_indptr"].tolist()
    asked = made["qo_indptr"].tolist() if "qo_indptr" in made else range(len(starts))
    last = made["kv_last_page_len"].tolist() if "kv_last_page_len" in made else [page] * 9
    pairs, seeing, tokens = 0, 0, set()
    for i in range(len(starts) - 1):
        ids = made["kv_indices"].tolist() if "kv_indices" in made else range(starts[-1])
        rows = [(p, t) for p in ids[starts[i] : starts[i + 1]] for t in range(page)]
        rows = rows[: max(0, len(rows) - page + last[i])] if rows else rows
        count = asked[i + 1] - asked[i]
        seen = [max(0, len(rows) - count + q + 1) for q in range(count)]
        pairs, seeing = pairs + sum(seen), seeing + sum(n > 0 for n in seen)
        tokens |= set(rows) if count else set()
    found = attended(definition.bind(axes), made)
    assert (found.pairs, found.queries, found.tokens) == (pairs, seeing, len(tokens))


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        (PAGED, {**paged(512, 4, 24, 40), "batch_size": 4}),
        (RAGGED, {"total_q": 60, "total_kv": 120, "len_indptr": 7}),
        (MLA, paged(20, 5, 75, 90)),
        (DECODE, {"batch_size": 6, "len_indptr": 7, "num_kv_indices": 24, "num_pages": 25}),
        ("gemm_n128_k2048", {"M": 17}),
    ],
)
def test_even_sequences_have_the_work_that_their_axes_say(name: str, axes: dict[str, int]) -> None:
    own, found = find_problem(load(name), axes)[1], counted(load(name), axes)
    assert found.flops == pytest.approx(own.flops) and found.bytes == pytest.approx(own.bytes)


def test_rows_that_see_nothing_are_no_work() -> None:
    """The public prefills of more queries than keys, which stood at 160% of the attainable."""
    axes = paged(80, 4, 32, 40)
    own, found = find_problem(load(FLAT), axes)[1], counted(load(FLAT), axes)
    masked = 80 - attended(load(FLAT).bind(axes), make_indices(load(FLAT), axes, SEED)).queries
    assert masked >= 48 and found.bytes == own.bytes - masked * 2 * 32 * 128
    mla = counted(load(MLA), axes)
    assert find_problem(load(MLA), axes)[1].bytes - mla.bytes == masked * 2 * 16 * (512 + 64)


def test_where_no_inputs_have_the_axes_the_estimate_stands() -> None:
    axes = paged(8, 2, 32, 4)  # sequences of 16 pages, in a cache of 4
    with pytest.raises(DefinitionError):
        make_indices(load(MLA), axes, SEED)
    assert counted(load(MLA), axes) == find_problem(load(MLA), axes)[1]


def test_lists_count_what_they_name_once() -> None:
    axes = {"num_tokens": 40, "num_pages": 3}
    listed = make_indices(load(LISTS), axes, SEED)["sparse_indices"]
    own, found = find_problem(load(LISTS), axes)[1], counted(load(LISTS), axes)
    entries, rows = int((listed >= 0).sum()), len(set(listed[listed >= 0].tolist()))
    assert 0 < entries < listed.numel() and rows <= 3 * 64
    assert found.flops == 2 * 16 * (2 * 512 + 64) * entries
    assert own.bytes - found.bytes == 2 * 576 * (3 * 64 - rows)


def test_the_indexer_scores_the_tokens_that_there_are() -> None:
    axes = {"batch_size": 10, "max_num_pages": 5, "num_pages": 60}
    made = make_indices(load(INDEXER), axes, SEED)
    lengths = made["seq_lens"].tolist()
    own, found = find_problem(load(INDEXER), axes)[1], counted(load(INDEXER), axes)
    assert found.flops == 2 * 64 * 128 * sum(lengths) < own.flops
    pages = sum(-(-n // 64) for n in lengths)
    assert own.bytes - found.bytes == 132 * (50 * 64 - sum(lengths)) + 4 * (50 - pages)


def test_a_moe_reads_the_experts_that_are_chosen() -> None:
    axes = {"seq_len": 14}
    own, found = find_problem(load(MOE), axes)[1], counted(load(MOE), axes)
    other = counted(load(MOE), axes, seed=2)
    assert found.flops != own.flops and other.bytes != found.bytes


@pytest.mark.parametrize("name", [PAGED, RAGGED, MLA, LISTS, INDEXER])
def test_indices_are_those_of_the_inputs(name: str) -> None:
    axes: dict[str, Any] = {
        PAGED: {**paged(301, 3, 16, 40), "batch_size": 3},
        RAGGED: {"total_q": 50, "total_kv": 131, "len_indptr": 6},
        MLA: paged(21, 5, 77, 90),
        LISTS: {"num_tokens": 40, "num_pages": 3},
        INDEXER: {"batch_size": 10, "max_num_pages": 5, "num_pages": 60},
    }[name]
    made, inputs = make_indices(load(name), axes, 7), make_inputs(load(name), axes, 7)
    assert made and all(torch.equal(tensor, inputs[key]) for key, tensor in made.items())


def test_a_record_says_which_inputs_it_was_timed_on() -> None:
    kernel = Record("gemm_n128_k2048", {"M": 6}, {}, "a", "h200", "ok", check={"seeds": [3, 4]})
    assert timed_on(kernel) == 3
    assert timed_on(Record("gemm_n128_k2048", {"M": 6}, {}, "a", "h200", "hang")) == SEED
    assert np.isfinite(counted(load(FLAT), paged(90, 4, 33, 33), 3).flops)
