"""A surrogate learns what the model misses, knows where it knows nothing, and is refused if stale.

The truth is planted: the model's time, times an effect of every choice that no model could know.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import spearmanr

from ptxflow.compiler.device import B200, H200
from ptxflow.env import cost
from ptxflow.env.cost import model_tflops
from ptxflow.env.observations import Observations
from ptxflow.env.space import Space
from ptxflow.env.surrogate import Surrogate, SurrogateError, SurrogateReward, matrix, standardise
from ptxflow.env.surrogate import strategy_features as features
from ptxflow.env.surrogate_file import read, write
from ptxflow.env.surrogate_fit import FitConfig, fit
from tests.builders import GEMM, gemm_space

CONFIG = FitConfig(members=3, hidden=(32,), steps=300, batch=256)


def truth(space: Space, codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Planted seconds: every choice of every decision has an effect of its own."""
    rng = np.random.default_rng(5)
    effects = [rng.normal(size=size) * 0.15 for size in space.sizes]
    indices = space.indices(codes)
    effect = np.sum([e[indices[:, i]] for i, e in enumerate(effects)], axis=0)
    tflops = model_tflops(GEMM, space.fields(codes), space.problem, H200)
    return np.asarray(space.problem.flops / tflops / 1e12 * np.exp(effect))


def observed(space: Space, count: int, seed: int = 0) -> Observations:
    rng = np.random.default_rng(seed)
    codes = np.sort(rng.choice(space.codes, min(count, len(space)), replace=False))
    return Observations(GEMM, space.problem, H200, codes, truth(space, codes))


@pytest.fixture(scope="module")
def fitted() -> Surrogate:
    shapes = [(16, 512, 1024), (128, 1024, 512), (512, 512, 2048), (1024, 1024, 1024)]
    return fit([observed(gemm_space(*shape), 300, i) for i, shape in enumerate(shapes)], CONFIG)


def test_an_unseen_workload_is_ranked_far_better_than_by_the_model(fitted: Surrogate) -> None:
    space = gemm_space(256, 512, 1024)
    held = observed(space, 500, 9)
    predicted = SurrogateReward(fitted).tflops(space, held.codes)
    modelled = model_tflops(GEMM, held.fields(), space.problem, H200)
    ours, models = (spearmanr(-p, held.seconds).statistic for p in (predicted, modelled))
    assert ours > 0.95 > models
    best = np.argsort(-predicted)[:8]
    assert held.seconds[best].min() < 1.02 * held.seconds.min()


def test_a_reward_depends_on_the_strategy_alone(fitted: Surrogate) -> None:
    space = gemm_space(256, 512, 1024)
    reward = SurrogateReward(fitted)
    whole = reward.tflops(space, space.codes[:500])
    assert reward.tflops(space, space.codes[:500][::-7]) == pytest.approx(whole[::-7], rel=1e-5)


def test_far_from_the_data_it_is_the_model_with_a_wide_margin() -> None:
    """A choice that was never measured: no correction of one strategy against another is known."""
    held = observed(gemm_space(256, 512, 1024), 4000)
    decision = next(d for d in GEMM.decisions if d.name == "tile_k")
    unseen = getattr(held.fields(), decision.name) == decision.choices[-1]
    known = held.pick(~unseen)
    half = np.arange(len(known)) % 2 == 0
    assert 50 < unseen.sum() < len(held) - 500
    ensemble = fit([known.pick(half)], CONFIG).ensemble

    def corrected(o: Observations) -> tuple[float, float]:
        x = matrix(features(GEMM, o.fields(), o.problem, H200)[0])
        mean, std = ensemble.correction(x)
        return float(np.std(mean)), float(np.median(std))

    (near_mean, near_std), (far_mean, far_std) = map(
        corrected, (known.pick(~half), held.pick(unseen))
    )
    assert near_std < 0.3 * ensemble.prior < 0.8 * ensemble.prior < far_std
    assert far_mean < 0.2 * near_mean


def test_the_unknown_gains_no_advantage_from_a_model_that_is_too_fast() -> None:
    """Where all that was measured is slower than modelled, so is what was not."""
    space = gemm_space(256, 512, 1024)
    held = observed(space, 1000)
    twice = replace(held, seconds=2 * held.seconds)
    x = matrix(features(GEMM, held.fields(), space.problem, H200)[0])
    one, two = (fit([o], CONFIG).ensemble.common(x[:1])[0] for o in (held, twice))
    assert two - one == pytest.approx(np.log(2), abs=0.01)


def test_pessimism_costs_what_is_uncertain(fitted: Surrogate) -> None:
    space = gemm_space(256, 512, 1024)
    fields = space.fields(space.codes[::50])
    log_seconds, std = fitted.predict(fields, space.problem)
    bold, shy = (replace(fitted, kappa=k).tflops(fields, space.problem) for k in (0.0, 2.0))
    assert bold == pytest.approx(space.problem.flops / np.exp(log_seconds) / 1e12)
    assert np.log(bold / shy) == pytest.approx(2 * std)


def test_features_never_leave_the_range_of_the_data(fitted: Surrogate) -> None:
    space = gemm_space(16384, 512, 16384)
    x = matrix(features(GEMM, space.fields(space.codes[:200]), space.problem, H200)[0])
    ensemble = fitted.ensemble
    assert np.isfinite(x).all()
    assert np.abs(standardise(x, ensemble.center, ensemble.gain)).max() <= 4
    log_seconds, _ = fitted.predict(space.fields(space.codes[:200]), space.problem)
    assert np.isfinite(log_seconds).all()


def test_the_same_seed_fits_the_same_surrogate() -> None:
    held = [observed(gemm_space(64, 512, 512), 100)]
    config = replace(CONFIG, steps=20)
    one, two = (fit(held, config).ensemble.layers for _ in range(2))
    assert all((a == b).all() for x, y in zip(one, two, strict=True)
               for a, b in zip(x, y, strict=True))  # fmt: skip


def test_a_file_holds_the_whole_surrogate(fitted: Surrogate, tmp_path: Path) -> None:
    space, file = gemm_space(256, 512, 1024), tmp_path / "s.safetensors"
    write(file, fitted)
    back = read(file)
    codes = space.codes[:200]
    expected = SurrogateReward(fitted).tflops(space, codes)
    assert (SurrogateReward(back).tflops(space, codes) == expected).all()
    assert back.about["data"] == fitted.about["data"] and len(back.digest) == 16


def test_what_cannot_be_used_is_refused_in_one_line(
    fitted: Surrogate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "s.safetensors"
    write(file, fitted)
    whole = file.read_bytes()

    def refusal() -> str:
        with pytest.raises(SurrogateError) as caught:
            read(file)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    for damaged in (whole[:100], whole[:-100], b"nothing", b""):
        file.write_bytes(damaged)
        assert "damaged" in refusal()
    for place in (8 + 20, len(whole) // 2, len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        file.write_bytes(flipped)
        assert "damaged" in refusal()
    file.unlink()
    assert "cannot read the surrogate" in refusal()
    write(file, replace(fitted, features=("retired=1", *fitted.features[1:])))
    assert "other decisions or features" in refusal() and "retired=1" in refusal()
    file.write_bytes(whole)
    with monkeypatch.context() as changed:
        changed.setitem(cost.RATES, "h200", replace(cost.RATES["h200"], launch_s=9e-6))
        assert "the cost model has changed" in refusal() and "share.mma" in refusal()
    read(file)


def test_it_is_of_one_family_on_one_device(fitted: Surrogate) -> None:
    space = gemm_space(64, 512, 512)
    with pytest.raises(SurrogateError, match="gemm on h200, not of gemm on b200"):
        SurrogateReward(fitted).tflops(replace(space, device=B200), space.codes)
    held = observed(space, 10)
    with pytest.raises(ValueError, match="one family on one device"):
        fit([held, replace(held, device=B200)], CONFIG)
    failed = replace(held, seconds=np.full(len(held), np.inf))
    with pytest.raises(ValueError, match="no successful measurement"):
        fit([failed], CONFIG)
