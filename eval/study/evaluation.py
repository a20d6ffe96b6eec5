"""An evaluation: policies and searches played on brute-forced spaces, and the report.

`ptxflow evaluate --help` explains.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptxflow.command import BadInput
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.files import write_whole
from ptxflow.env.measurements import MeasurementError, load_measurements
from ptxflow.env.observations import read_observed
from ptxflow.env.reward import ModelReward, Reward, log_reward
from ptxflow.env.reward_source import build, stored
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.surrogate import SurrogateError
from ptxflow.env.surrogate_file import read
from ptxflow.eval.bench.campaign import FAILURES
from ptxflow.eval.bench.markdown import picture, renewed
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.study.ablation import ablations
from ptxflow.eval.study.arguments import PAGE, PARTS, PLOTS, RESULTS
from ptxflow.eval.study.draws import sharpness
from ptxflow.eval.study.kernels import roofline, summary
from ptxflow.eval.study.knowledge import look_up, surrogate_scores, trained_problems
from ptxflow.eval.study.plots import captions, draw
from ptxflow.eval.study.results import Distribution, assemble
from ptxflow.eval.study.runs import SEARCHES, evaluate
from ptxflow.eval.study.search.plain import Drawn, Ranked
from ptxflow.eval.study.search.play import Costly, Foul, Method
from ptxflow.eval.study.search.process import Process
from ptxflow.eval.study.search.replay import LEAST, Replay, outdated, read_replays
from ptxflow.eval.study.tables import NOT_PLAYED, tables
from ptxflow.gfn.checkpoint import CheckpointError
from ptxflow.gfn.inference import SHARPNESS, Policy, load_policy, part_log_probs, untrained

if TYPE_CHECKING:
    from ptxflow.eval.study.tuning import Learner

Array = NDArray[np.float64]
Beside = Callable[[Replay, Array], Sequence[Method]]
Blind = Callable[[Replay], Method]
ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS, CHECKPOINTS = ROOT / "eval" / "measurements", ROOT / "checkpoints"


def digest(path: Path) -> str:
    """Of a file's bytes; MeasurementError where it cannot be read."""
    if not path.is_file():
        raise MeasurementError(f"{path}: no such file")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def find_policies(given: Sequence[str]) -> dict[str, Policy]:
    """The policies in checkpoints/ by their device, then those given as NAME=FILE.

    CheckpointError where a file is no good.
    """
    found = {}
    for path in sorted(CHECKPOINTS.glob("*.safetensors")):
        if path.stem in DEVICES:
            found[path.stem] = load_policy(path)
    for text in given:
        name, sign, path_text = text.partition("=")
        if not sign or not name or not path_text:
            raise BadInput(f"--policy {text!r} must have the form NAME=FILE")
        if name in found:
            raise BadInput(f"--policy {name}: there is one of that name")
        found[name] = load_policy(path_text)
    return found


def rewards_of(policies: Mapping[str, Policy]) -> dict[str, Reward]:
    """The rewards that policies were trained on, where their files are still the same."""
    out = {}
    for name, policy in policies.items():
        settings = policy.about["settings"]
        try:
            out[name], _ = build(settings["reward"], settings["device"])
        except BadInput as error:
            print(f"evaluate: the reward of policy {name}: {error}", file=sys.stderr)
    return out


def what_reward_says(
    policy: Policy, reward: Reward | None, space: Space
) -> tuple[Array | None, Array | None]:
    """[n] log R of the policy's reward, and scores [n] by it on the nearest trained workload; None
    where the reward is not at hand or of another device."""
    settings = policy.about["settings"]
    if reward is None or settings["device"] != space.device.name:
        return None, None
    tflops = reward.tflops(space, space.codes)
    logs = log_reward(tflops, space.problem, space.device, policy.about["train"]["tau"])
    trained = trained_problems(tuple(settings["definitions"]), space.family.name)
    return logs, look_up(space, reward, trained)


def distributions_on(
    part: Space,
    policies: Mapping[str, Policy],
    rewards: Mapping[str, Reward],
    absent: dict[str, str],
) -> list[Distribution]:
    """What each policy says of a space or a part, that of its device first, and what an untrained
    one does; `absent` gets those that know no such space."""
    home, out = part.device.name, []
    whole = enumerate_space(part.family, part.problem, part.device)
    for name in sorted(policies, key=lambda name: name != home):
        policy = policies[name]
        shown = "policy" if name == home else f"policy {name}"
        try:
            logs = part_log_probs(policy, whole, part)
        except CheckpointError as error:
            absent[f"{shown} on {part.family.name}"] = str(error).replace(f"{ROOT}/", "")
            continue
        known = what_reward_says(policy, rewards.get(name), part)
        out.append(Distribution(shown, logs, *known))
        if name == home:
            out.append(
                Distribution("untrained policy", part_log_probs(untrained(policy), whole, part))
            )
    return out


def methods_on(
    distributions: Sequence[Distribution], space: Space, surrogate: Array | None
) -> list[Method]:
    """Every method of one workload: policies, rankings that were there before, searches."""
    out: list[Method] = []
    for b in distributions:
        out.append(Drawn(b.name, b.logs, SHARPNESS))
        if not b.name.startswith("untrained"):
            out.append(Process(f"{b.name} + feedback", b.logs, SHARPNESS))
    for b in [b for b in distributions if b.name == "policy"]:
        out.append(Ranked("policy top-k", b.logs))
        if b.own is not None:
            out.append(Ranked("own reward top-k", b.own))
        if b.nearest is not None:
            out.append(Ranked("nearest workload", b.nearest))
    if surrogate is not None:
        out.append(Ranked("surrogate top-k", surrogate))
    model = ModelReward().tflops(space, space.codes)
    return [*out, Ranked("model top-k", model), *SEARCHES]


def costs(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """What training took, as the checkpoints say, and what their rewards were measured on."""
    out = {}
    for name, policy in policies.items():
        settings, train, result = (policy.about[k] for k in ("settings", "train", "result"))
        runs = [*policy.about.get("before", []), {**result, "batch": train["batch"]}]
        walks = [run["steps"] * run["batch"] for run in runs]
        seconds = sum(n / run["trajectories_per_s"] for n, run in zip(walks, runs, strict=True))
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
            "steps": sum(run["steps"] for run in runs), "strategies": sum(walks),
            "minutes": round(seconds / 60, 1),
            "workloads": result["trained"]["workloads"], "measured": measured,
        }  # fmt: skip
    return out


def find_replays(args: argparse.Namespace, files: Sequence[Path]) -> list[Replay]:
    """The sub-spaces that are asked for."""
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
    """Of the methods' names those that `--methods` asks for: by name, else by how one of its words
    begins, as `random` does for `uniform random`; case does not matter."""
    known = {n.lower() for n in names}
    asked = [item.strip().lower() for item in (text or "").split(",")]

    def meant(name: str) -> bool:
        return any(name == a if a in known else f" {name}".find(f" {a}") >= 0 for a in asked)

    return [n for n in names if meant(n.lower())]


def fitted_scores(
    spaces: Sequence[Space], files: Sequence[Path], args: argparse.Namespace
) -> list[Array | None]:
    """Scores of surrogates that were fitted to the files without the workload they score; None
    where none is asked for."""
    if not chosen_methods(args.methods, ["surrogate top-k"]):
        return [None] * len(spaces)
    devices = {s.device.name: s.device for s in spaces}
    observed = [o for name in sorted(devices) for o in read_observed(files, devices[name])[0]]
    return surrogate_scores(spaces, observed, args.jobs)


def players(held: Sequence[Method], asked: str | None) -> list[Method]:
    """The methods of one workload that are asked for."""
    names = chosen_methods(asked, [m.name for m in held])
    return [m for m in held if m.name in names]


def sources(
    args: argparse.Namespace, files: Sequence[Path], kernels: Sequence[Path],
    policies: Mapping[str, Policy],
) -> dict[str, Any]:  # fmt: skip
    """What the results follow from."""
    return {
        "seeds": args.seeds,
        "budget": args.budget,
        "measurements": {stored(f): digest(f) for f in files},
        "kernels": {stored(f): digest(f) for f in kernels},
        "policies": {n: [stored(p.path), digest(p.path)] for n, p in policies.items()},
        "absent": {},
    }


def named(
    beside: Beside | None, replay: Replay, beliefs: Sequence[Distribution], asked: str | None
) -> list[Method]:
    """Of what `beside` makes of the device's policy, what `--methods` names: not played else."""
    if not asked or not beside:
        return []
    held = [m for b in beliefs if b.name == "policy" for m in beside(replay, b.logs)]
    return players(held, asked)


def play_all(
    args: argparse.Namespace, beside: Beside | None = None, model: Blind | None = None
) -> dict[str, Any]:
    """The results of everything that can be replayed: JSON data."""
    parts = chosen_parts(args.parts)
    files = sorted(args.measurements or MEASUREMENTS.glob("h200-*.jsonl.xz"))
    chosen = sorted(args.kernels or MEASUREMENTS.glob("h200-*policy.jsonl.xz"))
    policies = find_policies(args.policy)
    about = sources(args, files, chosen, policies) | {"outdated": outdated(files)}
    records = [r for path in chosen for r in read_records(path)]
    replays, rewards = find_replays(args, files), rewards_of(policies)
    distributions = {
        r.name: distributions_on(r.space, policies, rewards, about["absent"]) for r in replays
    }
    fitted = fitted_scores([r.space for r in replays], files, args)
    methods = {
        r.name: [
            *players(methods_on(distributions[r.name], r.space, scores), args.methods),
            *named(beside, r, distributions[r.name], args.methods),
            *([model(r)] if model else ()),
        ]
        for r, scores in zip(replays, fitted, strict=True)
    }
    runs = evaluate(replays, methods, args.seeds, args.budget, args.jobs)
    own = {r.name: b.logs for r in replays for b in distributions[r.name] if b.name == "policy"}
    more: dict[str, Any] = {"sharpness": sharpness(replays, own, args.seeds)}
    if costly := {(m.name, r.name): (m, r)
                  for r in replays for m in methods[r.name] if isinstance(m, Costly)}:  # fmt: skip
        more["costs"] = [
            {"method": method.name, "workload": replay.name, **method.cost(replay, run.asked[0])}
            for run in runs if (run.method, run.workload) in costly
            for method, replay in [costly[run.method, run.workload]]
        ]  # fmt: skip
    if "tuning" in parts:
        from ptxflow.eval.study.tuning import tunings  # which takes torchgfn

        more["tuning"] = tunings(learners(replays, policies), replays, runs, args.seeds, args.jobs)
    if "ablation" in parts:
        more["ablation"] = ablations(replays, runs, load_measurements(files), args.jobs)
    return {
        "about": about,
        "training": costs(policies),
        "kernels": summary(records),
        "roofline": roofline(records),
        **more,
        **assemble(replays, runs, distributions, args.seeds),
    }


def chosen_parts(text: str | None) -> list[str]:
    """What is done besides play; BadInput for what is unknown."""
    if text == "none":
        return []
    asked = [item.strip() for item in text.split(",")] if text else list(PARTS)
    if unknown := set(asked) - set(PARTS):
        raise BadInput(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return asked


def learners(replays: Sequence[Replay], policies: Mapping[str, Policy]) -> "list[Learner]":
    """Policies that are tuned: on one held-out workload of each family, and on definitions and on
    families that they never saw."""
    from ptxflow.eval.study.tuning import Learner, TunedSearch, unseen

    never = unseen(replays, {n: p.about["settings"] for n, p in policies.items()})
    held, home = [r for r in replays if r.kind != "trained"], replays[0].space.device.name
    first = {r.space.family.name: r for r in reversed(held)}  # one of each family
    asked = []
    for name in sorted(policies, key=lambda name: name != home):
        policy = policies[name]
        known = {f.name for f in policy.network.config.families}
        foreign = [first[f].name for f in sorted(first.keys() - known)]
        if not foreign:
            asked.append((name, "held out", [first[f].name for f in sorted(first)]))
        elif policy.about["settings"]["device"] == home:
            asked.append((name, "families never seen", foreign))
        asked.append((name, "definitions never seen", never.get(name, [])))
    out = []
    for name, group, workloads in asked:
        shown = "policy" if name == home else f"policy {name}"

        def method(
            replay: Replay, policy: Policy = policies[name], shown: str = shown
        ) -> TunedSearch:
            return TunedSearch(f"{shown} + tuning", policy, replay.yardstick * 1e-6)

        if workloads:
            out.append(Learner(shown, group, tuple(workloads), method))
    return out


def report(results: dict[str, Any], args: argparse.Namespace) -> None:
    """Write everything that follows from the results, and print the tables that matter most."""
    found = tables(results)
    plots, shown = draw(results, args.plots or args.out / PLOTS), captions()
    parts = [f"## {name}\n\n{text}" for name, text in found.items() if text != NOT_PLAYED]
    parts += [picture(shown[p.stem], relpath(p, args.out)) for p in plots]
    write_whole(args.out / PAGE, "\n\n".join(["# Policies beside searches", *parts]) + "\n")
    if args.into:
        write_whole(args.into, renewed(args.into.read_text(encoding="utf-8"), found))
    for name in ("gap-held-out", "gap-trained", "claims"):
        if name in found:
            print(f"{name}\n{found[name]}\n")
    print(f"written: {args.out / RESULTS}, {args.out / PAGE}, {plots[0].parent}/*.png")


def run(args: argparse.Namespace, beside: Beside | None, model: Blind | None) -> int:
    if args.results:
        results = json.loads(args.results.read_text(encoding="utf-8"))
    else:
        torch.set_num_threads(1)  # products of a policy are so small that threads cost more
        results = play_all(args, beside, model)
        write_whole(args.out / RESULTS, json.dumps(results) + "\n")
    report(results, args)
    return 0


def command(
    args: argparse.Namespace, beside: Beside | None = None, model: Blind | None = None
) -> int:
    """Run it; its exit code. `beside` makes further methods of a sub-space and a policy's
    log-probabilities [n] there, for `--methods` to name; `model` one that is played."""
    try:
        return run(args, beside, model)
    except Foul as foul:
        print(f"evaluate: {foul}", file=sys.stderr)
        return 1
    except (*FAILURES, BadInput, OSError, json.JSONDecodeError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluate: stopped", file=sys.stderr)
        return 130
