"""A library on a GPU at sizes that it was not chosen by: beside the definition's library, and
beside one kernel tuned for each size.

    python -m ptxflow.eval.sample.held_out DIR

Sizes are drawn at random over the octaves. At each, K strategies are chosen as `sample.py` chooses
them and timed; the three fastest, the kernel that serves the size, and every library (what is
made for one size, with --compiled alone) are then timed in the same rounds. Records go to
DIR.held-out.jsonl, and what is there is not measured again. With --measure no candidates alone are
chosen, into the file of --looks; with --measure recorded the table is of what was measured before.
Of a file of such records in place of DIR the tables are printed.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import numpy as np
from tqdm import tqdm

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.backend.runtime import RuntimeUnavailable, require_gpu
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.library.manifest import LibraryError, Manifest, read_manifest
from ptxflow.env.measurements import REFINE
from ptxflow.env.tasks.arguments import find_device
from ptxflow.env.tasks.definition import load, parse
from ptxflow.eval.bench.baselines import EAGER
from ptxflow.eval.bench.candidates import Candidate
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.measurer import Measurer, seconds
from ptxflow.eval.bench.records import Identity, Record, libraries, read_records
from ptxflow.eval.bench.worker import WorkerError
from ptxflow.eval.sample.draws import usual_checkpoint
from ptxflow.eval.sample.library_run import Asked, Prepared, prepare
from ptxflow.eval.sample.looks import State
from ptxflow.eval.sample.ranges import Ranges, Sizes, find_ranges

PER_SHAPE = ("torch.compile", "cublasLt", "triton")  # made for one size: no library to call at any
ROUNDS_SECONDS = 0.35  # of the GPU, at each size
FASTEST = 3  # of a size's candidates, timed with the kernel that serves it
SERVING = "serving"  # in a record's run: the key of the kernel that serves the size
Found = dict[Identity, Record]


@dataclass(frozen=True)
class Row:
    """A size, the member that serves it, or its key, and medians in seconds: its own, libraries',
    the least of kernels tuned for the size and the member."""

    sizes: Sizes
    member: int | str
    ours: float
    libraries: dict[str, float]
    tuned: float

    @property
    def library(self) -> float | None:
        """The fastest library's seconds."""
        return min(self.libraries.values(), default=None)

    @staticmethod
    def of(own: Record, sizes: Sizes, member: int | str, beside: Iterable[Record]) -> "Row":
        """Of the record of the kernel that serves, and those beside it."""
        peers = {n: us * 1e-6 for n, us in libraries(own.definition, own.peers).items()}
        return Row(sizes, member, seconds(own), peers, min(map(seconds, (own, *beside))))


def drawn(ranges: Ranges, count: int, seed: int, known: Sequence[Sizes]) -> list[Sizes]:
    """Distinct sizes, uniform over the octaves of each axis, none of them known; fewer than `count`
    where the ranges have no more."""
    rng, found = np.random.default_rng([seed, 40]), list[Sizes]()
    for _ in range(20 * count):
        sizes = ranges.draw(rng)
        if sizes not in known and sizes not in found and len(found) < count:
            found.append(sizes)
    return found


@dataclass(frozen=True)
class Judgement:
    """A library, what chooses candidates for its definition, and where these are kept."""

    manifest: Manifest
    ready: Prepared
    state: State

    def candidates(self, sizes: Sizes) -> tuple[Candidate, list[Candidate]]:
        """The kernel that serves a size, and those tuned for it."""
        judge, k = self.ready.judge, self.ready.asked.k
        look = self.ready.look(self.state, sizes)
        codes = [*look.drawn, *look.best[: max(0, k - len(look.drawn))]]
        space = judge.some(sizes, np.array(sorted({*codes}), np.int64))
        member = self.manifest.members[self.manifest.serving(judge.ranges.axes(sizes))]
        own, *tuned = (
            Candidate(judge.ranges.definition, judge.family, space.problem, s, judge.device)
            for s in (Strategy.from_json(member.strategy), *map(space.strategy, space.codes))
        )
        return own, tuned

    def measure(
        self, sizes: Sizes, measurer: Measurer, found: Found, without: Sequence[str]
    ) -> None:
        """Add what is not yet measured of a size, beside every library but some."""
        own, tuned = self.candidates(sizes)
        if _refined(own) in found:
            return
        records = measurer([own, *tuned])
        found |= {r.identity: r for r in records}
        times = {c.strategy.key: seconds(r) for c, r in zip((own, *tuned), records, strict=True)}
        tuned.sort(key=lambda c: times[c.strategy.key])
        best = [c for c in tuned[:FASTEST] if math.isfinite(times[c.strategy.key])]
        once = {c.strategy.key: c for c in (own, *best)}
        run = measurer.origin.run | {SERVING: own.strategy.key}
        measurer.origin = replace(measurer.origin, run=run)
        beside = measurer.together(list(once.values()), without=without, seconds=ROUNDS_SECONDS)
        found |= {r.identity: r for r in beside}

    def row(self, sizes: Sizes, found: Found) -> Row | None:
        """None where it was not measured. BadInput where the kernel that serves it failed."""
        own, tuned = self.candidates(sizes)
        record = found.get(_refined(own))
        if record is None:
            return None
        if not math.isfinite(seconds(record)):
            raise BadInput(f"{record.key} at {sizes}: {record.status}: {record.detail}")
        both = [found[name] for c in tuned if (name := _refined(c)) in found]
        member = self.manifest.serving(self.ready.judge.ranges.axes(sizes))
        return Row.of(record, sizes, member, both)


def _refined(candidate: Candidate) -> Identity:
    return (*candidate.identity[:4], REFINE)


def recorded(path: Path) -> dict[str, list[Row]]:
    """The rows of each library in a file of records, packed or not."""
    groups = defaultdict[tuple[str, str], list[Record]](list)
    for r in read_records(path):
        if r.timing_pass == REFINE and SERVING in r.run:
            groups[f"{r.definition} on {r.gpu['name']}", json.dumps(r.axes)].append(r)
    found = defaultdict[str, list[Row]](list)
    for (what, _), records in groups.items():
        own = next(r for r in records if r.key == r.run[SERVING])
        sizes = {n: own.axes[n] for n in load(own.definition).var_axes}
        found[what].append(Row.of(own, sizes, own.key[:8], records))
    return found


def table(rows: Sequence[Row]) -> str:
    """Every size, and a line of what they come to."""
    axes = tuple(rows[0].sizes)
    text = markdown(
        (*axes, "member", "us", "library us", "ratio", "tuned us", "slower by"),
        [
            (*r.sizes.values(), r.member, f"{r.ours * 1e6:.2f}",
             "-" if r.library is None else f"{r.library * 1e6:.2f}",
             "-" if r.library is None else f"{r.library / r.ours:.3f}",
             f"{r.tuned * 1e6:.2f}", f"{r.ours / r.tuned - 1:.1%}")
            for r in sorted(rows, key=lambda r: tuple(r.sizes.values()))
        ],
        left=0,
    )  # fmt: skip
    said = [f"{len(rows)} sizes"]
    every = {name for r in rows for name in r.libraries}
    for who, names in {"the fastest library": every, **{n: {n} for n in sorted(every)}}.items():
        times = [[us for n, us in r.libraries.items() if n in names] for r in rows]
        ratios = [min(us) / r.ours for r, us in zip(rows, times, strict=True) if us]
        if ratios and (who not in every or len(every) > 1):
            said.append(f"of {who} {geometric_mean(ratios):.3f} in the geometric mean, "
                        f"{min(ratios):.3f} at least")  # fmt: skip
    loss = math.expm1(sum(math.log(r.ours / r.tuned) for r in rows) / len(rows))
    said.append(f"{loss:.2%} slower than one tuned kernel a size in the geometric mean")
    return f"{text}\n\n{'; '.join(said)}"


def _asked(args: argparse.Namespace, manifest: Manifest, gpu: str | None) -> Asked:
    definition = parse(dict(manifest.definition))
    ranges, _ = find_ranges(definition, [f"{n}={a}:{b}" for n, (a, b) in manifest.ranges.items()])
    device = find_device(manifest.target.name)
    checkpoint = args.checkpoint or usual_checkpoint(device.name, definition, *ranges.ends)
    looks = args.looks or args.folder.with_name(f"{args.folder.name}.looks.jsonl")
    return Asked(args.folder, ranges, device, checkpoint, k=args.k, gpu=gpu, looks=looks,
                 wide=args.space == "wide")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.folder.is_file():
        for what, rows in recorded(args.folder).items():
            print(f"{what}\n\n{table(rows)}\n")
        return 0
    manifest = read_manifest(args.folder)
    device = find_device(manifest.target.name)
    gpu = require_gpu(device) if args.measure == "yes" else None
    ready = prepare(_asked(args, manifest, gpu.name if gpu else None))
    looks, path = ready.asked.looks, ready.asked.beside("held-out.jsonl")
    assert looks is not None
    judged = Judgement(manifest, ready, State(looks, ready.digest))
    ranges = ready.judge.ranges
    looked_at = (row for m in manifest.members for row in m.provenance.get("us", ()))
    known = [{n: row[n] for n in ranges.free} for row in looked_at]
    sizes = drawn(ranges, args.sizes, args.seed, known)
    asked = [judged.candidates(place) for place in tqdm(sizes, desc="look", unit="size")]
    if args.measure == "no":
        print(f"the candidates of {len(sizes)} sizes are in {looks}")
        return 0
    found = {r.identity: r for r in read_records(path)}
    without = sorted(EAGER.union(() if args.compiled else PER_SHAPE))
    with ExitStack() as stack:
        measurer = stack.enter_context(ready.measurer(path)) if gpu else None
        if measurer:
            measurer.ahead(c for own, tuned in asked for c in (own, *tuned))
        end = time.monotonic() + args.time_limit
        for place in tqdm(sizes, desc="measure", unit="size", disable=measurer is None):
            if measurer and time.monotonic() < end:
                judged.measure(place, measurer, found, without)
    rows = [row for place in sizes if (row := judged.row(place, found))]
    if not rows:
        more = "a longer --time-limit" if gpu else "--measure yes"
        raise BadInput(f"{path}: none of these sizes was measured; use {more}")
    name = " and ".join(sorted({str(r.gpu["name"]) for r in found.values() if "name" in r.gpu}))
    print(f"{manifest.name} at {ranges}, {len(manifest.members)} kernels, {name}\n\n{table(rows)}")
    return 0


@reports("held-out", LibraryError, RuntimeUnavailable, WorkerError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.sample.held_out", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the library, or a file of such records")
    add("--sizes", type=int, default=40, help="how many are drawn (default: 40)")
    add("-k", type=int, default=8, help="kernels tried for each size (default: 8)")
    add("--seed", type=int, default=1, help="of the sizes (default: 1)")
    add("--measure", choices=("yes", "no", "recorded"), default="yes", help="default: yes")
    add("--compiled", action="store_true", help="beside torch.compile, too: seconds for each size")
    add("--time-limit", type=float, default=math.inf, metavar="SECONDS", help="default: none")
    add("--space", choices=("listed", "wide"), default="listed", help="of candidates")
    add("--looks", type=Path, metavar="FILE", help="candidates (default: DIR.looks.jsonl)")
    add("--checkpoint", type=Path, help="trained policy (default: the device's)")
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
