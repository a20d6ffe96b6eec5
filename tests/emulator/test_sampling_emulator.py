"""Sampling kernels draw the very token that integers give, at every edge."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.launch import Arguments
from ptxflow.eval.bench.references.sampling_integers import sample
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import Case
from tests.emulation import run
from tests.families.sampling import ALONE, EACH, H200, SAMPLING, K, P, problem, strategy
from tests.given import crossed


def drawn(probs, k, p, s=ALONE, seed=3, offset=8):  # type: ignore[no-untyped-def]
    """What the kernel draws from these rows, and what it should."""
    batch, vocab = probs.shape
    given = {"top_k": (k, np.int32), "top_p": (p, np.float32)}
    filters = {n: np.full(batch, *held) for n, held in given.items() if held[0] is not None}
    tensors = {"probs": probs, **filters}
    small = problem(vocab, batch, tuple(filters))
    tensors["samples"] = np.full(batch, -1, np.int64)
    case = Case(tensors, {}, Arguments(seed=seed, offset=offset))
    inputs = {n: torch.from_numpy(t) for n, t in tensors.items() if n != "samples"}
    return run(small, s, case)["samples"], sample(**inputs, seed=seed, offset=offset).numpy()


def edges(vocab: int) -> np.ndarray:  # type: ignore[type-arg]
    """Rows at the edges: all alike, one certain, tiny tails, ties across lanes and warps, zeros."""
    rng = np.random.default_rng(vocab)
    tails = np.full(vocab, 1e-12)
    tails[vocab // 2] = 1 - tails.sum()
    ties = np.where(np.arange(vocab) % 3 == 0, 4.0, 1.0)
    sparse = np.where(rng.random(vocab) < 0.02, 1.0, 0.0)
    sparse[0] = 1
    rows = np.stack([np.ones(vocab), np.eye(vocab)[-1], tails, ties, sparse, rng.random(vocab)])
    return (rows / rows.sum(-1, keepdims=True)).astype(np.float32)


EDGES: dict[str, list[Any]] = {
    "k": [(k, None) for k in (-1, 0, 333, 2, 1, 999, 1000, 1001)],
    "p": [(None, p) for p in (2.0, -1.0, 1e-9, 0.25, 0.5, 1 - 2**-24, 1.0, 0.0)],
    "both": [(10, 0.5), (334, 1.0), (400, 0.999), (0, 0.0), (1000, 0.9)],
}


@pytest.mark.parametrize("each", ["a row", pytest.param("all rows", marks=pytest.mark.slow)])
@pytest.mark.parametrize("filters", EDGES)
def test_edges(filters: str, each: str) -> None:
    """Each filter on one of the rows, or on all."""
    rows, pairs = edges(1000), EDGES[filters]
    at = [(i, j) for i in range(len(rows)) for j in range(len(pairs))]
    at = [(i, j) for i, j in at if each != "a row" or i == j % len(rows)]
    rows = rows[[i for i, _ in at]]
    k, p = ([pairs[j][n] for _, j in at] for n in (0, 1))
    ours, right = drawn(rows, *(None if None in x else x for x in (k, p)))
    assert ours.tolist() == right.tolist()
    if filters == "p":
        first = np.array(p) <= 0
        assert ours[first].tolist() == rows[first].argmax(-1).tolist()


def odd(vocab: int) -> np.ndarray:  # type: ignore[type-arg]
    """Rows that are no probabilities: NaN, negative, infinite, above 1, sums up to 2, tiny."""
    rows = np.random.default_rng(vocab).random((6, vocab))
    rows *= np.array([1, 1, 1, 1, 1.9, 1e-6])[:, None] / rows.sum(-1, keepdims=True)
    rows[0, ::3], rows[1, ::2], rows[2, 5], rows[3, 7] = np.nan, -1, 1.5, np.inf
    rows[2, 6:] *= 0.5
    return rows.astype(np.float32)


def paired(*choices: Sequence[object]) -> list[ParameterSet]:
    """All combinations, of which those that together have every choice are quick."""
    return [pytest.param(*c, marks=[pytest.mark.slow] * slow) for *c, slow in crossed(*choices)]


@pytest.mark.parametrize(
    ("filters", "residency"), paired([(7, None), (None, 0.6), (300, 0.7)], ["registers", "reread"])
)
def test_rows_that_are_no_probabilities(
    filters: tuple[int | None, float | None], residency: str
) -> None:
    rows = odd(3000)
    ours, right = drawn(rows, *filters, strategy(ctas=1, residency=residency))
    assert ours.tolist() == right.tolist()
    assert (rows[np.arange(len(rows)), ours] > 0).all()


@pytest.mark.parametrize(("filters", "ctas"), paired([K, P, EACH], [2, 1]))
def test_lists_that_are_too_short(filters: tuple[str, ...], ctas: int) -> None:
    """Most of a row lies in the bin of the threshold: the leader reads it again."""
    rng, vocab = np.random.default_rng(1), 2000
    rows = np.stack([np.ones(vocab), 1 + 1e-3 * rng.random(vocab), 1 + 1e-6 * rng.random(vocab)])
    rows = (rows / rows.sum(-1, keepdims=True)).astype(np.float32)
    k = [700, 1500, 900] if "top_k" in filters else None
    p = [0.3, 0.6, 0.9] if "top_p" in filters else None
    ours, right = drawn(rows, k, p, strategy(ctas=ctas, vector=2))
    assert ours.tolist() == right.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 3, 31, 33, 257, 513])
def test_any_vocabulary(vocab: int) -> None:
    rows = np.random.default_rng(vocab).random((3, vocab)).astype(np.float32)
    rows /= rows.sum(-1, keepdims=True)
    ours, right = drawn(rows, [1, 2, vocab], None, strategy(ctas=1, vector=1))
    assert ours.tolist() == right.tolist()


def test_a_row_of_zeros_gives_token_zero() -> None:
    ours, right = drawn(np.zeros((2, 64), np.float32), [3, 0], None)
    assert ours.tolist() == right.tolist() == [0, 0]


def test_seed_offset_and_row_choose_the_token() -> None:
    rows = np.repeat(edges(100)[5:], 3, 0)
    states = [(3, 8), (4, 8), (3, 12), (3 + (1 << 40), 8), (3, 8 + (1 << 40))]
    seen = [tuple(drawn(rows, 0, None, seed=s, offset=o)[0]) for s, o in states]
    assert len(set(seen)) == len(states) and all(len(set(tokens)) > 1 for tokens in seen)


def test_a_missing_barrier_is_seen_by_the_emulator() -> None:
    """Its race detector knows that atomics commute, and that reads do not."""
    small = SAMPLING.trial(problem(), strategy(ctas=1), H200)
    lines = write(SAMPLING.build(small.problem, strategy(ctas=1), H200), H200).splitlines()
    barriers = [i for i, line in enumerate(lines) if "bar.sync 0" in line]
    del lines[barriers[1]]  # between the counts and those who add them up
    case = case_of(small.problem)
    tensors = {n: t.copy() for n, t in case.tensors.items()}
    launch = SAMPLING.launch(small.problem, strategy(ctas=1), H200)
    report = emulate("\n".join(lines), launch, tensors, dict(small.problem.axes),
                     arguments=case.arguments)  # fmt: skip
    assert any("race" in str(h) and "red.shared" in str(h) for h in report.hazards)
