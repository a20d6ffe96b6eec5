"""Tune one workload in rounds: gaps, moves for the largest, branches, champion, what each is worth.

A round asks how far the best kernel is from the device's roofs (by Nsight Compute where it is, else
by the floors of compute, memory and launch), takes a few moves for the largest gaps, and measures
kernels that make them: a move fixes some decisions, the rest stay or are drawn from the policy
given what is fixed. Moves of the champion are taken back one by one: each is effective,
ineffective, or not to be seen in the machine code. It ends near the roof, when moves are used up,
when rounds in a row gained nothing, or with the budget. In a family's wide space, which has no
policy yet, a session begins at draws of the listed space's, and what moves leave open is uniform.

All is kept in --state: records of every measurement, profiles, what each round saw. A session that
was stopped, or killed, is repeated from these by the same command, and measures only what is
missing. What moves gained is added to --knowledge, from which later sessions choose better.

examples:
  ptxflow tune --definition gemm_n4096_k4096 --axes M=1063 --device h200
  ptxflow tune --definition rmsnorm_h4096 --device h200 --budget 32 --knowledge ~/moves.sqlite
  ptxflow tune --definition gemm_n4096_k4096 --axes M=1063 --measure no     by the reward, no GPU

writes into --state:
  session.json   the arguments, all rounds, the champion       round-NN.md   what a round saw
  records.jsonl  every measurement                             champion/     PTX, cubin, Solution
  profiles.jsonl what ncu counted                              report.md     the whole session
exit codes: 0 done, 2 bad input, no GPU, or another session's --state, 130 interrupted (goes on)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.tasks.arguments import (
    find_device,
    find_problem,
    natural_int,
    parse_axes,
    positive_int,
)
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.env.tasks.training_set import typical_axes
from ptxflow.eval.bench.campaign import FAILURES
from ptxflow.eval.bench.candidates import compile_all
from ptxflow.eval.bench.measurer import open_measurer, seconds
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.work import counted
from ptxflow.eval.sample.draws import CHECKPOINTS
from ptxflow.eval.sample.selection import reward_of
from ptxflow.eval.tune import report
from ptxflow.eval.tune.benches import OnGpu, Predicted
from ptxflow.eval.tune.knowledge import Experience, Knowledge, from_lines, to_lines
from ptxflow.eval.tune.loop import Bench, Limits, Round, Session
from ptxflow.gfn.inference import Policy, load_policy, sample_by_steps, with_family

SCHEMA = 1
POLICY_OF = {"h100": "h200"}  # it has none of its own
FINALISTS = 8  # kernels that are timed again in the same rounds, the first start among them
SESSION, RECORDS, PROFILES, KNOWN = (
    "session.json", "records.jsonl", "profiles.jsonl", "knowledge.jsonl",
)  # fmt: skip


def arguments() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--definition", required=True, metavar="NAME|PATH", help="`ptxflow definitions` lists them")
    add("--axes", nargs="+", default=[], metavar="M=1063",
        help="values of the variable axes (default: a typical workload)")  # fmt: skip
    add("--device", default="h200", help="b200, h200 or h100 (default: h200)")
    add("--space", choices=("wide", "listed"), default="wide",
        help="where moves lead (default: wide, if there is such and a GPU)")  # fmt: skip
    add("--measure", choices=("yes", "no"), default="yes",
        help="no: the reward stands for the GPU; nothing is compiled but the champion")  # fmt: skip
    add("--rounds", type=positive_int, default=Limits.rounds, help="at most (default: 20)")
    add("--budget", type=positive_int, default=Limits.measurements, metavar="N",
        help="kernels to measure at most (default: 64)")  # fmt: skip
    add("--seconds", type=float, metavar="S", help="begin no round after so long (default: no end)")
    add("--branches", type=positive_int, default=Limits.branches, help="of a round (default: 4)")
    add("--starts", type=positive_int, default=8, metavar="K",
        help="draws of the policy to begin with (default: 8)")  # fmt: skip
    add("--profiler", default="auto", metavar="auto|no|PATH",
        help="ncu: the one on the PATH, none, or this (default: auto)")  # fmt: skip
    add("--knowledge", type=Path, metavar="FILE", help="read before the session, added to after it")
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


@contextmanager
def opened(
    args: argparse.Namespace, definition: Definition, space: RelationSpace, policy: Policy
) -> Iterator[Predicted | OnGpu]:
    """What measures; RuntimeUnavailable where there is no GPU of the device."""
    if args.measure == "no":
        reward, remarks = reward_of(policy.about, space.device.name, space.family.name)
        print("\n".join([f"no GPU: times are what the {reward.name} predicts", *remarks]),
              file=sys.stderr)  # fmt: skip
        yield Predicted(space, reward)
        return
    profiler = {"auto": shutil.which("ncu") or "", "no": ""}.get(args.profiler, args.profiler)
    path, families = args.state / RECORDS, [space.family]
    with open_measurer(path, space.device, families, "tune", args.jobs) as measurer:
        yield OnGpu(measurer, definition, space, args.state / PROFILES, profiler)


def settings(
    args: argparse.Namespace, axes: dict[str, int], space: RelationSpace
) -> dict[str, Any]:
    """What a session is a function of, beside what it measures."""
    return {
        "schema": SCHEMA, "definition": args.definition, "axes": axes, "device": space.device.name,
        "decisions": space.digest, "measure": args.measure, "seed": args.seed,
        "starts": args.starts, "branches": args.branches, "knowledge": bool(args.knowledge),
    }  # fmt: skip


def resume(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The session that the folder holds, or a new one; BadInput where it is another's."""
    path = folder / SESSION
    try:
        held = json.loads(path.read_text())
    except FileNotFoundError:
        return {"settings": asked, "begun": time.time()}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: no session: {error}; move it away to begin anew") from None
    now = held.get("settings", {}) if isinstance(held, dict) else {}
    if differ := sorted(n for n in asked if now.get(n) != asked[n]):
        name = differ[0]
        raise BadInput(
            f"{path} is of another session: {name} is {now.get(name)!r} there, {asked[name]!r} here"
        )
    return held


def experience_of(folder: Path, knowledge: Path | None) -> Experience:
    """What was known when the session began: kept in its folder, so that it goes on alike."""
    kept = folder / KNOWN
    if not kept.exists():
        entries = Knowledge(knowledge).entries() if knowledge else []
        write_whole(kept, to_lines(entries))
    return Experience(from_lines(kept.read_text(), str(kept)))


def tune(args: argparse.Namespace) -> dict[str, Any]:
    """Run or finish a session; what session.json holds at its end."""
    device, definition = find_device(args.device), load(args.definition)
    axes = bound_axes(definition, args.axes)
    family, problem = find_problem(definition, axes)
    listed = relate(family, problem, device)
    wide = args.space == "wide" and args.measure == "yes"  # rewards know the listed decisions
    space = relate(family.wide, problem, device) if wide else listed
    where = "-".join([definition.name, *(f"{n}{v}" for n, v in axes.items()), device.name])
    args.state = args.state or Path("out", "tune", where)
    state = resume(args.state, settings(args, axes, space))
    write_whole(args.state / SESSION, json.dumps(state, indent=1))
    experience = experience_of(args.state, args.knowledge)
    named = POLICY_OF.get(device.name, device.name)
    policy = load_policy(args.checkpoint or CHECKPOINTS / f"{named}.safetensors")
    if not policy.knows(family.name):
        print(f"no policy of {family.name}: its draws are uniform by steps")
        policy = with_family(policy, listed)

    def draws(part: RelationSpace, k: int, seed: int) -> Any:
        if part.digest != listed.digest:
            return part.sample_uniform(k, np.random.default_rng(seed))
        return sample_by_steps(policy, part, k, seed)[0]

    floors = Floors.of(counted(definition, axes), device)
    limits = Limits(args.rounds, args.budget, branches=args.branches)
    with opened(args, definition, space, policy) as bench:
        session = Session(space, floors, bench, draws, experience, limits, args.seed)
        starts = [listed.strategy(int(c)) for c in draws(listed, args.starts, args.seed)]
        rounds = played(session, starts, bench, args)
        final = finals(session, bench, starts)
    state |= {
        "floors_us": vars(floors), "noise": bench.noise, "start": starts_json(session, starts),
        "rounds": [r.to_json() for r in rounds], "measured": len(session.measured),
        "champion": final, "profiler": getattr(bench, "remark", ""),
    }  # fmt: skip
    write_whole(args.state / SESSION, json.dumps(state, indent=1))
    if args.knowledge:
        own = hashlib.sha256(json.dumps([state["settings"], state["begun"]]).encode()).hexdigest()
        Knowledge(args.knowledge).learn(own, device.name, session.outcomes)
    deliver(args.state, definition, space, session.frontier, final)
    write_whole(args.state / "report.md", report.page(state))
    return state


def played(
    session: Session, starts: Sequence[Strategy], bench: Bench, args: argparse.Namespace
) -> list[Round]:
    """The rounds, each printed and written as it ends."""
    found: list[Round] = []
    end = time.monotonic() + (args.seconds or float("inf"))
    with tqdm(total=args.budget, desc=args.definition, unit="kernel", disable=None) as bar:
        rounds = session.rounds(starts)
        for made in rounds:
            found.append(made)
            bar.update(made.measured - bar.n)
            tqdm.write(report.line(made))
            write_whole(args.state / f"round-{made.number:02}.md", report.round_page(made))
            if time.monotonic() > end:
                break
    return found


def starts_json(session: Session, starts: Sequence[Strategy]) -> dict[str, Any]:
    """The best of the draws that the session began with."""
    best = min(starts, key=lambda s: session.measured[s].us)
    return {"key": best.key, "us": session.measured[best].us}


def finals(
    session: Session, bench: Predicted | OnGpu, starts: Sequence[Strategy]
) -> dict[str, Any]:
    """The fastest and the best start, timed again in the same rounds where there is a GPU; the
    champion is the fastest there, so that it is never slower than what the session began with."""
    first = min(starts, key=lambda s: session.measured[s].us)
    chosen = list(dict.fromkeys([*session.frontier[: FINALISTS - 1], first]))
    if isinstance(bench, Predicted):
        times = {s.key: session.measured[s].us for s in chosen}
        peers: dict[str, float] = {}
    else:
        records = bench.together(chosen)
        times = {r.key: 1e6 * seconds(r) for r in records}
        peers = dict(records[0].peers)
    key = min(times, key=times.__getitem__)
    (best,) = (s for s in chosen if s.key == key)
    return {
        "key": key, "us": times[key], "start_us": times[first.key], "peers": peers,
        "strategy": best.to_json(), "by": "reward" if isinstance(bench, Predicted) else "GPU",
    }  # fmt: skip


def deliver(
    folder: Path, definition: Definition, space: RelationSpace,
    frontier: Sequence[Strategy], final: dict[str, Any],
) -> None:  # fmt: skip
    """The champion's PTX, cubin and Solution; BadInput where it does not compile."""
    from ptxflow.compiler.library.member import single
    from ptxflow.eval.sample.solution import solution

    (best,) = (s for s in frontier if s.key == final["key"])
    (kernel,) = compile_all([(space.problem, best)], space.device, 1)
    if not isinstance(kernel, CompiledKernel):
        raise BadInput(f"the champion {best.key} does not compile: {kernel}")
    about = (
        f"{definition.name}: champion of a tuning session, {final['us']:.2f} us by {final['by']}"
    )
    made = solution(*single(definition.to_json(), kernel), about)
    write_whole(folder / "champion" / "kernel.ptx", kernel.ptx)
    write_whole(folder / "champion" / "kernel.cubin", kernel.cubin)
    write_whole(folder / "champion" / "strategy.json", json.dumps(final["strategy"], indent=1))
    write_whole(folder / "champion" / "solution.json", json.dumps(made))


@reports("tune", *FAILURES, ValueError)
def main(argv: Sequence[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    try:
        state = tune(args)
    except KeyboardInterrupt:
        print("tune: interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(report.summary(state))
    print(f"written to {args.state}: report.md, champion/solution.json, records")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
