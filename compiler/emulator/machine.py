"""The machine: clusters of CTAs of warps, asynchronous work in flight, schedules, deadlock.

Clusters run one after another; the warps of a cluster take turns. With seed 0 every asynchronous
operation lands only when nobody can go on, oldest first. Other seeds vary who runs, how far, and
what lands when: odd ones starve warpgroups (seed 1 the first of them), even ones take turns.
"""

import math
import random
from collections.abc import Iterable, Mapping

import numpy as np

from ptxflow.compiler.emulator import tensormap
from ptxflow.compiler.emulator.barrier import ClusterBarrier
from ptxflow.compiler.emulator.fault import Endless, Fault
from ptxflow.compiler.emulator.grid import Cta, Grid, Landing, Report
from ptxflow.compiler.emulator.lanes import Array
from ptxflow.compiler.emulator.memory import PARAM_BASE
from ptxflow.compiler.emulator.operands import Program
from ptxflow.compiler.emulator.race import shorten
from ptxflow.compiler.emulator.warp import Warp
from ptxflow.compiler.launch import (
    Arguments,
    InputParam,
    Launch,
    PointerParam,
    PresentParam,
    RandomParam,
    ScalarParam,
    TensorMapParam,
    evaluate,
)

LIMIT = 50_000_000  # instructions of a cluster: more is an endless loop
TURN = 1 << 16  # instructions with nobody waiting: somebody polls, and something lands
MAX_SHARED = 232_448  # bytes a block gets at most


class Machine(Grid):
    """A program with its launch and tensors, and a schedule."""

    def __init__(
        self, program: Program, launch: Launch, tensors: Mapping[str, Array], axes: Mapping[str,
        int], seed: int, grid: int, arguments: Arguments, limit: int = 0, block: tuple[int, int,
        int] | None = None,
    ):  # fmt: skip
        """`block`: the sides of a block that is not along x alone."""
        super().__init__(program.module, launch, tensors)
        self.block = block or (launch.block, 1, 1)
        self.program, self.coverage = program, program.coverage
        self.local_bytes = program.local_bytes
        x, y, z = (evaluate(side, axes) for side in launch.grid)
        self.grid = (grid or x, y, z)
        self.cluster_size = math.prod(launch.cluster)
        self.shared_bytes = program.static_shared + launch.smem_bytes
        self._check_launch(axes)
        self.launch_registers = self._launch_registers()
        self._bind(axes, arguments)
        self.rng = random.Random(seed) if seed else None
        self.limit = limit or 1 << 60  # instructions of all clusters
        self.strict = seed % 2 == 1  # a warp runs only when none before it can
        self.early = (0.0, 1.0, 0.25, 0.0)[seed % 4]  # chance that something lands unforced
        self.seed = seed
        self.leader = self.rng.randrange(32) if self.rng else 0

    # -- the launch ---------------------------------------------------------------------------

    def _check_launch(self, axes: Mapping[str, int]) -> None:
        launch, directives = self.launch, self.module.directives
        if launch.entry != self.module.entry:
            raise ValueError(f"the launch names {launch.entry!r}, the text {self.module.entry!r}")
        if any(g < 1 or g % c for g, c in zip(self.grid, launch.cluster, strict=True)):
            raise ValueError(f"a grid of {self.grid} is not whole clusters of {launch.cluster}")
        x, y, z = (g // c for g, c in zip(self.grid, launch.cluster, strict=True))
        self.clusters = (x, y, z)
        if launch.block % 32 or not 32 <= launch.block <= 1024:
            raise ValueError(f"a block of {launch.block} threads is not 1..32 whole warps")
        required = (*directives.get("reqntid", self.block), 1, 1)[:3]
        if required != self.block:
            raise ValueError(f".reqntid {required}, launched with {self.block}")
        declared = (*directives.get("reqnctapercluster", ()), 1, 1, 1)[:3]
        if declared != tuple(launch.cluster):
            raise ValueError(f"cluster of {declared} declared, {launch.cluster} launched")
        if self.shared_bytes > MAX_SHARED:
            raise ValueError(f"{self.shared_bytes} bytes of shared memory exceed {MAX_SHARED}")

    def _launch_registers(self) -> int:
        """Registers a thread at launch: with setmaxnreg, what the launch bounds leave."""
        blocks = self.module.directives.get("minnctapersm", (1,))[0]
        most = 65536 // (self.launch.block * max(blocks, 1)) // 8 * 8
        if most <= 255:
            return most
        asked = [i for i in self.module.code if i.opcode.startswith("setmaxnreg")]
        return max((i.operands[0].value for i in asked), default=255)  # type: ignore[union-attr]

    def _bind(self, axes: Mapping[str, int], arguments: Arguments) -> None:
        declared = self.module.parameters
        optional = {p.tensor for p in self.launch.params if isinstance(p, PresentParam)}
        if len(declared) != len(self.launch.params):
            raise ValueError(f"{len(declared)} parameters, {len(self.launch.params)} launched")
        for parameter, value in zip(declared, self.launch.params, strict=True):
            at = PARAM_BASE + self.program.parameters[parameter.name]
            match value:
                case TensorMapParam():
                    if parameter.align % 64 or parameter.bytes != 128:
                        raise ValueError(f"parameter {parameter.name}: not .align 64, 128 bytes")
                    self.maps[at] = tensormap.encode(value, self.memory.named[value.tensor], axes)
                case PointerParam():
                    given = value.tensor in self.memory.named or value.tensor not in optional
                    base = self.memory.named[value.tensor].base if given else 0
                    self.constants[at] = (8, base)
                case ScalarParam():
                    self.constants[at] = (parameter.bytes, evaluate(value.value, axes))
                case PresentParam():
                    self.constants[at] = (4, int(value.tensor in self.memory.named))
                case InputParam() | RandomParam():
                    self.constants[at] = (4, arguments.word(value))
            held = self.constants.get(at, (parameter.bytes, 0))[0]
            if at in self.constants and (held != parameter.bytes or held not in (4, 8)):
                raise ValueError(f"parameter {parameter.name} has {parameter.bytes} bytes")

    # -- one cluster --------------------------------------------------------------------------

    def run(self, some: int = 0) -> Report:
        """Run all clusters of the grid, one after another, or `some`: the first, the last, and
        others between, and of one that in the middle; of -n, the first n."""
        count = math.prod(self.clusters)
        chosen: Iterable[int] = range(min(-some or count, count))
        if some > 0:
            ends = (0, count - 1) if some > 1 else ((count - 1) // 2,) * 2
            chosen = sorted({round(place) for place in np.linspace(*ends, min(some, count))})
        try:
            for index in chosen:
                with np.errstate(all="ignore"):  # NaN and infinity are values like others
                    self._run_cluster(index)
                self.report.clusters += 1
        finally:
            self.program.count_stretches()
        return self.report

    def _run_cluster(self, index: int) -> None:
        self.ctas = [Cta(self, rank, index) for rank in range(self.cluster_size)]
        self.landings = []
        warps = [Warp(cta, i) for cta in self.ctas for i in range(self.launch.block // 32)]
        self.cluster_barrier = ClusterBarrier(len(warps))
        self.priority: dict[tuple[int, int], int] = {}
        self.races.forget_steps()
        executed = polled = 0
        while warps:
            self._reorder(warps)
            if self.landings and self.rng and self.rng.random() < self.early:
                self._land()
                continue
            progress = False
            for w in warps:
                if w.runnable():
                    count = self._turn(w)
                    executed += count
                    polled = 0 if w.wait else polled + count
                    progress = True
                    if self.strict:
                        break
            warps = [w for w in warps if not w.done]
            if executed > min(LIMIT, self.limit - self.report.instructions):
                raise Endless(
                    self._standing(warps, f"{executed} instructions: the run does not end")
                )
            if polled >= TURN and self.landings:
                polled = 0
                self._land()
            if not progress and warps:
                if not self.landings:
                    what = "deadlock: nobody can go on and nothing is in flight"
                    raise Fault(self._standing(warps, what))
                self._land()
        self.report.instructions += executed

    def _reorder(self, warps: list[Warp]) -> None:
        """Whose turn comes first: anyone's, or by a priority of warpgroups that seldom changes."""
        if self.rng and not self.strict:
            self.rng.shuffle(warps)
        elif self.rng and (not self.priority or self.rng.random() < 0.01):
            groups = sorted({(w.cta.rank, w.index // 4) for w in warps}, reverse=True)
            if self.priority or self.seed > 1:
                self.rng.shuffle(groups)
            self.priority = {group: i for i, group in enumerate(groups)}
            warps.sort(key=lambda w: (self.priority[w.cta.rank, w.index // 4], w.index))

    def _turn(self, w: Warp) -> int:
        budget = self.rng.randint(1, 300) if self.rng else min(TURN, self.limit + 1)
        try:
            count = w.run(budget)
            if w.done:
                self._exited(w)
        except Fault as fault:
            ins = self.module.code[w.at]
            where = f"{w}: line {ins.line}: `{shorten(ins.text)}`"
            raise Fault(f"{where}: {fault}") from None
        return count

    def _exited(self, w: Warp) -> None:
        for unit in w.units.values():
            self._nothing_left(unit.left())
        self.cluster_barrier.exit()
        cta = w.cta
        for barrier in cta.named:
            if barrier.arrived and barrier.threads == 0:
                barrier.release(32 * cta.live)
        if not cta.exited:
            return
        for number, barrier in enumerate(cta.named):
            if barrier.arrived:
                came = f"{32 * len(barrier.arrived)} of {barrier.threads} threads arrived"
                self.hazard(barrier.line, f"barrier {number} is left half way: {came}, none waits")
        for unit in cta.units.values():
            self._nothing_left(unit.left())
        for landing in self.landings:
            if cta.rank in landing.ctas:
                self._nothing_left(
                    f"line {landing.ins.line}: `{shorten(landing.ins.text)}` still reaches in"
                )

    @staticmethod
    def _nothing_left(what: str | None) -> None:
        if what:
            raise Fault(f"exits with work in flight: {what}")

    def _land(self) -> None:
        """One operation lands: the oldest, or one that the seed picks."""
        chosen = self.landings[0]
        if self.rng:
            first: dict[tuple[int, ...] | int, Landing] = {}
            for landing in self.landings:
                first.setdefault(landing.thread or id(landing), landing)
            chosen = self.rng.choice(list(first.values()))
        self.landings.remove(chosen)
        try:
            for rank in chosen.ctas:
                if self.ctas[rank].exited:
                    raise Fault(f"CTA {rank}, which it reaches into, has exited")
            chosen.land()
        except Fault as fault:
            where = f"{chosen.who}: line {chosen.ins.line}: `{shorten(chosen.ins.text)}`"
            raise Fault(f"{where}, as it completes: {fault}") from None

    def _standing(self, warps: list[Warp], what: str) -> str:
        """A sentence, and a line for each part of a warp: where it stands, what it waits for."""
        out = [what]
        for w in sorted(warps, key=lambda w: (w.cta.rank, w.index)):
            for pc, mask, what in w.stands():
                ins = self.module.code[pc]
                text = shorten(ins.text)
                out.append(f"  {w}, lanes 0x{mask:X}, line {ins.line}: `{text}`: {what}")
        return "\n".join(out)
