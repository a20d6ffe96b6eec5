"""Packed prefill of the gated delta rule, from a definition: sequences of tokens, a state for each
of their value heads.

A state is [value, key] in float32, both of `head_size`; value head n reads query and key head
n // (num_v_heads / num_q_heads).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.gdn_decode.problem import refuse_heads, tables
from ptxflow.compiler.kernels.tensors import Tensors

INPUTS, OUTPUTS = tables("num_seqs", "total_seq_len", cu_seqlens=["len_cu_seqlens"])
OTHERS = {
    **dict.fromkeys(("state", "A_log", "dt_bias", "scale", "new_state"), "float32"),
    "cu_seqlens": "int64",
}
TENSORS = Tensors("a gdn prefill", INPUTS, OUTPUTS, "q, k, v, a, b and output", OTHERS)
ELEMENT, STATE_BYTES, BOUND_BYTES = 2, 4, 8  # of an element; of a bound in cu_seqlens
SIZES = (64, 128, 256)  # of a head
PRODUCTS = 3  # with a state for each token: S k, the update's outer product, S q
MAX_ELEMENTS = 2**32 - 1  # of a tensor: kernels count them in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for other tensors and dtypes, head counts that do not divide,
    and sizes that no kernel takes. FLOPs are 6 head_size^2 for a token and value head: the products
    of the recurrence itself, without what chunks add.
    """
    name = str(definition.get("name", "gdn_prefill"))
    dtype, bound = TENSORS.dtype(name, definition), TENSORS.axes(name, definition, axes)
    _refuse(name, bound)
    tokens, sequences = bound["total_seq_len"], bound["num_seqs"]
    heads, size = bound["num_v_heads"], bound["head_size"]
    rows = 2 * bound["num_q_heads"] * size + 2 * heads * size + 2 * heads
    states = 2 * STATE_BYTES * sequences * heads * size * size
    numbers = BOUND_BYTES * (sequences + 1) + 8 * heads
    return Problem(
        family="gdn_prefill",
        definition=name,
        axes=tuple(bound.items()),
        dtype=dtype,
        flops=float(2 * PRODUCTS * size * size * heads * tokens),
        bytes=float(ELEMENT * tokens * rows + states + numbers),
    )


def _refuse(name: str, bound: Mapping[str, int]) -> None:
    """Raise ValueError for axes that the mathematics or the kernels do not take."""
    size = bound["head_size"]
    refuse_heads(name, bound)
    if size not in SIZES:
        raise ValueError(f"{name}: head_size = {size} must be one of {SIZES}")
    if bound["len_cu_seqlens"] != bound["num_seqs"] + 1:
        raise ValueError(f"{name}: len_cu_seqlens must be num_seqs + 1")
    for what, count in (("values", bound["total_seq_len"]), ("states", bound["num_seqs"] * size)):
        elements = count * bound["num_v_heads"] * size
        if elements > MAX_ELEMENTS:
            raise ValueError(f"{name}: {what} have {elements} elements, of at most 2^32 - 1")
