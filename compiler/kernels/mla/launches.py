"""How the kernels of latent attention are launched: one, or two with a workspace between them."""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels.attention.sequences import SCALE
from ptxflow.compiler.kernels.mla.combine import Combine
from ptxflow.compiler.kernels.mla.decisions import SUM_WARPS
from ptxflow.compiler.kernels.mla.shape import BLOCK, COUNT, Shape
from ptxflow.compiler.launch import Expr, Launch, Workspace, launch_of
from ptxflow.compiler.lower import layout


def first_launch(kernel: UOp, grid: Expr, count: Expr) -> Launch:
    """The launch of a kernel whose grid is an expression; `count`: of sequences."""
    info, given = kernel.arg, {**SCALE, COUNT: count}
    return launch_of(info.name, grid, info.warps, info.params, given, layout(info).smem_bytes)


def shared(grid: Expr, shape: Shape) -> Expr:
    """As many CTAs for each as share the heads of a query."""
    return f"({grid}) * {shape.head_ctas}" if shape.head_ctas > 1 else grid


def with_sums(first: Launch, c: Combine, count: Expr, rows: Expr) -> Launch:
    """Both launches; each CTA of the first has a row of the workspace. `count`: of sequences;
    `rows`: of queries that the second adds up."""
    grid = f"{rows} * {c.blocks // SUM_WARPS * c.head_ctas}"
    then = launch_of(
        c.entry, grid, SUM_WARPS, c.params, {COUNT: count}, dependent=bool(c.s.dependent)
    )
    sizes = (("sums", c.blocks * c.across * BLOCK), ("stats", 2 * c.outputs.wide * c.across))
    workspace = tuple(Workspace(name, f"{first.grid[0]} * {4 * floats}") for name, floats in sizes)
    return replace(first, then=(then,), workspace=workspace)
