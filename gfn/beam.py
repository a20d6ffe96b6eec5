"""k distinct strategies of a policy, drawn step by step: Gumbel top-k over prefixes.

Stochastic beam search (Kool, van Hoof, Welling 2019). Every strategy has the key log-probability
plus Gumbel noise, and the k largest are draws without replacement. A prefix has the largest key
below it, which is drawn first; those of its children are drawn given their largest. So k prefixes
are kept at each depth, and no strategy but the k is scored. PyTorch only.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ptxflow.env.reward import TAU
from ptxflow.gfn.network import PolicyNetwork
from ptxflow.gfn.walks import Walks


@dataclass(frozen=True)
class Drawn:
    """k distinct strategies in the order in which they were drawn.

    choices    int64 [k, F]
    log_probs  float64 [k]  of the policy itself: sharpness does not enter
    """

    choices: Tensor
    log_probs: Tensor


@torch.no_grad()
def draw_distinct(
    walks: Walks, network: PolicyNetwork, workload: int, k: int, *, sharpness: float = 1.0,
    rng: np.random.Generator, tau: float = TAU,
) -> Drawn:  # fmt: skip
    """min(k, all) distinct strategies of a workload at a temperature, drawn one after the other.

    Each has the probability of a walk, renormalised over what is left. In a walk the policy's
    probabilities of each step are taken to the power of `sharpness` and renormalised: 1 are the
    policy's own draws, 0 is uniform over the legal choices of each step.
    """
    one = torch.tensor([workload], device=walks.device)
    conditions = walks.conditions(network, one, torch.full((1,), tau, device=walks.device))
    node = torch.tensor([workload], device=walks.device)
    choices = node.new_zeros(1, walks.depth)
    exact, scaled, largest = torch.zeros(3, 1, dtype=torch.float64, device=walks.device)
    for depth, size in enumerate(walks.sizes):
        which = torch.zeros_like(node)
        steps = walks.step_log_probs(network, depth, node, choices, conditions, which).double()
        legal = steps > -torch.inf
        sharp = (sharpness * steps.masked_fill(~legal, 0)).masked_fill(~legal, -torch.inf)
        below = scaled[:, None] + torch.log_softmax(sharp, 1)
        noise = torch.from_numpy(rng.gumbel(size=below.shape)).to(below)
        keys = _given_largest(below + noise, largest)
        kept = torch.topk(keys.flatten(), min(k, int(legal.sum()))).indices
        row, choice = kept // size, kept % size
        choices = choices[row]
        choices[:, depth] = choice
        exact = exact[row] + steps[row, choice]
        scaled, largest = below[row, choice], keys[row, choice]
        node = walks.child[depth][node[row], choice].long()
    return Drawn(choices, exact)


def _given_largest(keys: Tensor, largest: Tensor) -> Tensor:
    """Gumbel variables [n, children] moved to where they are, given the largest of each row [n].

    Kool et al., appendix B.3: exact, and stable where a difference of exponentials is not.
    """
    top = keys.max(1, keepdim=True).values
    gap = largest[:, None] - keys + torch.log1p(-torch.exp(keys - top))
    return largest[:, None] - gap.clamp(min=0) - torch.log1p(torch.exp(-gap.abs()))
