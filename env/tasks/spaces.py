"""The spaces of workloads, and what a reward says of them, over several processes.

With one process spaces alone are worked out; rewards then follow where they are needed.
"""

import multiprocessing
import os
from collections.abc import Collection, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ptxflow.compiler.device import Device
from ptxflow.compiler.processes import begin
from ptxflow.env.relation import Layer, RelationSpace, relate
from ptxflow.env.reward import CachedReward
from ptxflow.env.space import Codes, EmptySpace, Space, enumerate_space
from ptxflow.env.tasks.training_set import Member

T = TypeVar("T")
Work = tuple[Sequence[Member], Device, CachedReward, Collection[int]]
_work: Work | None = None  # of the forked processes, which inherit what cannot be pickled


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def spaces_of(
    members: Sequence[Member],
    device: Device,
    reward: CachedReward,
    jobs: int = 1,
    listed: Collection[int] | None = None,
) -> list[Space | RelationSpace | None]:
    """The space of each workload; None for those that have no strategy on the device.

    Those of the places `listed` (all) are listed, the others are not. With more than one of `jobs`,
    processes do it and ask `reward` for all of what is listed, too. They end with this process,
    however it ends.
    """
    global _work
    listed = range(len(members)) if listed is None else frozenset(listed)
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        rows = enumerate(_shown(members, len(members)))
        return [_space(member, device, i in listed) for i, member in rows]
    _work, out = (members, device, reward, listed), list[Space | RelationSpace | None]()
    try:
        watched, held = multiprocessing.Pipe(duplex=False)
        with multiprocessing.get_context("fork").Pool(jobs, _begin, (watched, held)) as pool:
            found = pool.imap(_enumerated, range(len(members)), chunksize=2)
            for member, made in zip(members, _shown(found, len(members)), strict=True):
                if made is None:
                    out.append(None)
                    continue
                if isinstance(made[0], Layer):
                    out.append(RelationSpace(member.family, member.problem, device, made))
                    continue
                codes, tflops = made
                space = Space(member.family, member.problem, device, codes)
                reward.store(space, tflops)
                out.append(space)
    finally:
        _work = None
    return out


def _begin(watched: Connection, held: Connection) -> None:
    """Of a forked process: it ends when no process holds the other end of the pipe any more."""
    held.close()
    begin(watched)


def _space(member: Member, device: Device, listed: bool) -> Space | RelationSpace | None:
    try:
        make = enumerate_space if listed else relate
        return make(member.family, member.problem, device)
    except EmptySpace:
        return None


def _shown(items: Iterable[T], total: int) -> Iterable[T]:
    shown: Iterable[T] = tqdm(items, "spaces", total, unit="workload", leave=False, disable=None)
    return shown


def _enumerated(number: int) -> tuple[Codes, NDArray[np.float32]] | tuple[Layer, ...] | None:
    assert _work is not None
    members, device, reward, listed = _work
    space = _space(members[number], device, number in listed)
    if isinstance(space, RelationSpace):
        return space.layers
    if space is None:
        return None
    return space.codes, reward.source.tflops(space, space.codes).astype(np.float32)
