"""A decoding step of the gated delta rule, from a definition: one token, one state per value head.

A state is [value, key] in float32, both of `head_size`; value head n reads query and key head
n // (num_v_heads / num_q_heads).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.tensors import Tensors

_TOKEN = ("batch_size", "seq_len")
Table = dict[str, list[str] | None]


def tables(states: str, *token: str, **more: list[str] | None) -> tuple[Table, Table]:
    """Inputs and outputs: `states` and `token` are the axes that count these, `more` further
    inputs."""
    state = [states, "num_v_heads", "head_size", "head_size"]
    values, gate = [*token, "num_v_heads", "head_size"], [*token, "num_v_heads"]
    inputs: Table = {x: [*token, f"num_{x}_heads", "head_size"] for x in "qkv"}
    inputs |= {"state": state, "A_log": ["num_v_heads"], "a": gate}
    inputs |= {"dt_bias": ["num_v_heads"], "b": gate, **more, "scale": None}
    return inputs, {"output": values, "new_state": state}


OTHERS = dict.fromkeys(("state", "A_log", "dt_bias", "scale", "new_state"), "float32")
INPUTS, OUTPUTS = tables("batch_size", *_TOKEN)
TENSORS = Tensors("a gdn decode", INPUTS, OUTPUTS, "q, k, v, a, b and output", OTHERS)
UNIT, MAX_SIZE = 8, 512  # of a head: what its size is a multiple of, and the largest
MAX_HELD = 40  # elements of a row that a lane can hold beside those of q and k
STATE_BYTES = 4  # of an element
MAX_VECTORS = 2**32 - 1  # of four elements, which kernels count in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    Raises ValueError, one line each, for prefill, other tensors and dtypes, head counts that do not
    divide, and sizes that no kernel takes. FLOPs are 7 for an element of the state: its decay, two
    products of two sums, and the update.
    """
    name = str(definition.get("name", "gdn_decode"))
    if "cu_seqlens" in (definition.get("inputs") or {}):
        raise ValueError(f"{name}: kernels exist for decoding, one token each, not for prefill")
    dtype, bound = TENSORS.dtype(name, definition), TENSORS.axes(name, definition, axes)
    batch, heads, size = (bound[axis] for axis in ("batch_size", "num_v_heads", "head_size"))
    _refuse(name, bound)
    elements = batch * heads * size * size
    tokens = 2 * batch * (2 * bound["num_q_heads"] * size + 2 * heads * size + 2 * heads)
    kept = ("batch_size", "num_q_heads", "num_v_heads", "head_size")
    return Problem(
        family="gdn_decode",
        definition=name,
        axes=tuple((axis, bound[axis]) for axis in kept),
        dtype=dtype,
        flops=float(7 * elements),
        bytes=float(2 * STATE_BYTES * elements + tokens + 8 * heads),
    )


def refuse_heads(name: str, bound: Mapping[str, int]) -> None:
    """Raise ValueError for numbers of heads that do not divide."""
    q, k, v = (bound[f"num_{x}_heads"] for x in "qkv")
    if k != q or v % q:
        raise ValueError(
            f"{name}: {q} query, {k} key and {v} value heads; as many query as key heads must "
            "divide the value heads"
        )


def _refuse(name: str, bound: Mapping[str, int]) -> None:
    """Raise ValueError for axes that the mathematics or the kernels do not take."""
    size = bound["head_size"]
    elements = bound["batch_size"] * bound["num_v_heads"] * size**2
    if bound["seq_len"] != 1:
        raise ValueError(f"{name}: a decoding step has seq_len = 1, not {bound['seq_len']}")
    refuse_heads(name, bound)
    lanes = math.gcd(size, 64) // 2  # that can share a row in pairs of elements
    if size % UNIT or size > min(MAX_SIZE, MAX_HELD * lanes):
        raise ValueError(
            f"{name}: head_size = {size} must be a multiple of {UNIT}, at most {MAX_SIZE}, and "
            f"above {MAX_HELD * 4} of 16, above {MAX_HELD * 8} of 32"
        )
    if elements > 4 * MAX_VECTORS:
        raise ValueError(f"{name}: the states have {elements} elements, of at most 2^34 - 4")
