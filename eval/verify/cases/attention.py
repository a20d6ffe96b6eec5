"""What the attention cases share: sequences, page tables, caches, and right values in float64.

Queries are of five kinds by turns: usual ones, ones that make a few keys dominate, zeros, which
weigh all keys alike, ones whose exponentials overflow unless the maximum is taken off, and ones
whose scores are all far below 0, so that exponentials vanish unless it is; of these the last key
of a sequence has the greatest, so far above that others' maximum would not do. What a page table
does not reach is NaN; slots past a sequence's end hold large numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.attention import UNLIKE
from ptxflow.compiler.launch import Arguments
from ptxflow.env.tasks.sequences import indptr
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, ends, plain, poisoned, stored

Ints = NDArray[np.int64]
Sees = Callable[[int, Ints, int, int], Values]  # of a query, keys, and how many of both: which
SIZES = (1.0, 4.0, 0.0, 16.0, 1.0)  # of a query, by row and head
AGAINST = (0.0, 0.0, 0.0, 0.0, -32.0)  # of what all keys have in common, in a query
LAST = 0.5  # of what all keys have in common, in the last key of a sequence
FEW = 5  # keys of the shortest of several sequences that ask once each
STALE = 2.0**12  # of what lies past the end of a sequence: finite, so that a weight of 0 drops it
#: of probabilities in 16 bits: half an ulp relative to each, and below the least normal number
PROBABILITY_ERROR = {"bfloat16": (2.0**-8, 0.0), "float16": (2.0**-11, 2.0**-25)}
SUM_ERROR, POWER_ERROR = 2.0**-24, 2.0**-18  # of an addition; of an exponential and its rescaling
LOG2E = math.log2(math.e)


class Entries(Protocol):
    """Where a page table of rows of `width` has the pages of a sequence."""

    @property
    def width(self) -> int: ...

    def entry(self, page: Ints, pages: int) -> Ints: ...


@dataclass(frozen=True)
class Sequences:
    """Queries and keys of each sequence, and how many pages the keys are in."""

    queries: Ints
    keys: Ints
    pages: Ints

    @property
    def tokens(self) -> int:
        return int(self.keys.sum())


def sequence_count(problem: Problem) -> int:
    """How many sequences there are; a prefill over pages of one token says it by len_indptr."""
    axes = dict(problem.axes)
    return axes["batch_size"] if "batch_size" in axes else axes["len_indptr"] - 1


def choose(
    problem: Problem, lengths: Sequence[int] | None, queries: Sequence[int] | None, seed: int
) -> Sequences:
    """Sequences that have the problem's axes: those given, or uneven ones, of which one has more
    queries than keys, or two of latents. ValueError where the given ones do not have the axes.
    """
    axes, count = dict(problem.axes), sequence_count(problem)
    page = axes.get("page_size", 1)
    total = axes["total_kv"] if "total_kv" in axes else axes["num_kv_indices"]
    asked = axes.get("total_q")
    rng = np.random.default_rng([seed, count, total])
    if lengths is None:
        idle = int(seed % 2 and page > 1 and count > 2 and total > 1)  # a page without a token
        # where a sequence has one token, its heads do not differ
        few = page == 1 and asked is None and count > total
        pages = _uneven(count, total - idle, rng, max(1, total // 3) if few else total)
        keys = _fill(pages, page, asked, rng)
        if "head_dim_ckv" in axes and count == 2 and total * page > 2 * UNLIKE:
            # before packed queries the shorter one first, so that where it begins is no other's
            keys = _two(total, page)[:: 1 if asked is None else -1]
            pages = -(-keys // page)
        elif asked is not None:
            _shorten(keys, pages, page, max(1, (asked - 2) // 3))
        elif count > 2:
            _shorten(keys, pages, page, FEW)
        pages[1:2] += idle
    else:
        keys = np.array(lengths, np.int64)
        pages = -(-keys // page)
    if (len(keys), int(pages.sum())) != (count, total):
        raise ValueError(
            f"lengths {keys.tolist()} fill {pages.sum()} pages of {page} in {len(keys)} sequences; "
            f"the axes say {total} in {count}"
        )
    rows = np.ones(count, np.int64)
    if asked is not None:
        rows = _ask(keys, asked, rng) if queries is None else np.array(queries, np.int64)
        if (len(rows), int(rows.sum())) != (count, asked):
            raise ValueError(f"queries {rows.tolist()} are not total_q={asked} in {count} rows")
    return Sequences(rows, keys, pages)


def _uneven(count: int, total: int, rng: np.random.Generator, live: int) -> Ints:
    """Pages of each sequence, of which `live` have some at the most: of two the first has more, so
    that chunks lie before the second; of three or more the second has none; the last of many has
    one."""
    weight = rng.uniform(0.2, 1.8, count)
    if count == 2:
        weight[::-1].sort()
    if count > 2:
        weight[1] = 0
    if count > live:
        weight[-1] = weight.max()
    weight[np.argsort(weight)[: max(0, count - live)]] = 0
    pages = (weight > 0).astype(np.int64)
    return pages + rng.multinomial(total - pages.sum(), weight / weight.sum())


def _two(total: int, page: int) -> Ints:
    """Keys of two sequences: as many full pages, and one token, or UNLIKE of them."""
    full, last = total - 1 + UNLIKE // -page, np.array([UNLIKE, 1])
    return page * np.array([full - full // 2, full // 2]) + last


def _fill(pages: Ints, page: int, asked: int | None, rng: np.random.Generator) -> Ints:
    """Tokens in the pages: last pages are full in part, unless there are too many queries; that of
    a sequence alone has one token."""
    last = rng.integers(1, max(2, page), len(pages)) if len(pages) > 1 else np.ones(1, np.int64)
    keys = np.where(pages > 0, page * (pages - 1) + last, 0)
    for b in range(len(keys)):
        lacking = max(0, (asked or 0) - int(keys.sum()))
        keys[b] += min(lacking, page * int(pages[b]) - int(keys[b]))
    return keys


def _shorten(keys: Ints, pages: Ints, page: int, most: int) -> None:
    """Leave the shortest of several sequences so many keys at most: so that queries can be more, or
    that it is one chunk beside those of several; its other pages are the longest's."""
    live = np.flatnonzero(keys)
    short, long = live[np.argmin(keys[live])], live[np.argmax(keys[live])]
    if short == long or keys[short] <= most:
        return
    spared = int(pages[short]) + -most // page
    keys[short], keys[long] = most, keys[long] + spared * page
    pages[short] -= spared
    pages[long] += spared


def _ask(keys: Ints, total: int, rng: np.random.Generator) -> Ints:
    """Queries of each sequence: at most its keys; some where there are none, more if keys are few;
    and one more than there are keys in the shortest. Where they can be 1, 2, 3 and so on, or 2 or 4
    times that, they are, the most where keys are or are not unlike in the others. Of two with many
    keys the first has a third."""
    steps = len(keys) * (len(keys) + 1) // 2
    if len(keys) > 3 and total in (steps, 2 * steps, 4 * steps):
        rows = rng.permutation(total // steps * np.arange(1, len(keys) + 1))
        unlike = int(np.argmax((keys == 0) == (2 * np.count_nonzero(keys) > len(keys))))
        most = int(np.argmax(rows))
        rows[[unlike, most]] = rows[[most, unlike]]
        return rows
    if len(keys) == 2 and keys.min() > max(total, UNLIKE):
        return np.array([first := (total + 1) // 3, total - first])
    tokens = int(keys.sum())
    idle = max(2, total // len(keys)) if total > tokens // 2 else 2
    rows = rng.multivariate_hypergeometric(keys, min(total, tokens), method="marginals")
    rows[-1] += total - rows.sum()
    wanted = np.where(keys == 0, idle, rows)
    if len(keys) > 1:
        live = np.flatnonzero(keys)
        shortest = live[np.argmin(keys[live])]
        wanted[shortest] = keys[shortest] + 1
    for b in np.flatnonzero(wanted > rows):
        giver = int(np.argmax(np.where(np.arange(len(rows)) == b, -1, rows)))
        moved = min(int(wanted[b] - rows[b]), int(rows[giver]) - 1)
        if moved > 0:
            rows[b] += moved
            rows[giver] -= moved
    return rows


def page_table(problem: Problem, given: Sequences, rng: np.random.Generator) -> Tensors:
    """kv_indptr, kv_indices with pages in no order, and kv_last_page_len where pages have room.

    Page 0 is nobody's if one can be spared: kernels look there where a sequence has no page."""
    page, owned = problem["page_size"], int(given.pages.sum())
    if owned > problem["num_pages"]:
        raise ValueError(f"sequences own {owned} pages and the cache has {problem['num_pages']}")
    indices = rng.permutation(problem["num_pages"])
    indices = indices[indices > 0][:owned] if owned < len(indices) else indices
    tensors: Tensors = {
        "kv_indptr": indptr(given.pages).astype(np.int32),
        "kv_indices": indices.astype(np.int32),
    }
    if page > 1:
        last = given.keys - page * np.maximum(given.pages - 1, 0)
        tensors["kv_last_page_len"] = last.astype(np.int32)
    return tensors


def cached(problem: Problem, given: Sequences, table: Tensors, tokens: Values) -> Values:
    """Tokens [tokens, ...] in a cache [num_pages, page_size, ...], as the table says."""
    cache = np.full((problem["num_pages"], problem["page_size"], *tokens.shape[1:]), np.nan)
    cache[table["kv_indices"]] = STALE
    cache.reshape(-1, *tokens.shape[1:])[slots(problem, given, table)] = tokens
    return stored(cache, problem.dtype)


def slots(problem: Problem, given: Sequences, table: Tensors) -> Ints:
    """Where each token lies among the slots of all pages."""
    page, out = problem["page_size"], []
    for first, count in zip(table["kv_indptr"].tolist(), given.keys.tolist(), strict=False):
        token = np.arange(count)
        out.append(
            table["kv_indices"][first + token // page].astype(np.int64) * page + token % page
        )
    return np.concatenate(out)


def in_rows(table: Tensors, entries: Entries) -> tuple[Tensors, Tensors]:
    """The table as rows of `width` entries, one a sequence, pages where the map says; and as it
    was, with the pages that are found so: a later one takes an entry from an earlier one."""
    begins, found = table["kv_indptr"].tolist(), table["kv_indices"].copy()
    rows = np.zeros((len(begins) - 1, entries.width), np.int32)
    for row, (first, end) in zip(rows, pairwise(begins), strict=True):
        places = entries.entry(np.arange(end - first), end - first)
        row[places] = found[first:end]
        found[first:end] = row[places]
    return {**table, "kv_indices": rows.ravel()}, {**table, "kv_indices": found}


def last_there(where: Ints) -> Ints:
    """Of each token the last one that lies in its slot."""
    found = np.empty(where.max(initial=-1) + 1, np.int64)
    found[where] = np.arange(len(where))
    return found[where]


def normal(problem: Problem, rng: np.random.Generator, *shape: int) -> Values:
    """Standard normal values that the problem's dtype has, in float64."""
    return plain(stored(rng.normal(size=shape), problem.dtype)).astype(np.float64)


def keys(problem: Problem, given: Sequences, rng: np.random.Generator, *shape: int) -> Values:
    """[tokens, ..., dim] in float64: normal ones, and what all have in common."""
    share = np.ones((given.tokens, *[1] * len(shape)))
    share[indptr(given.keys)[1:][given.keys > 0] - 1] = LAST
    out = rng.normal(size=(given.tokens, *shape)) + share * common(shape[-1])
    return plain(stored(out, problem.dtype)).astype(np.float64)


def common(dim: int) -> Values:
    """What all keys have in common [dim]: 1 and -1 by turns."""
    return 1.0 - 2.0 * (np.arange(dim) % 2)


def queries(problem: Problem, rng: np.random.Generator, *shape: int, by: float = 1.0) -> Values:
    """[rows, heads, dim] in float64, of kinds by turns; in a row of four maxima rise at the last
    key in one half of 16 heads, and never in the other, so in one half of a warp's rows alone."""
    row, head = np.arange(shape[0])[:, None] % 8, np.arange(shape[1]) % 16
    turn = np.add.outer(np.arange(shape[0]), np.arange(shape[1])) % len(SIZES)
    rising = np.where((row < 4) == (head < 8), AGAINST.index(min(AGAINST)), SIZES.index(0))
    turn = np.where(row % 4 == 3, rising, turn)
    size, against = (by * np.array(kind)[turn][..., None] for kind in (SIZES, AGAINST))
    out = rng.normal(size=shape) * size + against * common(shape[-1])
    return plain(stored(out, problem.dtype)).astype(np.float64)


def complete(
    problem: Problem,
    tensors: Tensors,
    given: Sequences,
    q: Values,
    keys: Values,
    values: Values,
    scale: float,
    sees: Sees | None = None,
) -> Case:
    """The case of these inputs, with poisoned outputs: bounds of output [rows, heads, dv] and lse
    [rows, heads], causal from the end; with `sees` not all keys before a query are seen.

    q [rows, heads, d], keys [tokens, kv_heads, d], values [tokens, kv_heads, dv], in float64. Where
    a query sees no key the output is 0 and lse -inf.
    """
    share = q.shape[1] // keys.shape[1]
    output = np.zeros((*q.shape[:2], values.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    output_error, lse_error = np.zeros_like(output), np.zeros(lse.shape)
    rows, tokens = indptr(given.queries), indptr(given.keys)
    for b, count in enumerate(given.queries):
        for i in range(count):
            seen = int(given.keys[b] + i + 1 - count)
            own: Any = slice(tokens[b], tokens[b] + seen)
            if sees and seen > 0:
                before = np.arange(seen)
                own = tokens[b] + before[sees(seen - 1, before, int(count), int(given.keys[b]))]
                seen = len(own)
            for h in range(keys.shape[1] if seen > 0 else 0):
                at = rows[b] + i, slice(h * share, (h + 1) * share)
                found = _heads(q[at], keys[own, h], values[own, h], scale, problem.dtype)
                output[at], lse[at], output_error[at], lse_error[at] = found
    tensors["output"] = poisoned(output.shape, problem.dtype)
    tensors["lse"] = poisoned(lse.shape, "float32")
    bounds = {"output": ends(output, output_error, problem.dtype),
              "lse": (lse - lse_error, lse + lse_error)}  # fmt: skip
    return Case(tensors, bounds, Arguments({"sm_scale": scale}))


def _heads(q: Values, k: Values, v: Values, scale: float, dtype: str) -> Any:
    """Outputs [heads, dv] and base-2 lse [heads] of a query, of heads that share a key's, and how
    far each may be off.

    Scores are sums of float32, their powers of two an exponential's error off; the weights that
    meet the values are rounded once more, unless they are all 1, which every type has.
    """
    bits = scale * LOG2E * (q @ k.T)
    row_max = bits.max(1, keepdims=True)
    probs = np.exp2(bits - row_max)
    row_sum = probs.sum(1, keepdims=True)
    dot = q.shape[1] * SUM_ERROR * abs(scale) * LOG2E * (np.abs(q) @ np.abs(k).T)
    off = POWER_ERROR + (dot + 4 * SUM_ERROR * (np.abs(bits) + abs(row_max))) / LOG2E
    off = off + (len(k) + q.shape[1]) * SUM_ERROR
    of_sum = (probs * off).sum(1, keepdims=True) / row_sum
    relative, absolute = (x * q.any(1, keepdims=True) for x in PROBABILITY_ERROR[dtype])
    error = (probs * (off + relative) + absolute) @ np.abs(v) / row_sum
    output, lse = probs @ v / row_sum, row_max + np.log2(row_sum)
    lse_error = of_sum * LOG2E + 8 * SUM_ERROR * (1 + abs(lse) + abs(row_max))
    return output, lse[:, 0], error + np.abs(output) * of_sum, lse_error[:, 0]
