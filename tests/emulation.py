"""Runs of kernels under the emulator, on cases that say what is right."""

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify.cases.case import Case, Tensors, plain


def text_of(p: Problem, s: Strategy, dev: Device = H200) -> str:
    """The PTX of a strategy's kernels."""
    return write(family(s.family).build(p, s, dev), dev)


def run(
    p: Problem,
    s: Strategy,
    case: Case,
    dev: Device = H200,
    text: str = "",
    blocks: int | tuple[int, ...] | None = None,
    seed: int = 0,
) -> Tensors:
    """The tensors behind the kernels, which have no hazards; `blocks` in place of the grid."""
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    launch = family(s.family).launch(p, s, dev)
    report = emulate(
        text or text_of(p, s, dev),
        launch,
        tensors,
        dict(p.axes),
        seed=seed,
        grid=blocks,
        arguments=case.arguments,
    )
    assert not report.hazards, report.hazards
    return tensors


def outside(case: Case, tensors: Tensors) -> dict[str, int]:
    """Elements of outputs that are out of bounds, by name; empty where all is right."""
    counts = {}
    for name, (low, high) in case.expected.items():
        found = plain(tensors[name])
        counts[name] = int((~((low <= found) & (found <= high))).sum())
    return {name: n for name, n in counts.items() if n}


def wrong(
    p: Problem, s: Strategy, case: Case, dev: Device = H200, text: str = ""
) -> dict[str, int]:
    """What is out of bounds behind a run."""
    return outside(case, run(p, s, case, dev, text))


def barriers(at: int, count: int = 1) -> str:
    """A thread's PTX that makes mbarriers for one arrival, from that byte of shared memory on."""
    made = "".join(f"    mbarrier.init.shared::cta.b64 [%r10+{8 * i}], 1;\n" for i in range(count))
    return (
        f"    add.u32 %r10, %s, {at};\n    setp.ne.u32 %p1, %t, 0;\n    @%p1 bra MADE;\n{made}"
        "    fence.mbarrier_init.release.cluster;\nMADE:\n"
    )
