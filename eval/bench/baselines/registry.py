"""What a kernel is timed beside: a copy of as many bytes, and library calls on the same tensors.

A baseline is made once for a workload, with the inputs in place, and its outputs are compared with
our reference. One that differs is timed all the same, and how it differs is recorded. One that is
not installed, changes memory that is not its own, or is wrong in many elements of the first output
is absent, with the reason. One whose launches keep the host longer than a flush hides is replayed
from a CUDA graph. An operator's first baseline is its yardstick: cheap and steady, it is timed
beside every kernel; the others are timed beside the best.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ptxflow.env.measurements import COPY
from ptxflow.env.tasks.arguments import UsageError, find_problem
from ptxflow.env.tasks.definition import Definition
from ptxflow.eval.bench.baselines import attention, baseline, common, cublaslt, gdn, moe, sparse
from ptxflow.eval.bench.baselines import is_eager_reference as is_eager
from ptxflow.eval.bench.baselines.baseline import Baseline, Call, Given, Maker, Unsupported
from ptxflow.eval.bench.checking import Bench, compare
from ptxflow.eval.bench.disagreement import Json, Outputs
from ptxflow.eval.bench.tolerance import ELEMENTWISE

SLACK = 4.0  # tolerances of a library: it may round once more on the way, as torch's addition does
WRONG = 0.05  # more of the first output than this outside them is another computation
HOST_US = 60.0  # of a call's launches: less than half of a flush
PREFILL, INDEXER = " prefill", " indexer"  # of an op type, by what its definitions are given:
KINDS = {"qo_indptr": PREFILL, "cu_seqlens": PREFILL, "block_table": INDEXER}

#: by op type and the kind of its definition, where KINDS has one; the first is the yardstick
BASELINES: dict[str, dict[str, Maker]] = {
    "gemm": {
        "torch.mm": common.torch_mm,
        COPY: common.copy,
        "cublasLt": cublaslt.cublas_lt,
        "triton": common.imported("triton_kernels", "matmul"),
        "helion": common.imported("helion_kernels", "matmul"),
    },
    "gemm_epilogue": {
        "torch.linear": common.called(common.gemm_epilogue, common.gemm_epilogue_arguments),
        COPY: common.copy,
        "torch.compile": common.compiled(common.gemm_epilogue, common.gemm_epilogue_arguments),
    },
    "gemm_fp8": {COPY: common.copy, "torch._scaled_mm": common.torch_scaled_mm},
    "rmsnorm": {
        COPY: common.copy,
        "torch.rms_norm": common.torch_rms_norm,
        "torch.compile": common.compiled(common.rms_norm, common.rms_norm_arguments),
        "flashinfer": common.flashinfer_rmsnorm,
        "triton": common.imported("triton_kernels", "rms_norm"),
    },
    "sampling": {
        COPY: common.copy,
        "torch": common.torch_reference,
        "flashinfer": partial(common.flashinfer_sampling, radix=False),
        "flashinfer-radix": partial(common.flashinfer_sampling, radix=True),
    },
    "gdn": {
        COPY: common.copy,
        "torch": common.torch_reference,
        "flashinfer": common.called(gdn.flashinfer_step, gdn.flashinfer_step_arguments),
    },
    "gdn" + PREFILL: {
        COPY: common.copy,
        "torch.chunked": gdn.torch_chunked,
        "flashinfer": common.called(gdn.flashinfer, gdn.flashinfer_arguments),
    },
    "dsa_paged": {
        COPY: common.copy,
        "torch": common.called(sparse.attention, sparse.attention_arguments),
        "torch.compile": common.compiled(sparse.attention, sparse.attention_arguments),
    },
    "dsa_paged" + INDEXER: {
        COPY: common.copy,
        "torch": common.called(sparse.index, sparse.index_arguments),
        "torch.compile": common.compiled(sparse.index, sparse.index_arguments),
    },
    "moe": {
        COPY: common.copy,
        "torch.grouped": common.called(moe.experts, moe.arguments),
        "torch.compile": common.compiled(moe.experts, moe.static_arguments),
        "flashinfer": common.called(moe.flashinfer, moe.flashinfer_arguments),
    },
    "gqa_paged": {
        COPY: common.copy,
        "torch": common.torch_reference,
        "flashinfer": partial(attention.gqa_decode, tensor_cores=False),
        "flashinfer-tensor-cores": partial(attention.gqa_decode, tensor_cores=True),
    },
    "mla_paged": {
        COPY: common.copy,
        "torch": common.torch_reference,
        "flashinfer-fa2": partial(attention.mla, backend="fa2"),
        "flashinfer-fa3": partial(attention.mla, backend="fa3"),
    },
    "gqa_paged" + PREFILL: {
        COPY: common.copy,
        "flashinfer-fa2": partial(attention.paged_prefill, backend="fa2"),
        "flashinfer-fa3": partial(attention.paged_prefill, backend="fa3"),
    },
    "gqa_ragged" + PREFILL: {
        COPY: common.copy,
        "torch.sdpa": attention.torch_sdpa,
        "flashinfer-fa2": partial(attention.ragged_prefill, backend="fa2"),
        "flashinfer-fa3": partial(attention.ragged_prefill, backend="fa3"),
        "triton": common.imported("triton_kernels", "attention"),
    },
    "mla_paged" + PREFILL: {
        COPY: common.copy,
        "flashinfer-fa2": partial(attention.mla, backend="fa2"),
        "flashinfer-fa3": partial(attention.mla, backend="fa3"),
    },
}


def makers_of(definition: Definition) -> dict[str, Maker]:
    """The makers of a definition's baselines by name; a copy alone where no library is known."""
    kinds = (kind for name, kind in KINDS.items() if name in definition.inputs)
    return BASELINES.get(definition.op_type + next(kinds, ""), {COPY: common.copy})


def differences(ready: Baseline, definition: Definition, bench: Bench) -> dict[str, Json | None]:
    """The outputs that are not the reference's for the bench's first inputs, and by how much.

    Tolerances are SLACK times ours. What `ready` has no outputs for is not compared.
    """
    if ready.outputs is None:
        return {}
    _, expected = bench.fill(bench.seeds[0])
    rows = ready.rows() if ready.rows is not None else slice(None)
    made: Sequence[Tensor] = ready.outputs()
    found: dict[str, Json | None] = dict.fromkeys([*definition.outputs][len(made) :])
    for name, out in zip(definition.outputs, made, strict=False):
        t = bench.case.tolerance[name]
        wide = t._replace(rtol=SLACK * t.rtol, atol=SLACK * t.atol)
        c = compare(out[rows], expected[name][rows], wide)
        if c.wrong:
            errors: dict[str, Any] = {"error": c.max_abs_error, "times": c.max_error_ratio}
            if t.kind != ELEMENTWISE or not all(map(math.isfinite, errors.values())):
                errors = dict.fromkeys(errors)
            found[name] = {"beyond": c.wrong, "total": c.total, **errors}
    return found


def complaint(ready: Baseline, found: Outputs, definition: Definition, bench: Bench) -> str:
    """Why the baseline whose outputs differ by `found` is not timed; empty where it is.

    It has just run on the bench's first inputs.
    """
    if ready.outputs is None:
        return ""
    main = next(iter(definition.outputs))
    first = found.get(main)
    if first is not None and first["beyond"] > WRONG * first["total"]:
        return (
            f"{main}: {first['beyond']} of {first['total']} elements are wrong, "
            f"more than {WRONG:.0%}"
        )
    inputs, _ = bench.given(bench.seeds[0])
    if any(bool(count) for count in bench.disturbances(inputs).values()):
        return "it changed its inputs, or memory beside them"
    return ""


class Baselines:
    """The baselines of one workload: made when they are first asked for, and compared then."""

    def __init__(self, definition: Definition, axes: Mapping[str, int], bench: Bench):
        self.definition, self.bench = definition, bench
        self.absent: dict[str, str] = {}  # the reasons, of those that were asked for
        self.disagree: dict[str, Outputs] = {}  # those that are timed though outputs differ
        self.replayed: list[str] = []  # those whose launches come from a CUDA graph
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
        """The name of the baseline that is timed beside every kernel."""
        return next(iter(self._makers))

    def about(self) -> Json:
        """For a record: which baselines are absent and why, whose outputs differ, which come from a
        CUDA graph; nothing empty."""
        notes: Json = {"absent": self.absent, "disagree": self.disagree, "replayed": self.replayed}
        return {name: note.copy() for name, note in notes.items() if note}

    def calls(
        self, every: bool, without: Sequence[str] = (), making: Callable[[str], None] | None = None
    ) -> dict[str, Call]:
        """Every baseline but those named, or the yardstick alone, without those that are absent;
        `making` is told of each that is made now, which may take minutes."""
        names = [n for n in self._makers if n not in without] if every else [self.yardstick]
        for name in names:
            if name not in self._ready and name not in self.absent:
                if making:
                    making(name)
                self._make(name)
        return {name: self._ready[name] for name in names if name in self._ready}

    def _make(self, name: str) -> None:
        self.bench.fill(self.bench.seeds[0])
        try:
            ready = self._makers[name](self._given)
            found = differences(ready, self.definition, self.bench)
            wrong = complaint(ready, found, self.definition, self.bench)
            if not wrong and self._keeps_host(name, ready.call):
                ready = self._replayed(name, ready)
        except Unsupported as error:
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
            return
        self._ready[name] = ready.call
        if found:
            self.disagree[name] = found

    def _keeps_host(self, name: str, call: Call) -> bool:
        """Whether not the GPU would be timed; of an eager reference and a copy nobody asks."""
        asked = name != COPY and not is_eager(self.definition.op_type, name)
        on_gpu = all(t.is_cuda for t in self.bench.tensors.values())
        return asked and on_gpu and baseline.host_us(call) > HOST_US

    def _replayed(self, name: str, ready: Baseline) -> Baseline:
        """From a CUDA graph where that computes the same."""
        graph = baseline.replay(ready, [g.tensor.shape for g in self.bench.outputs.values()])
        if graph is None:
            return ready
        found = differences(graph, self.definition, self.bench)
        if complaint(graph, found, self.definition, self.bench):
            return ready
        self.replayed.append(name)
        return graph
