"""What a tuning session says: a line and a page of a round, a page of the whole, a summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.tune.loop import Attribution, Branch, Round


def line(made: Round) -> str:
    """A round as it ends."""
    g = made.gaps
    gaps = f"compute {g.compute:.2f}, memory {g.memory:.2f}, latency {g.latency:.2f} by {g.source}"
    best = f"{made.us:.2f} us after {made.measured} kernels"
    return f"round {made.number}: {best}; gaps {gaps}" + f"; ends: {made.end}" * bool(made.end)


def round_page(made: Round) -> str:
    """Gaps, branches and attributions of a round."""
    return "\n".join(
        [f"# Round {made.number}", "", line(made), "", branches(made), attributed(made)]
    )


def branches(made: Round) -> str:
    """A table of what was tried; empty for a round that tried nothing."""
    if not made.branches:
        return ""
    rows = [[*_moves(b), b.key, f"{b.us:.2f}" if not b.why or b.why == "ok" else b.why]
            for b in made.branches]  # fmt: skip
    return markdown(["moves", "the rest", "strategy", "us"], rows, left=None) + "\n"


def _moves(branch: Branch) -> tuple[str, str]:
    return ", ".join(branch.moves), "drawn" if branch.drawn else "kept"


def attributed(made: Round) -> str:
    """A table of what the champion's moves are worth."""
    if not made.attributions:
        return ""
    rows = [[a.move, _gain(a), a.verdict] for a in made.attributions]
    return markdown(["move of the champion", "gain", "class"], rows) + "\n"


def _gain(a: Attribution) -> str:
    return "-" if a.gain is None else f"{100 * a.gain:+.2f}%"


def summary(state: Mapping[str, Any]) -> str:
    """The end of a session in one line."""
    c = state["champion"]
    faster = c["start_us"] / c["us"]
    beside = "".join(f", {name} {us:.2f}" for name, us in c["peers"].items())
    return (
        f"champion {c['key']}: {c['us']:.2f} us by {c['by']}, {faster:.3f}x the best of its "
        f"{state['settings']['starts']} starts, after {state['measured']} kernels{beside}"
    )


def page(state: Mapping[str, Any]) -> str:
    """The session: its bottleneck from round to round, and what moves were worth."""
    s = state["settings"]
    axes = " ".join(f"{n}={v}" for n, v in s["axes"].items())
    axis_names = "compute", "memory", "latency"
    migration = [
        [r["number"], r["start"], *(f"{r['gaps'][a]:.2f}" for a in axis_names),
         r["gaps"]["source"], f"{r['us']:.2f}", r["measured"], r["end"]]
        for r in state["rounds"]
    ]  # fmt: skip
    worth = [
        [r["number"], a["move"], _gain(Attribution(**a)), a["verdict"]]
        for r in state["rounds"]
        for a in r["attributions"]
    ]
    head = ["round", "from", *axis_names, "by", "best us", "kernels", "end"]
    parts = [
        f"# {s['definition']} {axes} on {s['device']}", summary(state),
        f"Noise of two measurements: {100 * state['noise']:.1f}%.",
        "## Bottleneck from round to round", markdown(head, migration),
        "## What the champions' moves are worth",
        markdown(["round", "move", "gain", "class"], worth) if worth else "No round had a new one.",
    ]  # fmt: skip
    if state.get("profiler"):
        parts.insert(3, f"No profile: {state['profiler']}.")
    return "\n\n".join(parts) + "\n"
