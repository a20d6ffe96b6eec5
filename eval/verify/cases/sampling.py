"""Rows of probabilities of several kinds, drawn from with one state of the generator.

Of three rows in turn two take a kernel's rare paths: nearly equal elements at the threshold all
over the row, and so many of them that lists overflow; the first of all has filters that keep all.
Others are softmaxes of normal logits, peaked ones as language models give, ones with many equal
values or zeros, and uniform ones. The sample must be the one that integers give.
"""

from __future__ import annotations

import numpy as np
import torch

from ptxflow.compiler.atoms.reductions import LEAST
from ptxflow.compiler.family import Problem
from ptxflow.compiler.launch import GENERATOR, Arguments
from ptxflow.eval.bench.references.sampling_integers import sample
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, poisoned

#: the random numbers of rare rows are above 0.93: what is kept last, or should not be, shows
SEED, OFFSET = 0x0123456789ABCDEF, (5 << 32) + 1577516
Row = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
RARE = 3  # rows in turn: a softmax, one that is crowded, one that is not
NEAR = 1 << 16  # keys of the narrowest bin of a first digit
ALIGNED = 1 << 18  # and of the widest
OTHERS = 20  # elements of 0.001: above a crowded bin, below one that is not
LEVELS = 4  # that elements of the bin have: k ends at the third, p of what it leaves at the second
SPREAD = 512  # elements there that fit all lists, spread over the row


def rows(batch: int, vocab: int, rng: np.random.Generator) -> Row:
    """probs [batch, vocab] float32, a kind after the other."""
    kinds = (
        lambda: rng.normal(size=vocab),
        lambda: 4 * rng.normal(size=vocab),
        lambda: np.round(rng.normal(size=vocab)),
        lambda: np.where(rng.random(vocab) < 0.5, rng.normal(size=vocab), -np.inf),
        lambda: np.zeros(vocab),
    )
    return np.stack(
        [
            near(vocab, rng, i % RARE == 1)
            if i % RARE
            else _softmax(kinds[i // RARE % len(kinds)]())
            for i in range(batch)
        ]
    )


def near(vocab: int, rng: np.random.Generator, crowded: bool) -> Row:
    """Some elements of one bin of the first digit, at a distance; `crowded`: and all of an eighth
    of the row, more than lists take. A few lie outside of the bin, all others weigh nothing."""
    there = np.zeros(vocab, bool)
    there[:: max(3, vocab // SPREAD | 1)] = True
    there[: vocab // 8 if crowded else 0] = True
    level = int(np.float32(0.9 / there.sum()).view(np.uint32)) - LEAST
    keys = level // ALIGNED * ALIGNED + LEAST + rng.integers(0, NEAR, LEVELS)
    place = np.arange(vocab)
    # so that each element of a lane has all levels, whatever is between lanes
    turns = (place + place // 4 + place // 16 + place // 64) % LEVELS
    which = np.where(rng.random(vocab) < 0.5, turns, rng.integers(0, LEVELS, vocab))
    row = np.where(there, keys[which].astype(np.uint32).view(np.float32), 0)
    row[rng.permutation(vocab)[:OTHERS]] = 0.001
    return row.astype(np.float32)


def _softmax(logits: Values) -> Row:
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum()).astype(np.float32)


def _rare(tensors: Tensors, batch: int) -> None:
    """k and p of the rare rows, among the elements of one bin, in some rows the first of its level;
    and of the first, past all."""
    for i in [0, *(i for i in range(batch) if i % RARE)]:
        row = tensors["probs"][i]
        kept = int(0.6 * (row > 0).sum())
        if i % RARE == 2:
            kept = 1 + int((row > np.sort(row)[-kept]).sum())
        if "top_k" in tensors:
            tensors["top_k"][i] = kept if i else 0
        if "top_p" in tensors:
            tensors["top_p"][i] = 0.55 if i else 1


def case(problem: Problem, given: bool = True) -> Case:
    """probs, the filters' inputs, and samples; `given`: a part of the generator's state is on the
    device, and the rest by value."""
    batch, vocab = problem["batch_size"], problem["vocab_size"]
    rng = np.random.default_rng([batch, vocab])
    tensors: Tensors = {"probs": rows(batch, vocab, rng)}
    if problem.constant("top_k"):
        usual = rng.integers(1, min(vocab, 100) + 1, batch)
        ends = rng.choice([0, -3, 1, vocab - 1, vocab, vocab + 1], batch)
        tensors["top_k"] = np.where(np.arange(batch) % 3 == 2, ends, usual).astype(np.int32)
    if problem.constant("top_p"):
        share = rng.uniform(0.05, 0.98, batch)
        limits = rng.choice([-0.5, 0.0, 1.0, 1.5, 1e-6, 1 - 2**-20], batch)
        tensors["top_p"] = np.where(np.arange(batch) % 4 == 3, limits, share).astype(np.float32)
    _rare(tensors, batch)
    inputs = {name: torch.from_numpy(t) for name, t in tensors.items()}
    samples = sample(**inputs, seed=SEED, offset=OFFSET).numpy()
    tensors["samples"] = poisoned((batch,), "int64")
    words = np.array([SEED, OFFSET], np.uint64).view(np.uint32)
    if given:
        state = rng.integers(0, 1 << 32, 4, np.uint32)
        tensors[GENERATOR] = state
        words = words - state  # each modulo 2^32
    seed, offset = words.view(np.uint64).tolist()
    arguments = Arguments(seed=seed, offset=offset)
    return Case(tensors, {"samples": (samples, samples)}, arguments)
