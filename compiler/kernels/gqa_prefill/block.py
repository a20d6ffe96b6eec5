"""A block of queries, keys and values in shared memory, and how its kernel is launched."""

from __future__ import annotations

from collections.abc import Sequence

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.softmax import ROW
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import UOp, param, value, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, elect, loop
from ptxflow.compiler.ir.storage import mbar, slot, smem
from ptxflow.compiler.kernels.attention.sequences import SCALE
from ptxflow.compiler.kernels.gqa_prefill.epilogue import Lines
from ptxflow.compiler.kernels.gqa_prefill.keys import WIDE, Keys
from ptxflow.compiler.kernels.gqa_prefill.problem import ELEMENT
from ptxflow.compiler.launch import Launch, TensorMapParam, launch_of
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.lower import finish

ENTRY = "gqa_prefill"


class Block(Keys, Lines):
    """What kernels of both targets share: queries come by TMA, and stay."""

    def __init__(self, problem: Problem, strategy: Strategy, device: Device):
        super().__init__(problem, strategy, device)
        self.consumers: int = strategy.consumers
        self.q_tile = SmemTile(self.rows, self.dim, ELEMENT, ROW)
        self.q_smem = smem("q_tile", self.q_tile.bytes)
        self.q_full = mbar("q_full", 1, 1)
        self.params = (
            ("q_map", "map"),
            *self.key_params,
            *((name, "ptr") for name in ("qo_indptr", "kv_indptr", "output", "lse")),
            ("sm_scale", "u32"),
            ("total_q", "u32"),
            ("sequences", "u32"),
        )

    def whole(self, found: Body, roles: Sequence[UOp], warps: int, more: Sequence[UOp]) -> UOp:
        """The lowered kernel: `found` is what every warp does first, `more` storage of the roles
        beside queries, keys and registers."""
        storage = (self.q_full, *more, self.q_smem, *self.ring_storage, *self.keep.storage)
        info = KernelInfo(ENTRY, self.device.arch, warps, 1, self.params, storage)
        return finish(info, found, *roles)

    def launch(self, smem_bytes: int) -> Launch:
        """Grid, parameters and tensor maps as expressions over the axes."""
        width = self.heads * self.dim
        if self.share == 1:
            dims, stride = (str(width), "total_q"), width
        else:
            dims, stride = (str(self.dim), f"total_q * {self.heads}"), self.dim
        pitch = (str(stride * ELEMENT),)
        q = TensorMapParam("q", self.problem.dtype, dims, pitch, self.query_box, ROW)
        numbers = f"(total_q // {self.tokens} + len_indptr - 1)"
        given = {**SCALE, **self.key_maps, "q_map": q, "sequences": "len_indptr - 1"}
        grid, warps = f"{numbers} * {self.units}", 4 * (self.consumers + 1)
        return launch_of(ENTRY, grid, warps, self.params, given, smem_bytes)

    def load_queries(self) -> UOp:
        bar, box = slot(self.q_full), var("box")
        bytes_ = self.query_box[1] * ROW
        load = [
            at.tma_load(
                slot(self.q_smem, 0, box * bytes_ + self.q_tile.k_block_offset(column), bytes_),
                param("q_map"),
                *self.query_origin(box, column),
                bar,
                box=self.query_box,
                element=ELEMENT,
                apart=True,
            )
            for column in range(0, self.dim, WIDE)
        ]
        boxes = loop(box, self.rows // self.query_box[1], load, rolled=True)
        expect = at.mbar_arrive_expect(bar, bytes=self.q_tile.bytes)
        return elect(value(1), expect, boxes)
