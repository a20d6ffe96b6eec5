"""What README.md says of the trained policies is what the committed checkpoints say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sample
from ptxflow.compiler.device import device
from ptxflow.env.reward import Reward, target
from ptxflow.env.space import Space, enumerate_space
from ptxflow.eval.arguments import find_problem
from ptxflow.eval.definition import load
from ptxflow.eval.plots import KINDS
from ptxflow.eval.reward_source import build
from ptxflow.gfn.checkpoint import read
from ptxflow.gfn.inference import load_policy, log_probs, sample_distinct

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHECKPOINTS = sorted((ROOT / "checkpoints").glob("[bh]*.safetensors"))
WORST = re.compile(r"(\S+)'s worst is\s+`(\w+)`\s+at\s+(\w+)=(\d+),\s+(0\.\d+)")
SAMPLE = re.compile(
    r"^\$ python sample\.py --definition (\w+) --axes (\w+)=(\d+)(?: --device (\w+))?.*\n"
    r"((?:(?!```).*\n)*)",
    re.M,
)


def space(definition: str, axis: str, size: int, name: str) -> Space:
    return enumerate_space(*find_problem(load(definition), {axis: size}), device(name))


def reward_of(config: dict[str, Any], name: str) -> Reward:
    """The reward that a policy was trained on, from the files it was trained on."""
    return build(config["settings"]["reward"], name)[0]


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda p: p.stem)
def test_distances_are_those_in_the_header(path: Path) -> None:
    result = read(path).config["result"]
    policy = path.stem.upper()
    for family, kinds in result["families"].items():
        for kind, r in kinds.items():
            row = f"| {policy} | {family} | {KINDS[kind]} | {r['workloads']} | {r['mean']:.4f} | "
            row += f"{r['max']:.4f} |"
            assert row in README, f"README.md should have: {row}"


@pytest.mark.parametrize(("name", "definition", "axis", "size", "distance"), WORST.findall(README))
def test_the_worst_distance_is_what_the_policy_gives(
    name: str, definition: str, axis: str, size: str, distance: str
) -> None:
    path = ROOT / "checkpoints" / f"{name.lower()}.safetensors"
    where = space(definition, axis, int(size), name.lower().partition("-")[0])
    config = read(path).config
    exact, _ = target(where, reward_of(config, where.device.name), config["train"]["tau"])
    ours = log_probs(load_policy(path), where)
    measured = 0.5 * np.abs(np.exp(ours) - np.exp(exact)).sum()
    assert measured == pytest.approx(float(distance), abs=1e-3)
    held_out = config["result"]["families"][where.family.name]["held_out"]
    assert measured == pytest.approx(held_out["max"], abs=1e-3)


@pytest.mark.parametrize(("definition", "axis", "size", "name", "output"), SAMPLE.findall(README))
def test_quoted_samples_are_what_the_policy_draws(
    definition: str, axis: str, size: str, name: str, output: str
) -> None:
    """Keys, modelled TFLOP/s, share of the best and log-probability of every quoted kernel."""
    name = name or "b200"
    rows = re.findall(r"^\d+ +(\w{16}) +([\d.]+) +([\d.]+)% +(-[\d.]+)", output, re.M)
    assert len(rows) == 8
    where = space(definition, axis, int(size), name)
    policy = load_policy(sample.default_checkpoint(name))
    scores = log_probs(policy, where)
    modelled = reward_of(policy.about, name).tflops(where, where.codes)
    drawn = {
        where.strategy(int(c)).key: int(np.searchsorted(where.codes, c))
        for c in sample_distinct(policy, where, 8, seed=0)
    }
    for key, tflops, share, log_prob in rows:
        assert key in drawn, "README.md: run the command again and quote what it prints"
        at = drawn[key]
        assert modelled[at] == pytest.approx(float(tflops), abs=0.06)
        assert 100 * modelled[at] / modelled.max() == pytest.approx(float(share), abs=0.06)
        assert scores[at] == pytest.approx(float(log_prob), abs=0.02)


def test_the_sizes_of_the_spaces() -> None:
    found = re.search(r"M = 4096: ([\d,]+) on B200 and\s+([\d,]+) on H200", README)
    assert found is not None
    sizes = [len(space("gemm_n4096_k4096", "M", 4096, name)) for name in ("b200", "h200")]
    assert [int(text.replace(",", "")) for text in found.groups()] == sizes


def test_figures_are_quoted() -> None:
    assert CHECKPOINTS and SAMPLE.search(README) and WORST.search(README)
