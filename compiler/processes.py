"""Worker processes that end with the process that started them, however that one ends."""

import gc
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from typing import TypeVar

from tqdm import tqdm

#: thresholds of garbage collection: kernels are trees that live long, and looking for garbage
#: among them took a fifth of an emulator's time
SELDOM = 50_000, 50, 50
J = TypeVar("J")
T = TypeVar("T")


class Processes(ProcessPoolExecutor):
    """An executor of `count` spawned processes, which an interrupt of the terminal passes over.

    Each watches a pipe whose other end this process alone holds, and ends when that is closed: by
    `stop`, where an exception leaves the `with` block, or because this process is no more.
    """

    def __init__(self, count: int, niceness: int = 0):
        watched, self._held = Pipe(duplex=False)
        super().__init__(
            count, mp_context=get_context("spawn"), initializer=begin, initargs=(watched, niceness)
        )

    def stop(self) -> None:
        """End the processes now, in the middle of what they do; what was asked for is lost."""
        self._held.close()
        self.shutdown(wait=False, cancel_futures=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.stop()
        self.shutdown()


def each(
    work: Callable[[J], T], jobs: Sequence[J], workers: int, title: str, unit: str = "kernel"
) -> Iterator[T]:
    """`work` of every job, in order, on so many processes (1: on this one), behind a bar."""
    show = partial(tqdm, total=len(jobs), desc=title, unit=unit, disable=None if jobs else True)
    if workers <= 1 or len(jobs) < 2:
        yield from show(map(work, jobs))
        return
    with Processes(workers) as pool:
        yield from show(pool.map(work, jobs))


def begin(watched: Connection, niceness: int = 0) -> None:
    """In a worker: interrupts pass it over; it ends once nobody holds the other end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(*SELDOM)
    os.nice(niceness)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()


def _end_with(watched: Connection) -> None:
    wait([watched])  # nothing is ever sent
    os._exit(1)


def memory_of(processes: int) -> int:
    """Bytes of this machine's memory for each of so many processes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes


@contextmanager
def within(memory: int) -> Iterator[None]:
    """What takes more than so many bytes ends in MemoryError, not in the system's end of all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
