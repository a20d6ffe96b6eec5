"""What `sample.py --library` leaves: the library's folder with a Solution, a page, and a plot."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ptxflow.compiler.files import write_whole
from ptxflow.compiler.library.manifest import Dispatch, DispatchAxis, Manifest, write_files
from ptxflow.compiler.library.member import contents, member, target_of
from ptxflow.eval.bench.markdown import markdown
from ptxflow.eval.sample.library import Library, Served, loss
from ptxflow.eval.sample.solution import solution
from ptxflow.eval.study import style

PAGE, PLOT, SOLUTION = "library.md", "library.png", "solution.json"


@dataclass(frozen=True)
class Origin:
    """What a library was made by. `tools` names versions, digests, seed and command; `known` says
    what times are by: "measurement on NVIDIA H200", or the reward's name."""

    tools: Mapping[str, str]
    known: str
    remarks: tuple[str, ...] = ()


def manifest_of(library: Library, origin: Origin) -> Manifest:
    """The library as its manifest; axes with one cell are not in its dispatch."""
    axes = {n: ends for n, ends in library.bounds.items() if len(ends) > 1}
    return Manifest(
        definition=library.ranges.definition.to_json(),
        target=target_of(library.device),
        ranges=library.ranges.served,
        members=tuple(
            member(kernel, _provenance(library, number, origin))
            for number, kernel in enumerate(library.members)
        ),
        dispatch=Dispatch(
            tuple(DispatchAxis(n, ends) for n, ends in axes.items()),
            tuple(library.cells.ravel().tolist()),
        ),
        tools=dict(origin.tools),
    )


def _provenance(library: Library, number: int, origin: Origin) -> dict[str, Any]:
    kernel, emulation = library.members[number], library.emulations[number]
    own = [row for row in library.looked if row.member == number]
    return {
        "checked_at": dict(kernel.problem.axes),
        "checks": list(kernel.checks),
        "emulated": "no" if emulation is None else str(emulation),
        "times_by": origin.known,
        "us": [{**row.sizes, "us": round(row.seconds * 1e6, 3)} for row in own],
    }


def write(library: Library, origin: Origin, folder: Path) -> None:
    """Everything, into an existing empty folder, which is moved to its place afterwards."""
    manifest, files = manifest_of(library, origin), contents(library.members)
    write_files(folder, manifest, files)
    made = solution(manifest, files, summary(library, origin))
    write_whole(folder / SOLUTION, json.dumps(made, indent=1) + "\n")
    try:
        plot(library, origin, folder / PLOT)
    except ModuleNotFoundError as error:  # a machine for measuring may have no plotting
        print(f"no plot: {error}", file=sys.stderr)
    (folder / PAGE).write_text(page(library, origin, (folder / PLOT).exists()))


def title(library: Library) -> str:
    name, device = library.ranges.definition.name, library.device.name.upper()
    return f"{name} at {library.ranges} on {device}"


def summary(library: Library, origin: Origin) -> str:
    """A few lines: how many kernels, what they lose, what the bound on their number costs."""
    mean, most = loss(library.looked)
    lines = [
        f"{title(library)}: {len(library.members)} kernels, {library.cells.size} cells, "
        f"by {origin.known}",
        f"against the best known of each of {len(library.looked)} sizes looked at: "
        f"{mean:.2%} slower in the geometric mean, {most:.1%} at most",
        "what a bound on the kernels costs there: "
        + ", ".join(f"{n}: {cost:.2%}" for n, cost in enumerate(library.costs, 1)),
    ]
    if library.held_out:
        mean, most = loss(library.held_out)
        lines.append(
            f"at {len(library.held_out)} sizes drawn at random, none of them looked at, by the "
            f"reward: {mean:.2%} slower than the best of the whole space, {most:.1%} at most"
        )
    return "\n".join(lines)


def page(library: Library, origin: Origin, plotted: bool = True) -> str:
    """library.md: the summary, the members, which sizes each serves, and what is known of each."""
    parts = [
        f"# {title(library)}",
        "\n".join(f"- {line}" for line in [*summary(library, origin).splitlines()[1:],
                                           f"{library.candidates} candidates; times by "
                                           f"{origin.known}",
                                           *origin.remarks,
                                           *(f"refused: {text}" for text in library.refused)]),
        "## Members\n\n" + _members(library),
        "## Sizes looked at\n\n" + _rows(library, library.looked),
        *(["## Sizes drawn at random, by the reward\n\n" + _rows(library, library.held_out)]
          if library.held_out else []),
        "## Made by\n\n" + markdown(("what", "which"), origin.tools.items(), left=2),
        *([f"![times and losses by size]({PLOT})"] if plotted else []),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _members(library: Library) -> str:
    rows = []
    for number, kernel in enumerate(library.members):
        own = [math.log(r.seconds / r.best) for r in library.looked if r.member == number]
        slower = f"{math.expm1(sum(own) / len(own)):.2%}" if own else "-"
        choices = " ".join(f"{n}={v}" for n, v in kernel.strategy.choices)
        rows.append((number, kernel.strategy.key, serves(library, number), len(own), slower,
                     choices))  # fmt: skip
    return markdown(("member", "key", "serves", "looks", "slower by", "strategy"), rows, left=None)


def serves(library: Library, member: int) -> str:
    """The sizes of a member: intervals along one axis, else how many cells."""
    wide = [n for n, ends in library.bounds.items() if len(ends) > 1]
    if len(wide) != 1:
        return f"{int((library.cells == member).sum())} of {library.cells.size} cells"
    ends = library.bounds[wide[0]]
    starts = [library.ranges.free[wide[0]][0], *(e + 1 for e in ends)]
    own = np.flatnonzero(library.cells.ravel() == member)
    return ", ".join(f"{starts[i]}-{ends[i]}" for i in own)


def _rows(library: Library, rows: Sequence[Served]) -> str:
    axes = tuple(library.ranges.free)
    ordered = sorted(rows, key=lambda row: [row.sizes[n] for n in axes])
    return markdown(
        (*axes, "member", "us", "best us", "slower by"),
        [
            (*(row.sizes[n] for n in axes), row.member, f"{row.seconds * 1e6:.2f}",
             f"{row.best * 1e6:.2f}", f"{row.seconds / row.best - 1:.1%}")
            for row in ordered
        ],
        left=0,
    )  # fmt: skip


def plot(library: Library, origin: Origin, path: Path) -> None:
    """How far who serves is from the best known, over the axis with the widest range."""
    free = library.ranges.free
    axis = max(free, key=lambda n: free[n][1] / free[n][0])
    mean, _ = loss(library.looked)
    with style.style():
        figure, ((above, below),) = style.figure(4.2, 2)
        for number, _ in enumerate(library.members):
            own = [r for r in (*library.looked, *library.held_out) if r.member == number]
            x = [r.sizes[axis] for r in own]
            look = {
                "s": 14,
                "color": style.colour(number % 10),
                "marker": "os^Dv"[number // 10 % 5],
            }
            above.scatter(x, [r.seconds * 1e6 for r in own], label=f"member {number}", **look)
            below.scatter(x, [100 * (r.seconds / r.best - 1) for r in own], **look)
        above.set(xscale="log", yscale="log", xlabel=axis, ylabel="time (us)")
        below.set(xscale="log", xlabel=axis, ylabel="slower than the best known (%)")
        for scale in (above.xaxis, above.yaxis, below.xaxis):
            scale.set_view_interval(*scale.get_view_interval(), ignore=True)
            style.plain_log(scale)
        style.legend(figure, above, below=True)
        style.titled(
            figure,
            f"{title(library)}: {style.counted(len(library.members), 'kernel')} are "
            f"{style.share(mean)} slower than the best of each size, by {origin.known}",
        )
        style.save(figure, path)
