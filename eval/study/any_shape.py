"""How a policy does on workloads drawn at random over all axes, beside a look-up and chance.

    python -m ptxflow.eval.study.any_shape --checkpoint FILE [--device any] [--families gemm,moe]
    [--shapes 200] [--tau 0.02] [--jobs N] [--out FILE]
    python -m ptxflow.eval.study.any_shape --rows eval/results/any-shape.jsonl.xz --into PAGE.md

Of each workload every strategy is listed and rewarded by what the policy was trained on, so that
distances are exact; shares are of the best TFLOP/s by that reward. `look-up` takes the best of the
nearest workload of the 46 definitions' training set, `search` the best of some 2,500 that the model
is asked for, as for hints (`gfn/hints.py`). Intervals of 95% are over workloads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.processes import each
from ptxflow.env.measurements import MeasurementError, read_lines
from ptxflow.eval.bench.markdown import markdown, publish

K, SEEDS = 8, 16  # strategies that are tried, and draws of them
SHARPNESS = 2.0
METHODS = ("policy", "search", "look-up", "uniform")
Array = NDArray[np.float64]


@cache
def _policy(path: Path) -> Any:
    import torch

    from ptxflow.gfn.inference import load_policy

    torch.set_num_threads(1)
    return load_policy(path)


@cache
def _reward(path: Path, device: str) -> Any:
    from ptxflow.env.reward import ModelReward
    from ptxflow.env.reward_source import build

    if device == "any":
        return ModelReward()
    about = _policy(path).about["settings"]
    return build(about["reward"], device)[0] if about["device"] == device else ModelReward()


def judged(asked: tuple[Path, str, str, int, int, float]) -> dict[str, Any]:
    """A row of one workload: checkpoint, device (or any), family, number, seed, temperature."""
    from ptxflow.compiler.device import DEVICES
    from ptxflow.env.reward import log_reward
    from ptxflow.env.space import enumerate_space
    from ptxflow.env.tasks.shapes import Stream
    from ptxflow.env.tasks.training_set import PRESETS, chosen
    from ptxflow.eval.study.knowledge import look_up, trained_problems
    from ptxflow.gfn.hints import asked as asked_for
    from ptxflow.gfn.inference import draw_distinct, log_probs

    path, device, name, number, seed, tau = asked
    rng = np.random.default_rng([seed, number])
    (drawn,) = Stream(name, DEVICES.get(device)).draw(1, rng)
    space = enumerate_space(drawn.family, drawn.problem, drawn.device)
    reward = _reward(path, device)
    worth = log_reward(reward.tflops(space, space.codes), space.problem, space.device, tau=1.0)
    logs = log_probs(_policy(path), space, tau)
    target = np.exp((worth - worth.max()) / tau)
    known = trained_problems(chosen(None, PRESETS["full"]), name)
    scores = look_up(space, reward, known)
    picks = {
        "policy": [draw_distinct(logs, K, s, SHARPNESS) for s in range(SEEDS)],
        "search": [np.searchsorted(space.codes, asked_for(space)[0][:K])],
        "look-up": [] if scores is None else [np.argsort(-scores, kind="stable")[:K]],
        "uniform": [
            rng.choice(len(worth), min(K, len(worth)), replace=False) for _ in range(SEEDS)
        ],
    }
    best = {
        m: float(np.exp(np.mean([np.log(worth[p].max() / worth.max()) for p in rows])))
        for m, rows in picks.items()
        if rows
    }
    distance = 0.5 * float(np.abs(np.exp(logs) - target / target.sum()).sum())
    row = {"family": name, "device": space.device.name, "axes": dict(space.problem.axes)}
    return row | {"leaves": len(space), "distance": distance, "best": best}


def again(values: Array, statistic: Any) -> tuple[float, float]:
    """The ends of the 95% interval of a statistic over workloads, by bootstrap."""
    rng = np.random.default_rng(0)
    drawn = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(2000)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table says of some workloads: how many, distances, shares of the best, gains."""
    distance = np.array([r["distance"] for r in rows])
    low, high = again(distance, np.mean)
    cells = [str(len(rows)), f"{distance.mean():.3f} [{low:.3f}, {high:.3f}]"]
    cells.append(f"{distance.max():.3f}")
    logs = {m: np.log([r["best"].get(m, np.nan) for r in rows]) for m in METHODS}
    means = {m: f"{100 * np.exp(v.mean()):.2f}%" for m, v in logs.items()}
    cells += [means["policy"], f"{100 * np.exp(logs['policy'].min()):.1f}%"]
    cells += [means[m] for m in METHODS[1:]]
    for method in ("search", "look-up"):
        gain = logs["policy"] - logs[method]
        low, high = again(gain, np.mean)
        cells.append(f"{100 * gain.mean():+.2f}% [{100 * low:+.2f}, {100 * high:+.2f}]")
    return cells


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a family, in the order in which they come."""
    families = list(dict.fromkeys(str(r["family"]) for r in rows))
    head = ("family", "workloads", "distance, mean", "most", f"best of {K}", "least",
            *METHODS[1:], "over search", "over look-up")  # fmt: skip
    own = {f: [r for r in rows if r["family"] == f] for f in families}
    return markdown(head, [[f, *summary(some)] for f, some in own.items()])


@reports("any-shape", MeasurementError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.study.any_shape", description=__doc__)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--rows", type=Path, help="judged before, by --out; instead")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="its table any-shape")
    parser.add_argument("--device", default="any", help="whose workloads (any: devices at random)")
    parser.add_argument("--families", help="default: all that the policy has")
    parser.add_argument("--shapes", type=int, default=200, help="of each family")
    parser.add_argument("--tau", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=10**6, help="no training draws by it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; fewer where not enough")
    parser.add_argument("--out", type=Path, help="a JSON line each workload")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) == (args.rows is None):
        raise BadInput("give --checkpoint or --rows")
    rows = [row for _, row in read_lines(args.rows)] if args.rows else judge(args)
    if not rows:
        raise BadInput(f"{args.rows}: no rows")
    publish({"any-shape": table(rows)}, args.into)
    return 0


def judge(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a checkpoint, as many as there is time for."""
    known = [f.name for f in _policy(args.checkpoint).network.config.families]
    families = args.families.split(",") if args.families else known
    asked = [(args.checkpoint, args.device, f, i, args.seed, args.tau) for i in range(args.shapes)
             for f in families]  # fmt: skip
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + args.limit
    for row in each(judged, asked, args.jobs, "shapes", "workload"):
        rows.append(row)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if time.monotonic() > until:
            break
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
