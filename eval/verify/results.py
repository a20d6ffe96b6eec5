"""Results of `verify` and `mutation` as small JSON files: which command, on what, and the counts.

A file is written whole or not at all; `eval.verify.page` renders them.
"""

import argparse
import hashlib
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ptxflow import __version__
from ptxflow.compiler.backend import cache, ptxas
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.files import write_whole
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch
from ptxflow.env.tasks.arguments import UsageError, find_device

Summary = dict[str, Any]
KINDS = (
    "verify",
    "mutation",
    "mutate-values",
    "verify-real",
    "survey",
)  # the commands whose results these are


def origin(kind: str, argv: Sequence[str], device: Device, jobs: int) -> Summary:
    """What made a result: the command line less its --out, the versions, the device."""
    places = [i for i, word in enumerate(argv) if word in ("--out", "--log")]
    asked = [word for i, word in enumerate(argv) if i not in places and i - 1 not in places]
    return {
        "kind": kind,
        "command": shlex.join(["ptxflow", kind, *asked]),
        "device": device.name,
        "arch": device.arch,
        "versions": {
            "ptxflow": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "ptxas": ptxas.version(),
        },
        "processes": jobs,
    }


def spread(seconds: Iterable[float]) -> dict[str, float] | None:
    """Median and maximum of some times in seconds; None of none."""
    times = list(seconds)
    return {"median": round(median(times), 3), "max": round(max(times), 3)} if times else None


def median_and_max(seconds: Mapping[str, float] | None) -> str:
    """A spread as `median (max)`; of joined results the maximum alone is known."""
    if not seconds:
        return "-"
    middle = f"{seconds['median']:.2f}" if "median" in seconds else "-"
    return f"{middle} ({seconds['max']:.2f})"


def kernel_digest(problem: Problem, strategy: Strategy, device: Device) -> str:
    """Of what a GPU would run: the machine code that ptxas makes of the kernel, and its launch.

    Builders may say the same in other words: what was found of one text holds for another that
    ends in the same machine code, launched alike. PtxasError where there is none.
    """
    maker = family(strategy.family)
    ptx = write(maker.build(problem, strategy, device), device)
    return machine_digest(
        cache.assemble(ptx, device.arch).cubin, maker.launch(problem, strategy, device)
    )


def machine_digest(cubin: bytes, launch: Launch) -> str:
    """Of machine code and how it is launched: 32 hexadecimal digits."""
    return cache.key("machine", cubin, json.dumps(launch.to_json(), sort_keys=True))[:32]


def kernels_digest(kernels: Iterable[str]) -> str:
    """Of the kernels that a row is of, by the digests of their machine code: another one than the
    committed says that kernels have changed since."""
    return hashlib.sha256(" ".join(sorted(kernels)).encode()).hexdigest()[:16]


def name_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Log:
    """What a long command found, a JSON line each by its digest: run anew, it goes on from there.

    Of one state of the validator and the emulator; without a path, nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.path, self.held = path, dict[str, Summary]()
        for line in path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ():
            try:
                row = json.loads(line)
                self.held[row["id"]] = row["found"]
            except (ValueError, TypeError, KeyError):
                continue  # a line that was cut off counts for nothing

    def __contains__(self, of: Sequence[str]) -> bool:
        return name_of(*of) in self.held

    def get(self, of: Sequence[str], find: Callable[[], Summary]) -> Summary:
        """What is in the log of these texts, or else is found now."""
        name = name_of(*of)
        if name not in self.held:
            self.held[name] = find()
            append(self.path, {"id": name, "found": self.held[name]})
        return self.held[name]


def append(path: Path | None, row: Summary) -> None:
    """One write: lines of several processes do not mix. A line begins with what ends another."""
    if path is not None:
        with path.open("ab", buffering=0) as file:
            file.write(f"\n{json.dumps(row)}".encode())


def make(
    kind: str, args: argparse.Namespace, argv: Sequence[str], work: Callable[[Device], Summary]
) -> Summary:
    """What `work` finds for --device, with its origin and its seconds; written to --out, too.

    UsageError, before any work, for an unknown device or an --out that cannot be written.
    """
    began = time.monotonic()
    if args.out is not None:
        writable(args.out)
    device = find_device(args.device)
    found = work(device)
    summary = origin(kind, argv, device, args.jobs)
    summary |= {"seconds": round(time.monotonic() - began, 1), **found}
    if args.out is not None:
        write_whole(args.out, json.dumps(summary, indent=1) + "\n")
    return summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `make` reads."""
    add = parser.add_argument
    add("--device", default="b200", help="b200, h200 or h100 (default: b200)")
    add("--out", type=Path, metavar="FILE.json", help="write the result there, too")


def add_log(parser: argparse.ArgumentParser) -> None:
    """Of the commands that go on where they stopped."""
    parser.add_argument("--log", type=Path, metavar="FILE.jsonl",
        help="keep what was found, and go on from that")  # fmt: skip


def writable(path: Path) -> None:
    """UsageError unless a file can be written there."""
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--out {path} cannot be written: it must be a file in a folder that is")


def read(path: Path) -> Summary:
    """A result that `make` wrote; UsageError in one line where the file holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("kind") not in KINDS:
        raise UsageError(f"{path} is no result of {', '.join(KINDS)}")
    return data
