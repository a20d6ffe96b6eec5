"""The command line of train.py, and what a run is about; the standard library alone."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput, Parser, add_cluster

HELP = """\
Train the policy that proposes kernels: a GFlowNet over every kernel family, by trajectory balance.

A workload is a definition with its variable axes bound, on a device. The policy builds a strategy
decision by decision under the device's masks and learns to sample it with probability
exp(TFLOPS / T) / Z, where a reward says the TFLOP/s and T = tau x what the device can attain.

A run  1. enumerates the valid strategies of each workload, and says how many there are;
       2. trains, small and regular workloads first, larger and irregular ones as the distance to
          the target falls; now and then it prints that distance;
       3. measures the exact distance of every workload, those held out and never trained too (a
          star), and prints a table: 0 is the target itself, 1 the farthest, below 0.05 is good.
It needs no GPU, and trains on one if PyTorch sees one. gfn/README.md tells the rest.
"""
EPILOG = """\
where to begin:
  python train.py --preset demo                   three definitions, about a minute
  python train.py                                 every family, 24 minutes for B200, into runs/b200
  python train.py --definitions rmsnorm,gemm_n4096_k4096 --minutes 3 --out runs/norms
  python train.py --definitions gemm_n4096_k4096,gemm_n2048_k4096 --steps 500 --out runs/two
  python train.py --resume runs/b200              go on where Ctrl-C stopped it, exactly
  python train.py --resume runs/b200 --minutes 60 the same run, longer: when it ended far off

for a GPU that was measured:
  python train.py --device h200 --minutes 5 --export checkpoints/h200.safetensors
  python train.py --device h200 --reward replay --measurements more.jsonl

one workload, from a trained policy, in seconds:
  python train.py --init checkpoints/h200.safetensors --device h200 --definition my_gemm.json \
      --axes M=77 --export my.safetensors         by what the reward says
  python train.py --init checkpoints/h200.safetensors --device h200 --definition rmsnorm_h4096 \
      --axes batch_size=700 --measure 16 --export my.safetensors   by measuring, on the GPU
  python sample.py --checkpoint my.safetensors --device h200 --definition rmsnorm_h4096 \
      --axes batch_size=700                       and its kernels

writes into --out:
  checkpoint.safetensors  the whole state (policy, optimiser, random numbers, curriculum)
  metrics.jsonl           loss, reward, entropy, masks, distances; one JSON object a line
  measurements.jsonl      with --measure: what was measured on the way
  result.json             the exact distance of every workload at the end
  plots/*.png             loss, distance, reward, entropy, masked
exit codes: 0 done, 2 bad input or nowhere to write (one line says what), 130 stopped by Ctrl-C and
143 by SIGTERM, both resumable
"""


ANY = "any"  # instead of a device: those drawn at random


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
    init: str | None = None  # the policy that it began with, and
    begun: dict[str, Any] = field(default_factory=dict)  # its definitions, results, and lengths
    without: str | None = None  # the device that is left out, where they are drawn
    space: str = "listed"  # or wide: which strategies there are

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Settings":
        return Settings(**{**data, "definitions": tuple(data["definitions"])})


@dataclass(frozen=True)
class TrainConfig:
    """What a run needs besides its workloads; travels in its checkpoints."""

    tau: float
    seed: int = 0
    batch: int = 1024
    learning_rate: float = 3e-3  # of what is no matrix
    matrix_rate: float = 2e-2  # of the matrices, whose updates are orthogonalised; 0: they stay
    log_z_rate: float = 1e-2
    workloads: int = 64  # of a batch, at most: few have many prefixes in common
    hidden: int = 256
    layers: int = 2
    clip: float = 1.0  # of the gradient's norm
    epsilon: float = 0.02  # falls linearly to zero
    temperatures: tuple[float, float] | None = (0.005, 0.1)  # drawn from; None: `tau` alone
    objective: str = "variance"  # of `balance.OBJECTIVES`
    each: int = 32  # walks of a workload at a temperature, of a batch
    rebuilt: float = 0.25  # of these, by local search from what was met
    replayed: float = 0.25  # and drawn from the best that was met
    room: int = 256  # strategies of a workload that are kept
    weight: float = 1.0  # power of the temperature by which losses are weighted
    stages: int = 4
    stage_threshold: float = 0.12  # mean exact TV at which a stage is promoted
    stage_share: float = 0.06  # of the run, the most for a stage before the last
    warmup: int = 50  # steps
    knowing: str = ""  # who tells policies what some strategies are worth, see `hints`; or nobody
    flat: float = 0.3  # of the run, before the learning rate decays

    def __post_init__(self) -> None:
        if self.temperatures:  # a list, where it was JSON
            object.__setattr__(self, "temperatures", tuple(self.temperatures))

    @property
    def rows(self) -> tuple[int, int, int]:
        """Of `each`: drawn by the policy, rebuilt, replayed."""
        rebuilt, replayed = round(self.each * self.rebuilt), round(self.each * self.replayed)
        return self.each - rebuilt - replayed, rebuilt, replayed


RATES = {f.name: f.default for f in fields(TrainConfig) if f.name.endswith("_rate")}  # of learning


def positive(kind: type, most: float = float("inf")) -> Any:
    """A converter to numbers above 0, up to `most`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
        if value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, not {text!r}")
        return value

    return convert


def seed(text: str) -> int:
    """A converter to what random generators take."""
    if not text.isascii() or not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, not {text!r}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="train.py", description=HELP, epilog=EPILOG, brief="train.py")
    for options in (_subject, _length, _rewarding, _learning, _tuning, _files):
        options(parser)
    args = parser.parse_args(argv)
    if args.steps and args.minutes:
        parser.error("give --steps or --minutes, not both")
    if (args.definition is None) != (not args.axes) or (args.definition and not args.init):
        parser.error("--definition and --axes need each other, and --init")
    if args.rate and args.definition:
        parser.error("--rate is of a training: tuning to --definition has rates of its own")
    if args.reward == "policy" and not args.definition:
        parser.error("--reward policy needs --definition")
    if args.device == ANY and (args.preset != "shapes" or args.reward not in (None, "model")):
        parser.error("--device any needs --preset shapes, and is rewarded by the model")
    if args.without and args.device != ANY:
        parser.error("--without needs --device any")
    wide = args.preset == "shapes" and args.reward in (None, "model", "surrogate")
    if args.space == "wide" and (not wide or args.surrogate) and not args.resume:
        parser.error("--space wide needs --preset shapes, and checkpoints/ has its surrogates")
    if args.preset == "shapes" and args.measure:
        parser.error("--measure records workloads by name: --preset shapes has none")
    if args.resume:
        fixed = (
            "device", "without", "space", "definitions", "preset", "compute", "batch", "width",
            "rate", "tau", "seed", "out", "reward", "surrogate", "measurements", "measure", "init",
            "definition",
        )  # fmt: skip
        if given := [f"--{n}" for n in fixed if getattr(args, n) is not None]:
            parser.error(f"a resumed run keeps its own settings: drop {', '.join(given)}")
    return args


def _subject(parser: Parser) -> None:
    add = parser.add_argument_group("what is trained").add_argument
    add("--device", help="b200 (default), h200 or h100: whose limits and rates; any: devices drawn "
        "at random around them, by the model, with --preset shapes")  # fmt: skip
    add(
        "--definitions",
        metavar="NAME,...",
        help="definitions, JSON files and families, comma-separated (default: the preset's, of "
        "every family); env/tasks/training_set.py has the values of axes that are trained, and "
        "those that are held out",
    )
    add("--preset", choices=("full", "shapes", "demo"),
        help="full (default): all families at the workloads of env/tasks/training_set.py; shapes: "
        "all axes drawn at random, anew as training goes on; demo: short")  # fmt: skip
    add("--without", metavar="DEVICE", help="with --device any: never drawn, nor one near it")
    add("--space", choices=("listed", "wide"),
        help="which strategies there are (default: listed); wide: those of the families that have "
        "finer decisions, with --preset shapes, judged on the listed part; by surrogates of their "
        "own, where the device has some")  # fmt: skip
    add("--init", type=Path, metavar="CHECKPOINT",
        help="begin with this trained policy; families it has no part for get one, and those that "
        "are not trained now stay as they are")  # fmt: skip


def _length(parser: Parser) -> None:
    add = parser.add_argument_group("how long, and on what").add_argument
    add("--minutes", type=positive(float, 1e6), help="of training (default: 24; demo 1.2)")
    add("--steps", type=positive(int, 10**9), help="or so many steps; repeatable bit for bit")
    add("--compute", choices=("auto", "cpu", "cuda"),
        help="what trains; auto (default): the GPU if PyTorch can use one")  # fmt: skip
    add("--threads", type=positive(int), help="CPU threads (default: 1; more pay if cores idle)")


def _rewarding(parser: Parser) -> None:
    add = parser.add_argument_group("by what strategies are rewarded").add_argument
    add(
        "--reward",
        choices=("model", "surrogate", "replay", "policy"),
        help="model: the analytic one; surrogate: the model corrected by measurements; replay: as "
        "measured, where it was (default: surrogate where checkpoints/ has one for the device, "
        "else model); policy: only to tune to one workload",
    )
    add("--surrogate", type=Path, nargs="+", metavar="FILE", help="other surrogates than those")
    add("--measurements", type=Path, nargs="+", metavar="FILE", help="what --reward replay replays")
    add_cluster(parser)
    add("--measure", type=positive(int), metavar="N",
        help="now and then measure N of the policy's samples on this GPU, for 8 workloads in turn, "
        "and reward them as measured; needs the GPU")  # fmt: skip
    add("--tau", type=positive(float), help="temperature over the attainable TFLOP/s (0.02)")


def _learning(parser: Parser) -> None:
    add = parser.add_argument_group("how it learns").add_argument
    add("--batch", type=positive(int, 1 << 20),
        help="strategies a step (default: 1024; demo 256; on a GPU 16384)")  # fmt: skip
    add("--width", type=positive(int, 1 << 13), help="of the networks (default: 256)")
    add(
        "--rate",
        type=positive(float),
        metavar="FACTOR",
        help="times the usual learning rates; with --init, 0.1 keeps what is nearly right",
    )
    add("--seed", type=seed, help="of weights and sampling (default: 0)")


def _tuning(parser: Parser) -> None:
    add = parser.add_argument_group("one workload").add_argument
    add("--definition", metavar="NAME|FILE",
        help="with --init: tune to one workload of this definition, by --reward (policy: by what "
        "it says itself), --measurements and --measure")  # fmt: skip
    add("--axes", nargs="+", default=[], metavar="NAME=VALUE", help="of --definition's workload")


def _files(parser: Parser) -> None:
    add = parser.add_argument_group("files").add_argument
    add("--out", type=Path, help="folder of the run (default: runs/DEVICE, demo: runs/demo)")
    add("--overwrite", action="store_true", help="replace the run in --out (demo always does)")
    add("--export", type=Path, metavar="FILE", help="also write the policy alone, for sample.py")
    add("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")


def known_device(name: str | None) -> str:
    """The name of a device, by default b200, or any; BadInput for an unknown one."""
    from ptxflow.compiler.device import device

    if name == ANY:
        return name
    try:
        return device(name or "b200").name
    except KeyError as error:
        raise BadInput(str(error.args[0])) from None


def require_there(path: Path) -> None:
    """BadInput unless there is such a file."""
    if not path.is_file():
        reason = "Is a directory" if path.is_dir() else "No such file or directory"
        raise BadInput(f"{path}: cannot read the checkpoint: {reason}")


def require_writable(path: Path) -> None:
    """BadInput unless files can be made at `path`, whose folders may still be missing."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        reason = "is not writable" if place.is_dir() else "is not a folder"
        raise BadInput(f"cannot write {path}: {place} {reason}")
