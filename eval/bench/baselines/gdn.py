"""Baselines of the gated delta rule: prefill in torch by chunks, FlashInfer's kernels."""

import importlib
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ptxflow.eval.bench.baselines.baseline import Baseline, Given, computing
from ptxflow.eval.bench.references.gdn import gates, scale_of, spread

CHUNK = 64  # tokens


def torch_chunked(given: Given) -> Baseline:
    """Chunks of 64 tokens in float32, all heads at once, sequence after sequence.

    Lengths are read once, before anything is timed, as a library plans.
    """
    bounds = given.tensors["cu_seqlens"].tolist()
    return computing(lambda: prefill(given, bounds))


@torch.no_grad()
def prefill(given: Given, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Output and new states, as the reference's; `bounds` are where sequences begin."""
    q, k, v, A_log, a, dt_bias, b = (
        given.tensors[name] for name in ("q", "k", "v", "A_log", "a", "dt_bias", "b")
    )
    state, scale = given.tensors.get("state"), scale_of(given.scalars["scale"], q.shape[-1])
    heads, size = v.shape[1:]
    _, beta = gates(A_log, a, dt_bias, b)
    # of the decays [heads, tokens], and finite where those are rounded to 0
    logs = (-A_log.exp() * softplus(a.float() + dt_bias)).T
    queries, keys = (spread(x, heads).transpose(0, 1) for x in (q, k))
    values, beta = v.float().transpose(0, 1), beta.T
    output = torch.zeros_like(values)
    states = torch.zeros(len(bounds) - 1, heads, size, q.shape[-1], device=q.device)
    for s, (first, end) in enumerate(itertools.pairwise(bounds)):
        if first == end:
            continue
        now = states[s] if state is None else state[s]
        for begin in range(first, end, CHUNK):
            part = slice(begin, min(begin + CHUNK, end))
            mine = (x[:, part] for x in (queries, keys, values, logs, beta))
            output[:, part], now = _chunk(now, *mine)
        states[s] = now
    return (output.transpose(0, 1) * scale).to(v.dtype), states


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Unscaled outputs and the new state of all heads, from one chunk."""
    total = log.cumsum(-1)
    decays = (total[:, :, None] - total[:, None]).tril().exp().tril()
    raised = total.exp()[..., None]
    pulls = (beta[..., None] * (k @ k.mT) * decays).tril(-1)
    right = beta[..., None] * (v - raised * (k @ state.mT))
    x = torch.linalg.solve_triangular(pulls, right, upper=False, unitriangular=True)
    out = raised * (q @ state.mT) + (q @ k.mT * decays) @ x
    leaving = (total[:, -1:] - total).exp()[..., None] * x
    return out, raised[:, -1:] * state + leaving.mT @ k


def flashinfer_arguments(given: Given) -> list[Any]:
    """The inputs of `flashinfer`. Decays and strengths are computed here, so not in what is timed,
    and new states are 0 where a sequence has no token."""
    q, k, v, state, A_log, a, dt_bias, b, bounds, scale = given.arguments()
    own = [q, k, v, *gates(A_log, a, dt_bias, b), scale_of(scale, q.shape[-1]), state, True, bounds]
    made = (torch.zeros_like(given.tensors[name]) for name in given.definition.outputs)
    return [own, *made, int(bounds.diff().max())]


def flashinfer(
    given: list[Any], out: Tensor, states: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Output and new states by FlashInfer's kernels for sm_90a, written into `out` and `states`.

    `longest`: tokens of a sequence, by which it cuts sequences where there are few.
    """
    importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule(
        *given, output=out, output_state=states, max_seqlen=longest
    )
    return out, states


def flashinfer_step_arguments(given: Given) -> list[Any]:
    """The inputs of `flashinfer_step`: states are twice in its pool, read from the first half and
    written to the second, as it would overwrite them."""
    q, k, v, state, A_log, a, dt_bias, b, scale = given.arguments()
    reads = torch.arange(len(q), dtype=torch.int32, device=q.device)
    own = [q, k, v, None, A_log, a, dt_bias, b, scale_of(scale, q.shape[-1])]
    out, pool = torch.zeros_like(given.tensors["output"]), state.repeat(2, 1, 1, 1)
    return [own, out, pool, reads, reads + len(q)]


def flashinfer_step(
    given: list[Any], out: Tensor, pool: Tensor, reads: Tensor, writes: Tensor
) -> tuple[Tensor, Tensor]:
    """One token by FlashInfer's kernel of float32 states, pool [2 batch, value heads, V, K]."""
    importlib.import_module("flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose(
        *given, out, False, pool, reads, writes
    )
    return out, pool[len(reads) :]
