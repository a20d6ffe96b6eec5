"""Sample GPU kernels for one workload: strategies from a trained policy, compiled and ranked.

Half of k strategies are drawn from the policy in the checkpoint, the other half are the best of all
by the reward that trained it (--from). Each is lowered, validated, assembled and checked down to
its machine code, and its PTX is run in the emulator on small problems. They are ranked by
measurement where the GPU is present, else by the reward. Written are for each kernel its PTX,
cubin, strategy and report, and for the best a FlashInfer-Bench Solution that runs by itself.

With --library a few kernels are chosen for whole ranges of sizes, with a table of which of them
serves which, and written as a folder that `ptxflow.load` takes and as one Solution. K strategies
are then of each size that is looked at. A run that was cut short goes on where it stopped.

The table has microseconds, and the share of what bounds the problem: the device's bandwidth, or the
peak of its tensor cores; then TFLOP/s too. A mixture of experts is bound by the experts that random
routing touches, so that real tokens, which share experts, may exceed it. "Of best" is against the
best of all valid strategies as predicted, "log p" the policy's log-probability. Where more than
300,000 are valid, only 512 draws of the policy are scored and what an evolutionary search of the
reward asks for, and "best" is the best of these.

examples:
  python sample.py --definition list
  python sample.py --definition gemm_n4096_k4096 --axes M=4096
  python sample.py --definition gemm_n128_k2048 --device h200 -k 16 --out out/small
  python sample.py --definition rmsnorm_h4096 --axes batch_size=700 --from policy
  python sample.py --definition my_gemm.json --axes M=77 --measure no
  python sample.py --definition rmsnorm_h4096 --device h200 --measure yes -k 32 --stop-at 0.9
  python sample.py --definition gemm_n4096_k4096 --device h200 --axes M=1:16384 --library lib/gemm

exit code: 0 done, 1 a kernel was refused or is wrong, 2 bad input, no GPU or a full disk
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ptxflow.command import CLUSTER, BadInput, Parser, add_cluster, one_line

if TYPE_CHECKING:
    from ptxflow.compiler.backend.runtime import GpuInfo
    from ptxflow.compiler.device import Device
    from ptxflow.env.relation import RelationSpace
    from ptxflow.env.space import Space
    from ptxflow.env.tasks.definition import Definition
    from ptxflow.eval.sample.samples import Run

MOST = 10_000  # kernels of a run: some hours


def what_is_sampled(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--definition",
        required=True,
        metavar="NAME|PATH|list",
        help="one of the 46 that come with ptxflow, a GEMM of any size, as gemm_n11008_k4096, or a "
        "JSON file of the same schema; `list` prints the names with their axes",
    )
    add(
        "--axes",
        nargs="+",
        default=[],
        metavar="M=1024",
        help="values of the variable axes (default: a typical workload of the family), "
        "or with --library ranges, M=1:16384 (default: what is trained and recorded)",
    )
    add(
        "--library",
        type=Path,
        metavar="DIR",
        help="write a library for the ranges of --axes to this folder, made whole or not at all",
    )
    add(
        "--chain",
        nargs="*",
        metavar="TENSOR",
        help="a library's calls may begin while what is before them in the stream still runs, and "
        "wait for it themselves, though not before they read these tensors, as weights, which "
        "nothing that runs then may write",
    )
    add("--members", type=int, metavar="N", help="kernels of a library at most (default: 8)")
    add("--device", default="b200", help="b200, h200 or h100 (default: b200)")
    add(
        "--space",
        choices=("listed", "wide"),
        help="which strategies there are: wide has finer decisions, where the family has some, and "
        "holds the listed ones (default: that which the policy of --checkpoint draws from, else "
        "wide where the device has a policy of measured wide spaces, else listed; of a --library, "
        "which is measured, listed, and wide those around the best listed ones and of rare "
        "choices, too)",
    )
    add("-k", type=int, default=8, metavar="K", help="distinct strategies to sample (default: 8)")
    add(
        "--from",
        dest="source",
        choices=("policy", "reward", "both"),
        default="both",
        help="draws of the policy, the reward's best of all valid strategies, or half of each "
        "(default: both); far from what was trained the reward's are the better",
    )


def how_it_is_ranked(parser: Parser) -> None:
    add = parser.add_argument
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
        help="trained policy (default: the device's in checkpoints/, of wide or listed spaces; far "
        "from what that was trained on any.safetensors, for any shape and device)",
    )
    add(
        "--sharpness",
        type=float,
        metavar="B",
        help="draw with the policy's probabilities to this power, renormalised: 1 samples its "
        "target exp(TFLOPS/T), more comes nearer to the top, 0 draws uniformly (default: 2)",
    )
    add(
        "--temperature",
        type=float,
        metavar="TAU",
        help="instead: draw in proportion to exp(TFLOPS/T), T this share of what is attainable; a "
        "policy that was trained at many is told it, another one's draws are sharpened to it",
    )
    add("--seed", type=int, default=0, help="the same seed samples the same kernels (default: 0)")
    add(
        "--measure",
        choices=("auto", "yes", "no", "recorded"),
        default="auto",
        help="rank by measurement: where this GPU is present (auto, the default), always, never; "
        "of a library `recorded` takes what DIR.records.jsonl has, measured elsewhere perhaps",
    )
    add_cluster(parser)
    add(
        "--records",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measurements of earlier runs, packed or not: what was fast in them is a candidate of "
        "a library, listed or not, and its times are believed until it is measured",
    )
    add(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="measure a library's kernels for so long at most, what matters most first; the same "
        "command goes on (default: no limit)",
    )
    add(
        "--looks",
        type=Path,
        metavar="FILE",
        help="keep the candidates of a library's sizes in this file, or take them from it: chosen "
        "on one machine, measured on another",
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
        help="do not run each kernel's PTX in the emulator (a kernel takes a core "
        "from half a second, GEMM, to 20, sampling; what was right before is not run again)",
    )
    add("--jobs", type=int, help="compiler processes (default: one per core)")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, brief="sample")
    what_is_sampled(parser)
    how_it_is_ranked(parser)
    args = parser.parse_args(argv)
    if not 1 <= args.k <= MOST:
        parser.error(f"-k must be from 1 to {MOST}, not {args.k}")
    if args.jobs is not None and args.jobs < 1:
        parser.error(f"--jobs must be positive, not {args.jobs}")
    if args.sharpness is not None and args.source == "reward":
        parser.error("--sharpness is of the policy's draws, and --from reward has none")
    if args.temperature is not None and (args.sharpness is not None or args.library):
        parser.error("--temperature goes with neither --sharpness nor --library")
    if args.temperature is not None and not args.temperature > 0:
        parser.error(f"--temperature must be positive, not {args.temperature}")
    if args.sharpness is not None and not 0 <= args.sharpness < float("inf"):
        parser.error(f"--sharpness must be a number of at least 0, not {args.sharpness}")
    if args.stop_at is not None and not 0 < args.stop_at <= 1:
        parser.error(f"--stop-at must be a share of 1, as 0.95, not {args.stop_at}")
    if args.stop_at is not None and args.measure == "no":
        parser.error("--stop-at ends measuring, and --measure no does not measure")
    if args.members is not None and not (args.library and 1 <= args.members <= 64):
        parser.error("--members is of --library, from 1 to 64")
    if args.chain is not None and not args.library:
        parser.error("--chain is of a --library")
    if args.library and (args.out or args.stop_at is not None):
        parser.error("--out and --stop-at are of one workload's kernels, not of a --library")
    of_library = args.looks or args.records or args.time_limit or args.measure == "recorded"
    if not args.library and of_library:
        parser.error("--looks, --records, --time-limit, --measure recorded are of a --library")
    if args.time_limit is not None and not args.time_limit > 0:
        parser.error(f"--time-limit must be positive, not {args.time_limit}")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, not {args.seed}")
    return args


def run(args: argparse.Namespace) -> int:
    from ptxflow.compiler.backend import ptxas
    from ptxflow.env.tasks.arguments import (
        UsageError,
        find_device,
        find_family,
        find_problem,
        find_whole_space,
    )
    from ptxflow.env.tasks.definition import load
    from ptxflow.env.tasks.definition_table import definition_table
    from ptxflow.eval.sample.folder import OutputFolder

    if args.definition == "list":
        print(definition_table())
        return 0
    device = find_device(args.device)
    definition = load(args.definition)
    find_family(definition)  # before the axes: an op without kernels has no right ones
    if args.library:
        return run_library(args, definition, device)
    axes = choose_axes(definition, args.axes)
    family, problem = find_problem(definition, axes)
    gpu = choose_gpu(args.measure, device.name)
    ptxas.executable()
    out = args.out or Path("out", f"{definition.name}-{_text(axes, '-', '')}-{device.name}")
    if args.space == "wide" and family.wide is family:
        raise UsageError(f"--space wide: {family.name} has no wide space")
    from ptxflow.eval.sample.draws import takes_wide

    wide = takes_wide(args.space, args.checkpoint, device.name, definition)
    space = find_whole_space(family.wide if wide else family, problem, device)
    with OutputFolder(out, marker="summary.json") as folder:
        result = sample_kernels(args, definition, axes, space, gpu)
        write(result, definition, folder)
    report(result, out)
    return 1 if result.refused or any(s.wrong for s in result.samples) else 0


def run_library(args: argparse.Namespace, definition: "Definition", device: "Device") -> int:
    """As `run`, for ranges of sizes."""
    from ptxflow.compiler.backend import ptxas
    from ptxflow.eval.sample.ranges import find_ranges

    ranges, remark = find_ranges(definition, args.axes)
    if remark:
        print(remark, file=sys.stderr)
    gpu = choose_gpu(args.measure, device.name)
    ptxas.executable()
    from ptxflow.eval.sample.draws import usual_checkpoint
    from ptxflow.eval.sample.library_run import Asked, make_library

    checkpoint = args.checkpoint or usual_checkpoint(device.name, definition, *ranges.ends)
    sharpness = {} if args.sharpness is None else {"sharpness": args.sharpness}
    asked = Asked(
        args.library, ranges, device, checkpoint, most=args.members or 8, k=args.k,
        source=args.source, seed=args.seed, emulate=not args.no_emulate, jobs=args.jobs,
        gpu=gpu.name if gpu else None, recorded=args.measure == "recorded",
        believed=tuple(args.records or ()), seconds=args.time_limit or math.inf, looks=args.looks,
        wide=args.space == "wide",
        chained=None if args.chain is None else tuple(args.chain), **sharpness,
    )  # fmt: skip
    make_library(asked)
    return 0


def sample_kernels(
    args: argparse.Namespace,
    definition: "Definition",
    axes: dict[str, int],
    space: "Space | RelationSpace",
    gpu: "GpuInfo | None",
) -> "Run":
    """Choose strategies, compile and rank them; imports torch, seconds after what was asked for is
    known to make sense. Of a space that is not listed only draws of the policy are scored, and what
    a search of the reward finds."""
    from ptxflow.env.reward import TAU
    from ptxflow.env.tasks.arguments import find_family
    from ptxflow.eval.sample.draws import of_wide, scored, usual_checkpoint
    from ptxflow.eval.sample.pipeline import compile_and_rank
    from ptxflow.eval.sample.selection import POLICY, REWARD, choose, reward_alone
    from ptxflow.gfn.inference import POOL, SHARPNESS, at_temperature, load_policy, with_family

    wide = bool(space.family.implied)
    checkpoint = args.checkpoint or usual_checkpoint(space.device.name, definition, axes, wide=wide)
    tau, sharpness = TAU, SHARPNESS if args.sharpness is None else args.sharpness
    if args.k > len(space):
        print(f"-k {args.k}: taking all {len(space):,} valid strategies", file=sys.stderr)
    policy, source = load_policy(checkpoint), args.source
    drawn, told = True, args.sharpness is not None or args.temperature is not None
    if wide and not of_wide(checkpoint, find_family(definition)):
        lacks, asked = f"wide {space.family.name}", POLICY if told else source
        print(reward_alone(checkpoint, lacks, asked), file=sys.stderr)
        drawn, source = False, REWARD
    elif not policy.knows(space.family.name):
        print(reward_alone(checkpoint, space.family.name, source), file=sys.stderr)
        policy, source = with_family(policy, space), REWARD
    if args.temperature is not None and drawn:
        tau, sharpness = at_temperature(policy, space.family.name, args.temperature)
    about = policy.about if drawn else {}
    pool, asked_for, sure = scored(policy, space, args.k, args.seed, sharpness, tau, drawn)
    if asked_for:
        told_draws = f" and {max(args.k, POOL)} draws of the policy" if drawn else ""
        print(f"{len(space):,} strategies are valid: {asked_for:,} that a search of the reward "
              f"asked for{told_draws} are scored, and the best is the best of these",
              file=sys.stderr)  # fmt: skip
    chosen = choose(about, definition, pool.space, pool.log_probs, pool.drawn, args.k, source, sure)
    for remark in chosen.remarks:
        print(remark, file=sys.stderr)
    return compile_and_rank(
        definition, axes, pool.space, chosen, gpu, valid=len(space), seed=args.seed,
        checkpoint=checkpoint.name, jobs=args.jobs, emulate=not args.no_emulate,
        stop_at=args.stop_at,
    )  # fmt: skip


def choose_axes(definition: "Definition", texts: Sequence[str]) -> dict[str, int]:
    """The variable axes, as given or by default; says so where it is the default."""
    from ptxflow.env.tasks.arguments import UsageError, parse_axes
    from ptxflow.env.tasks.definition import DefinitionError
    from ptxflow.env.tasks.training_set import typical_axes

    given = {}
    for name, values in parse_axes(texts).items():
        if len(values) > 1:
            raise UsageError(f"axis {name!r} has {len(values)} values; sample one workload a run")
        given[name] = values[0]
    usual = typical_axes(definition) or {}
    if usual and not given:
        given = usual
        print(f"--axes not given: taking {_text(given, ' ', '=')}", file=sys.stderr)
    try:
        bound = definition.bind(given)
    except DefinitionError as error:
        if not usual or given.keys() >= set(definition.var_axes):
            raise
        raise UsageError(f"{error}; such as --axes {_text(usual, ' ', '=')}") from None
    return {name: bound[name] for name in definition.var_axes}


def choose_gpu(measure: str, device: str) -> "GpuInfo | None":
    """The GPU to measure on, or None; `yes` insists on one that runs the device's code."""
    from ptxflow.compiler.backend.runtime import GpuInfo, RuntimeUnavailable, gpu_info, require_gpu
    from ptxflow.compiler.device import DEVICES

    if measure in ("no", "recorded"):
        return None
    if os.environ.get(CLUSTER):
        from ptxflow.eval.bench.campaign import machines

        with machines(DEVICES[device]) as (workers, _):
            return GpuInfo.from_json(workers[0].gpu)
    try:
        if measure == "yes":
            return require_gpu(DEVICES[device])
        info = gpu_info()
    except RuntimeUnavailable as error:
        if measure == "yes":
            raise RuntimeUnavailable(f"--measure yes: {error}") from None
        return None
    return info if info.kind == device else None


def write(result: "Run", definition: "Definition", folder: Path) -> None:
    """All files; the Solution is of the best kernel that is not known to be wrong."""
    from ptxflow.compiler.library.member import single
    from ptxflow.eval.sample.report import write_run
    from ptxflow.eval.sample.solution import solution

    right = [s for s in result.samples if not s.wrong]
    best = right[0] if right else None
    made = None
    if best is not None:
        text = f"{result.title}: best of {len(result.samples)} sampled, by {result.ranked_by}"
        made = solution(*single(definition.to_json(), best.kernel), text)
    write_run(result, folder, made)


def report(result: "Run", out: Path) -> None:
    from ptxflow.eval.sample.report import sample_table

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
    from ptxflow.eval.bench.campaign import FAILURES

    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except (*FAILURES, BadInput) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk, above all
        print(f"sample: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "; the same command goes on" if args.library else ""
        print(f"sample: interrupted; nothing was written{goes_on}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
