"""What a kernel is timed beside: a copy of as many bytes, and library calls on the same tensors.

A peer is made once for a workload, with the inputs in place. What it computes is compared with our
reference before its times count. A peer that is not there, or computes something else, is absent,
with the reason. The first of an op type's peers is its yardstick: it is cheap and steady, and timed
beside every kernel; the others are timed beside the best.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptxflow.env.measurements import COPY
from ptxflow.eval.arguments import UsageError, find_problem
from ptxflow.eval.checking import Bench, compare
from ptxflow.eval.definition import Definition
from ptxflow.eval.tolerance import Tolerance

Call = Callable[[], object]
SLACK = 4.0  # tolerances of a library: it may round once more on the way, as torch's addition does
STRAYS = 1e-3  # of its elements may lie outside even these; a wrong call is wrong nearly everywhere


@dataclass(frozen=True)
class Given:
    """What peers are made from: a definition, its inputs in place, and the outputs' tensors.

    `bytes` are those that the problem cannot do without, `constants` what else its mathematics
    fixes.
    """

    definition: Definition
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, float | None]
    bytes: int
    constants: Mapping[str, float] = field(default_factory=dict)

    def arguments(self) -> list[Any]:
        """The inputs in the definition's order."""
        inputs = {**self.tensors, **self.scalars}
        return [inputs[name] for name in self.definition.inputs]


@dataclass(frozen=True)
class Ready:
    """`call` is what is timed. `outputs` computes the definition's outputs from the inputs that are
    in place now; None where there is nothing to compare. Only `rows` of the first axis are compared
    where there are some that the library defines otherwise."""

    call: Call
    outputs: Callable[[], Sequence[Tensor]] | None = None
    rows: Callable[[], Tensor] | None = None


Maker = Callable[[Given], Ready]


def _computing(call: Callable[[], Any]) -> Ready:
    """A peer whose call returns its outputs."""

    def outputs() -> Sequence[Tensor]:
        made = call()
        return made if isinstance(made, tuple | list) else (made,)

    return Ready(call, outputs)


def copy(given: Given) -> Ready:
    """Half of the compulsory bytes read and as many written: what memory can do, not a library."""
    half = max(1, given.bytes // 2)
    device = next(iter(given.tensors.values())).device
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Ready(lambda: target.copy_(source))


def torch_reference(given: Given) -> Ready:
    """The definition's reference, operation by operation."""
    run = given.definition.reference()
    arguments = given.arguments()
    return _computing(lambda: run(*arguments))


def torch_mm(given: Given) -> Ready:
    """C = A B^T by torch.mm (cuBLAS), into an output of its own."""
    a, b = given.tensors["A"], given.tensors["B"].T
    out = torch.empty_like(given.tensors["C"])
    return _computing(lambda: torch.mm(a, b, out=out))


def torch_rms_norm(given: Given) -> Ready:
    """The fused operation of torch, after an addition in 16 bits where there is a residual."""
    x, weight = given.tensors["hidden_states"], given.tensors["weight"]
    residual, eps = given.tensors.get("residual"), given.constants["eps"]

    def call() -> Tensor:
        summed = x if residual is None else x + residual
        return torch.nn.functional.rms_norm(summed, (x.shape[-1],), weight, eps)

    return _computing(call)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The reference's formula, as one would write it for a compiler."""
    total = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale * weight.float()).to(weight.dtype)


def torch_compile_rms_norm(given: Given) -> Ready:
    """The formula through torch.compile, for these shapes alone."""
    t = given.tensors
    arguments = t["hidden_states"], t.get("residual"), t["weight"], given.constants["eps"]
    if t["weight"].is_cuda and importlib.util.find_spec("triton") is None:
        raise ModuleNotFoundError("no Triton")
    from torch import _dynamo, _inductor

    _dynamo.reset()  # else the ninth workload is no longer compiled
    _inductor.config.compile_threads = 1  # no pool of processes
    compiled = torch.compile(rms_norm, dynamic=False, fullgraph=True)
    return _computing(lambda: compiled(*arguments))


def flashinfer_rmsnorm(given: Given) -> Ready:
    """flashinfer.rmsnorm; with a residual fused_add_rmsnorm, which stores the sum too: in place, so
    on clones, whose values drift from call to call while they are timed."""
    library = importlib.import_module("flashinfer")
    x, weight = given.tensors["hidden_states"], given.tensors["weight"]
    eps = given.constants["eps"]
    if "residual" not in given.tensors:
        return _computing(lambda: library.rmsnorm(x, weight, eps=eps))
    residual = given.tensors["residual"]
    own = x.clone(), residual.clone()

    def outputs() -> Sequence[Tensor]:
        fresh = x.clone(), residual.clone()
        library.fused_add_rmsnorm(*fresh, weight, eps=eps)
        return fresh[:1]

    return Ready(lambda: library.fused_add_rmsnorm(*own, weight, eps=eps), outputs)


def flashinfer_sampling(given: Given) -> Ready:
    """FlashInfer's rejection sampling. It has no rule for k and p outside (0, vocabulary) and
    (0, 1): such rows get one inside and are not compared."""
    library = importlib.import_module("flashinfer.sampling")
    probs = given.tensors["probs"]
    ranges = {"top_k": (1, probs.shape[-1] - 1), "top_p": (2.0**-10, 1 - 2.0**-10)}
    filters = {name: given.tensors[name] for name in ranges if name in given.tensors}
    entry = getattr(library, "_".join(filters) + "_sampling_from_probs")
    order = {"filter_apply_order": "top_k_first"} if len(filters) == 2 else {}

    def inside() -> list[Tensor]:
        return [t.clamp(*ranges[name]) for name, t in filters.items()]

    own = inside()

    def rows() -> Tensor:
        same = [new == old for new, old in zip(inside(), filters.values(), strict=True)]
        return torch.stack(same).all(0)

    def outputs() -> Sequence[Tensor]:
        return (entry(probs, *inside(), **order).long(),)

    return Ready(lambda: entry(probs, *own, **order), outputs, rows)


#: by op type; the first is the yardstick
PEERS: dict[str, dict[str, Maker]] = {
    "gemm": {"torch.mm": torch_mm, COPY: copy},
    "rmsnorm": {
        COPY: copy,
        "torch.rms_norm": torch_rms_norm,
        "torch.compile": torch_compile_rms_norm,
        "flashinfer": flashinfer_rmsnorm,
    },
    "sampling": {COPY: copy, "torch": torch_reference, "flashinfer": flashinfer_sampling},
    "gdn": {COPY: copy, "torch": torch_reference},
}


def complaint(ready: Ready, definition: Definition, bench: Bench) -> str:
    """What is wrong with the peer's outputs for the bench's first inputs; empty where all is right.

    Tolerances are SLACK times ours, and a thousandth of the elements may be outside them.
    """
    if ready.outputs is None:
        return ""
    inputs, expected = bench.fill(bench.seeds[0])
    rows = ready.rows() if ready.rows is not None else slice(None)
    for name, out in zip(definition.outputs, ready.outputs(), strict=True):
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
        self._makers = PEERS.get(definition.op_type, {COPY: copy})
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
