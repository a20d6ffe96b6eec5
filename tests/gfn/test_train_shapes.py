"""Training on workloads and devices drawn at random, and what judges it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from ptxflow.compiler.device import B200, DEVICES, H200
from ptxflow.compiler.kernels.gemm import GEMM
from ptxflow.env.measurements import read_lines
from ptxflow.env.relation import relate
from ptxflow.env.reward import ModelReward
from ptxflow.env.search import Search
from ptxflow.env.space import enumerate_space
from ptxflow.env.surrogate import SurrogateReward
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.shapes import DEVICE_RANGES, RANGES, Stream, random_device, size
from ptxflow.env.tasks.training_set import PRESETS, ROWS, registered
from ptxflow.eval.bench.markdown import quoted
from ptxflow.eval.sample.draws import ANY, WIDE, of_wide
from ptxflow.eval.study import any_shape
from ptxflow.gfn import hints, known
from ptxflow.gfn.inference import at_temperature, load_policy
from ptxflow.gfn.options import Settings, TrainConfig, parse
from ptxflow.gfn.targets import part_around
from ptxflow.gfn.training import RENEW_EVERY, Trainer

FITTED = ("gemm", "gqa_decode", "moe")  # whose wide spaces have surrogates
FAMILIES = sorted({f.name for row in ROWS for n in row.definitions if (f := registered(load(n)))})


@pytest.mark.parametrize("family", FAMILIES)
def test_random_workloads_are_within_their_ranges_and_repeatable(family: str) -> None:
    drawn = Stream(family).draw(6, np.random.default_rng(3))
    again = Stream(family).draw(6, np.random.default_rng(3))
    assert [s.problem for s in drawn] == [s.problem for s in again]
    assert len({s.problem for s in drawn}) > 3
    for space in drawn:
        assert len(space) > 0
        for name, value in space.problem.axes:
            if name in RANGES:
                least, most, _ = RANGES[name]
                own = {load(n).const_axes.get(name) for row in ROWS for n in row.definitions}
                assert least <= value <= most or value in own


def test_what_is_avoided_is_never_drawn() -> None:
    rng = np.random.default_rng(0)
    free = [s.problem for s in Stream("mla_decode", H200).draw(12, rng)]
    held = Stream("mla_decode", H200, avoid=frozenset(free[:3]))
    assert not {s.problem for s in held.draw(12, np.random.default_rng(0))} & set(free[:3])


def test_sizes_cover_all_magnitudes() -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([size(64, 32768, 8, rng) for _ in range(2000)])
    assert drawn.min() >= 64 and drawn.max() <= 32768 and (drawn % 8 == 0).all()
    assert np.histogram(np.log2(drawn), bins=9, range=(6, 15))[0].min() > 100


def test_devices_are_drawn_around_the_named_ones() -> None:
    rng = np.random.default_rng(0)
    for device in (random_device(rng) for _ in range(50)):
        base = DEVICES[device.name]
        for name, (least, most) in DEVICE_RANGES.items():
            assert 0.99 * least <= getattr(device, name) / getattr(base, name) <= 1.01 * most
        peak = device.sms * device.clock_ghz * device.mma_flops_per_cycle
        whole = base.sms * base.clock_ghz * base.mma_flops_per_cycle
        assert device.tflops_16bit / base.tflops_16bit == pytest.approx(peak / whole)
    kept = {Stream("moe", without=("h100",)).any_device(rng).name for _ in range(60)}
    assert kept == {"b200", "h200"}


def test_a_stream_renews_the_workloads_of_a_training() -> None:
    stream = Stream("mla_decode")
    spaces = stream.draw(20, np.random.default_rng(1))
    config = TrainConfig(tau=0.02, batch=64, each=8, hidden=32, stages=1)
    trainer = Trainer(spaces, config, 100, streams={"mla_decode": stream})
    group = trainer.groups[0]
    varies = torch.tensor(trainer.network.config.policies[0].gain) > 0
    names = trainer.network.config.families[0].features
    assert {n for n, v in zip(names, varies, strict=True) if v} >= {"device.sms", "device.l2_bytes"}
    for _ in range(RENEW_EVERY - 1):
        trainer.advance()
    assert group.spaces == spaces and (group.replay.worth > -torch.inf).any(1).sum() == 20
    assert np.isfinite(trainer.advance().loss)
    assert group.spaces[:16] != spaces[:16] and group.spaces[16:] == spaces[16:]
    assert trainer.spaces == group.spaces and group.env.walks is group.walks
    for w in (0, 19):
        assert [d for d, s in enumerate(group.spaces) if s is group.spaces[w]] == [w]
        assert group.walks.log_leaves[w].exp() == pytest.approx(len(group.spaces[w]))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workloads, and questions to the model."""
    monkeypatch.setitem(PRESETS, "shapes", replace(PRESETS["shapes"], shapes=6))
    monkeypatch.setattr(hints, "SEARCH", Search(drawn=200, rounds=2, kept=8))


@pytest.mark.usefixtures("undrawn", "few")
def test_one_policy_for_any_device_is_trained_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "any.safetensors"
    argv = ["--preset", "shapes", "--device", "any", "--without", "h100", "--steps", "4",
            "--definitions", "mla_decode", "--batch", "64", "--width", "32", "--compute", "cpu",
            "--out", str(tmp_path / "run"), "--export", str(policy)]  # fmt: skip
    assert train.main(argv) == 0
    rows = json.loads((tmp_path / "run" / "result.json").read_text())["workloads"]
    assert rows and {r["kind"] for r in rows} == {"held_out"}
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "6"]) == 0
    made = load_policy(policy)
    assert made.device is None and made.about["settings"]["without"] == "h100"
    assert at_temperature(made, "mla_decode", 0.05) == (0.05, 1.0)
    with pytest.raises(ValueError, match=r"trained at temperatures from 0\.005 to 0\.1, not 0\.3"):
        at_temperature(made, "mla_decode", 0.3)
    capsys.readouterr()
    for device in ("any", "h100"):
        asked = ["--checkpoint", str(policy), "--device", device, "--shapes", "3"]
        assert any_shape.main([*asked, "--out", str(tmp_path / f"{device}.jsonl")]) == 0
        rows = [json.loads(r) for r in (tmp_path / f"{device}.jsonl").read_text().splitlines()]
        assert len(rows) == 3 and all(0 < r["distance"] < 1 for r in rows)
        assert all(0 < v <= 1 for r in rows for v in r["best"].values())
        assert f"{np.mean([r['distance'] for r in rows]):.3f} [" in capsys.readouterr().out
    assert {r["device"] for r in rows} == {"h100"}
    assert any_shape.main([]) == 2 and "give --checkpoint or --rows" in capsys.readouterr().err
    assert any_shape.main(["--rows", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize("judged", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("undrawn", "few")
def test_a_policy_of_wide_spaces_is_trained_and_judged_on_parts(
    judged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, out = tmp_path / "wide.safetensors", tmp_path / "rows.jsonl"
    argv = ["--preset", "shapes", "--space", "wide", "--device", "any", "--steps", "2",
            "--definitions", "gemm_n128_k2048,rmsnorm_h4096", "--batch", "64", "--width", "32",
            "--compute", "cpu", "--out", str(tmp_path / "run")]  # fmt: skip
    assert train.main([*argv, "--export", str(policy)]) == 0
    rows = json.loads((tmp_path / "run" / "result.json").read_text())["workloads"]
    assert {r["family"] for r in rows} == {"gemm"}, "RMSNorm has no wide space"
    assert all(0 < r["distance"] < 1 and r["leaves"] < 3 * 10**5 for r in rows)
    assert of_wide(policy, GEMM) and not of_wide(ANY, GEMM)
    assert train.main([*argv, "--definitions", "rmsnorm_h4096", "--overwrite"]) == 2
    assert "none of these families has a wide space" in capsys.readouterr().err
    if not judged:
        return
    asked = ["--checkpoint", str(policy), "--space", "wide", "--shapes", "2", "--most", "2000"]
    assert any_shape.main([*asked, "--out", str(out)]) == 0
    for row in map(json.loads, out.read_text().splitlines()):
        assert 2000 >= row["judged"] < row["leaves"]
        assert row["distances"].keys() == {"0.005", "0.01", "0.02", "0.1"}
        assert all(0 < d < 1 for d in row["distances"].values())
        assert row["best"]["uniform"] < row["best"]["policy"] <= 1 >= row["best"]["search"]
        assert "look-up" not in row["best"]
    few, usual = tmp_path / "few.jsonl", (known.DRAWN, known.NEAR)
    assert any_shape.main([*asked, "--asks", "256", "--untrained", "--out", str(few)]) == 0
    told, less = (np.mean([r["distance"] for _, r in read_lines(file)]) for file in (out, few))
    assert told < less and usual == (known.DRAWN, known.NEAR)


def test_a_part_around_a_strategy_holds_it_and_is_as_large_as_may_be() -> None:
    (space,) = Stream("gemm", H200, wide=True).draw(1, np.random.default_rng(3))
    rng = np.random.default_rng(1)
    code = int(space.sample_uniform(1, rng)[0])
    part = part_around(space, code, 500, rng)
    assert len(part) <= 500 and part.strategy(code) == space.strategy(code)
    free = {n for n, c in zip((d.name for d in space.decisions), part.listed().indices().T,
                              strict=True) if len(set(c)) > 1}  # fmt: skip
    strategy = space.strategy(code)
    fixed = {d.name: [strategy.get(d.name, d.choices[0])] for d in space.decisions
             if d.name not in free}  # fmt: skip
    grown = [space.given({n: c for n, c in fixed.items() if n != name}) for name in fixed]
    assert all(len(wider) > 500 or len(wider) == len(part) for wider in grown)


@pytest.mark.parametrize("policy", [ANY, WIDE], ids=lambda path: path.stem)
def test_the_page_quotes_what_was_judged(policy: Path) -> None:
    root, name = Path(any_shape.__file__).resolve().parents[2], f"{policy.stem}-shape"
    rows = [r for _, r in read_lines(root / "eval" / "results" / f"{name}.jsonl.xz")]
    page = (root / "gfn" / "README.md").read_text(encoding="utf-8")
    assert quoted(page)[name] == any_shape.table(rows)
    held = load_policy(policy).network.config.families
    assert {r["family"] for r in rows} == {f.name for f in held}


def test_of_a_wide_space_a_device_with_surrogates_is_trained_by_them() -> None:
    def of(device: str, *more: str) -> Settings:
        argv = ["--preset", "shapes", "--space", "wide", "--compute", "cpu", "--device", device]
        return train.new_settings(parse([*argv, *more]))

    made, modelled = of("h200"), of("any")
    wide = {f"checkpoints/wide-surrogate-{f}-h200.safetensors" for f in FITTED}
    assert set(made.reward["surrogates"]) == wide and made.train["knowing"] == "surrogate"
    assert modelled.reward == of("b200").reward == of("h200", "--reward", "model").reward
    assert modelled.reward == {"source": "model"} and modelled.train["knowing"] == "model"
    assert made.train["batch"] == made.train["workloads"] * made.train["each"] == 2048
    (space,) = Stream("gemm", H200, wide=True).draw(1, np.random.default_rng(1))
    codes = space.sample_uniform(20, np.random.default_rng(1))
    assert isinstance(rewarder := hints.rewarder(space, "surrogate"), SurrogateReward)
    by_model = hints.rewarder(space, "model").tflops(space, codes)
    assert not np.allclose(rewarder.tflops(space, codes), by_model)
    (bare,) = Stream("gqa_prefill", H200, wide=True).draw(1, np.random.default_rng(1))
    assert isinstance(hints.rewarder(bare, "surrogate"), ModelReward), "it has none of its own"


def test_options_of_any_device_are_refused_where_they_mean_nothing() -> None:
    for argv in (["--device", "any"], ["--without", "h100"],
                 ["--preset", "shapes", "--measure", "4"],
                 ["--preset", "shapes", "--device", "any", "--reward", "replay"],
                 ["--space", "wide"],
                 ["--preset", "shapes", "--space", "wide", "--reward", "replay"]):  # fmt: skip
        with pytest.raises(SystemExit):
            train.main(argv)


def test_masks_of_devices_drawn_at_random_are_the_lists() -> None:
    rng = np.random.default_rng(5)
    for space in Stream("gqa_prefill").draw(3, rng):
        listed = enumerate_space(space.family, space.problem, space.device)
        assert len(listed) == len(space)
    smaller = random_device(rng)
    assert smaller not in (B200, H200)
    space = Stream("mla_prefill", smaller).draw(1, rng)[0]
    assert len(relate(space.family, space.problem, smaller)) == len(space)
