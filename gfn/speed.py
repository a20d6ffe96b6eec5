"""Trajectories a second of training steps: ours beside a plain loop and beside stock torchgfn.

    python -m ptxflow.gfn.speed [--batch 1024] [--threads 1] [--rounds 5] [--device b200]
    python -m ptxflow.gfn.speed --compute cuda --batch 4096 16384 65536 --width 512 --layers 3

All three train the same network on the same workloads and masks with the same loss and optimiser.
The plain loop is what one writes by hand: each step evaluates the network for the whole batch.
Rounds alternate between the variants, so that load on the machine falls on all of them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gfn.gflownet import TBGFlowNet
from torch import Tensor

from ptxflow.command import Parser
from ptxflow.compiler.device import device
from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels import family
from ptxflow.env.reward import TAU
from ptxflow.env.space import Space, enumerate_space
from ptxflow.gfn.group import Group
from ptxflow.gfn.options import TrainConfig
from ptxflow.gfn.training import Trainer

SHAPES = ((4096, 4096), (2048, 4096), (6144, 4096), (5120, 2048))  # N, K
ROWS = (1, 64, 256, 1024, 4096)  # M
STEPS = 4  # of each variant in a round
Step = Callable[[Tensor], Tensor]


def gemm_spaces(device_name: str) -> list[Space]:
    """Twenty GEMM workloads of the public definitions' shapes."""
    return [
        enumerate_space(family("gemm"), _gemm(m, n, k), device(device_name))
        for n, k in SHAPES
        for m in ROWS
    ]


def _gemm(m: int, n: int, k: int) -> Problem:
    axes = (("M", m), ("N", n), ("K", k))
    traffic = 2.0 * (m * k + n * k + m * n)
    return Problem("gemm", f"gemm_n{n}_k{k}", axes, "float16", 2.0 * m * n * k, traffic)


def plain_loss(group: Group, trainer: Trainer, workload: Tensor, epsilon: float) -> Tensor:
    """The trajectory-balance loss of sampled strategies, by a vectorised loop without a library."""
    walks, policy = group.walks, trainer.network.of(group.walks.family)
    tau = torch.full(workload.shape, TAU, device=workload.device)
    features, node = walks.features[workload], workload
    conditions = policy.conditions(features, tau)
    state, log_pf = conditions.encoded, tau.new_zeros(len(workload))
    choices = []
    for depth in range(walks.depth):
        counts = walks.log_counts[depth][node]
        table = torch.log_softmax(policy.logits(depth, state, conditions.scale, counts), 1)
        with torch.no_grad():
            legal = ~counts.isneginf()
            uniform = legal / legal.sum(1, keepdim=True)
            probs = (1 - epsilon) * table.exp() + epsilon * uniform
            chosen = torch.multinomial(probs, 1, generator=trainer.generator).squeeze(1)
        log_pf = log_pf + table.gather(1, chosen[:, None]).squeeze(1)
        state = state + policy.tokens.index_select(0, policy.edges[depth] + chosen)
        node = walks.child[depth][node, chosen].long()
        choices.append(chosen)
    log_z = trainer.log_z.of(walks.family)(features, walks.log_leaves[workload], tau)
    log_rewards = group.worth(workload, torch.stack(choices, 1)) / tau
    loss: Tensor = (log_z + log_pf - log_rewards).square().mean()
    return loss


def variants(trainer: Trainer, epsilon: float) -> dict[str, Step]:
    """A loss of a batch of workload ids, by name."""
    group = trainer.groups[0]
    ours: Any = group.objective
    stock = TBGFlowNet(pf=ours.pf, pb=None, constant_pb=True, logZ=ours.logZ)

    def fast(workload: Tensor) -> Tensor:
        walk = group.walks.walk(
            trainer.network, workload, epsilon=epsilon, generator=trainer.generator
        )
        tau = torch.full(workload.shape, TAU, device=workload.device)
        log_rewards = group.worth(workload, walk.choices) / tau
        kept = group.env.trajectories(walk, workload, tau, log_rewards)
        loss: Tensor = ours.loss(group.env, kept, recalculate_all_logprobs=False)
        return loss

    def library(workload: Tensor) -> Tensor:
        tau = torch.full(workload.shape, TAU, device=workload.device)
        sampled = stock.sample_trajectories(
            group.env, len(workload), conditions=torch.stack([workload.to(tau), tau], 1),
            save_estimator_outputs=True, epsilon=epsilon,
        )  # fmt: skip
        return stock.loss(group.env, sampled, recalculate_all_logprobs=False)

    return {
        "walks (ours)": fast,
        "plain loop": lambda workload: plain_loss(group, trainer, workload, epsilon),
        "stock torchgfn": library,
    }


def measure(trainer: Trainer, batch: int, rounds: int) -> dict[str, float]:
    """Median trajectories a second of each variant's training step (sample, loss, update)."""
    group, compute = trainer.groups[0], trainer.compute
    wait = torch.cuda.synchronize if compute.type == "cuda" else lambda: None
    steps = variants(trainer, epsilon=0.02)
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 1):
        for name, loss_of in steps.items():
            wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                workload = torch.randint(
                    len(group.walks), (batch,), generator=trainer.generator, device=compute
                )
                trainer.update(loss_of(workload))
            wait()
            if round_:  # the first warms up
                rates[name].append(STEPS * batch / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.gfn.speed", description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1024])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="b200", help="whose spaces")
    parser.add_argument("--compute", choices=("cpu", "cuda"), default="cpu", help="what trains")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    compute = torch.device(args.compute, 0) if args.compute == "cuda" else torch.device("cpu")
    if args.compute == "cuda":
        torch.set_float32_matmul_precision("high")
    logging.getLogger("gfn.states").setLevel(logging.ERROR)  # noise on every stock step
    config = TrainConfig(tau=TAU, hidden=args.width, layers=args.layers)
    trainer = Trainer(gemm_spaces(args.device), config, total=1, compute=compute)
    print(f"{len(trainer.spaces)} GEMM workloads on {args.device}, a network of width {args.width} "
          f"and {args.layers} layers, by {args.compute}, {args.threads} threads: trajectories/s of "
          f"training steps (median of {args.rounds})")  # fmt: skip
    for batch in args.batch:
        rates = measure(trainer, batch, args.rounds)
        base = rates["plain loop"]
        for name, rate in rates.items():
            print(f"batch {batch:6}  {name:20} {rate:9.0f}   {rate / base:.2f} x the plain loop",
                  flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
