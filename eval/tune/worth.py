"""What the loop, its gaps and its knowledge are worth, replayed on recorded times.

`python -m ptxflow.eval.tune.worth [--into PAGE]` plays sessions on the sub-spaces of committed
records whose every strategy was measured and that no training saw. No GPU is needed, and none is
claimed: the times are those of the campaigns that measured them. There are no counters in records,
so gaps are those of the floors. Knowledge is what sessions on *other* definitions saw of moves on
a GPU: --sessions, as `ptxflow.eval.tune.report` packs them.

Pairs have the same seed and begin with the same draws: of the policy, or uniform ones, as for a
definition of which no policy knows anything. A ratio is the geometric mean over workloads of the
measurements to 99% of the better session's best, with over without; its interval is over workloads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.command import Parser, reports
from ptxflow.compiler.files import write_whole
from ptxflow.env.space import enumerate_space
from ptxflow.env.tasks.arguments import find_device, positive_int
from ptxflow.eval.bench.markdown import markdown, placed
from ptxflow.eval.sample.draws import default_checkpoint
from ptxflow.eval.study.ablation import MEASUREMENTS
from ptxflow.eval.study.metrics import ends
from ptxflow.eval.study.search.play import Method, play
from ptxflow.eval.study.search.process import Process
from ptxflow.eval.study.search.replay import Replay, read_replays
from ptxflow.eval.tune.knowledge import Row, ended, outcomes, rows_of
from ptxflow.eval.tune.method import tuners
from ptxflow.gfn.inference import SHARPNESS, load_policy, part_log_probs

Array = NDArray[np.float64]
BUDGET, SHOWN = 64, (8, 12, 16, 24, 32, 48, 64)
GOAL, RESAMPLED = 0.99, 2000
SESSIONS = Path(__file__).parents[1] / "results" / "tune-h200.jsonl.xz"
UNIFORM = ", uniform draws"


@dataclass(frozen=True)
class Field:
    """A sub-space with what its methods know: log-probabilities [n] of a policy."""

    replay: Replay
    log_probs: Array


def best_so_far(method: Method, field: Field, seed: int) -> Array:
    """[BUDGET] over the optimum."""
    replay = field.replay
    asked = play(method, replay, min(BUDGET, len(replay.times)), seed)
    times = np.minimum(replay.times, replay.slowest)[asked]
    whole = np.append(times, np.full(BUDGET - len(times), times[-1]))
    return np.asarray(np.minimum.accumulate(whole) / replay.optimum)


def methods_on(field: Field, rows: Sequence[Row]) -> dict[str, Method]:
    """By what is shown. The loop's forms have one name, of which their draws follow."""
    flat = replace(field, log_probs=np.zeros(len(field.log_probs)))
    out: dict[str, Method] = {}
    for own, tail in ((field, ""), (flat, UNIFORM)):
        for tuner in tuners(own.replay, own.log_probs, rows):
            out[tuner.name + tail] = replace(tuner, name="tuning loop")
        out["policy + feedback" + tail] = Process("with feedback", own.log_probs, SHARPNESS)
    return out


def played(field: Field, rows: Sequence[Row], seeds: int) -> dict[str, Array]:
    """[seeds, BUDGET] of every method on one sub-space."""
    return {
        name: np.array([best_so_far(method, field, seed) for seed in range(seeds)])
        for name, method in methods_on(field, rows).items()
    }


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


def pairs(best: Mapping[str, Sequence[Array]]) -> str:
    """Sessions with knowledge, or with gaps, beside those without; an interval over workloads."""
    rows = []
    for tail in ("", UNIFORM):
        for ours, theirs in (("tuning loop + knowledge", "tuning loop"),
                             ("tuning loop", "tuning loop, cycles only")):  # fmt: skip
            both = zip(best[ours + tail], best[theirs + tail], strict=True)
            logs = np.array([measurements(a, b) for a, b in both])
            rng = np.random.default_rng(0)
            drawn = logs[rng.integers(len(logs), size=(RESAMPLED, len(logs)))].mean(1)
            low, high = ends(np.exp(drawn))
            rows.append([ours + tail, theirs + tail, f"{np.exp(logs.mean()):.2f}",
                         f"{low:.2f} to {high:.2f}"])  # fmt: skip
    return markdown(["with", "without", "measurements, with over without", "95%"], rows, 2)


@reports("worth")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.tune.worth", description=__doc__)
    add = parser.add_argument
    add("--device", default="h200")
    add("--seeds", type=positive_int, default=3)
    add("--workloads", default="", help="only those whose names contain this")
    add("--into", type=Path, metavar="PAGE.md", help="renew the tables of this page, too")
    add("--sessions", type=Path, default=SESSIONS, metavar="FILE.jsonl.xz")
    args = parser.parse_args(argv)
    fields = find_fields(find_device(args.device).name, args.workloads)
    knowledge: dict[str, list[Row]] = {}
    for session in ended(args.sessions):
        rows = rows_of(args.device, outcomes(session))
        knowledge.setdefault(session["settings"]["definition"], []).extend(rows)
    best: dict[str, list[Array]] = {}
    for field in tqdm([f for f in fields if f.replay.kind != "trained"], desc="play"):
        definition = field.replay.space.problem.definition
        others = [row for d, rows in knowledge.items() if d != definition for row in rows]
        for name, of in played(field, others, args.seeds).items():
            best.setdefault(name, []).append(of)
    found = {"losses": losses(best), "pairs": pairs(best)}
    if args.into:
        write_whole(args.into, placed(args.into.read_text(), found))
    print("\n\n".join(found.values()))
    return 0


def find_fields(device: str, part: str) -> list[Field]:
    """The sub-spaces of committed records, with what the device's policy says of them."""
    policy, found = load_policy(default_checkpoint(device)), []
    for replay in read_replays(sorted(MEASUREMENTS.glob(f"{device}-*.jsonl.xz"))):
        if part in replay.name:
            space = replay.space
            whole = enumerate_space(space.family, space.problem, space.device)
            found.append(Field(replay, part_log_probs(policy, whole, space)))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
