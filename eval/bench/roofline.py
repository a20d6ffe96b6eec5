"""How near a kernel is to what its device allows: floors of compute, memory and launch."""

from dataclasses import dataclass

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem
from ptxflow.env.cost import rates

TENSOR_PEAK, BANDWIDTH = "tensor peak", "bandwidth"


@dataclass(frozen=True)
class Floors:
    """Microseconds that no kernel for a problem can be faster than, by one limit each.

    compute  its FLOP at the device's dense peak
    memory   its compulsory bytes at the nominal bandwidth
    launch   an empty kernel, by the clock that times kernels

    Where inputs decide what is read and multiplied these are bounds of a problem whose work was
    counted (`eval.work.counted`); of a problem as its axes give it they are estimates.
    """

    compute: float
    memory: float
    launch: float

    @staticmethod
    def of(problem: Problem, device: Device) -> "Floors":
        """KeyError for a device without rates."""
        return Floors(
            problem.flops / problem.peak_tflops(device) / 1e6,
            problem.bytes / device.hbm_bytes_per_s * 1e6,
            rates(device).launch_s * 1e6,
        )

    @property
    def bound(self) -> str:
        """The roof that is met first: `tensor peak` or `bandwidth`."""
        return TENSOR_PEAK if self.compute >= self.memory else BANDWIDTH

    @property
    def attainable(self) -> float:
        """What a perfect kernel would show: a launch, and then the slower of the two roofs."""
        return max(self.compute, self.memory) + self.launch

    def share_of_bound(self, us: float) -> float:
        """The part of the tensor peak, or of the bandwidth, that a kernel of this time uses."""
        return max(self.compute, self.memory) / us

    def share(self, us: float) -> float:
        """The attainable time over this one: 1 is perfect."""
        return self.attainable / us

    def score(self, us: float, base: float, launch: bool = True) -> float:
        """SOL-ExecBench's score of a kernel beside a baseline, both in microseconds: 1/2 is as fast
        as the baseline, 1 the roofline, with a launch or without.

        1 / (1 + (t - t_SOL) / (t_base - t_SOL)), in which a time below t_SOL counts as t_SOL: a
        kernel there scores 1, another beside a baseline there 0.
        """
        floor = self.attainable if launch else max(self.compute, self.memory)
        over, room = max(us - floor, 0.0), max(base - floor, 0.0)
        return room / (room + over) if over else 1.0

    def gaps(self, us: float) -> str:
        """The gaps to the floors, for a report."""
        parts = (("compute", self.compute), ("memory", self.memory), ("launch", self.launch))
        gaps = ", ".join(f"{name} {us / floor:.2f}x ({floor:.2f} us)" for name, floor in parts)
        best = f"{self.share(us):.1%} of the attainable speed ({self.attainable:.2f} us)"
        return f"{best}; over the floors: {gaps}"
