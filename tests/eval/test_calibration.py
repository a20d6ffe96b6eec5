"""Calibration finds planted constants, leaves alone what it cannot see, and leaves no trace."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from ptxflow.compiler.device import H200
from ptxflow.env import cost
from ptxflow.env.observations import Observations
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.study import calibration
from ptxflow.eval.study.calibration import Constant, Problem


def workload(name: str, m: int, count: int = 150) -> Observations:
    """A workload measured by the model itself."""
    family, problem = find_problem(load(name), {"M": m})
    space = enumerate_space(family, problem, H200)
    codes = np.sort(np.random.default_rng(m).choice(space.codes, count, replace=False))
    observed = Observations(family, problem, H200, codes, np.ones(count))
    return replace(observed, seconds=np.exp(calibration.log_seconds(observed, {})))


@pytest.fixture(scope="module")
def observed() -> list[Observations]:
    shapes = [("gemm_n128_k2048", 64), ("gemm_n2048_k4096", 512), ("gemm_n256_k7168", 4096)]
    return [workload(*shape) for shape in shapes]


def named(observed: list[Observations], *names: str) -> list[Constant]:
    known = {c.name: c for c in calibration.constants([observed[0].family], H200)}
    return [known[name] for name in names]


def test_planted_constants_are_found(observed: list[Observations]) -> None:
    free = named(observed, "rates.launch_s", "rates.dram_latency", "rates.mma_efficiency")
    truth = {c.name: c.value * f for c, f in zip(free, (1.3, 0.75, 0.9), strict=True)}
    measured = [replace(o, seconds=np.exp(calibration.log_seconds(o, truth))) for o in observed]
    found = Problem(measured, free).solve()
    assert found == pytest.approx(truth, rel=0.05)
    text = calibration.table(free, found)
    assert all(name in text for name in truth)


def test_what_fits_stays_and_ranges_hold(observed: list[Observations]) -> None:
    (launch,) = named(observed, "rates.launch_s")
    assert Problem(observed, [launch]).solve()[launch.name] == pytest.approx(launch.value, rel=1e-3)
    slow = [replace(o, seconds=o.seconds + 1e-3) for o in observed]
    assert Problem(slow, [launch]).solve()[launch.name] <= launch.high
    assert "*" in calibration.table([launch], {launch.name: launch.high})


def test_named_costs_of_the_family_are_among_them_and_unfelt_ones_left_out(
    observed: list[Observations],
) -> None:
    known = calibration.constants([observed[0].family], H200)
    assert all(c.low <= c.value <= c.high for c in known)
    names = {c.name for c in known}
    own = {n.removeprefix("gemm.") for n in names if not n.startswith("rates.")}
    assert own and own <= set(asdict(observed[0].family.costs["h200"]))
    free = {c.name for c in calibration.felt(observed, known)}
    assert "rates.launch_s" in free and free < names  # what only Blackwell has moves nothing here


def test_the_model_is_as_before_after_a_block_and_after_an_error(
    observed: list[Observations],
) -> None:
    first = observed[0]
    before, rates = calibration.log_seconds(first, {}), cost.RATES["h200"]
    values = {c.name: c.value * 1.5 for c in calibration.constants([first.family], H200)}
    assert (calibration.log_seconds(first, values) != before).all()
    with pytest.raises(RuntimeError), calibration.changed(first.family, H200, values):
        assert cost.RATES["h200"] != rates
        raise RuntimeError
    assert cost.RATES["h200"] is rates
    assert (calibration.log_seconds(first, {}) == before).all()


def test_thinning_keeps_the_fastest_half_and_a_spread(observed: list[Observations]) -> None:
    o = observed[0]
    few = calibration.thinned(o, 40)
    assert len(few) == 40 and (np.diff(few.codes) > 0).all()
    fastest = set(np.sort(o.seconds)[:20])
    assert fastest <= set(few.seconds) and few.seconds.max() == o.seconds.max()
    assert calibration.thinned(few, 40) is few
