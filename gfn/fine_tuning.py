"""A policy after a few measurements of one workload: asked, measured, tuned, in seconds.

What is measured corrects what was believed of the whole space, and trajectory balance moves the
policy to the corrected target. A family that the policy has no part for gets a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptxflow.env.observed import Observed
from ptxflow.env.reward import Reward
from ptxflow.env.space import Codes, Space
from ptxflow.gfn.inference import Policy


@dataclass(frozen=True)
class TuneConfig:
    """How long and how boldly a policy is tuned."""

    steps: int = 100
    batch: int = 256
    rate: float = 1e-3  # of Adam
    sharpness: float = 2.0  # of the draws that are measured next


def propose(policy: Policy, space: Space, count: int, known: Codes, seed: int = 0) -> Codes:
    """Codes of up to `count` distinct strategies to measure next, none of `known`."""
    raise NotImplementedError


def fine_tune(
    policy: Policy,
    space: Space,
    measured: Observed | None,
    base: Reward | None = None,
    config: TuneConfig = TuneConfig(),
    seed: int = 0,
) -> Policy:
    """The policy tuned to one workload by what was measured of it; `policy` itself stays as it is.

    space     the workload's valid strategies (any shape; a family that the policy has no part for
              gets a new one)
    measured  seconds of the strategies that were measured so far, failures infinite; None or empty
              where nothing was (then `base` alone is the target)
    base      what is believed of the rest (ModelReward, SurrogateReward, ...); None: what the
              policy's own probabilities say of it
    """
    raise NotImplementedError
