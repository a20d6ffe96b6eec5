"""The figure of the data path: `python -m ptxflow.eval.study.data_path --out plots/data_path.png`.

A box a stage, in the colour of the folder that holds it, with the module that does it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from ptxflow.command import Parser, reports

COLOURS = {"env": "#d9ead3", "gfn": "#fde3c8", "compiler": "#d3e3f5", "eval": "#ece0f3"}
WIDTH, HEIGHT = 1.62, 0.80  # of a box
STEP = 2.0, 1.35  # between the centres of boxes
Point = tuple[float, float]


@dataclass(frozen=True)
class Stage:
    """A box: what is made, and where; `column` from the left, `row` from the top."""

    what: str
    where: str
    column: int
    row: int

    @property
    def centre(self) -> Point:
        return self.column * STEP[0], -self.row * STEP[1]

    @property
    def folder(self) -> str:
        return self.where.partition("/")[0]


STAGES = {
    "definition": Stage("definition\n+ axes", "env/tasks", 0, 0),
    "space": Stage("valid\nstrategies", "env/space.py", 1, 0),
    "strategy": Stage("k strategies", "gfn/inference.py", 2, 0),
    "kernel": Stage("kernel\n(UOps, roles)", "compiler/kernels", 3, 0),
    "checked": Stage("validated\nkernel", "compiler/check", 4, 0),
    "ptx": Stage("PTX", "compiler/backend", 5, 0),
    "emulated": Stage("emulated\non a CPU", "compiler/emulator", 6, 0),
    "cubin": Stage("cubin, SASS\nchecked", "compiler/backend", 5, 1),
    "solution": Stage("Solution\nfor torch", "eval/sample", 6, 1),
    "measured": Stage("measurement\non a GPU", "eval/bench", 4, 1),
    "reward": Stage("reward\nexp(TFLOPS / T)", "env/reward.py", 3, 1),
    "policy": Stage("policy\n(GFlowNet)", "gfn/training.py", 2, 1),
    "model": Stage("analytic model,\nsurrogate", "env/cost.py", 1, 1),
}
ARROWS = (
    ("definition", "space"), ("space", "strategy"), ("strategy", "kernel"), ("kernel", "checked"),
    ("checked", "ptx"), ("ptx", "emulated"), ("ptx", "cubin"), ("cubin", "solution"),
    ("cubin", "measured"), ("measured", "reward"), ("reward", "policy"), ("policy", "strategy"),
    ("space", "model"),
)  # fmt: skip


def box(axes: Axes, stage: Stage) -> None:
    """One stage: what it makes in large letters, its module below."""
    x, y = stage.centre
    corner = x - WIDTH / 2, y - HEIGHT / 2
    style = "round,pad=0.04,rounding_size=0.1"
    axes.add_patch(
        FancyBboxPatch(corner, WIDTH, HEIGHT, style, fc=COLOURS[stage.folder], ec="#555555", lw=0.8)
    )
    axes.text(x, y + 0.1, stage.what, ha="center", va="center", fontsize=9)
    axes.text(
        x, y - 0.3, stage.where, ha="center", va="center", fontsize=6.8, family="monospace",
        color="#444444",
    )  # fmt: skip


def edge(stage: Stage, towards: Stage) -> Point:
    """Where an arrow between two neighbours of a row or a column meets the first."""
    (x, y), (to_x, to_y) = stage.centre, towards.centre
    if y == to_y:
        return x + (WIDTH / 2 + 0.05) * (1 if to_x > x else -1), y
    return x, y + (HEIGHT / 2 + 0.05) * (1 if to_y > y else -1)


def arrow(axes: Axes, begin: Point, end: Point) -> None:
    style = {"arrowstyle": "-|>", "color": "#333333", "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=begin, arrowprops=style)


def data_path() -> Figure:
    """The whole figure; pixels depend on matplotlib's version alone."""
    figure = Figure(figsize=(9.6, 2.95))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    for stage in STAGES.values():
        box(axes, stage)
    for begin, end in ARROWS:
        first, second = STAGES[begin], STAGES[end]
        arrow(axes, edge(first, second), edge(second, first))
    below = -STEP[1] - HEIGHT / 2 - 0.05
    (left, _), (right, _) = STAGES["model"].centre, STAGES["reward"].centre
    axes.plot([left, left, right], [below, below - 0.28, below - 0.28], color="#333333", lw=1.1)
    arrow(axes, (right, below - 0.29), (right, below))
    axes.text(
        (left + right) / 2, below - 0.4, "scores every valid strategy, without a GPU",
        ha="center", va="center", fontsize=7.5, color="#444444",
    )  # fmt: skip
    for i, (folder, colour) in enumerate(COLOURS.items()):
        x, y = 6.2 + 1.55 * i, below - 0.36
        axes.add_patch(FancyBboxPatch((x, y), 0.22, 0.16, "round,pad=0.02", fc=colour, ec="#555555",
                                      lw=0.6))  # fmt: skip
        axes.text(x + 0.36, y + 0.08, f"{folder}/", va="center", fontsize=8, family="monospace")
    axes.set_xlim(-WIDTH / 2 - 0.15, 6 * STEP[0] + WIDTH / 2 + 0.15)
    axes.set_ylim(below - 0.6, HEIGHT / 2 + 0.15)
    axes.set_axis_off()
    return figure


@reports("data_path")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m ptxflow.eval.study.data_path",
        description=__doc__,
        epilog="example: python -m ptxflow.eval.study.data_path --out plots/data_path.png",
    )
    parser.add_argument("--out", type=Path, default=Path("out/data_path.png"), metavar="FILE.png")
    args = parser.parse_args(argv)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    data_path().savefig(args.out, dpi=110, pil_kwargs={"optimize": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
