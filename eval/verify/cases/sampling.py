"""Rows of probabilities of several kinds, drawn from with one state of the generator.

Rows are softmaxes of normal logits, peaked ones as language models give, ones with many equal
values, and sparse ones with zeros; k and p are ordinary in some rows and at their ends in others.
The sample must be the one that integers give.
"""

from __future__ import annotations

import numpy as np
import torch

from ptxflow.compiler.family import Problem
from ptxflow.compiler.launch import Arguments
from ptxflow.eval.bench.references.sampling_integers import sample
from ptxflow.eval.verify.cases.case import Case, Tensors, poisoned

SEED, OFFSET = 0x0123456789ABCDEF, (5 << 32) + 8


def rows(
    batch: int, vocab: int, rng: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """probs [batch, vocab] float32, a kind after the other."""
    kinds = (
        lambda: rng.normal(size=vocab),
        lambda: 4 * rng.normal(size=vocab),
        lambda: np.round(rng.normal(size=vocab)),
        lambda: np.where(rng.random(vocab) < 0.5, rng.normal(size=vocab), -np.inf),
        lambda: np.zeros(vocab),
    )
    logits = np.stack([kinds[i % len(kinds)]() for i in range(batch)])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def case(problem: Problem) -> Case:
    """probs, the filters' inputs, and samples."""
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
    given = {name: torch.from_numpy(t) for name, t in tensors.items()}
    samples = sample(**given, seed=SEED, offset=OFFSET).numpy()
    tensors["samples"] = poisoned((batch,), "int64")
    arguments = Arguments(seed=SEED, offset=OFFSET)
    return Case(tensors, {"samples": (samples, samples)}, arguments)
