"""Baselines of MoE: grouped products in torch, FlashInfer's fused one."""

import importlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ptxflow.eval.bench.baselines.baseline import Given, Unsupported
from ptxflow.eval.bench.references.moe import dequantise, route

COUNTED = 512  # tokens, from which waiting for a count costs less than rows that nobody needs


def widened(weights: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 of float8 weights [experts, out, in] and the scales of their blocks."""
    wide = torch.empty(weights.shape, dtype=torch.bfloat16, device=weights.device)
    for expert in range(len(weights)):
        wide[expert] = dequantise(weights[expert], scale[expert])
    return wide


def tokens_widened(x: Tensor, scale: Tensor) -> Tensor:
    """bfloat16 of float8 x [tokens, hidden] and scales [blocks, tokens]."""
    wide = x.to(torch.bfloat16).unflatten(-1, (len(scale), -1)) * scale.T[..., None]
    return wide.to(torch.bfloat16).flatten(1)


def static_arguments(given: Given) -> list[Any]:
    """The inputs of `experts`, without a count of rows.

    Weights are widened here, so not in what is timed: torch has no grouped product of float8 by
    blocks, and would read half of the bytes if it had one.
    """
    t = given.tensors
    up = widened(t["gemm1_weights"], t["gemm1_weights_scale"])
    down = widened(t["gemm2_weights"], t["gemm2_weights_scale"])
    names = ("routing_logits", "routing_bias", "hidden_states", "hidden_states_scale")
    return [*(t[n] for n in names), up, down, *given.arguments()[-2:], False]


def arguments(given: Given) -> list[Any]:
    """The inputs of `experts`, with a count of rows where there are COUNTED tokens or more."""
    return [*static_arguments(given)[:-1], len(given.tensors["hidden_states"]) >= COUNTED]


def experts(
    logits: Tensor, bias: Tensor, x: Tensor, scale: Tensor, up: Tensor, down: Tensor, offset: int,
    factor: float, counted: bool,
) -> Tensor:  # fmt: skip
    """[tokens, hidden] bfloat16, of float8 x [tokens, hidden] with scales [blocks, tokens].

    A row for every choice of a token, those of this rank's experts first and in their order, which
    the grouped products stop behind. `counted`: the host reads how many these are and leaves out
    the others; else nothing waits for the device. Products are rounded to bfloat16, and a token's
    are added in float32.
    """
    chosen, share = route(logits, bias)
    count, top_k = len(up), chosen.shape[1]
    local = chosen.flatten() - offset
    local = local.masked_fill((local < 0) | (local >= count), count)
    local, order = local.sort()
    last = torch.arange(1, count + 1, device=x.device)
    ends = torch.searchsorted(local, last, out_int32=True)
    if counted:
        rows = int(ends[-1])
        local, order = local[:rows], order[:rows]
    tokens = order // top_k
    each = tokens_widened(x, scale)[tokens]
    linear, gate = F.grouped_mm(each, up.mT, offs=ends).chunk(2, -1)
    out = F.grouped_mm(linear * F.silu(gate), down.mT, offs=ends)
    weighted = out * (share.flatten()[order] * factor)[:, None]
    weighted = weighted.masked_fill((local == count)[:, None], 0.0)  # nothing wrote these rows
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    return total.index_add(0, tokens, weighted).to(torch.bfloat16)


def flashinfer_arguments(given: Given) -> list[Any]:
    """The inputs of `flashinfer`, which takes a choice of experts and tokens in bfloat16: routing
    and that widening are done here, so not in what is timed. Its scales are laid out as ours."""
    t, experts = given.tensors, len(given.tensors["gemm1_weights"])
    offset, factor = given.arguments()[-2:]
    rank, rest = divmod(int(offset), experts)
    if rest:
        raise Unsupported(f"it takes ranks of {experts} experts each")
    chosen, share = route(t["routing_logits"], t["routing_bias"])
    x = tokens_widened(t["hidden_states"], t["hidden_states_scale"])
    up, down = ([t[f"{name}_weights{s}"] for s in ("", "_scale")] for name in ("gemm1", "gemm2"))
    ranks = t["routing_logits"].shape[1] // experts
    out = torch.full_like(t["output"], math.nan)  # what it leaves out is not right by chance
    own = [x, chosen.int(), share * factor, up[0], down[0], torch.bfloat16, [up[1], down[1]]]
    return [own, rank, ranks, out]


def flashinfer(given: list[Any], rank: int, ranks: int, out: Tensor) -> Tensor:
    """FlashInfer's fused MoE for Hopper into `out`: it quantises tokens and what lies between
    the products to float8 by blocks of 128."""
    importlib.import_module("flashinfer.fused_moe").cutlass_fused_moe(
        *given, ep_size=ranks, ep_rank=rank, output=out, use_deepseek_fp8_block_scale=True
    )
    return out
