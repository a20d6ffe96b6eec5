"""One run of `sample.py --library`: what was asked for, and the steps in their order."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ptxflow import __version__
from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.device import Device
from ptxflow.compiler.library.manifest import MANIFEST
from ptxflow.env.reward import Reward
from ptxflow.env.surrogate import SurrogateReward
from ptxflow.env.tasks.arguments import find_family
from ptxflow.eval.bench.measurer import Measurer, open_measurer
from ptxflow.eval.sample.folder import OutputFolder
from ptxflow.eval.sample.library import Search
from ptxflow.eval.sample.library_report import PAGE, SOLUTION, Origin, summary, write
from ptxflow.eval.sample.library_timing import GpuTiming
from ptxflow.eval.sample.looks import Judge, Look, State
from ptxflow.eval.sample.ranges import Ranges, Sizes
from ptxflow.eval.sample.selection import (
    POLICY,
    REWARD,
    far_from_training,
    reward_alone,
    reward_of,
)
from ptxflow.gfn.inference import SHARPNESS, draw_distinct, load_policy, log_probs


@dataclass(frozen=True)
class Asked:
    """The arguments of a run. `k` candidates of each size, `most` kernels; `gpu` is the name of
    the one to measure on, or None."""

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

    def beside(self, end: str) -> Path:
        """A file beside the library's folder."""
        return self.out.with_name(f"{self.out.name}.{end}")


def make_library(asked: Asked) -> None:
    """Choose, build and write a library; says what it is. Raises BadInput, one line."""
    definition = asked.ranges.definition
    policy = load_policy(asked.checkpoint)
    family = find_family(definition)
    if not policy.knows(family.name):
        print(reward_alone(asked.checkpoint, family.name, asked.source), file=sys.stderr)
        asked = replace(asked, source=REWARD)
    reward, remarks = reward_of(policy.about, asked.device.name, family.name)
    judge = Judge(family, asked.device, asked.ranges, reward)
    ends = ({n: r[i] for n, r in asked.ranges.free.items()} for i in (0, 1))
    far = [far_from_training(policy.about, definition, asked.ranges.axes(e)) for e in ends]
    told = sorted({*far} - {""}) if policy.knows(family.name) else []
    remarks += tuple(f"far from what the policy was trained on: {f}" for f in told)
    for remark in remarks:
        print(remark, file=sys.stderr)
    tools = _tools(asked, reward)
    drawn = {POLICY: asked.k, REWARD: 0}.get(asked.source, asked.k - asked.k // 2)
    with ExitStack() as stack:
        folder = stack.enter_context(OutputFolder(asked.out, marker=MANIFEST))
        state = State(asked.beside("state.jsonl"), _digest(asked, tools))

        def look(sizes: Sizes) -> Look:
            draw = partial(draw_distinct, k=drawn, seed=asked.seed, sharpness=asked.sharpness)
            score = partial(log_probs, policy)
            return state.get(sizes, lambda: judge.look(sizes, score, draw, asked.source))

        timing = None
        if asked.gpu:
            records = asked.beside("records.jsonl")
            command = tools["command"]
            opened = open_measurer(records, asked.device, [family], command, asked.jobs)
            measurer: Measurer = stack.enter_context(opened)
            timing = GpuTiming(judge, measurer, asked.k, asked.most)
        library = Search(
            judge, look, asked.most, asked.emulate, asked.jobs, asked.seed, timing
        ).run()
        known = f"measurement on {asked.gpu}" if asked.gpu else reward.name
        origin = Origin(tools, known, remarks)
        write(library, origin, folder)
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


def _digest(asked: Asked, tools: dict[str, str]) -> str:
    """Of everything that looks depend on."""
    parts = {n: tools[n] for n in ("ptxflow", "compiler", "checkpoint", "reward", "seed")}
    asks = (asked.k, asked.source, asked.sharpness, asked.device.name, asked.ranges.capacity)
    text = json.dumps([parts, asks, asked.ranges.definition.to_json()])
    return hashlib.sha256(text.encode()).hexdigest()
