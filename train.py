#!/usr/bin/env python
"""Train the policy that proposes kernel strategies; `python train.py --help` explains."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptxflow.command import BadInput
from ptxflow.gfn.options import ANY, Settings, known_device, parse, require_there, require_writable

if TYPE_CHECKING:
    from ptxflow.compiler.device import Device
    from ptxflow.env.relation import RelationSpace
    from ptxflow.env.reward import CachedReward, Reward
    from ptxflow.env.space import Space
    from ptxflow.env.tasks.shapes import Stream
    from ptxflow.env.tasks.training_set import Member
    from ptxflow.eval.bench.live_reward import Live
    from ptxflow.gfn.checkpoint import Checkpoint
    from ptxflow.gfn.network import PolicyNetwork
    from ptxflow.gfn.run import Run

CHECKPOINT, METRICS, RESULT = "checkpoint.safetensors", "metrics.jsonl", "result.json"
FAR = 0.1  # total variation distance
JUDGED = 48  # trained workloads of a family whose distance is worked out at the end


def gpu_at_hand() -> bool:
    """Whether PyTorch can train on a GPU here; asked so that processes may still be forked."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.is_available()


def placed(compute: str | None) -> str:
    """cpu or cuda; BadInput where there is no GPU that PyTorch can use."""
    if compute == "cuda" and not gpu_at_hand():
        raise BadInput("--compute cuda: PyTorch sees no GPU here, or is a build without CUDA")
    return "cuda" if compute != "cpu" and gpu_at_hand() else "cpu"


def scaled(options: dict[str, Any], factor: float | None) -> dict[str, Any]:
    """A training's options with its learning rates times a factor."""
    from ptxflow.gfn.options import RATES

    return options | {n: factor * options.get(n, r) for n, r in RATES.items() if factor}


def new_settings(args: argparse.Namespace) -> Settings:
    from ptxflow.env.reward_source import describe
    from ptxflow.env.tasks.training_set import ON_GPU, PRESETS, chosen

    name = args.preset or "full"
    preset = PRESETS[name]
    options = {"batch": args.batch, "hidden": args.width, "tau": args.tau, "seed": args.seed}
    given = {k: v for k, v in options.items() if v is not None}
    device = known_device(args.device)
    definitions = chosen(args.definitions, preset)
    wide = args.space == "wide"
    asked = "model" if device == ANY else args.reward
    reward = describe(asked, device, args.surrogate or (), args.measurements or (), wide)
    if wide:  # more walks of a workload: its hints cost more than walks
        given = {"each": 128, "batch": 2048} | given
        given |= {"knowing": "surrogate"} if reward["source"] == "surrogate" else {}
    compute = placed(args.compute)
    files = {d: str(Path(d).resolve()) for d in definitions if d.endswith(".json")}
    return Settings(
        device=device,
        preset=name,
        definitions=tuple(files.get(d, d) for d in definitions),
        steps=args.steps,
        minutes=args.minutes or (None if args.steps else preset.minutes),
        measurements=preset.measurements,
        threads=args.threads or 1,
        compute=compute,
        train=scaled({**preset.train, **(ON_GPU if compute == "cuda" else {}), **given}, args.rate),
        reward=reward,
        live=args.measure or 0,
        init=str(args.init) if args.init else None,
        without=known_device(args.without) if args.without else None,
        space=args.space or "listed",
    )


def prepare(args: argparse.Namespace) -> "tuple[Path, Settings, Checkpoint | None]":
    """Where the run lives, what it is, and the state it goes on from."""
    from ptxflow.env.tasks.spaces import cores

    if (args.threads or 1) > cores():
        raise BadInput(f"--threads {args.threads}: this process may use {cores()} cores")
    if args.resume:
        folder = args.resume.parent if args.resume.is_file() else args.resume
        path = args.resume if args.resume.is_file() else folder / CHECKPOINT
        require_there(path)
        from ptxflow.gfn.checkpoint import read

        state = read(path)
        if "settings" not in state.config or "generator" not in state.tensors:
            raise BadInput(f"{args.resume}: a policy alone, not the state of a run")
        try:
            settings = Settings.from_json(state.config["settings"])
        except TypeError:
            raise BadInput(f"{args.resume}: a run of another version: start it anew") from None
        if args.steps or args.minutes:
            settings = replace(settings, steps=args.steps, minutes=args.minutes)
        placed(settings.compute)
        return folder, replace(settings, threads=args.threads or settings.threads), state
    name = "demo" if args.preset == "demo" else known_device(args.device)
    folder = args.out or Path("runs") / name
    if (folder / CHECKPOINT).exists() and not args.overwrite and args.preset != "demo":
        raise BadInput(f"{folder} holds a run: --resume {folder}, --overwrite, or another --out")
    if args.init:
        require_there(args.init)
    return folder, new_settings(args), None


def places_of(settings: Settings) -> "list[Device]":
    """The device of a run, or the named ones where it is for any."""
    from ptxflow.compiler.device import DEVICES, device

    if settings.device != ANY:
        return [device(settings.device)]
    return [d for d in DEVICES.values() if d.name != settings.without]


def streams(settings: Settings, members: "Sequence[Member]") -> "dict[str, Stream]":
    """By family where the workloads of a run with --preset shapes are drawn from."""
    from ptxflow.env.tasks.shapes import Stream
    from ptxflow.env.tasks.training_set import PRESETS

    if not PRESETS[settings.preset].shapes:
        return {}
    device = None if settings.device == ANY else places_of(settings)[0]
    without = (settings.without,) if settings.without else ()
    families = dict.fromkeys(m.family.name for m in members)
    never = frozenset(m.problem for m in members if m.kind != "trained")
    options = device, without, never, settings.space == "wide"
    return {name: Stream(name, *options) for name in families}


def source(settings: Settings) -> "tuple[Reward, Settings]":
    """The reward, and the settings with the digests of the files it was read from."""
    from ptxflow.env.reward_source import build

    reward, description = build(settings.reward, places_of(settings)[0].name)
    return reward, replace(settings, reward=description)


def begun_with(settings: Settings) -> dict[str, Any]:
    """What the policy that a run begins with was trained on, with what results by family, and how
    long each of the runs was that made it."""
    from ptxflow.eval.study.joint_policy import runs_of
    from ptxflow.gfn.inference import load_policy

    about: dict[str, Any] = {}
    if settings.init:
        policy = load_policy(Path(settings.init))
        about = policy.about
        if other := policy.trained_elsewhere(settings.device):
            print(other, flush=True)
    return {
        "device": about.get("settings", {}).get("device"),
        "definitions": about.get("settings", {}).get("definitions", []),
        "families": about.get("result", {}).get("families", {}),
        "before": runs_of(about),
    }


@dataclass(frozen=True)
class Workloads:
    """The workloads of a run and their spaces, one for one."""

    members: "list[Member]"
    spaces: "list[Space | RelationSpace]"

    def of(self, *kinds: str) -> "list[Space | RelationSpace]":
        """The spaces of these kinds."""
        return [s for m, s in zip(self.members, self.spaces, strict=True) if m.kind in kinds]


def judged(members: "Sequence[Member]") -> set[int]:
    """Places of the workloads whose strategies are listed, so that distances are exact: those never
    trained, and JUDGED of each family's others, evenly."""
    out = {i for i, m in enumerate(members) if m.kind != "trained"}
    for family in {m.family.name for m in members}:
        own = [i for i, m in enumerate(members) if m.family.name == family and i not in out]
        out.update(own[i * len(own) // min(JUDGED, len(own))] for i in range(min(JUDGED, len(own))))
    return out


def workloads(settings: Settings, reward: "CachedReward") -> Workloads:
    """What is trained, held out, and of unseen shapes; BadInput where something is unknown."""
    from ptxflow.env.tasks.spaces import cores, spaces_of
    from ptxflow.env.tasks.training_set import PRESETS, members

    preset = PRESETS[settings.preset]
    try:
        target = places_of(settings)[-1]
        chosen = members(settings.definitions, preset, settings.space == "wide")
        if preset.shapes:
            return drawn_workloads(settings, chosen, reward)
        jobs = cores() if settings.compute == "cuda" else settings.threads
        made = spaces_of(chosen, target, reward, jobs, judged(chosen))
        found = list(zip(chosen, made, strict=True))
        kept = [(m, s) for m, s in found if s is not None]
        without = sorted({m.label for m, s in found if s is None})
        if without:
            print(f"left out, with no strategy on {target.name}: {', '.join(without)}")
        if not any(m.kind == "trained" for m, _ in kept):
            raise BadInput(f"no workload has a strategy on {target.name}")
        return Workloads([m for m, _ in kept], [s for _, s in kept])
    except KeyError as error:
        raise BadInput(error.args[0]) from None
    except ValueError as error:
        raise BadInput(str(error)) from None


def drawn_workloads(
    settings: Settings, members: "Sequence[Member]", reward: "CachedReward"
) -> Workloads:
    """Of a run with --preset shapes: those drawn first, and its held-out ones, each on one of the
    run's devices in turn."""
    import numpy as np

    from ptxflow.env.tasks.definition import load
    from ptxflow.env.tasks.shapes import listed_part
    from ptxflow.env.tasks.spaces import spaces_of
    from ptxflow.env.tasks.training_set import PRESETS, Member

    rng, preset = np.random.default_rng(settings.train.get("seed", 0)), PRESETS[settings.preset]
    found: list[tuple[Member, Space | RelationSpace | None]] = []
    for stream in streams(settings, members).values():
        for space in stream.draw(preset.shapes, rng):
            problem, label = space.problem, space.problem.definition
            about = Member(label, load(label), space.family, dict(problem.axes), problem, "trained")
            found.append((about, space))
    devices, held = places_of(settings), [m for m in members if m.kind != "trained"]
    listed = () if settings.space == "wide" else None
    for i, device in enumerate(devices):
        own = held[i :: len(devices)]
        found += zip(own, map(listed_part, spaces_of(own, device, reward, 1, listed)), strict=True)
    kept = [(m, s) for m, s in found if s is not None]
    return Workloads([m for m, _ in kept], [s for _, s in kept])


def live_measuring(folder: Path, settings: Settings, tasks: Workloads, reward: "Reward") -> "Live":
    """The measuring of a run with --measure; BadInput where this machine cannot do it."""
    from ptxflow.compiler.backend.runtime import RuntimeUnavailable
    from ptxflow.compiler.device import device
    from ptxflow.env.observations import ReplayReward
    from ptxflow.env.reward import CachedReward, ModelReward
    from ptxflow.env.reward_source import ROOT
    from ptxflow.eval.bench.live_reward import MEASUREMENTS, Live, count_gpus

    if any(name.endswith(".json") for name in settings.definitions):
        raise BadInput("--measure records by name: give a definition of env/tasks/definitions")
    try:
        gpus = count_gpus(device(settings.device))
    except RuntimeUnavailable as error:
        raise BadInput(f"--measure: {error}") from None
    definitions = [m.definition for m in tasks.members if m.kind == "trained"]
    fallback = (reward.fallback or ModelReward()) if isinstance(reward, ReplayReward) else reward
    files = [ROOT / name for name in settings.reward.get("measurements", ())]
    path = folder / MEASUREMENTS
    return Live(definitions, tasks.of("trained"), path, CachedReward(fallback), files, gpus)


def measure_round(run: "Run", live: "Live") -> None:
    """Measure what the policy samples for some workloads, and train on what came of it."""
    count = run.settings["live"]
    chosen = live.next(run.trainer.curriculum.active)
    reward = live.measure({w: run.trainer.propose(w, count, live.known(w)) for w in chosen})
    run.trainer.reward_anew(reward, chosen)


def torch_device(settings: Settings) -> Any:
    """Where networks and tables lie; sets up PyTorch for it."""
    import torch

    torch.set_num_threads(settings.threads)
    if settings.compute == "cpu":
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high")  # the factors of products may be rounded to TF32
    return torch.device("cuda", torch.cuda.current_device())


def initial(settings: Settings, state: "Checkpoint | None") -> "PolicyNetwork | None":
    """The network that a run begins with, if it is a trained one; BadInput where it is no good.

    Of a run that goes on its state says everything, and which families it has."""
    from ptxflow.gfn.inference import load_policy
    from ptxflow.gfn.network import PolicyNetwork

    if state:
        return PolicyNetwork(state.network)
    return load_policy(settings.init).network if settings.init else None


def make_run(
    folder: Path, settings: Settings, tasks: Workloads, asked: "Reward", state: "Checkpoint | None"
) -> "Run":
    """The run, where its state says if it goes on; BadInput where that is of another run."""
    from ptxflow.env.reward import TAU
    from ptxflow.gfn.options import TrainConfig
    from ptxflow.gfn.run import Run
    from ptxflow.gfn.training import Trainer

    config = TrainConfig(**{"tau": TAU, **settings.train})
    trainer = Trainer(
        tasks.of("trained"), config, settings.steps or 10**6, asked, tasks.of("held_out", "unseen"),
        torch_device(settings), initial(settings, state), streams(settings, tasks.members),
    )  # fmt: skip
    if trainer.kept:
        kept = ", ".join(trainer.kept)
        if settings.begun.get("device") not in (None, settings.device):
            raise BadInput(f"{settings.init} is for {settings.begun['device']}, and its {kept} "
                           f"would stay so: train them too, or give --device")  # fmt: skip
        print(f"kept as they are: {kept}", flush=True)
    length = settings.steps, settings.minutes, settings.measurements
    run = Run(folder, trainer, tasks.of("held_out"), *length, settings=asdict(settings))
    if state:
        run.take_over(state)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).unlink(missing_ok=True)
    return run


def result_rows(run: "Run", tasks: Workloads) -> list[dict[str, Any]]:
    """Exact distance of every workload that is judged."""
    from tqdm import tqdm

    from ptxflow.env.space import Space

    pairs = [
        (member, space)
        for member, space in zip(tasks.members, tasks.spaces, strict=True)
        if isinstance(space, Space)
    ]
    return [
        {
            "family": member.family.name,
            "definition": member.label,
            "axes": dict(member.axes),
            "kind": member.kind,
            "distance": next(run.trainer.held_out_distances([space])),
            "leaves": len(space),
        }
        for member, space in tqdm(pairs, desc="distances", unit="workload", disable=None)
    ]


def known_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run with the definitions of the policy that it began with, too."""
    begun = settings["begun"].get("definitions", [])
    return {**settings, "definitions": list(dict.fromkeys([*begun, *settings["definitions"]]))}


def still_far(run: "Run", distance: float) -> str | None:
    """A line for a run that ends far from its target, with what would bring it nearer."""
    if distance <= FAR:
        return None
    steps, minutes = run.trainer.step, run.elapsed / 60
    longer = f"--steps {4 * steps}" if run.minutes is None else f"--minutes {4 * minutes:.1f}"
    return (f"far from the target: {distance:.2f} in the mean, where {FAR} is "
            f"near, after {steps} steps; it needs more: python train.py --resume {run.folder} "
            f"{longer}")  # fmt: skip


def finish(run: "Run", tasks: Workloads, export: Path | None) -> None:
    """Measure every workload, print the tables, write the result, the plots and the export."""
    from ptxflow.compiler.files import naming, write_whole
    from ptxflow.env.reward_source import title
    from ptxflow.eval.study.training_plots import (
        distance_table,
        summary_of,
        summary_table,
        training_plots,
        with_kept,
    )
    from ptxflow.gfn.checkpoint import write

    rows = result_rows(run, tasks)
    summary: dict[str, Any] = {"trajectories_per_s": round(run.rate, 1), "steps": run.trainer.step}
    summary |= summary_of(rows)
    reward, config = run.settings["reward"], run.trainer.config
    result = {"device": run.settings["device"], "tau": config.tau, "reward": reward}
    result |= {"elapsed_s": round(run.elapsed, 1), **summary, "workloads": rows}
    write_whole(run.folder / RESULT, json.dumps(result, indent=1) + "\n")
    families: dict[str, Any] = summary["families"]
    means = [
        {family: kinds[kind]["mean"] for family, kinds in families.items() if kind in kinds}
        for kind in ("trained", "held_out")
    ]
    run.log_distances(run.trainer.curriculum.stage, *means)
    run.log("result", **summary)
    metrics = (run.folder / METRICS).read_text(encoding="utf-8").splitlines()
    with naming(run.folder / "plots"):
        training_plots([[json.loads(line) for line in metrics]], run.folder / "plots")
    if export:
        export.parent.mkdir(parents=True, exist_ok=True)
        about = {"settings": known_of(run.settings), "train": asdict(config)}
        before = run.settings["begun"].get("families", {})
        kept = {name: before[name] for name in run.trainer.kept if name in before}
        about["result"] = with_kept(summary, kept)
        about["before"] = run.settings["begun"].get("before", [])
        write(export, run.trainer.policy_checkpoint(about))
    print(f"\nexact total variation distance to exp(TFLOPS/T)/Z on {run.settings['device']}, tau "
          f"{config.tau}, TFLOPS by {title(reward)} (* never trained)\n{distance_table(rows)}\n\n"
          f"{summary_table(summary)}")  # fmt: skip
    speed = f", {run.rate:.0f} trajectories/s" if run.session_steps else ""
    print(f"{run.trainer.step} steps, {run.elapsed:.0f} s{speed}; "
          f"wrote {run.folder}{f' and {export}' if export else ''}")  # fmt: skip
    near = summary["trained"] if "trained" in summary else summary["held_out"]
    if far := still_far(run, near["mean"]):
        print(far)


def unwritten(error: OSError) -> str:
    """What could not be written, and why."""
    return f"cannot write {error.filename}: {error.strerror}" if error.filename else str(error)


def carry_out(run: "Run", tasks: Workloads, live: "Live | None", export: Path | None) -> int:
    """Train, and write what came of it; the exit code."""
    from ptxflow.gfn.run import train

    if stopped := train(run):
        print(f"train.py: stopped at step {run.trainer.step}; go on with: python train.py "
              f"--resume {run.folder}", file=sys.stderr)  # fmt: skip
        return 128 + stopped
    if live:
        run.settings["reward"] = {**run.settings["reward"], **live.describe()}
    finish(run, tasks, export)
    return 0


def start(args: argparse.Namespace) -> int:
    if args.compute != "cpu":  # before numpy: a core each for the processes that prepare
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ptxflow.env.reward import CachedReward

    folder, settings, state = prepare(args)
    for path in (folder / CHECKPOINT, *([args.export] if args.export else [])):
        require_writable(path.parent)
    reward, settings = source(settings)
    if not state:
        settings = replace(settings, begun=begun_with(settings))
    kept = CachedReward(reward)
    tasks = workloads(settings, kept)
    trained = tasks.of("trained")
    live = live_measuring(folder, settings, tasks, reward) if settings.live else None
    if live and not state:
        live.path.unlink(missing_ok=True)
    asked: Reward = live.reward() if live else kept
    print(f"{len(trained)} workloads trained, {len(tasks.of('held_out'))} held out, on "
          f"{settings.device}; {sum(map(len, trained))} strategies; rewarded by "
          f"{settings.reward['source']}; by {settings.compute}, {settings.threads} threads",
          flush=True)  # fmt: skip
    run = make_run(folder, settings, tasks, asked, state)
    if live:
        run.between = partial(measure_round, run, live)
    try:
        return carry_out(run, tasks, live, args.export)
    except OSError as error:
        raise BadInput(f"{unwritten(error)}; the run goes on from its last checkpoint with: "
                       f"python train.py --resume {folder}") from None  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.definition:
            from ptxflow.eval.sample.tuning import tune

            return tune(args)
        return start(args)
    except KeyboardInterrupt:
        print("train.py: stopped; a run with a checkpoint goes on by --resume", file=sys.stderr)
        return 130
    except (BadInput, OSError) as error:
        text = unwritten(error) if isinstance(error, OSError) else error
        print(f"train.py: {text}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
