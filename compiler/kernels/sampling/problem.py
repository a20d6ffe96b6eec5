"""A sampling problem from a definition: rows of probabilities, filtered by top-k, top-p or both."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ptxflow.compiler.kernels.tensors import Axes, Constants, Schema

TENSORS = """
probs [batch_size, vocab_size] float32
top_k? [batch_size] int32
top_p? [batch_size] float32
-> samples [batch_size] int64
"""
FILTERS = ("top_k", "top_p")  # in the order in which they are applied
ELEMENT, SAMPLE = 4, 8  # bytes
OPERATIONS = 4  # on an element, at the least: two filters' comparisons and sums
MAX_ELEMENTS = 2**32 - 1  # which kernels count in 32 bits


def _refused(a: Axes, inputs: Collection[str]) -> Iterator[str]:
    if not any(name in inputs for name in FILTERS):
        yield "sampling takes probs with top_k, top_p or both"
    batch, vocab = a["batch_size"], a["vocab_size"]
    if batch * vocab > MAX_ELEMENTS:
        yield f"{batch} x {vocab} elements; at most {MAX_ELEMENTS} are counted"


def _work(a: Axes, inputs: Collection[str]) -> tuple[float, float]:
    batch, vocab = a["batch_size"], a["vocab_size"]
    filters = sum(name in inputs for name in FILTERS)
    return OPERATIONS * batch * vocab, batch * (ELEMENT * (vocab + filters) + SAMPLE)


def _filters(definition: Mapping[str, Any]) -> Constants:
    """Which of them there are."""
    return tuple((name, float(name in definition["inputs"])) for name in FILTERS)


SCHEMA = Schema(
    "sampling", "sampling", TENSORS, _refused, _work, dtype="float32", constants=_filters
)
