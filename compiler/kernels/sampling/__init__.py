"""Sampling from probabilities after top-k, top-p or both, on both targets."""

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.kernels.sampling import cost, decisions
from ptxflow.compiler.kernels.sampling.filters import ACTIVE
from ptxflow.compiler.kernels.sampling.kernel import ENTRY, PRESENT, RANDOM, Kernel, trip
from ptxflow.compiler.kernels.sampling.problem import SCHEMA
from ptxflow.compiler.launch import GENERATOR, Given, Launch, PresentParam, RandomParam, launch_of

TRIAL_ELEMENTS = 1 << 15  # of a trial's batch: rows are fewer where they are long
ROWS = 11  # of a problem of which five run, more than a cluster has CTAs
FIRST_ROWS = 7  # of which two run: of the first a part tells most, of the last nothing


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """A row; where it is not in registers, of two chunks, or one if it has no more. The generator's
    state is by value, or on the device, too; then k filters, where both may, after one chunk."""
    k = Kernel(p, s, device)
    chunks = min(2, k.chunks)
    name = f"a row of {chunks} chunks" if chunks > 1 else "a row"
    out = list[Trip]()
    for said, given in (("", 0), (", a state on the device", 1)):
        first = {"first_chunks": 1 if given else chunks}
        values = {"ctaid": 0, "chunks": chunks, PRESENT: given, ACTIVE: given, **first, **trip(k)}
        out.append(Trip(f"{name}{said}", tuple(values.items()), (("samples", 1, 1),)))
    return out


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grid and parameters, as expressions over batch_size."""
    k = Kernel(p, s, device)
    grid = f"batch_size * {k.ctas}"
    given: Given = {n: RandomParam(i) for i, n in enumerate(RANDOM)}
    given = {**given, PRESENT: PresentParam(GENERATOR)}
    return launch_of(ENTRY, grid, k.threads // 32, k.params, given, k.smem_bytes, k.ctas)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """A few rows of two vectors a lane, or two chunks (one where they are long), less a part."""
    width, once = int(s.vector), int(s.ctas) * int(s.threads) * int(s.vector)
    unroll = int(s.unroll) if once * int(s.unroll) <= TRIAL_ELEMENTS else 1
    vocab = once * (unroll + 1) - once // 2 - width
    batch = max(2, min(6, TRIAL_ELEMENTS // vocab))
    return Trial(replace(p, axes=(("batch_size", batch), ("vocab_size", vocab))))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """A vocabulary with the same tail, of as many turns as have the same loops, and more elements
    than are listed; five of ROWS, of all kinds; and without a state on the device a row or, where a
    part of one is counted first, two of FIRST_ROWS."""
    turn = int(s.ctas) * int(s.threads) * int(s.vector) * int(s.unroll)
    whole = p["vocab_size"]
    shapes = [{"vocab_size": whole % turn + n * turn} for n in range(1, 12)]
    least, most = 2 * int(s.candidates), min(whole, 8 * TRIAL_ELEMENTS)
    shapes = [x for x in shapes if least < x["vocab_size"] < most]
    few = FIRST_ROWS if Kernel(p, s, device).partial else 1
    absent = Size({"batch_size": few}, None, (2,) if few > 1 else (), absent=True)
    sizes = (Size({"batch_size": ROWS}, None, (5,)), absent)
    return Trials((*shapes, {"vocab_size": whole}), sizes)


SAMPLING = Family.of(
    SCHEMA,
    ("sampling",),
    decisions,
    cost,
    Kernels(lambda p, s, d: Kernel(p, s, d).build(), trips, launch, trial, trials),
)
