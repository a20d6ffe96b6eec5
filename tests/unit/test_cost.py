"""The model keeps the machine's limits; its best strategies look like known kernels; families that
stream are near what an H200 showed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ptxflow.compiler.device import B200, DEVICES, H200, Device
from ptxflow.compiler.family import Demand, Fields, Strategy
from ptxflow.env.cost import attainable_tflops, derived, model_tflops, rates, seconds, sm_cycles
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from tests.builders import GEMM, gemm_space

Array = NDArray[np.float64]


# torch.mm (cuBLAS 13.1) on an H200, float16, median us with L2 flushed, at these M
CUBLAS_M = (1, 16, 64, 256, 1024, 4096, 8192)
CUBLAS_US = {
    (128, 2048): (8.5, 8.6, 8.4, 8.4, 9.3, 12.2, 17.0),
    (256, 7168): (10.0, 10.4, 10.7, 12.4, 17.1, 33.2, 48.2),
    (2048, 4096): (13.2, 13.4, 14.0, 14.4, 28.2, 92.9, 191),
    (4096, 4096): (19.0, 18.9, 17.7, 24.1, 49.7, 191, 392),
    (4096, 14336): (42.0, 41.8, 45.8, 53.5, 164, 694, 1379),
    (5120, 2048): (13.0, 12.6, 12.8, 14.7, 34.8, 123, 248),
    (6144, 4096): (23.9, 22.3, 22.7, 27.5, 73.3, 289, 605),
    (28672, 4096): (69.3, 69.5, 70.9, 100, 365, 1404, 2792),
}


def modelled(space: Space) -> tuple[Array, Strategy]:
    """TFLOP/s of every strategy, and the best one."""
    tflops = model_tflops(GEMM, space.fields(), space.problem, space.device)
    return tflops, space.strategy(int(space.codes[tflops.argmax()]))


def best_us(m: int, n: int, k: int, device: Device) -> float:
    space = gemm_space(m, n, k, device)
    return space.problem.flops / float(modelled(space)[0].max()) / 1e6


@settings(max_examples=10)
@given(
    st.integers(1, 20000),
    st.integers(1, 4000).map(lambda n: 8 * n),
    st.integers(1, 2000).map(lambda k: 8 * k),
    st.sampled_from(list(DEVICES.values())),
)
def test_load_covers_the_work(m: int, n: int, k: int, device: Device) -> None:
    """No strategy beats the roofline: tiles cover C, steps cover K, MMAs run no faster than the
    tensor core, DRAM moves it all."""
    space = gemm_space(m, n, k, device)
    tflops, _ = modelled(space)
    assert np.isfinite(tflops).all() and (tflops > 0).all()
    assert tflops.max() <= attainable_tflops(space.problem, device)
    assert attainable_tflops(space.problem, device) < space.problem.roofline_tflops(device)
    f = space.fields()
    asked = GEMM.demand(f, space.problem, device)
    assert (asked.blocks * asked.tiles * f.tile_m * f.tile_n >= m * n).all()
    assert (asked.blocks[f.persistent == 1] <= device.sms).all()
    assert (asked.tiles[f.persistent == 0] == 1).all()
    share = f.tile_k * f.split_k
    assert (asked.steps * share >= k).all() and ((asked.steps - 1) * share < k).all()
    flops = 2 * f.tile_m * f.tile_n * f.tile_k
    assert (flops / asked.mma_cycles <= device.mma_flops_per_cycle).all()
    assert (asked.dram_bytes >= space.problem.bytes).all()
    assert ((asked.overlap >= 0) & (asked.overlap < 1)).all()


def test_mma_cycles_are_the_published_ones() -> None:
    """Cycles a K=16 MMA on B200, microbenchmark of SemiAnalysis (2026), operands in smem."""
    published = {(1, 128, 256): 128.6, (1, 128, 128): 64.6, (1, 64, 256): 128.6,
                 (1, 64, 128): 64.6, (2, 128, 256): 128.7, (2, 128, 128): 64.8}  # fmt: skip
    space = gemm_space(8192, 8192, 8192, B200)
    f = space.fields()
    cycles = GEMM.demand(f, space.problem, B200).mma_cycles / (f.tile_k / 16)
    for (group, tile_m, tile_n), expected in published.items():
        same = (f.cta_group == group) & (f.tile_m == tile_m) & (f.tile_n == tile_n)
        assert cycles[same] == pytest.approx(expected, rel=0.035)


def test_a_cluster_loads_less_from_l2() -> None:
    space = gemm_space(4096, 4096, 4096, H200)
    alone = space.strategy(int(space.codes[len(space) // 2])).replace(cluster="1x1")
    share = {
        cluster: float(
            GEMM.demand(alone.replace(cluster=cluster).fields(), space.problem, H200).l2_bytes
        )
        for cluster in ("1x1", "2x1", "1x2")
    }
    rows, columns = alone.tile_m, alone.tile_n
    assert share["2x1"] / share["1x1"] == pytest.approx((rows + columns / 2) / (rows + columns))
    assert share["1x2"] / share["1x1"] == pytest.approx((rows / 2 + columns) / (rows + columns))


def pairs(space: Space, **change: tuple[Any, Any]) -> tuple[Array, Array]:
    """TFLOP/s of the valid strategies with the first and with the second value, else alike."""
    ((name, (first, second)),) = change.items()
    at = [d.name for d in GEMM.decisions].index(name)
    choices = GEMM.decisions[at].choices
    step = (choices.index(second) - choices.index(first)) * int(space.strides[at + 1])
    mine = space.codes[getattr(space.fields(), name) == first]
    mine = mine[np.isin(mine + step, space.codes)]
    speed = [model_tflops(GEMM, space.fields(c), space.problem, space.device)
             for c in (mine, mine + step)]  # fmt: skip
    assert len(mine) > 50
    return speed[0], speed[1]


def test_specialised_warps_are_faster_and_matter_more_on_blackwell() -> None:
    gains = []
    for device in (H200, B200):
        plain, special = pairs(gemm_space(4096, 4096, 4096, device), warp_specialized=(0, 1))
        gains.append(float(np.median(special / plain)))
    assert 1.01 < gains[0] < gains[1]


def test_a_second_accumulator_is_faster() -> None:
    one, two = pairs(gemm_space(4096, 4096, 4096, B200), acc_buffers=(1, 2))
    assert (two > one).mean() > 0.95


def test_walking_rows_together_saves_dram_where_operands_exceed_l2() -> None:
    space = gemm_space(8192, 28672, 4096, H200)
    asked = GEMM.demand(space.fields(), space.problem, H200)
    one, eight = (asked.dram_bytes[space.fields().raster_group == g].mean() for g in (1, 8))
    assert eight < 0.5 * one


@pytest.mark.slow
def test_model_ranks_workloads_like_cublas_on_h200() -> None:
    ours, theirs = [], []
    for (n, k), row in CUBLAS_US.items():
        for m, us in zip(CUBLAS_M, row, strict=True):
            ours.append(np.log(best_us(m, n, k, H200)))
            theirs.append(np.log(us))
    assert np.corrcoef(ours, theirs)[0, 1] > 0.97
    assert abs(np.mean(np.subtract(ours, theirs))) < 0.15


def test_h200_square_and_single_row_are_near_the_known_figures() -> None:
    tflops, best = modelled(gemm_space(4096, 4096, 4096, H200))
    assert tflops.max() == pytest.approx(720, rel=0.15)
    assert (best.tile_m, best.tile_n, best.warp_specialized) == (128, 256, 1)
    assert 7.5 < best_us(1, 4096, 4096, H200) < 30


def test_b200_square_best_is_a_pair_kernel_with_a_deep_ring() -> None:
    tflops, best = modelled(gemm_space(4096, 4096, 4096, B200))
    assert 1400 < tflops.max() < 1900
    assert (best.cta_group, best.tile_m, best.tile_n) == (2, 128, 256)
    assert best.warp_specialized and best.persistent and best.acc_buffers == 2
    assert best.num_stages * best.tile_k >= 4 * 64


def test_derived_reports_resources_bound_and_speed() -> None:
    space = gemm_space(4096, 4096, 4096, B200)
    tflops, best = modelled(space)
    report = derived(GEMM, best, space.problem, B200)
    taken = GEMM.resources(best.fields(), space.problem, B200)
    assert report["smem_bytes"] == int(taken.smem_bytes) <= B200.smem_per_block
    assert report["tmem_columns"] == 512 and report["occupancy"] >= 1
    assert report["bound"] == "compute"
    assert report["modelled_tflops"] == pytest.approx(tflops.max())
    seconds = report["modelled_us"] / 1e6
    assert seconds * report["modelled_tflops"] * 1e12 == pytest.approx(space.problem.flops)


def test_a_device_without_rates_is_named() -> None:
    other = Device(**{**B200.__dict__, "name": "b300"})
    with pytest.raises(KeyError, match="no cost rates for 'b300'; known: b200, h200, h100"):
        rates(other)


def plain(**changes: Any) -> Demand:
    """One block for each SM, of one tile, whose steps wait for 1 MB from DRAM altogether."""
    per_step = {"mma_cycles": 100.0, "smem_bytes": 0.0, "l2_bytes": 1000.0, "issue_cycles": 0.0}
    around = {"epilogue_cycles": 0.0, "overlap": 0.0, "setup_cycles": 0.0}
    once = {"blocks": 132, "resident": 1, "tiles": 1, "steps": 8, "stages": 1, "dram_bytes": 1e6}
    return Demand(**{**once, **per_step, **around, **changes})


def cycles(**changes: Any) -> float:
    return float(sm_cycles(plain(**changes), H200, rates(H200)))


def test_the_first_fill_counts_once() -> None:
    """A block that asks, waits and works in turn waits at every step; a deep ring once."""
    latency, busy = rates(H200).dram_latency, 100 / rates(H200).mma_efficiency
    assert cycles() == pytest.approx(8 * (latency + busy), rel=0.05)
    assert cycles(stages=8, mma_cycles=5000.0) == pytest.approx(50 * 8 * busy + latency, rel=0.05)
    assert cycles(latency=0.5) == pytest.approx(8 * (latency / 2 + busy), rel=0.05)


def test_other_limits_of_a_step_take_their_time() -> None:
    assert cycles(special=16 * 6000.0) - cycles() == pytest.approx(8 * 6000, rel=0.1)
    assert cycles(imbalance=1.5) == pytest.approx(1.5 * cycles())


def test_kernels_in_sequence_add_up() -> None:
    def us(load: Demand) -> float:
        return float(seconds(load, H200, rates(H200))) * 1e6

    alone, gap = us(plain()), rates(H200).gap_s * 1e6
    floor = rates(H200).launch_s * 1e6
    assert us(plain(following=plain())) == pytest.approx(2 * alone - floor + gap)
    assert us(plain(following=plain(blocks=0))) == pytest.approx(alone)


GDN = "gdn_decode_qk16_v32_d128_k_last"
# us of the fastest of 120 (rmsnorm) or 40 (gdn_decode) drawn strategies, H200, L2 flushed
BEST_US = {
    ("rmsnorm_h128", 512): 5.3, ("rmsnorm_h128", 16384): 7.0,
    ("rmsnorm_h4096", 64): 5.4, ("rmsnorm_h4096", 512): 6.8, ("rmsnorm_h4096", 16384): 65.0,
    ("fused_add_rmsnorm_h2048", 4096): 15.9, ("fused_add_rmsnorm_h7168", 16384): 164.3,
    (GDN, 1): 6.1, (GDN, 16): 19.8, (GDN, 256): 262.2,
}  # fmt: skip


def space_of(name: str, batch: int, device: Device = H200) -> Space:
    family, problem = find_problem(load(name), {"batch_size": batch})
    return enumerate_space(family, problem, device)


def modelled_us(space: Space, fields: Fields) -> NDArray[np.float64]:
    tflops = model_tflops(space.family, fields, space.problem, space.device)
    return np.asarray(space.problem.flops / tflops / 1e6)


@pytest.mark.parametrize("name, batch", [*BEST_US, ("rmsnorm_h4096", 1), ("rmsnorm_h4096", 513)])
def test_the_best_is_near_the_roofline_and_takes_as_long_as_on_an_h200(
    name: str, batch: int
) -> None:
    for device in DEVICES.values():
        space = space_of(name, batch, device)
        us = modelled_us(space, space.fields())
        least = space.problem.flops / attainable_tflops(space.problem, device) / 1e6
        assert np.isfinite(us).all() and least <= us.min() < 1.5 * least
        if device is H200 and (name, batch) in BEST_US:
            assert float(us.min()) == pytest.approx(BEST_US[name, batch], rel=0.1)


def without(space: Space, **rule: Any) -> float:
    """Fastest modelled time of the strategies with these choices, over that of all."""
    f = space.fields()
    us = modelled_us(space, f)
    keep = np.logical_and.reduce([getattr(f, name) == choice for name, choice in rule.items()])
    assert keep.any()
    return float(us[keep].min() / us.min())


def test_a_warp_alone_on_an_sm_asks_for_too_little_at_a_time() -> None:
    """On an H200 it took 4,311 us, where the best of 40 took 262."""
    alone = {"warps": 1, "ctas_per_sm": 1, "path": "registers"}
    chosen = {"row_threads": 32, "rows_in_flight": 1, "reduction": "together"}
    assert 8 < without(space_of(GDN, 256), **alone, **chosen) < 24


def test_few_rows_want_all_of_a_row_at_once() -> None:
    """On an H200 reading rows twice cost 4 to 5% at 64 rows."""
    space = space_of("fused_add_rmsnorm_h7168", 64)
    assert 1.02 < without(space, residency="reread") < 1.3


def test_a_cluster_costs_more_than_it_saves_on_64_rows() -> None:
    """On an H200 two CTAs a row cost 12%, four 9%."""
    assert 1.03 < without(space_of("rmsnorm_h4096", 64), ctas_per_row=2) < 1.3
