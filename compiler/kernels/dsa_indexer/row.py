"""What the threads of a sequence's row of scores share: bins, and lists of entries."""

from __future__ import annotations

from ptxflow.compiler.atoms.indexing import ENTRY, STATE
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import CTA_RANK, CTAID, LANE, WARP, UOp, const, smem, value_of
from ptxflow.compiler.kernels.dsa_indexer import decisions
from ptxflow.compiler.kernels.dsa_indexer.decisions import WARP as LANES
from ptxflow.compiler.tile.values import Registers

THREAD = WARP * LANES + LANE
VECTOR = 4  # keys of a load


class Row:
    """A strategy applied to a problem; its registers are apart from the first kernel's."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        self.problem, self.s, self.device = problem, s, device
        f = s.fields()
        self.topk, self.page = problem["topk"], problem["page_size"]
        self.ctas, self.threads, self.loads = int(s.ctas), int(s.threads), int(s.loads)
        self.warps, self.bits = self.threads // LANES, int(s.bits)
        self.digits, self.slots = (
            int(decisions.digits(self.bits)),
            int(decisions.entries(f, problem)),
        )
        self.r = Registers("s_")
        self.rank: UOp = CTA_RANK if self.ctas > 1 else const(0)
        self.row = CTAID // self.ctas
        self.bins = smem("bins", -(-int(decisions.bin_bytes(f)) // 128) * 128, align=128)
        self.places, self.sorted = int(decisions.places(f, problem)), decisions.is_sorted(problem)
        self.list = self._lines("entries", self.places * ENTRY)
        self.chosen = self._lines("chosen", self.topk * 4)
        self.state, self.count = smem("state", STATE, align=STATE), self._lines("count", 4)
        self.length = value_of(self.r("length", 1))  # of the sequence, in tokens
        self.listed = value_of(self.r("listed", 1))
        self.keys = self.r.uint32(width=VECTOR * self.loads)  # that a thread looks at

    def below(self, count: int) -> UOp | None:
        """Whether a warp is one of the first `count`; None where all are."""
        return count > WARP if count < self.warps else None

    @staticmethod
    def _lines(name: str, size: int) -> UOp:
        """Storage that is zeroed at the start, line by line."""
        return smem(name, -(-size // decisions.LINE) * decisions.LINE, align=128)

    @property
    def storage(self) -> tuple[UOp, ...]:
        chosen = () if self.sorted else (self.chosen,)
        return (self.bins, self.list, *chosen, self.state, self.count)
