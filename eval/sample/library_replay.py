"""What a library loses by how long it is measured, on a GPU that is simulated from records.

    python -m ptxflow.eval.sample.library_replay RECORDS... --definition NAME --axes M=1:16384

First the time model is judged: each size is left out in turn. Then libraries are chosen as
`sample.py --library` chooses them, from a GPU whose times are those recorded where they are, and
elsewhere drawn around the time model that knows all records, with tails as wide as its errors have.
The clock is simulated, too; choosing takes what it takes here. It is a rehearsal of the choice, not
a measurement.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, cast

import numpy as np

from ptxflow.command import Parser, reports
from ptxflow.env.measurements import REFINE, SCREEN
from ptxflow.env.tasks.arguments import find_device
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.candidates import Candidate
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.measurer import Measurer
from ptxflow.eval.bench.records import Record, read_records
from ptxflow.eval.sample.draws import usual_checkpoint
from ptxflow.eval.sample.held_out import drawn
from ptxflow.eval.sample.library import Cell, Search
from ptxflow.eval.sample.library_run import Asked, prepare
from ptxflow.eval.sample.library_timing import GpuTiming
from ptxflow.eval.sample.looks import Flags, Ints, Judge, Look, State, corners
from ptxflow.eval.sample.portfolio import choose, mean_loss
from ptxflow.eval.sample.ranges import Sizes, find_ranges
from ptxflow.eval.sample.time_model import SCREENED, TOGETHER

#: seconds, of H200 sessions: a place's inputs and reference, a kernel's check and screening, a job
#: of kernels timed together; kernels compiled a second, by 7 cores
PLACE, KERNEL, ROUNDS, COMPILED = 0.1, 0.035, 0.35, 14.0
FREEDOM = 3  # of Student's t, of which errors are drawn
WITHIN = math.sqrt(FREEDOM / (FREEDOM - 2))  # its standard deviation
SIZES = 40  # drawn at random, at which a library is judged


@dataclass
class Simulated:
    """A GPU that is none. `known` has the recorded times' model; `spent` is its clock."""

    judge: Judge
    known: GpuTiming
    seed: int
    spent: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)  # when a kernel is compiled
    last: str = ""
    own: float = 0.0  # seconds that the simulation took

    def clock(self) -> float:
        return self.spent + process_time() - self.own

    def seconds(self, sizes: Sizes, codes: Sequence[int]) -> list[float]:
        """What kernels take, each always the same."""
        mean, sd = self.known.model.table([sizes], np.array(codes))
        out = []
        for code, middle, error in zip(codes, mean[0], sd[0], strict=True):
            kernel, own = (
                np.random.default_rng([self.seed, code, *part]).standard_t(FREEDOM) / WITHIN
                for part in ([], list(sizes.values()))
            )
            out.append(math.exp(middle + error * (kernel + own) / math.sqrt(2)))
        return out

    def ahead(self, candidates: Iterable[Candidate]) -> None:
        begun = max([self.spent, *self.ready.values()])
        for c in candidates:
            if c.strategy.key not in self.ready:
                begun += 1 / COMPILED
                self.ready[c.strategy.key] = begun

    def __call__(self, candidates: Sequence[Candidate]) -> list[Record]:
        return self._records(candidates, SCREEN, SCREENED, KERNEL * len(candidates))

    def together(self, candidates: Sequence[Candidate], **how: Any) -> list[Record]:
        return self._records(candidates, REFINE, TOGETHER, ROUNDS)

    def _records(
        self, candidates: Sequence[Candidate], timing_pass: str, error: float, cost: float
    ) -> list[Record]:
        self.ahead(candidates)
        begun = process_time()
        place = str([c.axes for c in candidates[:1]])
        self.spent = max([self.spent, *(self.ready[c.strategy.key] for c in candidates)]) + cost
        self.spent, self.last = self.spent + (PLACE if place != self.last else 0), place
        codes = [cast(int, self.judge.code(c.strategy)) for c in candidates]
        found = self.seconds({n: candidates[0].axes[n] for n in self.judge.ranges.free}, codes) \
            if candidates else []  # fmt: skip
        rng = np.random.default_rng([self.seed, len(self.ready), int(self.spent * 1e3)])
        self.own += process_time() - begun
        return [
            Record(c.definition.name, c.axes, c.strategy.to_json(), c.strategy.key, c.device.name,
                   "ok", latency_us={"median": s * 1e6 * math.exp(error * rng.standard_normal())},
                   timing_pass=timing_pass)
            for c, s in zip(candidates, found, strict=True)
        ]  # fmt: skip


class Rehearsal(Search):
    """A search that compiles nothing: every kernel is one text, whatever the sizes."""

    def _build(self, *_: Any) -> bool:
        return True

    def _legal(self, grid: Sequence[Cell], codes: Ints) -> Flags:
        """At the corners of a cell alone, which takes a hundredth of the time."""
        legal = self.judge.legal
        return np.array([np.all([legal(at, codes) for at in corners(*cell)], 0) for cell in grid])

    def _other_text(self, *_: Any) -> list[tuple[int, int]]:
        return []


@dataclass(frozen=True)
class Replay:
    """One definition's candidates and records."""

    judge: Judge
    look: Any
    k: int
    seed: int
    records: tuple[Record, ...]
    known: GpuTiming

    def errors(self) -> list[str]:
        left, own = self.known.model.left_out()
        return [
            f"{who}: {np.sqrt((off**2).mean()):.2%} root mean square, "
            f"{np.median(np.abs(off)):.2%} in the middle"
            for who, off in (("time model, size left out", left), ("reward", own))
        ]

    def losses(self, seconds: float, most: int, believed: bool) -> tuple[float, ...]:
        """Of a library that was measured for so long: mean and greatest loss against the best of
        each size's candidates, the mean of the best portfolio that contenders hold for these sizes,
        seconds of measuring, kernels and times measured."""
        gpu = Simulated(self.judge, self.known, self.seed)
        timing = GpuTiming(
            self.judge, cast(Measurer, gpu), most, {}, seconds, self.records if believed else (),
            gpu.clock,
        )  # fmt: skip
        search = Rehearsal(self.judge, self.look, most, seed=self.seed, timing=timing)
        choice = search.choice()
        off, every, tuned = [], [], []
        for sizes in drawn(self.judge.ranges, SIZES, self.seed, search._places()):
            look: Look = self.look(sizes)
            own = [*look.drawn, *look.best[: max(0, self.k - len(look.drawn))]]
            ours, *rest = gpu.seconds(sizes, [choice.code_at(sizes), *own])
            legal = np.isfinite(self.judge.seconds(sizes, timing.contenders))
            times = gpu.seconds(sizes, timing.contenders.tolist())
            every.append(np.where(legal, times, np.inf))
            tuned.append(min(rest))
            off.append(math.log(ours / tuned[-1]))
        best = mean_loss(table := np.array(every), choose(table, most), np.array(tuned))
        seen, means = timing.model.seen, (np.mean(off), max(off), best)
        spent = sum(timing.spent.values())
        lost = tuple(math.expm1(float(m)) for m in means)
        return (*lost, spent, len({c for _, c in seen}), len(seen))


@reports("library-replay")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.sample.library_replay", description=__doc__)
    add = parser.add_argument
    add("records", type=Path, nargs="+", metavar="RECORDS", help="measured kernels")
    add("--definition", required=True)
    add("--axes", nargs="+", default=[])
    add("--device", default="h200")
    add("--space", choices=("listed", "wide"), default="wide")
    add("--seconds", type=float, nargs="+", default=[60, 150, 300])
    add("--members", type=int, default=8)
    add("-k", type=int, default=12, help="candidates of a size, of which the best is the tuned one")
    add("--seeds", type=int, default=2, help="simulated GPUs (default: 2)")
    add("--looks", type=Path, required=True, help="a file that keeps the candidates of sizes")
    args = parser.parse_args(argv)
    definition, device = load(args.definition), find_device(args.device)
    ranges, _ = find_ranges(definition, args.axes)
    checkpoint = usual_checkpoint(device.name, definition, *ranges.ends)
    asked = Asked(
        args.looks,
        ranges,
        device,
        checkpoint,
        k=args.k,
        looks=args.looks,
        wide=args.space == "wide",
    )
    ready = prepare(asked)
    records = tuple(r for path in args.records for r in read_records(path)
                    if r.definition == definition.name)  # fmt: skip
    look = partial(ready.look, State(args.looks, ready.digest))
    known = GpuTiming(ready.judge, None, args.members, {r.identity: r for r in records})
    of = partial(Replay, ready.judge, look, args.k, records=records, known=known)
    print(*of(0).errors(), sep="\n")
    rows = []
    for seconds in args.seconds:
        for believed in (False, True):
            runs = [of(n).losses(seconds, args.members, believed) for n in range(args.seeds)]
            mean = np.mean(runs, axis=0)
            told = f"{seconds:g}", "yes" if believed else "no", f"{mean[0]:.2%}", f"{mean[2]:.2%}"
            rows.append((*told, f"{max(r[1] for r in runs):.1%}", *(f"{v:.0f}" for v in mean[3:])))
            print(rows[-1], flush=True)
    head = ("seconds", "records believed", "slower than one tuned kernel a size",
            "the best so many", "at most", "spent", "kernels", "times")  # fmt: skip
    print(markdown(head, rows, left=0))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
