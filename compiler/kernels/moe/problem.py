"""A mixture of experts in float8 with block scales, on one rank of those that share the experts.

A token chooses 8 of all experts by grouped, bias-corrected routing; the rank holds
`num_local_experts` of them. Values come with a float32 scale for each 128 along K (activations), or
128 x 128 (weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem, bind_axis

BLOCK = 128  # elements along K, and rows of weights, that share a scale
LANE_EXPERTS, CHOSEN = 8, 8  # experts that a lane scores, and that a token chooses
EXPERTS = 32 * LANE_EXPERTS  # that a warp scores
WORD = 32  # experts
ROW_ALIGN = 8  # rows of an expert begin at a multiple: 32 bytes of their scales
INPUTS: dict[str, tuple[list[str] | None, str]] = {
    "routing_logits": (["seq_len", "num_experts"], "float32"),
    "routing_bias": (["num_experts"], "bfloat16"),
    "hidden_states": (["seq_len", "hidden_size"], "float8_e4m3fn"),
    "hidden_states_scale": (["num_hidden_blocks", "seq_len"], "float32"),
    "gemm1_weights": (["num_local_experts", "gemm1_out_size", "hidden_size"], "float8_e4m3fn"),
    "gemm1_weights_scale": (
        ["num_local_experts", "num_gemm1_out_blocks", "num_hidden_blocks"],
        "float32",
    ),
    "gemm2_weights": (["num_local_experts", "hidden_size", "intermediate_size"], "float8_e4m3fn"),
    "gemm2_weights_scale": (
        ["num_local_experts", "num_hidden_blocks", "num_intermediate_blocks"],
        "float32",
    ),
    "local_expert_offset": (None, "int32"),
    "routed_scaling_factor": (None, "float32"),
}
OUTPUTS: dict[str, tuple[list[str] | None, str]] = {
    "output": (["seq_len", "hidden_size"], "bfloat16")
}
MAX_INDEX = 2**32 - 1  # of elements, which kernels count in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and dtypes, another number of experts than
    256, and sizes that are no multiples of 128. Work is that of even routing: which experts a token
    chooses only the device knows.
    """
    name = str(definition.get("name", "moe"))
    for part, expected in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        tensors: Mapping[str, Any] = definition.get(part) or {}
        found = {tensor: (spec["shape"], spec["dtype"]) for tensor, spec in tensors.items()}
        if found != expected:
            raise ValueError(f"{name}: a mixture of experts has the {part} {expected}, not {found}")
    shapes = [shape for shape, _ in (*INPUTS.values(), *OUTPUTS.values())]
    names = dict.fromkeys(axis for shape in shapes for axis in shape or ())
    bound = {axis: bind_axis(name, axis, definition["axes"], axes) for axis in names}
    _refuse(name, bound)
    flops, bytes_ = _work(bound)
    return Problem("moe", name, tuple(bound.items()), "float8_e4m3fn", flops, bytes_)


def most_rows(axes: Mapping[str, int]) -> int:
    """Rows of all local experts, if every token chooses as many of them as it can, each expert's
    on their alignment."""
    local = axes["num_local_experts"]
    return axes["seq_len"] * min(CHOSEN, local) + ROW_ALIGN * local


def mean_rows(axes: Mapping[str, int]) -> float:
    """Rows of all local experts, if routing is even."""
    return axes["seq_len"] * CHOSEN * axes["num_local_experts"] / EXPERTS


def touched(axes: Mapping[str, int]) -> float:
    """Local experts that some token chooses, if routing is even."""
    return axes["num_local_experts"] * (1 - (1 - CHOSEN / EXPERTS) ** axes["seq_len"])


def weights(axes: Mapping[str, int]) -> int:
    """Elements of an expert's three matrices, a product each for every row."""
    return 3 * axes["hidden_size"] * axes["intermediate_size"]


def expert_bytes(axes: Mapping[str, int]) -> float:
    """Of an expert's weights and their scales."""
    return weights(axes) * (1 + 4 / BLOCK**2)


def token_bytes(axes: Mapping[str, int]) -> float:
    """Of a token's values and their scales."""
    return axes["hidden_size"] * (1 + 4 / BLOCK)


def _work(axes: Mapping[str, int]) -> tuple[float, float]:
    experts = touched(axes) * expert_bytes(axes)
    each = token_bytes(axes) + 2 * axes["hidden_size"] + 4 * EXPERTS
    bytes_ = experts + axes["seq_len"] * each + 2 * EXPERTS
    return 2.0 * weights(axes) * mean_rows(axes), bytes_


def _refuse(name: str, bound: Mapping[str, int]) -> None:
    """Raise ValueError for axes that the mathematics or the kernels do not take."""
    hidden, inner = bound["hidden_size"], bound["intermediate_size"]
    if bound["num_experts"] != EXPERTS or bound["num_local_experts"] > EXPERTS:
        raise ValueError(
            f"{name}: {bound['num_local_experts']} local of {bound['num_experts']} experts; there "
            f"must be {EXPERTS}, of which some are local"
        )
    if hidden % BLOCK or inner % BLOCK:
        raise ValueError(
            f"{name}: hidden_size = {hidden} and intermediate_size = {inner} must be multiples of "
            f"{BLOCK}"
        )
    wanted = {
        "gemm1_out_size": 2 * inner,
        "num_hidden_blocks": hidden // BLOCK,
        "num_intermediate_blocks": inner // BLOCK,
        "num_gemm1_out_blocks": 2 * inner // BLOCK,
    }
    for axis, size in wanted.items():
        if bound[axis] != size:
            raise ValueError(f"{name}: {axis} must be {size}, not {bound[axis]}")
    rows = most_rows(bound) + 2 * BLOCK
    if rows * max(hidden, inner) > MAX_INDEX or bound["seq_len"] * EXPERTS > MAX_INDEX:
        raise ValueError(f"{name}: rows of experts may have more than {MAX_INDEX} elements")
