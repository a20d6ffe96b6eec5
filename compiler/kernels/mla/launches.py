"""How the kernels of latent attention are launched: one, or two with a workspace between them."""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.ir import UOp
from ptxflow.compiler.kernels.attention.sequences import SCALE
from ptxflow.compiler.kernels.mla.combine import Combine
from ptxflow.compiler.kernels.mla.decisions import SUM_WARPS
from ptxflow.compiler.kernels.mla.shape import BLOCK, Shape
from ptxflow.compiler.launch import Expr, Launch, Workspace, parameter
from ptxflow.compiler.lower import layout


def launch_of(kernel: UOp, grid: Expr, count: Expr) -> Launch:
    """The launch of a kernel whose grid is an expression; `count`: of sequences."""
    info = kernel.arg
    return Launch(
        entry=info.name,
        grid=(grid, "1", "1"),
        block=32 * info.warps,
        cluster=(1, 1, 1),
        smem_bytes=layout(info).smem_bytes,
        params=tuple(parameter(name, kind, count, SCALE) for name, kind in info.params),
    )


def shared(grid: Expr, shape: Shape) -> Expr:
    """As many CTAs for each as share the heads of a query."""
    return f"({grid}) * {shape.head_ctas}" if shape.head_ctas > 1 else grid


def with_sums(first: Launch, c: Combine, count: Expr, rows: Expr) -> Launch:
    """Both launches; each CTA of the first has a row of the workspace. `count`: of sequences;
    `rows`: of queries that the second adds up."""
    then = Launch(
        entry=c.entry,
        grid=(f"{rows} * {c.blocks // SUM_WARPS * c.head_ctas}", "1", "1"),
        block=32 * SUM_WARPS,
        cluster=(1, 1, 1),
        smem_bytes=0,
        params=tuple(parameter(name, kind, count, SCALE) for name, kind in c.params),
        dependent=bool(c.s.dependent),
    )
    sizes = (("sums", c.blocks * c.across * BLOCK), ("stats", 2 * c.outputs.wide * c.across))
    workspace = tuple(Workspace(name, f"{first.grid[0]} * {4 * floats}") for name, floats in sizes)
    return replace(first, then=(then,), workspace=workspace)
