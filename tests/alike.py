"""Which kernels are the same text on both targets, so that it is enough to run them once."""

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family


def alike(p: Problem, s: Strategy) -> bool:
    """Whether B200's kernel of the trial problem is H200's, but for the name of the target."""
    maker, texts = family(s.family), set[str]()
    for dev in (device("h200"), device("b200")):
        small = maker.trial(p, s, dev).problem
        texts.add(write(maker.build(small, s, dev), dev).replace(f".target {dev.arch}", ""))
    return len(texts) == 1
