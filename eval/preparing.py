"""The spaces of workloads, and what a reward says of them, over several processes.

With one process spaces alone are worked out; rewards then follow where they are needed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.compiler.device import Device
from ptxflow.env.reward import Remembered
from ptxflow.env.space import Codes, EmptySpace, Space, enumerate_space
from ptxflow.eval.training_set import Member

T = TypeVar("T")
Work = tuple[Sequence[Member], Device, Remembered]
_work: Work | None = None  # of the forked processes, which inherit what cannot be pickled


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spaces_of(
    members: Sequence[Member], device: Device, reward: Remembered, jobs: int = 1
) -> list[Space | None]:
    """The space of each workload; None for those that have no strategy on the device.

    With more than one of `jobs`, processes do it and ask `reward` for all of a space, too.
    """
    global _work
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        return [_space(member, device) for member in _shown(members, len(members))]
    _work, out = (members, device, reward), list[Space | None]()
    try:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            found = pool.imap(_enumerated, range(len(members)), chunksize=2)
            for member, made in zip(members, _shown(found, len(members)), strict=True):
                if made is None:
                    out.append(None)
                    continue
                codes, tflops = made
                space = Space(member.family, member.problem, device, codes)
                reward.hold(space, tflops)
                out.append(space)
    finally:
        _work = None
    return out


def _space(member: Member, device: Device) -> Space | None:
    try:
        return enumerate_space(member.family, member.problem, device)
    except EmptySpace:
        return None


def _shown(items: Iterable[T], total: int) -> Iterable[T]:
    shown: Iterable[T] = tqdm(items, "spaces", total, unit="workload", leave=False, disable=None)
    return shown


def _enumerated(number: int) -> tuple[Codes, NDArray[np.float32]] | None:
    assert _work is not None
    members, device, reward = _work
    space = _space(members[number], device)
    if space is None:
        return None
    return space.codes, reward.source.tflops(space, space.codes).astype(np.float32)
