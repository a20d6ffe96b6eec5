"""What a kernel is timed beside: a copy of as many bytes, and library calls on the same tensors.

A peer is made once for a workload, with the inputs in place. What it computes is compared with our
reference before its times count. A peer that is not there, or computes something else, is absent,
with the reason. The first of an operator's peers is its yardstick: it is cheap and steady, and
timed beside every kernel; the others are timed beside the best.
"""

from __future__ import annotations

from collections.abc import Mapping

from ptxflow.env.measurements import COPY
from ptxflow.eval.arguments import UsageError, find_problem
from ptxflow.eval.checking import Bench, compare
from ptxflow.eval.definition import Definition
from ptxflow.eval.peers import attention, gdn, plain
from ptxflow.eval.peers.ready import Call, Given, Maker, NotOffered, Ready
from ptxflow.eval.tolerance import Tolerance

SLACK = 4.0  # tolerances of a library: it may round once more on the way, as torch's addition does
STRAYS = 1e-3  # of its elements may lie outside even these; a wrong call is wrong nearly everywhere
PREFILL = " prefill"  # of an op type, where its definitions pack queries

#: by op type, with PREFILL where queries are packed; the first is the yardstick
PEERS: dict[str, dict[str, Maker]] = {
    "gemm": {"torch.mm": plain.torch_mm, COPY: plain.copy},
    "rmsnorm": {
        COPY: plain.copy,
        "torch.rms_norm": plain.torch_rms_norm,
        "torch.compile": plain.torch_compile_rms_norm,
        "flashinfer": plain.flashinfer_rmsnorm,
    },
    "sampling": {
        COPY: plain.copy,
        "torch": plain.torch_reference,
        "flashinfer": plain.flashinfer_sampling,
    },
    "gdn": {COPY: plain.copy, "torch": plain.torch_reference},
    "gdn" + PREFILL: {COPY: plain.copy, "torch.chunked": gdn.torch_chunked},
    "gqa_paged": {
        COPY: plain.copy,
        "torch": plain.torch_reference,
        "flashinfer": attention.gqa_decode(tensor_cores=False),
        "flashinfer-tensor-cores": attention.gqa_decode(tensor_cores=True),
    },
    "mla_paged": {
        COPY: plain.copy,
        "torch": plain.torch_reference,
        "flashinfer-fa2": attention.mla("fa2"),
        "flashinfer-fa3": attention.mla("fa3"),
    },
    "gqa_paged" + PREFILL: {
        COPY: plain.copy,
        "flashinfer-fa2": attention.paged_prefill("fa2"),
        "flashinfer-fa3": attention.paged_prefill("fa3"),
    },
    "gqa_ragged" + PREFILL: {
        COPY: plain.copy,
        "torch.sdpa": attention.torch_sdpa,
        "flashinfer-fa2": attention.ragged_prefill("fa2"),
        "flashinfer-fa3": attention.ragged_prefill("fa3"),
    },
    "mla_paged" + PREFILL: {
        COPY: plain.copy,
        "flashinfer-fa2": attention.mla("fa2"),
        "flashinfer-fa3": attention.mla("fa3"),
    },
}


def makers_of(definition: Definition) -> dict[str, Maker]:
    """The makers of a definition's peers by name; a copy alone where no library is known."""
    packed = PREFILL if {"qo_indptr", "cu_seqlens"} & set(definition.inputs) else ""
    return PEERS.get(definition.op_type + packed, {COPY: plain.copy})


def complaint(ready: Ready, definition: Definition, bench: Bench) -> str:
    """What is wrong with the peer's outputs for the bench's first inputs; empty where all is right.

    Tolerances are SLACK times ours, and a thousandth of the elements may be outside them.
    """
    if ready.outputs is None:
        return ""
    inputs, expected = bench.fill(bench.seeds[0])
    rows = ready.rows() if ready.rows is not None else slice(None)
    for name, out in zip(definition.outputs, ready.outputs(), strict=False):
        t = bench.case.tolerance[name]
        wide = Tolerance(SLACK * t.rtol, SLACK * t.atol, t.kind, t.reason)
        found = compare(out[rows], expected[name][rows], wide)
        if found.wrong > STRAYS * found.total:
            return f"{name}: {found.wrong} of {found.total} elements are wrong"
    if any(bool(count) for count in bench.disturbances(inputs).values()):
        return "it changed its inputs, or memory beside them"
    return ""


class Beside:
    """The peers of one workload: made when they are first asked for, and compared then."""

    def __init__(self, definition: Definition, axes: Mapping[str, int], bench: Bench):
        self.definition, self.bench = definition, bench
        self.absent: dict[str, str] = {}  # the reasons, of those that were asked for
        self._makers = makers_of(definition)
        self._ready: dict[str, Call] = {}
        tensors, scalars = bench.tensors, bench.scalars
        try:
            problem = find_problem(definition, axes)[1]
        except UsageError:  # no family yet: every tensor once
            size = sum(t.numel() * t.itemsize for t in tensors.values())
            self._given = Given(definition, tensors, scalars, size)
            return
        constants = dict(problem.constants)
        self._given = Given(definition, tensors, scalars, int(problem.bytes), constants)

    @property
    def yardstick(self) -> str:
        """The name of the peer that is timed beside every kernel."""
        return next(iter(self._makers))

    def calls(self, every: bool) -> dict[str, Call]:
        """Every peer, or the yardstick alone, without those that are absent."""
        names = list(self._makers) if every else [self.yardstick]
        for name in names:
            if name not in self._ready and name not in self.absent:
                self._make(name)
        return {name: self._ready[name] for name in names if name in self._ready}

    def _make(self, name: str) -> None:
        self.bench.fill(self.bench.seeds[0])
        try:
            ready = self._makers[name](self._given)
            wrong = complaint(ready, self.definition, self.bench)
        except NotOffered as error:
            self.absent[name] = str(error)
            return
        except Exception as error:  # a library that is not there, or cannot do this: go on without
            if "CUDA error" in str(error):
                raise  # the context is corrupt
            text = (str(error).splitlines() or [""])[0][:200]
            self.absent[name] = f"{type(error).__name__}: {text}"
            return
        if wrong:
            self.absent[name] = f"wrong: {wrong}"
        else:
            self._ready[name] = ready.call
