"""The set that flashinfer-bench runs: its workloads, its Solutions, and what is said of traces."""

import importlib
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from ptxflow.command import BadInput
from ptxflow.compiler.library.manifest import Manifest, write_library
from ptxflow.env.tasks.definition import Definition, load, names, parse
from ptxflow.env.tasks.workload import Workload, workloads
from ptxflow.eval.bench.baselines.baseline import Given, Unsupported
from ptxflow.eval.bench.baselines.registry import makers_of
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.markdown import SECTION
from ptxflow.eval.bench.references import sampling
from ptxflow.eval.bench.session import unpack
from ptxflow.eval.bench.trace_set import Evaluation, Trace, read_traces, write_traces
from ptxflow.eval.bench.work import attended
from ptxflow.eval.sample import harness
from ptxflow.eval.sample.peer_solutions import EAGER, peers
from tests.builders import refused
from tests.eval.benches import bench_of, install
from tests.library.made import FILES, GEMM


def library(folder: Path, manifest: Manifest = GEMM) -> Path:
    write_library(folder / GEMM.name, manifest, FILES)
    return folder


def test_a_set_has_spread_workloads_and_all_solutions(tmp_path: Path) -> None:
    harness.prepare(tmp_path / "set", library(tmp_path / "lib") / GEMM.name, 4)
    rows = read_traces(tmp_path / "set" / "workloads")
    sizes = [row.workload.axes["M"] for row in rows]
    assert sizes == sorted(sizes) and len(sizes) == 4 and sizes[-1] <= 4096
    made = [json.loads(p.read_text()) for p in (tmp_path / "set" / "solutions").rglob("*.json")]
    assert {m["author"] for m in made} == {"ptxflow", "torch"}
    before = (tmp_path / "set" / "workloads" / "gemm" / f"{GEMM.name}.jsonl").stat()
    harness.prepare(tmp_path / "set", tmp_path / "lib" / GEMM.name, 2)  # it is there
    assert before == (tmp_path / "set" / "workloads" / "gemm" / f"{GEMM.name}.jsonl").stat()
    package = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench not installed")
    held = package.TraceSet.from_path(str(tmp_path / "set"))
    assert len(held.workloads[GEMM.name]) == 4 and len(held.solutions[GEMM.name]) == 2


@pytest.mark.parametrize(
    "name",
    ["gqa_paged_decode_h32_kv8_d128_ps1", "gqa_ragged_prefill_causal_h32_kv4_d128",
     "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64", "top_k_top_p_sampling_from_probs_v128256",
     "dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps64"],
)  # fmt: skip
def test_what_the_harness_takes_for_wrong_or_cannot_tell_is_not_asked(name: str) -> None:
    definition = load(name)
    rows = harness.spread(definition, {}, 4)
    assert len(rows) == 4
    for row in rows[1:3]:
        made = harness.given(definition, row)
        if "sparse_indices" in made:
            assert (made["sparse_indices"] >= 0).any(-1).all()
        elif "top_p" in made:
            assert made["top_p"].min() > 0 and made["top_p"].max() < 1
            assert made.keys() == {"top_k", "top_p"} and row.axes["batch_size"] <= 8
        else:
            bound = definition.bind(row.axes)
            assert attended(bound, made).queries == bound.get("total_q", bound["len_indptr"] - 1)


def test_no_whole_numbers_are_left_to_chance() -> None:
    for definition in map(load, names()):
        for row in workloads(definition.name):
            whole = {n for n, t in definition.inputs.items() if t.shape and "int" in t.dtype}
            assert whole <= harness.needed(row), definition.name


class Wrapper:
    """Stands for FlashInfer's: `planned` has what plans were given, numbers and sizes."""

    planned: ClassVar[list[Any]] = []

    def __init__(self, space: torch.Tensor, *layout: str, **options: Any):
        self.made = [*layout, options]

    def plan(self, *args: Any, **options: Any) -> None:
        told = [a.tolist() if torch.is_tensor(a) else a for a in args]
        Wrapper.planned.append([*self.made, *map(str, told), *map(str, sorted(options.items()))])

    def run(self, *tensors: Any, out: torch.Tensor, lse: torch.Tensor, return_lse: bool) -> None:
        out.zero_(), lse.zero_()  # type: ignore[unused-ignore]


def reference(definition: Definition) -> Any:
    space: dict[str, Any] = {}
    exec(definition.source, space)
    return space["run"]


SIZES = {"batch_size": 3, "len_indptr": 4, "num_kv_indices": 6, "num_pages": 8, "total_q": 3,
         "total_kv": 6, "M": 3, "num_seqs": 3, "len_cu_seqlens": 4, "total_seq_len": 90,
         "max_num_pages": 2, "num_tokens": 3}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["gemm_n128_k2048", "rmsnorm_h128", "fused_add_rmsnorm_h2048",
     "top_k_top_p_sampling_from_probs_v128256", "gqa_paged_decode_h32_kv4_d128_ps1",
     "gqa_paged_decode_h32_kv4_d128_ps64", "gqa_paged_prefill_causal_h32_kv4_d128_ps64",
     "gqa_ragged_prefill_causal_h32_kv4_d128", "mla_paged_decode_h16_ckv512_kpe64_ps64",
     "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1", "gdn_decode_qk16_v32_d128_k_last",
     "gdn_prefill_qk16_v32_d128_k_last", "dsa_topk_indexer_fp8_h64_d128_topk256_ps64",
     "dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps1"],
)  # fmt: skip
def test_peers_do_what_our_baselines_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are given the same, and norms and products are right, through a FlashInfer of ours."""

    def fused(x: Any, residual: Any, weight: Any, eps: float) -> None:
        x.copy_(torch.nn.functional.rms_norm(x + residual, weight.shape, weight, eps))

    def rmsnorm(x: Any, weight: Any, eps: float, out: Any = None) -> Any:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    paged = [f"Batch{kind}KVCacheWrapper" for kind in
             ("DecodeWithPaged", "PrefillWithPaged", "PrefillWithRagged")]  # fmt: skip
    install(
        monkeypatch, rmsnorm=lambda *a, out, **o: out.copy_(rmsnorm(*a, **o)),
        fused_add_rmsnorm=fused, **dict.fromkeys(paged, Wrapper),
        mla__BatchMLAPagedAttentionWrapper=Wrapper,
        sampling__top_k_top_p_sampling_from_probs=lambda p, k, q, **o: p.argmax(-1).int(),
    )  # fmt: skip
    for part in ("sampling", "mla"):
        module = sys.modules[f"flashinfer.{part}"]
        monkeypatch.setattr(sys.modules["flashinfer"], part, module, raising=False)
    definition = load(name)
    bench = bench_of(definition, {n: SIZES[n] for n in definition.var_axes}, 1)
    inputs, expected = bench.fill(1)
    monkeypatch.setattr(Wrapper, "planned", [])
    for data in peers(definition, 1e-6):
        space: dict[str, Any] = {}
        exec(unpack(data, tmp_path / data["name"]).read_text(), space)
        outs = [bench.tensors[n] for n in definition.outputs]
        if data["spec"]["destination_passing_style"]:
            space["run"](*({**inputs, **bench.scalars}[n] for n in definition.inputs), *outs)
        else:
            made = space["run"](*({**inputs, **bench.scalars}[n] for n in definition.inputs))
            outs = list(made) if isinstance(made, tuple) else [made]
        if "seq_lens" in inputs:  # of fewer tokens than it chooses, all
            chosen = reference(definition)(*inputs.values())
            assert (outs[0].sort(-1).values == chosen.sort(-1).values).all()
        elif definition.op_type in ("gemm", "rmsnorm") or EAGER in data["name"]:
            for out, wanted in zip(outs, expected.values(), strict=True):
                torch.testing.assert_close(out, wanted, rtol=2e-2, atol=5e-2)
    plans = Wrapper.planned[:]
    for make in makers_of(definition).values() if plans else ():
        held = Given(definition, bench.tensors, bench.scalars, 8)
        with suppress(Unsupported, ModuleNotFoundError):  # Triton need not be there
            make(held)
    assert sorted(map(str, plans)) == sorted(map(str, Wrapper.planned[len(plans) :]))
    assert len(plans) == (2 if "paged" in name or "ragged" in name else 0)


def test_tokens_are_counted_as_the_harness_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = SimpleNamespace(inputs={"probs": 0, "top_k": 0})
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.9, 0.1]])
    top_k = torch.tensor([2, 3], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)

    def drawn(p: torch.Tensor, k: torch.Tensor, *out: torch.Tensor) -> Any:
        kept = sampling.filtered(p, k, None)
        made = torch.multinomial(kept, 1, generator=generator).flatten()
        return out[0].copy_(made) if out else made.int()

    for passing in (True, False):
        run: Any = drawn
        run.metadata = SimpleNamespace(destination_passing_style=passing)
        found = harness.counted(run, [probs, top_k], "cpu", definition, num_trials=20_000)
        assert found.sum(-1).tolist() == [1, 1]
        torch.testing.assert_close(
            found, torch.tensor([[2 / 3, 1 / 3, 0], [0, 0.9, 0.1]]), rtol=0, atol=0.02
        )


def trace(uuid: str, made: str, us: float | None) -> Trace:
    times = {"latency_ms": (us or 0) / 1e3}
    done = Evaluation("PASSED", "H200", "now", correctness={}, performance=times)
    failed = replace(done, status="TIMEOUT", correctness=None, performance=None)
    row = Workload(GEMM.name, uuid, {"M": 7}, {}, "flashinfer-trace")
    return Trace(row, made, done if us else failed)


def test_the_table_names_what_failed_and_what_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, peer = "ptxflow_x", f"torch_mm_{GEMM.name}"
    traces = [
        trace("1", mine, 10.0), trace("1", peer, 20.0),
        trace("2", mine, 10.0), trace("2", peer, 5.0), trace("3", mine, None),
    ]  # fmt: skip
    write_traces(tmp_path / "traces" / "a.jsonl", traces)
    write_traces(tmp_path / "workloads" / "a.jsonl", [Trace(t.workload) for t in traces[::2]])
    assert harness.main([str(tmp_path), "--report"]) == 1
    told = capsys.readouterr().out
    assert f"| {GEMM.name} | M=7 | 10.0 | 20.0 | torch_mm | 2.00 |" in told
    assert "| gemm | 2 | 1.000 | 0.50 |" in told
    assert f"{GEMM.name} M=7: ptxflow_x TIMEOUT" in told
    assert f"{GEMM.name} M=7: 0.50 of torch_mm" in told
    assert "ours: 2 of 3 workloads PASSED, of 1 definitions" in told


def test_what_is_missing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no folder of a definition" in refused(
        harness.main, capsys, tmp_path, "--libraries", tmp_path
    )
    library(tmp_path, replace(GEMM, ranges={"M": (5000, 5001)}))
    with pytest.raises(BadInput, match=f"{GEMM.name}: its library serves none of its workloads"):
        harness.prepare(tmp_path / "set", tmp_path / GEMM.name, 4)


def test_the_committed_page_is_what_its_traces_say(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "eval" / "results" / "harness-h200.md"
    code = harness.main([str(page.with_suffix(".jsonl.xz")), "--report"])
    (said,) = (found[3] for found in SECTION.finditer(page.read_text(encoding="utf-8")))
    assert said == capsys.readouterr().out and code == ("did not pass:" in said)
    assert said.endswith(f"of {len(names())} definitions\n")


def test_traces_that_were_cut_off_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.jsonl.xz"
    whole = Path(__file__).parents[2] / "eval" / "results" / "harness-h200.jsonl.xz"
    cut.write_bytes(whole.read_bytes()[:4000])
    assert harness.main([str(cut), "--report"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_indexer_is_asked_for_scores_that_any_order_of_additions_finds() -> None:
    definition = load("dsa_topk_indexer_fp8_h64_d128_topk256_ps64")
    made = make_inputs(definition, {"batch_size": 3, "max_num_pages": 6, "num_pages": 9}, 1)
    given = made | harness.whole_scores(definition, made)
    flipped = given | {n: given[n].flip(1) for n in ("weights",)}
    flipped["q_index_fp8"] = (
        given["q_index_fp8"].view(torch.uint8).flip(1).view(torch.float8_e4m3fn)
    )
    run = reference(definition)
    first, second = (run(*(g[n] for n in definition.inputs)) for g in (given, flipped))
    assert torch.equal(first, second) and (first >= 0).any()


def test_the_second_filter_is_of_what_the_first_leaves() -> None:
    def plain(probs: Any, method: str, params: Any, eps: float) -> Any:
        assert method == "top_k"
        return probs >= probs.sort(-1, descending=True).values.gather(
            -1, params["top_k"][:, None] - 1
        )

    definition = load("top_k_top_p_sampling_from_probs_v128256")
    torch.manual_seed(0)
    probs = torch.randn(3, 40).mul(2).softmax(-1)
    params = {"top_k": torch.tensor([5, 12, 1]), "top_p": torch.tensor([0.6, 0.9, 0.5])}
    mask = harness.renormalised(plain)(probs, "top_k_top_p", params)
    run = reference(definition)
    drawn = torch.zeros_like(mask)
    for _ in range(2000):
        drawn |= torch.nn.functional.one_hot(run(probs, **params), 40).bool()
    assert torch.equal(mask, drawn) and mask.sum(-1).tolist()[2] == 1


@pytest.mark.parametrize(("corrected", "passes"), [(True, True), (False, False)])
def test_the_harness_takes_what_definitions_ask_for(
    monkeypatch: pytest.MonkeyPatch, corrected: bool, passes: bool
) -> None:
    """Its own evaluator, where it is installed: both filters of the whole distribution are not the
    definition."""
    judge: Any = pytest.importorskip("flashinfer_bench.bench.evaluators.sampling")
    bench, data = (importlib.import_module(f"flashinfer_bench.{n}") for n in ("bench", "data"))
    asked = load("top_k_top_p_sampling_from_probs_v128256").to_json()
    asked["axes"]["vocab_size"]["value"] = 1024
    definition = parse(asked)
    made = make_inputs(definition, definition.bind({"batch_size": 4}), harness.SEED)
    made = {n: made[n].clamp(*harness.LIMITS[n]) if n in harness.LIMITS else made[n]
            for n in definition.inputs}  # fmt: skip
    params = {n: made[n] for n in ("top_k", "top_p")}
    kept = sampling.filtered(made["probs"], made["top_k"], made["top_p"])

    def draw(probs: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        some = [torch.multinomial(row, len(probs) // 4, replacement=True) for row in kept]
        return torch.stack(some, 1).flatten()

    run: Any = draw
    run.metadata = SimpleNamespace(destination_passing_style=False)
    plain = judge._compute_valid_sampling_mask
    mask = harness.renormalised(plain) if corrected else plain
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(judge, "_compute_valid_sampling_mask", mask)
    monkeypatch.setattr(judge, "_sample_token_distributions", harness.counted)
    expected = made["probs"] * mask(made["probs"], "top_k_top_p", params)
    found = judge.SamplingEvaluator.check_correctness(
        data.Definition.model_validate(asked), run, [[*made.values()]],
        [[expected / expected.sum(-1, keepdim=True)]], bench.BenchmarkConfig(), "", "cpu",
    )  # fmt: skip
    assert (found[1] is None) == passes
