"""What the page on B200 counts and compares; the page itself says what its command gives."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptxflow.command import BadInput
from ptxflow.compiler.device import B200, H200
from ptxflow.env.cost import model_tflops, rates
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.study import b200_page, judge
from ptxflow.eval.study.judge import TILES, Estimate
from ptxflow.eval.study.modelled import Judged, Modelled, apart, measured, product, ranks
from tests.builders import gemm_record

PAGE = b200_page.ROOT / "eval" / "results" / "b200.md"
SHAPE = (16, 128, 2048)


def found(share: float = 0) -> Modelled:
    return Modelled.of(*find_problem(load("gemm_n128_k2048"), {"M": 16}), share=share)


def estimate(factor: float = 1.0, order: int = 1) -> Estimate:
    """An estimate that agrees with our model, or ranks tiles the other way round."""
    own = {tile: found().tile(tile) ** order for tile in TILES}
    return Estimate("b200", SHAPE, factor * found().best, 1e9, own)


def test_a_model_s_best_is_the_kernel_alone() -> None:
    ours = found()
    maker, problem = find_problem(load("gemm_n128_k2048"), {"M": 16})
    most = float(model_tflops(maker, ours.strategy.fields(), problem, B200)[0])
    assert problem.flops / most / 1e6 - rates(B200).launch_s * 1e6 == pytest.approx(ours.best)
    assert found(share=0.5).best > ours.best == found(rates(B200).mma_efficiency).best
    assert ours.tile((64, 32)) >= ours.best and np.isinf(ours.tile((64, 33)))


def test_a_workload_is_judged_by_order_and_by_ratio() -> None:
    alike, twice, back = (Judged.of(e) for e in (estimate(), estimate(2.0), estimate(order=-1)))
    assert (alike.rho, alike.ratio) == pytest.approx((1.0, 1.0))
    assert twice.ratio == pytest.approx(0.5) and back.rho == pytest.approx(-1.0)
    assert apart([0.5, 1.1, 1.3]) == pytest.approx(0.3)


def test_measurements_are_the_fastest_s_without_the_launch() -> None:
    choices = {"swap": 0, "split_k": 1, "tile_m": 64, "tile_n": 32}
    one = replace(gemm_record("a", 9.0, 16), strategy={"choices": choices})
    swapped = replace(one, strategy={"choices": {**choices, "swap": 1}})
    other = {**choices, "tile_n": 64}
    third = replace(gemm_record("c", 12.0, 16), strategy={"choices": other}, peers={"copy": 1.0})
    held = measured([one, swapped, third, replace(one, status="wrong")])[SHAPE]
    launch = rates(H200).launch_s * 1e6
    assert held.kernels == 3 and held.best == pytest.approx(8.0 - launch)  # the library's
    assert held.tiles == pytest.approx({(64, 32): 9.0 - launch, (64, 64): 12.0 - launch})


def test_ranks_are_told_where_enough_was_measured() -> None:
    few = measured([replace(gemm_record("a", 9.0, 16), strategy={"choices": {
        "swap": 0, "split_k": 1, "tile_m": 64, "tile_n": 32}})])  # fmt: skip
    assert ranks([estimate()], few) == []
    tiles = {tile: product(SHAPE, H200).tile(tile) for tile in TILES[:6]}
    known = {SHAPE: replace(few[SHAPE], kernels=1000, tiles=tiles)}
    ((theirs, ours),) = ranks([estimate()], known)
    assert ours == pytest.approx(1.0) and -1 <= theirs <= 1


def test_the_committed_estimates_are_of_40_products_on_two_gpus() -> None:
    held = judge.read(b200_page.ESTIMATES)
    assert [e.shape for e in held] == [*judge.workloads()] * 2 and len(held) == 80
    assert {e.gpu for e in held} == set(judge.GPUS) and all(min(e.tiles.values()) > 0 for e in held)


def test_other_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.tsv").write_text("gpu\tm\nb200\t1\n")
    for name in ("other.tsv", "none.tsv"):
        with pytest.raises(BadInput, match="no estimates"):
            judge.read(tmp_path / name)


def test_kernels_of_the_page_run_what_their_machine_code_has() -> None:
    row = b200_page.Row("rmsnorm_h4096", {"batch_size": 16})
    count, banks = b200_page.executed(row)
    assert banks.taken >= banks.asked > 0
    assert count["bar.sync"] > 0 and not any(name.startswith("tcgen05") for name in count)


@pytest.mark.slow
def test_the_page_is_today_s() -> None:
    text = PAGE.read_text(encoding="utf-8")
    told = b200_page.beside_the_judge()
    for name in ("table", "all", "after", "large", "large_after"):
        assert told[name] in text, "run its command again"
    assert b200_page.published() in text and b200_page.schedules() in text
