"""A gdn_prefill strategy applied to a problem: sizes, shared memory and where things are in it.

With G the sum of log2 decays up to a token, a chunk that begins with state S has
x_t = beta_t (v_t - 2^G_t S k_t - sum over s < t of 2^(G_t - G_s) (k_s k_t) x_s),
out_t = scale (2^G_t S q_t + sum over s <= t of 2^(G_t - G_s) (k_s q_t) x_s), and ends with
2^G S + sum of 2^(G - G_t) x_t k_t^T. All exponents are at most 0.
"""

from enum import IntEnum

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import frag, slot, smem, value_of
from ptxflow.compiler.ir.nodes import CTAID, Scalar, Slot, Statement, Storage, Value, param
from ptxflow.compiler.kernels.gdn_prefill import decisions
from ptxflow.compiler.kernels.gdn_prefill.decisions import (
    BLOCK_BYTES,
    BUFFERS,
    GATE_BUFFERS,
    NEAR_BYTES,
    UNIT,
)
from ptxflow.compiler.kernels.gdn_prefill.problem import BOUND_BYTES
from ptxflow.compiler.kernels.tensors import PTX_TYPE
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.compiler.tile.values import Float32, Registers, UInt32

PRESENT = "state_present"


class Gate(IntEnum):
    """Arrays of a chunk, a number for each token."""

    BETA = 0
    DECAY = 1  # 2^G: what the state counts for; of the last token, in the next chunk
    LEAVE = 2  # 2^(G at the end - G): what x counts for in the state
    LOG = 3  # G: for helpers alone. This and the following are in no packet
    PULL = 4  # -beta 2^G: what S k counts for in x
    READ = 5  # scale 2^G: what S q counts for in the output


class Shape:
    """What main warps and helpers agree on.

    `carries`: whether there are main warps; else a CTA relates the tokens of a single chunk, for as
    many value heads as `heads_each`; `mine` is the one of them that is at hand.
    """

    carries, prefix = True, ""
    mine: Scalar = 0

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.size, self.value_heads = problem["head_size"], problem["num_v_heads"]
        self.key_heads = problem["num_q_heads"]
        self.share = self.value_heads // self.key_heads  # value heads of a key head
        self.chunk, self.rows = int(s.chunk), int(s.rows)
        self.helpers, self.stages = int(s.helpers), int(s.stages)
        if not self.carries:
            self.helpers, self.stages = int(decisions.relating_warps(f)), 1
        self.mains = int(decisions.main_warps(f)) if self.carries else 0
        self.warps = self.mains + self.helpers
        self.heads_each = 1 if self.carries else int(decisions.heads_each(problem))
        self.buffers = BUFFERS if self.carries else self.heads_each
        self.gate_buffers = GATE_BUFFERS if self.carries else self.heads_each
        self.slices = self.size // self.rows  # CTAs of a head
        self.units, self.steps = self.chunk // UNIT, self.size // UNIT
        self.blocks, self.solves = int(decisions.blocks(f)), int(decisions.solves(f))
        self.solve_units, self.square = int(s.solve_block) // UNIT, int(decisions.square(f))
        self.far = bool(decisions.far(f))
        self.parts = int(decisions.parts(f, "operands"))
        self.solve_parts = int(decisions.parts(f, "solve"))
        self.dtype = PTX_TYPE[problem.dtype]
        self.operand = "f16" if s.operands == decisions.HALF else self.dtype
        # what queries and keys are multiplied as with each other: as they come, without states
        self.related = self.operand if self.carries else self.dtype
        self.key_pitch = decisions.key_pitch(problem)
        self.value_pitch = int(decisions.value_pitch(f))
        self.gate_bytes = int(decisions.gate_bytes(f))
        self.smem_bytes = int(decisions.smem_bytes(f, problem, device))
        self.r = Registers(self.prefix)
        self._storage()
        self.begin = value_of(self.bounds[0])  # the first token of the sequence
        self.end = value_of(self.bounds[1])
        self.chunks = (self.end - self.begin + (self.chunk - 1)) // self.chunk

    def _storage(self) -> None:
        """Rings of chunks; what helpers hand over, twice; blocks that they solve themselves."""
        row = self.chunk * self.key_pitch
        self.q = smem("queries", row, self.stages, align=128)
        self.k = smem("keys", row, self.stages, align=128)
        self.v = smem("values", self.chunk * self.value_pitch, self.stages, align=128)
        self.gates = smem("gates", decisions.GATES * self.gate_bytes, self.gate_buffers, align=128)
        block = self.blocks * BLOCK_BYTES
        self.scores = smem("scores", block * self.parts, self.buffers, align=128)
        self.pulls = smem("pulls", block * self.solve_parts, self.buffers, align=128)
        solved = self.solves * self.square * BLOCK_BYTES
        self.solved = smem("solved", solved * self.solve_parts, self.buffers, align=128)
        self.near = smem("near", self.solves * self.square * NEAR_BYTES, self.heads_each, 128)
        self.bounds = [frag(self.prefix + name, 1, "b32") for name in ("begin", "end")]

    @property
    def storage(self) -> tuple[Storage, ...]:
        pulls = (self.pulls,) if self.far else ()
        shared = (self.q, self.k, self.v, self.gates, self.scores, *pulls, self.solved, self.near)
        return (*shared, *self.bounds, *self.r.storage)

    # -- the CTA's part ------------------------------------------------------------------------

    @property
    def place(self) -> tuple[Value, Value, Value]:
        """Sequence, value head, and first row of its state."""
        parts = self.slices * self.value_heads
        if self.s.order == "heads":
            part, sequence = CTAID % parts, CTAID // parts
        else:
            part, sequence = CTAID // param("num_seqs"), CTAID % param("num_seqs")
        return sequence, part // self.slices, part % self.slices * self.rows

    def first(self, n: Scalar) -> Value:
        """The first token of a chunk."""
        return n * self.chunk + self.begin

    def terms(self, x: Float32, count: int) -> list[UInt32]:
        """What it is multiplied as."""
        return x.terms(self.operand, count)

    def find_bounds(self) -> list[Statement]:
        """Where the sequence begins and ends: the low words of two bounds."""
        return [
            load_global(slot(register), "cu_seqlens", self.place[0] + i, element=BOUND_BYTES)
            for i, register in enumerate(self.bounds)
        ]

    # -- shared memory -------------------------------------------------------------------------

    def buffer(self, n: Scalar, count: int) -> Scalar:
        """Of so many that are filled in turn, that of a chunk; or that of the head at hand."""
        return n % count if self.carries else self.mine

    def gate(self, n: Value, which: Gate) -> Slot:
        first = which * self.gate_bytes
        return slot(self.gates, self.buffer(n, self.gate_buffers), first, self.gate_bytes)

    def token_rows(self, storage: Storage, n: Value, unit: Scalar) -> Slot:
        """The rows of 16 tokens of a chunk."""
        size = UNIT * (self.value_pitch if storage is self.v else self.key_pitch)
        return slot(storage, n % self.stages, unit * size, size)

    def block(self, storage: Storage, n: Value, index: Scalar, part: int = 0) -> Slot:
        """A 16 x 16 block of scores or pulls; `part`: the first or the second term."""
        first = part * self.blocks * BLOCK_BYTES
        return slot(storage, self.buffer(n, self.buffers), index * BLOCK_BYTES + first, BLOCK_BYTES)

    def solved_blocks(self, n: Value, index: Scalar, part: int, count: int = 1) -> Slot:
        """Blocks of the inverse, by columns; those of tokens that are solved at a time together."""
        first = part * self.solves * self.square * BLOCK_BYTES
        return slot(
            self.solved,
            self.buffer(n, self.buffers),
            index * BLOCK_BYTES + first,
            count * BLOCK_BYTES,
        )

    def near_blocks(self, index: Scalar, count: int = 1) -> Slot:
        return slot(self.near, self.mine, index * NEAR_BYTES, count * NEAR_BYTES)

    @staticmethod
    def triangle(i: int, j: int) -> int:
        """The number of block (i, j), j <= i."""
        return i * (i + 1) // 2 + j
