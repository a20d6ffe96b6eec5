"""Reference of a mixture of experts: grouped routing with a bias, FP8 weights with block scales."""

import torch

NUM_GROUPS = 8
KEPT_GROUPS = 4
TOP_K = 8


def route(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, experts], bias [experts] -> chosen experts [T, TOP_K], their shares [T, TOP_K].

    Groups of experts compete with their two best biased scores; within the kept groups the best
    biased scores win. Shares use the scores without the bias and sum to 1.
    """
    scores = torch.sigmoid(logits.float())
    biased = scores + bias.float()
    groups = biased.reshape(len(biased), NUM_GROUPS, -1)
    kept = groups.topk(2, -1).values.sum(-1).topk(KEPT_GROUPS, -1).indices
    lost = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device)
    lost = lost.scatter(1, kept, False)[:, :, None]
    biased = groups.masked_fill(lost, torch.finfo(torch.float32).min).flatten(1)
    chosen = biased.topk(TOP_K, -1).indices
    share = scores.gather(1, chosen)
    return chosen, share / (share.sum(-1, keepdim=True) + 1e-20)


def dequantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of x [rows, columns] times the scale of its block; scale [row, column blocks]."""
    rows, columns = (size // blocks for size, blocks in zip(x.shape, scale.shape, strict=True))
    return x.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@torch.no_grad()
def moe(
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    local_expert_offset: int,
    routed_scaling_factor: float,
) -> torch.Tensor:
    """hidden_states [T, hidden] float8 with scales [blocks, T] -> output [T, hidden] bfloat16.

    The rank holds the experts from local_expert_offset on; tokens that chose none of them get 0.
    gemm1 gives [linear, gated] halves, and the activation is on the second.
    """
    chosen, share = route(routing_logits, routing_bias)
    output = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for local in range(len(gemm1_weights)):
        hits = chosen == int(local_expert_offset) + local
        tokens = hits.any(-1).nonzero().squeeze(-1)
        if len(tokens) == 0:
            continue
        x = dequantise(hidden_states[tokens], hidden_states_scale[:, tokens].T)
        g = x @ dequantise(gemm1_weights[local], gemm1_weights_scale[local]).T
        linear, gate = g.chunk(2, -1)
        h = linear * torch.nn.functional.silu(gate)
        o = h @ dequantise(gemm2_weights[local], gemm2_weights_scale[local]).T
        weight = (share * hits).sum(-1)[tokens] * float(routed_scaling_factor)
        output[tokens] += weight[:, None] * o
    return output.to(torch.bfloat16)
