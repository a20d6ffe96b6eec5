"""Sampling in integers is sampling: the filters of the definition, and the distribution."""

import numpy as np
import pytest
import torch
from scipy import stats

from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench import session
from ptxflow.eval.bench.checking import check
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.references.sampling import filtered
from ptxflow.eval.bench.references.sampling_integers import integers, kept, philox, sample
from tests.eval.benches import bench_of

VOCAB, DRAWS = 60, 20_000


def softmax(scale: float, batch: int, vocab: int, seed: int = 0) -> torch.Tensor:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(batch, vocab)) * scale)
    return torch.softmax(logits.float(), -1)


def test_philox_gives_the_published_words() -> None:
    """The first of the known answers of Random123: counter and key 0."""
    assert philox(0, 0, 0) == 0xE169C58D_6627E8D5
    assert len({philox(s, o, r) for s in (0, 1 << 40) for o in (0, 1 << 40) for r in (0, 1)}) == 8


def test_weights_are_rounded_to_even_and_exact() -> None:
    unit = 2.0**-31
    x = torch.tensor([1.0, unit, 1.5 * unit, 2.5 * unit, 2.0**-32, 0.1])
    assert integers(x).tolist() == [2**31, 1, 2, 2, 0, int(np.float32(0.1) * 2.0**31)]


def test_what_is_no_probability_counts_as_the_nearest() -> None:
    x = torch.tensor([float("nan"), -1.0, -float("inf"), float("inf"), 1.5, 0.25])
    assert integers(x).tolist() == [0, 0, 0, 2**31, 2**31, 2**29]


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_what_is_kept_differs_at_the_end_of_a_nucleus_only(scale: float) -> None:
    """k keeps the very tokens; p may end a token earlier or later where sums come that near."""
    batch, vocab = 24, 3000
    probs, rng = softmax(scale, batch, vocab), np.random.default_rng(1)
    k = torch.from_numpy(rng.choice([-1, 0, 1, 7, 100, vocab - 1, vocab, vocab + 1], batch))
    p = torch.from_numpy(rng.choice([-1, 0, 0.1, 0.5, 0.9, 0.999, 1, 2], batch)).float()
    assert torch.equal(kept(probs, k), filtered(probs, k) > 0)
    for top_k in (None, k):
        ours, theirs = kept(probs, top_k, p), filtered(probs, top_k, p) > 0
        unlike = (ours & (probs > 0)) != theirs
        assert unlike.sum(-1).max() <= (1 if scale else 3)


def test_ties_are_kept_in_the_order_of_tokens() -> None:
    probs = torch.full((1, 8), 0.125)
    assert kept(probs, torch.tensor([3])).int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]
    some = kept(probs, top_p=torch.tensor([0.25]))
    assert some.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]  # until the sum exceeds p
    assert kept(probs, top_p=torch.tensor([-1.0])).int().tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]


CASES = [(None, None), (5, None), (None, 0.7), (20, 0.6), (0, 1.0), (VOCAB + 1, 0.3), (1, None)]


def counts(probs: torch.Tensor, k: int | None, p: float | None) -> np.ndarray:  # type: ignore[type-arg]
    """How often each token comes at DRAWS different rows of one distribution."""
    rows = probs.expand(DRAWS, -1)
    top_k = None if k is None else torch.full((DRAWS,), k)
    top_p = None if p is None else torch.full((DRAWS,), p)
    return np.bincount(sample(rows, top_k, top_p, seed=7, offset=12).numpy(), minlength=VOCAB)


def chance(seen: np.ndarray, probs: torch.Tensor, k: int | None, p: float | None) -> float:  # type: ignore[type-arg]
    """The p-value of a chi-square test against the exact filtered distribution."""
    top_k = None if k is None else torch.tensor([k])
    top_p = None if p is None else torch.tensor([p])
    expected = filtered(probs[None], top_k, top_p)[0].double().numpy() * DRAWS
    if seen[expected == 0].any():
        return 0.0
    often = expected >= 5
    observed = np.append(seen[often], seen[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize(("k", "p"), CASES)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_frequencies_are_those_of_the_filtered_distribution(
    scale: float, k: int | None, p: float | None
) -> None:
    probs = softmax(scale, 1, VOCAB)[0]
    assert chance(counts(probs, k, p), probs, k, p) > 1e-4


@pytest.mark.parametrize(("k", "p"), [(5, None), (None, 0.7), (20, 0.6)])
def test_a_wrong_filter_has_no_chance(k: int | None, p: float | None) -> None:
    """One token more or fewer, and the unfiltered row, are told from the right distribution."""
    probs = softmax(1.0, 1, VOCAB)[0]
    wrong = [(None if k is None else k + 1, p and p + 0.05), (None, None)]
    assert all(chance(counts(probs, *w), probs, k, p) < 1e-6 for w in wrong)


def test_upstream_accepts_what_is_drawn() -> None:
    """Its rule: at least the k-th largest probability; cumulative sums up to p + 0.05."""
    name = "top_k_top_p_sampling_from_probs_v128256"
    inputs = make_inputs(load(name), {"batch_size": 12}, 3)
    probs, k, p = inputs["probs"], inputs["top_k"], inputs["top_p"]
    tokens = sample(probs, k, None, seed=1)
    row = probs.sort(-1, descending=True).values
    usual = (k > 0) & (k < probs.shape[-1])
    least = row.gather(-1, (k.long() - 1).clamp(0, probs.shape[-1] - 1)[:, None])[:, 0]
    drawn = probs.gather(-1, tokens[:, None])[:, 0]
    assert (drawn >= least)[usual].all()
    tokens = sample(probs, None, p, seed=1)
    before = (probs * (probs > probs.gather(-1, tokens[:, None]))).sum(-1)
    assert (before <= p.clamp(0, 1) + 0.05).all()


def test_our_kernels_must_draw_the_very_token() -> None:
    """A token that could be drawn, but not in this state of the generator, is refused."""
    definition = load("top_k_sampling_from_probs_v128256").resized(vocab_size=1000)
    bench = bench_of(definition, {"batch_size": 3})
    t = bench.tensors

    def draw(seed: int) -> None:
        t["samples"].copy_(sample(t["probs"], t["top_k"], seed=seed))

    right = check(lambda: draw(session.SEED), bench, exact=True)
    assert right.correct, right.reason
    assert check(lambda: draw(5), bench).correct
    other = check(lambda: draw(5), bench, exact=True)
    assert not other.correct and "not those of this state" in other.reason
    silent = check(lambda: None, bench)  # -1 is what nobody wrote
    assert not silent.correct


def test_rows_are_flat_and_peaked_in_turn() -> None:
    """The largest probability of a flat row is small, of a peaked one large; seeds swap them."""
    definition = load("top_p_sampling_from_probs_v128256")
    for seed in (0, 1):
        probs = make_inputs(definition, {"batch_size": 12}, seed)["probs"]
        assert torch.allclose(probs.sum(-1), torch.ones(12), atol=1e-4)
        largest = probs.max(-1).values
        assert largest[seed::2].max() < 0.01 and largest[1 - seed :: 2].min() > 0.01
        distinct = [len(row.unique()) for row in probs]
        assert min(distinct) == distinct[10] < 200 < min(distinct[:10])
