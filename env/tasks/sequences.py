"""How long sequences are and which pages they own, where axes give only their number and sum.

The remainder of the sum by the number says how lengths are spread: 0 is even, other remainders are
by turns exponential, one long among many short, and uniform. Lengths do not depend on the seed: a
library plans once for a workload, and every seed is the same load. Page ids do.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ptxflow.env.tasks.definition import Definition

Ints = NDArray[np.int64]
EVEN = "even"
UNEVEN = ("exponential", "long", "uniform")
RARE = 16  # where a case is rare, every 16th sequence or row has it


@dataclass(frozen=True)
class Sequences:
    """Of each sequence the keys, how many pages they are in, and the queries."""

    keys: Ints
    pages: Ints
    queries: Ints


def axes_of(definition: Definition, sizes: Mapping[str, int]) -> dict[str, int]:
    """The variable axes of a definition at sizes that say more: `sequences` as long as each other,
    of so many `queries` each behind a `prefix`, or of a `length`. Other sizes are axes themselves.
    """
    sizes = dict(sizes)
    count = sizes.pop("sequences", None)
    if count is None:
        return sizes
    queries = sizes.pop("queries", 0)
    length = sizes.pop("length", 0) or queries + sizes.pop("prefix", 0)
    pages = count * -(-length // definition.const_axes.get("page_size", 1))
    known = {
        "batch_size": count, "num_seqs": count, "len_indptr": count + 1,
        "len_cu_seqlens": count + 1, "total_q": count * queries, "total_kv": count * length,
        "total_seq_len": count * length, "num_kv_indices": pages,
        "num_pages": pages + pages // 4 + 16, "max_num_pages": pages // count,
    }  # fmt: skip
    return {**sizes, **{name: v for name, v in known.items() if name in definition.var_axes}}


def pattern(total: int, parts: int) -> str:
    """What the remainder says of `parts` lengths that sum to `total`."""
    rest = total % parts
    return UNEVEN[(rest - 1) % len(UNEVEN)] if rest else EVEN


def split(total: int, parts: int, of: str) -> Ints:
    """`parts` lengths that sum to `total`, by their pattern; `of` names them, for the order."""
    kind = pattern(total, parts)
    if kind == EVEN:
        return np.full(parts, total // parts, np.int64)
    rng = _rng(of, total, parts)
    match kind:
        case "exponential":
            weight = -np.log1p(-(np.arange(parts) + 0.5) / parts)
        case "long":
            weight = np.ones(parts)
            weight[0] = parts - 1
        case _:
            weight = rng.uniform(0.5, 1.5, parts)
    if kind != "long":
        weight[: parts // RARE] = 0
    return apportion(total, rng.permutation(weight))


def apportion(total: int, weight: NDArray[np.float64]) -> Ints:
    """Sizes that sum to `total`, near the weights, at least 1 where those are not 0.

    Where there is not that much, the lightest get none.
    """
    weight = weight.copy()
    weight[np.argsort(weight, kind="stable")[: max(0, len(weight) - total)]] = 0
    live = np.flatnonzero(weight)
    sizes = np.zeros(len(weight), np.int64)
    if not len(live):
        return sizes
    sizes[live] = 1
    share = weight / weight.sum() * (total - len(live))
    sizes += np.maximum(share - 1e-6, 0).astype(np.int64)
    rest = total - int(sizes.sum())  # lost to rounding down: at most one a live sequence
    sizes[live[:rest]] += 1
    return sizes


def indptr(sizes: Ints) -> Ints:
    """Where each of some sizes begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(sizes)])


def decoding(axes: Mapping[str, int]) -> Sequences:
    """A query each. Even pages are full; where sequences own different numbers of them, last pages
    are full in part."""
    parts, page = axes["len_indptr"] - 1, axes["page_size"]
    total = axes["num_kv_indices"]
    pages = split(total, parts, "pages")
    last = np.full(parts, page)
    if pattern(total, parts) != EVEN:
        last = _rng("last", total, parts).integers(1, page + 1, parts)
    keys = np.where(pages > 0, page * (pages - 1) + last, 0)
    return Sequences(keys, pages, np.ones(parts, np.int64))


def paged_prefill(axes: Mapping[str, int]) -> Sequences:
    """Queries, and pages of tokens that were there before them: both spread by their own pattern.

    A sequence owns the pages that its queries fill and a whole number of earlier ones. Where there
    are too few pages for that, they are split, and the queries are the last of what they hold; of
    more queries than that both are split, and those of sequences that hold fewer see nothing at
    first.
    """
    parts, page = axes["len_indptr"] - 1, axes["page_size"]
    total, held = axes["total_q"], axes["num_kv_indices"]
    queries = split(total, parts, "queries")
    own = -(-queries // page)
    if int(own.sum()) <= held:
        before = split(held - int(own.sum()), parts, "before")
        return Sequences(before * page + queries, before + own, queries)
    if total > held * page:
        found = decoding(axes)
        return Sequences(found.keys, found.pages, queries)
    pages = split(held, parts, "pages")
    rng = _rng("within", total, parts)
    queries = rng.multivariate_hypergeometric(pages * page, total, method="marginals")
    last = np.maximum(queries - page * (pages - 1), 1)
    return Sequences(np.where(pages > 0, page * (pages - 1) + last, 0), pages, queries)


def ragged_prefill(axes: Mapping[str, int]) -> Sequences:
    """Queries, and keys before them, spread by their own pattern; of more queries than keys both
    are, and those of sequences that have fewer keys see nothing at first.

    No pages: they count as many as keys.
    """
    before, parts = axes["total_kv"] - axes["total_q"], axes["len_indptr"] - 1
    queries = split(axes["total_q"], parts, "queries")
    if before < 0:
        keys = split(axes["total_kv"], parts, "keys")
    else:
        keys = queries + split(before, parts, "before")
    return Sequences(keys, keys, queries)


def _rng(of: str, total: int, parts: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(of.encode()), total, parts])
