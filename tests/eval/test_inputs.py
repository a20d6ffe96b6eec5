"""Inputs are reproducible and valid, workloads have inputs, tolerances tell right from wrong."""

import collections
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.env.tasks.definition import Definition, DefinitionError, load, names, parse
from ptxflow.env.tasks.sequences import paged_prefill, pattern, ragged_prefill, split
from ptxflow.env.tasks.workload import workloads
from ptxflow.eval.bench import attention_workloads, inputs
from ptxflow.eval.bench.checking import compare
from ptxflow.eval.bench.inputs import CHUNK, make_indices, make_inputs
from ptxflow.eval.bench.references import load_reference, moe
from ptxflow.eval.bench.tolerance import tolerance

AXES = {
    "batch_size": 20, "seq_len": 20, "num_tokens": 20, "num_pages": 60, "max_num_pages": 3,
    "total_seq_len": 64, "num_seqs": 4, "len_cu_seqlens": 5, "M": 5, "len_indptr": 21,
    "total_q": 40, "total_kv": 90, "num_kv_indices": 50,
}  # fmt: skip
# of the axes alone, as plans are
LENGTHS = {"cu_seqlens", "kv_indptr", "qo_indptr", "kv_last_page_len"}
SMALL = {
    "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "head_dim_ckv": 8, "head_dim_kpe": 4,
    "hidden_size": 16, "N": 8, "K": 64, "vocab_size": 50, "topk": 12, "num_index_heads": 3,
    "num_q_heads": 2, "num_k_heads": 2, "num_v_heads": 4, "head_size": 8,
}  # fmt: skip
SMALL_MOE = {
    "num_experts": 32, "num_local_experts": 4, "hidden_size": 16, "intermediate_size": 8,
    "gemm1_out_size": 16, "num_hidden_blocks": 2, "num_intermediate_blocks": 1,
    "num_gemm1_out_blocks": 2,
}  # fmt: skip


def small(name: str) -> Any:
    definition = load(name)
    sizes = SMALL_MOE if definition.op_type == "moe" else SMALL
    definition = definition.resized(
        **{a: v for a, v in sizes.items() if a in definition.const_axes}
    )
    return definition, {axis: AXES[axis] for axis in definition.var_axes}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return bool(a == b)


@pytest.mark.parametrize("name", names())
def test_inputs_are_reproducible_and_fit_the_definition(name: str) -> None:
    definition, axes = small(name)
    first, again, other = (make_inputs(definition, axes, seed) for seed in (0, 0, 1))
    assert list(first) == list(definition.inputs)
    bound = definition.bind(axes)
    shapes = definition.shapes(definition.inputs, bound)
    for key, tensor in definition.inputs.items():
        assert same(first[key], again[key]), key
        if tensor.shape is None:
            assert isinstance(first[key], int | float)
            assert first[key] == other[key], key  # a kernel takes one value for all seeds
            continue
        assert tuple(first[key].shape) == shapes[key]
        assert first[key].dtype == getattr(torch, tensor.dtype)
        assert same(first[key], other[key]) == (key in LENGTHS), key
    outputs = load_reference(definition)(**first)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    shapes = definition.shapes(definition.outputs, bound)
    for (key, tensor), out in zip(definition.outputs.items(), outputs, strict=True):
        assert (tuple(out.shape), out.dtype) == (shapes[key], getattr(torch, tensor.dtype))
        assert not out.isnan().any()
        assert tolerance(definition, key).reason


def test_values_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = load("gemm_n128_k2048")
    m = CHUNK // 2048 * 3 - 5  # three chunks, the last one short
    many = make_inputs(definition, {"M": m}, 7)["A"]
    monkeypatch.setattr("ptxflow.eval.bench.inputs.os.cpu_count", lambda: 1)
    assert torch.equal(many, make_inputs(definition, {"M": m}, 7)["A"])
    assert many.float().std().item() == pytest.approx(1.0, abs=0.01)
    assert not torch.equal(many[:512], many[512:1024])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_values_are_the_same_on_a_gpu() -> None:
    host, device = (make_inputs(load("gemm_n128_k2048"), {"M": 9}, 7, d) for d in ("cpu", "cuda"))
    assert all(torch.equal(host[k], device[k].cpu()) for k in host)


def test_scalars_of_a_workload_are_taken() -> None:
    definition, axes = small("gqa_ragged_prefill_causal_h32_kv4_d128")
    assert make_inputs(definition, axes, 0, scalars={"sm_scale": 0.5})["sm_scale"] == 0.5
    with pytest.raises(DefinitionError, match="no scalar input 'q'"):
        make_inputs(definition, axes, 0, scalars={"q": 0.5})


def test_refusals() -> None:
    definition, axes = small("mla_paged_prefill_causal_h16_ckv512_kpe64_ps1")
    with pytest.raises(DefinitionError, match="needs 50 pages and the cache has 49"):
        make_inputs(definition, axes | {"len_indptr": 2, "num_pages": 49}, 0)
    with pytest.raises(DefinitionError, match="so at least 2"):
        make_inputs(definition, axes | {"len_indptr": 1}, 0)
    with pytest.raises(DefinitionError, match="must not be negative"):
        make_inputs(definition, axes, -1)


PREFILLS = [name for name in names() if "prefill_causal" in name]


@pytest.mark.parametrize("name", PREFILLS)
def test_more_queries_than_keys_see_nothing(name: str) -> None:
    """Queries are the last tokens of their sequence: where there are more, the first see none, nor
    do those of an empty sequence. Outputs are 0 there, and lse minus infinity."""
    definition, axes = small(name)
    held = {"total_kv": 35, "num_kv_indices": 35, "num_pages": 40}
    axes |= {n: v for n, v in (held | {"len_indptr": 18, "batch_size": 17}).items() if n in axes}
    page = definition.const_axes.get("page_size", 1)
    axes["total_q"] = 35 * page + 60
    inputs = make_inputs(definition, axes, 0)
    queries, keys = (inputs[n].diff() for n in ("qo_indptr", "kv_indptr"))
    if page > 1:
        keys = (keys * page - page + inputs["kv_last_page_len"]).clamp(min=0)
    assert queries.sum() == axes["total_q"] and (keys == 0).any()
    ends = inputs["qo_indptr"][1:].repeat_interleave(queries)
    seen = torch.arange(axes["total_q"]) + 1 - ends + keys.repeat_interleave(queries)
    masked = seen <= 0
    output, lse = load_reference(definition)(**inputs)
    assert 60 <= masked.sum() < len(masked) and (keys > 0)[(queries > keys)].any()
    assert (output[masked] == 0).all() and (lse[masked] == -torch.inf).all()
    assert (output[~masked] != 0).any(-1).all() and lse[~masked].isfinite().all()


@pytest.mark.parametrize("parts", [1, 2, 7, 16, 33])
def test_lengths_follow_the_remainder(parts: int) -> None:
    for total in (*range(1, 3 * parts), *range(1000 * parts, 1000 * parts + 4)):
        sizes, kind = split(total, parts, "pages"), pattern(total, parts)
        assert (sizes.sum(), len(sizes), sizes.min() >= 0) == (total, parts, True)
        assert (sizes == split(total, parts, "pages")).all()
        assert (kind == "even") == (total % parts == 0) >= (sizes.max() - sizes.min() == 0)
        if total < 1000 * parts or parts < 3:
            continue
        live, mean = sizes[sizes > 0], total / parts
        match kind:
            case "exponential":
                assert live.max() > 2 * mean and live.min() < mean / 3
            case "long":
                assert live.max() == pytest.approx(total / 2, rel=0.1)
                assert np.sort(live)[-2] - live.min() <= 1
            case "uniform":
                assert live.max() <= 3 * live.min() + 3 and live.max() > 1.1 * mean
        assert len(live) == parts - (parts // 16 if kind in ("exponential", "uniform") else 0)


def test_prefixes_are_whole_pages_and_have_a_pattern_of_their_own() -> None:
    axes = {"len_indptr": 5, "page_size": 4, "total_q": 38, "num_kv_indices": 111}
    found = paged_prefill(axes)
    own = int((-(-found.queries // 4)).sum())
    assert (pattern(38, 4), own) == ("long", 11)
    before = found.keys - found.queries
    assert before.tolist() == [100] * 4  # in 25 pages each
    assert (found.pages == -(-found.keys // 4)).all()
    tight = paged_prefill(axes | {"num_kv_indices": 10})  # a page short of the queries' own
    assert (tight.queries <= tight.keys).all() and tight.queries.sum() == 38
    scarce = paged_prefill(axes | {"num_kv_indices": 9})
    assert scarce.keys.sum() <= 36 and scarce.queries.sum() == 38
    ragged = ragged_prefill({"len_indptr": 5, "total_q": 42, "total_kv": 42})
    assert (ragged.keys == ragged.queries).all()


def page_table_is_valid(definition: Definition, axes: Any, inputs: Any) -> None:
    page_size = axes["page_size"]
    indptr = inputs["kv_indptr"].tolist()
    counts = np.diff(indptr)
    indices = inputs["kv_indices"].numpy()
    assert indptr[0] == 0
    assert indptr[-1] == axes["num_kv_indices"]
    assert (counts >= 0).all()
    assert indices.min() >= 0
    assert indices.max() < axes["num_pages"]
    if axes["num_kv_indices"] <= axes["num_pages"]:
        assert len(np.unique(indices)) == len(indices)
    for first, end in itertools.pairwise(indptr):
        assert len(set(indices[first:end])) == end - first
    tokens = counts * page_size
    if "kv_last_page_len" in inputs:
        last = inputs["kv_last_page_len"].numpy()
        assert ((last >= 1) & (last <= page_size))[counts > 0].all()
        assert (last[counts == 0] == 0).all()
        tokens = np.maximum(tokens - page_size + last, 0)
    if "qo_indptr" in inputs:
        queries = np.diff(inputs["qo_indptr"].numpy())
        assert inputs["qo_indptr"][0] == 0
        assert queries.sum() == axes["total_q"]
        assert (queries >= 0).all()
        if axes["total_q"] <= axes["num_kv_indices"] * page_size:
            assert (queries <= tokens).all()


@pytest.mark.parametrize("name", [n for n in names() if "paged" in n])
def test_page_tables_of_every_workload(name: str) -> None:
    definition = load(name)
    for row in workloads(name):
        if row.refusal:
            continue
        axes = definition.bind(row.axes)
        page_table_is_valid(definition, axes, make_indices(definition, row.axes, 3))


def test_special_rows_are_drawn() -> None:
    """The cases that the definitions single out come up in batches of some size."""
    decode, axes = small("gqa_paged_decode_h32_kv4_d128_ps1")
    assert 0 in np.diff(make_inputs(decode, axes, 0)["kv_indptr"].numpy())
    sampler, axes = small("top_k_top_p_sampling_from_probs_v129280")
    drawn = [make_inputs(sampler, axes, seed) for seed in range(20)]
    assert {-1, 0, 50, 51} <= {int(k) for inputs in drawn for k in inputs["top_k"]}
    assert {-0.5, 0.0, 1.0, 1.5} <= {float(p) for inputs in drawn for p in inputs["top_p"]}
    single = [make_inputs(sampler, axes | {"batch_size": 1}, seed) for seed in range(20)]
    assert all(0 < i["top_k"] <= 50 and 0 < i["top_p"] < 1 for i in single)
    sparse, axes = small("dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps1")
    indices = make_inputs(sparse, axes, 0)["sparse_indices"].numpy()
    assert (indices == -1).all(1).any()
    for row in indices:
        real = row[row >= 0]
        assert len(set(real)) == len(real)
        assert (real < axes["num_pages"]).all()


def test_indexer_inputs() -> None:
    definition, axes = small("dsa_topk_indexer_fp8_h64_d128_topk256_ps64")
    definition = load(definition.name).resized(num_index_heads=3)
    inputs = make_inputs(definition, axes, 0)
    lengths, table = inputs["seq_lens"].tolist(), inputs["block_table"].numpy()
    assert -(-lengths[0] // 64) == axes["max_num_pages"]
    assert 0 in lengths
    assert max(lengths) <= 64 * axes["max_num_pages"]
    used = [page for row, n in zip(table, lengths, strict=True) for page in row[: -(-n // 64)]]
    assert len(set(used)) == len(used)
    assert table.min() >= 0
    assert table.max() < axes["num_pages"]
    scales = inputs["k_index_cache_fp8"].flatten(1)[:, 8192:].contiguous().view(torch.float32)
    assert ((scales > 0) & (scales < 0.1)).all()


def test_softmax_probabilities_and_unit_keys() -> None:
    sampler, axes = small("top_k_sampling_from_probs_v128256")
    probs = make_inputs(sampler, axes, 0)["probs"]
    torch.testing.assert_close(probs.sum(-1), torch.ones(20))
    gdn, axes = small("gdn_prefill_qk16_v32_d128_k_last")
    inputs = make_inputs(gdn, axes, 0)
    assert inputs["cu_seqlens"].tolist()[::4] == [0, 64]
    for name in ("q", "k"):
        norms = inputs[name].float().norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=5e-3)


def test_moe_inputs_are_of_the_size_the_tolerance_assumes() -> None:
    definition, axes = small("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048")
    sizes = {"hidden_size": 256, "intermediate_size": 128, "gemm1_out_size": 256}
    definition = definition.resized(**sizes)
    inputs = make_inputs(definition, axes | {"seq_len": 64}, 0, scalars={"local_expert_offset": 4})
    x = moe.dequantise(inputs["hidden_states"], inputs["hidden_states_scale"].T)
    assert x.std().item() == pytest.approx(1.0, abs=0.1)
    chosen, _ = moe.route(inputs["routing_logits"], inputs["routing_bias"])
    local = ((chosen >= 4) & (chosen < 8)).sum(-1)
    out = load_reference(definition)(**inputs).float()
    assert (out[local == 0] == 0).all()
    assert 0.1 < out[local == 1].std().item() < 0.3


# workloads


def test_all_public_rows_are_there_and_every_definition_has_rows() -> None:
    rows = {name: workloads(name) for name in names()}
    assert sum(row.public for name in rows for row in rows[name]) == 663
    assert all(rows.values())
    for name, of_one in rows.items():
        assert {row.definition for row in of_one} == {name}
        assert collections.Counter(row.uuid for row in of_one).most_common(1)[0][1] == 1
        assert all(not row.degenerate and not row.refusal for row in of_one if not row.public)
        sound = [row for row in of_one if not row.degenerate and not row.refusal]
        assert len(sound) >= 7, name
    refused = [row for name in rows for row in rows[name] if row.refusal]
    assert [row.axes["num_pages"] for row in refused] == [0, 0]


def test_workload_round_trip() -> None:
    for row in workloads("gqa_paged_prefill_causal_h32_kv4_d128_ps1"):
        assert type(row).from_json(row.to_json()) == row
    assert row.scalars == {"sm_scale": 0.08838834764831843}
    with pytest.raises(DefinitionError, match="unknown definition"):
        workloads("nothing")


ATTENTION = [n for n in names() if load(n).op_type in attention_workloads.OP_TYPES]


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_rows_are_those_of_the_list(name: str) -> None:
    definition = load(name)
    ours = [row for row in workloads(name) if not row.public]
    assert ours == list(attention_workloads.rows(definition))
    if "total_q" not in definition.var_axes:
        page = definition.const_axes["page_size"]
        sums = {(row.axes["batch_size"], row.axes["num_kv_indices"] * page) for row in ours}
        assert {(1, 64), (16, 4096 * 16), (64, 4096 * 64), (64, 8192 * 64)} <= sums
        kinds = [pattern(row.axes["num_kv_indices"], row.axes["batch_size"]) for row in ours]
    else:
        kinds = [pattern(row.axes["total_q"], row.axes["len_indptr"] - 1) for row in ours]
    assert set(kinds) == {"even", "exponential", "long", "uniform"}


def test_a_chunked_prefill_keeps_its_prefix_in_whole_pages() -> None:
    for name in (
        "gqa_paged_prefill_causal_h32_kv8_d128_ps64",
        "gqa_ragged_prefill_causal_h32_kv4_d128",
    ):
        definition = load(name)
        chunk = attention_workloads.Batch(4, 2304, queries=256)
        axes = attention_workloads.axes_of(definition, chunk) | dict(definition.const_axes)
        found = paged_prefill(axes) if "num_pages" in axes else ragged_prefill(axes)
        assert found.queries.tolist() == [256] * 4
        assert found.keys.tolist() == [2304] * 4


# tolerances


def truncated_matmul(a: torch.Tensor, b: torch.Tensor, step: int = 8) -> torch.Tensor:
    """float32 accumulation as tensor cores do it: a few products at a time, towards zero."""
    total = np.zeros((a.shape[0], b.shape[0]), np.float32)
    for k in range(0, a.shape[1], step):
        exact = total + a[:, k : k + step].double().numpy() @ b[:, k : k + step].double().numpy().T
        total = exact.astype(np.float32)
        over = np.abs(total.astype(np.float64)) > np.abs(exact)
        total[over] = np.nextafter(total[over], np.float32(0))
    return torch.from_numpy(total).half()


@pytest.mark.parametrize("name", [n for n in names() if load(n).op_type == "gemm"])
def test_gemm_tolerance(name: str) -> None:
    """Takes truncating accumulation, refuses one product, one K step, one row or swapped columns
    that are wrong; at M = 1 too."""
    definition = load(name).resized(N=64)
    for m in (1, 16):
        inputs = make_inputs(definition, {"M": m}, 5)
        a, b = inputs["A"], inputs["B"]
        c, bound = load_reference(definition)(a, b), tolerance(definition)
        assert compare(truncated_matmul(a, b), c, bound).wrong == 0

        def without(columns: Any, a: Any = a, b: Any = b) -> Any:
            kept = a.clone()
            kept[:, columns] = 0
            return load_reference(definition)(kept, b)

        assert compare(without([100]), c, bound).wrong > m * 32
        assert compare(without(slice(64, 80)), c, bound).wrong > m * 56
        assert compare(without(slice(-64, None)), c, bound).wrong > m * 60
        row = c.clone()
        row[0] = 0
        assert compare(row, c, bound).wrong > 60
        assert compare(c.roll(1, 1), c, bound).wrong > m * 60


def test_attention_tolerance() -> None:
    """Takes bfloat16 probabilities, refuses one missing token of 4096."""
    definition = load("gqa_paged_decode_h32_kv8_d128_ps1").resized(num_qo_heads=8)
    axes = {"batch_size": 1, "num_pages": 4096, "len_indptr": 2, "num_kv_indices": 4096}
    inputs = make_inputs(definition, axes, 0)
    out, lse = load_reference(definition)(**inputs)
    pages = inputs["kv_indices"].long()
    k, v = (inputs[n][pages, 0].float() for n in ("k_cache", "v_cache"))
    z = torch.einsum("hd,lhd->hl", inputs["q"][0].float(), k) * inputs["sm_scale"]
    p = torch.exp(z - z.amax(-1, keepdim=True))
    coarse = torch.einsum("hl,lhd->hd", p.bfloat16().float(), v) / p.sum(-1)[:, None]
    assert compare(coarse.bfloat16()[None], out, tolerance(definition)).wrong == 0
    fewer = inputs | {"kv_indptr": torch.tensor([0, 4095], dtype=torch.int32)}
    _, short = load_reference(definition)(**fewer)
    assert compare(lse, lse, tolerance(definition, "lse")).wrong == 0
    assert compare(short, lse, tolerance(definition, "lse")).wrong > 4


def test_tolerance_refuses_what_it_does_not_know() -> None:
    with pytest.raises(DefinitionError, match="no output 'D'; there are C"):
        tolerance(load("gemm_n128_k2048"), "D")
    data = load("gemm_n128_k2048").to_json()
    data["axes"]["K"] = {"type": "var"}
    with pytest.raises(DefinitionError, match="needs a constant K"):
        tolerance(parse(data))


def test_large_inputs_repeat_what_was_drawn_elsewhere_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "DRAWN", 2)
    rows = 7 * CHUNK // 4096 + 1
    a = make_inputs(load("gemm_n4096_k4096"), {"M": rows}, 0)["A"].view(-1)
    drawn, again, third = (a[i * 2 * CHUNK :][: 2 * CHUNK] for i in range(3))
    assert torch.equal(again[:CHUNK].sort().values, drawn[:CHUNK].sort().values)
    assert float((drawn == again).float().mean()) < 0.02
    assert float((again == third).float().mean()) < 0.02
    assert float(a[-4096:].float().std()) == pytest.approx(1, rel=0.1)
