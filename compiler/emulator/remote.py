"""st.async: a warp's registers into a CTA of the cluster, its bytes counted on a barrier there."""

import numpy as np

from ptxflow.compiler.emulator.barrier import MBarrier
from ptxflow.compiler.emulator.bulk import check_box
from ptxflow.compiler.emulator.clocks import GENERIC
from ptxflow.compiler.emulator.fault import Fault
from ptxflow.compiler.emulator.lanes import lanes_in
from ptxflow.compiler.emulator.memory import OFFSET_MASK, RANK_SHIFT
from ptxflow.compiler.emulator.operands import Line, operation, uniform
from ptxflow.compiler.emulator.touches import Stream, issue, use_barrier
from ptxflow.compiler.emulator.warp import Step, Warp

BYTES = 16  # of a lane
KIND = "st.async"  # stream of what peers store, complete for those that acquire at cluster scope


@operation(r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.v4\.[bfsu]32")
def store_async(line: Line) -> Step:
    line.count(3)
    address, values, barrier = line.address(0), line.readers(1, 32), line.address(2)
    if len(values) != 4:
        raise line.refuse(f"stores 4 values from {len(values)} registers")

    def run(w: Warp) -> None:
        lanes = lanes_in(w.mask)
        at = w.vector(address(w), 32)[lanes].astype(np.int64)
        bar = uniform(w, barrier(w), "the mbarrier")
        rank = bar >> RANK_SHIFT
        if (at >> RANK_SHIFT != rank).any():
            raise Fault(f"the mbarrier is in CTA {rank}, the data is not")
        if (at % BYTES).any():
            raise Fault(f"address 0x{int(at[0]):X} is not a multiple of {BYTES}")
        machine = w.cta.machine
        cta, signal = machine.barrier(bar)
        chunks = (at & OFFSET_MASK) // BYTES
        check_box(cta.shared.size, chunks)
        if len(np.unique(chunks)) != len(chunks):
            machine.hazard(line.ins.line, "lanes store to the same bytes")
        if not signal.published and rank != w.cta.rank:
            machine.hazard(line.ins.line, f"{signal.where} was not fenced after its init")
        use_barrier(w, signal)
        machine.hazard(
            line.ins.line, cta.retire((chunks[:, None] * BYTES + np.arange(BYTES)).ravel())
        )
        cta.shared.begin_write(chunks)
        issue(w, _writes(w, rank, signal), cta.shared.shadow, chunks, None, "w", GENERIC)
        words = np.stack([w.vector(v(w), 32)[lanes] for v in values], axis=1).astype(np.uint32)
        data = np.ascontiguousarray(words).view(np.uint8).reshape(-1, BYTES)

        def land() -> None:
            machine.ctas[rank].shared.end_write(chunks, data)
            signal.complete(BYTES * len(lanes))

        # nor may the sender leave before (CUDA programming guide, distributed shared memory)
        w.issue(tuple(sorted({rank, w.cta.rank})), land)

    return run


def _writes(w: Warp, rank: int, signal: MBarrier) -> Stream:
    """The stream of the bytes that an mbarrier counts: complete_tx releases at cluster scope, which
    a wait of CTA scope takes over from its own CTA alone (PTX ISA 8.7, morally strong)."""
    if rank == w.cta.rank:
        return Stream(signal.agent, signal.phase + 1)
    if signal.peers < 0:
        signal.peers = w.cta.machine.races.agent(KIND)
    return Stream(signal.peers, signal.phase + 1)
