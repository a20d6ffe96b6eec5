"""Tune a workload in rounds: gaps, moves for the largest, branches, champion, what each is worth.

A round asks how far the best kernel is from the device's roofs (by Nsight Compute where it is, else
by the floors of compute, memory and launch), takes moves for the largest gaps, and measures kernels
that make them, beside draws: a move fixes some decisions, the rest stay or are drawn from the
policy given what is fixed; what may be fastest by all that was measured is taken. A champion's move
is taken back: it is effective, ineffective, or not to be seen in the machine code. It ends near the
roof, when rounds in a row gained nothing, or with the budget. A family's wide space has no policy:
there a session begins at draws of the listed space's and at the reward's, which completes moves.

All is kept in --state: records of every measurement, profiles, what each round saw. A session that
was stopped, or killed, is repeated from these by the same command, and measures only what is
missing. Half of the kernels that it begins with are the fastest ones known of the workloads most
like its own: of those that come with ptxflow, and of --knowledge, to which its champion is added.

Of several --workloads, sessions share the GPUs: while one is measured, others' kernels compile.

examples:
  ptxflow tune --definition gemm_n4096_k4096 --axes M=1063 --device h200
  ptxflow tune --definition rmsnorm_h4096 --device h200 --budget 32 --knowledge ~/moves.sqlite
  ptxflow tune --definition gemm_n4096_k4096 --axes M=1063 --measure no     by the reward, no GPU
  ptxflow tune --workloads many.json --rivals 64 --seconds 400 --state out/many

a workloads file: [{"definition": "gemm_n4096_k4096", "axes": {"M": 1063}}, ...]
writes into --state, of several workloads into a folder each:
  session.json   the arguments, all rounds, the champion   round-NN/analysis.md  what a round saw
  records.jsonl  every measurement (of all workloads)      champion/     PTX, cubin, Solution
  profiles.jsonl what ncu counted                          report.md     the whole session
exit codes: 0 done, 2 bad input, no GPU, or another session's --state, 130 interrupted (goes on)
"""

import argparse
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any

from tqdm import tqdm

from ptxflow.command import BadInput, Parser, add_cluster, reports
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.processes import each
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.tasks.arguments import (
    find_device,
    find_problem,
    natural_int,
    parse_axes,
    positive_int,
)
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.env.tasks.spaces import cores
from ptxflow.env.tasks.training_set import typical_axes
from ptxflow.eval.bench.campaign import FAILURES
from ptxflow.eval.bench.measurer import Measurer, open_measurers
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted
from ptxflow.eval.sample.draws import default_checkpoint
from ptxflow.eval.sample.selection import reward_of
from ptxflow.eval.tune import report
from ptxflow.eval.tune.benches import OnGpu, Predicted, recorded
from ptxflow.eval.tune.champions import Champion, alternating, legal, nearest, of_session
from ptxflow.eval.tune.draws import Believed, Draws, reward_beside
from ptxflow.eval.tune.endpoint import Endpoint, Recorded
from ptxflow.eval.tune.knowledge import Entry, Knowledge, Row, committed, from_lines, to_lines
from ptxflow.eval.tune.loop import Limits, Round, Session, Steps, Timed, answered
from ptxflow.eval.tune.proposer import Asked as Proposal
from ptxflow.eval.tune.proposer import Model, Tried
from ptxflow.gfn.inference import Policy, load_policy

SCHEMA = 3
FINALISTS = 8  # kernels that are timed again in the same rounds, the first start among them
AT_ONCE = 8  # sessions that share a GPU: those that wait would all be cut short by --seconds
AT_A_TIME = 16  # rivals that are measured, while others' later ones compile
SESSION, RECORDS, PROFILES, KNOWN, TRANSCRIPT = (
    "session.json", "records.jsonl", "profiles.jsonl", "knowledge.jsonl", "model.jsonl",
)  # fmt: skip
NO = Path("no")
Measures = Predicted | OnGpu
Benches = SimpleQueue[Callable[["Tuning"], Measures]]


def arguments() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--definition", metavar="NAME|PATH", help="`ptxflow definitions` lists them")
    add("--axes", nargs="+", default=[], metavar="M=1063",
        help="values of the variable axes (default: a typical workload)")  # fmt: skip
    add("--workloads", type=Path, metavar="FILE", help="instead: a session for each of these")
    add("--device", default="h200", help="b200, h200 or h100 (default: h200)")
    add("--space", choices=("wide", "listed"), default="wide",
        help="where moves lead (default: wide, where there is such)")  # fmt: skip
    add("--measure", choices=("yes", "no"), default="yes",
        help="no: the reward stands for the GPU; nothing is compiled but the champion")  # fmt: skip
    add_cluster(parser)
    add("--recorded", type=Path, nargs="+", default=[], metavar="FILE",
        help="with --measure no: records that stand before the reward")  # fmt: skip
    add("--rounds", type=positive_int, default=Limits.rounds, help="at most (default: 20)")
    add("--budget", type=positive_int, default=Limits.measurements, metavar="N",
        help="kernels to measure at most (default: 64)")  # fmt: skip
    add("--seconds", type=float, metavar="S",
        help="begin no round, and no session, after so long (default: no end)")  # fmt: skip
    add("--branches", type=positive_int, default=Limits.branches, help="of a round (default: 4)")
    add("--starts", type=positive_int, default=8, metavar="K",
        help="kernels to begin with (default: 8)")  # fmt: skip
    add("--rivals", type=int, default=0, metavar="N",
        help="also measure N draws of the listed space's policy, whose best is timed beside the "
        "champion (default: 0)")  # fmt: skip
    add("--profiler", default="auto", metavar="auto|no|PATH",
        help="ncu: the one on the PATH, none, or this (default: auto)")  # fmt: skip
    add("--proposer", choices=("policy", "model"), default="policy",
        help="what a round tries without any move: a draw of the policy (default), or what a "
        "language model proposes (OPENAI_BASE_URL, OPENAI_API_KEY, PTXFLOW_MODEL)")  # fmt: skip
    add("--knowledge", type=Path, metavar="FILE|no", help="champions of earlier sessions, read "
        "before this one and added to after it; no: begin at draws alone")  # fmt: skip
    add("--checkpoint", type=Path, help="trained policy (default: the device's in checkpoints/)")
    add("--seed", type=natural_int, default=0)
    add("--jobs", type=positive_int, help="compiler processes (default: one a core)")
    add("--state", type=Path, metavar="DIR",
        help="folder of the session (default: out/tune/DEFINITION-AXES-DEVICE)")  # fmt: skip
    return parser


def bound_axes(definition: Definition, texts: Sequence[str]) -> dict[str, int]:
    """One value of each variable axis; BadInput where one is missing or has several."""
    given = parse_axes(texts)
    if many := [n for n, values in given.items() if len(values) > 1]:
        raise BadInput(f"axis {many[0]!r} has several values; a session tunes one workload")
    chosen = {n: values[0] for n, values in given.items()} or typical_axes(definition) or {}
    bound = definition.bind(chosen)
    return {name: bound[name] for name in definition.var_axes}


def read_workloads(path: Path) -> list[tuple[str, dict[str, int]]]:
    """Names of definitions and axes; BadInput, one line, where the file is not such a list."""
    try:
        rows = json.loads(path.read_text())
        found = [(str(row["definition"]), dict(row.get("axes", {}))) for row in rows]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{path}: no list of workloads: {error!r}") from None
    if not found:
        raise BadInput(f"{path}: an empty list of workloads")
    return found


def resume(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The session that the folder holds, or a new one; BadInput where it is another's."""
    path = folder / SESSION
    try:
        held = json.loads(path.read_text())
    except FileNotFoundError:
        return {"settings": asked, "begun": time.time()}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: no session: {error}; move it away to begin anew") from None
    now = held.get("settings") if isinstance(held, dict) else None
    if not isinstance(now, dict) or "begun" not in held:
        raise BadInput(f"{path}: no session: it says no settings; move it away to begin anew")
    if differ := sorted(n for n in asked if now.get(n) != asked[n]):
        name = differ[0]
        raise BadInput(
            f"{path} is of another session: {name} is {now.get(name)!r} there, {asked[name]!r} here"
        )
    return held


def known_to(folder: Path, base: Knowledge | None, space: RelationSpace, k: int) -> list[Row]:
    """What was known when the session began, kept in its folder, so that it goes on alike: tries of
    moves in a base, and the k champions that it begins with, of the base and of what is committed.
    """
    kept = folder / KNOWN
    if not kept.exists():
        rows = [*committed(), *(base.entries() if base else []),
                *(base.champions() if base else [])]  # fmt: skip
        near = nearest(space, (r for r in rows if isinstance(r, Champion)), k)
        write_whole(kept, to_lines([*(r for r in rows if isinstance(r, Entry)), *near]))
    return from_lines(kept.read_text(), str(kept))


@dataclass
class Tuning:
    """One workload's session, its folder, and where it stands."""

    args: argparse.Namespace
    definition: Definition
    axes: dict[str, int]
    folder: Path
    policy: Policy
    listed: RelationSpace
    space: RelationSpace
    state: dict[str, Any] = field(default_factory=dict)
    found: list[Round] = field(default_factory=list)
    known: list[Row] = field(default_factory=list)
    starts: list[Strategy] = field(default_factory=list)
    rivals: dict[Strategy, Timed] = field(default_factory=dict)
    model: Model | None = None
    stopped: Event = field(default_factory=Event)

    @staticmethod
    def of(
        args: argparse.Namespace, name: str, axes: dict[str, int], policy: Policy, several: bool
    ) -> "Tuning":
        """BadInput for a workload that no family builds on the device."""
        device, definition = find_device(args.device), load(name)
        family, problem = find_problem(definition, axes)
        listed = relate(family, problem, device)
        space = relate(family.wide, problem, device) if args.space == "wide" else listed
        where = "-".join([definition.name, *(f"{n}{v}" for n, v in axes.items()), device.name])
        base = args.state or Path("out", "tune", "" if several else where)
        folder = base / where if several else base
        return Tuning(args, definition, axes, folder, policy, listed, space)

    @property
    def base(self) -> Knowledge | None:
        """The user's own."""
        given = self.args.knowledge
        return Knowledge(given) if given and given != NO else None

    @property
    def settings(self) -> dict[str, Any]:
        """What a session is a function of, beside what it measures."""
        args = self.args
        return {
            "schema": SCHEMA, "definition": self.definition.name, "axes": self.axes,
            "device": self.space.device.name, "decisions": self.space.digest,
            "measure": args.measure, "seed": args.seed, "starts": args.starts,
            "rivals": args.rivals, "branches": args.branches,
            "knowledge": {None: "committed", NO: "no"}.get(args.knowledge, "own"),
            "proposer": "model" if args.proposer == "model" else None,
        }  # fmt: skip

    def begin(self, bench: Measures) -> None:
        """Make or take up the session, and have what it asks for first compiled."""
        args, space = self.args, self.space
        self.state = resume(self.folder, self.settings)
        write_whole(self.folder / SESSION, json.dumps(self.state, indent=1))
        count = 0 if args.knowledge == NO else args.starts // 2
        self.known = known_to(self.folder, self.base, space, count)
        reward = reward_beside(self.policy.about, space.device, space.family.name)
        measured: dict[Strategy, Timed] = {}
        draws = Draws(self.policy, Believed(self.listed, reward), space, measured)
        floors = Floors.of(counted(self.definition, self.axes), space.device)
        limits = Limits(args.rounds, args.budget, branches=args.branches)
        self.bench = bench
        self.session = Session(space, floors, bench, draws, limits, args.seed, measured,
                               hope=draws.hope)  # fmt: skip
        if args.proposer == "model":
            endpoint, name = Endpoint.from_environment()
            self.model = Model(Recorded(self.folder / TRANSCRIPT, endpoint), name)
            self.session.proposed = self.proposals
        champions = [legal(space, r.choices) for r in self.known if isinstance(r, Champion)]
        drawn = begun(draws, space, args.starts - len(champions), args.seed)
        self.starts = alternating(champions, drawn, args.starts)
        own = draws(self.listed, args.rivals, args.seed) if args.rivals else ()
        rivals = [self.listed.strategy(int(c)) for c in own]
        bench.ahead([*rivals, *self.starts])
        self.steps = self._steps(rivals)

    def proposals(self) -> list[Strategy]:
        """What the model would try next; nothing where it fails."""
        assert self.model
        space, session = self.space, self.session
        known = [
            f"{e.state}: {e.move} helped in {e.helped} of {e.tried} tries, by "
            f"{e.gain / e.tried:+.1%}" for e in self.known
            if isinstance(e, Entry) and e.tried and e.state.split()[0] == space.family.name
        ]  # fmt: skip
        history = tuple(Tried(s, t.us, t.why) for s, t in session.measured.items())
        return self.model.propose(Proposal(space, 1, history, known))

    def play(self, until: float, count: Callable[[int], object]) -> "Tuning":
        """To the champion, or until `stopped`; no round begins after `until`. ValueError where no
        start is right."""
        step = next(self.steps, None)
        while step is not None and not self.stopped.is_set():
            if isinstance(step, Round):
                self.ended(step)
                step = next(self.steps, None) if time.monotonic() < until else None
            else:
                times = self.bench.times(step)
                count(len(times))
                step = answered(self.steps, times)
        if not self.stopped.is_set():
            self.finish()
        return self

    def _steps(self, rivals: Sequence[Strategy]) -> Steps:
        for at in range(0, len(rivals), AT_A_TIME):
            some = tuple(rivals[at : at + AT_A_TIME])
            self.rivals |= zip(some, (yield some), strict=True)
        yield from self.session.steps(self.starts)

    def ended(self, made: Round) -> None:
        """A round is over: kept, printed and written."""
        self.found.append(made)
        tqdm.write(f"{self.definition.name}: {report.line(made)}")
        write_whole(
            self.folder / f"round-{made.number:02}" / "analysis.md", report.round_page(made)
        )

    def finish(self) -> dict[str, Any]:
        """The champion; what session.json holds in the end."""
        session, bench, first = self.session, self.bench, self.first
        self.state |= {
            "floors_us": vars(session.floors), "flops": self.space.problem.flops,
            "noise": bench.noise,
            "start": {"key": first.key, "us": session.measured[first].us},
            "rounds": [asdict(r) for r in self.found], "measured": len(session.measured),
            "times": [t.us if t.right else None for t in session.measured.values()],
            "champion": self.finals(), "profiler": getattr(bench, "remark", ""),
            "profiles": {k: asdict(p) for k, p in getattr(bench, "counted", {}).items()},
        }  # fmt: skip
        if self.model:
            self.state["model"] = {"tokens": self.model.tokens, "failed": self.model.failed}
        write_whole(self.folder / SESSION, json.dumps(self.state, indent=1))
        if self.base:
            told = json.dumps([self.state["settings"], self.state["begun"]])
            own = hashlib.sha256(told.encode()).hexdigest()
            best = of_session(self.state)
            self.base.learn(own, self.space.device.name, session.outcomes, best)
        return self.state

    @property
    def first(self) -> Strategy:
        """The best that the session began with."""
        return min(self.starts, key=lambda s: self.session.measured[s].us)

    def finals(self) -> dict[str, Any]:
        """The fastest, the best start and as many rivals, timed again in the same rounds where
        there is a GPU; the champion is the fastest of the session's own there, so that it is never
        slower than what the session began with."""
        own = list(dict.fromkeys([*self.session.frontier[: FINALISTS - 1], self.first]))
        right = [s for s, t in self.rivals.items() if t.right]
        others = sorted(right, key=lambda s: self.rivals[s].us)[: len(own)]
        times, peers = self.bench.together(list(dict.fromkeys([*own, *others])))
        best = min(own, key=lambda s: times[s.key])
        return {
            "key": best.key, "us": times[best.key], "start_us": times[self.first.key],
            "screened_us": times[own[0].key],
            "rival_us": min((times[s.key] for s in others), default=None), "peers": peers,
            "strategy": best.to_json(), "by": "reward" if self.args.measure == "no" else "GPU",
        }  # fmt: skip

    @property
    def best(self) -> Strategy:
        """The champion, where the session has ended."""
        return next(s for s in self.session.frontier if s.key == self.state["champion"]["key"])


def deliver(done: Sequence[Tuning], processes: int) -> None:
    """What users take: see `report.delivered`; BadInput where a champion does not compile."""
    work = [(t.definition, t.folder, t.state, t.bench.kernel(t.best)) for t in done]
    for _ in each(report.delivered, work, processes, "write", "session"):
        pass


def begun(draws: Draws, space: RelationSpace, k: int, seed: int) -> list[Strategy]:
    """k strategies to begin with: draws of the listed space, and half of them of the wide one,
    where there is such."""
    listed = draws.believed.listed
    found = [listed.strategy(int(c)) for c in draws(listed, k, seed)]
    if space.digest == listed.digest:
        return found
    wide = [space.strategy(int(c)) for c in draws(space, k // 2, seed)]
    return list(dict.fromkeys([*found[: k - k // 2], *wide]))


@contextmanager
def opened(args: argparse.Namespace, tunings: Sequence[Tuning]) -> Iterator[Benches]:
    """What measures: as many places as sessions play at a time, by turns of one GPU and the next;
    RuntimeUnavailable where there is no GPU of the device."""
    places: Benches = SimpleQueue()
    if args.measure == "no":
        places.put(simulated)
        yield places
        return
    first = tunings[0]
    profiler = {"auto": shutil.which("ncu") or "", "no": ""}.get(args.profiler, args.profiler)
    base = first.folder.parent if args.workloads else first.folder
    families = list({t.space.family.name: t.space.family for t in tunings}.values())
    device = first.space.device

    def on(measurer: Measurer, lock: Lock, t: Tuning) -> OnGpu:
        return OnGpu(measurer, t.definition, t.space, t.folder / PROFILES, profiler, lock=lock)

    with open_measurers(base / RECORDS, device, families, "tune", args.jobs) as measurers:
        for measurer in measurers:
            measurer.built = {}
        gpus = [partial(on, measurer, Lock()) for measurer in measurers]
        for gpu in gpus * AT_ONCE:
            places.put(gpu)
        yield places


def simulated(tuning: Tuning) -> Predicted:
    """What stands for a GPU."""
    args, space = tuning.args, tuning.space
    reward, remarks = reward_of(tuning.policy.about, space.device.name, space.family.name)
    print("\n".join([f"no GPU: times are what the {reward.name} predicts", *remarks]),
          file=sys.stderr)  # fmt: skip
    known = recorded(args.recorded, tuning.definition.name, tuning.axes, space)
    return Predicted(space, Believed(tuning.listed, reward), known)


def tune(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run or finish the sessions; what session.json of each holds at its end."""
    policy = load_policy(args.checkpoint or default_checkpoint(find_device(args.device).name))
    if args.workloads:
        asked = read_workloads(args.workloads)
    elif args.definition:
        asked = [(args.definition, bound_axes(load(args.definition), args.axes))]
    else:
        raise BadInput("--definition or --workloads is missing")
    tunings = [Tuning.of(args, name, axes, policy, bool(args.workloads)) for name, axes in asked]
    with opened(args, tunings) as places:
        done = played(tunings, places, args)
    deliver(done, args.jobs or cores())
    return [t.state for t in done]


def played(tunings: Sequence[Tuning], places: Benches, args: argparse.Namespace) -> list[Tuning]:
    """Those that were begun, and ended. Each has a thread: a GPU measures what is compiled, while
    other sessions begin, think, or wait for their kernels."""
    end = time.monotonic() + (args.seconds or math.inf)
    total = (args.budget + args.rivals) * len(tunings)
    bar = tqdm(total=total, desc="tune", unit="kernel", disable=None)

    def play(tuning: Tuning) -> Tuning | None:
        if time.monotonic() > end or tuning.stopped.is_set():
            return None
        place = places.get()
        tuning.begin(place(tuning))
        try:
            return tuning.play(end, bar.update)
        except ValueError as error:  # none of its starts is right
            if not args.workloads:
                raise
            tqdm.write(f"tune: {tuning.definition.name} {tuning.axes}: {error}")
            return None
        finally:
            places.put(place)

    with bar, ThreadPoolExecutor(places.qsize()) as pool:
        going = [pool.submit(play, tuning) for tuning in tunings]
        try:
            wait(going, return_when=FIRST_EXCEPTION)
        finally:  # interrupted, or failed: the others end with what they measure
            if not all(f.done() for f in going):
                for tuning in tunings:
                    tuning.stopped.set()
        return [ended for f in going if (ended := f.result())]


@reports("tune", *FAILURES, ValueError)
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    try:
        states = tune(args)
    except KeyboardInterrupt:
        print("tune: interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(report.table(states) if args.workloads else report.summary(states[0]))
    return 0
