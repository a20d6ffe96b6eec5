"""Times calls against each other on the GPU: interleaved, L2 flushed, by CUDA events, medians.

Every sample writes 256 MiB and reads another 128 MiB first, so that L2 holds neither the operands
nor dirty lines: 0.13 ms, which also gives the host time to queue what is timed. The event clock has
a floor of a few microseconds on an empty kernel; nothing is subtracted.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

FLUSH_WRITE = 256 << 20
FLUSH_READ = 128 << 20
FLUSH = "write 256 MiB, read 128 MiB before every sample"
FLUSH_US = 150.0  # about
QUEUED = 64  # samples in flight, each some six launches: well under what the driver queues
NEAR = 0.04  # of the fastest's time: who is that near by one place in memory may be the fastest
PLACES = 16  # that each is timed at before anybody leaves ...
PLACE_ROUNDS = 10  # ... in so many samples, or as many as let all places fit
SURE = 3.0  # standard errors of a difference
EXACT = 7e-4  # standard error of differences at which those that are left count as equal
WARM_ROUNDS = 2  # samples of each call that are thrown away
FEW_ROUNDS = 3  # the fewest that say anything
ORDER = random.Random(0)  # of the calls in a round

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds over the samples of one call."""

    median: float
    q1: float
    q3: float
    samples: int

    @staticmethod
    def of(samples_us: list[float]) -> "Timing":
        """Of at least one sample, in microseconds."""
        q1, median, q3 = np.percentile(samples_us, [25, 50, 75])
        return Timing(float(median), float(q1), float(q3), len(samples_us))


@dataclass(frozen=True)
class Final:
    """Microseconds, and the standard error of what that is over the fastest's."""

    us: float
    error: float


def middle(samples_us: Sequence[float]) -> float:
    """The mean of the middle half, which has none of the clock's coarse steps that a median has."""
    quarter = len(samples_us) // 4
    return fmean(sorted(samples_us)[quarter : len(samples_us) - quarter])


def near(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Who may be the fastest by these samples, in microseconds."""
    found = {name: middle(us) for name, us in samples.items()}
    best = min(found.values())
    return {name: us for name, us in found.items() if us <= (1 + NEAR) * best}


def finals(
    place: Callable[[Sequence[str]], Mapping[str, Call]], first: Mapping[str, float], flush: Call,
    seconds: float,
) -> dict[str, Final]:  # fmt: skip
    """Calls against each other, about as long as `first` has it, until one is fastest for certain,
    all that may be are equal, or `seconds` are over. Who is slower for certain leaves.

    Where code and tensors lie moves kernels that are alike past each other, and differs from
    process to process: `place` makes the calls anew, elsewhere, and what differs from place to
    place is the error."""
    left, logs, behind = [*first], list[dict[str, float]](), dict[str, tuple[float, float]]()
    fit = int(1e6 * seconds / PLACES / sum(us + FLUSH_US for us in first.values()))
    rounds, end = max(FEW_ROUNDS, min(PLACE_ROUNDS, fit)), time.monotonic() + seconds
    while len(left) > 1 and time.monotonic() < end:
        calls = place(left)
        time_interleaved(calls, dict.fromkeys(left, WARM_ROUNDS), flush)
        samples = time_interleaved(calls, dict.fromkeys(left, rounds), flush)
        logs.append({name: log(middle(us)) for name, us in samples.items()})
        if len(logs) < 2:  # of one no error is known
            continue
        best = min(left, key=lambda n: _mean([at[n] for at in logs]))
        behind |= {name: _mean([at[name] - at[best] for at in logs]) for name in left}
        if len(logs) >= PLACES:
            left = [n for n in left if behind[n][0] <= SURE * behind[n][1]]
            if all(behind[n][1] <= EXACT for n in left):
                break
    us = exp(_mean([at[best] for at in logs])[0]) if behind else 0.0
    return {name: Final(us * exp(mean), us * error) for name, (mean, error) in behind.items()}


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Without an eighth at either end, where the host was late; and its standard error (Tukey and
    McLaughlin's)."""
    cut = len(values) // 8
    kept = sorted(values)[cut : len(values) - cut]
    held = [kept[0]] * cut + kept + [kept[-1]] * cut
    return fmean(kept), stdev(held) * len(held) ** 0.5 / len(kept)


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
    calls: Mapping[str, Call], rounds: Mapping[str, int], flush: Call, under_way: Call | None = None
) -> dict[str, list[float]]:
    """Microseconds of `rounds` samples of every call, one in a round, in a shuffled order.

    Who has fewer samples than others skips rounds, evenly. Rounds are queued many at a time, so
    that the GPU never waits for the next launch: the flush hides it. `under_way` is called while
    queued samples run (to read a clock under load).
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    events: list[tuple[str, Any, Any]] = []
    last = max(rounds.values())
    for i in range(last):
        names = [n for n in calls if (i + 1) * rounds[n] // last > i * rounds[n] // last]
        ORDER.shuffle(names)
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
