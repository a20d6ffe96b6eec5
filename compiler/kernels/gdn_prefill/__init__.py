"""Prefill of packed sequences by the gated delta rule (Gated DeltaNet), on both targets."""

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.ir import Statement, program
from ptxflow.compiler.kernels.gdn_prefill import cost, decisions
from ptxflow.compiler.kernels.gdn_prefill.blackwell import Blackwell, BlackwellCarry
from ptxflow.compiler.kernels.gdn_prefill.decisions import TWO, UNIT, heads_each
from ptxflow.compiler.kernels.gdn_prefill.hopper import Hopper, HopperCarry, HopperPair
from ptxflow.compiler.kernels.gdn_prefill.kernel import ENTRY, Kernel
from ptxflow.compiler.kernels.gdn_prefill.packets import PACKETS, RELATE, Carry, Relate
from ptxflow.compiler.kernels.gdn_prefill.problem import SCHEMA
from ptxflow.compiler.kernels.gdn_prefill.shape import PRESENT
from ptxflow.compiler.launch import Given, InputParam, Launch, PresentParam, launch_of


def kernel(p: Problem, s: Strategy, device: Device) -> Kernel:
    """The only kernel, or the last of two."""
    two = s.kernels == TWO
    if decisions.by_wgmma(s.fields()):
        second = HopperPair if decisions.in_pairs(s.fields()) else HopperCarry
        return (second if two else Hopper)(p, s, device)
    if decisions.by_tcgen05(s.fields(), p, device):
        return (BlackwellCarry if two else Blackwell)(p, s, device)
    return (Carry if two else Kernel)(p, s, device)


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernel, or two of them."""
    k = kernel(p, s, device)
    return program(Relate(p, s, device).build(), k.build()) if isinstance(k, Carry) else k.build()


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """No token, one, a token more than a chunk, as many chunks as stages, past the ring's second
    turn; one token without a state, too. Of a first kernel: no token, one, a chunk."""
    k = kernel(p, s, device)
    lengths = sorted({0, 1, k.chunk + 1, k.stages * k.chunk, 2 * k.stages * k.chunk + 1})
    out = [_trip(k, *each) for each in [*((length, 1) for length in lengths), (1, 0)]]
    if not isinstance(k, Carry):
        return out
    return [*(_relate_trip(Relate(p, s, device), n) for n in (0, 1, k.chunk)), *out]


def _relate_trip(k: Relate, length: int) -> Trip:
    """The first chunk of the only sequence."""
    values = {"num_seqs": 1, "r_begin": 0, "r_end": length, "ctaid": 0, "r_before": 1, "r_which": 1}
    values |= {register.arg.name: 0 for register in k.search.starts}
    outputs = ((PACKETS, k.heads_each, k.packet.bytes // 4),) if length else ()
    return Trip(f"{length} tokens related", tuple(values.items()), outputs, RELATE)


def _trip(k: Kernel, length: int, given: int) -> Trip:
    values = {"num_seqs": 1, "begin": 0, "end": length, "ctaid": 0, PRESENT: given}
    outputs = [("new_state", k.rows, k.size), ("output", length, k.rows)]
    name = f"{length} tokens{'' if given else ', no state'}"
    return Trip(name, tuple(values.items()), tuple(outputs[: 2 if length else 1]), ENTRY)


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grid and parameters, as expressions over num_seqs."""
    k = kernel(p, s, device)
    grid = f"num_seqs * {k.value_heads * k.slices}"
    given: Given = {"scale": InputParam("scale", "float32"), PRESENT: PresentParam("state")}
    last = launch_of(ENTRY, grid, k.warps, k.params, given, k.smem_bytes)
    return Relate(p, s, device).launch(given, last) if isinstance(k, Carry) else last


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Three sequences: some tokens, none, and a token past the ring's turn. Short chunks have two
    value heads: the emulator takes seconds for a chunk."""
    k = kernel(p, s, device)
    each = heads_each(p) if isinstance(k, Carry) else 2 if k.chunk == UNIT else 1
    heads = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": each}
    tokens = k.stages * k.chunk + 4
    return Trial(p.at(num_seqs=3, len_cu_seqlens=4, total_seq_len=tokens, **heads))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """All heads: a few tokens; whole chunks behind a few tokens, by heads of which a quotient and a
    remainder differ; several chunks; less than one, that end in any eight tokens of it. Of two
    kernels several chunks are of few heads, all of which run."""
    k = kernel(p, s, device)
    heads = {name: p[name] for name in ("num_q_heads", "num_k_heads", "num_v_heads")}
    count = p["num_q_heads"]
    left = min(count, max(2, count // (count & -count)))  # divided by the same instructions
    few = {name: n // count * left for name, n in heads.items()}
    few, some = (few, 0) if isinstance(k, Carry) else ({}, 1)

    def size(count: int, tokens: int, run: int, absent: bool = False) -> Size:
        axes = {"num_seqs": count, "len_cu_seqlens": count + 1, "total_seq_len": tokens}
        return Size(axes if run else axes | few, None, (run,) if run else (), absent)

    sizes = (
        size(1, k.chunk + 9, some, absent=True),
        size(3, 2 * k.chunk + 3, 8),
        size(1, (2 * k.stages + 1) * k.chunk + 1, some),
        *(size(1, tokens, 1) for tokens in range(19, k.chunk, 8)),
    )
    return Trials((heads,), sizes)


GDN_PREFILL = Family.of(
    SCHEMA,
    ("gdn",),
    decisions,
    cost,
    Kernels(build, trips, launch, trial, trials),
    revise=decisions.revise,
    accepts=lambda inputs: "cu_seqlens" in inputs,
)
