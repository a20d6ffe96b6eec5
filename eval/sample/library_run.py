"""One run of `sample.py --library`: what was asked for, and the steps in their order."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ptxflow import __version__
from ptxflow.command import BadInput
from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family
from ptxflow.compiler.library.manifest import MANIFEST
from ptxflow.env.reward import Reward
from ptxflow.env.space import decision_digest
from ptxflow.env.surrogate import SurrogateReward
from ptxflow.env.tasks.arguments import find_family
from ptxflow.eval.bench.measurer import Measurer, open_measurer
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.sample.folder import OutputFolder
from ptxflow.eval.sample.library import Search
from ptxflow.eval.sample.library_report import PAGE, SOLUTION, Origin, summary, write
from ptxflow.eval.sample.library_timing import GpuTiming
from ptxflow.eval.sample.looks import Judge, Look, State
from ptxflow.eval.sample.ranges import Ranges, Sizes
from ptxflow.eval.sample.selection import POLICY, REWARD, far_from_training, reward_of
from ptxflow.gfn.inference import SHARPNESS, draw_distinct, load_policy, log_probs


@dataclass(frozen=True)
class Asked:
    """The arguments of a run. `k` candidates of each size, `most` kernels.

    gpu       the name of the one to measure on, or None
    recorded  where there is none, choose by what DIR.records.jsonl has
    seconds   how long to measure
    looks     a file that keeps what was looked at; None: one that the end of the run removes
    """

    out: Path
    ranges: Ranges
    device: Device
    checkpoint: Path
    most: int = 8
    k: int = 8
    source: str = "both"
    sharpness: float = SHARPNESS
    seed: int = 0
    emulate: bool = True
    jobs: int | None = None
    gpu: str | None = None
    recorded: bool = False
    seconds: float = math.inf
    looks: Path | None = None

    def beside(self, end: str) -> Path:
        """A file beside the library's folder."""
        return self.out.with_name(f"{self.out.name}.{end}")


def make_library(asked: Asked) -> None:
    """Choose, build and write a library; says what it is. Raises BadInput, one line."""
    definition = asked.ranges.definition
    policy = load_policy(asked.checkpoint)
    family = find_family(definition)
    reward, remarks = reward_of(policy.about, asked.device.name, family.name)
    judge = Judge(family, asked.device, asked.ranges, reward)
    ends = ({n: r[i] for n, r in asked.ranges.free.items()} for i in (0, 1))
    far = [far_from_training(policy.about, definition, asked.ranges.axes(e)) for e in ends]
    told = sorted({*far} - {""})
    remarks += tuple(f"far from what the policy was trained on: {f}" for f in told)
    for remark in remarks:
        print(remark, file=sys.stderr)
    tools = _tools(asked, reward)
    drawn = {POLICY: asked.k, REWARD: 0}.get(asked.source, asked.k - asked.k // 2)
    with ExitStack() as stack:
        folder = stack.enter_context(OutputFolder(asked.out, marker=MANIFEST))
        place = asked.looks or asked.beside("state.jsonl")
        state = State(place, _digest(asked, tools, family))

        def look(sizes: Sizes) -> Look:
            draw = partial(draw_distinct, k=drawn, seed=asked.seed, sharpness=asked.sharpness)
            score = partial(log_probs, policy)
            return state.get(sizes, lambda: judge.look(sizes, score, draw, asked.source))

        timing, records = None, asked.beside("records.jsonl")
        if asked.gpu:
            command = tools["command"]
            opened = open_measurer(records, asked.device, [family], command, asked.jobs)
            measurer: Measurer = stack.enter_context(opened)
            known = measurer.records.latest()
            timing = GpuTiming(judge, measurer, asked.k, asked.most, known, asked.seconds)
        elif asked.recorded:
            known = {r.identity: r for r in read_records(records)}
            if not known:
                raise BadInput(f"{records}: no measurements; make them with --measure yes")
            timing = GpuTiming(judge, None, asked.k, asked.most, known)
        library = Search(
            judge, look, asked.most, asked.emulate, asked.jobs, asked.seed, timing
        ).run()
        origin = Origin(tools, _known_by(asked, timing, reward), remarks)
        write(library, origin, folder)
    if asked.looks is None:
        state.remove()
    print(summary(library, origin))
    for refused in library.refused:
        print(f"refused {refused}", file=sys.stderr)
    print(f"written to {asked.out}: {MANIFEST}, PTX, cubins, {SOLUTION}; {PAGE} says more")


def _tools(asked: Asked, reward: Reward) -> dict[str, str]:
    fitted = f" {reward.surrogate.digest}" if isinstance(reward, SurrogateReward) else ""
    digest = hashlib.sha256(asked.checkpoint.read_bytes()).hexdigest()
    return {
        "ptxflow": __version__,
        "ptxas": ptxas.version(),
        "compiler": cache.sources(),
        "checkpoint": f"{asked.checkpoint.name} {digest}",
        "reward": f"{reward.name}{fitted}",
        "seed": str(asked.seed),
        "command": shlex.join(["sample.py", *sys.argv[1:]]),
    }


def _known_by(asked: Asked, timing: GpuTiming | None, reward: Reward) -> str:
    """What times are by, in a few words."""
    if timing is None:
        return reward.name
    gpus = sorted({str(r.gpu["name"]) for r in timing.records.values() if "name" in r.gpu})
    if not gpus:
        raise BadInput("no kernel was measured: give a longer --time-limit")
    return f"measurement on {' and '.join(gpus)}"


def _digest(asked: Asked, tools: dict[str, str], family: Family) -> str:
    """Of everything that looks depend on; of a file that is kept, of what must be the same for its
    candidates to be any: they may be chosen by one commit and measured with another."""
    names = ("checkpoint", "reward", "seed")
    parts = {n: tools[n] for n in (names if asked.looks else ("ptxflow", "compiler", *names))}
    parts["decisions"] = decision_digest(family)
    asks = (asked.k, asked.source, asked.sharpness, asked.device.name, asked.ranges.capacity)
    text = json.dumps([parts, asks, asked.ranges.definition.to_json()])
    return hashlib.sha256(text.encode()).hexdigest()
