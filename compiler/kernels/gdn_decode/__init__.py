"""One decoding step of the gated delta rule (Gated DeltaNet), on both targets."""

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.kernels.gdn_decode import cost, decisions
from ptxflow.compiler.kernels.gdn_decode.decisions import WARP, revise
from ptxflow.compiler.kernels.gdn_decode.kernel import ENTRY, Kernel
from ptxflow.compiler.kernels.gdn_decode.places import PRESENT
from ptxflow.compiler.kernels.gdn_decode.problem import SCHEMA
from ptxflow.compiler.launch import Given, InputParam, Launch, PresentParam, launch_of


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Trip-count classes: no tile, one, many; one step of a head, several; a ring that lacks any
    number of stages, is filled, and past its second turn. Each with a state, the longest without
    one, too."""
    k = Kernel(p, s, device)
    counts = sorted(_counts(k), key=lambda c: c[0] * c[1])
    classes = [(*count, 1) for count in counts] + [(*counts[-1], 0)]
    return [_trip(k, *each) for each in classes]


def _counts(k: Kernel) -> set[tuple[int, int]]:
    """(tiles, steps of each) of the classes."""
    turns = 2 * k.stages + 1
    several = {*range(1, k.stages + 1), turns if k.refills else k.stages, 3 if not k.bulk else 1}
    if not k.loops:
        return {(1, n) for n in several} if k.passes > 1 else {(1, 1)}
    if k.passes == 1:
        return {(n, 1) for n in several} | {(0, 1)}
    few = {(1, n) for n in range(1, k.stages + 1)}
    return few | {(0, 1), (2, k.stages), (turns, 1), (3, turns // 2 + 1)}


def _trip(k: Kernel, tiles: int, steps: int, given: int) -> Trip:
    blocks = tiles * steps
    values = {"batch_size": tiles, "tiles_per_row": 1, "passes": steps, "ctas": 1, "ctaid": 0}
    if not tiles:  # they belong to the CTA before
        values |= {"batch_size": 1, "ctas": 2, "ctaid": 1}
    outputs = (
        ("new_state", blocks * k.step // k.flight, k.flight * k.size),
        ("output", blocks, k.step),
    )
    name = f"{tiles} tiles of {steps} steps{'' if given else ', no state'}"
    return Trip(name, tuple({**values, PRESENT: given}.items()), outputs if tiles else ())


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grid and parameters, as expressions over batch_size."""
    k = Kernel(p, s, device)
    tiles = f"batch_size * {k.tiles_per_row}"
    grid = f"min({tiles}, {device.sms * s.ctas_per_sm})" if k.loops else tiles
    given: Given = {"scale": InputParam("scale", "float32"), PRESENT: PresentParam("state")}
    return launch_of(ENTRY, grid, k.warps, k.params, given, k.smem_bytes)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Two batch rows of few heads; where a CTA loops, all in one, through its ring and on."""
    k = Kernel(p, s, device)
    uses = k.share * s.head_ctas * k.passes  # of a batch row, in one CTA
    batch = max(2, -(-(k.stages + 2) // uses)) if k.loops else 2
    axes = {"batch_size": batch, "num_q_heads": 1, "num_v_heads": k.share, "head_size": k.size}
    return Trial(replace(p, axes=tuple(axes.items())), 1 if k.loops else None)


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """All heads: CTAs whose numbers are above a lane's; where a CTA loops, one of 29 that takes
    two tiles or more, and a ring beyond its 32nd turn."""
    k = Kernel(p, s, device)
    heads = {name: n for name, n in p.axes if name.endswith("heads")}
    n = max(3, WARP // k.tiles_per_row + 1)
    sizes = [Size({"batch_size": 1}, None, (2,), absent=True), Size({"batch_size": n}, None, (4,))]
    if k.loops:
        sizes.append(Size({"batch_size": 2 * 29 // k.tiles_per_row + 1}, 29, (1,)))
        # one CTA of so many that each has as many steps as 34 turns of the ring take
        steps, each = 34 * k.stages, k.tiles_per_row * k.passes
        batch = max(2, -(-steps // each))
        sizes.append(Size({**dict(p.axes), "batch_size": batch}, batch * each // steps, (1,)))
    return Trials((heads,), tuple(sizes))


GDN_DECODE = Family.of(
    SCHEMA,
    ("gdn",),
    decisions,
    cost,
    Kernels(lambda p, s, d: Kernel(p, s, d).build(), trips, launch, trial, trials),
    revise=revise,
    accepts=lambda inputs: "cu_seqlens" not in inputs,
)
