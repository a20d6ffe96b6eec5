"""How a policy does on workloads drawn at random over all axes, beside a look-up and chance.

    python -m ptxflow.eval.study.any_shape --checkpoint FILE [--device any] [--families gemm,moe]
    [--shapes 200] [--tau 0.02] [--jobs N] [--out FILE]

Of each workload every strategy is listed and rewarded by what the policy was trained on, so that
distances are exact; shares are of the best TFLOP/s by that reward. `look-up` takes the best of the
nearest workload of the 46 definitions' training set, `search` the best of some 2,500 that the model
is asked for, as for hints (`gfn/hints.py`). Intervals of 95% are over workloads.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import Parser
from ptxflow.compiler.processes import each

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


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line of one family, or of all."""
    distance = np.array([r["distance"] for r in rows])
    parts = [f"{len(rows):4}  {distance.mean():.3f} [{again(distance, np.mean)[0]:.3f}, "
             f"{again(distance, np.mean)[1]:.3f}]  {distance.max():.3f}"]  # fmt: skip
    logs = {m: np.log([r["best"].get(m, np.nan) for r in rows]) for m in METHODS}
    for values in logs.values():
        parts.append(
            f"{100 * np.exp(values.mean()):6.2f}% (least {100 * np.exp(values.min()):.1f}%)"
        )
    for method in METHODS[1:]:
        gain = logs["policy"] - logs[method]
        low, high = again(gain, np.mean)
        parts.append(f"{100 * gain.mean():+.2f}% [{100 * low:+.2f}, {100 * high:+.2f}]")
    return "  ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.study.any_shape", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--device", default="any", help="whose workloads (any: devices at random)")
    parser.add_argument("--families", help="default: all that the policy has")
    parser.add_argument("--shapes", type=int, default=200, help="of each family")
    parser.add_argument("--tau", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=10**6, help="no training draws by it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; fewer where not enough")
    parser.add_argument("--out", type=Path, help="a JSON line each workload")
    args = parser.parse_args(argv)
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
    print(f"{'family':12} shapes  distance (mean, most)  best of {K}: {', '.join(METHODS)}; "
          f"policy over {', over '.join(METHODS[1:])}")  # fmt: skip
    for family in families:
        if own := [r for r in rows if r["family"] == family]:
            print(f"{family:12} {summary(own)}")
    if len(families) > 1:
        print(f"{'all':12} {summary(rows)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
