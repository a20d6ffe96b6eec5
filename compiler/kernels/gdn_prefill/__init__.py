"""Prefill of packed sequences by the gated delta rule (Gated DeltaNet), on both targets."""

from __future__ import annotations

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.kernels.attention import few
from ptxflow.compiler.kernels.gdn_prefill import cost, decisions
from ptxflow.compiler.kernels.gdn_prefill.decisions import UNIT
from ptxflow.compiler.kernels.gdn_prefill.kernel import ENTRY, Kernel
from ptxflow.compiler.kernels.gdn_prefill.problem import SCHEMA
from ptxflow.compiler.kernels.gdn_prefill.shape import PRESENT
from ptxflow.compiler.launch import Given, InputParam, Launch, PresentParam, launch_of


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """No token, one, a token more than a chunk, as many chunks as stages, past the ring's second
    turn; one token without a state, too."""
    k = Kernel(p, s, device)
    lengths = sorted({0, 1, k.chunk + 1, k.stages * k.chunk, 2 * k.stages * k.chunk + 1})
    return [_trip(k, *each) for each in [*((length, 1) for length in lengths), (1, 0)]]


def _trip(k: Kernel, length: int, given: int) -> Trip:
    values = {"num_seqs": 1, "begin": 0, "end": length, "ctaid": 0, PRESENT: given}
    outputs = [("new_state", k.rows, k.size), ("output", length, k.rows)]
    name = f"{length} tokens{'' if given else ', no state'}"
    return Trip(name, tuple(values.items()), tuple(outputs[: 2 if length else 1]))


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grid and parameters, as expressions over num_seqs."""
    k = Kernel(p, s, device)
    grid = f"num_seqs * {k.value_heads * k.slices}"
    given: Given = {"scale": InputParam("scale", "float32"), PRESENT: PresentParam("state")}
    return launch_of(ENTRY, grid, k.warps, k.params, given, k.smem_bytes)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Three sequences: some tokens, none, and a token past the ring's turn. Short chunks have two
    value heads: the emulator takes seconds for a chunk."""
    k = Kernel(p, s, device)
    heads = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2 if k.chunk == UNIT else 1}
    tokens = k.stages * k.chunk + 4
    return Trial(p.at(num_seqs=3, len_cu_seqlens=4, total_seq_len=tokens, **heads))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """Two key heads, or as many as have the same divisions; more sequences of a few tokens; one of
    several chunks."""
    k = Kernel(p, s, device)
    shapes = tuple(
        {"num_q_heads": n, "num_k_heads": n, "num_v_heads": n * k.share} for n in few(k.key_heads)
    )

    def size(count: int, tokens: int, some: tuple[int, ...] = (), absent: bool = False) -> Size:
        axes = {"num_seqs": count, "len_cu_seqlens": count + 1, "total_seq_len": tokens}
        return Size(axes, None, some, absent)

    sizes = (
        size(1, k.chunk + 9, (1,), absent=True),
        size(2, k.chunk + 9, (2,)),
        size(1, (2 * k.stages + 1) * k.chunk + 1, (1,)),
    )
    return Trials(shapes, sizes)


GDN_PREFILL = Family.of(
    SCHEMA,
    ("gdn",),
    decisions,
    cost,
    Kernels(lambda p, s, d: Kernel(p, s, d).build(), trips, launch, trial, trials),
    accepts=lambda inputs: "cu_seqlens" in inputs,
)
