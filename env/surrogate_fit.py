"""Fitting a `Surrogate` to measurements: Adam in numpy on all members at once, no other library.

What matters is the order near the top of each workload, so the loss weights fast strategies, gives
each workload about equal say, and leaves each a free level of its own. Members differ by their
initial weights and by random weights of the workloads, so that they disagree where workloads do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.env import surrogate
from ptxflow.env.observations import Observations, digest
from ptxflow.env.space import decision_digest
from ptxflow.env.surrogate import Array, Ensemble, Matrix, Probe, Surrogate

PROBED = 8  # workloads whose features a surrogate remembers, and strategies of each
LEAST_SPREAD = 0.05  # of a feature that hardly varies
LEVEL_RIDGE = 3.0  # workloads' worth of belief that a feature does not move the level
REACH = 2.0  # times the leverage that 1% of what was measured exceeds
BETAS, EPSILON = (0.9, 0.99), 1e-8
Layers = list[tuple[Matrix, Matrix]]


@dataclass(frozen=True)
class FitConfig:
    """How a surrogate is fitted; travels in its file."""

    members: int = 5
    hidden: tuple[int, ...] = (64, 64)
    steps: int = 1500
    batch: int = 512
    learning_rate: float = 3e-3
    decay: float = 1.0  # of weights, decoupled from the gradient
    near: float = 0.10  # a strategy this much slower than its workload's best weighs 1/e
    floor: float = 0.15  # what the slowest weigh
    balance: float = 0.5  # exponent of a workload's total weight in its number of strategies
    level: float = 20.0  # strategies' worth of belief that a workload's own level is 0
    ridge: float = 10.0  # of the Gram matrix behind the leverage
    kappa: float = 0.5  # chosen by held-out regret: env/README.md
    seed: int = 0


@dataclass(frozen=True)
class Table:
    """Rows of all workloads: features [n, D], log(measured / modelled) [n], weights, workload."""

    names: tuple[str, ...]
    x: Matrix
    residual: NDArray[np.float32]
    weight: NDArray[np.float32]
    workload: NDArray[np.int64]

    def without(self, workloads: Sequence[int]) -> "Table":
        """The rows of the other workloads."""
        keep = ~np.isin(self.workload, list(workloads))
        return Table(
            self.names, self.x[keep], self.residual[keep], self.weight[keep], self.workload[keep]
        )


def table(observed: Sequence[Observations], config: FitConfig) -> Table:
    """Features and residuals of everything that succeeded; ValueError where nothing did."""
    rows: list[tuple[Mapping[str, Any], Any, Any, Any]] = []
    for number, item in enumerate(observed):
        o = item.succeeded
        if not len(o):
            continue
        columns, modelled = surrogate.strategy_features(o.family, o.fields(), o.problem, o.device)
        residual = np.log(o.seconds / modelled)
        rows.append((columns, residual, weights(o.seconds, config), np.full(len(o), number)))
    if not rows:
        raise ValueError("no successful measurement to fit")
    found, *parts = zip(*rows, strict=True)
    names = tuple(dict.fromkeys(name for columns in found for name in columns))
    x = np.concatenate([surrogate.matrix(columns, names) for columns in found])
    residual, weight, workload = map(np.concatenate, parts)
    weight = weight / weight.mean()
    return Table(names, x, residual.astype(np.float32), weight.astype(np.float32), workload)


def weights(seconds: Array, config: FitConfig) -> Array:
    """[n] of one workload's strategies."""
    gap = seconds / seconds.min() - 1
    weight = config.floor + (1 - config.floor) * np.exp(-gap / config.near)
    return np.asarray(weight * (len(weight) ** config.balance / weight.sum()))


def fit(
    observed: Sequence[Observations],
    config: FitConfig | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Surrogate:
    """A surrogate of these measurements, of one family on one device; `tick` after every step."""
    config = config or FitConfig()
    if not observed:
        raise ValueError("no measurement to fit")
    if len({(o.family.name, o.device.name) for o in observed}) > 1:
        raise ValueError("a surrogate is of one family on one device; the measurements are of more")
    about = {
        "data": digest(observed),
        "workloads": len(observed),
        "strategies": sum(map(len, observed)),
        "decisions": decision_digest(observed[0].family),
        "fit": asdict(config),
    }
    rows = table(observed, config)
    return Surrogate(
        family=observed[0].family,
        device=observed[0].device,
        features=rows.names,
        ensemble=solve(rows, config, tick),
        kappa=config.kappa,
        probes=probes(observed, rows.names, config.seed),
        about=about,
    )


def probes(observed: Sequence[Observations], names: Sequence[str], seed: int) -> tuple[Probe, ...]:
    """Features of a few strategies of a few workloads, drawn among those measured."""
    rng = np.random.default_rng(seed)
    out = []
    for i in sorted(rng.permutation(len(observed))[:PROBED]):
        o = observed[i]
        o = o.pick(np.sort(rng.permutation(len(o))[:PROBED]))
        columns, _ = surrogate.strategy_features(o.family, o.fields(), o.problem, o.device)
        out.append(Probe(o.problem, o.codes, surrogate.matrix(columns, names)))
    return tuple(out)


def solve(rows: Table, config: FitConfig, tick: Callable[[], object] = lambda: None) -> Ensemble:
    """The ensemble of prepared rows."""
    spread = rows.x.std(0)
    center, gain = rows.x.mean(0), 1 / np.maximum(spread, LEAST_SPREAD)
    x = surrogate.standardise(rows.x, center, gain)
    one = np.hstack([x, np.ones((len(x), 1), np.float32)]).astype(np.float64)
    precision = np.linalg.inv(one.T @ one + config.ridge * np.eye(one.shape[1]))
    leverage = np.einsum("nd,nd->n", one @ precision, one)
    level = common_level(x, rows)
    rest = rows.residual - (x @ level[:-1] + level[-1])
    layers = train(x, replace(rows, residual=rest), config, tick)
    # what never varied has taught the members nothing; that it varies now, the leverage shows
    layers[0][0][:, spread < 1e-6] = 0
    return Ensemble(
        center=center,
        gain=gain.astype(np.float32),
        layers=tuple(layers),
        precision=precision.astype(np.float32),
        level=level,
        reach=REACH * float(np.quantile(leverage, 0.99)),
        prior=float(np.sqrt(np.average(rest.astype(float) ** 2, weights=rows.weight))),
    )


def common_level(x: Matrix, rows: Table) -> Matrix:
    """[D + 1] a ridge regression of the workloads' mean residuals on what tells them apart.

    Its features are those that are the same for every strategy of a workload.
    """
    _, workload = np.unique(rows.workload, return_inverse=True)
    mass = np.bincount(workload, rows.weight)
    goal = np.bincount(workload, rows.weight * rows.residual) / mass
    _, first = np.unique(workload, return_index=True)
    inputs = x[first].astype(np.float64)
    same = np.abs(x - inputs[workload]).max(0) < 1e-6
    inputs[:, ~same] = 0
    center = float(goal.mean())
    gram = inputs.T @ inputs + LEVEL_RIDGE * np.eye(x.shape[1])
    weights = np.linalg.solve(gram, inputs.T @ (goal - center))
    return np.append(weights, center).astype(np.float32)


def train(
    x: Matrix, rows: Table, config: FitConfig, tick: Callable[[], object] = lambda: None
) -> Layers:
    """The members' layers after `config.steps` batches."""
    rng = np.random.default_rng(config.seed)
    _, workload = np.unique(rows.workload, return_inverse=True)
    count = int(workload.max()) + 1
    say = rng.exponential(size=(config.members, count)).astype(np.float32)
    weight = say[:, workload] * rows.weight  # [E, n]
    layers = _initial(rng, x.shape[1], config)
    slots = [[np.zeros_like(p) for p in pair] for pair in layers for _ in BETAS]
    level = np.zeros((config.members, count), np.float32)
    batch = min(config.batch, len(x))
    order, at = rng.permutation(len(x)), 0
    renew = max(25, len(x) // batch)
    for step in range(config.steps):
        if step % renew == 0:
            level = _levels(layers, x, rows, weight, workload, level, config)
        if at + batch > len(x):
            order, at = rng.permutation(len(x)), 0
        chosen, at = order[at : at + batch], at + batch
        goal = rows.residual[chosen] - level[:, workload[chosen]]
        gradients = _gradients(layers, x[chosen], goal, weight[:, chosen])
        rate = config.learning_rate * 0.5 * (1 + np.cos(np.pi * step / config.steps))
        _adam(layers, slots, gradients, rate, config.decay, step + 1)
        tick()
    return layers


def _initial(rng: np.random.Generator, inputs: int, config: FitConfig) -> Layers:
    sizes = [inputs, *config.hidden, 1]
    layers = []
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        scale = np.sqrt((2 if i + 2 < len(sizes) else 0.1) / fan_in)
        weight = rng.normal(size=(config.members, fan_in, fan_out)) * scale
        layers.append(
            (weight.astype(np.float32), np.zeros((config.members, 1, fan_out), np.float32))
        )
    return layers


def _levels(
    layers: Layers, x: Matrix, rows: Table, weight: Matrix, workload: Any, old: Matrix,
    config: FitConfig,
) -> Matrix:  # fmt: skip
    """[E, workloads] what each workload's residuals have in common that the members do not say."""
    error = weight * (rows.residual - surrogate.forward(layers, x)[-1][..., 0])
    out = np.zeros_like(old)
    for member in range(len(out)):
        total = np.bincount(workload, error[member], minlength=out.shape[1])
        mass = np.bincount(workload, weight[member], minlength=out.shape[1])
        out[member] = total / (mass + config.level)
    return out


def _gradients(layers: Layers, x: Matrix, goal: Matrix, weight: Matrix) -> list[tuple[Any, Any]]:
    """Of the weighted mean squared error of each member."""
    values = surrogate.forward(layers, x)
    error = (weight * (values[-1][..., 0] - goal) / len(x))[..., None]
    out = []
    for i in range(len(layers) - 1, -1, -1):
        given = np.broadcast_to(values[i], (len(goal), *values[i].shape[-2:]))
        out.append((given.transpose(0, 2, 1) @ error, error.sum(1, keepdims=True)))
        if i:
            error = (error @ layers[i][0].transpose(0, 2, 1)) * np.where(
                values[i] > 0, np.float32(1), surrogate.LEAK
            )
    return out[::-1]


def _adam(
    layers: Layers, slots: list[list[Matrix]], gradients: list[tuple[Any, Any]], rate: float,
    decay: float, step: int,
) -> None:  # fmt: skip
    """One step of Adam in place; weights decay, biases do not."""
    for i, pair in enumerate(gradients):
        for j, gradient in enumerate(pair):
            first, second = slots[2 * i][j], slots[2 * i + 1][j]
            first += (1 - BETAS[0]) * (gradient - first)
            second += (1 - BETAS[1]) * (gradient**2 - second)
            scale = np.sqrt(second / (1 - BETAS[1] ** step)) + EPSILON
            parameter = layers[i][j]
            if j == 0:
                parameter *= 1 - rate * decay
            parameter -= rate * (first / (1 - BETAS[0] ** step)) / scale
