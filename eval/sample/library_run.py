"""One run of `sample.py --library`: what was asked for, and the steps in their order."""

import hashlib
import json
import math
import shlex
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
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
from ptxflow.eval.bench.records import Identity, Record, read_records
from ptxflow.eval.sample.folder import OutputFolder
from ptxflow.eval.sample.library import Search
from ptxflow.eval.sample.library_report import PAGE, SOLUTION, Origin, summary, write
from ptxflow.eval.sample.library_timing import GpuTiming
from ptxflow.eval.sample.looks import Judge, Look, State
from ptxflow.eval.sample.ranges import Ranges, Sizes
from ptxflow.eval.sample.selection import POLICY, REWARD, far_from_training, reward_alone, reward_of
from ptxflow.eval.sample.widened import WideReward
from ptxflow.gfn.inference import SHARPNESS, Policy, draw_distinct, load_policy, log_probs


@dataclass(frozen=True)
class Asked:
    """The arguments of a run. `k` candidates of each size, `most` kernels.

    gpu       the name of the one to measure on, or None
    recorded  where there is none, choose by what DIR.records.jsonl has
    believed  files of records of other runs: candidates, and their times for the first
    seconds   how long to measure
    looks     a file that keeps what was looked at; None: one that the end of the run removes
    wide      candidates of the family's wide space, too
    chained   of problems; see `Problem`
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
    believed: tuple[Path, ...] = ()
    seconds: float = math.inf
    looks: Path | None = None
    wide: bool = False
    chained: tuple[str, ...] | None = None

    def beside(self, end: str) -> Path:
        """A file beside the library's folder."""
        return self.out.with_name(f"{self.out.name}.{end}")


@dataclass(frozen=True)
class Prepared:
    """Policy, reward and tools of a run; remarks are what to know of them, one line each."""

    asked: Asked
    policy: Policy
    reward: Reward
    judge: Judge
    tools: dict[str, str]
    remarks: tuple[str, ...]

    @property
    def digest(self) -> str:
        return _digest(self.asked, self.tools, self.judge.family)

    def look(self, state: State, sizes: Sizes) -> Look:
        """The look at a size that the state has, or one that it is given now."""
        k, source = self.asked.k, self.asked.source
        drawn = {POLICY: k, REWARD: 0}.get(source, k - k // 2)
        draw = partial(draw_distinct, k=drawn, seed=self.asked.seed, sharpness=self.asked.sharpness)
        score = partial(log_probs, self.policy)
        return state.get(sizes, lambda: self.judge.look(sizes, score, draw, source))

    def measurer(self, path: Path) -> AbstractContextManager[Measurer]:
        """One that appends to a file of records; see `open_measurer`."""
        families = [self.judge.family]
        return open_measurer(
            path, self.asked.device, families, self.tools["command"], self.asked.jobs
        )


def prepare(asked: Asked) -> Prepared:
    """Load what is asked for, and say what is to be known of it."""
    definition = asked.ranges.definition
    policy = load_policy(asked.checkpoint)
    family = find_family(definition)
    if not policy.knows(family.name):
        print(reward_alone(asked.checkpoint, family.name, asked.source), file=sys.stderr)
        asked = replace(asked, source=REWARD)
    reward, remarks = reward_of(policy.about, asked.device.name, family.name)
    if asked.wide:
        reward = WideReward(reward, family)
    own = family.wide if asked.wide else family
    judge = Judge(own, asked.device, asked.ranges, reward, asked.chained)
    unknown = sorted({*(asked.chained or ())} - definition.inputs.keys())
    if unknown:
        raise BadInput(f"{definition.name} has no input {', '.join(unknown)}: it has "
                       f"{', '.join(definition.inputs)}")  # fmt: skip
    far = [far_from_training(policy.about, definition, end) for end in asked.ranges.ends]
    told = sorted({*far} - {""}) if asked.source != REWARD else []
    remarks += tuple(f"far from what the policy was trained on: {f}" for f in told)
    for remark in remarks:
        print(remark, file=sys.stderr)
    return Prepared(asked, policy, reward, judge, _tools(asked, reward), remarks)


def make_library(asked: Asked) -> None:
    """Choose, build and write a library; says what it is. Raises BadInput, one line."""
    ready = prepare(asked)
    with ExitStack() as stack:
        folder = stack.enter_context(OutputFolder(asked.out, marker=MANIFEST))
        state = State(asked.looks or asked.beside("state.jsonl"), ready.digest)
        timing = _timing(ready, stack)
        library = Search(
            ready.judge, partial(ready.look, state), asked.most, asked.emulate, asked.jobs,
            asked.seed, timing,
        ).run()  # fmt: skip
        origin = Origin(ready.tools, _known_by(timing, ready.reward), ready.remarks)
        write(library, origin, folder)
    if asked.looks is None:
        state.remove()
    print(summary(library, origin))
    if timing:
        print(timing.said())
    for refused in library.refused:
        print(f"refused {refused}", file=sys.stderr)
    print(f"written to {asked.out}: {MANIFEST}, PTX, cubins, {SOLUTION}; {PAGE} says more")


def _timing(ready: Prepared, stack: ExitStack) -> GpuTiming | None:
    """Measurement, or what was recorded of one; None where neither is asked for."""
    asked, path = ready.asked, ready.asked.beside("records.jsonl")
    measurer, known = None, dict[Identity, Record]()
    if asked.gpu:
        measurer = stack.enter_context(ready.measurer(path))
        known = measurer.records.latest()
    elif asked.recorded:
        known = {r.identity: r for r in read_records(path)}
        if not known and not asked.believed:
            raise BadInput(f"{path}: no measurements; make them with --measure yes")
    else:
        return None
    elsewhere = [r for path in asked.believed for r in read_records(path)]
    return GpuTiming(ready.judge, measurer, asked.most, known, asked.seconds, elsewhere)


def _tools(asked: Asked, reward: Reward) -> dict[str, str]:
    own = reward.reward if isinstance(reward, WideReward) else reward
    fitted = f" {own.surrogate.digest}" if isinstance(own, SurrogateReward) else ""
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


def _known_by(timing: GpuTiming | None, reward: Reward) -> str:
    """What times are by, in a few words."""
    if timing is None or (timing.measurer is None and not timing.model.seen):
        return reward.name
    records = [*timing.records.values(), *timing.elsewhere]
    gpus = sorted({str(r.gpu["name"]) for r in records if "name" in r.gpu})
    if not timing.model.seen:
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
