#!/usr/bin/env python
"""Train the policy that proposes kernel strategies; `python train.py --help` explains."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ptxflow.env.space import Space
    from ptxflow.gfn.checkpoint import Checkpoint
    from ptxflow.gfn.training import StepReport, Trainer

GEMMS = (
    "gemm_n128_k2048", "gemm_n256_k7168", "gemm_n2048_k4096", "gemm_n4096_k4096",
    "gemm_n4096_k14336", "gemm_n5120_k2048", "gemm_n6144_k4096", "gemm_n28672_k4096",
)  # fmt: skip
CHECKPOINT, METRICS, RESULT = "checkpoint.safetensors", "metrics.jsonl", "result.json"
LOG_EVERY = 10  # steps a metrics row
WATCHED = 6  # workloads whose distance is measured on the way, trained and held out each
PLAN_AFTER = 20  # steps, before the length of a run that is given in minutes is known

HELP = """\
Train one policy on GEMM workloads with conditional trajectory balance (a GFlowNet).

A workload is a definition with M bound, on a device. The policy builds a strategy decision by
decision under the device's masks and learns to sample it with probability exp(TFLOPS / T) / Z,
where the analytic model says the TFLOP/s and T = tau x what the device can attain. Training starts
on small, regular workloads and adds larger, irregular ones as the measured distance to the target
falls. Held-out values of M are never trained; their distance is measured too.
"""
EPILOG = """\
examples:
  python train.py                                 12 minutes for B200, into runs/b200
  python train.py --device h200 --minutes 5 --export checkpoints/gemm-h200.safetensors
  python train.py --definitions gemm_n4096_k4096,gemm_n2048_k4096 --steps 500 --out runs/two
  python train.py --preset demo                   about a minute, three definitions
  python train.py --resume runs/b200              go on where Ctrl-C stopped it, exactly

writes into --out:
  checkpoint.safetensors  the whole state (policy, optimiser, random numbers, replay, curriculum)
  metrics.jsonl           loss, reward, entropy, masks, distances; one JSON object a line
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
        trained=(1, 16, 64, 112, 192, 256, 512, 768, 1024, 1536, 3072, 4096, 8192),
        held_out=(17, 128, 1000, 2048),
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
    add("--seed", type=int, help="of weights, sampling and replay (default: 0)")
    add("--threads", type=positive(int), help="CPU threads (default: all cores)")
    add("--out", type=Path, help="folder of the run (default: runs/DEVICE, demo: runs/demo)")
    add("--overwrite", action="store_true", help="replace the run in --out (demo always does)")
    add("--export", type=Path, metavar="FILE", help="also write the policy alone, for sample.py")
    add("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    args = parser.parse_args(argv)
    if args.steps and args.minutes:
        parser.error("give --steps or --minutes, not both")
    if args.resume:
        fixed = ("device", "definitions", "preset", "batch", "tau", "seed", "out")
        if given := [f"--{n}" for n in fixed if getattr(args, n) is not None]:
            parser.error(f"a resumed run keeps its own settings: drop {', '.join(given)}")
    return args


def new_settings(args: argparse.Namespace) -> Settings:
    preset = PRESETS[args.preset or "full"]
    definitions = preset.definitions
    if args.definitions and args.definitions != "all":
        definitions = tuple(dict.fromkeys(d.strip() for d in args.definitions.split(",")))
    options = {"batch": args.batch, "tau": args.tau, "seed": args.seed}
    return Settings(
        device=(args.device or "b200").lower(),
        definitions=definitions,
        trained=preset.trained,
        held_out=preset.held_out,
        unseen=preset.unseen,
        steps=args.steps,
        minutes=args.minutes or (None if args.steps else preset.minutes),
        measurements=preset.measurements,
        threads=args.threads or os.cpu_count() or 1,
        train={**preset.train, **{k: v for k, v in options.items() if v is not None}},
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


@dataclass
class Run:
    """A run on disk: where it writes, how far it is, and when to measure and to stop."""

    folder: Path
    settings: Settings
    trainer: Trainer
    held_out: list[Space]
    elapsed: float = 0.0  # seconds of training, over all its sessions
    measured: int = 0  # measurements of distances so far
    pending: list[StepReport] = field(default_factory=list)  # steps since the last metrics row
    session_steps: int = 0
    session_seconds: float = 0.0  # of steps alone, this session
    measure_seconds: float = 0.0  # what the last measurement took

    def log(self, event: str, **values: Any) -> None:
        row = {"event": event, "step": self.trainer.step, "elapsed_s": round(self.elapsed, 3)}
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | values) + "\n")

    def about(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "elapsed": self.elapsed,
            "measured": self.measured,
            "pending": [asdict(report) for report in self.pending],
        }

    def take_over(self, state: Checkpoint) -> None:
        """Go on where a checkpoint was written; CheckpointError where it is of another run."""
        from ptxflow.gfn.training import StepReport

        self.trainer.restore(state, self.folder / CHECKPOINT)
        self.trainer.total = self.settings.steps or self.trainer.total
        self.elapsed, self.measured = state.config["elapsed"], state.config["measured"]
        self.pending = [StepReport(**report) for report in state.config["pending"]]

    def save(self) -> None:
        from ptxflow.gfn.checkpoint import write

        write(self.folder / CHECKPOINT, self.trainer.state(self.about()))

    @property
    def rate(self) -> float:
        """Trajectories a second, of this session's steps."""
        batches = self.session_steps * self.trainer.config.batch
        return batches / self.session_seconds if self.session_seconds else 0.0

    def plan(self) -> None:
        """Fit the number of steps to the minutes, from the speed of this session's steps."""
        if self.settings.minutes is None:
            return
        pace = self.session_seconds / self.session_steps
        ahead = self.settings.measurements * (1 - self.trainer.progress) * self.measure_seconds
        left = max(0.0, 60 * self.settings.minutes - self.elapsed - ahead)
        self.trainer.total = self.trainer.step + round(left / pace)

    @property
    def finished(self) -> bool:
        minutes = self.settings.minutes
        late = minutes is not None and self.elapsed >= 60 * minutes
        return late or self.trainer.step >= self.trainer.total

    def measure(self) -> dict[str, float | None]:
        """Log exact distances of the watched workloads; promote the stage if it is time."""
        start = time.monotonic()
        stage, last = self.trainer.curriculum.stage, self.trainer.curriculum.last
        if last:
            trained = mean(self.trainer.distances(spread(range(len(self.trainer.spaces)))))
            promotion = None
        else:
            trained, promotion = self.trainer.measure_stage(WATCHED)
        held_out = list(self.trainer.held_out_distances(spread(self.held_out)))
        distances = {"trained": trained, "held_out": mean(held_out) if held_out else None}
        self.log("measure", stage=stage, **distances)
        if promotion:
            self.log("promotion", stage=stage, distance=promotion.distance, why=promotion.reason)
        self.measure_seconds = time.monotonic() - start
        self.elapsed += self.measure_seconds
        self.plan()
        self.measured = int(self.trainer.progress * self.settings.measurements)
        return distances


def spread(items: Sequence[Any]) -> Sequence[Any]:
    """Up to WATCHED items, evenly over the sequence."""
    return (
        [items[i * len(items) // WATCHED] for i in range(WATCHED)]
        if len(items) > (WATCHED)
        else items
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def train(run: Run) -> int | None:
    """Train to the end of the plan; the signal's number if one stopped it at a step's end."""
    from tqdm import tqdm

    caught: list[int] = []
    handlers = {s: signal.signal(s, lambda n, _: caught.append(n)) for s in (2, 15)}
    trainer = run.trainer
    session, shown = trainer.step, dict[str, str]()
    bar = tqdm(total=trainer.total, initial=trainer.step, unit="step", disable=None)
    try:
        while not run.finished and not caught:
            start = time.monotonic()
            run.pending.append(trainer.advance())
            seconds = time.monotonic() - start
            run.session_steps += 1
            run.session_seconds += seconds
            run.elapsed += seconds
            bar.update()
            if trainer.step % LOG_EVERY == 0:
                shown |= log_steps(run)
            if trainer.step == session + PLAN_AFTER:
                run.plan()
            planned = run.settings.steps or trainer.step >= PLAN_AFTER
            if planned and trainer.progress * run.settings.measurements >= run.measured + 1:
                shown |= {k: f"{v:.3f}" for k, v in run.measure().items() if v is not None}
                run.save()
                if bar.disable:
                    text = ", ".join(f"{k} {v}" for k, v in shown.items())
                    print(f"step {trainer.step} of {trainer.total}: {text}", flush=True)
            bar.total = trainer.total
            bar.set_postfix(shown, refresh=False)
    finally:
        bar.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if not caught:
        trainer.total = trainer.step
    run.save()
    return caught[0] if caught else None


def log_steps(run: Run) -> dict[str, str]:
    """One metrics row for the steps since the last; what the progress bar shows of it."""
    values = {
        k: mean([getattr(r, k) for r in run.pending])
        for k in ("loss", "reward", "entropy", "masked")
    }
    run.pending.clear()
    curriculum = run.trainer.curriculum
    run.log(
        "step",
        stage=curriculum.stage,
        **values,
        learning_rate=run.trainer.config.learning_rate * run.trainer.rate,
        epsilon=run.trainer.epsilon,
        trajectories_per_s=round(run.rate, 1),
    )
    return {
        "stage": f"{curriculum.stage + 1}/{len(curriculum.stages)}",
        "loss": f"{values['loss']:.3f}",
        "reward": f"{values['reward']:.3f}",
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Distances by shape and M; a star marks what was never trained."""
    names = list(dict.fromkeys(r["definition"] for r in rows))
    columns = sorted({r["M"] for r in rows})
    cells = {(r["definition"], r["M"]): r for r in rows}
    width = max(map(len, names), default=0)
    lines = [" " * width + "".join(f"{f'M={m}':>9}" for m in columns)]
    for name in names:
        line = f"{name:{width}}"
        for m in columns:
            row = cells.get((name, m))
            star = "*" if row and not row["trained"] else " "
            line += f"{row['distance']:.4f}{star}".rjust(9) if row else " " * 9
        lines.append(line)
    return "\n".join(lines)


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
    from ptxflow.eval.plots import training_plots
    from ptxflow.gfn.checkpoint import write

    rows = result_rows(run, *spaces)
    summary: dict[str, Any] = {"trajectories_per_s": round(run.rate, 1), "steps": run.trainer.step}
    for kind in ("trained", "held_out", "unseen"):
        values = [r["distance"] for r in rows if r["kind"] == kind]
        if values:
            summary[kind] = {"workloads": len(values), "mean": mean(values), "max": max(values)}
    result = {"device": run.settings.device, "tau": run.trainer.config.tau}
    result |= {"elapsed_s": round(run.elapsed, 1), **summary, "workloads": rows}
    part = run.folder / (RESULT + ".tmp")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(part, run.folder / RESULT)
    run.log("result", **summary)
    metrics = (run.folder / METRICS).read_text(encoding="utf-8").splitlines()
    training_plots([json.loads(line) for line in metrics], run.folder / "plots")
    if export:
        export.parent.mkdir(parents=True, exist_ok=True)
        about = {"settings": asdict(run.settings), "train": run.trainer.config.to_json()}
        write(export, run.trainer.policy_checkpoint({**about, "result": summary}))
    print(f"\nexact total variation distance to exp(TFLOPS/T)/Z on {run.settings.device}, tau "
          f"{run.trainer.config.tau} (* never trained)\n{table(rows)}")  # fmt: skip
    for kind, label in (
        ("trained", "trained"), ("held_out", "held-out M"), ("unseen", "unseen N, K"),
    ):  # fmt: skip
        if kind in summary:
            s = summary[kind]
            print(
                f"{label:12} mean {s['mean']:.4f}, max {s['max']:.4f}, {s['workloads']} workloads"
            )
    print(f"{run.trainer.step} steps, {run.elapsed:.0f} s, {run.rate:.0f} trajectories/s; "
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


def start(args: argparse.Namespace) -> int:
    folder, settings, state = prepare(args)
    for path in (folder / CHECKPOINT, *([args.export] if args.export else [])):
        require_writable(path.parent)
    spaces = workloads(settings)

    import torch

    from ptxflow.env.reward import TAU
    from ptxflow.gfn.checkpoint import CheckpointError
    from ptxflow.gfn.training import TrainConfig, Trainer

    torch.set_num_threads(settings.threads)
    config = TrainConfig(**{"tau": TAU, **settings.train})
    trainer = Trainer(spaces[0], config, settings.steps or 10**6, held_out=spaces[1] + spaces[2])
    run = Run(folder, settings, trainer, spaces[1])
    if state:
        try:
            run.take_over(state)
        except CheckpointError as error:
            raise BadInput(str(error)) from None
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).unlink(missing_ok=True)
    print(f"{len(spaces[0])} workloads trained, {len(spaces[1])} held out, on {settings.device}; "
          f"{sum(map(len, spaces[0]))} strategies; {settings.threads} threads")  # fmt: skip
    if stopped := train(run):
        print(f"train.py: stopped at step {trainer.step}; go on with: python train.py --resume "
              f"{folder}", file=sys.stderr)  # fmt: skip
        return 128 + stopped
    finish(run, spaces, args.export)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        return start(args)
    except KeyboardInterrupt:
        print("train.py: stopped before the first checkpoint", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"train.py: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except BadInput as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
