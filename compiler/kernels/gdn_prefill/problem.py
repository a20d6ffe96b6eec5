"""Packed prefill of the gated delta rule, from a definition: sequences of tokens, a state for each
of their value heads.

A state is [value, key] in float32, both of `head_size`; value head n reads query and key head
n // (num_v_heads / num_q_heads).
"""

from collections.abc import Collection, Iterator

from ptxflow.compiler.kernels.gdn_decode.problem import SHARING, refused_heads
from ptxflow.compiler.kernels.tensors import Axes, Schema

TENSORS = """
q [total_seq_len, num_q_heads, head_size]
k [total_seq_len, num_k_heads, head_size]
v [total_seq_len, num_v_heads, head_size]
state [num_seqs, num_v_heads, head_size, head_size] float32
A_log [num_v_heads] float32
a [total_seq_len, num_v_heads]
dt_bias [num_v_heads] float32
b [total_seq_len, num_v_heads]
cu_seqlens [len_cu_seqlens] int64 ascending to total_seq_len
scale float32
-> output [total_seq_len, num_v_heads, head_size]
-> new_state [num_seqs, num_v_heads, head_size, head_size] float32
"""
ELEMENT, STATE_BYTES, BOUND_BYTES = 2, 4, 8  # of an element; of a bound in cu_seqlens
SIZES = (64, 128, 256)  # of a head
PRODUCTS = 3  # with a state for each token: S k, the update's outer product, S q
MAX_ELEMENTS = 2**32 - 1  # of a tensor: kernels count them in 32 bits


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    """6 head_size^2 for a token and value head: the products of the recurrence itself, without what
    chunks add."""
    tokens, sequences = a["total_seq_len"], a["num_seqs"]
    heads, size = a["num_v_heads"], a["head_size"]
    rows = 2 * a["num_q_heads"] * size + 2 * heads * size + 2 * heads
    states = 2 * STATE_BYTES * sequences * heads * size * size
    moved = ELEMENT * tokens * rows + states + BOUND_BYTES * (sequences + 1) + 8 * heads
    return 2 * PRODUCTS * size * size * heads * tokens, moved


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    size = a["head_size"]
    yield from refused_heads(a)
    if size not in SIZES:
        yield f"head_size = {size} must be one of {SIZES}"
    if a["len_cu_seqlens"] != a["num_seqs"] + 1:
        yield "len_cu_seqlens must be num_seqs + 1"
    for what, count in (("values", a["total_seq_len"]), ("states", a["num_seqs"] * size)):
        elements = count * a["num_v_heads"] * size
        if elements > MAX_ELEMENTS:
            yield f"{what} have {elements} elements, of at most 2^32 - 1"


FOLLOWING = {"len_cu_seqlens": "num_seqs + 1"}
SCHEMA = Schema("gdn_prefill", "a gdn prefill", TENSORS, _refused, _work, SHARING, follow=FOLLOWING)
