"""The analytic model: TFLOP/s of strategies from what they ask of the machine.

One model for every family and device: a family says what a strategy asks for (`Demand`), `RATES`
what a device gives. Hopper's rates are fitted to our own kernels. B200's start from published peaks
and public GEMM figures; their efficiencies, L2 rate and latencies are estimates that no measurement
of ours has checked.
"""

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


def seconds(demand: Demand, device: Device, rates: Rates) -> NDArray[np.float64]:
    """float64 [n] seconds of each strategy, from launch to the last store of its last kernel.

    The fields of `demand` are scalars or arrays [n]; `rates` are those of the device.
    """
    time = rates.launch_s + _kernel_seconds(demand, device, rates)
    while (following := demand.following) is not None:
        launched = np.asarray(following.blocks) > 0
        time = time + launched * (rates.gap_s + _kernel_seconds(following, device, rates))
        demand = following
    return np.asarray(time, np.float64)


def _kernel_seconds(demand: Demand, device: Device, rates: Rates) -> Any:
    """Of one kernel, without its launch."""
    sm = sm_cycles(demand, device, rates) / (device.clock_ghz * 1e9)
    dram = demand.dram_bytes / (device.hbm_bytes_per_s * rates.hbm_efficiency)
    return _join(sm, dram)


def sm_cycles(demand: Demand, device: Device, rates: Rates) -> Any:
    """Cycles of the busiest SM.

    A ring slot is refilled one latency after it was drained, so `stages` slots of r resident
    blocks bound the step by (latency + r busy) / (stages r). What surrounds the main loop (setup,
    first fill, last epilogue) is exposed once, and again for each later block as far as the other
    residents leave the SM idle; the first fill only as far as steps do not wait that long anyway.
    """
    blocks = np.maximum(demand.blocks, 1)
    per_sm = -(-blocks // device.sms)
    resident = np.minimum(demand.resident, per_sm)
    busy = _busy_cycles(demand, resident, device, rates)
    fetched = demand.l2_bytes * demand.steps * blocks * demand.tiles
    from_dram = np.minimum(1.0, demand.dram_bytes / fetched)
    mixed = rates.l2_latency + from_dram * (rates.dram_latency - rates.l2_latency)
    latency = demand.latency * mixed
    step = _join(busy, (latency + resident * busy) / (demand.stages * resident))
    tile = demand.steps * step
    hidden = np.minimum(demand.overlap * demand.epilogue_cycles, tile)
    between = (demand.tiles - 1) * (demand.epilogue_cycles - hidden)
    times = 1 + (per_sm - 1) / resident**2
    waits = per_sm * demand.tiles * demand.steps * (step - busy)
    filling = np.maximum(latency * times - waits, 0)
    around = (demand.setup_cycles + demand.epilogue_cycles) * times + filling
    return demand.imbalance * (per_sm * (demand.tiles * tile + between) + around)


def _busy_cycles(demand: Demand, resident: Any, device: Device, rates: Rates) -> Any:
    """Cycles an SM needs for a step once its data is there: arithmetic, smem, L2 port."""
    active = np.clip(demand.blocks, 1, device.sms)
    port = np.minimum(rates.port_bytes_per_cycle, rates.l2_bytes_per_cycle / active)
    return _join(
        demand.mma_cycles / rates.mma_efficiency + demand.issue_cycles / resident,
        demand.smem_bytes / rates.smem_bytes_per_cycle,
        demand.l2_bytes / port,
        demand.special / rates.special_per_cycle,
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
