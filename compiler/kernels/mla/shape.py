"""A latent attention strategy applied to a problem: what both kernels agree on."""

from dataclasses import dataclass, replace

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, Scalar, Slot, Value, special, value
from ptxflow.compiler.ir.storage import global_tensor, rectangle, smem
from ptxflow.compiler.kernels.mla import decisions
from ptxflow.compiler.kernels.mla.hopper_decisions import WGMMA
from ptxflow.compiler.kernels.mla.problem import cta_heads, head_ctas
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.tile.tensors import store_global
from ptxflow.compiler.tile.values import Float32, emit, inverse_or_zero, log2

QUAD = 4  # registers of an MMA's result, and of a 16-byte access
LANES = 32
COUNT = "sequences"  # the parameter: how many there are
SHARES = "shares"  # the parameter: how many parts of tokens there should be, of a prefill
TOLD = 4  # words
BLOCK = LANES * QUAD  # of the workspace: floats of 16 dims by 8 columns


@dataclass(frozen=True)
class Outputs:
    """Where a row of queries goes: output [rows, heads, latent], lse [rows, heads].

    Sums are in blocks of `dims` dims by `wide` heads, as an MMA left them: lane l has two heads of
    each, those of `lane`.
    """

    heads: int
    latent: int
    dtype: str

    wide, dims, by_row = decisions.MMA_COLUMNS, decisions.MMA_DIMS, False
    lane = LANE & 3
    first = LANE < 4  # of those with the same heads

    def factor(self, x: Float32) -> Float32:
        """Two numbers as the factor of a block."""
        return replace(x, by_row=self.by_row)

    def put(self, row: Value, column: Scalar, dim: Scalar, sums: Float32) -> None:
        """A block from `dim` and the head `column` on: eight dims of a head go together."""
        for half in range(2):
            moved = sums[2 * half : 2 * half + 2].pack(self.dtype).apply(at.movmatrix)
            first = dim + 8 * half
            index = (row * self.heads + (LANE >> 2) + column) * self.latent + first
            place = row * self.heads + column, first, decisions.MMA_COLUMNS, 8
            index = index + ((LANE & 3) << 1)
            emit(store_global("output", index, moved.slot, place, element=2))

    def put_lse(self, row: Value, column: Scalar, row_max: Float32, row_sum: Float32) -> None:
        """log2 of the sums of 8 heads plus their maxima; lanes 0 to 3 have two heads each."""
        lse, place = log2(row_sum) + row_max, (row, column, 1, decisions.MMA_COLUMNS)
        index = row * self.heads + column + (LANE << 1)
        emit(store_global("lse", index, lse.slot, place, self.first))

    def share(self, row_sum: Float32) -> Float32:
        """What sums are to be multiplied by: 1 / row_sum, and 0 where nothing was summed."""
        return self.factor(inverse_or_zero(row_sum))


class RowOutputs(Outputs):
    """The same of sums as wgmma leaves them, whose rows are heads: a lane has dims side by side."""

    wide, dims, by_row = decisions.MMA_TOKENS, decisions.MMA_COLUMNS, True
    lane = LANE >> 2
    first = (LANE & 3).eq(0)

    def put(self, row: Value, column: Scalar, dim: Scalar, sums: Float32) -> None:
        for half in range(2):
            packed = sums[2 * half : 2 * half + 2].pack(self.dtype).slot
            head = row * self.heads + column + 8 * half
            index = (head + self.lane) * self.latent + dim + ((LANE & 3) << 1)
            emit(store_global("output", index, packed, (head, dim, 8, self.dims), element=2))

    def put_lse(self, row: Value, column: Scalar, row_max: Float32, row_sum: Float32) -> None:
        lse = log2(row_sum) + row_max
        for half in range(2):
            head = value(column) + 8 * half
            index = row * self.heads + head + self.lane
            emit(store_global("lse", index, lse[half].slot, (row, head, 1, 8), self.first))


class Shape:
    """Sizes; a *block* is some dims of the latent, and `across` pieces of it are all columns: the
    heads of a query, of which an MMA has 8 and a wgmma's fragment 16. Of many heads a CTA has
    `own_heads`, from `first_head` on."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        self.decodes = decisions.decodes(problem)
        self.heads, self.own_heads = problem["num_qo_heads"], cta_heads(problem)
        self.head_ctas = head_ctas(problem)
        self.latent, self.rope = problem["head_dim_ckv"], problem["head_dim_kpe"]
        self.page_size, self.dtype = problem["page_size"], PTX_TYPE[problem.dtype]
        self.chunk = int(s.chunk) if self.decodes else 0
        self.queries = 1 if self.decodes else int(s.queries)
        self.cut = 1 if self.decodes else int(s.parts)  # CTAs of a tile of queries
        self.tile, self.warps, self.stages = int(s.tile), int(s.warps), int(s.stages)
        self.rows = self.tile // decisions.MMA_TOKENS  # warps side by side on a tile's tokens
        self.groups = self.warps // self.rows
        by_rows = not self.decodes and s.core == WGMMA and not device.has_tmem
        outputs = RowOutputs if by_rows else Outputs
        self.outputs = outputs(self.heads, self.latent, self.dtype)
        self.across = self.queries * self.own_heads // self.outputs.wide
        self.own = self.across // self.groups
        self.blocks = self.latent // self.outputs.dims
        self.latent_pitch = decisions.latent_pitch(problem)
        self.rope_pitch = decisions.rope_pitch(problem)
        self.split = self.chunk > 0 or self.cut > 1
        #: of a prefill in parts what a warp works out for all: see `Work`
        self.told = (smem("told", 4 * TOLD, align=16),) if self.cut > 1 else ()
        # of CTAs that share the heads of a query: their number together, and which of them
        self.number = self.numbered()
        self.place, self.which = self.number // self.head_ctas, self.number % self.head_ctas
        self.first_head = self.which * self.own_heads

    @property
    def found_by(self) -> tuple[str, ...]:
        """Tensors by which a CTA finds its tokens."""
        queries = () if self.decodes else ("qo_indptr",)
        last = ("kv_last_page_len",) if self.page_size > 1 else ()
        return (*queries, "kv_indptr", "kv_indices", *last)

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        """Of the first kernel."""
        left = ("sums", "stats") if self.split else ()
        inputs = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", *self.found_by)
        pointers = ((name, "ptr") for name in (*inputs, "output", "lse", *left))
        numbers = ("sm_scale", *((COUNT,) if "kv_indptr" in self.found_by else ()))
        numbers += (SHARES,) * (self.cut > 1)
        return (*pointers, *((name, "u32") for name in numbers))

    def numbered(self) -> Value:
        """The CTA's number, and its row of the workspace: late queries come first."""
        return CTAID if self.decodes or self.split else special("ctas") - 1 - CTAID

    def place_of(self, row: Scalar, block: Scalar, n: Scalar) -> tuple[Value, Slot]:
        """Index in vectors of a lane's part of a block of the workspace, and the block."""
        index = ((row * self.blocks + block) * self.across + n) * LANES + LANE
        column = (block * self.across + n) * BLOCK
        return index, rectangle(global_tensor("sums"), row, column, 1, BLOCK)

    def stats_of(self, row: Scalar, n: Scalar) -> tuple[Value, Slot]:
        """The same of maxima and sums of a piece's columns: a lane has two of each."""
        wide = self.outputs.wide
        index = (row * self.across + n) * (wide // 2) + self.outputs.lane
        return index, rectangle(global_tensor("stats"), row, n * (2 * wide), 1, 2 * wide)
