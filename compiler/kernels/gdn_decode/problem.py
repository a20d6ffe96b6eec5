"""A decoding step of the gated delta rule, from a definition: one token, one state per value head.

A state is [value, key] in float32, both of `head_size`; value head n reads query and key head
n // (num_v_heads / num_q_heads).
"""

import math
from collections.abc import Collection, Iterator

from ptxflow.compiler.kernels.tensors import Axes, Schema

TENSORS = """
q [batch_size, seq_len, num_q_heads, head_size]
k [batch_size, seq_len, num_k_heads, head_size]
v [batch_size, seq_len, num_v_heads, head_size]
state [batch_size, num_v_heads, head_size, head_size] float32
A_log [num_v_heads] float32
a [batch_size, seq_len, num_v_heads]
dt_bias [num_v_heads] float32
b [batch_size, seq_len, num_v_heads]
scale float32
-> output [batch_size, seq_len, num_v_heads, head_size]
-> new_state [batch_size, num_v_heads, head_size, head_size] float32
"""
SHARING = "q, k, v, a, b and output"
UNIT, MAX_SIZE = 8, 512  # of a head: what its size is a multiple of, and the largest
MAX_HELD = 40  # elements of a row that a lane can hold beside those of q and k
STATE_BYTES = 4  # of an element
MAX_VECTORS = 2**32 - 1  # of four elements, which kernels count in 32 bits


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """7 for an element of the state: its decay, two products of two sums, and the update."""
    batch, heads, size = a["batch_size"], a["num_v_heads"], a["head_size"]
    elements = batch * heads * size * size
    tokens = 2 * batch * (2 * a["num_q_heads"] * size + 2 * heads * size + 2 * heads)
    return 7 * elements, 2 * STATE_BYTES * elements + tokens + 8 * heads


def refused_heads(a: Axes) -> Iterator[str]:
    """Numbers of heads that do not divide."""
    q, k, v = (a[f"num_{x}_heads"] for x in "qkv")
    if k != q or v % q:
        yield (
            f"{q} query, {k} key and {v} value heads; as many query as key heads must divide the "
            "value heads"
        )


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    size = a["head_size"]
    if a["seq_len"] != 1:
        yield f"a decoding step has seq_len = 1, not {a['seq_len']}"
    yield from refused_heads(a)
    lanes = math.gcd(size, 64) // 2  # that can share a row in pairs of elements
    if size % UNIT or size > min(MAX_SIZE, MAX_HELD * lanes):
        yield (
            f"head_size = {size} must be a multiple of {UNIT}, at most {MAX_SIZE}, and above "
            f"{MAX_HELD * 4} of 16, above {MAX_HELD * 8} of 32"
        )
    elements = a["batch_size"] * a["num_v_heads"] * size**2
    if elements > 4 * MAX_VECTORS:
        yield f"the states have {elements} elements, of at most 2^34 - 4"


SCHEMA = Schema(
    "gdn_decode",
    "a gdn decode",
    TENSORS,
    _refused,
    _work,
    SHARING,
    axes=("batch_size", "num_q_heads", "num_v_heads", "head_size"),
    follow={"seq_len": "1", "num_k_heads": "num_q_heads"},
)
