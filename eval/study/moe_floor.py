"""How near the best MoE kernels are to the memory and arithmetic floors of their inputs.

    python -m ptxflow.eval.study.moe_floor FILE...

Which weights a MoE reads only its inputs say. So the records' refined times are set beside the
bytes of the local experts that some token of these inputs chose, at the nominal bandwidth, and
beside the FLOP of the rows that they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptxflow.command import Parser, reports
from ptxflow.compiler.device import H200
from ptxflow.env.measurements import REFINE
from ptxflow.env.tasks.definition import Definition, load
from ptxflow.eval.bench.inputs import make_indices
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.bench.records import Record, RecordError, read_records
from ptxflow.eval.bench.work import SEED, counted, routed, timed_on


@dataclass(frozen=True)
class Reached:
    """One workload: what its inputs ask for, and the best kernel's time."""

    seq_len: int
    rows: int  # of local experts
    experts: int  # local ones with rows
    us: float
    bandwidth: float  # of the nominal one: of the bytes that these inputs ask for
    tflops: float  # of both products


def reached(definition: Definition, seq_len: int, us: float, seed: int = SEED) -> Reached:
    """On an H200; `us` microseconds are what the kernel takes on the seed's inputs."""
    axes = {"seq_len": seq_len}
    found = routed(definition.bind(axes), make_indices(definition, axes, seed))
    work = counted(definition, axes, seed)
    share = work.bytes / H200.hbm_bytes_per_s / (us * 1e-6)
    return Reached(seq_len, found.rows, found.experts, us, share, 1e-6 * work.flops / us)


def table(records: Sequence[Record]) -> str:
    """A row for each MoE workload that the records refine on an H200."""
    best: dict[tuple[str, int], tuple[float, int]] = {}
    for r in records:
        if r.definition.startswith("moe") and r.timing_pass == REFINE and r.latency_us:
            place = r.definition, int(r.axes["seq_len"])
            timed = r.latency_us["median"], timed_on(r)
            best[place] = min(timed, best.get(place, timed))
    found = [reached(load(name), length, *held) for (name, length), held in sorted(best.items())]
    heads = ("seq_len", "rows", "experts", "us", "of the nominal bandwidth", "TFLOP/s")
    return markdown(heads, [
        [str(r.seq_len), str(r.rows), str(r.experts), f"{r.us:.1f}", f"{r.bandwidth:.0%}",
         f"{r.tflops:.0f}"] for r in found
    ], None)  # fmt: skip


@reports("moe_floor", RecordError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.study.moe_floor", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="record files")
    args = parser.parse_args(argv)
    print(table([r for path in args.files for r in read_records(path)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
