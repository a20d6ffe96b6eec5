"""How far a kernel is from what its device allows, by compute, by memory and by latency.

Each gap is in [0, 1]: what is unused of a roof, times how much that roof matters to the problem
(its floor over the higher one), so that the idle tensor cores of a memory-bound kernel are no gap.
Latency is what neither roof explains: the share of the time beyond the higher floor. A profile by
Nsight Compute replaces the utilisations by counted ones, and latency by its largest stall.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.tune.moves import AXES

NEAR_PEAK = 0.95  # of the attainable speed: nothing is left that a move could be told by
MOST_OF_AXIS = 2  # moves of a round that go to one axis


@dataclass(frozen=True)
class Profile:
    """Shares in [0, 1] that hardware counters saw: of the busiest pipe's peak, of DRAM's or L2's
    bandwidth, whichever is nearer to its own, and of warps' cycles those waiting for `reason`."""

    compute: float
    memory: float
    stall: float
    reason: str
    source: str = "ncu"


@dataclass(frozen=True)
class Gaps:
    """See the module. `share` is the attainable time over the kernel's."""

    compute: float
    memory: float
    latency: float
    share: float
    source: str

    @staticmethod
    def of(floors: Floors, us: float, profile: Profile | None = None) -> "Gaps":
        highest = max(floors.compute, floors.memory)
        share = min(floors.share(us), 1.0)
        used = (floors.compute / us, floors.memory / us)
        latency = 1 - share
        if profile:
            used, latency = (profile.compute, profile.memory), (1 - share) * profile.stall
        weights = floors.compute / highest, floors.memory / highest
        compute, memory = (w * max(0.0, 1 - u) for w, u in zip(weights, used, strict=True))
        source = profile.source if profile else "floors"
        return Gaps(round(compute, 4), round(memory, 4), round(latency, 4), round(share, 4), source)

    @property
    def near_peak(self) -> bool:
        return self.share >= NEAR_PEAK

    @property
    def by_axis(self) -> dict[str, float]:
        """The gaps, the largest first."""
        found = dict(zip(AXES, (self.compute, self.memory, self.latency), strict=True))
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def budget(self, moves: int, available: Mapping[str, int]) -> dict[str, int]:
        """Moves of a round over the axes, in proportion to the gaps, MOST_OF_AXIS to one of them
        and no more than there are."""
        spent = dict.fromkeys(AXES, 0)
        for _ in range(moves):
            open_axes = [a for a in AXES if spent[a] < min(MOST_OF_AXIS, available[a])]
            if not open_axes:
                break
            spent[max(open_axes, key=lambda a: self.by_axis[a] / (spent[a] + 1))] += 1
        return spent

    def state(self, family: str, intensity: float) -> str:
        """The signature under which experience is kept: the family, the two largest gaps in
        quarters, and the FLOP per byte in powers of 16."""
        (first, a), (second, b), _ = self.by_axis.items()
        level = 0
        while intensity >= 16 ** (level + 1) and level < 3:
            level += 1
        return f"{family} {first}{min(3, int(4 * a))} {second}{min(3, int(4 * b))} ai{level}"


BLIND = Gaps(1.0, 1.0, 1.0, 0.0, "cycles alone")
