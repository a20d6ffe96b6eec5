"""Methods played on whole spaces of any size, against a GPU, and what they lose: `ptxflow live`.

All runs of a workload go on in step, a few kernels each; the best of each at 1, 8 and 32
measurements are timed again together, and what a run loses is against the best that any found.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event, Lock

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.command import BadInput, Parser, add_cluster, reports
from ptxflow.compiler.backend.runtime import RuntimeUnavailable
from ptxflow.env.measurements import MeasurementError, by_workload, load_measurements, read_lines
from ptxflow.env.observations import StrategyTime, observe
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.reward import ModelReward, Reward, log_reward
from ptxflow.env.search import Search as Evolution
from ptxflow.env.space import Codes, Space, decision_digest
from ptxflow.env.tasks.arguments import find_device, find_problem, parse_axes, product
from ptxflow.env.tasks.definition import load, names
from ptxflow.env.tasks.training_set import registered
from ptxflow.eval.bench.candidates import Candidate, Settings, listed_workload, strategies
from ptxflow.eval.bench.markdown import markdown, publish
from ptxflow.eval.bench.measurer import Measurer, open_measurers, seconds
from ptxflow.eval.bench.records import RecordError
from ptxflow.eval.bench.worker import WorkerError
from ptxflow.eval.sample.draws import Place, apart, places, the_policy, usual_checkpoint
from ptxflow.eval.sample.selection import reward_within
from ptxflow.eval.study.metrics import Sheet, drawn_again, ends, paired
from ptxflow.eval.study.runs import Runs
from ptxflow.eval.study.search.replay import Replay, relative_times, workload_name
from ptxflow.eval.study.search.unlisted import Parzen, Pattern, Pool, Search
from ptxflow.eval.study.tables import band, percent
from ptxflow.gfn.checkpoint import CheckpointError
from ptxflow.gfn.inference import Policy, sample_by_steps

Found = tuple[Codes, NDArray[np.float64]]  # codes, and their log-probabilities

EACH = {"gemm": 2, "gqa_decode": 1, "moe": 2}  # workloads of each of a family's definitions
BUDGETS = (1, 8, 32)
SEEDS = 3
POOL = 256  # strategies that a process chooses from
AT_ONCE = 3  # workloads of a GPU: while one measures, kernels of others compile
EVOLUTION = Evolution(drawn=20_000, rounds=16, kept=64, crossed=4000)  # some 10^5 evaluations
SETTINGS = Settings(
    (1,), 5, 0.03, ties=0.0, every_baseline=False, refine_seconds=0.3, libraries=False
)
POLICY = "policy"
HELP = """\
Play policies and searches on all strategies of workloads, on this machine's GPUs.

What a method asks for is compiled, checked and timed; all have 32 measurements. The true optimum is
not known: losses are against the best that any run found. The same command goes on where it was
stopped: what the folder holds is not measured again.
"""
EPILOG = """\
examples:
  ptxflow live out/live --seconds 500
  ptxflow live out/one --definition gemm_n5120_k2048 --axes M=17 --space listed
  ptxflow live --judge eval/results/live-h200.jsonl.xz eval/results/live-runs-h200.jsonl.xz

writes into the folder:
  records.jsonl   every kernel that was measured
  runs.jsonl      a line a workload: what each method asked for, in order, as codes of the space
exit codes: 0 done, 2 bad input or no GPU
"""


@dataclass(frozen=True)
class Field:
    """A workload and the strategies that are played on: those whose implied decisions are as listed
    ones have them, as no reward knows more of the others."""

    place: Place
    space: RelationSpace

    @staticmethod
    def of(place: Place, device: str, wide: bool) -> "Field":
        family, problem = find_problem(load(place[0]), place[1])
        whole = relate(family.wide if wide else family, problem, find_device(device))
        return Field(place, whole.plain)

    @property
    def name(self) -> str:
        return workload_name(*self.place)

    def candidates(self, codes: Iterable[int]) -> tuple[Candidate, ...]:
        listed = strategies(self.space, np.array([*codes], np.int64))
        where = load(self.place[0]), self.place[1], self.space.device
        return listed_workload(*where, listed, self.name).candidates


def methods(policy: Policy, space: RelationSpace) -> list[Search]:
    """What is played on a space: a policy's draws, and searches of what ranks them for sample.py
    and of the model, as they are and corrected by what was measured; searches without either."""
    ranking = reward_within(policy.about, space)[0]
    rewards: dict[str, Reward] = {"model": ModelReward(), ranking.name: ranking}

    def drawn(space: RelationSpace, rng: np.random.Generator) -> Found:
        return sample_by_steps(policy, space, POOL, int(rng.integers(2**31)))

    def best(reward: Reward, space: RelationSpace, rng: np.random.Generator) -> Found:
        """Of those alike one, as sample.py has it."""
        codes, tflops = apart(
            *EVOLUTION.run(space, partial(reward.tflops, space), int(rng.integers(2**31)))
        )
        return codes[:POOL], log_reward(tflops, space.problem, space.device)[:POOL]

    def turns(space: RelationSpace, rng: np.random.Generator) -> Found:
        both = np.stack([drawn(space, rng)[0][:32], best(ranking, space, rng)[0][:32]], 1)
        codes = both.flatten()[np.sort(np.unique(both, return_index=True)[1])]
        return codes, np.zeros(len(codes))

    found = {f"{name} search": partial(best, reward) for name, reward in rewards.items()}
    pools: dict[str, Callable[..., Found]] = {POLICY: drawn, **found}
    return [
        *(Pool(name, find) for name, find in pools.items()),
        *(Pool(f"{name} + feedback", find, corrected=True) for name, find in pools.items()),
        Pool(f"{POLICY}, {ranking.name} search in turn", turns),
        Pattern(),
        Parzen(),
    ]


def play(
    field: Field, held: Sequence[Search], measure: Measurer, lock: Lock, stopped: Event
) -> dict[str, list[list[int]]]:
    """What each method's runs asked for, in order, of each seed."""
    rngs, seeds = np.random.default_rng, range(SEEDS)
    runs = [(m.name, s, m.search(field.space, rngs(s))) for m in held for s in seeds]
    asked: dict[tuple[str, int], list[int]] = {(name, seed): [] for name, seed, _ in runs}
    known: dict[int, float] = {}

    def times(codes: Iterable[int]) -> None:
        if stopped.is_set():
            raise WorkerError(f"{field.name}: stopped")
        new = field.candidates(dict.fromkeys(c for c in codes if c not in known))
        wait(measure.ahead(new))
        with lock:
            told = zip(new, map(seconds, measure(new)), strict=True)
        known.update((field.space.code(c.strategy), t) for c, t in told)

    pending = {(name, seed): next(run, np.zeros(0, np.int64)) for name, seed, run in runs}
    while any(len(codes) for codes in pending.values()):
        times(chain.from_iterable(codes.tolist() for codes in pending.values()))
        for name, seed, run in runs:
            codes = pending[name, seed].tolist()
            asked[name, seed] += codes
            pending[name, seed] = np.zeros(0, np.int64)
            if codes and len(asked[name, seed]) < BUDGETS[-1]:
                with suppress(StopIteration):
                    pending[name, seed] = run.send(np.array([known[c] for c in codes]))
    best = {min(own[:b], key=known.__getitem__) for own in asked.values() for b in BUDGETS}
    with lock:
        measure.together(field.candidates(c for c in sorted(best) if np.isfinite(known[c])))
    return {m.name: [asked[m.name, s][: BUDGETS[-1]] for s in seeds] for m in held}


def play_all(args: argparse.Namespace) -> None:
    """Play what the folder does not hold yet, and begin nothing after so many seconds."""
    torch.set_num_threads(1)
    began, lock, path = time.monotonic(), Lock(), args.folder / "runs.jsonl"
    args.folder.mkdir(parents=True, exist_ok=True)
    path.touch()
    done = [(r["definition"], r["axes"]) for _, r in read_lines(path) if r["space"] == args.space]
    wide = args.space == "wide"
    bound = product(parse_axes(args.axes))
    asked = [(load(n).name, axes) for n in args.definition for axes in bound] or spread()
    fields = [Field.of(place, args.device, wide) for place in asked if place not in done]
    families = {f.space.family.name: f.space.family for f in fields}.values()
    records, device = args.folder / "records.jsonl", find_device(args.device)
    with (
        open_measurers(records, device, families, "ptxflow live") as gpus,
        path.open("a") as out,
        ThreadPoolExecutor(AT_ONCE * len(gpus)) as pool,
        tqdm(total=len(fields), unit="workload") as bar,
    ):
        locks, stopped = [Lock() for _ in gpus], Event()

        def one(number: int) -> None:
            if time.monotonic() - began > args.seconds:
                return
            field, gpu = fields[number], number % len(gpus)
            gpus[gpu].settings = SETTINGS
            name, axes = field.place
            own = args.checkpoint or usual_checkpoint(args.device, load(name), axes, wide=wide)
            runs = play(
                field, methods(the_policy(own), field.space), gpus[gpu], locks[gpu], stopped
            )
            row = {"definition": name, "axes": axes, "device": args.device}
            space = {"space": args.space, "digest": decision_digest(field.space.family)}
            row |= space | {"strategies": len(field.space), "runs": runs}
            with lock:
                out.write(json.dumps(row) + "\n")
                out.flush()
                bar.update()

        try:
            list(pool.map(one, range(len(fields))))
        finally:  # Ctrl-C, or machinery that failed: who plays ends after its next kernels
            stopped.set()


def spread() -> list[Place]:
    """The workloads, families in turn."""
    held: dict[str, list[Place]] = {name: [] for name in EACH}
    for definition in names():
        family = registered(load(definition))
        if family is not None and family.name in EACH:
            held[family.name] += places([definition], EACH[family.name])
    share = {(f, i): i / len(own) for f, own in held.items() for i in range(len(own))}
    return [held[f][i] for f, i in sorted(share, key=lambda at: (share[at], at))]


def judged(records: Path, path: Path) -> tuple[list[Replay], list[Runs]]:
    """Of records and runs: each workload's strategies that were measured, and the runs on them."""
    measured = {
        (g[0].definition, *sorted(dict(g[0].axes).items())): g
        for g in by_workload(load_measurements([records])).values()
    }
    replays, runs = [], []
    for number, row in read_lines(path):
        family, problem = find_problem(load(row["definition"]), row["axes"])
        family = family.wide if row["space"] == "wide" else family
        if row["digest"] != decision_digest(family):
            raise MeasurementError(f"{path}:{number}: of another space of {family.name}")
        group = measured[row["definition"], *sorted(row["axes"].items())]
        relative = relative_times(group)
        timed = [
            StrategyTime({**family.implied, **m.choices}, relative.get(m.key, np.inf))
            for m in group
        ]
        known, _ = observe(family, problem, find_device(row["device"]), timed)
        space = Space(family, problem, known.device, known.codes)
        name = workload_name(row["definition"], row["axes"])
        replays.append(Replay(name, space, known.seconds, 1.0))
        for method, asked in row["runs"].items():
            runs.append(Runs(method, name, np.searchsorted(known.codes, np.array(asked))))
    return replays, runs


def table(replays: Sequence[Replay], runs: Sequence[Runs]) -> str:
    """What the best so far loses by method, with intervals over workloads."""
    by_name = {r.name: r for r in replays}
    own: dict[str, list[Runs]] = {}
    for run in runs:
        own.setdefault(run.method, []).append(run)
    at = [b - 1 for b in BUDGETS]
    best = {n: Sheet.of(held, by_name, SEEDS).best[:, :, at] for n, held in own.items()}
    rows = []
    for name, found in sorted(best.items(), key=lambda item: np.log(item[1][:, :, -1]).mean()):
        each, policy = (np.moveaxis(b, 2, 0) for b in (found, best[POLICY]))
        lost = [np.expm1(np.median(np.log(x).mean(0))) for x in each]
        shown = [
            f"{percent(v)} ({band(ends(drawn_again(x)))})" for v, x in zip(lost, each, strict=True)
        ]
        beside = [band(ends(paired(x, y))) for x, y in zip(each[1:], policy[1:], strict=True)]
        rows.append([name, *shown, *beside])
    head = ["method", *map(str, BUDGETS), *(f"over the policy at {b}" for b in BUDGETS[1:])]
    return markdown(head, rows)


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="ptxflow live", description=HELP, epilog=EPILOG, brief="live")
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="played into, and gone on with")
    add("--judge", type=Path, nargs=2, metavar=("RECORDS", "RUNS"), help="instead: play nothing")
    add("--into", type=Path, metavar="PAGE.md", help="its table live, instead of printing")
    add("--device", default="h200", help="which GPU this is (default: h200)")
    add(
        "--definition",
        nargs="+",
        default=[],
        metavar="NAME",
        help="default: some of GEMM, decoding and MoE",
    )
    add("--axes", nargs="+", default=[], metavar="M=17,1000", help="values, by comma")
    add("--space", choices=("listed", "wide"), default="wide", help="as sample.py's")
    add("--checkpoint", type=Path, help="the policy (default: as sample.py takes it)")
    add("--seconds", type=float, default=1e9, help="after which no workload is begun")
    add_cluster(parser)
    return parser


@reports("live", MeasurementError, RecordError, RuntimeUnavailable, CheckpointError, WorkerError)
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    if (args.folder is None) == (args.judge is None):
        raise BadInput("give a folder to play into, or --judge RECORDS RUNS")
    if args.folder:
        play_all(args)
    found = args.judge or [args.folder / "records.jsonl", args.folder / "runs.jsonl"]
    replays, runs = judged(*found)
    if not replays:
        raise BadInput(f"{found[1]}: no workload was played to the end")
    publish({"live": table(replays, runs)}, args.into)
    print(f"{len(replays)} workloads, {sum(len(r.space) for r in replays):,} strategies measured")
    return 0
