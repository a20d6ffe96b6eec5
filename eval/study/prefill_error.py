"""How errors of GDN prefill grow with length: `python -m ptxflow.eval.study.prefill_error`.

A model in numpy of what the kernels compute, with their roundings, beside the recurrence in
float64, token by token, on the inputs with which kernels are checked. Errors are shares of the
tolerance, before the output's own rounding; above 1 a kernel would be refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.compiler.kernels.gdn_prefill.decisions import HALF, PAIRS
from ptxflow.env.tasks.arguments import natural_int, positive_int
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.study import style
from ptxflow.eval.verify.cases.case import plain, stored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFINITION = "gdn_prefill_qk16_v32_d128_k_last"
SPAN = 512  # tokens of a point of the plot
Array = NDArray[Any]


@dataclass(frozen=True)
class Form:
    """A chunked form; `operands` and `solve` as the decisions, or `once` for one bfloat16."""

    chunk: int
    operands: str
    solve: str = "once"
    block: int = 16

    def __str__(self) -> str:
        return f"{self.chunk} tokens, {self.operands}, solved {self.solve}"

    def terms(self, values: Array, kind: str) -> list[Array]:
        """What an operand of 16 bits holds of values, and where there are pairs, of the rest."""
        dtype = "float16" if self.operands == HALF else "bfloat16"
        first = plain(stored(values, dtype)).astype(np.float32)
        if kind != PAIRS:
            return [first]
        return [first, plain(stored(values - first, dtype)).astype(np.float32)]


FORMS = (
    Form(64, "once"),
    *(Form(chunk, HALF) for chunk in (16, 64)),
    *(Form(chunk, PAIRS) for chunk in (16, 64)),
    Form(64, PAIRS, PAIRS),
)


@dataclass(frozen=True)
class Head:
    """One sequence of a head: q, k and v are [tokens, size], `log` is of decays in base 2."""

    q: Array
    k: Array
    v: Array
    log: Array
    beta: Array
    state: Array
    scale: float


def head(tokens: int, strength: float, seed: int) -> Head:
    """The inputs of a check, for a head whose exp(A_log) is given: the weaker, the longer it
    remembers."""
    sizes = {"num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 1}
    axes = {"total_seq_len": tokens, "num_seqs": 1, "len_cu_seqlens": 2}
    made = make_inputs(load(DEFINITION).resized(**sizes), axes, seed)
    given = {n: made[n].double().numpy().squeeze() for n in ("q", "k", "v", "a", "b", "state")}
    softplus = np.logaddexp(0, given["a"] + float(made["dt_bias"]))
    log, beta = -strength * softplus / np.log(2), 1 / (1 + np.exp(-given["b"]))
    q, k, v, state = (given[n] for n in ("q", "k", "v", "state"))
    return Head(q, k, v, log, beta, state, made["scale"])


def recurrence(h: Head) -> tuple[Array, Array]:
    """Outputs and the last state in float64, token by token."""
    state, out = h.state.astype(np.float64), np.empty_like(h.v)
    for t, decay in enumerate(np.exp2(h.log)):
        state = state * decay
        state = state + np.outer(h.beta[t] * (h.v[t] - state @ h.k[t]), h.k[t])
        out[t] = h.scale * (state @ h.q[t])
    return out, state


def chunked(h: Head, form: Form) -> tuple[Array, Array]:
    """The same in chunks, float32 sums of products of rounded operands."""
    state, out = h.state.astype(np.float32), list[Array]()
    for first in range(0, len(h.v), form.chunk):
        part = slice(first, first + form.chunk)
        one, state = _chunk(state, h, part, form)
        out.append(one)
    return np.concatenate(out), state


def _chunk(state: Array, h: Head, part: slice, form: Form) -> tuple[Array, Array]:
    q, k, v, beta = (x[part].astype(np.float32) for x in (h.q, h.k, h.v, h.beta))
    total = np.cumsum(h.log[part].astype(np.float32), dtype=np.float32)
    decays = np.exp2(np.minimum(total[:, None] - total, 0))
    raised, leaving = np.exp2(total)[:, None], np.exp2(total[-1] - total)[:, None]
    pulls = np.tril(-beta[:, None] * (k @ k.T) * decays, -1)
    scores = form.terms(h.scale * np.tril((q @ k.T) * decays), form.operands)
    held = form.terms(state, form.operands)
    right = beta[:, None] * (v - raised * sum(k @ s.T for s in held))
    x = _solved(pulls, right, form)
    out = h.scale * raised * sum(q @ s.T for s in held)
    out = out + _product(scores, form.terms(x, form.operands))
    added = sum(u.T @ k for u in form.terms(leaving * x, form.operands))
    return out, (raised[-1] * state + added).astype(np.float32)


def _product(a: list[Array], b: list[Array]) -> Array:
    """Of terms with terms, but the last with the last."""
    return a[0] @ b[0] + (a[0] @ b[1] + a[1] @ b[0] if len(a) > 1 else 0)


def _solved(pulls: Array, right: Array, form: Form) -> Array:
    """x with x = right + pulls x, block after block."""
    x, far = np.zeros_like(right), form.terms(pulls, form.solve)
    for first in range(0, len(right), form.block):
        rows = slice(first, min(first + form.block, len(right)))
        before = [b[:first] for b in form.terms(x, form.solve)]
        mine = right[rows] + _product([a[rows, :first] for a in far], before)
        unit = np.eye(len(mine))
        inverse = np.linalg.inv(unit - pulls[rows, rows].astype(np.float64)) - unit
        solved = form.terms(inverse.astype(np.float32), form.solve)
        x[rows] = mine + _product(solved, form.terms(mine, form.solve))
    return x


def shares(h: Head, forms: Sequence[Form]) -> dict[Form, tuple[Array, float]]:
    """Of each form the largest share of the tolerance in each SPAN of tokens, and of the state."""
    definition = load(DEFINITION)
    out, state = recurrence(h)
    found = {}
    for form in tqdm(forms, desc="forms", unit="form", disable=None):
        ours, last = chunked(h, form)
        each = _share(ours, out, tolerance(definition, "output")).max(-1)
        spans = np.array([each[i : i + SPAN].max() for i in range(0, len(each), SPAN)])
        found[form] = spans, float(_share(last, state, tolerance(definition, "new_state")).max())
    return found


def _share(ours: Array, right: Array, allowed: Any) -> Array:
    share: Array = np.abs(ours - right) / (allowed.atol + allowed.rtol * np.abs(right))
    return share


def plot(found: dict[Form, tuple[Array, float]], path: Path) -> None:
    """Write the errors along the sequence, a line a form."""
    with style.style():
        style.save(growth(found), path)


def growth(found: dict[Form, tuple[Array, float]]) -> Figure:
    """The figure of `plot`."""
    figure, ((axes,),) = style.figure(4.2)
    for i, (form, (spans, _)) in enumerate(found.items()):
        tokens = SPAN * (1 + np.arange(len(spans)))
        axes.plot(tokens, spans, label=str(form), color=style.colour(i), marker="os^Dv*"[i % 6],
                  markersize=4)  # fmt: skip
    axes.axhline(1, color="0.3", linestyle="--", linewidth=1, label="tolerance")
    axes.set(yscale="log", xlabel="tokens of the sequence",
             ylabel=f"largest error of {SPAN} tokens over the tolerance")  # fmt: skip
    style.plain_log(axes.yaxis)
    style.legend(figure, axes, title="chunk, operands, solve")
    within = sum(spans.max() <= 1 for spans, _ in found.values())
    most = max(spans[-1] / spans[0] for spans, _ in found.values())
    style.titled(figure, f"Gated delta net: {within} of {len(found)} chunked forms stay within the "
                         f"tolerance; errors of the last {SPAN} tokens are at most {most:.1f} "
                         "times those of the first")  # fmt: skip
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=positive_int, default=8192, help="of the sequence")
    parser.add_argument(
        "--strength", type=float, default=0.01, help="exp(A_log): inputs have 0.01 to 2"
    )
    parser.add_argument("--seed", type=natural_int, default=0, help="of the inputs")
    parser.add_argument("--plot", type=Path, help="a PNG of errors along the sequence")
    args = parser.parse_args(argv)
    found = shares(head(args.tokens, args.strength, args.seed), FORMS)
    print(
        f"{'form':36} {'first':>7} {'last':>7} {'largest':>7} {'state':>7}   shares of tolerances"
    )
    for form, (spans, state) in found.items():
        print(f"{form!s:36} {spans[0]:7.3f} {spans[-1]:7.3f} {spans.max():7.3f} {state:7.3f}")
    if args.plot:
        plot(found, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
