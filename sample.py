"""Sample GPU kernels for one workload: strategies from a trained policy, compiled and ranked.

Draws k distinct strategies from the policy in the checkpoint, lowers, validates, assembles and
checks each down to its machine code, runs its PTX in the emulator on a small problem, and ranks
them: by measurement where the GPU is present, else by the reward that trained the policy. Writes
for each kernel its PTX, cubin, strategy and report, and for the best a FlashInfer-Bench Solution
that runs by itself.

examples:
  python sample.py --definition gemm_n4096_k4096 --axes M=4096
  python sample.py --definition gemm_n128_k2048 --device h200 -k 16 --out out/small
  python sample.py --definition rmsnorm_h4096 --axes batch_size=700
  python sample.py --definition my_gemm.json --axes M=77 --measure no
  python sample.py --definition rmsnorm_h4096 --device h200 --measure yes -k 32 --stop-at 0.9
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ptxflow.eval import command

if TYPE_CHECKING:
    from ptxflow.compiler.runtime import GpuInfo
    from ptxflow.env.reward import Reward
    from ptxflow.eval.definition import Definition
    from ptxflow.eval.sample_report import Run

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
POLICY_OF = {"h100": "h200"}  # one policy per architecture; device features tell the rest


class Parser(command.Parser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        print(f"sample: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--definition",
        required=True,
        metavar="NAME|PATH",
        help="one of the definitions in eval/definitions, or a JSON file of the same schema",
    )
    add(
        "--axes",
        nargs="+",
        default=[],
        metavar="M=1024",
        help="values of the variable axes (default: a typical workload of the definition's family)",
    )
    add("--device", default="b200", help="b200, h200 or h100 (default: b200)")
    add("-k", type=int, default=8, metavar="K", help="distinct strategies to sample (default: 8)")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder, made whole or not at all (default: out/DEFINITION-AXES-DEVICE)",
    )
    add(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="trained policy (default: the device's in checkpoints/)",
    )
    add(
        "--sharpness",
        type=float,
        metavar="B",
        help="draw with the policy's probabilities to this power, renormalised: 1 samples its "
        "target exp(TFLOPS/T), more comes nearer to the top, 0 draws uniformly (default: 2)",
    )
    add("--seed", type=int, default=0, help="the same seed samples the same kernels (default: 0)")
    add(
        "--measure",
        choices=("auto", "yes", "no"),
        default="auto",
        help="rank by measurement: where this GPU is present (auto, the default), always, never",
    )
    add(
        "--stop-at",
        type=float,
        metavar="SHARE",
        help="stop measuring when a kernel has this share of the attainable speed, as 0.95: a "
        "launch and the roofline with nominal peaks (default: measure all)",
    )
    add(
        "--no-emulate",
        action="store_true",
        help="do not run each kernel's PTX in the emulator (a second or two a kernel)",
    )
    add("--jobs", type=int, help="compiler processes (default: one per core)")
    args = parser.parse_args(argv)  # fmt: skip
    if args.k < 1:
        parser.error(f"-k must be positive, not {args.k}")
    if args.sharpness is not None and not 0 <= args.sharpness < float("inf"):
        parser.error(f"--sharpness must be a number of at least 0, not {args.sharpness}")
    if args.stop_at is not None and not 0 < args.stop_at <= 1:
        parser.error(f"--stop-at must be a share of 1, as 0.95, not {args.stop_at}")
    if args.stop_at is not None and args.measure == "no":
        parser.error("--stop-at ends measuring, and --measure no does not measure")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, not {args.seed}")
    return args


def run(args: argparse.Namespace) -> int:
    from ptxflow.compiler import ptxas
    from ptxflow.eval.arguments import find_device, find_family, find_problem, find_space
    from ptxflow.eval.definition import load
    from ptxflow.eval.output import OutputFolder
    from ptxflow.eval.sampling import compile_and_rank
    from ptxflow.gfn.inference import SHARPNESS, load_policy, log_probs, sample_distinct

    device = find_device(args.device)
    definition = load(args.definition)
    find_family(definition)  # before the axes: an op without kernels has no right ones
    axes = choose_axes(definition, args.axes)
    space = find_space(*find_problem(definition, axes), device)
    checkpoint = args.checkpoint or default_checkpoint(device.name)
    policy = load_policy(checkpoint)
    scores = log_probs(policy, space)
    sharpness = SHARPNESS if args.sharpness is None else args.sharpness
    codes = sample_distinct(policy, space, args.k, args.seed, sharpness)
    gpu = choose_gpu(args.measure, device.name)
    ptxas.executable()
    out = args.out or Path("out", f"{definition.name}-{_text(axes, '-', '')}-{device.name}")
    with OutputFolder(out, marker="summary.json") as folder:
        reward = choose_reward(policy.about, device.name, space.family.name)
        result = compile_and_rank(
            definition, axes, space, codes, scores, gpu, reward,
            seed=args.seed, checkpoint=checkpoint.name, jobs=args.jobs,
            emulate=not args.no_emulate, stop_at=args.stop_at,
        )  # fmt: skip
        write(result, definition, folder)
    report(result, out)
    return 1 if result.refused or any(s.wrong for s in result.samples) else 0


def choose_reward(about: dict[str, Any], device: str, family: str) -> Reward:
    """What rewarded the family's strategies when the policy was trained; the model, with a word,
    where it cannot be had."""
    from ptxflow.env.reward import ModelReward
    from ptxflow.eval.reward_source import RewardError, build, of_family

    description = about.get("settings", {}).get("reward", {"source": "model"})
    try:
        return of_family(build(description, device)[0], family)
    except RewardError as error:
        print(f"ranking by the model: {error}", file=sys.stderr)
        return ModelReward()


def choose_axes(definition: Definition, texts: Sequence[str]) -> dict[str, int]:
    """The variable axes, as given or by default; says so where it is the default."""
    from ptxflow.eval.arguments import UsageError, parse_axes
    from ptxflow.eval.sequences import axes_of
    from ptxflow.eval.training_set import row_of

    given = {}
    for name, values in parse_axes(texts).items():
        if len(values) > 1:
            raise UsageError(f"axis {name!r} has {len(values)} values; sample one workload a run")
        given[name] = values[0]
    needed = definition.var_axes
    if not given and (row := row_of(definition)):
        given = axes_of(definition, row.typical)
        print(f"--axes not given: taking {_text(given, ' ', '=')}", file=sys.stderr)
    bound = definition.bind(given)
    return {name: bound[name] for name in needed}


def default_checkpoint(device: str) -> Path:
    """The policy of a device, for all families."""
    return CHECKPOINTS / f"{POLICY_OF.get(device, device)}.safetensors"


def choose_gpu(measure: str, device: str) -> GpuInfo | None:
    """The GPU to measure on, or None; `yes` insists on one that runs the device's code."""
    from ptxflow.compiler.device import DEVICES
    from ptxflow.compiler.runtime import RuntimeUnavailable, gpu_info, require_gpu

    if measure == "no":
        return None
    try:
        if measure == "yes":
            return require_gpu(DEVICES[device])
        info = gpu_info()
    except RuntimeUnavailable as error:
        if measure == "yes":
            raise RuntimeUnavailable(f"--measure yes: {error}") from None
        return None
    return info if info.kind == device else None


def write(result: Run, definition: Definition, folder: Path) -> None:
    """All files; the Solution is of the best kernel that is not known to be wrong."""
    from ptxflow.eval.sample_report import write_run
    from ptxflow.eval.solution import solution

    right = [s for s in result.samples if not s.wrong]
    best = right[0] if right else None
    made = None
    if best is not None:
        kernel = best.kernel
        text = f"{result.title}: best of {len(result.samples)} sampled, by {result.ranked_by}"
        made = solution(definition, result.device, kernel.launch, kernel.ptx, best.key, text)
    write_run(result, folder, made)


def report(result: Run, out: Path) -> None:
    from ptxflow.eval.sample_report import sample_table

    print(f"{result.title}: {len(result.samples)} kernels, ranked by {result.ranked_by}")
    if result.samples:
        print(sample_table(result))
    if result.stopped:
        print(result.stopped)
    elif result.stop_at and not result.measured:
        print("nothing was measured here, so that --stop-at had nothing to stop", file=sys.stderr)
    for sample in result.samples:
        if sample.emulation is not None and not sample.emulation.right:
            print(f"{sample.key}: emulated: {sample.emulation}", file=sys.stderr)
    for strategy, error in result.refused:
        print(f"refused {strategy.key}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"written to {out}: PTX, cubin, strategy and report of each; report.md, solution.json")


def _text(axes: dict[str, int], between: str, sign: str) -> str:
    return between.join(f"{name}{sign}{value}" for name, value in axes.items())


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    from ptxflow.eval.campaign import FAILURES
    from ptxflow.eval.solution import SolutionError
    from ptxflow.gfn.checkpoint import CheckpointError

    try:
        return run(args)
    except (*FAILURES, CheckpointError, SolutionError) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sample: interrupted; nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
