"""The analytic model: TFLOP/s of strategies from what they load the machine with.

One model for every family and device: a family says what a strategy asks for (`Demand`), `RATES`
what a device gives. Hopper's rates are fitted to our own kernels. B200's start from published peaks
and public GEMM figures; their efficiencies, L2 rate and latencies are estimates that no measurement
of ours has checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Demand, Family, Fields, Problem, Strategy


@dataclass(frozen=True)
class Rates:
    """What a device gives in practice; cycles are those of `Device.clock_ghz`."""

    mma_efficiency: float  # of the dense peak, sustained under the power limit
    smem_bytes_per_cycle: float  # of one SM
    port_bytes_per_cycle: float  # from L2 into one SM
    l2_bytes_per_cycle: float  # of the whole chip
    hbm_efficiency: float  # of the nominal bandwidth
    l2_latency: float  # cycles from the TMA instruction to the barrier, hit in L2
    dram_latency: float  # the same from DRAM, under load
    launch_s: float  # what an empty kernel takes by the clock that times kernels
    special_per_cycle: float = 16.0  # results of an SM's special function units, as published
    gap_s: float = 1.0e-6  # from the end of a kernel to the start of the next (estimated)


RATES = {
    # Estimates: 1,400 to 1,750 TFLOP/s for large products, as public kernels reach; L2 and
    # latencies a little above Hopper's; the launch floor is assumed to be H200's
    "b200": Rates(0.92, 128, 64, 8192, 0.90, 800, 1600, 4.5e-6),
    # fitted to 34,000 kernels on an H200 (`ptxflow calibrate`), but for the first:
    # the best long kernels under the power limit. Latencies are those under load. H100's are H200's
    "h200": Rates(0.86, 153, 88, 7900, 0.85, 1500, 3000, 4.44e-6),
    "h100": Rates(0.86, 153, 88, 7900, 0.85, 1500, 3000, 4.44e-6),
}
SOFTNESS = 8  # of `_join`: two equal limits cost 9% together, at a ratio of 2 nothing


def _join(*times: Any) -> Any:
    """Time of things that overlap, but interfere when they take equally long (a norm)."""
    return sum(np.asarray(t, np.float64) ** SOFTNESS for t in times) ** (1 / SOFTNESS)


def rates(device: Device) -> Rates:
    """The rates of a device; KeyError listing the known ones."""
    try:
        return RATES[device.name]
    except KeyError:
        raise KeyError(f"no cost rates for {device.name!r}; known: {', '.join(RATES)}") from None


def seconds(load: Demand, device: Device, rates: Rates) -> NDArray[np.float64]:
    """float64 [n] seconds of each strategy, from launch to the last store of its last kernel.

    The fields of `load` are scalars or arrays [n]; `rates` are those of the device.
    """
    time = rates.launch_s + _kernel_seconds(load, device, rates)
    while (load_ := load.following) is not None:
        launched = np.asarray(load_.blocks) > 0
        time = time + launched * (rates.gap_s + _kernel_seconds(load_, device, rates))
        load = load_
    return np.asarray(time, np.float64)


def _kernel_seconds(load: Demand, device: Device, rates: Rates) -> Any:
    """Of one kernel, without its launch."""
    sm = sm_cycles(load, device, rates) / (device.clock_ghz * 1e9)
    dram = load.dram_bytes / (device.hbm_bytes_per_s * rates.hbm_efficiency)
    return _join(sm, dram)


def sm_cycles(load: Demand, device: Device, rates: Rates) -> Any:
    """Cycles of the busiest SM.

    A ring slot is refilled one latency after it was drained, so `stages` slots of r resident
    blocks bound the step by (latency + r busy) / (stages r). What surrounds the main loop (setup,
    first fill, last epilogue) is exposed once, and again for each later block as far as the other
    residents leave the SM idle; the first fill only as far as steps do not wait that long anyway.
    """
    blocks = np.maximum(load.blocks, 1)
    per_sm = -(-blocks // device.sms)
    resident = np.minimum(load.resident, per_sm)
    busy = _busy_cycles(load, resident, device, rates)
    fetched = load.l2_bytes * load.steps * blocks * load.tiles
    from_dram = np.minimum(1.0, load.dram_bytes / fetched)
    mixed = rates.l2_latency + from_dram * (rates.dram_latency - rates.l2_latency)
    latency = load.latency * mixed
    step = _join(busy, (latency + resident * busy) / (load.stages * resident))
    tile = load.steps * step
    hidden = np.minimum(load.overlap * load.epilogue_cycles, tile)
    between = (load.tiles - 1) * (load.epilogue_cycles - hidden)
    times = 1 + (per_sm - 1) / resident**2
    waits = per_sm * load.tiles * load.steps * (step - busy)
    filling = np.maximum(latency * times - waits, 0)
    around = (load.setup_cycles + load.epilogue_cycles) * times + filling
    return load.imbalance * (per_sm * (load.tiles * tile + between) + around)


def _busy_cycles(load: Demand, resident: Any, device: Device, rates: Rates) -> Any:
    """Cycles an SM needs for a step once its data is there: arithmetic, smem, L2 port."""
    active = np.clip(load.blocks, 1, device.sms)
    port = np.minimum(rates.port_bytes_per_cycle, rates.l2_bytes_per_cycle / active)
    return _join(
        load.mma_cycles / rates.mma_efficiency + load.issue_cycles / resident,
        load.smem_bytes / rates.smem_bytes_per_cycle,
        load.l2_bytes / port,
        load.special / rates.special_per_cycle,
    )


def model_tflops(
    family: Family, fields: Fields, problem: Problem, device: Device
) -> NDArray[np.float64]:
    """float64 [n] modelled TFLOP/s of strategies, whose choices `fields` has as arrays [n].

    Never above the problem's roofline. KeyError where the device has no rates.
    """
    time = seconds(family.demand(fields, problem, device), device, rates(device))
    tflops: NDArray[np.float64] = np.atleast_1d(problem.flops / time / 1e12)
    return tflops


def attainable_tflops(problem: Problem, device: Device) -> float:
    """TFLOP/s of the roofline with the launch floor: what a perfect kernel would be timed at."""
    ideal = problem.flops / (problem.roofline_tflops(device) * 1e12)
    return problem.flops / (ideal + rates(device).launch_s) / 1e12


def derived(family: Family, strategy: Strategy, problem: Problem, device: Device) -> dict[str, Any]:
    """What follows from one strategy, as JSON data: what it takes of an SM, the problem's bound and
    roofline (TFLOP/s), modelled speed (TFLOP/s and microseconds)."""
    fields = strategy.fields()
    taken = family.resources(fields, problem, device)
    tflops = float(model_tflops(family, fields, problem, device)[0])
    return {
        "smem_bytes": int(taken.smem_bytes),
        "registers_per_thread": int(taken.registers),
        "threads": int(taken.threads),
        "tmem_columns": int(taken.tmem_columns),
        "occupancy": int(taken.occupancy),
        "bound": problem.bound(device),
        "roofline_tflops": problem.roofline_tflops(device),
        "modelled_tflops": tflops,
        "modelled_us": problem.flops / tflops / 1e6,
    }
