"""Times calls against each other on the GPU: interleaved, L2 flushed, by CUDA events, medians.

Every sample writes 256 MiB and reads another 128 MiB first, so that L2 holds neither the operands
nor dirty lines: 0.13 ms, which also gives the host time to queue what is timed. The event clock has
a floor of a few microseconds on an empty kernel; nothing is subtracted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

FLUSH_WRITE = 256 << 20
FLUSH_READ = 128 << 20
FLUSH = "write 256 MiB, read 128 MiB before every sample"
FLUSH_US = 150.0  # about
QUEUED = 64  # samples in flight, each some six launches: well under what the driver queues
NEAR = 0.02  # of the fastest's time: who is that near may be the fastest
SURE = 3.0  # standard errors of a difference
EXACT = 7e-4  # relative standard error at which those that are left count as equal
FINAL_ROUNDS = 50  # before each look at who is still in

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds over the samples of one call."""

    median: float
    q1: float
    q3: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(samples_us: list[float]) -> Timing:
        """Of at least one sample, in microseconds."""
        q1, median, q3 = np.percentile(samples_us, [25, 50, 75])
        return Timing(float(median), float(q1), float(q3), len(samples_us))


@dataclass(frozen=True)
class Final:
    """The mean of the middle half of some samples in microseconds, which has none of the clock's
    coarse steps that a median has, and its standard error."""

    us: float
    error: float

    @staticmethod
    def of(samples_us: list[float]) -> Final:
        """Of one sample at least. 0.81: of normal ones, whose quarters are 1.35 deviations apart,
        at the 84% efficiency of this mean."""
        ordered = np.sort(samples_us)
        quarter = len(ordered) // 4
        q1, q3 = np.percentile(ordered, [25, 75])
        middle = ordered[quarter : len(ordered) - quarter]
        return Final(float(middle.mean()), float(0.81 * (q3 - q1) / len(ordered) ** 0.5))

    def beyond(self, other: Final) -> float:
        """How much longer this takes than the other for certain, in microseconds."""
        return self.us - other.us - SURE * (self.error**2 + other.error**2) ** 0.5

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def near(samples: Mapping[str, list[float]]) -> list[str]:
    """Who may be the fastest by these samples."""
    found = {name: Final.of(us) for name, us in samples.items()}
    best = min(found.values(), key=lambda f: f.us)
    return [name for name, f in found.items() if f.beyond(best) <= NEAR * best.us]


def finals(calls: Mapping[str, Call], flush: Call, seconds: float) -> dict[str, Final]:
    """Calls against each other in fresh samples (of those that chose them the least is low by
    luck), until one is fastest for certain, all that may be are equal, or `seconds` are over. Who
    is slower for certain leaves."""
    held: dict[str, list[float]] = {name: [] for name in calls}
    left, found, end = list(calls), dict[str, Final](), time.monotonic() + seconds
    while len(left) > 1 and time.monotonic() < end:
        still = {name: calls[name] for name in left}
        new = time_interleaved(still, dict.fromkeys(left, FINAL_ROUNDS), flush)
        for name in left:
            held[name] += new[name]
        found |= {name: Final.of(held[name]) for name in left}
        best = min((found[n] for n in left), key=lambda f: f.us)
        left = [n for n in left if found[n].beyond(best) <= 0]
        if all(found[n].error <= EXACT * best.us for n in left):
            break
    return found


class L2Flush:
    """Puts L2 into the same state before every sample; holds 384 MiB on the current GPU."""

    def __init__(self) -> None:
        self._write = torch.empty(FLUSH_WRITE, dtype=torch.uint8, device="cuda")
        self._read = torch.zeros(FLUSH_READ // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.empty((), dtype=torch.float32, device="cuda")

    def __call__(self) -> None:
        self._write.fill_(1)
        torch.sum(self._read, dim=0, out=self._sum)


class ClockReader:
    """The SM clock in MHz through NVML, where nvidia-ml-py is installed; else None."""

    def __init__(self, gpu_uuid: str) -> None:
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def __call__(self) -> int | None:
        if self._nvml is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        except self._nvml.NVMLError:
            return None


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def settle(calls: Mapping[str, Call], seconds: float) -> None:
    """Run the calls for so many seconds, so that clocks and power are those of sustained work."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for call in calls.values():
            call()
        torch.cuda.synchronize()


def time_interleaved(
    calls: Mapping[str, Call],
    rounds: Mapping[str, int],
    flush: Call,
    under_way: Call | None = None,
) -> dict[str, list[float]]:
    """Microseconds of `rounds` samples of every call, one in a round, in a shuffled order.

    Who has fewer samples than others skips rounds, evenly. Rounds are queued many at a time, so
    that the GPU never waits for the next launch: the flush hides it. `under_way` is called while
    queued samples run (to read a clock under load).
    """
    order = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    events: list[tuple[str, Any, Any]] = []
    last = max(rounds.values())
    for i in range(last):
        names = [n for n in calls if (i + 1) * rounds[n] // last > i * rounds[n] // last]
        order.shuffle(names)
        for name in names:
            start, end = _event(), _event()
            flush()
            start.record()
            calls[name]()
            end.record()
            events.append((name, start, end))
        if len(events) + len(calls) > QUEUED or i == last - 1:
            if under_way is not None:
                under_way()
            torch.cuda.synchronize()
            for name, start, end in events:
                samples[name].append(start.elapsed_time(end) * 1e3)
            events.clear()
    return samples
