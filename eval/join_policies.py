"""One policy of several: `python -m ptxflow.eval.join_policies FILE... --out FILE`.

Families share no parameter (`gfn/network.py`), so that they may be trained by processes of their
own, on GPUs of their own, and put together afterwards. A family that several files have is taken
from the last of them. What their headers say of definitions, distances and lengths of runs goes
along.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptxflow.eval.plots import with_kept
from ptxflow.eval.reward_source import title
from ptxflow.gfn.checkpoint import Checkpoint, CheckpointError, read, write
from ptxflow.gfn.network import NetworkConfig

LENGTH = ("steps", "trajectories_per_s")  # in a result: how long its run was


def runs_of(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How long each of the runs was that made a policy, the last one too."""
    result, train = about.get("result", {}), about.get("train", {})
    made = {"batch": train.get("batch")} | {k: result.get(k) for k in LENGTH}
    return [*about.get("before", []), *([made] if None not in made.values() else [])]


def joined_with(first: Checkpoint, second: Checkpoint) -> Checkpoint:
    """The families of both; ValueError where they are policies for different rewards."""
    told = [(c.config["settings"], c.config["train"]["tau"]) for c in (first, second)]
    targets = [f"{s['device']} with tau {tau}, by {title(s['reward'])}" for s, tau in told]
    if targets[0] != targets[1]:
        raise ValueError(f"these are for {targets[0]}, and for {targets[1]}")
    towers = {t.shape.name: t for c in (first, second) for t in c.network.towers}
    theirs = {f.name for f in second.network.families}
    tensors = {k: v for k, v in first.tensors.items() if k.split(".")[2] not in theirs}
    named = [*first.config["settings"]["definitions"], *second.config["settings"]["definitions"]]
    about = {
        "settings": {**first.config["settings"], "definitions": list(dict.fromkeys(named))},
        "train": first.config["train"],
        "result": with_kept(second.config["result"], first.config["result"]["families"]),
        "before": [*runs_of(first.config), *second.config.get("before", [])],
    }
    return Checkpoint(NetworkConfig(tuple(towers.values())), about, tensors | second.tensors)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="exported policies")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the policy of all")
    args = parser.parse_args(argv)
    try:
        first, *others = map(read, args.files)
        for other in others:
            first = joined_with(first, other)
        write(args.out, first)
    except (CheckpointError, ValueError, KeyError) as error:
        print(f"join_policies: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"join_policies: cannot write {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"wrote {args.out}: {', '.join(f.name for f in first.network.families)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
