"""What is known of a space before anything in it is measured: scores of its strategies.

Each function is given spaces, never a `Replay`, so that it cannot see the times it is judged on. A
surrogate is fitted without the workloads that it scores, a few at a time. A look-up knows what the
policy's reward said of the trained workload that is nearest.
"""

import functools
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.family import Problem
from ptxflow.compiler.processes import each
from ptxflow.env.observations import Observations
from ptxflow.env.reward import Reward
from ptxflow.env.space import Space, enumerate_space
from ptxflow.env.surrogate import Ensemble, matrix, strategy_features
from ptxflow.env.surrogate_fit import FitConfig, solve, table
from ptxflow.env.tasks.arguments import find_family
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.training_set import PRESETS, members
from ptxflow.eval.study.ranking import deal

Array = NDArray[np.float64]
FOLDS = 3  # fits of a family: each leaves out a third of the spaces judged


def look_up(space: Space, reward: Reward, trained: Sequence[Problem]) -> Array | None:
    """Scores [len(space)]: TFLOP/s by the reward on the nearest trained problem, least where a
    strategy is not valid there; None where none of the family was trained."""
    if not trained:
        return None
    nearest = min(trained, key=lambda p: distance(p, space.problem))
    there = enumerate_space(space.family, nearest, space.device)
    known = np.isin(space.codes, there.codes)
    scores = np.full(len(space), -np.inf)
    scores[known] = reward.tflops(there, space.codes[known])
    return scores


@functools.cache
def trained_problems(definitions: tuple[str, ...], family: str) -> list[Problem]:
    """Of a policy of these definitions the trained problems of a family."""
    chosen = [name for name in definitions if find_family(load(name)).name == family]
    return [m.problem for m in members(chosen, PRESETS["full"]) if m.kind == "trained"]


def distance(known: Problem, asked: Problem) -> tuple[bool, bool, float]:
    """How far a known problem is from the one asked for. One of the same definition is nearer than
    others, and one that is smaller along no axis than those that do not cover it, as tables of
    kernels round shapes up; then it is Euclidean, of the logarithms of axes."""
    there, here = dict(known.axes), dict(asked.axes)
    if there.keys() != here.keys():
        return True, True, math.inf
    smaller = any(there[a] < here[a] for a in here)
    far = math.dist(*([math.log(axes[a]) for a in here] for axes in (there, here)))
    return known.definition != asked.definition, smaller, far


def surrogate_scores(
    spaces: Sequence[Space], observed: Sequence[Observations], jobs: int = 1
) -> list[Array | None]:
    """Scores [len(space)] of each space by a surrogate fitted to what was observed of the other
    workloads of its family and device; None where nothing else was."""
    out: list[Array | None] = [None] * len(spaces)
    families = dict.fromkeys((s.family.name, s.device.name) for s in spaces)
    tasks = []
    for place in families:
        own = [i for i, s in enumerate(spaces) if (s.family.name, s.device.name) == place]
        held = [o.succeeded for o in observed if (o.family.name, o.device.name) == place]
        held = [o for o in held if len(o)]
        for fold in deal(len(own), FOLDS):
            judged = [own[i] for i in fold]
            problems = [spaces[i].problem for i in judged]
            rest = [o for o in held if o.problem not in problems]
            if rest:
                tasks.append((judged, table(rest, FitConfig())))
    fit = partial(solve, config=FitConfig())
    fits = each(fit, [rows for _, rows in tasks], jobs, "fit surrogates", "fit")
    for (judged, rows), ensemble in zip(tasks, fits, strict=True):
        for i in judged:
            out[i] = _scores(spaces[i], ensemble, rows.names)
    return out


def _scores(space: Space, ensemble: Ensemble, names: Sequence[str]) -> Array:
    """Pessimistic speed, as rewards use it."""
    columns, modelled = strategy_features(space.family, space.fields(), space.problem, space.device)
    mean, std = ensemble.correction(matrix(columns, names))
    return np.asarray(-(np.log(modelled) + mean + FitConfig().kappa * std), np.float64)
