"""The tables of eval/results/verification.md, from the results of `verify` and `mutation`.

`python -m ptxflow.eval.verify.page eval/results/*.json` prints one section a kind, in Markdown;
with --into PAGE, puts each section between its marks in that page. A pure function of the files.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ptxflow.command import Parser, reports
from ptxflow.eval.bench.markdown import markdown, publish
from ptxflow.eval.verify import real, results, strategies, survey
from ptxflow.eval.verify.results import Summary, median_and_max

Row = Sequence[object]


def verified(summaries: Sequence[Summary]) -> str:
    """Each device's strategies: what passed, a table by definition, the command."""
    parts = []
    for summary in summaries:
        heads, *rows = strategies.lines(summary)
        parts += [f"{strategies.conclusion(summary)}.", markdown(heads, rows, None)]
        parts += [f"- {line}" for line in summary["failures"]]
    return "\n\n".join([*parts, _commands(summaries)])


def mutated(summaries: Sequence[Summary]) -> str:
    """The totals of each family and device, then operators and equivalent reasons, with a column a
    device."""
    names = [s["device"] for s in summaries]
    heads = [f"{name} {verdict}" for name in names for verdict in _SHOWN]
    reasons = sorted({why for s in summaries for why in s["equivalent"]})
    of = ((s, {**s.get("families", {}), "all": s}) for s in summaries)
    rows = ((s["device"], name, row) for s, each in of for name, row in each.items())
    parts = [
        markdown(TOTALS, [_total(*row) for row in rows], None),
        markdown(["operator", *heads], _by_operator(summaries), None),
        markdown(
            ["why equivalent", *names],
            [[why, *(s["equivalent"].get(why, 0) for s in summaries)] for why in reasons],
            None,
        ),
    ]
    for summary in summaries:
        for what in ("faults", "refused", "wrong"):
            parts += [f"- {summary['device']}, {what}: {text}" for text in summary[what]]
    return "\n\n".join([*parts, _commands(summaries)])


_SHOWN = ("killed", "caught", "equivalent", "survived")
TOTALS = (
    "device", "family", "kernels", "mutants", "killed by the validator", "caught by the emulator",
    "of these by a fault or hazard", "equivalent", "survived", "equivalent but refused",
    "equivalent but WRONG", "validator s", "emulator s",
)  # fmt: skip


def _total(device: str, name: str, row: Summary) -> Row:
    counts, ran = row["all"], row["emulated"]
    return (
        device, name, row["kernels"], sum(counts.values()), counts["killed"], counts["caught"],
        ran["faults"], counts["equivalent"], counts["survived"], counts["refused"],
        ran["wrong"] - counts["caught"],
        median_and_max(row["validator_s"]), median_and_max(row["emulator_s"]),
    )  # fmt: skip


def _by_operator(summaries: Sequence[Summary]) -> list[Row]:
    operators = dict.fromkeys(op for s in summaries for op in s["operators"])
    return [
        [op, *(s["operators"].get(op, {}).get(v, 0) for s in summaries for v in _SHOWN)]
        for op in operators
    ]


def value_mutated(summaries: Sequence[Summary]) -> str:
    """Verdicts by family and device, then by kind, and every mutant that escaped."""
    heads = ("", *(f"{s['device']} {v}" for s in summaries for v in summaries[0]["all"]))
    parts = []
    for title in ("families", "kinds"):
        names = dict.fromkeys(n for s in summaries for n in s[title])
        rows = [(n, [s[title].get(n, {}) for s in summaries]) for n in names]
        rows += [("all", [s["all"] for s in summaries])] * (title == "families")
        body = [
            [n, *(c.get(v, 0) for c in cells for v in summaries[0]["all"])] for n, cells in rows
        ]
        parts.append(markdown(heads, body, None))
    for summary in summaries:
        for what in ("escaped", "crashed"):
            parts += [f"- {summary['device']}, {what}: {text}" for text in summary[what]]
    return "\n\n".join([*parts, _commands(summaries)])


def _commands(summaries: Sequence[Summary]) -> str:
    lines = []
    for s in summaries:
        versions = ", ".join(f"{name} {version}" for name, version in s["versions"].items())
        cost = f"{s['seconds']:.0f} s, {s['processes']} processes"
        lines += [f"$ {s['command']}", f"{cost}; {versions}"]
    return "\n".join(["```", *lines, "```"])


def emulated_rows(summaries: Sequence[Summary]) -> str:
    """A table a device of the rows that were emulated at their real sizes."""
    parts = []
    for summary in summaries:
        right = sum(row["verdict"] == "right" for row in summary["rows"])
        parts.append(f"{right} of {len(summary['rows'])} rows right for {summary['arch']}.")
        parts.append(markdown(real.HEADS, real.lines(summary["rows"]), None))
    return "\n\n".join([*parts, _commands(summaries)])


def surveyed(summaries: Sequence[Summary]) -> str:
    """Each device's drawn shapes: what holds, a table by family, what does not."""
    parts = []
    for summary in summaries:
        parts += [survey.conclusion(summary)]
        parts += [markdown(survey.HEADS, survey.lines(summary), None)]
        parts += [f"- {line}" for line in summary["failures"]]
    return "\n\n".join([*parts, _commands(summaries)])


SECTIONS = {
    "verify": verified,
    "mutation": mutated,
    "mutate-values": value_mutated,
    "verify-real": emulated_rows,
    "survey": surveyed,
}


def sections(summaries: Iterable[Summary]) -> dict[str, str]:
    """The text of each kind of result that there is, devices in alphabetical order."""
    ordered = sorted(summaries, key=lambda s: str(s["device"]))
    found = {kind: [s for s in ordered if s["kind"] == kind] for kind in SECTIONS}
    return {kind: SECTIONS[kind](group) for kind, group in found.items() if group}


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m ptxflow.eval.verify.page", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="instead of printing")
    return parser


@reports("page")
def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 where a file or the page cannot be used."""
    args = arguments().parse_args(argv)
    publish(sections(map(results.read, args.results)), args.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
