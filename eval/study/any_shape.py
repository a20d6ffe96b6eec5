"""How a policy does on workloads drawn at random over all axes, beside a look-up and chance.

    python -m ptxflow.eval.study.any_shape --checkpoint FILE [--device any] [--families gemm,moe]
    [--space wide] [--shapes 200] [--tau 0.02] [--asks N] [--untrained] [--jobs N] [--out FILE]
    python -m ptxflow.eval.study.any_shape --rows eval/results/any-shape.jsonl.xz --into PAGE.md

Of each workload every strategy is listed and rewarded by what the policy was trained on, so that
distances are exact; of a space of more than --most such a part, around a draw of the policy. Shares
are of the best TFLOP/s by that reward, of a larger space of the best that any method or a longer
search found. `search` is that of a policy's hints (`gfn/hints.py`); `look-up` takes the best of the
nearest workload of the 46 definitions' training set. Intervals of 95% are over workloads.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.processes import each
from ptxflow.env.measurements import MeasurementError, read_lines
from ptxflow.env.reward import FamilyRewards, ModelReward, log_reward
from ptxflow.env.search import Search
from ptxflow.env.space import Codes
from ptxflow.env.tasks.training_set import PRESETS, chosen
from ptxflow.eval.bench.markdown import markdown, publish

OVER = ("search", "look-up")
K, SEEDS = 8, 16  # strategies that are tried, and draws of them
SHARPNESS = 2.0
TEMPERATURES = (0.005, 0.01, 0.02, 0.1)
METHODS = ("policy", "search", "look-up", "uniform")
THOROUGH = Search(drawn=4096, rounds=24, kept=256, crossed=2048)
Array = NDArray[np.float64]


@cache
def _policy(path: Path, untrained: bool = False) -> Any:
    import torch

    from ptxflow.gfn.inference import Policy, load_policy
    from ptxflow.gfn.network import PolicyNetwork

    torch.set_num_threads(1)
    policy = load_policy(path)
    if not untrained:
        return policy
    torch.manual_seed(0)
    return Policy(PolicyNetwork(policy.network.config).eval(), path, policy.about)


@cache
def _reward(path: Path, device: str) -> Any:
    from ptxflow.env.reward_source import build

    if device == "any":
        return ModelReward()
    about = _policy(path).about["settings"]
    return build(about["reward"], device)[0] if about["device"] == device else ModelReward()


@dataclass(frozen=True)
class Asked:
    """What a row is asked of: a policy on the workload of this number."""

    path: Path
    device: str  # or any
    family: str
    number: int
    seed: int
    tau: float
    wide: bool
    most: int
    asks: int
    untrained: bool


def judged(asked: Asked) -> dict[str, Any]:
    """The row of one workload, by as much as is to be asked."""
    from ptxflow.gfn import known

    usual = known.DRAWN, known.NEAR
    known.DRAWN, known.NEAR = (asked.asks, asked.asks >> 8) if asked.asks else usual
    try:
        return _row(asked)
    finally:
        known.DRAWN, known.NEAR = usual


def _row(asked: Asked) -> dict[str, Any]:
    from ptxflow.compiler.device import DEVICES
    from ptxflow.env.tasks.shapes import Stream
    from ptxflow.eval.study.knowledge import look_up, trained_problems
    from ptxflow.gfn.hints import SEARCH
    from ptxflow.gfn.inference import sample_by_steps
    from ptxflow.gfn.targets import distance_within, part_around

    rng = np.random.default_rng([asked.seed, asked.number])
    stream = Stream(asked.family, DEVICES.get(asked.device), wide=asked.wide)
    (space,) = stream.draw(1, rng)
    policy, reward = _policy(asked.path, asked.untrained), _reward(asked.path, asked.device)
    if isinstance(reward, FamilyRewards):
        reward = reward.of(asked.family)
    config, draw = policy.network.of(asked.family).config, partial(sample_by_steps, policy, space)

    def worth(codes: Codes) -> Array:
        return log_reward(reward.tflops(space, codes), space.problem, space.device, tau=1.0)

    begin = time.process_time()
    draw(K, 0, SHARPNESS, asked.tau)
    seconds = time.process_time() - begin
    picks: dict[str, list[Array]] = {
        "policy": [worth(draw(K, s, SHARPNESS, asked.tau)[0]) for s in range(SEEDS)],
        "search": [SEARCH.run(space, worth, s + 1)[1][:K] for s in range(SEEDS // 4)],
        "uniform": [worth(space.sample_uniform(K, rng)) for _ in range(SEEDS)],
    }
    part = space
    if len(space) > asked.most:
        part = part_around(space, int(draw(1, SEEDS, 1.0, asked.tau)[0][0]), asked.most, rng)
        picks["best known"] = [THOROUGH.run(space, worth)[1]]
    listed = part.listed()
    top = max(worth(listed.codes).max(), *(p.max() for rows in picks.values() for p in rows))
    if not asked.wide:
        known = trained_problems(chosen(None, PRESETS["full"]), asked.family)
        scores = look_up(listed, reward, known)
        near = [] if scores is None else [np.argsort(-scores, kind="stable")[:K]]
        picks["look-up"] = [worth(listed.codes[places]) for places in near]
    best = {
        m: float(np.exp(np.mean([np.log(p.max() / top) for p in rows])))
        for m, rows in picks.items()
        if rows
    }
    least, most = config.temperatures or (asked.tau, asked.tau)
    distances = {
        t: distance_within(policy.network, space, part, reward, t)
        for t in sorted({*TEMPERATURES, asked.tau})
        if least <= t <= most
    }
    row = {"family": asked.family, "device": space.device.name, "axes": dict(space.problem.axes)}
    told = {"leaves": len(space), "judged": len(part), "distance": distances[asked.tau]}
    return row | told | {"distances": distances, "best": best, "seconds": seconds}


def by_temperature(rows: Sequence[Mapping[str, Any]]) -> str:
    """Mean and largest distance at each temperature, a row a family."""
    told = [r for r in rows if "distances" in r]
    taus = sorted({float(t) for r in told for t in r["distances"]})
    lines = []
    for family in dict.fromkeys(str(r["family"]) for r in told):
        own = [{float(t): d for t, d in r["distances"].items()} for r in told
               if r["family"] == family]  # fmt: skip
        held = [[d[t] for d in own if t in d] for t in taus]
        lines.append([family, *(f"{np.mean(h):.3f}, {max(h):.3f}" if h else "-" for h in held)])
    return markdown(("family", *(f"tau {t}" for t in taus)), lines)


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
    shares = {m: 100 * np.exp(v.mean()) for m, v in logs.items()}
    means = {m: "-" if np.isnan(v) else f"{v:.2f}%" for m, v in shares.items()}
    cells += [means["policy"], f"{100 * np.exp(logs['policy'].min()):.1f}%"]
    cells += [means[m] for m in METHODS[1:]]
    for method in OVER:
        gain = logs["policy"] - logs[method]
        if np.isnan(gain).any():
            cells.append("-")
            continue
        low, high = again(gain, np.mean)
        cells.append(f"{100 * gain.mean():+.2f}% [{100 * low:+.2f}, {100 * high:+.2f}]")
    return cells


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a family, in the order in which they come."""
    families = list(dict.fromkeys(str(r["family"]) for r in rows))
    head = ("family", "workloads", "distance, mean", "most", f"best of {K}", "least",
            *METHODS[1:], *(f"over {m}" for m in OVER))  # fmt: skip
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
    parser.add_argument("--space", choices=("listed", "wide"), default="listed")
    parser.add_argument("--most", type=int, default=300_000, help="strategies that are listed")
    parser.add_argument("--shapes", type=int, default=200, help="of each family")
    parser.add_argument("--tau", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=10**6, help="no training draws by it")
    parser.add_argument("--asks", type=int, default=0, help="for the sample of `gfn/hints.py`, and "
                        "a 256th of it for few that are left; instead of its own")  # fmt: skip
    parser.add_argument("--untrained", action="store_true", help="the network before training")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds; fewer where not enough")
    parser.add_argument("--out", type=Path, help="a JSON line each workload")
    args = parser.parse_args(argv)
    if (args.checkpoint is None) == (args.rows is None):
        raise BadInput("give --checkpoint or --rows")
    rows = [row for _, row in read_lines(args.rows)] if args.rows else judge(args)
    if not rows:
        raise BadInput(f"{args.rows}: no rows")
    name = "wide" if args.space == "wide" else "any"
    publish({f"{name}-shape": table(rows)}, args.into)
    if any("distances" in row for row in rows):
        print(by_temperature(rows))
    return 0


def judge(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a checkpoint, as many as there is time for."""
    known = [f.name for f in _policy(args.checkpoint).network.config.families]
    families = args.families.split(",") if args.families else known
    fixed = args.seed, args.tau, args.space == "wide", args.most, args.asks, args.untrained
    asked = [Asked(args.checkpoint, args.device, f, i, *fixed) for i in range(args.shapes)
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
