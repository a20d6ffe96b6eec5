"""A step of the gated delta rule on normal data, with gates from shut to open, in float64.

Bounds follow the rounding errors of float32 through the step. Sums of up to 64 products in a lane
and 5 additions across lanes are off by 2^-18 of the sum of sizes; ex2, rcp and the series behind
the decay, whose exponent is t, by 2^-20 (1 + t) of it;
sigmoid(b), where it is small, by 2^-20 (1 + |b|) of it.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.compiler.launch import Arguments
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, ends, plain, poisoned, stored

SUM_ERROR, GATE_ERROR, ROUNDING = 2.0**-18, 2.0**-20, 2.0**-22
SMALLEST = 2.0**-120  # what is below may be zero: a shut gate in float32
GATES = (30.0, -40.0, 19.5, -12.0, 21.0, 0.0)  # of some heads: softplus is x, e^x, or in between
SHUT, OPEN = -90.0, 90.0  # of the first head's b and the last's: beta is 0 or 1
FAST = 8.0  # rate of decay of some heads that forget alone: far terms of its series show
SCALES = (None, 0.0, 0.25)


def case(problem: Problem, given: bool = True, scale: float | None = -1.0) -> Case:
    """All tensors of a step; without a state unless it is `given`; a scale below 0: any."""
    axes = ("batch_size", "num_q_heads", "num_v_heads", "head_size")
    batch, queries, heads, size = (problem[axis] for axis in axes)
    rng = np.random.default_rng([batch, queries, heads, size])

    def normal(*shape: int, by: float = 1.0) -> Values:
        return stored(rng.normal(size=shape) * by, problem.dtype)

    a, b = normal(batch, 1, heads, by=3.0), normal(batch, 1, heads, by=3.0)
    for gates, special in ((a, GATES), (b, (SHUT, OPEN))):
        flat = gates.reshape(-1)
        places = rng.permutation(flat.size)[: min(len(special), flat.size // 2)]
        flat[places] = stored(np.array(special[: len(places)]), problem.dtype)
    bias = rng.normal(-1.0, 0.5, heads).astype(np.float32)
    a[0, 0, 1::3] = stored(-bias[1::3], problem.dtype)  # about 0, where softplus is a whole series
    rates = rng.uniform(0.01, 2.0, heads)
    b[0, 0, 1::6], rates[1::6] = stored(np.array(SHUT), problem.dtype), FAST
    tensors: Tensors = {
        "q": normal(batch, 1, queries, size, by=size**-0.5),
        "k": normal(batch, 1, queries, size, by=size**-0.5),
        "v": normal(batch, 1, heads, size),
        "A_log": np.log(rates).astype(np.float32),
        "a": a,
        "dt_bias": bias,
        "b": b,
        "output": poisoned((batch, 1, heads, size), problem.dtype),
        "new_state": poisoned((batch, heads, size, size), "float32"),
    }
    if given:
        tensors["state"] = rng.normal(size=(batch, heads, size, size)).astype(np.float32)
    factor = SCALES[int(rng.integers(len(SCALES)))] if scale is not None and scale < 0 else scale
    expected = _expected(tensors, problem, factor or size**-0.5)
    return Case(tensors, expected, Arguments({"scale": factor}))


def _expected(tensors: Tensors, problem: Problem, scale: float) -> dict[str, tuple[Values, Values]]:
    """The least and the greatest right values of both outputs."""
    wide: dict[str, Any] = {n: plain(t).astype(np.float64) for n, t in tensors.items()}
    share = problem["num_v_heads"] // problem["num_q_heads"]
    q, k = (wide[n][:, 0].repeat(share, 1)[:, :, None] for n in "qk")  # [batch, heads, 1, K]
    v, a, b = wide["v"][:, 0, :, :, None], wide["a"][:, 0], wide["b"][:, 0]
    exponent = np.exp(wide["A_log"]) * np.logaddexp(0, a + wide["dt_bias"])
    decay, beta = (x[..., None, None] for x in (np.exp(-exponent), 1 / (1 + np.exp(-b))))
    off = GATE_ERROR * (1 + exponent[..., None, None])
    state = decay * wide.get("state", 0.0) * np.ones_like(wide["new_state"])

    def total(x: Values) -> Values:
        return x.sum(-1, keepdims=True)

    u = total(state * k)
    change = beta * (v - u)
    new = state + change * k
    size = np.abs(state)
    u_error = (off + SUM_ERROR) * total(size * np.abs(k))
    beta_error = GATE_ERROR * (1 + np.abs(b)[..., None, None] * (1 - beta))
    change_error = beta * (u_error + beta_error * (np.abs(v) + np.abs(u)))
    error = off * size + np.abs(k) * change_error + ROUNDING * (size + np.abs(change * k))
    error += SMALLEST
    sizes = total(size * np.abs(q)) + np.abs(change) * total(np.abs(k * q))
    out_error = scale * (total(np.abs(q) * error) + SUM_ERROR * sizes)
    out, out_error = (x[..., 0][:, None] for x in (scale * total(new * q), out_error))
    output = ends(out, out_error, problem.dtype)
    return {"output": output, "new_state": (new - error, new + error)}
