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
    from ptxflow.env.reward import Remembered, Reward
    from ptxflow.env.space import Space
    from ptxflow.eval.live import Live
    from ptxflow.eval.training_set import Member
    from ptxflow.gfn.checkpoint import Checkpoint
    from ptxflow.gfn.run import Run

CHECKPOINT, METRICS, RESULT = "checkpoint.safetensors", "metrics.jsonl", "result.json"
MEASUREMENTS = "measurements.jsonl"

HELP = """\
Train one policy for every kernel family with conditional trajectory balance (a GFlowNet).

A workload is a definition with its variable axes bound, on a device. The policy builds a strategy
decision by decision under the device's masks and learns to sample it with probability
exp(TFLOPS / T) / Z, where the reward says the TFLOP/s and T = tau x what the device can attain. The
reward is the analytic model, a surrogate of a family (the model corrected by measurements), or
replay (what was measured, and the surrogate or the model elsewhere). Training starts on each
family's small, regular workloads and adds larger, irregular ones as the measured distance to the
target falls. Held-out values of the variable axes are never trained; their distance is measured
too. The preset says which values those are (eval/training_set.py); definitions that it does not
name take those of their family.
"""
EPILOG = """\
examples:
  python train.py                                 24 minutes for B200, into runs/b200
  python train.py --device h200 --minutes 5 --export checkpoints/h200.safetensors
  python train.py --definitions rmsnorm,gemm_n4096_k4096 --minutes 3 --out runs/norms
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
class Settings:
    """What a run is about; kept in its checkpoints, and all that resuming it needs."""

    device: str
    preset: str
    definitions: tuple[str, ...]
    steps: int | None
    minutes: float | None
    measurements: int
    threads: int
    compute: str  # cpu or cuda: what trains
    train: dict[str, Any]
    reward: dict[str, Any] = field(default_factory=lambda: {"source": "model"})
    live: int = 0  # samples of a workload that are measured at a time on the way

    @staticmethod
    def from_json(data: dict[str, Any]) -> Settings:
        return Settings(**{**data, "definitions": tuple(data["definitions"])})


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
    add(
        "--definitions",
        metavar="NAME,...",
        help="definitions, JSON files and families, comma-separated (default: the preset's, of "
        "every family)",
    )
    add("--preset", choices=("full", "demo"), help="full (default): all families; demo: short")
    add("--steps", type=positive(int), help="train this many steps; repeatable bit for bit")
    add("--minutes", type=positive(float), help="or this long (default: 24; demo 1.2)")
    add("--compute", choices=("auto", "cpu", "cuda"),
        help="what trains; auto (default): the GPU if PyTorch can use one")  # fmt: skip
    add("--batch", type=positive(int),
        help="strategies a step (default: 1024; demo 256; on a GPU 16384)")  # fmt: skip
    add("--width", type=positive(int), help="of the network (default: 256; on a GPU 512)")
    add("--tau", type=positive(float), help="temperature over the attainable TFLOP/s")
    add(
        "--reward",
        choices=("model", "surrogate", "replay"),
        help="default: surrogate where checkpoints/ has one for the device, else model",
    )
    add("--surrogate", type=Path, nargs="+", metavar="FILE", help="other surrogates than those")
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
            "device", "definitions", "preset", "compute", "batch", "width", "tau", "seed", "out",
            "reward", "surrogate", "measurements", "measure",
        )  # fmt: skip
        if given := [f"--{n}" for n in fixed if getattr(args, n) is not None]:
            parser.error(f"a resumed run keeps its own settings: drop {', '.join(given)}")
    return args


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


def new_settings(args: argparse.Namespace) -> Settings:
    from ptxflow.eval.definition import DefinitionError
    from ptxflow.eval.reward_source import RewardError, describe
    from ptxflow.eval.training_set import ON_GPU, PRESETS, chosen

    name = args.preset or "full"
    preset = PRESETS[name]
    options = {"batch": args.batch, "hidden": args.width, "tau": args.tau, "seed": args.seed}
    given = {k: v for k, v in options.items() if v is not None}
    device = (args.device or "b200").lower()
    try:
        definitions = chosen(args.definitions, preset)
        reward = describe(args.reward, device, args.surrogate or (), args.measurements or ())
    except (RewardError, DefinitionError) as error:
        raise BadInput(str(error)) from None
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
        train={**preset.train, **(ON_GPU if compute == "cuda" else {}), **given},
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


@dataclass(frozen=True)
class Workloads:
    """The workloads of a run and their spaces, one for one."""

    members: list[Member]
    spaces: list[Space]

    def of(self, *kinds: str) -> list[Space]:
        """The spaces of these kinds."""
        return [s for m, s in zip(self.members, self.spaces, strict=True) if m.kind in kinds]


def workloads(settings: Settings, reward: Remembered) -> Workloads:
    """What is trained, held out, and of unseen shapes; BadInput where something is unknown."""
    from ptxflow.compiler.device import device
    from ptxflow.eval.preparing import cores, spaces_of
    from ptxflow.eval.training_set import PRESETS, members

    try:
        target = device(settings.device)
        chosen = members(settings.definitions, PRESETS[settings.preset])
        jobs = cores() if settings.compute == "cuda" else settings.threads
        return Workloads(chosen, spaces_of(chosen, target, reward, jobs))
    except KeyError as error:
        raise BadInput(error.args[0]) from None
    except ValueError as error:
        raise BadInput(str(error)) from None


def result_rows(run: Run, held: Workloads) -> list[dict[str, Any]]:
    """Exact distance of every workload."""
    from tqdm import tqdm

    never = iter(run.trainer.held_out_distances(held.of("held_out", "unseen")))
    ours = (d for i in range(len(held.of("trained"))) for d in run.trainer.distances([i]))
    pairs = list(zip(held.members, held.spaces, strict=True))
    return [
        {
            "family": member.family.name,
            "definition": member.label,
            "axes": dict(member.axes),
            "kind": member.kind,
            "distance": next(ours if member.kind == "trained" else never),
            "leaves": len(space),
        }
        for member, space in tqdm(pairs, desc="distances", unit="workload", disable=None)
    ]


def finish(run: Run, held: Workloads, export: Path | None) -> None:
    """Measure every workload, print the tables, write the result, the plots and the export."""
    from ptxflow.compiler.files import write_whole
    from ptxflow.eval.plots import distance_table, summary_of, summary_table, training_plots
    from ptxflow.eval.reward_source import title
    from ptxflow.gfn.checkpoint import write

    rows = result_rows(run, held)
    summary = {"trajectories_per_s": round(run.rate, 1), "steps": run.trainer.step}
    summary |= summary_of(rows)
    reward, config = run.settings["reward"], run.trainer.config
    result = {"device": run.settings["device"], "tau": config.tau, "reward": reward}
    result |= {"elapsed_s": round(run.elapsed, 1), **summary, "workloads": rows}
    write_whole(run.folder / RESULT, json.dumps(result, indent=1) + "\n")
    run.log("result", **summary)
    metrics = (run.folder / METRICS).read_text(encoding="utf-8").splitlines()
    training_plots([json.loads(line) for line in metrics], run.folder / "plots")
    if export:
        export.parent.mkdir(parents=True, exist_ok=True)
        about = {"settings": run.settings, "train": config.to_json()}
        write(export, run.trainer.policy_checkpoint({**about, "result": summary}))
    print(f"\nexact total variation distance to exp(TFLOPS/T)/Z on {run.settings['device']}, tau "
          f"{config.tau}, TFLOPS by {title(reward)} (* never trained)\n{distance_table(rows)}\n\n"
          f"{summary_table(summary)}")  # fmt: skip
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
        try:
            settings = Settings.from_json(state.config["settings"])
        except TypeError:
            raise BadInput(f"{args.resume}: a run of another version: start it anew") from None
        if args.steps or args.minutes:
            settings = replace(settings, steps=args.steps, minutes=args.minutes)
        placed(settings.compute)
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


def live_measuring(folder: Path, settings: Settings, held: Workloads, reward: Reward) -> Live:
    """The measuring of a run with --measure; BadInput where this machine cannot do it."""
    from ptxflow.compiler.device import device
    from ptxflow.compiler.runtime import RuntimeUnavailable
    from ptxflow.env.replay import ReplayReward
    from ptxflow.env.reward import ModelReward, Remembered
    from ptxflow.eval import live
    from ptxflow.eval.reward_source import ROOT

    if any(name.endswith(".json") for name in settings.definitions):
        raise BadInput("--measure records by name: it takes definitions of eval/definitions only")
    try:
        gpus = live.count_gpus(device(settings.device))
    except RuntimeUnavailable as error:
        raise BadInput(f"--measure: {error}") from None
    definitions = [m.definition for m in held.members if m.kind == "trained"]
    fallback = (reward.fallback or ModelReward()) if isinstance(reward, ReplayReward) else reward
    files = [ROOT / name for name in settings.reward.get("measurements", ())]
    path = folder / MEASUREMENTS
    return live.Live(definitions, held.of("trained"), path, Remembered(fallback), files, gpus)


def measure_round(run: Run, live: Live) -> None:
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


def make_run(
    folder: Path, settings: Settings, held: Workloads, asked: Reward, state: Checkpoint | None
) -> Run:
    """The run, where its state says if it goes on; BadInput where that is of another run."""
    from tqdm import tqdm

    from ptxflow.env.reward import TAU
    from ptxflow.gfn.checkpoint import CheckpointError
    from ptxflow.gfn.run import Run
    from ptxflow.gfn.training import TrainConfig, Trainer

    config = TrainConfig(**{"tau": TAU, **settings.train})
    bar = partial(tqdm, desc="targets", unit="workload", leave=False, disable=None)
    trainer = Trainer(
        held.of("trained"), config, settings.steps or 10**6, asked, held.of("held_out", "unseen"),
        bar, torch_device(settings),
    )  # fmt: skip
    length = settings.steps, settings.minutes, settings.measurements
    run = Run(folder, trainer, held.of("held_out"), *length, settings=asdict(settings))
    if state:
        try:
            run.take_over(state)
        except CheckpointError as error:
            raise BadInput(str(error)) from None
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).unlink(missing_ok=True)
    return run


def start(args: argparse.Namespace) -> int:
    if args.compute != "cpu":  # before numpy: a core each for the processes that prepare
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ptxflow.env.reward import Remembered

    folder, settings, state = prepare(args)
    for path in (folder / CHECKPOINT, *([args.export] if args.export else [])):
        require_writable(path.parent)
    reward, settings = source(settings)
    kept = Remembered(reward)
    held = workloads(settings, kept)
    trained = held.of("trained")
    live = live_measuring(folder, settings, held, reward) if settings.live else None
    if live and not state:
        live.path.unlink(missing_ok=True)
    asked: Reward = live.reward() if live else kept
    print(f"{len(trained)} workloads trained, {len(held.of('held_out'))} held out, on "
          f"{settings.device}; {sum(map(len, trained))} strategies; rewarded by "
          f"{settings.reward['source']}; by {settings.compute}, {settings.threads} threads",
          flush=True)  # fmt: skip
    run = make_run(folder, settings, held, asked, state)
    from ptxflow.gfn.run import train

    if live:
        run.between = partial(measure_round, run, live)
    if stopped := train(run):
        print(f"train.py: stopped at step {run.trainer.step}; go on with: python train.py "
              f"--resume {folder}", file=sys.stderr)  # fmt: skip
        return 128 + stopped
    if live:
        run.settings["reward"] = {**settings.reward, **live.describe()}
    finish(run, held, args.export)
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
