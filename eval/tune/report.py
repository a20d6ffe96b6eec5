"""What a tuning session says: a line and a page of a round, the report of the whole, a summary.

`python -m ptxflow.eval.tune.report DIR...` prints a table of the sessions in these folders, or in
files of sessions that it packed.
"""

import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.compilation import CompiledKernel
from ptxflow.compiler.files import write_whole
from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.markdown import markdown, picture, placed
from ptxflow.eval.bench.records import best_baseline
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.study.metrics import ends, resamples
from ptxflow.eval.tune.knowledge import ended
from ptxflow.eval.tune.loop import Round

CAPTIONS = {
    "migration": "How far the kernel that each round began at is from its roofs, by axis.",
    "progress": "Every kernel in the order in which it was measured.",
    "roofline": "The kernels that were the fastest so far, under the device's roofs.",
}
RANKED = 10  # kernels from which a rank correlation is shown
NO_MOVE = "No round had a new champion."


def line(made: Round) -> str:
    """A round as it ends."""
    g = made.gaps
    gaps = f"compute {g.compute:.2f}, memory {g.memory:.2f}, latency {g.latency:.2f} by {g.source}"
    best = f"{made.us:.2f} us after {made.measured} kernels"
    return f"round {made.number}: {best}; gaps {gaps}" + f"; ends: {made.end}" * bool(made.end)


def round_page(made: Round) -> str:
    """Gaps, branches and attributions of a round."""
    tables = tried([asdict(made)]), worth([asdict(made)])
    return "\n\n".join([f"# Round {made.number}", line(made), *filter(None, tables)]) + "\n"


def tried(rounds: Sequence[Mapping[str, Any]]) -> str:
    """A table of branches; empty where there are none."""
    rows = [
        [r["number"], ", ".join(b["moves"]) or "none", "drawn" if b["drawn"] else "kept", b["key"],
         f"{b['us']:.2f}" if b["us"] < math.inf else b["why"]]
        for r in rounds for b in r["branches"]
    ]  # fmt: skip
    return markdown(["round", "moves", "the rest", "strategy", "us"], rows, 4) if rows else ""


def worth(rounds: Sequence[Mapping[str, Any]]) -> str:
    """A table of what champions' moves are worth; empty where there was no new champion."""
    rows = [
        [r["number"], a["move"], "-" if a["gain"] is None else f"{100 * a['gain']:+.2f}%",
         a["verdict"]]
        for r in rounds for a in r["attributions"]
    ]  # fmt: skip
    return markdown(["round", "move of the champion", "gain", "class"], rows, 2) if rows else ""


def summary(state: Mapping[str, Any]) -> str:
    """The end of a session in one line."""
    c = state["champion"]
    faster = c["start_us"] / c["us"]
    beside = "".join(f", {name} {us:.2f}" for name, us in c["peers"].items())
    return (
        f"champion {c['key']}: {c['us']:.2f} us by {c['by']}, {faster:.3f}x the best of its "
        f"{state['settings']['starts']} starts, after {state['measured']} kernels{beside}"
    )


def table(states: Sequence[Mapping[str, Any]]) -> str:
    """Sessions beside each other, and geometric means: how much faster the champion is than the
    best start, the best of the policy's draws and the fastest library, in the same rounds; and the
    kernel that was fastest before these rounds, which chose among several, than the draws."""
    head = ["workload", "kernels", "us", "of its start", "of the rivals' best",
            "unchosen, of the rivals' best", "of the library"]  # fmt: skip
    rows, ratios = [], list[tuple[float | None, ...]]()
    for state in states:
        s, c = state["settings"], state["champion"]
        label = " ".join([s["definition"], *(f"{n}={v}" for n, v in s["axes"].items())])
        library = best_baseline(s["definition"], c["peers"])
        found = (
            c["start_us"] / c["us"],
            c["rival_us"] and c["rival_us"] / c["us"],
            c["rival_us"] and c["rival_us"] / c["screened_us"],
            library and library / c["us"],
        )
        ratios.append(found)
        cells = ["-" if x is None else f"{x:.3f}" for x in found]
        rows.append([label, str(state["measured"]), f"{c['us']:.2f}", *cells])
    columns = [[x for x in column if x] for column in zip(*ratios, strict=True)]
    for name, of in (
        ("geometric mean", lambda x: f"{geometric_mean(x):.3f}"),
        ("95% over workloads", between),
        ("least", lambda x: f"{min(x):.3f}"),
    ):
        rows.append([name, "", "", *(of(x) if x else "-" for x in columns)])
    return markdown(head, rows, 1)


def beside_counters(states: Sequence[Mapping[str, Any]]) -> str:
    """How well floors tell what Nsight Compute counts, of the kernels that rounds began at: the
    share of a roof by its floor over the time, and as counted; Spearman's rank correlation of the
    two and their median difference; how often both call the same roof's gap the larger."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for state in states:
        floors, done = Floors(**state["floors_us"]), set[str]()
        for made in state["rounds"]:
            counted = state.get("profiles", {}).get(made["start"])
            if counted is None or made["start"] in done:
                continue
            done.add(made["start"])
            us = floors.attainable / made["gaps"]["share"]
            row = floors.compute / us, counted["compute"], floors.memory / us, counted["memory"]
            first = [
                floors.compute * (1 - c) > floors.memory * (1 - m) for c, m in (row[::2], row[1::2])
            ]
            for name in (state["champion"]["strategy"]["family"], "all"):
                found.setdefault(name, []).append((*row, first[0] == first[1]))
    rows = []
    for name, of in sorted(found.items(), key=lambda item: (item[0] == "all", item[0])):
        table, cells = np.array(of), []
        for by, seen in (table[:, :2].T, table[:, 2:4].T):
            rank = f"{spearmanr(by, seen)[0]:.2f}" if len(of) >= RANKED else "-"
            middle = np.median(by), np.median(seen), np.median(abs(by - seen))
            cells += [*(f"{100 * x:.0f}%" for x in middle), rank]
        rows.append([name, str(len(of)), *cells, f"{table[:, 4].mean():.0%}"])
    head = [f"{roof}: {what}" for roof in ("compute", "memory")
            for what in ("floor", "counted", "apart", "rank")]  # fmt: skip
    return markdown(["kernels of", "", *head, "same larger gap"], rows, 1)


def between(ratios: Sequence[float]) -> str:
    """The ends of a geometric mean's 95% interval, by bootstrap over workloads."""
    logs = np.log(ratios)
    low, high = np.exp(ends(resamples(len(logs)).T @ logs / len(logs)))
    return f"{low:.3f} to {high:.3f}"


def page(state: Mapping[str, Any], folder: Path) -> str:
    """The whole session in Markdown; its plots are written, too."""
    from ptxflow.eval.tune import plots  # matplotlib takes a second to load

    s = state["settings"]
    axes = " ".join(f"{n}={v}" for n, v in s["axes"].items())
    names = "compute", "memory", "latency"
    migration = [
        [r["number"], r["start"], *(f"{r['gaps'][a]:.2f}" for a in names),
         r["gaps"]["source"], f"{r['us']:.2f}", r["measured"], r["end"]]
        for r in state["rounds"]
    ]  # fmt: skip
    drawn = plots.draw(state, folder / "plots")
    held = {n: picture(CAPTIONS[n], str(path.relative_to(folder))) for n, path in drawn.items()}
    said = [summary(state), f"Noise of two measurements: {100 * state['noise']:.1f}%."]
    said += [f"No profile: {state['profiler']}."] if state.get("profiler") else []
    head = ["round", "from", *names, "by", "best us", "kernels", "end"]
    final = list(state["champion"]["strategy"]["choices"].items())
    sections = {
        "Bottleneck from round to round": f"{markdown(head, migration)}\n\n{held['migration']}",
        "What the champions' moves are worth": "Each taken back alone from the kernel that had "
        f"become the fastest.\n\n{worth(state['rounds']) or NO_MOVE}",
        "Time against measurements": held["progress"],
        "Roofline": held["roofline"],
        "What was tried": "The rest of a strategy is kept from where the round began, or drawn."
        f"\n\n{tried(state['rounds'])}",
        "The champion": markdown(["decision", "choice"], final, 2),
    }
    parts = [f"## {title}\n\n{text}" for title, text in sections.items()]
    title = f"# {s['definition']} {axes} on {s['device']}"
    return "\n\n".join([title, " ".join(said), *parts]) + "\n"


def delivered(work: tuple[Definition, Path, Mapping[str, Any], CompiledKernel]) -> None:
    """Write into a session's folder its champion's PTX, cubin and Solution, and its report."""
    from ptxflow.compiler.library.member import single
    from ptxflow.eval.sample.solution import solution

    definition, folder, state, kernel = work
    final, where = state["champion"], folder / "champion"
    about = (
        f"{definition.name}: champion of a tuning session, {final['us']:.2f} us by {final['by']}"
    )
    made = solution(*single(definition.to_json(), kernel), about)
    write_whole(where / "kernel.ptx", kernel.ptx)
    write_whole(where / "kernel.cubin", kernel.cubin)
    write_whole(where / "strategy.json", json.dumps(final["strategy"], indent=1))
    write_whole(where / "solution.json", json.dumps(made))
    write_whole(folder / "report.md", page(state, folder))


@reports("report")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.tune.report", description=__doc__)
    parser.add_argument("sessions", nargs="+", type=Path, metavar="DIR|FILE.jsonl.xz")
    parser.add_argument("--pack", type=Path, metavar="FILE.jsonl.xz", help="write them, one a line")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="renew its tables")
    args = parser.parse_args(argv)
    found = [state for path in args.sessions for state in ended(path)]
    if not found:
        raise BadInput("no session in there has ended")
    if args.pack:
        with lzma.open(args.pack, "wt", preset=9) as file:
            file.writelines(json.dumps(state) + "\n" for state in found)
    if args.into:
        tables = {"sessions": table(found), "counters": beside_counters(found)}
        write_whole(args.into, placed(args.into.read_text(), tables))
    print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
