"""What a policy sees of how blocks spread over SMs, choice by choice.

Times step where a round of blocks begins: which choices lose there changes from one workload to the
next, and no smooth function of the axes says it.
"""

import math
from collections.abc import Iterable, Mapping

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Decision


def choices(decisions: Iterable[Decision], name: str) -> tuple[int, ...]:
    """The numbers that a decision chooses from."""
    return next(tuple(map(int, d.choices)) for d in decisions if d.name == name)


def rounds(name: str, blocks: float, device: Device) -> dict[str, float]:
    """log2 of the rounds of so many blocks, one on an SM, and how full they are (-1 to 1)."""
    count = max(math.ceil(blocks / device.sms), 1)
    full = 2 * blocks / (count * device.sms) - 1
    return {f"rounds_{name}": (math.log2(count) - 2) / 3, f"full_{name}": full}


def spread(name: str, blocks: float, device: Device) -> dict[str, float]:
    """The same, and whether there is but one round."""
    single = float(blocks <= device.sms)
    return {**rounds(name, blocks, device), f"single_{name}": single}


def compared(name: str, times: Mapping[str, float]) -> dict[str, float]:
    """Times of choices beside the least of them: 1 for that one, towards -1 for longer ones; inf
    is for what cannot be chosen."""
    least = min(times.values())
    return {f"{name}_{choice}": 2 * least / time - 1 for choice, time in times.items()}


def filled(size: float, tile: int) -> float:
    """How full tiles are (-1 to 1) that cover a size."""
    return 2 * size / (math.ceil(size / tile) * tile) - 1
