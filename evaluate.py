#!/usr/bin/env python
"""Compare policies with searches on brute-forced spaces; `python evaluate.py --help` explains."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ptxflow.env.reward import Reward
    from ptxflow.env.space import Space, SpaceSet
    from ptxflow.eval.evaluation_results import Belief
    from ptxflow.eval.search.play import Method
    from ptxflow.eval.search.replay import Replay
    from ptxflow.gfn.inference import Policy

    Array = NDArray[np.float64]

ROOT = Path(__file__).resolve().parent
MEASUREMENTS, CHECKPOINTS = ROOT / "eval" / "measurements", ROOT / "checkpoints"
RESULTS, PAGE, PLOTS = "results.json", "report.html", "plots"

HELP = """\
Play policies and searches on spaces whose every strategy was measured, and report what they find.

Of a brute-forced sub-space the best strategy is known, so that a method's loss is, too. Methods are
told nothing but the times of what they choose to measure; all have the same budget of 1 to 128
measurements. Which sub-spaces there are, the measurement files say. Policies are those in
checkpoints/ and those given; a policy proposes strategies of the sub-space with its probabilities,
renormalised. No GPU is needed.
"""
EPILOG = """\
examples:
  python evaluate.py                                     everything, into out/evaluation
  python evaluate.py --into docs/evaluation.md --plots plots/evaluation
  python evaluate.py --policy norms=runs/norms/checkpoint.safetensors --only uniform,policy,norms
  python evaluate.py --results out/evaluation/results.json --plots out/plots    draw again only

writes into --out:
  results.json   every figure, with the files that it follows from
  report.html    tables and plots in one file that needs no network
  plots/*.png    the plots
exit codes: 0 done, 1 a method broke the rules of play (one line says which), 2 bad input
"""


class BadInput(ValueError):
    """What the user asked for cannot be done; the message is one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        print(f"evaluate: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="evaluate.py",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--measurements", type=Path, nargs="+", metavar="FILE",
        help="where to look for brute-forced sub-spaces, and what surrogates are fitted to "
        "(default: all in eval/measurements)")  # fmt: skip
    add(
        "--kernels",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measured kernels that policies chose (default: those files whose names say policy)",
    )
    add("--policy", nargs="+", default=[], metavar="NAME=FILE", help="further policies")
    add(
        "--only",
        metavar="NAME,...",
        help="only these methods, or those whose names begin like this",
    )
    add(
        "--workloads",
        metavar="TEXT,...",
        help="only workloads of these names, or that contain one of these texts",
    )
    add("--seeds", type=int, default=50, help="runs of each method that draws (default: 50)")
    add("--least", type=int, help="strategies that make a sub-space (default: 600)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    add("--out", type=Path, default=Path("out/evaluation"), help="folder (default: out/evaluation)")
    add("--into", type=Path, metavar="PAGE.md", help="also renew the tables of this page")
    add("--plots", type=Path, metavar="DIR", help="also write the plots there")
    add("--results", type=Path, metavar="FILE", help="report these results; nothing is played")
    args = parser.parse_args(argv)
    for name in ("seeds", "jobs", "least"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name} must be positive, not {value}")
    return args


def digest(path: Path) -> str:
    """Of a file's bytes; MeasurementError where it cannot be read."""
    from ptxflow.env.measurements import MeasurementError

    if not path.is_file():
        raise MeasurementError(f"{path}: no such file")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def stored(path: Path) -> str:
    """Relative to the repository where it lies in there."""
    whole = path.resolve()
    return str(whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole)


def find_policies(given: Sequence[str]) -> dict[str, Policy]:
    """The policies in checkpoints/ by their device, then those given as NAME=FILE.

    CheckpointError where a file is no good.
    """
    from ptxflow.gfn.inference import load_policy

    found = {}
    for path in sorted(CHECKPOINTS.glob("*.safetensors")):
        if not path.name.startswith("surrogate-"):
            found[path.stem] = load_policy(path)
    for text in given:
        name, sign, path_text = text.partition("=")
        if not sign or not name or not path_text:
            raise BadInput(f"--policy {text!r} must have the form NAME=FILE")
        if name in found:
            raise BadInput(f"--policy {name}: there is one of that name")
        found[name] = load_policy(path_text)
    return found


def untrained(policy: Policy) -> Policy:
    """The same network with random weights, those of its output rows too."""
    import torch

    from ptxflow.gfn.inference import Policy
    from ptxflow.gfn.network import PolicyNetwork

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = PolicyNetwork(policy.network.config)
        torch.nn.init.normal_(network.head, std=policy.network.config.hidden**-0.5)
    return Policy(network.eval(), policy.path, policy.about)


def leaf_log_probs(policy: Policy, whole: SpaceSet, part: Space) -> Array:
    """[len(part)] log-probabilities of a part's strategies in the whole space of their problem.

    Walks that are forced to these strategies, so that only their prefixes are evaluated. Raises
    CheckpointError when the policy knows no such space.
    """
    import torch

    from ptxflow.gfn.checkpoint import require_space
    from ptxflow.gfn.forest import Forest, family_shape, feature_names

    config = policy.network.config
    require_space(policy.path, config, family_shape(part), feature_names([part]))
    forest = Forest(whole, config.features)
    with torch.no_grad():
        walk = forest.walk(
            policy.network,
            torch.zeros(len(part), dtype=torch.int64),
            given=torch.from_numpy(part.indices()),
        )
    exact: Array = walk.log_probs.double().sum(0).numpy()
    return exact


def rewards_of(policies: Mapping[str, Policy]) -> dict[str, Reward]:
    """The rewards that policies were trained on, where their files are still the same."""
    from ptxflow.eval.reward_source import RewardError, build

    out = {}
    for name, policy in policies.items():
        settings = policy.about["settings"]
        try:
            out[name], _ = build(settings["reward"], settings["device"])
        except RewardError as error:
            print(f"evaluate: the reward of policy {name}: {error}", file=sys.stderr)
    return out


def own_target(policy: Policy, reward: Reward | None, replay: Replay) -> Array | None:
    """[n] log R of the policy's reward; None where it is not at hand or of another device."""
    from ptxflow.env.reward import log_reward

    space = replay.space
    if reward is None or policy.about["settings"]["device"] != space.device.name:
        return None
    tflops = reward.tflops(space, space.codes)
    return log_reward(tflops, space.problem, space.device, policy.about["train"]["tau"])


def beliefs_on(
    replay: Replay,
    policies: Mapping[str, Policy],
    rewards: Mapping[str, Reward],
    absent: dict[str, str],
) -> list[Belief]:
    """What each policy says of a sub-space, that of its device first, and what an untrained one
    does; `absent` is told of those that know no such space."""
    from ptxflow.env.space import SpaceSet, enumerate_space
    from ptxflow.eval.evaluation_results import Belief
    from ptxflow.gfn.checkpoint import CheckpointError

    part, home, out = replay.space, replay.space.device.name, []
    whole = SpaceSet([enumerate_space(part.family, part.problem, part.device)])
    for name in sorted(policies, key=lambda name: name != home):
        policy = policies[name]
        shown = "policy" if name == home else f"policy {name}"
        try:
            logs = leaf_log_probs(policy, whole, part)
        except CheckpointError as error:
            absent[f"{shown} on {replay.space.family.name}"] = str(error).replace(f"{ROOT}/", "")
            continue
        out.append(Belief(shown, logs, own_target(policy, rewards.get(name), replay)))
        if name == home:
            out.append(Belief("untrained policy", leaf_log_probs(untrained(policy), whole, part)))
    return out


def methods_on(beliefs: Sequence[Belief], model: Array, surrogate: Array | None) -> list[Method]:
    """Every method of one workload: policies, rankings that were there before, searches."""
    from ptxflow.eval.evaluation import SEARCHES
    from ptxflow.eval.search.plain import Drawn, Ranked
    from ptxflow.eval.search.process import Process
    from ptxflow.gfn.inference import SHARPNESS

    out: list[Method] = []
    for b in beliefs:
        out.append(Drawn(b.name, b.logs, SHARPNESS))
        if not b.name.startswith("untrained"):
            out.append(Process(f"{b.name} + feedback", b.logs, SHARPNESS))
    out += [Ranked("policy top-k", b.logs) for b in beliefs if b.name == "policy"]
    if surrogate is not None:
        out.append(Ranked("surrogate top-k", surrogate))
    return [*out, Ranked("model top-k", model), *SEARCHES]


def costs(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """What training took, as the checkpoints say, and what their rewards were measured on."""
    from ptxflow.env.surrogate import SurrogateError
    from ptxflow.env.surrogate_file import read

    out = {}
    for name, policy in policies.items():
        settings, train, result = (policy.about[k] for k in ("settings", "train", "result"))
        walks = result["steps"] * train["batch"]
        measured = {}
        for path in settings["reward"].get("surrogates", []):
            try:
                fitted = read(ROOT / path)
                measured[fitted.family.name] = [
                    fitted.about[k] for k in ("strategies", "workloads")
                ]
            except SurrogateError as error:
                print(f"evaluate: {error}", file=sys.stderr)
        out[name] = {
            "device": settings["device"], "reward": settings["reward"]["source"],
            "steps": result["steps"], "strategies": walks,
            "minutes": round(walks / result["trajectories_per_s"] / 60, 1),
            "workloads": result["trained"]["workloads"], "measured": measured,
        }  # fmt: skip
    return out


def find_replays(args: argparse.Namespace, files: Sequence[Path]) -> list[Replay]:
    """The sub-spaces that are asked for."""
    from ptxflow.eval.optimum import LEAST
    from ptxflow.eval.search.replay import read_replays

    held = read_replays(files, args.least or LEAST)
    names = {r.name for r in held}
    wanted = (args.workloads or "").split(",")

    def asked(name: str) -> bool:
        return any(name == text if text in names else text in name for text in wanted)

    found = [r for r in held if asked(r.name)]
    if not found:
        raise BadInput(
            f"{len(held)} brute-forced sub-spaces in {len(files)} files, and none is asked for: "
            "see --measurements, --least, --workloads"
        )
    return found


def chosen_methods(text: str | None, names: Sequence[str]) -> list[str]:
    """Of the methods' names those that `--only` asks for: by name, or by how a name begins."""
    asked = [item.strip() for item in (text or "").split(",")]
    return [n for n in names if any(n == a if a in names else n.startswith(a) for a in asked)]


def fitted_scores(
    replays: Sequence[Replay], files: Sequence[Path], jobs: int
) -> list[Array | None]:
    """Scores of surrogates that were fitted to the files without the workload they score."""
    from ptxflow.eval.evaluation_knowledge import surrogate_scores
    from ptxflow.eval.observing import read_observed

    devices = {r.space.device.name: r.space.device for r in replays}
    observed = [o for name in sorted(devices) for o in read_observed(files, devices[name])[0]]
    return surrogate_scores([r.space for r in replays], observed, jobs)


def play_all(args: argparse.Namespace) -> dict[str, Any]:
    """The results of everything: JSON data."""
    from ptxflow.eval.evaluation import evaluate
    from ptxflow.eval.evaluation_kernels import roofline, summary
    from ptxflow.eval.evaluation_knowledge import model_scores
    from ptxflow.eval.evaluation_results import assemble
    from ptxflow.eval.records import read_records

    files = sorted(args.measurements or MEASUREMENTS.glob("*.jsonl.xz"))
    chosen = sorted(args.kernels or MEASUREMENTS.glob("*policy.jsonl.xz"))
    policies = find_policies(args.policy)
    about: dict[str, Any] = {
        "seeds": args.seeds,
        "measurements": {stored(f): digest(f) for f in files},
        "kernels": {stored(f): digest(f) for f in chosen},
        "policies": {n: [stored(p.path), digest(p.path)] for n, p in policies.items()},
        "absent": {},
    }
    records = [r for path in chosen for r in read_records(path)]
    replays, rewards = find_replays(args, files), rewards_of(policies)
    beliefs = {r.name: beliefs_on(r, policies, rewards, about["absent"]) for r in replays}
    fitted: list[Array | None] = [None] * len(replays)
    if chosen_methods(args.only, ["surrogate top-k"]):
        fitted = fitted_scores(replays, files, args.jobs)
    methods = {}
    for r, scores in zip(replays, fitted, strict=True):
        held = methods_on(beliefs[r.name], model_scores(r.space), scores)
        names = chosen_methods(args.only, [m.name for m in held])
        methods[r.name] = [m for m in held if m.name in names]
    runs = evaluate(replays, methods, args.seeds, jobs=args.jobs)
    return {
        "about": about,
        "training": costs(policies),
        "kernels": summary(records),
        "roofline": roofline(records),
        **assemble(replays, runs, beliefs, args.seeds),
    }


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Write everything that follows from the results, and print the tables that matter most."""
    from ptxflow.compiler.files import write_whole
    from ptxflow.eval.evaluation_plots import draw
    from ptxflow.eval.evaluation_report import TRAINING, render
    from ptxflow.eval.evaluation_tables import renew, tables

    found = tables(results)
    plots = draw(results, args.plots or args.out / PLOTS)
    curves = [p for name in TRAINING for p in sorted((ROOT / "plots").glob(f"*/{name}.png"))]
    write_whole(args.out / PAGE, render(results, plots, sorted(curves)))
    if args.into:
        write_whole(args.into, renew(args.into.read_text(encoding="utf-8"), found))
    for name in ("gap-held-out", "gap-trained", "claims"):
        if name in found:
            print(f"{name}\n{found[name]}\n")
    print(f"written: {args.out / RESULTS}, {args.out / PAGE}, {plots[0].parent}/*.png")


def run(args: argparse.Namespace) -> int:
    from ptxflow.compiler.files import write_whole

    if args.results:
        results = json.loads(args.results.read_text(encoding="utf-8"))
    else:
        results = play_all(args)
        write_whole(args.out / RESULTS, json.dumps(results) + "\n")
    report(results, args)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    from ptxflow.env.measurements import MeasurementError
    from ptxflow.eval.arguments import UsageError
    from ptxflow.eval.definition import DefinitionError
    from ptxflow.eval.evaluation_tables import PageError
    from ptxflow.eval.records import RecordError
    from ptxflow.eval.search.play import Foul
    from ptxflow.gfn.checkpoint import CheckpointError

    args = arguments(argv)
    try:
        return run(args)
    except Foul as foul:
        print(f"evaluate: {foul}", file=sys.stderr)
        return 1
    except (
        BadInput, CheckpointError, DefinitionError, MeasurementError, OSError, PageError,
        RecordError, UsageError, json.JSONDecodeError,
    ) as error:  # fmt: skip
        print(f"evaluate: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
