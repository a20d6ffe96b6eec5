"""What each decision of a chosen strategy is worth, and whether its kernel shows it.

Each decision alone is put back to its default: the first choice of its row, the plainest, that is
valid with all others as they are. It is judged by two things: the change in time, from measurements
or on this machine's GPU, and what differs between the two kernels, in machine code, resources and
launch. `ptxflow ablation --help` has more.
"""

import argparse
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxflow.command import Parser, add_cluster, reports
from ptxflow.compiler.backend import sass
from ptxflow.compiler.backend.ptxas import PtxasError
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Choice, Strategy
from ptxflow.compiler.launch import Launch, evaluate
from ptxflow.env.measurements import Measurement, by_workload, load_measurements
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.tasks.arguments import (
    UsageError,
    find_device,
    find_problem,
    find_space,
    parse_axes,
    positive_int,
    read_strategies,
)
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.bench.campaign import FAILURES
from ptxflow.eval.bench.candidates import compile_all, listed_workload
from ptxflow.eval.bench.measurer import open_measurer, seconds
from ptxflow.eval.study.attribution import EFFECT
from ptxflow.eval.study.metrics import plain
from ptxflow.eval.study.runs import Runs
from ptxflow.eval.study.search.replay import Replay, relative_times
from ptxflow.eval.study.tables import ablation as ablation_table

MEASUREMENTS = Path(__file__).resolve().parents[1] / "measurements"
SHOWN = 3  # differences of two kernels that are shown
#: opcodes that say what a decision did: memory, matrix products, barriers, exchanges
TELLING = re.compile(
    r"LD|ST|ATOM|RED|UTMA|UBLK|U?CGA|HGMMA|HMMA|UTC|SYNCS|BAR|SHFL|MUFU|CCTL|WARPGROUP|USETMAX|MOVM"
)
Times = Mapping[tuple[tuple[str, Any], ...], float]  # by the choices, sorted; in any one unit


@dataclass(frozen=True)
class Face:
    """What a compiled kernel shows: techniques with their counts, its instructions in order, the
    bytes of its code, its launches, what ptxas says it takes."""

    techniques: Mapping[str, int]
    instructions: tuple[str, ...]
    code: bytes
    launches: tuple[Mapping[str, Any], ...]
    resources: Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """A decision put back alone. `other` is None where no other choice is valid.

    change    time over the chosen strategy's, less 1; None where not both were measured
    evidence  what differs between the kernels, the most telling first
    verdict   see `judge`
    """

    decision: str
    chosen: Choice
    other: Choice | None
    verdict: str
    change: float | None = None
    evidence: tuple[str, ...] = ()


def ablate(space: Space, strategy: Strategy, times: Times, jobs: int | None = None) -> list[Step]:
    """A step for each decision, in their order; `times` of what was measured.

    The chosen strategy must compile: what its compilation raises is raised.
    """
    needed = beside(space, strategy)
    built = compile_all([(space.problem, s) for s in needed], space.device, jobs)
    return steps_of(space, strategy, times, dict(zip(needed, built, strict=True)))


def beside(space: Space, strategy: Strategy) -> list[Strategy]:
    """The strategy, and those that differ from it in a decision's default."""
    others = (put_back(space, strategy, d.name) for d in space.decisions)
    return list(dict.fromkeys([strategy, *(s for s in others if s is not None)]))


def steps_of(
    space: Space,
    strategy: Strategy,
    times: Times,
    outcomes: Mapping[Strategy, CompiledKernel | Exception],
) -> list[Step]:
    """As `ablate`, of what has been compiled: all of `beside`."""
    base = outcomes[strategy]
    if isinstance(base, Exception):
        raise base
    faces = look([k for k in outcomes.values() if isinstance(k, CompiledKernel)])
    steps = []
    for name in (d.name for d in space.decisions):
        chosen, other = getattr(strategy, name), put_back(space, strategy, name)
        if other is None or other == strategy:
            verdict = "no other is valid" if other is None else "is the default"
            steps.append(Step(name, chosen, None, verdict))
            continue
        value, made = getattr(other, name), outcomes[other]
        if isinstance(made, Exception):
            steps.append(Step(name, chosen, value, "does not compile", None, (str(made)[:100],)))
            continue
        change = change_in(times, strategy, other)
        found = differences(faces[strategy], faces[other])
        steps.append(Step(name, chosen, value, judge(change, found), change, tuple(found[:SHOWN])))
    return steps


@dataclass(frozen=True)
class Taken:
    """A strategy that is taken apart: of a replay, in the whole space of its problem."""

    replay: Replay
    space: Space
    strategy: Strategy
    gap: float
    drawn: bool


def ablations(
    replays: Sequence[Replay], runs: Sequence[Runs], measured: Iterable[Measurement], jobs: int
) -> list[dict[str, Any]]:
    """Of one workload of each family, a held-out one where there is any: the best of the first 8
    that a policy drew in its first run, or the optimum where no policy played, taken apart."""
    by_place = by_workload(measured)
    taken = chosen_of(replays, runs)
    needed = [[(t.space.problem, s) for s in beside(t.space, t.strategy)] for t in taken]
    built: dict[Any, CompiledKernel | Exception] = {}
    for device in dict.fromkeys(t.space.device for t in taken):  # all at once: workers take time
        asked = [job for t, own in zip(taken, needed, strict=True) if t.space.device == device
                 for job in own]  # fmt: skip
        outcomes = compile_all(asked, device, jobs)
        built |= {(device.name, *job): o for job, o in zip(asked, outcomes, strict=True)}
    out = []
    for t, own in zip(taken, needed, strict=True):
        space, device = t.space, t.space.device
        axes = {n: space.problem[n] for n in load(space.problem.definition).var_axes}
        place = space.problem.definition, tuple(sorted(axes.items())), device.name
        outcomes_of = {job[1]: built[device.name, *job] for job in own}
        refused, steps = "", []
        try:
            steps = steps_of(space, t.strategy, relative_times(by_place[place]), outcomes_of)
        except (CompileError, PtxasError) as error:  # measured once, and by another compiler
            refused = str(error)
        out.append({
            "workload": t.replay.name, "device": device.name, "family": space.family.name,
            "key": t.strategy.key, "by": "policy" if t.drawn else "optimum",
            "gap": plain(t.gap), "refused": refused, "steps": [asdict(s) for s in steps],
        })  # fmt: skip
    return out


def chosen_of(replays: Sequence[Replay], runs: Sequence[Runs]) -> list[Taken]:
    """One strategy of each family, by the families' names."""
    drawn = {r.workload: r.asked[0, :8] for r in runs if r.method == "policy"}
    chosen: dict[str, Replay] = {}
    for replay in sorted(replays, key=lambda r: (r.kind == "trained", r.name)):
        chosen.setdefault(replay.space.family.name, replay)
    out = []
    for _, replay in sorted(chosen.items()):
        space = replay.space
        among = drawn.get(replay.name, np.arange(len(space)))
        best = int(among[np.argmin(replay.times[among])])
        whole = enumerate_space(space.family, space.problem, space.device)
        strategy = space.strategy(int(space.codes[best]))
        gap = float(replay.times[best]) / replay.optimum - 1
        out.append(Taken(replay, whole, strategy, gap, replay.name in drawn))
    return out


def put_back(space: Space, strategy: Strategy, name: str) -> Strategy | None:
    """The strategy with the first choice of a decision that is valid with all others as they are;
    None where that is only the one it has and not the first of its row."""
    (decision,) = (d for d in space.decisions if d.name == name)
    at, codes = space.code(strategy), space.codes
    place = [d.name for d in space.decisions].index(name)
    stride, size = int(space.strides[place + 1]), space.sizes[place]
    digit = at // stride % size
    alike = at + (np.arange(size) - digit) * stride
    valid = np.flatnonzero(np.isin(alike, codes))
    first = int(valid[0])
    if first == digit:
        return strategy if len(valid) > 1 or digit == 0 else None
    return strategy.replace(**{name: decision.choices[first]})


def change_in(times: Times, strategy: Strategy, other: Strategy) -> float | None:
    """Time of the other over the strategy's, less 1; None where not both are known."""
    ours, theirs = (times.get(tuple(sorted(s.choices))) for s in (strategy, other))
    if ours is None or theirs is None or not np.isfinite([ours, theirs]).all():
        return None
    return plain(theirs / ours - 1)


def judge(change: float | None, found: Sequence[str]) -> str:
    """`not implemented`: the kernels are the same. `effective` or `harmful`: they differ, and the
    default is slower or faster by EFFECT at least. `ineffective`: they differ, to no effect.
    `realised`: they differ, and the times of both are not known."""
    if not found:
        return "not implemented"
    if change is None:
        return "realised"
    return "ineffective" if abs(change) < EFFECT else "effective" if change > 0 else "harmful"


def look(kernels: Sequence[CompiledKernel]) -> dict[Strategy, Face]:
    """By strategy; all are disassembled together."""
    if not kernels:
        return {}
    bodies = sass.disassemble_together([k.cubin for k in kernels], kernels[0].device.arch)
    return {
        k.strategy: Face(
            k.sass.counts,
            tuple(i.text for i in body),
            sass.code(k.cubin),
            tuple(_launch(part, dict(k.problem.axes)) for part in (k.launch, *k.launch.then)),
            {"registers": k.usage.registers, "static smem": k.usage.smem},
        )
        for k, body in zip(kernels, bodies, strict=True)
    }


def _launch(launch: Launch, axes: Mapping[str, int]) -> dict[str, Any]:
    grid = "x".join(str(evaluate(expr, axes)) for expr in launch.grid)
    return {
        "grid": grid,
        "block": launch.block,
        "cluster": "x".join(map(str, launch.cluster)),
        "smem": launch.smem_bytes,
        "parameters": json.dumps([asdict(p) for p in launch.params]),
    }


def differences(ours: Face, other: Face) -> list[str]:
    """What differs, as in `TMA tensor load 4, by default none`; empty where the kernels are alike.

    First techniques that only one has, then launch and resources, then counts of techniques, of
    instructions that move data or multiply matrices, and of others.
    """
    appear, counts = _counted(ours.techniques, other.techniques)
    opcodes = [*itertools.chain(*_counted(_opcodes(ours), _opcodes(other)))]
    opcodes.sort(key=lambda text: TELLING.match(text) is None)
    found = [*appear[: SHOWN - 1], *_launches(ours, other)]
    found += [_difference(n, v, other.resources[n]) for n, v in ours.resources.items()
              if v != other.resources[n]]  # fmt: skip
    found += [*appear[SHOWN - 1 :], *counts, *opcodes]
    if not found and ours.code != other.code:
        found = [_first(ours, other)]
    return list(dict.fromkeys(found))


def _opcodes(face: Face) -> Mapping[str, int]:
    return Counter(text.split()[0].rstrip(";") for text in face.instructions)


def _first(ours: Face, other: Face) -> str:
    """Of kernels with the same instructions in the same numbers, where operands first differ."""
    pairs = [(a, b) for a, b in zip(ours.instructions, other.instructions, strict=True) if a != b]
    same = [(a, b) for a, b in pairs if a.split()[0] == b.split()[0]]
    telling = [(a, b) for a, b in same if TELLING.match(a)]
    for a, b in (telling or same)[:1]:
        return f"`{a.rstrip(' ;')}`, by default `{b.rstrip(' ;')}`"
    return "the order of instructions" if pairs else "scheduling of the same instructions"


def _counted(ours: Mapping[str, int], other: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """What only one has, and what both have in other numbers; the largest differences first."""
    appear: list[str] = []
    counts: list[str] = []
    differ = {n: (ours.get(n, 0), other.get(n, 0)) for n in sorted({*ours, *other})}
    for name, (x, y) in sorted(differ.items(), key=lambda item: -abs(item[1][0] - item[1][1])):
        if x != y:
            (counts if x and y else appear).append(_difference(name, x or "none", y or "none"))
    return appear, counts


def _launches(ours: Face, other: Face) -> list[str]:
    found = []
    if len(ours.launches) != len(other.launches):
        found.append(_difference("launches", len(ours.launches), len(other.launches)))
    for a, b in zip(ours.launches, other.launches, strict=False):
        found += [_difference(n, a[n], b[n]) for n in a if a[n] != b[n] and n != "parameters"]
        if a["parameters"] != b["parameters"]:
            found.append("tensor maps or other parameters")
    return found


def _difference(name: str, ours: Any, other: Any) -> str:
    return f"{name} {ours}, by default {other}"


# The command -------------------------------------------------------------------------------------


def replayed(paths: Iterable[Path], definition: str, axes: Mapping[str, int], device: str
             ) -> list[Measurement]:  # fmt: skip
    """What the files hold of one workload."""
    place = definition, tuple(sorted(axes.items())), device
    return [m for m in load_measurements(paths) if m.workload == place]


def measured_here(
    definition: Definition, axes: Mapping[str, int], space: Space, chosen: Sequence[Strategy],
    path: Path,
) -> Times:  # fmt: skip
    """Times of the strategies on this machine's GPU, all in the same rounds."""
    family, device = space.family, space.device
    candidates = listed_workload(definition, axes, device, chosen, "ablation").candidates
    with open_measurer(path, device, [family], "ptxflow ablation --measure") as measure:
        screened = zip(candidates, measure(candidates), strict=True)
        right = [c for c, record in screened if record.status == "ok"]
        records = measure.together(right)
    return {tuple(sorted(r.strategy["choices"].items())): seconds(r) for r in records}


def choose(
    rows: Sequence[tuple[Definition, dict[str, int], Strategy]], args: argparse.Namespace
) -> tuple[Definition, dict[str, int], Strategy | None]:
    """What is ablated: the first strategy of the file that is of the workload asked for."""
    axes = {}
    for name, values in parse_axes(args.axes).items():
        if len(values) > 1:
            raise UsageError(f"axis {name!r} has {len(values)} values; one strategy is ablated")
        axes[name] = values[0]
    if not rows:
        if not args.definition or not axes:
            raise UsageError("give --strategy FILE, or --definition and --axes")
        return load(args.definition), axes, None
    for definition, bound, strategy in rows:
        own = {name: bound[name] for name in definition.var_axes}
        if args.definition in (None, definition.name) and axes in ({}, own):
            return definition, own, strategy
    raise UsageError(f"{args.strategy}: no strategy of this definition and these axes")


def run(args: argparse.Namespace) -> int:
    rows = read_strategies(args.strategy) if args.strategy else []
    definition, axes, strategy = choose(rows, args)
    device = find_device(args.device)
    space = find_space(*find_problem(definition, axes), device)
    times: Times = {}
    if strategy is None or not args.measure:
        files = args.measurements or sorted(MEASUREMENTS.glob("*.jsonl.xz"))
        times = relative_times(replayed(files, definition.name, axes, device.name))
    if strategy is None:
        strategy = fastest(space, times)
    if reasons := space.family.refusals(space.problem, strategy, device):
        raise UsageError(f"{strategy.key} is not legal on {device.name}: {'; '.join(reasons)}")
    if args.measure:
        times = measured_here(definition, axes, space, beside(space, strategy), args.records)
    steps = ablate(space, strategy, times, args.jobs)
    where = " ".join([definition.name, *(f"{n}={v}" for n, v in axes.items())])
    print(f"{where} on {device.name.upper()}, strategy {strategy.key}\n")
    print(ablation_table([asdict(s) for s in steps]))
    return 0


def fastest(space: Space, times: Times) -> Strategy:
    """Of the measured strategies that are valid today; UsageError where there is none."""
    names = [d.name for d in space.decisions]
    for key in sorted(times, key=times.__getitem__):
        choices = dict(key)
        if set(choices) == set(names):
            found = Strategy(space.family.name, tuple((n, choices[n]) for n in names))
            if not space.family.refusals(space.problem, found, space.device):
                return found
    raise UsageError(f"{space.problem.definition}: nothing was measured there; give --strategy")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="ptxflow ablation",
        description=__doc__.partition("\n")[2],
        epilog="""examples:
  the fastest strategy that was measured of a workload:
    ptxflow ablation --definition gemm_n5120_k2048 --axes M=17
  the best of what sample.py wrote, timed here, all kernels in the same rounds:
    ptxflow ablation --strategy out/NAME/summary.json --measure

exit code: 0 done, 2 bad input or no GPU""",
    )
    add = parser.add_argument
    add("--strategy", type=Path, metavar="FILE",
        help="what sample.py wrote, or one strategy (default: the fastest measured)")  # fmt: skip
    add("--definition", metavar="NAME", help="of env/tasks/definitions (default: the strategy's)")
    add("--axes", nargs="+", default=[], metavar="M=17", help="(default: the strategy's)")
    add("--device", default="h200", help="b200, h200 or h100 (default: h200)")
    add("--measurements", type=Path, nargs="+", metavar="FILE",
        help="times are taken from (default: all in eval/measurements)")  # fmt: skip
    add_cluster(parser)
    add("--measure", action="store_true", help="time all of them on this machine's GPU instead")
    add("--records", type=Path, default=Path("out/ablation.jsonl"), metavar="FILE",
        help="what --measure appends to (default: out/ablation.jsonl)")  # fmt: skip
    add("--jobs", type=positive_int, help="compiler processes (default: one a core)")
    return parser.parse_args(argv)


@reports("ablation", *FAILURES, sass.SassError)
def main(argv: Sequence[str] | None = None) -> int:
    return run(arguments(argv))
