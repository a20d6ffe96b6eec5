"""A row a family of what was measured: `python -m ptxflow.eval.study.families_table --into PAGE`.

The best right kernel of each workload of those that were timed beside the libraries that are there
now, over the fastest of them in the same rounds; a pure function of committed records.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

from ptxflow.command import Parser, reports, require_checkout
from ptxflow.env.tasks.arguments import find_family
from ptxflow.env.tasks.definition import load, names
from ptxflow.env.tasks.workload import degenerate
from ptxflow.eval.bench.markdown import markdown, publish
from ptxflow.eval.bench.records import Record, libraries, read_records
from ptxflow.eval.bench.report import FULLY_MASKED, SLOWER, best_ratios, best_records, settled

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "eval"
FILES = {"H200": "rows-h200", "H100": "rows-h100"}
FLASHINFER = "0.7.2.post1"  # records name torch and cuBLAS, and not FlashInfer
NAME, NONE = "results", "-"


def records(device: str) -> list[Record]:
    """All that was measured on a device beside them."""
    return settled(read_records(FOLDER / f"results/{FILES[device]}.jsonl.xz"))


def row(record: Record) -> str:
    """The row that a record counts in: its family; prefills of more queries than keys apart."""
    family = find_family(load(record.definition)).name
    return family + FULLY_MASKED * degenerate(record.definition, record.axes)


def cells(group: Sequence[Record]) -> list[str]:
    """Workloads, geometric mean and least of the best ratios, and how many are behind."""
    ratios = list(best_ratios(group).values())
    if not ratios:
        return [str(len(best_records(group))), NONE, NONE, NONE]
    behind = sum(r < SLOWER for r in ratios)
    return [str(len(ratios)), f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", str(behind)]


def table(measured: dict[str, list[Record]]) -> str:
    """The table in Markdown, from the records of each device by its name."""
    groups: dict[str, dict[str, list[Record]]] = {}
    order = {find_family(load(name)).name: i for i, name in reversed(list(enumerate(names())))}
    for device, found in measured.items():
        for record in found:
            groups.setdefault(row(record), {}).setdefault(device, []).append(record)
    rows = []
    for name in sorted(groups, key=lambda n: (order[n.removesuffix(FULLY_MASKED)], n)):
        timed = {
            library: None
            for group in groups[name].values()
            for r in group
            for library in libraries(r.definition, r.peers)
        }
        of_each = [c for device in measured for c in cells(groups[name].get(device, []))]
        rows.append([name, ", ".join(sorted(timed)) or NONE, *of_each])
    heads = [f"{device} {head}" for device in measured
             for head in ("workloads", "mean", "least", f"under {SLOWER}")]  # fmt: skip
    return f"{versions(measured)}\n\n{markdown(('family', 'libraries', *heads), rows, 2)}"


def versions(measured: dict[str, list[Record]]) -> str:
    """What was timed beside: the versions of the libraries on each device."""
    lines = []
    for device, found in measured.items():
        stacks = {(r.gpu["torch"], r.gpu["cublas"]) for r in found if r.gpu}
        ((torch, cublas),) = stacks
        lines.append(f"{device}: torch {torch}, cuBLAS {cublas}, FlashInfer {FLASHINFER}")
    return f"{'; '.join(lines)}."


@reports("families_table")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file or the page cannot be used."""
    parser = Parser(
        prog="python -m ptxflow.eval.study.families_table",
        description=__doc__,
        epilog="example: python -m ptxflow.eval.study.families_table --into README.md",
    )
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="instead of printing")
    args = parser.parse_args(argv)
    require_checkout("families_table")
    publish({NAME: table({device: records(device) for device in FILES})}, args.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
