#!/usr/bin/env python
"""Train the policy that proposes kernel strategies; `python train.py --help` explains."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ptxflow.env.reward import Reward
    from ptxflow.env.space import Space
    from ptxflow.eval.live import Live
    from ptxflow.gfn.checkpoint import Checkpoint
    from ptxflow.gfn.run import Run

GEMMS = (
    "gemm_n128_k2048", "gemm_n256_k7168", "gemm_n2048_k4096", "gemm_n4096_k4096",
    "gemm_n4096_k14336", "gemm_n5120_k2048", "gemm_n6144_k4096", "gemm_n28672_k4096",
)  # fmt: skip
CHECKPOINT, METRICS, RESULT = "checkpoint.safetensors", "metrics.jsonl", "result.json"
MEASUREMENTS = "measurements.jsonl"

HELP = """\
Train one policy on GEMM workloads with conditional trajectory balance (a GFlowNet).

A workload is a definition with M bound, on a device. The policy builds a strategy decision by
decision under the device's masks and learns to sample it with probability exp(TFLOPS / T) / Z,
where the reward says the TFLOP/s and T = tau x what the device can attain. The reward is the
analytic model, a surrogate (the model corrected by measurements), or replay (what was measured, and
the surrogate or the model elsewhere). Training starts on small, regular workloads and adds larger,
irregular ones as the measured distance to the target falls. Held-out values of M are never trained;
their distance is measured too.
"""
EPILOG = """\
examples:
  python train.py                                 12 minutes for B200, into runs/b200
  python train.py --device h200 --minutes 5 --export checkpoints/gemm-h200.safetensors
  python train.py --device h200 --reward replay --measurements more.jsonl
  python train.py --definitions gemm_n4096_k4096,gemm_n2048_k4096 --steps 500 --out runs/two
  python train.py --preset demo                   about a minute, three definitions
  python train.py --resume runs/b200              go on where Ctrl-C stopped it, exactly

writes into --out:
  checkpoint.safetensors  the whole state (policy, optimiser, random numbers, replay, curriculum)
  metrics.jsonl           loss, reward, entropy, masks, distances; one JSON object a line
  measurements.jsonl      with --measure: what was measured on the way
  result.json             the exact distance of every workload at the end
  plots/*.png             loss, distance, reward, entropy, masked
exit codes: 0 done, 2 bad input (one line says what), 130 stopped by Ctrl-C and resumable
"""


class BadInput(ValueError):
    """What the user asked for cannot be done; the message is one line."""


@dataclass(frozen=True)
class Preset:
    """Defaults of a run; `train` are fields of `TrainConfig`."""

    definitions: tuple[str, ...]
    trained: tuple[int, ...]  # values of M
    held_out: tuple[int, ...]
    unseen: tuple[tuple[str, dict[str, int]], ...]  # other shapes, measured for information
    minutes: float
    measurements: int  # of exact distances during a run
    train: dict[str, Any] = field(default_factory=dict)


PRESETS = {
    "full": Preset(
        GEMMS,
        trained=(1, 8, 16, 32, 64, 128, 192, 256, 512, 768, 1024, 1536, 2048, 4096, 8192),
        held_out=(17, 112, 1000, 3072),
        unseen=(("gemm_n4096_k4096", {"N": 3072}), ("gemm_n5120_k2048", {"K": 3072})),
        minutes=12.0,
        measurements=24,
    ),
    "demo": Preset(
        ("gemm_n2048_k4096", "gemm_n4096_k4096", "gemm_n6144_k4096"),
        trained=(64, 1024),
        held_out=(1000,),
        unseen=(),
        minutes=1.2,
        measurements=8,
        train={"stages": 2, "batch": 256},
    ),
}


@dataclass(frozen=True)
class Settings:
    """What a run is about; kept in its checkpoints, and all that resuming it needs."""

    device: str
    definitions: tuple[str, ...]
    trained: tuple[int, ...]
    held_out: tuple[int, ...]
    unseen: tuple[tuple[str, dict[str, int]], ...]
    steps: int | None
    minutes: float | None
    measurements: int
    threads: int
    train: dict[str, Any]
    reward: dict[str, Any] = field(default_factory=lambda: {"source": "model"})
    live: int = 0  # samples of a workload that are measured at a time on the way

    @staticmethod
    def from_json(data: dict[str, Any]) -> Settings:
        tuples = {k: tuple(data[k]) for k in ("definitions", "trained", "held_out", "unseen")}
        return Settings(**{**data, **tuples})


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        print(f"train.py: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def positive(kind: type) -> Any:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
        return value

    return convert


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="train.py",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", help="b200 (default), h200 or h100: whose limits and rates")
    add("--definitions", help="names or JSON files, comma-separated (default: the preset's)")
    add("--preset", choices=PRESETS, help="full (default): all 8 GEMMs; demo: a short run")
    add("--steps", type=positive(int), help="train this many steps; repeatable bit for bit")
    add("--minutes", type=positive(float), help="or this long (default: 12; demo 1.2)")
    add("--batch", type=positive(int), help="strategies a step (default: 1024; demo 256)")
    add("--tau", type=positive(float), help="temperature over the attainable TFLOP/s")
    add(
        "--reward",
        choices=("model", "surrogate", "replay"),
        help="default: surrogate where checkpoints/ has one for the device, else model",
    )
    add("--surrogate", type=Path, metavar="FILE", help="another surrogate than that")
    add("--measurements", type=Path, nargs="+", metavar="FILE", help="what --reward replay replays")
    add("--measure", type=positive(int), metavar="N",
        help="now and then measure N of the policy's samples on this GPU, for 8 workloads in turn, "
        "and reward them as measured; needs the GPU")  # fmt: skip
    add("--seed", type=int, help="of weights, sampling and replay (default: 0)")
    add(
        "--threads",
        type=positive(int),
        help="CPU threads (default: 1; more pay if cores idle)",
    )
    add("--out", type=Path, help="folder of the run (default: runs/DEVICE, demo: runs/demo)")
    add("--overwrite", action="store_true", help="replace the run in --out (demo always does)")
    add("--export", type=Path, metavar="FILE", help="also write the policy alone, for sample.py")
    add("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    args = parser.parse_args(argv)
    if args.steps and args.minutes:
        parser.error("give --steps or --minutes, not both")
    if args.resume:
        fixed = (
            "device", "definitions", "preset", "batch", "tau", "seed", "out",
            "reward", "surrogate", "measurements", "measure",
        )  # fmt: skip
        if given := [f"--{n}" for n in fixed if getattr(args, n) is not None]:
            parser.error(f"a resumed run keeps its own settings: drop {', '.join(given)}")
    return args


def new_settings(args: argparse.Namespace) -> Settings:
    from ptxflow.eval.reward_source import RewardError, describe

    preset = PRESETS[args.preset or "full"]
    definitions = preset.definitions
    if args.definitions and args.definitions != "all":
        named = [d.strip() for d in args.definitions.split(",")]
        files = {d: str(Path(d).resolve()) for d in named if d.endswith(".json")}
        definitions = tuple(dict.fromkeys(files.get(d, d) for d in named))
    options = {"batch": args.batch, "tau": args.tau, "seed": args.seed}
    device = (args.device or "b200").lower()
    try:
        reward = describe(args.reward, device, args.surrogate, args.measurements or ())
    except RewardError as error:
        raise BadInput(str(error)) from None
    return Settings(
        device=device,
        definitions=definitions,
        trained=preset.trained,
        held_out=preset.held_out,
        unseen=preset.unseen,
        steps=args.steps,
        minutes=args.minutes or (None if args.steps else preset.minutes),
        measurements=preset.measurements,
        threads=args.threads or 1,
        train={**preset.train, **{k: v for k, v in options.items() if v is not None}},
        reward=reward,
        live=args.measure or 0,
    )


def require_writable(path: Path) -> None:
    """BadInput unless files can be made at `path`, whose folders may still be missing."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        reason = "is not writable" if place.is_dir() else "is not a folder"
        raise BadInput(f"cannot write {path}: {place} {reason}")


def workloads(settings: Settings) -> tuple[list[Space], list[Space], list[Space]]:
    """The spaces that are trained, that are held out, and those of unseen shapes."""
    from ptxflow.compiler.device import device
    from ptxflow.compiler.families import family_for
    from ptxflow.env.space import enumerate_space
    from ptxflow.eval.definition import Definition, DefinitionError, load

    def space(definition: Definition, m: int) -> Space:
        family = family_for(definition.op_type)
        problem = family.problem(definition.to_json(), {"M": m})
        return enumerate_space(family, problem, target)

    try:
        target = device(settings.device)
        definitions = [load(name) for name in settings.definitions]
        for d in definitions:
            if d.var_axes != ("M",):
                raise BadInput(f"{d.name}: train.py binds the axis M; it has {d.var_axes}")
        shapes = [load(name).resized(**axes) for name, axes in settings.unseen]
        return (
            [space(d, m) for d in definitions for m in settings.trained],
            [space(d, m) for d in definitions for m in settings.held_out],
            [space(d, m) for d in shapes for m in settings.held_out],
        )
    except KeyError as error:
        raise BadInput(error.args[0]) from None
    except (DefinitionError, ValueError) as error:
        raise BadInput(str(error)) from None


def result_rows(
    run: Run, trained: Sequence[Space], held_out: Sequence[Space], unseen: Sequence[Space]
) -> list[dict[str, Any]]:
    """Exact distance of every workload, by kind."""
    distances = {
        "trained": run.trainer.distances(range(len(trained))),
        "held_out": list(run.trainer.held_out_distances(held_out)),
        "unseen": list(run.trainer.held_out_distances(unseen)),
    }
    rows = []
    for (kind, values), spaces in zip(distances.items(), (trained, held_out, unseen), strict=True):
        for space, distance in zip(spaces, values, strict=True):
            axes = dict(space.problem.axes)
            name = space.problem.definition if kind != "unseen" else f"n{axes['N']}_k{axes['K']}"
            row = {"definition": name, "M": axes["M"], "kind": kind}
            rows.append(
                row | {"trained": kind == "trained", "distance": distance, "leaves": len(space)}
            )
    return rows


def finish(run: Run, spaces: Sequence[Sequence[Space]], export: Path | None) -> None:
    """Measure every workload, print the table, write the result, the plots and the export."""
    from ptxflow.compiler.files import write_whole
    from ptxflow.eval.plots import distance_table, training_plots
    from ptxflow.eval.reward_source import title
    from ptxflow.gfn.checkpoint import write

    rows = result_rows(run, *spaces)
    summary: dict[str, Any] = {"trajectories_per_s": round(run.rate, 1), "steps": run.trainer.step}
    for kind in ("trained", "held_out", "unseen"):
        values = [r["distance"] for r in rows if r["kind"] == kind]
        if values:
            summary[kind] = {
                "workloads": len(values),
                "mean": sum(values) / len(values),
                "max": max(values),
            }
    reward = run.settings["reward"]
    result = {"device": run.settings["device"], "tau": run.trainer.config.tau, "reward": reward}
    result |= {"elapsed_s": round(run.elapsed, 1), **summary, "workloads": rows}
    write_whole(run.folder / RESULT, json.dumps(result, indent=1) + "\n")
    run.log("result", **summary)
    metrics = (run.folder / METRICS).read_text(encoding="utf-8").splitlines()
    training_plots([json.loads(line) for line in metrics], run.folder / "plots")
    if export:
        export.parent.mkdir(parents=True, exist_ok=True)
        about = {"settings": run.settings, "train": run.trainer.config.to_json()}
        write(export, run.trainer.policy_checkpoint({**about, "result": summary}))
    print(f"\nexact total variation distance to exp(TFLOPS/T)/Z on {run.settings['device']}, tau "
          f"{run.trainer.config.tau}, TFLOPS by {title(reward)} (* never trained)\n"
          f"{distance_table(rows)}")  # fmt: skip
    for kind, label in (
        ("trained", "trained"), ("held_out", "held-out M"), ("unseen", "unseen N, K"),
    ):  # fmt: skip
        if kind in summary:
            s = summary[kind]
            print(
                f"{label:12} mean {s['mean']:.4f}, max {s['max']:.4f}, {s['workloads']} workloads"
            )
    speed = f", {run.rate:.0f} trajectories/s" if run.session_steps else ""
    print(f"{run.trainer.step} steps, {run.elapsed:.0f} s{speed}; "
          f"wrote {run.folder}{f' and {export}' if export else ''}")  # fmt: skip


def prepare(args: argparse.Namespace) -> tuple[Path, Settings, Checkpoint | None]:
    """Where the run lives, what it is, and the state it goes on from."""
    if args.resume:
        from ptxflow.gfn.checkpoint import CheckpointError, read

        folder = args.resume.parent if args.resume.is_file() else args.resume
        try:
            state = read(args.resume if args.resume.is_file() else folder / CHECKPOINT)
        except CheckpointError as error:
            raise BadInput(str(error)) from None
        if "settings" not in state.config or "generator" not in state.tensors:
            raise BadInput(f"{args.resume}: a policy alone, not the state of a run")
        settings = Settings.from_json(state.config["settings"])
        if args.steps or args.minutes:
            settings = replace(settings, steps=args.steps, minutes=args.minutes)
        return folder, replace(settings, threads=args.threads or settings.threads), state
    settings = new_settings(args)
    name = "demo" if args.preset == "demo" else settings.device
    folder = args.out or Path("runs") / name
    if (folder / CHECKPOINT).exists() and not args.overwrite and args.preset != "demo":
        raise BadInput(f"{folder} holds a run: --resume {folder}, --overwrite, or another --out")
    return folder, settings, None


def source(settings: Settings) -> tuple[Reward, Settings]:
    """The reward, and the settings with the digests of the files it was read from."""
    from ptxflow.eval.reward_source import RewardError, build

    try:
        reward, description = build(settings.reward, settings.device)
    except RewardError as error:
        raise BadInput(str(error)) from None
    return reward, replace(settings, reward=description)


def live_measuring(folder: Path, settings: Settings, spaces: list[Space], reward: Reward) -> Live:
    """The measuring of a run with --measure; BadInput where this machine cannot do it."""
    from ptxflow.compiler import runtime
    from ptxflow.compiler.device import device
    from ptxflow.env.replay import ReplayReward
    from ptxflow.env.reward import ModelReward
    from ptxflow.eval.definition import load
    from ptxflow.eval.live import Live
    from ptxflow.eval.reward_source import ROOT

    if any(name.endswith(".json") for name in settings.definitions):
        raise BadInput("--measure records by name: it takes definitions of eval/definitions only")
    try:
        runtime.require_gpu(device(settings.device))
    except runtime.RuntimeUnavailable as error:
        raise BadInput(f"--measure: {error}") from None
    definitions = [load(name) for name in settings.definitions for _ in settings.trained]
    fallback = (reward.fallback or ModelReward()) if isinstance(reward, ReplayReward) else reward
    files = [ROOT / name for name in settings.reward.get("measurements", ())]
    return Live(definitions, spaces, folder / MEASUREMENTS, fallback, files)


def measure_round(run: Run, live: Live) -> None:
    """Measure what the policy samples for the next workloads, and train on what came of it."""
    count = run.settings["live"]
    chosen = live.next()
    reward = live.measure({w: run.trainer.propose(w, count) for w in chosen})
    run.trainer.reward_anew(reward, chosen)


def start(args: argparse.Namespace) -> int:
    folder, settings, state = prepare(args)
    for path in (folder / CHECKPOINT, *([args.export] if args.export else [])):
        require_writable(path.parent)
    reward, settings = source(settings)
    spaces = workloads(settings)

    import torch

    from ptxflow.env.reward import TAU, Remembered
    from ptxflow.gfn.checkpoint import CheckpointError
    from ptxflow.gfn.run import Run, train
    from ptxflow.gfn.training import TrainConfig, Trainer

    torch.set_num_threads(settings.threads)
    config = TrainConfig(**{"tau": TAU, **settings.train})
    held_out = spaces[1] + spaces[2]
    kept: Reward = Remembered(reward)
    live = live_measuring(folder, settings, spaces[0], reward) if settings.live else None
    if live:
        live.fallback = Remembered(live.fallback)
        if not state:
            live.path.unlink(missing_ok=True)
        kept = live.reward()
    trainer = Trainer(spaces[0], config, settings.steps or 10**6, kept, held_out)
    length = settings.steps, settings.minutes, settings.measurements
    run = Run(folder, trainer, spaces[1], *length, settings=asdict(settings))
    if live:
        run.between = partial(measure_round, run, live)
    if state:
        try:
            run.take_over(state)
        except CheckpointError as error:
            raise BadInput(str(error)) from None
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).unlink(missing_ok=True)
    print(f"{len(spaces[0])} workloads trained, {len(spaces[1])} held out, on {settings.device}; "
          f"{sum(map(len, spaces[0]))} strategies; rewarded by {settings.reward['source']}; "
          f"{settings.threads} threads")  # fmt: skip
    if stopped := train(run):
        print(f"train.py: stopped at step {trainer.step}; go on with: python train.py --resume "
              f"{folder}", file=sys.stderr)  # fmt: skip
        return 128 + stopped
    if live:
        run.settings["reward"] = {**settings.reward, **live.describe()}
    finish(run, spaces, args.export)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return start(args)
    except KeyboardInterrupt:
        print("train.py: stopped; a run with a checkpoint goes on by --resume", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"train.py: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except BadInput as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
