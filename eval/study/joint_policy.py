"""One policy of several.

    ptxflow join-policies runs/attention.safetensors runs/moe.safetensors --out all.safetensors

Families share no parameter (`gfn/network.py`), so that they may be trained by processes of their
own, on GPUs of their own, and put together afterwards. A family that several files have is taken
from the last of them, and so is what rewarded it. What their headers say of definitions, distances
and lengths of runs goes along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptxflow.command import Parser, reports
from ptxflow.env import surrogate_file
from ptxflow.env.reward_source import ROOT, title
from ptxflow.eval.study.training_plots import with_kept
from ptxflow.gfn.checkpoint import Checkpoint, read, write
from ptxflow.gfn.network import NetworkConfig

LENGTH = ("steps", "trajectories_per_s")  # in a result: how long its run was


@dataclass(frozen=True)
class Trained:
    """What a policy was trained for: families, and the description of their reward."""

    families: frozenset[str]
    description: Mapping[str, Any]

    @staticmethod
    def of(policy: Checkpoint) -> "Trained":
        names = frozenset(f.name for f in policy.network.families)
        return Trained(names, policy.config["settings"]["reward"])


def runs_of(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How long each of the runs was that made a policy, the last one too."""
    result, train = about.get("result", {}), about.get("train", {})
    made = {"batch": train.get("batch")} | {k: result.get(k) for k in LENGTH}
    return [*about.get("before", []), *([made] if None not in made.values() else [])]


def joined_with(first: Checkpoint, second: Checkpoint) -> Checkpoint:
    """The families of both; ValueError where they are policies for different rewards."""
    made = [(c.config["settings"], c.config["train"]["tau"]) for c in (first, second)]
    targets = [f"{s['device']} with tau {tau}, by {s['reward']['source']}" for s, tau in made]
    if targets[0] != targets[1]:
        raise ValueError(f"these are for {targets[0]}, and for {targets[1]}")
    policies = {t.shape.name: t for c in (first, second) for t in c.network.policies}
    theirs = {f.name for f in second.network.families}
    reward = reward_of(*map(Trained.of, (first, second)))
    tensors = {k: v for k, v in first.tensors.items() if k.split(".")[2] not in theirs}
    named = [*first.config["settings"]["definitions"], *second.config["settings"]["definitions"]]
    about = {
        "settings": {
            **first.config["settings"],
            "definitions": list(dict.fromkeys(named)),
            "reward": reward,
        },
        "train": first.config["train"],
        "result": with_kept(second.config["result"], first.config["result"]["families"]),
        "before": [*runs_of(first.config), *second.config.get("before", [])],
    }
    return Checkpoint(NetworkConfig(tuple(policies.values())), about, tensors | second.tensors)


def reward_of(first: Trained, second: Trained) -> dict[str, Any]:
    """The description of the reward of two policies' families, those of both as in the second.

    A surrogate is of one family, and so may differ between two runs; ValueError where more does.
    """
    descriptions = [by.description for by in (first, second)]
    paths = [*dict.fromkeys(path for d in descriptions for path in d.get("surrogates", []))]
    rest = [
        {**d, "surrogates": [], "digests": {k: v for k, v in d.get("digests", {}).items()
                                            if k not in paths}}
        for d in descriptions
    ]  # fmt: skip
    if rest[0] != rest[1]:
        raise ValueError(
            f"these are for {title(descriptions[0])}, and for {title(descriptions[1])}"
        )
    digests = dict(rest[0]["digests"])
    for path in paths:
        name = surrogate_file.read(ROOT / path).family.name
        trained = [by for by in (second, first) if name in by.families]
        found = [by.description.get("digests", {}).get(path) for by in trained or (second, first)]
        if trained and found[0] is None:
            raise ValueError(f"{path}: {name} was trained without it")
        digests[path] = next(filter(None, found))
    return {**descriptions[0], **({"surrogates": paths} if paths else {}), "digests": digests}


@reports("join-policies", ValueError, KeyError)
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="exported policies")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the policy of all")
    args = parser.parse_args(argv)
    first, *others = map(read, args.files)
    for other in others:
        first = joined_with(first, other)
    write(args.out, first)
    print(f"wrote {args.out}: {', '.join(f.name for f in first.network.families)}")
    return 0
