"""The work of each family's problems, and what its rules and its model of time say of some."""

from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.atoms.reductions import KEY_BITS
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Op, kernels_of
from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.kernels.dsa_indexer.decisions import (
    digits,
    entries,
    select_registers,
    select_smem,
)
from ptxflow.compiler.kernels.dsa_indexer.select import Select
from ptxflow.compiler.kernels.moe import products
from ptxflow.compiler.kernels.moe.cost import row_tiles
from ptxflow.compiler.kernels.moe.decisions import smem_bytes
from ptxflow.compiler.kernels.sampling.decisions import DECISIONS, later_digits
from ptxflow.compiler.launch import evaluate
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from ptxflow.env.tasks.definition import load, names
from tests.families import (
    dsa_indexer,
    dsa_sparse,
    gdn_decode,
    gdn_prefill,
    gemm,
    gqa_decode,
    gqa_prefill,
    mla,
    moe,
    rmsnorm,
    sampling,
)
from tests.given import B200, H200, variable
from tests.row import Case, space

INDEXER_AXES = {"batch_size": 3, "max_num_pages": 10, "num_pages": 20}


def test_indexer_work_is_counted() -> None:
    p = dsa_indexer.INDEXER.problem(load(dsa_indexer.NAME).to_json(), INDEXER_AXES)
    keys = 20 * 64  # fewer pages than the tables have room for
    assert p.flops == 2 * 64 * 128 * keys and p.bound(H200) == "memory"
    assert p.bytes == keys * 132 + 3 * 64 * 132 + 4 * (3 + 20 + 3 * 256)
    made = dsa_indexer.INDEXER.problem(dsa_indexer.definition(), INDEXER_AXES)
    assert (made.axes, made.bytes) == (p.axes, p.bytes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("topk", [256, 2048])
def test_entries_and_digits_are_enough(dev: Device, topk: int) -> None:
    for pages in (64, 1024):
        p = dsa_indexer.problem(64, pages, topk=topk)
        found = space(p, dev)
        f = found.fields()
        assert (entries(f, p) >= p["topk"]).all() and (f.bits * digits(f.bits) >= 52).all()
        assert (f.bits * digits(f.bits) <= 64).all()  # of an entry, which has 64 bits
    for code in found.sample_uniform(20, np.random.default_rng(0)):
        s = found.strategy(int(code))
        assert Select(p, s, dev).smem_bytes <= select_smem(s.fields(), p) <= dev.smem_per_block


def test_long_rows_of_the_indexer_want_clusters() -> None:
    """One sequence alone: several CTAs choose sooner than one."""
    p = dsa_indexer.problem(1, 2048)
    f = space(p).fields()
    speed = model_tflops(dsa_indexer.INDEXER, f, p, H200)
    assert f.ctas[speed.argmax()] > 1 and speed[f.ctas == 1].max() < speed.max()


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_the_second_kernel_of_the_indexer_fits_its_registers(dev: Device) -> None:
    for topk in (256, 2048):
        p = dsa_indexer.problem(64, 2048, topk=topk)
        f = space(p, dev).fields()
        assert (select_registers(f, p) * f.threads <= dev.registers_per_sm).all()
        assert select_registers(f, p).max() <= dev.registers_per_thread


@pytest.mark.parametrize("page", [1, 64])
def test_sparse_work_is_counted(page: int) -> None:
    """Of few tokens every entry is a row of its own; more than there are rows no list names."""
    given = load(f"dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps{page}").to_json()
    small = 2 * 3 * 16 * (2 * 512 + 64) + 4 * (3 * 16 + 3 * 256)
    for pages, rows in ((8462, 768), (3, 3 * page)):
        p = dsa_sparse.SPARSE.problem(given, {"num_tokens": 3, "num_pages": pages})
        assert p.flops == 2 * 16 * (2 * 512 + 64) * 3 * 256 and p.dtype == "bfloat16"
        assert p.bytes == small + 2 * 576 * rows


def test_gdn_decode_work_is_counted() -> None:
    given = load(gdn_decode.NAME)
    p = gdn_decode.GDN.problem(given.to_json(), given.bind({"batch_size": 64}))
    elements = 64 * 32 * 128 * 128
    assert p.flops == 7 * elements and p.dtype == "bfloat16"
    assert p.bytes == 8 * elements + 2 * 64 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 8 * 32
    assert p.bound(H200) == p.bound(B200) == "memory"


def test_measurements_of_decisions_that_made_no_difference_are_kept() -> None:
    today = dict(gdn_decode.strategy().choices)
    hints: dict[str, int | str] = {"load_cache": "evict_first", "load_prefetch": 256}
    before: dict[str, int | str] = {
        **hints,
        "store_cache": "default",
        **today,
        "gates": "after",
        "heads": 1,
        "load_ahead": 0,
    }
    assert gdn_decode.GDN.revise(before) == today
    assert gdn_decode.GDN.revise({**before, "heads": 2}) is None


def test_gdn_prefill_work_is_counted() -> None:
    given = load(gdn_prefill.NAME)
    axes = {"total_seq_len": 8192, "num_seqs": 20, "len_cu_seqlens": 21}
    p = gdn_prefill.PREFILL.problem(given.to_json(), given.bind(axes))
    assert p.flops == 6 * 128 * 128 * 32 * 8192 and p.dtype == "bfloat16"
    tokens = 2 * 8192 * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32)
    assert p.bytes == tokens + 8 * 20 * 32 * 128 * 128 + 8 * 21 + 8 * 32


def modelled_best(problem: Problem) -> Strategy:
    """The fastest of all strategies by the model, on an H200."""
    found = space(problem)
    tflops = model_tflops(found.family, found.fields(), problem, H200)
    return found.strategy(int(found.codes[tflops.argmax()]))


def test_one_long_sequence_asks_for_more_ctas() -> None:
    one, many = (modelled_best(gdn_prefill.problem(8192, n, 128, 16, 32)) for n in (1, 32))
    assert one.rows < many.rows


def test_gemm_work_is_counted() -> None:
    p = gemm.problem(3, 4096, 1024, "bfloat16")
    assert (p["M"], p["N"], p["K"], p.dtype) == (3, 4096, 1024, "bfloat16")
    assert p.flops == 2 * 3 * 4096 * 1024
    assert p.bytes == 2 * (3 * 1024 + 4096 * 1024 + 3 * 4096)
    assert p.bound(H200) == "memory" and gemm.problem(8192, 4096, 1024).bound(H200) == "compute"


NAME = "gqa_paged_decode_h32_kv8_d128_ps1"


def test_gqa_decode_work_is_counted() -> None:
    p = gqa_decode.DECODE.problem(load(NAME).to_json(), gqa_decode.axes(16, 16384))
    assert p.flops == 4 * 32 * 128 * 16384 and p.dtype == "bfloat16"
    tables = 17 + 16 + 16384
    assert p.bytes == 2 * 2 * 16384 * 8 * 128 + 2 * 2 * 16 * 32 * 128 + 4 * (16 * 32 + tables)
    assert p.bound(H200) == p.bound(B200) == "memory"


@pytest.mark.parametrize(("dev", "name", "page_size", "s"), gqa_decode.GROUPS)
def test_a_warpgroup_takes_what_is_predicted(
    dev: Device, name: str, page_size: int, s: Strategy
) -> None:
    """Of 16 heads of 128 dims."""
    p = gqa_decode.problem(64, 4096, page_size, group=16)
    first, _ = kernels_of(gqa_decode.DECODE.build(p, s, dev))
    maker, plan = gqa_decode.DECODE, first.arg
    taken, launch = maker.resources(s.fields(), p, dev), maker.launch(p, s, dev)
    assert layout(plan).smem_bytes == taken.smem_bytes == launch.smem_bytes
    assert 32 * plan.warps == taken.threads == launch.block
    assert layout(plan).tmem_columns == taken.tmem_columns


def test_gqa_prefill_work_is_counted() -> None:
    p = gqa_prefill.problem(sequences=4, queries=4096, keys=4096)
    pairs = 4 * 1024 * 1025 / 2
    assert p.flops == 4 * 32 * 128 * pairs
    assert p.bytes == 2 * 128 * 4096 * (2 * 32 + 2 * 8) + 4 * 4096 * 32
    # keys that were there before
    behind = gqa_prefill.problem(page=64, sequences=1, queries=128, keys=1024)
    assert behind.flops == 4 * 32 * 128 * (128 * 896 + 128 * 129 / 2)
    blind = gqa_prefill.problem(page=64, sequences=1, queries=1024, keys=64)  # most see nothing
    assert blind.flops == 4 * 32 * 128 * (64 * 65 / 2)
    assert p.bound(H200) == "compute"


@pytest.mark.parametrize("name", gqa_prefill.TMEM_PATHS)
def test_registers_are_those_of_the_widest_role(name: str) -> None:
    page, s = gqa_prefill.TMEM_PATHS[name]
    p = gqa_prefill.problem(page)
    kernel = kernels_of(gqa_prefill.PREFILL.build(p, s, B200))[0]
    widest = max(r.arg.regs for r in kernel.src if r.op is Op.ROLE)
    assert widest == gqa_prefill.PREFILL.resources(s.fields(), p, B200).registers


@pytest.mark.slow
@pytest.mark.parametrize("code", range(3))
def test_sampled_kernels_assemble(code: int) -> None:
    """Without spills, and with the machine code that their instructions claim."""
    p = gqa_prefill.problem((0, 64, 1)[code], dim=(128, 64, 256)[code])
    found = space(p, B200)
    s = found.strategy(int(found.sample_uniform(1, np.random.default_rng(code))[0]))
    made = compile_kernel(p, s, B200)
    assert made.sass.counts["tcgen05.mma A from TMEM"] and made.sass.counts["tcgen05.st"]
    assert bool(made.sass.counts.get("TMA gather4")) == (code == 2)


NAMES = [
    f"mla_paged_{kind}_h16_ckv512_kpe64_ps{page}"
    for kind in ("decode", "prefill_causal")
    for page in (1, 64)
]
MANY = Path(__file__).parents[1] / "definitions"  # of 128 heads
MLA_AXES = {"batch_size": 2, "len_indptr": 3, "num_kv_indices": 10, "num_pages": 12, "total_q": 6}


@pytest.mark.parametrize("name", NAMES)
def test_mla_work_is_counted(name: str) -> None:
    given = load(name).to_json()
    expected = mla.PREFILL if "prefill" in name else mla.DECODE
    p = expected.problem(given, variable(given, MLA_AXES))
    tokens = 10 * p["page_size"]
    rows = 6 if expected is mla.PREFILL else 2
    pairs = 2 * 3 * (tokens / 2 - 1) if expected is mla.PREFILL else tokens
    assert p.flops == 2 * 16 * (2 * 512 + 64) * pairs and p.dtype == "bfloat16"
    moved = 2 * (tokens * 576 + rows * 16 * (512 + 576)) + 4 * (rows * 16 + 2 * 2 + 1 + 10)
    assert p.bytes == moved
    assert expected is mla.PREFILL or p.bound(H200) == "memory"


@pytest.mark.parametrize("path", sorted(MANY.glob("mla_*.json")), ids=lambda p: p.stem)
def test_definitions_of_many_heads_are_those_of_fewer_but_for_these(path: Path) -> None:
    """Twice the CTAs of half the heads, each with as many registers and as much shared memory."""
    given = load(path).to_json()
    assert given["axes"]["num_qo_heads"]["value"] == 128
    found = family_for(given["op_type"], given["inputs"])
    many = found.problem(given, variable(given, MLA_AXES))
    half = many.at(num_qo_heads=64)
    for dev in (H200, B200):
        wide, narrow = space(many, dev), space(half, dev)
        assert len(wide) and np.array_equal(wide.codes, narrow.codes)
        f = wide.fields()
        assert np.array_equal(
            found.resources(f, many, dev).smem_bytes, found.resources(f, half, dev).smem_bytes
        )
        loads = [found.demand(f, p, dev) for p in (many, half)]
        assert np.array_equal(loads[0].blocks, 2 * loads[1].blocks)
        s = wide.strategy(int(wide.codes[0]))
        grids = [evaluate(found.launch(p, s, dev).grid[0], dict(p.axes)) for p in (many, half)]
        assert grids[0] == 2 * grids[1]


def test_strategies_from_before_there_were_parts_have_one() -> None:
    told = {"core", "lead", "pieces", "rescale", "parts", "dependent", "sum_chunks"}
    old = {name: value for name, value in mla.prefill().choices if name not in told}
    revised = mla.PREFILL.revise(old)
    assert revised and Strategy("mla_prefill", tuple(revised.items())).key == mla.prefill().key


def test_few_queries_beside_many_keys_are_for_parts() -> None:
    """By the model: many CTAs where one query of a sequence would leave most SMs idle, and none
    where queries fill them."""
    for sequences, tokens, queries, parts in ((22, 807, 22, (2, 4, 8)), (4, 1024, 2048, (1,))):
        p = mla.problem(True, 1, sequences, tokens, queries)
        f = space(p).fields()
        assert f.parts[np.argmax(model_tflops(mla.PREFILL, f, p, H200))] in parts


def test_work_is_that_of_even_routing() -> None:
    p = moe.problem(14107)
    assert p.flops == 6 * 7168 * 2048 * 14107 and p.dtype == "float8_e4m3fn"
    weights = 32 * 3 * 7168 * 2048 * (1 + 4 / 128**2)
    moved = 14107 * (3 * 7168 + 4 * 56 + 4 * 256) + 512
    assert p.bytes == pytest.approx(weights + moved)
    few = moe.problem(1)
    assert few.bytes == pytest.approx(weights / 32 + 3 * 7168 + 4 * 56 + 4 * 256 + 512)


@pytest.mark.parametrize("case", moe.ROW.cases, ids=lambda case: case.label)
def test_rules_count_the_shared_memory_of_each_product(case: Case) -> None:
    s = case.strategy
    for product in products(moe.problem(), s, case.device):
        laid = layout(product.build().arg).smem_bytes
        assert laid <= smem_bytes(s.fields(), product.up) <= laid + 4096


def test_the_workspace_holds_what_every_routing_needs() -> None:
    """All tokens on as many local experts as they can choose, each with a last tile."""
    launch = moe.MOE.launch(moe.problem(local=3), moe.HOPPER["rows"], H200)
    for tokens in (1, 63, 64, 200):
        size = {w.name: evaluate(w.bytes, {"seq_len": tokens}) for w in launch.workspace}
        rows = 3 * (-(-tokens // 8) * 8)
        assert size["tokens"] >= 4 * (rows + 64) and size["inner"] >= 2048 * (rows + 64)
        assert size["work"] >= 16 * 3 * -(-tokens // 64)


def test_row_tiles_follow_a_binomial() -> None:
    counts = np.random.default_rng(0).binomial(1000, 8 / 256, 200_000)
    for tile in (8, 64, 128):
        assert row_tiles(1000, tile) == pytest.approx(np.ceil(counts / tile).mean(), rel=0.01)


def test_few_tokens_are_the_short_side() -> None:
    few, many = (modelled_best(moe.problem(tokens)) for tokens in (16, 14107))
    assert few.swap and not many.swap


DEFINITIONS = [name for name in names() if load(name).op_type == "rmsnorm"]


def test_rmsnorm_work_is_counted() -> None:
    p = rmsnorm.problem(4096, 3)
    assert (p["batch_size"], p["hidden_size"], p.dtype) == (3, 4096, "bfloat16")
    assert p.flops == 4 * 3 * 4096 and p.bytes == 2 * (2 * 3 + 1) * 4096
    fused = rmsnorm.problem(4096, 3, residual=True)
    assert fused.flops == 5 * 3 * 4096 and fused.bytes == 2 * (3 * 3 + 1) * 4096
    assert p.bound(H200) == fused.bound(B200) == "memory"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_eps_is_the_one_of_the_definition(name: str) -> None:
    given = load(name)
    p = rmsnorm.RMSNORM.problem(given.to_json(), given.bind({"batch_size": 7}))
    assert f"eps = {p.constant('eps')!r}".replace("e-0", "e-") in given.description.replace(
        "e-0", "e-"
    )
    assert p.constant("residual") == ("residual" in given.inputs)


def test_rmsnorm_measurements_of_decisions_that_made_no_difference_are_kept() -> None:
    """As recorded when they were decisions; where a hint did make one, its choice stays."""
    gone: dict[str, int | str] = {"parts": 4, "store_cache": "no_allocate"}
    hints: dict[str, int | str] = {"load_cache": "evict_first", "load_prefetch": 256}
    kept, again = rmsnorm.strategy(), rmsnorm.strategy(residency="reread")
    assert rmsnorm.RMSNORM.revise({**dict(kept.choices), **hints, **gone}) == dict(kept.choices)
    assert rmsnorm.RMSNORM.revise({**dict(again.choices), **hints, **gone}) == {
        **dict(again.choices), **hints
    }  # fmt: skip


def test_reading_rows_again_is_slower() -> None:
    found = space(rmsnorm.problem(7168, 16384))
    f = found.fields()
    tflops = model_tflops(rmsnorm.RMSNORM, f, found.problem, H200)
    assert tflops.max() > tflops[f.residency == "reread"].max()


def test_the_nine_definitions_are_problems() -> None:
    given = [load(name) for name in names() if load(name).op_type == "sampling"]
    made = [sampling.SAMPLING.problem(d.to_json(), d.bind({"batch_size": 7})) for d in given]
    assert len(made) == 9
    filters = {(p.constant("top_k"), p.constant("top_p")) for p in made}
    assert filters == {(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)}
    assert all(p.bytes >= 4 * 7 * p["vocab_size"] and p.bound(H200) == "memory" for p in made)


def test_digits_make_up_a_key() -> None:
    choices = next(d.choices for d in DECISIONS if d.name == "bits")
    assert all(int(c) + sum(later_digits(int(c))) == KEY_BITS for c in choices)
