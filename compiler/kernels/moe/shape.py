"""What the kernels of a mixture of experts share: sizes, and the workspace.

Tokens find places among *rows*: those of an expert follow each other from a multiple of ROW_ALIGN
on. A *row tile* is a part of an expert's rows; the table `work` has its expert, first row and how
many rows are left from there.
"""

from collections.abc import Mapping

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Scalar, Statement
from ptxflow.compiler.kernels.moe.decisions import COPIED, GATHERED
from ptxflow.compiler.kernels.moe.problem import BLOCK, CHOSEN, ROW_ALIGN, WORD
from ptxflow.compiler.launch import Workspace
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Registers, Vector

TILE_WORDS = 4  # of `work`: expert, first row, rows left, nothing
NOWHERE = 0xFFFFFFFF  # the row of a choice that is not local
BFLOAT16, FLOAT32 = "bfloat16", "float32"
PARTIAL_BYTES = {BFLOAT16: 2, FLOAT32: 4}


class Shape:
    """A strategy applied to a problem; `r` has the registers of one kernel."""

    def __init__(self, problem: Problem, strategy: Strategy, device: Device, prefix: str):
        self.problem, self.s, self.device = problem, strategy, device
        self.r = Registers(prefix)
        axes: Mapping[str, int] = dict(problem.axes)
        self.hidden, self.inner = axes["hidden_size"], axes["intermediate_size"]
        self.local = axes["num_local_experts"]
        self.words = -(-self.local // WORD)
        self.tile_t: int = strategy.tile_t
        self.granule = min(BLOCK, int(strategy.up_tile) // 2)  # inner columns that share a scale
        self.dependent = bool(strategy.dependent)
        self.copied = strategy.get("rows", GATHERED) == COPIED
        self.promotion = int(strategy.get("promotion", 128))

    def word(self, held: Vector, tensor: str, index: Scalar, inside: Scalar = 1) -> Statement:
        """Demand a word that a kernel before has written."""
        return load_global(held.slot, tensor, index, inside, handed=True)

    def wait(self) -> list[Statement]:
        """For the kernels before, where this one may start while they run."""
        return [at.grid_wait()] if self.dependent else []

    # -- the workspace -------------------------------------------------------------------------

    @property
    def rows(self) -> str:
        """Rows of the workspace: what experts can have, and what a last tile reaches past them."""
        most = f"seq_len * {min(CHOSEN, self.local)} + {ROW_ALIGN * self.local + 2 * BLOCK}"
        return f"(({most} + 7) // 8 * 8)"

    @property
    def row_tiles(self) -> str:
        """The most row tiles that there can be."""
        chosen = min(CHOSEN, self.local)
        return f"(seq_len * {chosen} // {self.tile_t} + min({self.local}, seq_len * {chosen}))"

    @property
    def workspace(self) -> tuple[Workspace, ...]:
        choices = f"seq_len * {4 * CHOSEN}"
        granules = self.inner // self.granule
        partial = self.hidden * PARTIAL_BYTES[self.s.partials]
        ordered = (
            Workspace("ordered", f"{self.rows} * {self.hidden}"),
            Workspace("ordered_scale", f"{self.rows} * {self.hidden // BLOCK * 4}"),
        )
        return (
            Workspace("choices", choices),
            Workspace("shares", choices),
            Workspace("places", choices),
            *(ordered if self.copied else (Workspace("tokens", f"{self.rows} * 4"),)),
            Workspace("work", f"{self.row_tiles} * {4 * TILE_WORDS}"),
            Workspace("tiles", "16"),
            Workspace("inner", f"{self.rows} * {self.inner}"),
            Workspace("inner_scale", f"{self.rows} * {4 * granules}"),
            Workspace("partial", f"{self.rows} * {partial}"),
        )
