"""A mixture of experts in float8 with block scales, on one rank of those that share the experts.

A token chooses 8 of all experts by grouped, bias-corrected routing; the rank holds
`num_local_experts` of them. Values come with a float32 scale for each 128 along K (activations), or
128 x 128 (weights).
"""

from collections.abc import Collection, Iterator

from ptxflow.compiler.kernels.tensors import Axes, Schema

BLOCK = 128  # elements along K, and rows of weights, that share a scale
LANE_EXPERTS, CHOSEN = 8, 8  # experts that a lane scores, and that a token chooses
EXPERTS = 32 * LANE_EXPERTS  # that a warp scores
WORD = 32  # experts
ROW_ALIGN = 8  # rows of an expert begin at a multiple: 32 bytes of their scales
TENSORS = """
routing_logits [seq_len, num_experts] float32
routing_bias [num_experts] bfloat16
hidden_states [seq_len, hidden_size]
hidden_states_scale [num_hidden_blocks, seq_len] float32
gemm1_weights [num_local_experts, gemm1_out_size, hidden_size]
gemm1_weights_scale [num_local_experts, num_gemm1_out_blocks, num_hidden_blocks] float32
gemm2_weights [num_local_experts, hidden_size, intermediate_size]
gemm2_weights_scale [num_local_experts, num_hidden_blocks, num_intermediate_blocks] float32
local_expert_offset int32
routed_scaling_factor float32
-> output [seq_len, hidden_size] bfloat16
"""
MAX_INDEX = 2**32 - 1  # of elements, which kernels count in 32 bits


def most_rows(axes: Axes) -> int:
    """Rows of all local experts, if every token chooses as many of them as it can, each expert's
    on their alignment."""
    local = axes["num_local_experts"]
    return axes["seq_len"] * min(CHOSEN, local) + ROW_ALIGN * local


def mean_rows(axes: Axes) -> float:
    """Rows of all local experts, if routing is even."""
    return axes["seq_len"] * CHOSEN * axes["num_local_experts"] / EXPERTS


def touched(axes: Axes) -> float:
    """Local experts that some token chooses, if routing is even."""
    return axes["num_local_experts"] * (1 - (1 - CHOSEN / EXPERTS) ** axes["seq_len"])


def weights(axes: Axes) -> int:
    """Elements of an expert's three matrices, a product each for every row."""
    return 3 * axes["hidden_size"] * axes["intermediate_size"]


def expert_bytes(axes: Axes) -> float:
    """Of an expert's weights and their scales."""
    return weights(axes) * (1 + 4 / BLOCK**2)


def token_bytes(axes: Axes) -> float:
    """Of a token's values and their scales."""
    return axes["hidden_size"] * (1 + 4 / BLOCK)


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """That of even routing: which experts a token chooses only the device knows."""
    each = token_bytes(a) + 2 * a["hidden_size"] + 4 * EXPERTS
    moved = touched(a) * expert_bytes(a) + a["seq_len"] * each + 2 * EXPERTS
    return 2.0 * weights(a) * mean_rows(a), moved


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    hidden, inner, local = a["hidden_size"], a["intermediate_size"], a["num_local_experts"]
    if a["num_experts"] != EXPERTS or local > EXPERTS:
        yield (
            f"{local} local of {a['num_experts']} experts; there must be {EXPERTS}, of which some "
            "are local"
        )
    if hidden % BLOCK or inner % BLOCK:
        yield (
            f"hidden_size = {hidden} and intermediate_size = {inner} must be multiples of {BLOCK}"
        )
    wanted = {
        "gemm1_out_size": 2 * inner,
        "num_hidden_blocks": hidden // BLOCK,
        "num_intermediate_blocks": inner // BLOCK,
        "num_gemm1_out_blocks": 2 * inner // BLOCK,
    }
    for axis, size in wanted.items():
        if a[axis] != size:
            yield f"{axis} must be {size}, not {a[axis]}"
    rows = most_rows(a) + 2 * BLOCK
    if rows * max(hidden, inner) > MAX_INDEX or a["seq_len"] * EXPERTS > MAX_INDEX:
        yield f"rows of experts may have more than {MAX_INDEX} elements"


SCHEMA = Schema("moe", "a mixture of experts", TENSORS, _refused, _work, dtype="float8_e4m3fn")
