"""Packed prefill of the gated delta rule on unit keys, many alike, in float64.

Gates are from shut to open. Sequences are uneven: the first is short, the last has what is left,
others are empty. Bounds follow first-order errors of a chunked form: operands of products are
rounded to 16 bits, ROUNDING of what they are, so that an update is off by as much of the value and
of what the state holds for its key, and the state and outputs by what updates are off by, decayed,
and ROUNDING of their own. Weights of values that decays made tiny are off by LEAST instead.
Roundings are independent: they add up in quadrature, and DEVIATIONS of that are allowed.
A head that only forgets, as the first one does in the first of several sequences, has its state in
float32: it is off by FADED of itself, for each unit of the exponent, and by what QUIET adds.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.compiler.launch import Arguments
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, ends, plain, poisoned, stored

#: two factors of half an ulp each; products within a chunk may take the tensors' own 16-bit type
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10}
LEAST = 2.0**-25  # half of what float16 can tell from 0, in which chunks may weigh values
FADED, QUIET, FAST = 2.0**-19, 2.0**-100, 2.0  # QUIET: a beta that adds nothing; FAST: a rate
DEVIATIONS = 4.0  # of errors that are taken to be as large as they can at every rounding
SHORT = 3  # tokens of the first of several sequences
GATES = (30.0, -40.0, 19.5, -12.0)  # of some tokens: softplus is x, e^x, or in between
RATES = 0.005, 2.0  # of decay: from a hundred tokens' memory to one's
ALIKE, NEAR = 2, 3.0  # directions that keys are near, and the most of one in a key, of its rest
SHUT, OPEN = -90.0, 90.0  # of some tokens: beta is 0 or 1


def case(
    problem: Problem,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    given: bool = True,
    scale: float | None = None,
) -> Case:
    """All tensors, without a state unless it is `given`; `lengths` of the sequences' tokens."""
    total, count = problem["total_seq_len"], problem["num_seqs"]
    queries, heads, size = (problem[a] for a in ("num_q_heads", "num_v_heads", "head_size"))
    if lengths is None:
        short = min(SHORT, total) if count > 1 else 0
        lengths = [short, *[0] * (count - 2), total - short][-count:]
    rng = np.random.default_rng([seed, total, count, heads, size])
    a = rng.normal(size=(total, heads))
    b = rng.normal(size=(total, heads))
    for gates, special in ((a, GATES), (b, (SHUT, OPEN))):
        places = rng.permutation(gates.size)[: min(len(special), gates.size // 2)]
        gates.reshape(-1)[places] = special[: len(places)]
    rates = rng.uniform(math.log(RATES[0]), math.log(RATES[1]), heads)
    bias = rng.normal(-1.0, 0.5, heads)
    if count > 1:  # where softplus is a whole series
        b[: lengths[0], 0], a[: lengths[0], 0], rates[0] = SHUT, -bias[0], math.log(FAST)
    tensors: Tensors = {
        "q": stored(_unit(rng.normal(size=(total, queries, size))), problem.dtype),
        "k": stored(_keys(total, queries, size, rng), problem.dtype),
        "v": stored(rng.normal(size=(total, heads, size)), problem.dtype),
        "A_log": rates.astype(np.float32),
        "a": stored(a, problem.dtype),
        "dt_bias": bias.astype(np.float32),
        "b": stored(b, problem.dtype),
        "cu_seqlens": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "output": poisoned((total, heads, size), problem.dtype),
        "new_state": poisoned((count, heads, size, size), "float32"),
    }
    if given:
        state = rng.normal(size=(count, heads, size, size)) * size**-0.5
        tensors["state"] = state.astype(np.float32)
    expected = _expected(tensors, problem, scale or size**-0.5)
    return Case(tensors, expected, Arguments({"scale": scale}))


def _keys(total: int, heads: int, size: int, rng: np.random.Generator) -> Values:
    """Unit keys of which many are alike, each to another extent: what an update takes of those
    before it, and these of others, is then of the size of the values."""
    common = rng.normal(size=(ALIKE, heads, size))
    near = rng.uniform(0.0, NEAR, (total, heads, 1))
    mine = common[rng.integers(0, ALIKE, total)]
    return _unit(rng.normal(size=(total, heads, size)) + near * mine)


def _unit(x: Values) -> Values:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _expected(tensors: Tensors, problem: Problem, scale: float) -> dict[str, tuple[Values, Values]]:
    """The least and the greatest right values of both outputs."""
    wide: dict[str, Any] = {n: plain(t).astype(np.float64) for n, t in tensors.items()}
    share = problem["num_v_heads"] // problem["num_q_heads"]
    q, k = (wide[n].repeat(share, 1) for n in "qk")
    rate = np.exp(wide["A_log"]) * np.logaddexp(0, wide["a"] + wide["dt_bias"])
    decay, beta = np.exp(-rate), 1 / (1 + np.exp(-wide["b"]))
    states = np.zeros_like(wide["new_state"])
    state_error, out = np.zeros_like(states), np.zeros_like(wide["output"])
    out_error, step = np.zeros_like(out), ROUNDING[problem.dtype]
    for s, (first, end) in enumerate(pairwise(tensors["cu_seqlens"].tolist())):
        if first == end:
            continue
        state = wide["state"][s] if "state" in wide else states[s]
        error = np.zeros_like(state)  # squared
        before = np.zeros_like(wide["v"][0])  # sum of squared values
        for t in range(first, end):
            fading = decay[t, :, None, None]
            state, error = state * fading, error * fading**2
            beta_t, v, square = beta[t, :, None], wide["v"][t], k[t] ** 2
            change = beta_t * (v - _dot(state, k[t]))
            off = change**2 + beta_t**2 * (v**2 + _dot(state**2, square))
            state = state + change[..., None] * k[t][:, None]
            error = error + off[..., None] * square[:, None]
            out[t] = scale * _dot(state, q[t])
            before += v**2
            lost = (LEAST / step) ** 2 * before
            out_error[t] = scale * np.sqrt(_dot(error + state**2, q[t] ** 2) + lost)
        faded = FADED * (1 + rate[first:end].sum(0)[:, None, None]) * np.abs(state) + 16 * QUIET
        quiet = (beta[first:end] < QUIET).all(0)[:, None, None]
        off = DEVIATIONS * step * np.sqrt(error + state**2)
        states[s], state_error[s] = state, np.where(quiet, faded, off)
    out_error = DEVIATIONS * step * out_error
    output = ends(out, out_error, problem.dtype)
    return {"output": output, "new_state": (states - state_error, states + state_error)}


def _dot(rows: Values, vector: Values) -> Values:
    """Of each head, its rows with a vector."""
    product: Values = np.einsum("hvk,hk->hv", rows, vector)
    return product
