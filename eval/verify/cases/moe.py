"""MoE on one rank: routing to experts with many tokens, few and none.

Outputs are computed in float64. Kernels round what lies between the products to float8 again, with
a scale for some of its columns: errors of a row's entries are independent and uniform within half
an ulp, ROUNDING of them in the mean; they add up in quadrature, and DEVIATIONS of that are allowed,
of an output and of the factor that SEGMENT of them have in common; OF_ALL of that of all rows.
Scales differ by a factor of up to 16 from block to block, so that a wrong one shows.
"""

from typing import Any

import numpy as np

from ptxflow.compiler.emulator.values import decode, e4m3_bits
from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.moe import MANY, SPACED
from ptxflow.compiler.kernels.moe.problem import WORD
from ptxflow.compiler.launch import Arguments
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, ends, plain, poisoned, stored

BLOCK, GROUPS, KEPT_GROUPS, CHOSEN = 128, 8, 4, 8
SEGMENT = 64  # outputs of a token
GROUP, LANE_EXPERTS = 32, 8  # experts
ROUNDING, DEVIATIONS, OF_ALL = 0.036, 6.0, 5.0
FACTOR = 2.5  # routed_scaling_factor
SPREAD, ONE, NONE = "spread", "one", "none"
TIED_BIAS = 0.0625  # of the two best experts of groups that tie
HIGH, AWAY = 8.0, -4.0  # logits of experts that are chosen, and of local ones that may still be
ORDERED = 9  # tokens for which each group is the fourth of four, that of most local experts twice
PAIR = np.arange(2)
RANKS = 6  # that the first of three local experts may have among the chosen
DRAWS = 200  # until each token's choice is clear
FEWEST = 1e-4  # between scores, at which the choice turns: less could be an error of rounding
POOL = 1 << 16  # values, of which matrices are made
NAN = 0x7F  # in float8: weights of experts without tokens


def case(problem: Problem, seed: int = 0, routing: str = SPREAD, offset: int | None = None) -> Case:
    """All tensors. `routing`: tokens go to some of the local experts, to one, or to none;
    `offset` is the first local expert, which may lie outside 0..255. Nobody has the weights of
    experts without tokens."""
    axes = dict(problem.axes)
    tokens, local = axes["seq_len"], axes["num_local_experts"]
    hidden, inner = axes["hidden_size"], axes["intermediate_size"]
    rng = np.random.default_rng([seed, tokens, local, hidden, inner])
    room = axes["num_experts"] - local + 1
    edge = GROUP if room > 2 * GROUP else 0
    first = int(rng.integers(edge, room - edge)) if offset is None else offset
    logits, bias = _routing(rng, tokens, local, first, routing)
    chosen = shares(logits, plain(bias)).any(0)
    used = [e for e in range(local) if 0 <= first + e < len(chosen) and chosen[first + e]]
    tensors: Tensors = {
        "routing_logits": logits,
        "routing_bias": bias,
        "hidden_states": _values(rng, tokens, hidden),
        "hidden_states_scale": _scales(rng, hidden // BLOCK, tokens),
        "gemm1_weights": _weights(rng, used, local, 2 * inner, hidden),
        "gemm1_weights_scale": _scales(rng, local, 2 * inner // BLOCK, hidden // BLOCK)
        / np.float32(hidden**0.5),
        "gemm2_weights": _weights(rng, used, local, hidden, inner),
        "gemm2_weights_scale": _scales(rng, local, hidden // BLOCK, inner // BLOCK)
        / np.float32(inner**0.5),
        "output": poisoned((tokens, hidden), "bfloat16"),
    }
    bounds, slopes = _expected(tensors, first)
    scalars = {"local_expert_offset": first, "routed_scaling_factor": FACTOR}
    return Case(tensors, {"output": bounds}, Arguments(scalars), {"output": slopes})


def _values(rng: np.random.Generator, *shape: int) -> Values:
    pool = e4m3_bits(rng.normal(size=POOL).astype(np.float32))
    return np.asarray(pool[rng.integers(0, POOL, shape, np.uint16)])


def _weights(rng: np.random.Generator, used: list[int], *shape: int) -> Values:
    out = np.full(shape, NAN, np.uint8)
    out[used] = _values(rng, len(used), *shape[1:])
    return out


def _scales(rng: np.random.Generator, *shape: int) -> Values:
    return (4.0 ** rng.uniform(-1, 1, shape)).astype(np.float32)


def _routing(
    rng: np.random.Generator, tokens: int, local: int, first: int, routing: str
) -> tuple[Values, Values]:
    """Logits and a bias that leads tokens to local experts or away from them. Of the first tokens
    two groups tie for the first place; others have their local experts, of many the first and the
    last, or the last ones, behind 0 to 5 that are not, where these are around them; the last ones
    choose from all experts of a lane in turn. Of many local experts each chooses one that all do;
    few tokens, one of the one before, and a new one."""
    count = GROUP * GROUPS
    bias = rng.normal(0, 0.1, count)
    mine = [e for e in range(first, first + local) if 0 <= e < count]
    live, many = _live(mine, tokens), CHOSEN < len(mine) <= WORD
    ends, middle = {live[0], live[-1]}, rng.permutation(live[1:-1])[:1]
    near = sorted({*ends, *map(int, middle)}) if many else mine
    bias[mine] = -4.0
    if routing == ONE:
        bias[mine[-1:]] = 4.0
    elif routing == SPREAD:
        bias[live] = 0.3
    best, around = _best_of_groups(rng, mine), _around(rng, near)
    bias[best] = TIED_BIAS
    rounded = stored(bias, "bfloat16")
    ties = min(GROUPS - 1, tokens // 4) if len(best) == GROUPS and tokens <= MANY else 0
    ranks = RANKS if routing == SPREAD and len(around) and tokens > 16 else 0
    served = (numbers := np.arange(tokens)) % 25 != ties % 25
    if tokens > MANY:
        served = np.isin(numbers, np.linspace(0, tokens - 1, 2 * SPACED - 1).round())
    others = [e for e in live if many and e != near[0]]
    turn = np.cumsum(served) % (len(others) + 1) if tokens <= MANY else np.full(tokens, -2)
    logits = np.zeros((tokens, count), np.float32)
    unclear, away = np.ones(tokens, bool), AWAY - 0.01 * np.arange(len(mine))  # no two alike
    for _ in range(DRAWS):
        drawn = rng.normal(-2.0 * many, size=(tokens, count))
        drawn[:, mine] = rng.uniform(1, 3, (tokens, len(mine)))
        for number, expert in enumerate(others):
            drawn[(turn != number) & (turn != number + 1), expert] += 2 * AWAY
        drawn[np.ix_(~served, np.asarray(mine, np.int64))] = away
        drawn[:ties] -= 2.0 * (drawn[:ties] > 1.0)
        for token in range(ties):
            drawn[token, best[[token, GROUPS - 1]]] = HIGH
        for behind, token in enumerate(numbers[served][ties : ties + ranks]):
            row = drawn[token]
            row += AWAY
            own = near if behind or not many else live[-len(near) :]
            row[around[0, :behind]] = row[around[1, behind:]] = row[own] = HIGH
        if routing == SPREAD and ties + ranks + ORDERED < tokens <= MANY:
            drawn[-ORDERED:] = _in_order(plain(rounded), live)
        logits[unclear] = drawn[unclear]
        unclear = ~_clear(logits, plain(rounded))
        if not unclear.any():
            return logits, rounded
    raise ValueError(f"no routing of {tokens} tokens to {local} experts from {first} on is clear")


def _live(mine: list[int], tokens: int) -> list[int]:
    """Local experts that have tokens: all but the second; of many of a word all, or three."""
    if not CHOSEN < len(mine) <= WORD:
        return mine[:1] + mine[2:]
    return mine if tokens <= MANY else mine[::13]


def _best_of_groups(rng: np.random.Generator, mine: list[int]) -> Values:
    """[groups, 2]: two experts of each group that are not local, if each has some."""
    others = np.setdiff1d(np.arange(GROUP * GROUPS), mine)
    found = [rng.permutation(others[others // GROUP == g])[:2] for g in range(GROUPS)]
    return np.array([pair for pair in found if len(pair) == 2], np.int64).reshape(-1, 2)


def _in_order(bias: Values, live: list[int]) -> Values:
    """[ORDERED, experts]: logits; token t's k-th best expert is number (k + t) % 8 of those of a
    lane. A group is kept for two of a lane, local ones if there are some: one of them and a third
    are less than the two best of each group that is not. Twice the best of these is more than those
    of the fourth group; where that has most local experts, it is in turn each of a lane."""
    logits = np.full((ORDERED, GROUP * GROUPS), AWAY)
    lanes = np.arange(GROUP * GROUPS).reshape(GROUPS, -1, LANE_EXPERTS)
    own = np.bincount(np.array(live, np.int64) // GROUP, minlength=GROUPS).argmax()
    for t, i in np.ndindex(ORDERED, GROUPS):
        k, other = (i + t + t // 4) % KEPT_GROUPS, (i - 1 + t // 4 * 3) % (GROUPS - 1) + 1
        pairs = lanes[(own + (i and other)) % GROUPS][:, (2 * k + t + PAIR) % LANE_EXPERTS]
        best = pairs[np.argmax((np.isin(pairs, live) - np.abs(bias[pairs])).sum(-1))]
        wanted = 0.85 - 0.04 * k - 0.02 * PAIR if i < KEPT_GROUPS else 0.78 - 0.26 * PAIR
        score = np.clip(wanted - bias[best], 0.05, 0.99)
        logits[t, best] = np.log(score / (1 - score))
    return logits


def _around(rng: np.random.Generator, mine: list[int]) -> Values:
    """[2, RANKS - 1]: experts of a group before the local ones and of one behind; none where these
    are many, or where there is no such group."""
    groups = [e // GROUP for e in mine]
    if not 0 < len(mine) <= CHOSEN - RANKS + 2 or min(groups) == 0 or max(groups) == GROUPS - 1:
        return np.zeros((0, RANKS - 1), np.int64)
    beside = min(groups) - 1, max(groups) + 1
    return np.array([g * GROUP + rng.permutation(GROUP)[: RANKS - 1] for g in beside])


def _scores(logits: Values) -> Values:
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))))


def _clear(logits: Values, bias: Values) -> Values:
    """Of each token, whether no choice hangs on less than FEWEST."""
    biased = _scores(logits) + bias
    groups = np.sort(biased.reshape(len(biased), GROUPS, -1), -1)
    tops = np.sort(groups[..., -2:].sum(-1), -1)
    kept = np.sort(_kept(biased), -1)
    gaps = [tops[:, -KEPT_GROUPS] - tops[:, -KEPT_GROUPS - 1]]
    gaps.append(kept[:, -CHOSEN] - kept[:, -CHOSEN - 1])
    return np.asarray(np.minimum(*gaps) > FEWEST)


def _kept(biased: Values) -> Values:
    """Biased scores, those of lost groups far below."""
    groups = biased.reshape(len(biased), GROUPS, -1)
    tops = np.sort(groups, -1)[..., -2:].sum(-1)
    best = np.argsort(-tops, -1)[:, :KEPT_GROUPS]
    out = np.full_like(groups, -1e30)
    rows = np.arange(len(biased))[:, None]
    out[rows, best] = groups[rows, best]
    return out.reshape(biased.shape)


def shares(logits: Values, bias: Values) -> Values:
    """[tokens, experts]: the share of each chosen expert times FACTOR, 0 of others."""
    scores = _scores(logits)
    best = np.argsort(-_kept(scores + bias), -1)[:, :CHOSEN]
    rows, out = np.arange(len(scores))[:, None], np.zeros_like(scores)
    chosen = scores[rows, best]
    out[rows, best] = chosen / (chosen.sum(-1, keepdims=True) + 1e-20) * FACTOR
    return out


def _wide(values: Values, scales: Values) -> Values:
    """Values of the last two dimensions by the scales of their blocks, in float64."""
    rows = values.shape[-2] // scales.shape[-2]
    return np.asarray(
        decode(values, "e4m3").astype(np.float64)
        * scales.repeat(rows, -2).repeat(BLOCK, -1).astype(np.float64)
    )


def _expected(
    tensors: Tensors, first: int
) -> tuple[tuple[Values, Values], tuple[Values, Values, Values]]:
    """The least and the greatest right outputs, and their slopes."""
    t: dict[str, Any] = dict(tensors)
    share = shares(t["routing_logits"], plain(t["routing_bias"]))
    x = _wide(t["hidden_states"], t["hidden_states_scale"].T)
    out, error, halves = np.zeros((3, *x.shape))  # squares of errors: of float8, of bfloat16
    parts = []
    for local in range(len(t["gemm1_weights"])):
        weight = share[:, first + local] if 0 <= first + local < share.shape[1] else np.zeros(1)
        mine = np.flatnonzero(weight)
        if not len(mine):
            continue
        up = _wide(t["gemm1_weights"][local], t["gemm1_weights_scale"][local])
        down = _wide(t["gemm2_weights"][local], t["gemm2_weights_scale"][local])
        linear, gate = np.split(x[mine] @ up.T, 2, -1)
        h = weight[mine, None] * linear * gate / (1 + np.exp(-gate))
        part = h @ down.T
        out[mine] += part
        error[mine] += (ROUNDING * h) ** 2 @ (down**2).T
        halves[mine] += (2.0**-9 * part) ** 2  # an expert's outputs may be stored as bfloat16
        parts.append((mine, h, down.reshape(-1, SEGMENT, down.shape[-1])))
    lines = out.reshape(len(out), -1, SEGMENT)
    lengths = (lines**2).sum(-1, keepdims=True)
    weights = np.divide(lines, lengths, out=np.zeros_like(lines), where=lengths > 0)
    spread = (weights**2 * (halves + (2.0**-9 * out) ** 2).reshape(lines.shape)).sum(-1)
    mean = spread.mean(-1) / spread.shape[-1]
    for mine, h, down in parts:
        pulls = np.einsum("tsw,swi->tsi", weights[mine], down, optimize=True)
        spread[mine] += ((ROUNDING * h[:, None] * pulls) ** 2).sum(-1)
        mean[mine] += ((ROUNDING * h * pulls.mean(1)) ** 2).sum(-1)
    room = DEVIATIONS * np.sqrt(error + halves) + 2.0**-12 * np.abs(out)
    rooms = DEVIATIONS * np.sqrt(spread) + 2.0**-12, OF_ALL * np.sqrt(mean)
    return ends(out, room, "bfloat16"), (weights, *rooms)
