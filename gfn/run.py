"""A training run on disk: metrics, measurements, checkpoints, its length, and how it stops.

The loop ends at a step's end: when the plan is done, the time is up, or a signal asked for it, and
in each case the checkpoint left behind continues exactly there.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ptxflow.compiler.files import naming
from ptxflow.gfn.checkpoint import Checkpoint, write
from ptxflow.gfn.curriculum import Promotion
from ptxflow.gfn.group import AnySpace
from ptxflow.gfn.training import StepReport, Trainer, watched

CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"
LOG_EVERY = 10  # steps a metrics row
WATCHED = 4  # workloads of a family whose distance is measured on the way, trained and held out
SHARE = 0.2  # of the training, as long as measuring distances on the way may take
LEAVES = 50  # strategies whose distance is measured in the time of training on one


@dataclass
class Run:
    """A run on disk: where it writes, how far it is, and when to measure and to stop."""

    folder: Path
    trainer: Trainer
    held_out: Sequence[AnySpace]
    steps: int | None  # the length of the run, or
    minutes: float | None
    measurements: int  # of exact distances on the way
    settings: dict[str, Any]  # JSON data of the caller, kept in the checkpoints
    between: Callable[[], object] = lambda: None  # after each measurement of distances
    elapsed: float = 0.0  # seconds of training, over all its sessions
    measured: int = 0  # times that it was time to measure distances, so far
    leaves: int = 0  # strategies that these measurements went over
    pending: list[StepReport] = field(default_factory=list)  # steps since the last metrics row
    session_steps: int = 0
    session_seconds: float = 0.0  # of steps alone, this session

    def log(self, event: str, **values: Any) -> None:
        row = {"event": event, "step": self.trainer.step, "elapsed_s": round(self.elapsed, 3)}
        path = self.folder / METRICS
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | values) + "\n")

    def about(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "elapsed": self.elapsed,
            "measured": self.measured,
            "measured_leaves": self.leaves,
            "pending": [[report.family, *report.figures.tolist()] for report in self.pending],
        }

    def take_over(self, state: Checkpoint) -> None:
        """Go on where a checkpoint was written; CheckpointError where it is of another run."""
        cut_short(self.folder / METRICS)
        self.trainer.restore(state, self.folder / CHECKPOINT)
        self.trainer.total = self.steps or self.trainer.total
        self.elapsed, self.measured = state.config["elapsed"], state.config["measured"]
        self.leaves = state.config.get("measured_leaves", 0)
        if self.trainer.step:
            self.plan()  # it may go on for longer than it was to
        pending = state.config["pending"]
        self.pending = [
            StepReport(family, torch.tensor(values, device=self.trainer.compute))
            for family, *values in pending
        ]

    def save(self) -> None:
        write(self.folder / CHECKPOINT, self.trainer.state(self.about()))

    def affords(self, spaces: Iterable[AnySpace]) -> bool:
        """Whether there is time to measure these, too; then they are counted.

        By counts, not by the clock: a run that is repeated measures at the same steps.
        """
        leaves = self.leaves + sum(map(len, spaces))
        trained = self.trainer.step * self.trainer.config.batch
        if leaves > SHARE * LEAVES * trained:
            return False
        self.leaves = leaves
        return True

    def stage_distances(self) -> tuple[dict[str, float], Promotion | None]:
        """Mean distance by family of watched workloads of the stage, if there is time to measure
        them, and the promotion that may follow."""
        trainer = self.trainer
        if self.affords(trainer.spaces[i] for own in trainer.stage_workloads(WATCHED) for i in own):
            return trainer.measure_stage(WATCHED)
        return {}, trainer.promote(None)

    def held_out_distances(self) -> dict[str, float]:
        """Mean distance by family of watched held-out workloads, if there is time for them."""
        families = dict.fromkeys(space.family.name for space in self.held_out)
        held = {f: [s for s in self.held_out if s.family.name == f] for f in families}
        some = {f: [own[place] for place in watched(own, WATCHED)] for f, own in held.items()}
        if not self.affords(s for own in some.values() for s in own):
            return {}
        values = {f: list(self.trainer.held_out_distances(own)) for f, own in some.items()}
        return {f: sum(of) / len(of) for f, of in values.items()}

    @property
    def rate(self) -> float:
        """Trajectories a second, of this session's steps."""
        batches = self.session_steps * self.trainer.config.batch
        return batches / self.session_seconds if self.session_seconds else 0.0

    def plan(self) -> None:
        """Where the length is in minutes: as many steps as make progress the share of the time."""
        if self.minutes is not None:
            steps = self.trainer.step * 60 * self.minutes / max(self.elapsed, 1e-9)
            self.trainer.total = max(round(steps), self.trainer.step)

    @property
    def finished(self) -> bool:
        minutes = self.minutes
        late = minutes is not None and self.elapsed >= 60 * minutes
        return late or self.trainer.step >= self.trainer.total

    def measure(self) -> dict[str, float | None]:
        """Log exact distances of the watched workloads; promote the stage if it is time."""
        start = time.monotonic()
        stage = self.trainer.curriculum.stage
        trained, promotion = self.stage_distances()
        distances = self.log_distances(stage, trained, self.held_out_distances())
        if promotion:
            self.log("promotion", stage=stage, distance=promotion.distance, why=promotion.reason)
        self.between()
        self.elapsed += time.monotonic() - start
        self.plan()
        self.measured = max(self.measured + 1, int(self.trainer.progress * self.measurements))
        return distances

    def log_distances(
        self, stage: int, trained: Mapping[str, float], held_out: Mapping[str, float]
    ) -> dict[str, float | None]:
        """Log mean distances by family, where there are any; their means over the families."""
        distances = {"trained": mean(trained), "held_out": mean(held_out)}
        families = {"trained": dict(trained), "held_out": dict(held_out)}
        if trained or held_out:
            self.log("measure", stage=stage, **distances, families=families)
        return distances


def cut_short(path: Path) -> None:
    """Drop a last line that has no end, as a full disk leaves it."""
    if path.is_file():
        whole = path.read_bytes().rpartition(b"\n")
        if whole[2]:
            os.truncate(path, len(whole[0]) + len(whole[1]))


def mean(values: Mapping[str, float]) -> float | None:
    """Over the families; None where there is none."""
    return sum(values.values()) / len(values) if values else None


def train(run: Run) -> int | None:
    """Train to the end of the plan; the signal's number if one stopped it at a step's end."""
    caught: list[int] = []
    handlers = {s: signal.signal(s, lambda n, _: caught.append(n)) for s in (2, 15)}
    trainer = run.trainer
    shown: dict[str, str] = {}  # of the latest steps, and
    found: dict[str, str] = {}  # distances where they were measured last
    bar = tqdm(total=trainer.total, initial=trainer.step, unit="step", disable=None)
    try:
        if not trainer.step:
            run.save()  # whatever ends the run from here on, it can go on
        while not run.finished and not caught:
            start = time.monotonic()
            run.pending.append(trainer.advance())
            seconds = time.monotonic() - start
            run.session_steps += 1
            run.session_seconds += seconds
            run.elapsed += seconds
            bar.update()
            if trainer.step % LOG_EVERY == 0:
                run.plan()
                shown |= log_steps(run)
            if not run.finished and trainer.progress * run.measurements >= run.measured + 1:
                found = {k: f"{v:.3f}" for k, v in run.measure().items() if v is not None}
                run.save()
                if bar.disable and shown:
                    text = ", ".join(f"{k} {v}" for k, v in {**shown, **found}.items())
                    print(f"step {trainer.step} of {trainer.total}: {text}", flush=True)
            bar.total = trainer.total
            bar.set_postfix(shown | found, refresh=False)
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
    figures = torch.stack([r.figures for r in run.pending]).double()
    values = dict(zip(StepReport.NAMES, figures.mean(0).tolist(), strict=True))
    own: dict[str, list[torch.Tensor]] = {}
    for report, row in zip(run.pending, figures, strict=True):
        own.setdefault(report.family, []).append(row)
    families = {
        name: {"steps": len(rows)}
        | dict(zip(StepReport.NAMES, torch.stack(rows).mean(0).tolist(), strict=True))
        for name, rows in own.items()
    }
    run.pending.clear()
    curriculum = run.trainer.curriculum
    run.log(
        "step",
        stage=curriculum.stage,
        **values,
        families=families,
        learning_rate=run.trainer.config.learning_rate * run.trainer.rate,
        epsilon=run.trainer.epsilon,
        trajectories_per_s=round(run.rate, 1),
    )
    return {
        "stage": f"{curriculum.stage + 1}/{len(curriculum.stages)}",
        "loss": f"{values['loss']:.3f}",
        "reward": f"{values['reward']:.3f}",
    }
