"""Baselines of products, norms and sampling, and of any operator: a copy, the reference."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ptxflow.eval.bench.baselines.baseline import Baseline, Given, Maker, Unsupported, computing
from ptxflow.eval.bench.references import load_reference

RADIX = 1024
Formula = Callable[..., Any]
Arguments = Callable[[Given], Sequence[Any]]  # of a formula


def copy(given: Given) -> Baseline:
    """Half of the compulsory bytes read and as many written: what memory can do, not a library."""
    half = max(1, given.bytes // 2)
    device = next(iter(given.tensors.values())).device
    source = torch.ones(half, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Baseline(lambda: target.copy_(source))


def torch_reference(given: Given) -> Baseline:
    """The definition's reference, operation by operation."""
    run = load_reference(given.definition)
    arguments = given.arguments()
    return computing(lambda: run(*arguments))


def called(formula: Formula, arguments: Arguments) -> Maker:
    """A formula in torch, operation by operation, or a library's function: of arguments that are
    made before it is timed, and made again before it is compared."""
    return partial(_of, formula, arguments)


def compiled(formula: Formula, arguments: Arguments) -> Maker:
    """A formula through torch.compile, for these shapes alone."""

    def make(given: Given) -> Baseline:
        on_gpu = any(t.is_cuda for t in given.tensors.values())
        if on_gpu and importlib.util.find_spec("triton") is None:
            raise ModuleNotFoundError("no Triton")
        from torch import _inductor

        _inductor.config.compile_threads = 1  # no pool of processes
        # what is compiled hangs on a code object, for eight workloads at most: each has its own
        assert isinstance(formula, FunctionType) and not formula.__defaults__
        own = FunctionType(formula.__code__.replace(), formula.__globals__, formula.__name__)
        return _of(torch.compile(own, dynamic=False, fullgraph=True), arguments, given)

    return make


def imported(module: str, name: str) -> Maker:
    """A maker of a module of this folder that cannot be imported everywhere."""

    def make(given: Given) -> Baseline:
        made = getattr(importlib.import_module(f"ptxflow.eval.bench.baselines.{module}"), name)
        return made(given)

    return make


def _of(formula: Formula, arguments: Arguments, given: Given) -> Baseline:
    own = arguments(given)
    return Baseline(lambda: formula(*own), computing(lambda: formula(*arguments(given))).outputs)


def torch_mm(given: Given) -> Baseline:
    """C = A B^T by torch.mm (cuBLAS), into an output of its own."""
    a, b = given.tensors["A"], given.tensors["B"].T
    out = torch.empty_like(given.tensors["C"])
    return computing(lambda: torch.mm(a, b, out=out))


def gemm_epilogue(
    a: Tensor, b: Tensor, bias: Tensor | None, up: Tensor | None, residual: Tensor | None
) -> Tensor:
    """A linear layer and what follows, as models write it: rounded after each operation."""
    x = torch.nn.functional.linear(a, b, bias)
    if up is not None:
        x = torch.nn.functional.silu(x) * up
    return x if residual is None else x + residual


def gemm_epilogue_arguments(given: Given) -> list[Any]:
    """The inputs of `gemm_epilogue`."""
    return [given.tensors.get(name) for name in ("A", "B", "bias", "up", "residual")]


def torch_scaled_mm(given: Given) -> Baseline:
    """torch._scaled_mm with DeepSeek's scales (cuBLASLt, Hopper alone)."""
    t = given.tensors
    m = t["A"].shape[0]
    if m % 4:
        raise Unsupported(f"cuBLASLt takes rows in fours, not {m}")
    b, scale_a, scale_b = t["B"].T, t["A_scale"].T, t["B_scale"].T
    return computing(
        lambda: torch._scaled_mm(t["A"], b, scale_a, scale_b, out_dtype=torch.bfloat16)
    )


def torch_rms_norm(given: Given) -> Baseline:
    """The fused operation of torch, after an addition in 16 bits where there is a residual."""
    x, weight = given.tensors["hidden_states"], given.tensors["weight"]
    residual, eps = given.tensors.get("residual"), given.constants["eps"]

    def call() -> Tensor:
        summed = x if residual is None else x + residual
        return torch.nn.functional.rms_norm(summed, (x.shape[-1],), weight, eps)

    return computing(call)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The reference's formula, as one would write it for a compiler."""
    total = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale * weight.float()).to(weight.dtype)


def rms_norm_arguments(given: Given) -> list[Any]:
    """The inputs of `rms_norm`."""
    t = given.tensors
    return [t["hidden_states"], t.get("residual"), t["weight"], given.constants["eps"]]


def flashinfer_rmsnorm(given: Given) -> Baseline:
    """flashinfer.rmsnorm; with a residual fused_add_rmsnorm, which stores the sum too: in place, so
    on clones, whose values drift from call to call while they are timed."""
    library = importlib.import_module("flashinfer")
    x, weight = given.tensors["hidden_states"], given.tensors["weight"]
    eps = given.constants["eps"]
    if "residual" not in given.tensors:
        return computing(lambda: library.rmsnorm(x, weight, eps=eps))
    residual = given.tensors["residual"]
    own = x.clone(), residual.clone()

    def outputs() -> Sequence[Tensor]:
        fresh = x.clone(), residual.clone()
        library.fused_add_rmsnorm(*fresh, weight, eps=eps)
        return fresh[:1]

    return Baseline(lambda: library.fused_add_rmsnorm(*own, weight, eps=eps), outputs)


def flashinfer_sampling(given: Given, radix: bool) -> Baseline:
    """FlashInfer's rejection sampling, or its radix selection of up to RADIX tokens. They have no
    rule for k and p outside (0, vocabulary) and (0, 1): such rows get one inside and are not
    compared."""
    probs = given.tensors["probs"]
    most = min(RADIX, probs.shape[-1] - 1) if radix else probs.shape[-1] - 1
    ranges = {"top_k": (1, most), "top_p": (2.0**-10, 1 - 2.0**-10)}
    filters = {name: given.tensors[name] for name in ranges if name in given.tensors}
    order: dict[str, Any] = {"filter_apply_order": "top_k_first"} if len(filters) == 2 else {}
    module, kind = "flashinfer.sampling", "_".join(filters)
    if radix:
        if "top_k" not in filters:
            raise Unsupported("it takes a top_k")
        order = {"top_k_max": int(filters["top_k"].clamp(*ranges["top_k"]).max())}
        order |= {} if "top_p" in filters else {"top_p": 1.0}
        module, kind = "flashinfer.cake_sampling", "top_k_top_p"
    entry = getattr(importlib.import_module(module), kind + "_sampling_from_probs")

    def inside() -> list[Tensor]:
        return [t.clamp(*ranges[name]) for name, t in filters.items()]

    own = inside()

    def rows() -> Tensor:
        same = [new == old for new, old in zip(inside(), filters.values(), strict=True)]
        return torch.stack(same).all(0)

    def outputs() -> Sequence[Tensor]:
        return (entry(probs, *inside(), **order).long(),)

    return Baseline(lambda: entry(probs, *own, **order), outputs, rows)
