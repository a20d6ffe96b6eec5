"""What is known of B200 without one: `python -m ptxflow.eval.study.b200_page --into PAGE.md`.

The analytic model's best kernel of each family beside published figures; its ranks and times of
GEMMs beside nvMatmulHeuristics', and these beside an H200's measurements; what the kernels are made
of. A function of committed files and of the compiler; no constant of the model is changed.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ptxflow.command import Parser, reports, require_checkout
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.backend.sass import stalls
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.device import B200, H200
from ptxflow.compiler.emulator import Banks
from ptxflow.compiler.family import Family, Problem
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.kernels.gemm import decisions
from ptxflow.env.cost import rates
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.study import judge
from ptxflow.eval.study.b200_text import PAGE
from ptxflow.eval.study.modelled import Judged, Modelled, apart, measured, product, ranks
from ptxflow.eval.verify.trials import Attempt, attempt

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "eval" / "measurements"
ESTIMATES = ROOT / "eval" / "results" / "nvmatmulheuristics.tsv"
NEAR, LARGE = 0.15, 1024  # of a ratio to 1; rows of a large product
CONTEST, NOBODY = "a contest's kernel, sizes not told", "none known"


@dataclass(frozen=True)
class Row:
    """A workload, by axes or by sizes of its sequences: TFLOP/s that are published (0: none of this
    size), and by whom, or what else is; `constants` in place of the definition's."""

    definition: str
    sizes: Mapping[str, int]
    by: str = NOBODY
    published: float = 0
    constants: Mapping[str, int] = field(default_factory=dict)

    def problem(self) -> tuple[Family, Problem]:
        definition = load(self.definition)
        if self.constants:
            definition = definition.resized(**self.constants)
        named = set(self.sizes) <= set(definition.var_axes)
        return find_problem(definition, self.sizes if named else axes_of(definition, self.sizes))

    def __str__(self) -> str:
        sizes = {**self.constants, **self.sizes}.items()
        return f"{self.definition}: {', '.join(f'{name} {value}' for name, value in sizes)}"


GEMMS = (
    Row("gemm_n4096_k4096", {"M": 4096}, "ThunderKittens; cuBLAS at least 1,532", 1540),
    Row("gemm_n4096_k4096", {"M": 8192}, "cuBLAS; pyptx 1,240, the best 1,773", 1610,
        {"N": 8192, "K": 8192}),
)  # fmt: skip
ATTENTION = Row("gqa_ragged_prefill_causal_h32_kv8_d128",
                {"sequences": 1, "queries": 16384, "prefix": 0},
                "FlashAttention-4, 16k, causal or not; elsewhere 1,605", 1749)  # fmt: skip
ROWS = (
    *GEMMS,
    Row("rmsnorm_h4096", {"batch_size": 16384}),
    Row("top_k_sampling_from_probs_v128256", {"batch_size": 64}),
    Row("gqa_paged_decode_h32_kv8_d128_ps64", {"sequences": 64, "length": 4096}),
    ATTENTION,
    Row("mla_paged_decode_h16_ckv512_kpe64_ps64", {"sequences": 64, "length": 4096},
        "FlashMLA, 660 TFLOP/s on an H800"),
    Row("mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
        {"sequences": 1, "queries": 8192, "prefix": 0}, "FlashAttention-4, 633 TFLOP/s on an H100"),
    Row("dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps64",
        {"num_tokens": 64, "num_pages": 8462}, f"11.1 us, {CONTEST}"),
    Row("dsa_topk_indexer_fp8_h64_d128_topk256_ps64", {"sequences": 64, "length": 8192},
        f"6.9 us, {CONTEST}"),
    Row("gdn_decode_qk16_v32_d128_k_last", {"batch_size": 64}, f"6.2 us, {CONTEST}",
        constants={"num_q_heads": 4, "num_k_heads": 4, "num_v_heads": 8}),
    Row("gdn_prefill_qk16_v32_d128_k_last", {"sequences": 4, "length": 1024}, f"52 us, {CONTEST}"),
    Row("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048", {"seq_len": 4096},
        f"290 us, {CONTEST}"),
)  # fmt: skip


def published() -> str:
    """The model's best beside what is published, a row a workload."""
    rows = []
    for row in ROWS:
        found, problem = Modelled.of(*row.problem()), row.problem()[1]
        rows.append([
            problem.family, row, f"{found.best:.1f}", f"{found.tflops:,.0f}",
            f"{problem.bytes / found.best / 1e6:.2f}",
            f"{Floors.of(problem, B200).share_of_bound(found.best):.0%}",
            *((f"{row.published:,.0f}", f"{found.tflops / row.published:.2f}")
              if row.published else ("-", "-")), row.by,
        ])  # fmt: skip
    heads = ("family", "workload", "us", "TFLOP/s", "TB/s", "of its roof", "published TFLOP/s",
             "ratio", "by")  # fmt: skip
    return markdown(heads, rows, None)


def calibrated() -> float:
    """The sustained share of the tensor peak by which the published GEMMs come out right in the
    geometric mean: the one constant that these figures say anything of."""

    def error(share: float) -> float:
        speeds = [Modelled.of(*row.problem(), share=share).tflops / row.published for row in GEMMS]
        return abs(sum(map(np.log, speeds)))

    return min((n / 100 for n in range(70, 100)), key=error)


def beside_the_judge() -> dict[str, Any]:
    """The table of 40 products, and figures of the text."""
    held = judge.read(ESTIMATES)
    here, there = ([e for e in held if e.gpu == d.name] for d in (B200, H200))
    known = measured(r for path in RECORDS.glob("h200-gemm-*.xz") for r in read_records(path))
    share = calibrated()
    now, then = ([Judged.of(e, s) for e in here] for s in (0, share))
    told = [min(e.best, e.transposed) / known[e.shape].best for e in there]
    rows = [
        [*j.shape, j.tiles, f"{j.rho:.2f}", f"{j.ours:.1f}", f"{j.theirs:.1f}", f"{j.ratio:.2f}",
         f"{known[j.shape].best:.1f}", f"{t:.2f}"]
        for j, t in zip(now, told, strict=True)
    ]  # fmt: skip
    heads = ("M", "N", "K", "tiles", "rho", "model us", "judge us", "ratio", "H200 measured us",
             "judge of H200 / measured")  # fmt: skip
    theirs, ours = zip(*ranks(there, known), strict=True)
    late = [j.ours for j in now if j.ours > known[j.shape].best]
    fit = [product(e.shape, H200).best / known[e.shape].best for e in there]
    return {
        "table": markdown(heads, rows, None), "share": share, "count": len(now),
        "all": _medians(now), "after": _medians(then),
        "large": _medians([j for j in now if j.shape[0] >= LARGE]),
        "large_after": _medians([j for j in then if j.shape[0] >= LARGE]),
        "rate": rates(B200).mma_efficiency,
        "slower": sum(j.theirs > known[j.shape].best for j in now),
        "ours_slower": len(late), "latest": max(late, default=0),
        "told": median(told), "least": min(told), "most": max(told), "fit": apart(fit),
        "ranked": len(theirs), "their_rho": median(theirs), "our_rho": median(ours),
    }  # fmt: skip


def _medians(found: Sequence[Judged]) -> str:
    """What the bars are about."""
    ratios, rho = [j.ratio for j in found], median(j.rho for j in found)
    near = f"{sum(abs(r - 1) <= NEAR for r in ratios)} of {len(found)}"
    return f"{rho:.2f} | {median(ratios):.2f} | {apart(ratios):.0%} | {near}"


def executed(row: Row) -> tuple[Counter[str], Banks]:
    """How often each instruction ran of the row's best kernel, on its family's small problem, and
    what became of its accesses to shared memory."""
    maker, problem = row.problem()
    strategy = Modelled.of(maker, problem).strategy
    small = maker.trial(problem, strategy, B200)
    ptx = write(maker.build(small.problem, strategy, B200), B200)
    launch = maker.launch(small.problem, strategy, B200)
    banks = Banks()
    found = attempt(ptx, launch, Attempt(small.problem, 0, small.blocks), banks=banks)
    assert not found.error, f"{row}: {found.error}"
    count = Counter[str]()
    for entry in found.report.coverage.values():
        for instruction, hits in zip(entry.code, entry.hits, strict=True):
            count[instruction.opcode] += hits
    return count, banks


def _begin(count: Mapping[str, int], *starts: str) -> int:
    return sum(n for name, n in count.items() if name.startswith(starts))


def static() -> str:
    """Registers, what the machine code has, and what ran of the emulated text, a row a family."""
    rows = []
    for row in (r for r in ROWS if r is not GEMMS[1]):
        maker, problem = row.problem()
        strategy = Modelled.of(maker, problem).strategy
        made = compile_kernel(problem, strategy, B200)
        (ran, banks), has = executed(row), made.sass.counts
        stalled, waiting = stalls(made.cubin)
        taken = maker.resources(strategy.fields(), problem, B200)
        rows.append([
            problem.family, int(taken.threads), made.usage.registers, int(taken.smem_bytes) // 1024,
            int(taken.tmem_columns),
            " + ".join(f"{n} {name.split()[0]}" for name, n in has.items()
                       if name.startswith(("tcgen05.mma f", "mma.sync"))) or "-",
            *(_begin(has, *starts) for starts in (("TMA tensor load", "bulk copy g"), ("cp.async",),
              ("mbarrier.try",), ("bar.sync",), ("spill",))), f"{stalled:.1f}", f"{waiting:.0%}",
            _begin(ran, "tcgen05.mma", "mma.sync"), _begin(ran, "cp.async.bulk"),
            _begin(ran, "mbarrier.try"), _begin(ran, "bar.sync"),
            f"{banks.taken / banks.asked:.2f}" if banks.asked else "-",
        ])  # fmt: skip
    heads = ("family", "threads", "registers", "KiB", "TMEM columns", "MMA in SASS", "bulk loads",
             "cp.async", "waits", "CTA barriers", "spills", "stalls", "scoreboards", "MMA run",
             "bulk run", "tries of waits", "CTA barriers run", "wavefronts")  # fmt: skip
    return markdown(heads, rows, None)


def schedules() -> str:
    """Our GEMM and attention beside the schedules that are published."""
    problem = GEMMS[0].problem()[1]
    made = compile_kernel(problem, Modelled.of(*GEMMS[0].problem()).strategy, B200)
    gemm = made.strategy.fields()
    prefill = dict(Modelled.of(*ATTENTION.problem()).strategy.choices)
    taken = decisions.resources(gemm, problem, B200)
    rows = [
        ["GEMM: tile of an MMA", f"{gemm.cta_group * gemm.tile_m} x {gemm.tile_n}",
         "DeepGEMM: 256 x up to 256 by a pair, else 128"],
        ["bytes of K in a stage", 2 * gemm.tile_k, "128"],
        ["KiB of a stage and CTA", int(decisions.stage_bytes(gemm)) // 1024, "32 at 256 x 256"],
        ["stages", gemm.num_stages, "6 at 256 x 256"],
        ["bytes of shared memory", f"{int(taken.smem_bytes):,}", "232,448 at most"],
        ["accumulators, TMEM columns", f"{gemm.acc_buffers}, {int(taken.tmem_columns)}", "2, 512"],
        ["MMAs of a stage", gemm.tile_k // 16, "4"],
        ["mbarriers", made.sass.counts["mbarrier.init"], "2 a stage, 2 an accumulator: 16"],
        ["attention: queries x keys of a step", f"{128 * prefill['consumers']} x "
         f"{prefill['tile_kv']}", "FlashAttention-4: 2 tiles of 128 x 128"],
        ["warps", f"{4 * prefill['consumers']} softmax, 4 more",
         "8 softmax, 4 correction, MMA, load, epilogue"],
        ["rescaling", prefill["rescale"], "lazy, by warps of its own"],
        ["exp2", "special function units", "these, and polynomials for a part"],
    ]  # fmt: skip
    return markdown(("", "ours", "published"), rows, 3)


@reports("b200_page")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file or the page cannot be used."""
    parser = Parser(prog="python -m ptxflow.eval.study.b200_page", description=__doc__)
    parser.add_argument("--into", type=Path, required=True, metavar="PAGE.md")
    args = parser.parse_args(argv)
    require_checkout("b200_page")
    tables = {"published": published(), "static": static(), "schedules": schedules()}
    write_whole(args.into, PAGE.format(**tables, **beside_the_judge()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
