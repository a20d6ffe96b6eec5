"""Which measurements to ask for where a family has none on a device, replayed from recorded ones.

What campaigns measured at trained workloads is a pool of unknown times. Beginning with the analytic
model, an acquisition picks a batch, its times are told, and the surrogate is fitted anew to all
that were. It is judged on sub-spaces measured whole, of other workloads: what the best of the first
8 in its order loses; rows say, too, what 8 draws from its exact target squared lose, as of a policy
without error.

    python -m ptxflow.eval.study.acquisition --out rows.jsonl --into gfn/README.md
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.command import Parser, reports
from ptxflow.compiler.device import DEVICES
from ptxflow.env.cost import attainable_tflops
from ptxflow.env.measurements import MeasurementError, read_lines
from ptxflow.env.observations import Observations, read_observed
from ptxflow.env.reward import TAU
from ptxflow.env.surrogate import Ensemble, Matrix, forward, matrix, standardise, strategy_features
from ptxflow.env.surrogate_fit import FitConfig, Table, solve, weights
from ptxflow.eval.bench.markdown import markdown, publish
from ptxflow.eval.study.metrics import ends, plain
from ptxflow.eval.study.search.optimisers import Lfbo
from ptxflow.eval.study.search.replay import LEAST, read_replays
from ptxflow.eval.study.tables import percent
from ptxflow.gfn.inference import SHARPNESS

Array = NDArray[np.float64]
Places = NDArray[np.int64]
K, DRAWS = 8, 64
BETA = 1.0  # deviations of optimism
SHARES = [2 ** (k / 3) / 32 for k in range(13)]  # of the pool, after each round
CONFIG = FitConfig(steps=600, batch=128)
WHOLE = "whole pool"
GOAL, MARGIN = 0.02, 0.005  # a loss, or so much more than with the whole pool's
STAY = 3  # rounds on end
SHOWN = SHARES[3], SHARES[6], SHARES[9]
BOUND = 0.05  # of the whole pool's loss: a family above it tells nothing of acquisitions
FOLDER = Path(__file__).resolve().parents[1] / "measurements"
OTHERS = {"mla_prefill": "h200-mla-prefill*"}  # its kernels have changed since the rest


@dataclass(frozen=True)
class Rows:
    """What is known before measuring of strategies [n] of several workloads: features [n, D],
    modelled log seconds, the workload's number, log R times seconds."""

    names: tuple[str, ...]
    x: Matrix
    modelled: Array
    workload: Places
    unit: Array

    @staticmethod
    def of(observed: Sequence[Observations], names: tuple[str, ...] = ()) -> "Rows":
        parts = [strategy_features(o.family, o.fields(), o.problem, o.device) for o in observed]
        names = names or tuple(dict.fromkeys(n for columns, _ in parts for n in columns))
        x = np.concatenate([matrix(columns, names) for columns, _ in parts])
        modelled = np.log(np.concatenate([modelled for _, modelled in parts]))
        workload = np.repeat(np.arange(len(observed)), [len(o) for o in observed])
        attainable = [attainable_tflops(o.problem, o.device) for o in observed]
        flops = np.array([o.problem.flops for o in observed]) / 1e12
        return Rows(names, x, modelled, workload, (flops / (TAU * np.array(attainable)))[workload])

    def least(self, values: Array) -> Array:
        """[n] the least of values [n] in the same workload."""
        out = np.full(int(self.workload.max()) + 1, np.inf)
        np.minimum.at(out, self.workload, values)
        return out[self.workload]

    def fit(self, told: Places, seconds: Array, config: FitConfig) -> Ensemble | None:
        """Fitted to what was told [m] and succeeded; None where nothing did."""
        order = np.argsort(told)
        told, seconds = (a[order][np.isfinite(seconds[order])] for a in (told, seconds))
        if not len(told):
            return None
        workload = self.workload[told]
        parts = [weights(seconds[workload == w], config) for w in np.unique(workload)]
        weight = np.concatenate(parts).astype(np.float32)
        residual = (np.log(seconds) - self.modelled[told]).astype(np.float32)
        rows = Table(self.names, self.x[told], residual, weight / weight.mean(), workload)
        return solve(rows, config)


@dataclass(frozen=True)
class State:
    """What an acquisition may know. Of all rows: log seconds, mean and deviation [n], and what each
    member says [E, n]; the places of those told and their seconds [m]; which are free."""

    rows: Rows
    mean: Array
    std: Array
    members: Array
    told: Places
    seconds: Array
    free: Places
    rng: np.random.Generator

    @staticmethod
    def of(rows: Rows, fitted: Ensemble | None, told: Places, seconds: Array,
           rng: np.random.Generator) -> "State":  # fmt: skip
        mean, std, members = rows.modelled, np.zeros(len(rows.x)), rows.modelled[None]
        if fitted is not None:
            inputs = standardise(rows.x, fitted.center, fitted.gain)
            outputs = fitted.trust(inputs) * forward(fitted.layers, inputs)[-1][..., 0]
            members = rows.modelled + fitted.common(inputs) + outputs
            correction, std = fitted.correction(rows.x)
            mean = rows.modelled + correction
        free = np.setdiff1d(np.arange(len(rows.x)), told)
        return State(rows, mean, std, members, told, seconds, free, rng)

    def log_target(self, kappa: float = CONFIG.kappa) -> Array:
        """[n] log-probabilities of exp(TFLOPS / T) within each workload."""
        logs = self.rows.unit * np.exp(-self.mean - kappa * self.std)
        logs += self.rows.least(-logs)
        total = np.bincount(self.rows.workload, np.exp(logs))
        return np.asarray(logs - np.log(total)[self.rows.workload])

    def best(self, scores: Array, count: int) -> Places:
        """The free places of the highest scores [n], equals in random order."""
        order = np.lexsort((self.rng.random(len(self.free)), -scores[self.free]))
        return self.free[order[:count]]


Acquisition = Callable[[State, int], Places]


def drawn(kappa: float) -> Acquisition:
    """Draws from the target without replacement, by Gumbel's trick: what a policy would sample."""
    return lambda s, n: s.best(s.log_target(kappa) + s.rng.gumbel(size=len(s.mean)), n)


def upper(beta: float) -> Acquisition:
    """How far, with optimism, a strategy is ahead of the mean of its workload's best."""
    return lambda s, n: s.best(s.rows.least(s.mean) - (s.mean - beta * s.std), n)


def thompson(state: State, count: int) -> Places:
    """Each pick is the best by a member drawn at random."""
    ahead = np.array([state.rows.least(m) - m for m in state.members])
    picked = list[int]()
    for member in state.rng.integers(len(ahead), size=count):
        picked += state.best(ahead[member], 1).tolist()
        ahead[:, picked[-1]] = -np.inf
    return np.array(picked)


def dpp(state: State, count: int) -> Places:
    """Greedy maximum of a determinantal point process: the target as quality, and a Gaussian kernel
    of standardised features."""
    x = state.rows.x.astype(np.float64)
    z = ((x - x.mean(0)) / np.maximum(x.std(0), 0.05))[state.free]
    width, quality = 2 * z.var(0).sum() + 1e-9, state.log_target()[state.free]
    left, basis, picked = np.ones(len(z)), np.zeros((count, len(z))), list[int]()
    for i in range(count):
        scores = quality + np.log(np.maximum(left, 1e-9))
        scores[picked] = -np.inf
        picked.append(at := int(np.argmax(scores)))
        kernel = np.exp(-((z - z[at]) ** 2).sum(1) / width)
        basis[i] = (kernel - basis[:i, at] @ basis[:i]) / np.sqrt(max(left[at], 1e-9))
        left -= basis[i] ** 2
    return state.free[picked]


def lfbo(state: State, count: int) -> Places:
    """Those that a random forest takes to be fast for their workload; at first at random."""
    x, scores = state.rows.x, np.zeros(len(state.mean))
    if len(state.told):
        behind = np.log(state.seconds) - state.rows.least(state.mean)[state.told]
        behind = np.minimum(behind, behind[np.isfinite(behind)].max(initial=0.0))
        scores[state.free] = Lfbo.hope(x[state.told], behind, x[state.free], state.rng)
    return state.best(scores, count)


ACQUISITIONS: dict[str, Acquisition] = {
    "target": drawn(CONFIG.kappa), "optimistic target": drawn(-BETA), "top-k": upper(0.0),
    "UCB": upper(BETA), "Thompson": thompson, "DPP": dpp, "LFBO": lfbo,
    "uniform": lambda s, n: s.rng.choice(s.free, n, replace=False),
}  # fmt: skip


def losses(state: State, seconds: Array) -> Array:
    """[workloads, 2] log of the best of K over the optimum: ranked and drawn."""
    logs, out = SHARPNESS * state.log_target(), []
    for w in np.unique(state.rows.workload):
        own = state.rows.workload == w
        times = np.minimum(seconds[own], seconds[own & np.isfinite(seconds)].max())
        noise = np.vstack([np.zeros(own.sum()), state.rng.gumbel(size=(DRAWS, own.sum()))])
        order = np.argsort(-(logs[own] + noise), axis=1, kind="stable")[:, :K]
        lost = np.log(times[order].min(1) / times.min())
        out.append([lost[0], lost[1:].mean()])
    return np.array(out)


def rounds(
    pool: Rows, seconds: Array, pick: Acquisition, sizes: Sequence[int], seed: int
) -> Iterator[tuple[Places, Ensemble | None]]:
    """The places that were told after so many measurements, in their order, and what is fitted."""
    rng, told, fitted = np.random.default_rng(seed), np.zeros(0, np.int64), None
    for size in sizes:
        if size > len(told):
            state = State.of(pool, fitted, told, seconds[told], rng)
            told = np.append(told, pick(state, size - len(told)))
            fitted = pool.fit(told, seconds[told], replace(CONFIG, seed=seed))
        yield told, fitted


def play(found: Sequence[Observations], whole: Sequence[Observations], seeds: int) -> Iterator[Any]:
    """A row a run; the last ones, of no acquisition, are fitted to the whole pool."""
    pool = Rows.of(found)
    judged, nothing = Rows.of(whole, pool.names), np.zeros(0, np.int64)
    seconds, times = (np.concatenate([o.seconds for o in some]) for some in (found, whole))
    n = len(seconds)
    sizes = [0, *dict.fromkeys(max(4, round(n * share)) for share in SHARES)]
    plans = [(name, pick, sizes) for name, pick in ACQUISITIONS.items()]
    for name, pick, asked in [*plans, (WHOLE, ACQUISITIONS["uniform"], [n])]:
        for seed in range(seeds):
            lost = [
                losses(State.of(judged, fitted, nothing, times[:0], np.random.default_rng(seed)),
                       times)
                for _, fitted in rounds(pool, seconds, pick, asked, seed)
            ]  # fmt: skip
            yield {"family": found[0].family.name, "acquisition": name, "seed": seed, "pool": n,
                   "measured": asked, "lost": np.round(lost, 5).tolist()}  # fmt: skip


def data(families: str | None) -> Iterator[tuple[list[Observations], list[Observations]]]:
    """Of each family that has both: its pool, and the spaces that it is judged on."""
    device = DEVICES["h200"]
    replays = read_replays([*FOLDER.glob("h200-*held-out*.xz"), *FOLDER.glob("h200-*trained*.xz")])
    whole = [Observations(r.space.family, r.space.problem, device, r.space.codes, r.seconds)
             for r in replays]  # fmt: skip
    known = {o.problem for o in whole}
    for family in dict.fromkeys(o.family.name for o in whole):
        files = sorted(FOLDER.glob(OTHERS.get(family, "h200-*trained*.xz")))
        held = [o for o in read_observed(files, device)[0] if o.family.name == family]
        found = [o for o in held if o.problem not in known]
        if sum(map(len, found)) >= LEAST and family in (families or family).split(","):
            yield found, [o for o in whole if o.family.name == family]


def curves(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Array]:
    """By family: [rounds, workloads] log losses of an acquisition, means over seeds."""
    held: dict[str, list[Any]] = {}
    for row in rows:
        if row["acquisition"] == name:
            held.setdefault(row["family"], []).append(row["lost"])
    return {family: np.mean(lost, 0)[:, :, 0] for family, lost in held.items()}


def needed(lost: Array, at: Sequence[float], goal: float) -> float:
    """Where losses [rounds] begin to be within a goal for STAY rounds; infinite: nowhere."""
    return next((at[i] for i in range(len(lost)) if (lost[i : i + STAY] <= goal).all()), np.inf)


def cells(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    """What an acquisition needs of each family; then all families alike, but for those that end
    above BOUND: the share of a pool that is needed, and what shares lose, with intervals over
    workloads."""
    whole = {f: float(np.expm1(c.mean())) for f, c in curves(rows, WHOLE).items()}
    found, rng, at = curves(rows, name), np.random.default_rng(0), [0.0, *SHARES]
    own = {row["family"]: row["measured"] for row in rows if row["acquisition"] == name}
    goals = {f: max(GOAL, w + MARGIN) if w <= BOUND else GOAL for f, w in whole.items()}
    counts = [needed(np.expm1(c.mean(1)), own[f], goals[f]) for f, c in found.items()]
    kept = [c for f, c in found.items() if whole[f] <= BOUND]
    drawn = [rng.multinomial(n, np.ones(n) / n, 1000).T / n for n in (c.shape[1] for c in kept)]
    again = np.mean([np.expm1(c @ d) for c, d in zip(kept, drawn, strict=True)], 0)
    mean = np.mean([np.expm1(c.mean(1)) for c in kept], 0)
    told = [(needed(mean, at, GOAL), *ends(np.array([needed(c, at, GOAL) for c in again.T])))]
    told += [(mean[i], *ends(again[i])) for i in map(at.index, SHOWN)]
    return [*(f"{n:,}" if np.isfinite(n) else "-" for n in counts),
            *("{} ({} to {})".format(*map(percent, map(plain, row))) for row in told)]  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row an acquisition; before them the pools, and what model and whole pool lose."""
    pools = {row["family"]: row["pool"] for row in rows}
    lines = [["a quarter of the pool", *(f"{n // 4:,}" for n in pools.values())]]
    for who, name, i in (("the model", "uniform", 0), (f"the {WHOLE}", WHOLE, -1)):
        ends_at = [np.expm1(c[i].mean()) for c in curves(rows, name).values()]
        lines.append([f"{who} loses", *map(percent, ends_at)])
    lines = [line + [""] * (1 + len(SHOWN)) for line in lines]
    lines += [[name, *cells(rows, name)] for name in ACQUISITIONS]
    shown = (f"loss after 1/{1 / share:.0f}" for share in SHOWN)
    return markdown(("measurements needed", *pools, "of all pools", *shown), lines)


@reports("acquisition", MeasurementError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.eval.study.acquisition", description=__doc__)
    parser.add_argument("--rows", type=Path, help="played before, by --out; instead")
    parser.add_argument("--families", help="default: all that have a pool and a judge")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON line each run")
    parser.add_argument("--into", type=Path, metavar="PAGE.md", help="its table acquisition")
    args = parser.parse_args(argv)
    rows = [row for _, row in read_lines(args.rows)] if args.rows else list[Any]()
    for found, whole in () if args.rows else data(args.families):
        for row in tqdm(play(found, whole, args.seeds), desc=found[0].family.name, unit="run"):
            rows.append(row)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    publish({"acquisition": table(rows)}, args.into)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
