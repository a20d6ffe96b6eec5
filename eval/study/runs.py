"""Methods played on brute-forced spaces, with many seeds and over all cores: `Runs`, to be judged.

The numbers depend on the files, the methods' names and the seeds alone: every run draws from a
generator of its own, whatever the number of processes. Every method is checked for peeking on
every workload before its runs count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.processes import each
from ptxflow.env.space import Space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.study.search.bico import Bico
from ptxflow.eval.study.search.optimisers import GENETIC, TPE, CmaEs, Lfbo
from ptxflow.eval.study.search.plain import Exhaustive, Sequential, Uniform
from ptxflow.eval.study.search.play import Foul, Method, interference, play
from ptxflow.eval.study.search.process import Process
from ptxflow.eval.study.search.replay import Replay

BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128)
FEW = 8  # measurements at which policies are judged
AT = (0, 8, 16, 32)  # and those that learn from them
CHECKED = 24  # measurements over which a method is checked for peeking
CHUNK = 10  # seeds a task
SEARCHES: tuple[Method, ...] = (
    Uniform(), Exhaustive(), Sequential(), Bico(), TPE, CmaEs(), GENETIC, Lfbo(),
    Process("Gaussian process"),
)  # fmt: skip


@dataclass(frozen=True)
class Runs:
    """What a method measured of one workload: indices int64 [runs, budget]; one run, whatever the
    seeds, of a method that draws nothing. Where a space is smaller than the budget, the last index
    is repeated."""

    method: str
    workload: str
    asked: NDArray[np.int64]

    def best(self, replay: Replay) -> NDArray[np.float64]:
        """[runs, budget] time of the best so far over the optimum's, 1 or more; until something
        succeeded, the slowest that would have."""
        times = np.minimum(replay.times, replay.slowest)
        best: NDArray[np.float64] = np.minimum.accumulate(times[self.asked], axis=1)
        return best / replay.optimum


@dataclass(frozen=True)
class Posted:
    """A replay on its way to a process: families hold functions, which do not travel."""

    name: str
    definition: str
    axes: tuple[tuple[str, int], ...]
    device: str
    codes: NDArray[np.int64]
    times: NDArray[np.float64]
    yardstick: float

    @staticmethod
    def of(replay: Replay) -> "Posted":
        space = replay.space
        definition = load(space.problem.definition)
        axes = tuple((a, v) for a, v in space.problem.axes if a in definition.var_axes)
        return Posted(replay.name, definition.name, axes, space.device.name, space.codes,
                       replay.times, replay.yardstick)  # fmt: skip

    def open(self) -> Replay:
        family, problem = find_problem(load(self.definition), dict(self.axes))
        self.codes.flags.writeable = False
        space = Space(family, problem, DEVICES[self.device], self.codes)
        return Replay(self.name, space, self.times, self.yardstick)


def evaluate(
    replays: Sequence[Replay],
    methods: Mapping[str, Sequence[Method]],
    seeds: int,
    budget: int = BUDGETS[-1],
    jobs: int = 1,
    checked: int = CHECKED,
) -> list[Runs]:
    """The runs of each workload's methods (by its name), in the order given; each method is checked
    for peeking over its first measurements, `checked` of them.

    Foul, one line, when a method broke the rules of play.
    """
    tasks = list[Task]()
    for replay in replays:
        for method in methods[replay.name]:
            count = seeds if method.seeded else 1
            tasks += [
                (Posted.of(replay), method, range(at, min(at + CHUNK, count)), budget, checked)
                for at in range(0, count, CHUNK)
            ]
    done = _all(tasks, jobs)
    out = []
    for replay in replays:
        for method in methods[replay.name]:
            parts = [a for t, a in zip(tasks, done, strict=True)
                     if t[0].name == replay.name and t[1] is method]  # fmt: skip
            out.append(Runs(method.name, replay.name, np.concatenate(parts)))
    return out


Task = tuple[Posted, Method, Iterable[int], int, int]  # with budget, and how many are checked


def _all(tasks: Sequence[Task], jobs: int) -> list[NDArray[np.int64]]:
    """Every task's answer, in order; the slow ones first, so that no core idles at the end."""
    order = sorted(range(len(tasks)), key=lambda i: tasks[i][1].name != TPE.name)
    done = each(_task, [tasks[i] for i in order], jobs, "search", "task")
    found = dict(zip(order, done, strict=True))
    return [found[i] for i in range(len(tasks))]


def _task(task: Task) -> NDArray[np.int64]:
    posted, method, seeds, budget, checked = task
    replay = posted.open()
    budget = min(budget, len(replay.times))
    rows = []
    for seed in seeds:
        asked = play(method, replay, budget, seed)
        if seed == 0 and (why := interference(method, replay, asked[:checked])):
            raise Foul(why)
        rows.append(np.append(asked, np.full(budget - len(asked), asked[-1])))
    return np.array(rows)
