"""How decoder.py times: steps as CUDA graphs, contenders in turns, the device's time by kernel."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUNDS, FIRST = 30, 5  # of which the first do not count


def graphed(
    step: Callable[[Tensor], tuple[Tensor, Tensor]],
    sample: Callable[[Tensor, Tensor], Tensor],
    mode: str | None,
    options: dict[str, bool],
    hidden: Tensor,
    top_p: Tensor,
) -> tuple[Callable[[], Tensor], Tensor]:
    """A call that makes a step and samples, in one graph, and the step's logits."""
    if mode:
        how: dict[str, Any] = {"options": options} if options else {"mode": mode}
        step = torch.compile(step, fullgraph=True, **how)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            sample(step(hidden)[1], top_p)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, probs = step(hidden)
        tokens = sample(probs, top_p)

    def call() -> Tensor:
        graph.replay()
        return tokens

    return call, logits


def timed(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Median milliseconds of each, in the same rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times[FIRST:]) for name, times in found.items()}


def table(times: dict[str, float], errors: dict[str, float], batch: int) -> str:
    """A line each: milliseconds, tokens/s, relative error, speed beside the best of the others."""
    lines = []
    for name, ms in times.items():
        other = min((t for n, t in times.items() if n != name), default=ms)
        speed = (
            f"{ms:8.3f} ms {1e3 * batch / ms:10.0f} tokens/s {other / ms:7.3f} of the best other"
        )
        lines.append(f"{name:20} {speed}  error {errors[name]:.2e}")
    return "\n".join(lines)


def kernels(call: Callable[[], Tensor], most: int = 12) -> str:
    """A table of the device's time a call, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    whole = sum(e.self_device_time_total for e in rows) or 1
    lines = [f"{e.self_device_time_total / 5:9.1f} us {e.self_device_time_total / whole:6.1%} "
             f"{e.count / 5:5.0f} x {e.key[:80]}" for e in rows[:most]]  # fmt: skip
    return "\n".join([*lines, f"{whole / 5:9.1f} us in all"])
