"""What each part of training is worth: exact distances with and without it, seed by seed.

    python -m ptxflow.gfn.ablation [--families gemm,gqa_decode,moe] [--variants all,plain] [--steps
    N] [--seeds 3] [--jobs N] [--limit SECONDS] [--out FILE]

Each run trains one family on a few workloads, from which no strategy is listed but to judge; of a
wide space, of 10^8 strategies, the part with the listed space's choices and tile_k 64 is, given
which a policy and its target are compared. All variants are of trajectory balance but those named
by another objective. Prints the mean total variation distance at four temperatures, with the
standard deviation over seeds, and how far the learned log Z is from the exact one.
"""

import json
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ptxflow.command import Parser
from ptxflow.compiler.processes import each

TEMPERATURES = (0.005, 0.01, 0.02, 0.1)
WORKLOADS = {  # definitions, and values of their axes or sizes
    "gemm": (("gemm_n4096_k4096", "gemm_n2048_k4096", "gemm_n6144_k4096"),
             ({"M": 64}, {"M": 1024})),
    "gemm wide": (("gemm_n4096_k4096",), ({"M": 64}, {"M": 1063})),
    "gqa_decode": (("gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged_decode_h32_kv4_d128_ps64"),
                   ({"sequences": 16, "length": 1024}, {"sequences": 64, "length": 256},
                    {"sequences": 1, "length": 8192})),
    "moe": (("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048",),
            ({"seq_len": 16}, {"seq_len": 64}, {"seq_len": 1024})),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "no local search": {"rebuilt": 0.0},
    "no replay": {"replayed": 0.0},
    "neither": {"rebuilt": 0.0, "replayed": 0.0},
    "one temperature": {"temperatures": (0.02, 0.02)},
    "plain": {"rebuilt": 0.0, "replayed": 0.0, "temperatures": None},
    "variance": {"objective": "variance"},
    "subtb": {"objective": "subtb"},
    "db": {"objective": "db"},
}
Job = tuple[str, str, int]  # family, variant, seed


def workloads(family: str, device: str) -> list[Any]:
    """The relations of a family's workloads."""
    from ptxflow.compiler.device import device as known
    from ptxflow.env.relation import relate
    from ptxflow.env.tasks.arguments import find_problem
    from ptxflow.env.tasks.definition import load
    from ptxflow.env.tasks.sequences import axes_of

    names, sizes = WORKLOADS[family]
    wide = family.endswith(" wide")
    found = [find_problem(d, axes_of(d, s)) for d in map(load, names) for s in sizes]
    return [relate(f.wide if wide else f, problem, known(device)) for f, problem in found]


def run(
    steps: int, device: str, options: dict[str, Any], given: tuple[Job, float]
) -> dict[str, Any]:
    """One training, until a time, as a row: what it was, and how far it is from its targets in the
    end."""
    import torch

    from ptxflow.compiler.kernels import family as listed_family
    from ptxflow.gfn.options import TrainConfig
    from ptxflow.gfn.targets import distance_within
    from ptxflow.gfn.training import Trainer

    torch.set_num_threads(1)
    (family, variant, seed), until = given
    spaces = workloads(family, device)
    own: dict[str, Any] = {"batch": 512, "stages": 1, "warmup": 20, "objective": "tb"}
    own |= options | VARIANTS[variant]
    trainer = Trainer(spaces, TrainConfig(**{"tau": 0.02, "seed": seed, **own}), steps)
    begin = time.time()
    while trainer.step < trainer.total:
        trainer.advance()
        spent, whole = time.time() - begin, max(until - begin, 1.0)
        if spent * steps > trainer.step * whole:  # as many as fit, so that rates fall to their end
            trainer.total = max(trainer.step, int(trainer.step * whole / spent))
    seconds = time.time() - begin
    least, most = trainer.config.temperatures or (trainer.config.tau,) * 2
    taus = [t for t in TEMPERATURES if least <= t <= most]
    if family.endswith(" wide"):
        network, model = trainer.network, trainer.reward
        held = {d.name: [*d.choices] for d in listed_family(spaces[0].family.name).decisions}
        parts = [s.plain.given({**held, "tile_k": [64]}) for s in spaces]
        pairs = list(zip(spaces, parts, strict=True))
        found = {str(t): [distance_within(network, *p, model, t) for p in pairs] for t in taus}
    else:
        found = {str(t): trainer.distances(range(len(spaces)), t) for t in taus}
    row = {"family": family, "variant": variant, "seed": seed, "steps": trainer.step}
    row |= {"planned": steps, "seconds": seconds, "distances": found}
    if not family.endswith(" wide"):
        row["log_z"] = [trainer.log_z_error(i) for i in range(len(spaces))]
    return row


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each family and variant: means over workloads, then over seeds."""
    head = "  ".join(f"tau {t:<11}" for t in TEMPERATURES)
    lines = [f"{'family':12}{'variant':18}seeds  steps  {head}log Z off, nats"]
    for family, variant in dict.fromkeys((r["family"], r["variant"]) for r in rows):
        own = [r for r in rows if (r["family"], r["variant"]) == (family, variant)]
        cells = []
        for tau in map(str, TEMPERATURES):
            means = [statistics.mean(r["distances"][tau]) for r in own if tau in r["distances"]]
            spread = statistics.stdev(means) if len(means) > 1 else 0.0
            cells.append(f"{statistics.mean(means):.3f} +- {spread:.3f}" if means else "-")
        off = [abs(x) for r in own for x in r.get("log_z", ())]
        last = f"{statistics.mean(off):.3f}" if off else "-"
        steps = min(r["steps"] for r in own)
        shown = "  ".join(f"{c:15}" for c in cells)
        lines.append(f"{family:12}{variant:18}{len(own):5}  {steps:5}  {shown}{last}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m ptxflow.gfn.ablation", description=__doc__)
    parser.add_argument("--families", default=",".join(WORKLOADS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes, a thread each")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, for all; what has not "
                        "ended by then is judged as it is")  # fmt: skip
    parser.add_argument("--device", default="h200")
    parser.add_argument("--train", type=json.loads, default={}, help="JSON, fields of TrainConfig")
    parser.add_argument("--out", type=Path, help="a JSON line each run")
    args = parser.parse_args(argv)
    named = args.families.split(","), args.variants.split(",")
    jobs = [(f, v, s) for s in range(args.seeds) for f in named[0] for v in named[1]]
    waves = -(-len(jobs) // args.jobs)
    begin, rows = time.time(), []
    ends = [begin + args.limit * (i // args.jobs + 1) / waves for i in range(len(jobs))]
    work = partial(run, args.steps, args.device, args.train)
    for row in each(work, list(zip(jobs, ends, strict=True)), args.jobs, "train", "run"):
        rows.append(row)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
