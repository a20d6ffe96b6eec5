"""What the loop, its gaps and its knowledge are worth, replayed on recorded times.

`python -m ptxflow.eval.tune.worth [--into PAGE]` plays sessions on the sub-spaces of committed
records whose every strategy was measured and that no training saw. No GPU is needed, and none is
claimed: the times are those of the campaigns that measured them. There are no counters in records,
so gaps are those of the floors. Knowledge is `champions.jsonl.xz`, less what a row says is left
out. Elsewhere nothing was measured whole: a workload's space on an H100 is its 16 strategies, and
of those that sessions tuned on an H200 the 64 rivals, draws of the policy that no session chose.

Pairs have the same seed and the same draws to begin with: of the policy, or uniform ones, as for a
definition of which no policy knows anything. A ratio is the geometric mean over workloads of the
measurements to 99% of the better session's best, with over without; its interval is over workloads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.command import Parser, reports
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.env.measurements import by_workload, load_measurements
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import positive_int
from ptxflow.eval.bench.markdown import markdown, placed
from ptxflow.eval.sample.draws import default_checkpoint
from ptxflow.eval.study.ablation import MEASUREMENTS
from ptxflow.eval.study.metrics import ends
from ptxflow.eval.study.search.optimisers import Lfbo
from ptxflow.eval.study.search.plain import Drawn
from ptxflow.eval.study.search.play import Method, play
from ptxflow.eval.study.search.process import Process
from ptxflow.eval.study.search.replay import Replay, measured_part, read_replays
from ptxflow.eval.tune import champions
from ptxflow.eval.tune.champions import Champion, definition_of
from ptxflow.eval.tune.gaps import NEAR_PEAK
from ptxflow.eval.tune.knowledge import committed
from ptxflow.eval.tune.method import STARTS, Tuner, tuners
from ptxflow.gfn.inference import SHARPNESS, load_policy, part_log_probs

Array = NDArray[np.float64]
BUDGET, SHOWN = 64, (8, 12, 16, 24, 32, 48, 64)
GOAL, RESAMPLED, SESSIONS = 0.99, 2000, 50
TOLD, LEAST = 0.03, 12  # a gain that a session should not have missed; strategies of a part
UNIFORM = ", uniform draws"
LOOP, OTHERS = "tuning loop", "tuning loop + knowledge"
SOURCES = {
    "h200": sorted(MEASUREMENTS.glob("h200-*.jsonl.xz")),
    "h200, 64 draws of each": [MEASUREMENTS.parent / "results" / "tune-rivals-h200.jsonl.xz"],
    "h100": sorted(MEASUREMENTS.glob("h100-*.jsonl.xz")),
}
NEARBY, FROM, ABROAD = (f"{OTHERS} of {what}" for what in (
    "all other workloads", "the other device", "the other device, its definition too"
))  # fmt: skip


@dataclass(frozen=True)
class Field:
    """A sub-space with what its methods know: log-probabilities [n] of a policy; `part` where it
    is what happened to be measured."""

    replay: Replay
    log_probs: Array
    part: bool = False


def best_so_far(method: Method, field: Field, seed: int) -> Array:
    """[BUDGET] over the optimum."""
    replay = field.replay
    asked = play(method, replay, min(BUDGET, len(replay.times)), seed)
    times = np.minimum(replay.times, replay.slowest)[asked]
    whole = np.append(times, np.full(BUDGET - len(times), times[-1]))
    return np.asarray(np.minimum.accumulate(whole) / replay.optimum)


def known_of(field: Field, rows: Sequence[Champion]) -> dict[str, list[Strategy]]:
    """Strategies to begin with, by what is known."""
    space, problem = field.replay.space, field.replay.space.problem
    here = problem.definition, champions.axes_of(problem)
    own = [r for r in rows if r.device == space.device.name]
    abroad = [r for r in rows if r.device != space.device.name]
    found = {
        OTHERS: [r for r in own if r.definition != problem.definition],
        NEARBY: [r for r in own if (r.definition, r.axes) != here],
        FROM: [r for r in abroad if r.definition != problem.definition],
        ABROAD: abroad,
    }
    chosen = {name: champions.nearest(space, of, STARTS // 2) for name, of in found.items()}
    return {name: [champions.legal(space, r.choices) for r in of] for name, of in chosen.items()}


def methods_on(field: Field) -> dict[str, Method]:
    """By what is shown. The loop's forms have one name, of which their draws follow."""
    flat = replace(field, log_probs=np.zeros(len(field.log_probs)))
    out: dict[str, Method] = {} if field.part else {"LFBO": Lfbo()}
    for own, tail in ((field, ""), (flat, UNIFORM)):
        for tuner in tuners(own.replay, own.log_probs)[: 1 if field.part else 2]:
            out[tuner.name + tail] = replace(tuner, name=LOOP)
        if not field.part:
            out["policy" + tail] = Drawn("policy", own.log_probs, SHARPNESS)
            out["policy + feedback" + tail] = Process("with feedback", own.log_probs, SHARPNESS)
    return out


def played(field: Field, known: Mapping[str, Sequence[Strategy]], seeds: int) -> dict[str, Array]:
    """[seeds, BUDGET] of every method on one sub-space, and of the loop with what is known; where
    that is nothing, a session goes as without."""
    methods = methods_on(field)
    found = {
        name: np.array([best_so_far(method, field, seed) for seed in range(seeds)])
        for name, method in methods.items()
    }
    for what, strategies in known.items():
        for tail in ("", UNIFORM) if what == OTHERS else ("",):
            loop = methods[LOOP + tail]
            assert isinstance(loop, Tuner)
            with_it = replace(loop, known=strategies)
            found[what + tail] = found[LOOP + tail] if not strategies else np.array(
                [best_so_far(with_it, field, seed) for seed in range(seeds)]
            )  # fmt: skip
    return found


def losses(best: Mapping[str, Sequence[Array]]) -> str:
    """What the best so far loses, by measurements: geometric means over workloads and seeds."""
    rows = []
    for name, of in best.items():
        curve = np.exp(np.mean([np.log(b).mean(0) for b in of], 0)) - 1
        rows.append([name, *(f"{100 * curve[n - 1]:.2f}%" for n in SHOWN)])
    return markdown(["method", *map(str, SHOWN)], rows)


def measurements(ours: Array, theirs: Array) -> float:
    """ln(measurements that ours needs over those that theirs needs), the mean over seeds."""
    goal = np.minimum(ours[:, -1], theirs[:, -1])[:, None] / GOAL
    needed = [
        np.where((b <= goal).any(1), (b <= goal).argmax(1) + 1, BUDGET + 1) for b in (ours, theirs)
    ]
    return float(np.log(needed[0] / needed[1]).mean())


def interval(logs: Array) -> str:
    """The geometric mean and its 95% over workloads."""
    rng = np.random.default_rng(0)
    drawn = logs[rng.integers(len(logs), size=(RESAMPLED, len(logs)))].mean(1)
    low, high = ends(np.exp(drawn))
    return f"{np.exp(logs.mean()):.2f}, {low:.2f} to {high:.2f}"


def pairs(
    device: str, best: Mapping[str, Sequence[Array]], known: Mapping[str, Sequence[bool]]
) -> list[list[str]]:
    """Rows: sessions with knowledge, or with gaps, beside those without; where nothing was known
    is left out, and counted."""
    rows = []
    for tail in ("", UNIFORM):
        for ours, theirs in (*((what, LOOP) for what in known), (LOOP, f"{LOOP}, cycles only")):
            if not {ours + tail, theirs + tail} <= best.keys():
                continue
            both = list(zip(best[ours + tail], best[theirs + tail], strict=True))
            has = np.array(known.get(ours, [True] * len(both)))
            if not has.any():
                continue
            logs = np.array([measurements(a, b) for a, b in both])
            ends_at = np.array([np.log(a[:, -1] / b[:, -1]).mean() for a, b in both])
            last = f"{np.exp(ends_at[has].mean()):.4f}"
            rows.append([device, ours + tail, theirs + tail, f"{has.sum()} of {len(has)}",
                         interval(logs[has]), interval(logs), last])  # fmt: skip
    return rows


def near_peak(device: str) -> list[list[str]]:
    """Rows of all workloads, and of those where no recorded kernel is faster than the attainable
    time: sessions that begin at STARTS recorded kernels, drawn SESSIONS times, of which the best is
    at NEAR_PEAK, so that they end; and by how much the best recorded kernel is faster."""
    found: dict[str, list[list[float]]] = {device: [], f"{device}, no record beats a floor": []}
    for one in champions.observed(sorted(MEASUREMENTS.glob(f"{device}-*.xz"))):
        us, rng = 1e6 * one.seconds, np.random.default_rng(0)
        attainable = champions.floors_of(one.problem, one.device).attainable
        bests = [us[rng.permutation(len(us))[:STARTS]].min() for _ in range(SESSIONS)]
        gains = [float(b / us.min() - 1) for b in bests if b * NEAR_PEAK <= attainable]
        if gains:
            for name in list(found)[: 1 + (us.min() >= attainable)]:
                found[name].append(gains)
    rows = []
    for name, of in found.items():
        gains = [g for one in of for g in one]
        most, over = max(gains, default=0.0), [sum(g > TOLD for g in one) for one in of]
        rows.append([name, str(len(of)), str(len(gains)), f"{most:.1%}", str(sum(over)),
                     str(sum(map(bool, over)))])  # fmt: skip
    return rows


@reports("worth")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.tune.worth", description=__doc__)
    add = parser.add_argument
    add("--seeds", type=positive_int, default=3)
    add("--workloads", default="", help="only those whose names contain this")
    add("--into", type=Path, metavar="PAGE.md", help="renew the tables of this page, too")
    args = parser.parse_args(argv)
    rows = [r for r in committed() if isinstance(r, Champion)]
    tables: list[list[str]] = []
    shown = ""
    for shown_as, paths in SOURCES.items():
        fields = find_fields(paths, args.workloads)
        best: dict[str, list[Array]] = {}
        known: dict[str, list[bool]] = {}
        for field in tqdm(fields, desc=f"play {shown_as}"):
            begin = known_of(field, rows)
            for name, of in played(field, begin, args.seeds).items():
                best.setdefault(name, []).append(of)
            for what, strategies in begin.items():
                known.setdefault(what, []).append(bool(strategies))
        if fields:
            shown = shown or losses({n: of for n, of in best.items() if f"{OTHERS} of" not in n})
            tables += pairs(shown_as, best, known)
    found = {
        "losses": shown,
        "pairs": markdown(["on", "with", "without", "workloads", "measurements, with over without, "
                           "95%", "of all workloads", "time of the last best"], tables, 3),
        "peak": markdown(["on", "workloads", "sessions", "missed at most", "missed over 3%",
                               "of workloads"],
                              [row for d in ("h200", "h100") for row in near_peak(d)], 1),
    }  # fmt: skip
    if args.into:
        write_whole(args.into, placed(args.into.read_text(), found))
    print("\n\n".join(found.values()))
    return 0


def find_fields(paths: Sequence[Path], part: str) -> list[Field]:
    """The sub-spaces of a device's records that no training saw, or where none was measured whole
    all that was measured, with what the device's policy says of them."""
    replays = [r for r in read_replays(paths) if r.kind != "trained"]
    held = (
        g for g in by_workload(load_measurements(paths)).values() if definition_of(g[0].definition)
    )
    parts = (
        [] if replays else [r for g in held if (r := measured_part(g)) and len(r.times) >= LEAST]
    )
    policy, found = cache(load_policy), []
    for replay in [*replays, *parts]:
        if part in replay.name:
            space = replay.space
            whole = enumerate_space(space.family, space.problem, space.device)
            own = policy(default_checkpoint(space.device.name))
            found.append(Field(replay, part_log_probs(own, whole, space), not replays))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
