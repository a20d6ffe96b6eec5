"""A sampling problem from a definition: rows of probabilities, filtered by top-k, top-p or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptxflow.compiler.family import Problem, bind_axis

ROWS = ["batch_size", "vocab_size"]
FILTERS = {"top_k": "int32", "top_p": "float32"}
ELEMENT, SAMPLE = 4, 8  # bytes
OPERATIONS = 4  # on an element, at the least: two filters' comparisons and sums
MAX_ELEMENTS = 2**32 - 1  # which kernels count in 32 bits


def problem(definition: Mapping[str, Any], axes: Mapping[str, int]) -> Problem:
    """The problem of a definition (FlashInfer-Bench schema) with its variable axes bound.

    samples [batch] int64 are drawn from probs [batch, vocab] float32 after the filters that are
    among the inputs: top_k [batch] int32, then top_p [batch] float32. Raises ValueError, one line
    each, for other tensors, dtypes, and sizes that no kernel takes.
    """
    name = str(definition.get("name", "sampling"))
    given = {tensor: _spec(spec) for tensor, spec in (definition.get("inputs") or {}).items()}
    filters = [tensor for tensor in FILTERS if tensor in given]
    inputs: dict[str, tuple[list[str], str]] = {"probs": (ROWS, "float32")}
    inputs |= {tensor: (ROWS[:1], FILTERS[tensor]) for tensor in filters}
    outputs = {"samples": (ROWS[:1], "int64")}
    made = {tensor: _spec(spec) for tensor, spec in (definition.get("outputs") or {}).items()}
    if not filters or given != inputs or made != outputs:
        raise ValueError(
            f"{name}: sampling takes probs [batch_size, vocab_size] float32 with top_k int32, "
            f"top_p float32 or both [batch_size], and gives samples [batch_size] int64, not "
            f"{given} and {made}"
        )
    batch, vocab = (bind_axis(name, axis, definition["axes"], axes) for axis in ROWS)
    if batch * vocab > MAX_ELEMENTS:
        raise ValueError(f"{name}: {batch} x {vocab} elements; at most {MAX_ELEMENTS} are counted")
    return Problem(
        family="sampling",
        definition=name,
        axes=(("batch_size", batch), ("vocab_size", vocab)),
        dtype="float32",
        flops=float(OPERATIONS * batch * vocab),
        bytes=float(batch * (ELEMENT * (vocab + len(filters)) + SAMPLE)),
        constants=tuple((tensor, float(tensor in given)) for tensor in FILTERS),
    )


def _spec(spec: Mapping[str, Any]) -> tuple[list[str], str]:
    return list(spec["shape"] or []), str(spec["dtype"])
