"""The abstract machine: warps as coroutines over events and knowledge, no data.

Every warp of one cluster runs the lowered kernel with small trip counts. Accesses are checked
against what their issuer knows in their proxy, so one run finds races that any schedule could show;
several schedules (who runs first, how late asynchronous work lands) find parity and phase mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from ptxflow.compiler.atoms.table import Access, Atom, atom
from ptxflow.compiler.check import explain
from ptxflow.compiler.check.final import check_end
from ptxflow.compiler.check.program import Agent, Event, Group, Program, Steps
from ptxflow.compiler.check.state import (
    Barrier,
    History,
    Message,
    Past,
    Region,
    Rendezvous,
    inside,
    overlap,
    uncovered,
)
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import Op, UOp, body_of, show
from ptxflow.compiler.strategy import Trip

SCHEDULES = ("eager", "late")  # late: asynchronous work lands only when nobody can go on
LANES = 32
_STEP_LIMIT = 500_000
_BAND = 8  # rows of a global tensor that share a history


class Machine:
    """One abstract run of a program."""

    def __init__(self, program: Program, trip: Trip, schedule: str):
        self.program, self.info, self.trip, self.schedule = program, program.info, trip, schedule
        self.events: list[Event] = []
        self.histories: dict[tuple[Any, ...], History] = {}
        self.barriers: dict[tuple[Any, ...], Barrier] = {}
        self.rendezvous: dict[tuple[Any, ...], Rendezvous] = {}
        self.landing: list[Callable[[], None]] = []
        self.foreign = [0] * self.info.cluster  # events that reach into a CTA
        self.tmem: dict[int, str] = {}
        self.steps = 0
        values = dict(trip.values)
        base = values.pop("ctaid", 0) * self.info.cluster
        self.agents = [
            Agent(
                i,
                i // self.info.warps,
                i % self.info.warps,
                {
                    "ctas": self.info.cluster,
                    **values,
                    "ctaid": base + i // self.info.warps,
                    "cta_rank": i // self.info.warps,
                    "warp": i % self.info.warps,
                    "lane": 0,
                },
            )
            for i in range(self.info.cluster * self.info.warps)
        ]

    # -- running ------------------------------------------------------------------------------

    def run(self) -> int:
        """Run to the end; the number of statements executed."""
        order = self.agents if self.schedule == "eager" else self.agents[::-1]
        running = [(a, self._warp(a)) for a in order]
        blocked: dict[int, UOp] = {}
        while running:
            progress, still = False, []
            before = self.steps
            for agent, steps in running:
                try:
                    blocked[agent.index] = next(steps)
                    still.append((agent, steps))
                except StopIteration:
                    progress = True
            progress |= self.steps > before
            running = still
            if not progress and running:
                if not self.landing:
                    waiting = [(a, blocked[a.index]) for a, _ in running]
                    raise HazardError(explain.deadlock(self, waiting))
                self.landing.pop(0)()
        for land in self.landing:
            land()
        check_end(self)
        return self.steps

    def _warp(self, agent: Agent) -> Steps:
        for storage in self.info.storage:
            if storage.op is Op.FRAG:  # what the registers hold at entry was written generically
                bit = self._event(agent, self.program.kernel)
                history = self._history((Op.FRAG, storage.arg.name, agent.index), storage.arg.name)
                whole = (0, storage.arg.size, 0, 1)
                history.past.append(Past(bit.bit_length() - 1, bit, "w", whole, agent.index, ""))
                agent.own[Op.FRAG] = agent.own.get(Op.FRAG, 0) | bit
                agent.knows.generic |= bit
        for statement in self.program.kernel.src:
            if statement.op is Op.ROLE:
                first = statement.arg.first
                if not first <= agent.warp < first + statement.arg.warps:
                    continue
                agent.role = statement.arg.name
                yield from self._block(agent, statement.src, 1 if statement.arg.elected else LANES)
            else:
                agent.role = "block"
                yield from self._statement(agent, statement, LANES)

    def _block(self, agent: Agent, body: tuple[UOp, ...], lanes: int) -> Steps:
        for statement in body:
            yield from self._statement(agent, statement, lanes)

    def _statement(self, agent: Agent, node: UOp, lanes: int) -> Steps:
        value = self.program.value
        match node.op:
            case Op.ATOM:
                self.steps += 1
                if self.steps > _STEP_LIMIT:
                    raise HazardError(f"{agent.who()} at {node.site}: the run does not end")
                row = atom(node.arg.atom)
                for access in row.accesses:
                    self._access(agent, row, node, access)
                if row.orders:
                    agent.epoch.clear()
                if row.effect:
                    yield from getattr(self, f"_do_{row.effect}")(agent, node, lanes) or ()
            case Op.LOOP:
                start, stop, step = (value(s)(agent.env) for s in node.src[1:4])
                name = node.src[0].arg[0]
                for i in range(start, stop, step):
                    agent.env[name] = i
                    yield from self._block(agent, body_of(node), lanes)
            case Op.IF:
                if value(node.src[0])(agent.env):
                    yield from self._block(agent, body_of(node), 1 if node.arg else lanes)
            case _:
                raise HazardError(f"{node.op} at {node.site} is not a statement")

    # -- accesses -----------------------------------------------------------------------------

    def _event(self, agent: Agent, node: UOp) -> int:
        self.events.append(Event(agent, agent.who(), node))
        return 1 << (len(self.events) - 1)

    def _shared_event(self, agent: Agent, node: UOp, access: Access, key: tuple[Any, ...]) -> int:
        """One event for all like accesses of a warp between two ordering statements.

        They become known together, so telling them apart would change no verdict. TMA loads are
        not shared: each counts its own bytes.
        """
        if access.done == "mbar":
            return self._event(agent, node)
        key = (access.done, access.proxy, *key)
        found = agent.epoch.get(key)
        if found is None:
            found = agent.epoch[key] = self._event(agent, node)
        return found

    def _history(self, key: tuple[Any, ...], name: str) -> History:
        """The history of one stage of a storage; the key starts with the storage's Op."""
        found = self.histories.get(key)
        if found is None:
            found = self.histories[key] = History(name, key[0])
        return found

    def _places(
        self, agent: Agent, node: UOp, row: Atom, operand: UOp, cta: int
    ) -> list[tuple[History, Region]]:
        """The histories and regions that an operand names, as this warp sees them in this CTA."""
        storage, stage_node, offset_node = operand.src
        value, env = self.program.value, agent.env
        stage, offset = value(stage_node)(env), value(offset_node)(env)
        name = storage.arg.name
        match storage.op:
            case Op.GLOBAL:
                rows, columns, count, stride = operand.arg
                return [
                    place
                    for i in range(count)
                    for place in self.bands(name, stage, offset + i * stride, rows, columns)
                ]
            case Op.FRAG:
                key: tuple[Any, ...] = (Op.FRAG, name, agent.index)
            case kind:
                key = (kind, name, cta, stage)
        lanes = (0, 1)
        if storage.op is Op.TMEM:
            lanes = self._lanes(agent, node, row, cta)
        self._bounds(agent, node, operand, stage, offset)
        region = (offset, offset + operand.arg, *lanes)
        return [(self._history(key, f"{name}[{stage}]"), region)]

    def bands(
        self, name: str, first: int, column: int, rows: int, columns: int
    ) -> list[tuple[History, Region]]:
        """A rectangle of a global tensor, cut into bands of rows to keep histories short."""
        out = []
        for band in range(first // _BAND, -(-(first + rows) // _BAND)):
            lo, hi = max(first, band * _BAND), min(first + rows, (band + 1) * _BAND)
            history = self._history((Op.GLOBAL, name, band), name)
            out.append((history, (lo, hi, column, column + columns)))
        return out

    def _lanes(self, agent: Agent, node: UOp, row: Atom, cta: int) -> tuple[int, int]:
        """Lanes of TMEM that are touched: a load's quarter, or all."""
        state = self.tmem.get(cta, "not allocated")
        if state != "allocated":
            self._refuse(
                agent,
                node,
                f"tensor memory of CTA {cta} is {state}",
                "access TMEM between tcgen05.alloc and tcgen05.dealloc",
            )
        if not agent.has_address and agent.cta == cta:
            self._refuse(agent, node, "does not know the TMEM address", "read the slot first")
        if not any(n == "lane" for n, _ in row.operands):
            return 0, 128
        first = self.program.value(row.operand(node, "lane"))(agent.env) >> 16
        if first != 32 * (agent.warp % 4):
            self._refuse(
                agent,
                node,
                f"lanes {first}.. are out of reach of warp {agent.warp}",
                "a warp reaches lanes 32*(warp % 4) and up",
            )
        return first, first + 32

    def _bounds(self, agent: Agent, node: UOp, operand: UOp, stage: int, offset: int) -> None:
        buffer = operand.src[0].arg
        if stage >= buffer.stages:
            self._refuse(
                agent, node, f"{buffer.name} has no stage {stage}", "index modulo the stages"
            )
        if offset + operand.arg > buffer.size:
            self._refuse(
                agent,
                node,
                f"{buffer.name}[{stage}] ends at {buffer.size}, not at {offset + operand.arg}",
                "keep the access inside its stage",
            )

    def _ctas(self, agent: Agent, node: UOp, access: Access) -> list[int]:
        """The CTAs in which an access takes place."""
        use = node.arg
        if access.done == "mbar" and use.attr("mask"):
            return [c for c in range(self.info.cluster) if use.attr("mask") >> c & 1]
        if access.done == "tcgen05" and use.attr("cta_group") == 2:
            return [agent.cta & ~1, agent.cta | 1]
        row = atom(use.atom)
        if row.operand(node, access.operand).src[0].op is Op.SMEM:
            for (name, _), operand in zip(row.operands, node.src, strict=True):
                if name == "rank":
                    return [self.program.value(operand)(agent.env)]
        return [agent.cta]

    def _access(self, agent: Agent, row: Atom, node: UOp, access: Access) -> None:
        operand = row.operand(node, access.operand)
        if operand.src[0].op is Op.MBAR:
            self._init_barrier(agent, node, operand)
            return
        kind = operand.src[0].op
        pipe, known = self._pipe(agent, node, access), agent.knows.of(access.proxy)
        for cta in self._ctas(agent, node, access):
            bit = 0
            for history, region in self._places(agent, node, row, operand, cta):
                conflict = history.conflicts(region, access.mode, known, pipe)
                if conflict is not None:
                    raise HazardError(explain.race(self, agent, node, access, history, conflict))
                self._check_data(agent, node, access, history, region)
                bit = bit or self._shared_event(agent, node, access, (kind, cta))
                event = bit.bit_length() - 1
                history.record(Past(event, bit, access.mode, region, agent.index, pipe))
                if access.done == "mbar":
                    history.unread[event] = region
            self._pending(agent, node, access, operand, bit, cta)

    def _pipe(self, agent: Agent, node: UOp, access: Access) -> str:
        """Operations of one pipe on one accumulator run in order (PTX ISA: same shape)."""
        if access.mode == "rw" and access.done != "now":
            shape = node.arg.attr("n") or node.arg.attr("idesc")
            return f"{access.done} {agent.index} {shape}"
        return ""

    def _check_data(
        self, agent: Agent, node: UOp, access: Access, history: History, region: Region
    ) -> None:
        reads = access.mode == "r" or (access.mode == "rw" and self._accumulates(agent, node))
        if reads:
            if not any(inside(region, w) for w in history.written) and uncovered(
                region, history.written
            ):
                self._refuse(
                    agent,
                    node,
                    explain.unwritten(self, node, access, history),
                    "wait for the data before reading it",
                )
            history.read(region)
        if access.mode != "r" and history.unread:
            for event, waiting in history.unread.items():
                if overlap(waiting, region):
                    self._refuse(
                        agent,
                        node,
                        f"overwrites {history.name} before anyone read what "
                        f"{self.events[event]} put there",
                        "consume every stage that is produced",
                    )

    def _accumulates(self, agent: Agent, node: UOp) -> bool:
        row = atom(node.arg.atom)
        if not any(name == "accumulate" for name, _ in row.operands):
            return True
        return bool(self.program.value(row.operand(node, "accumulate"))(agent.env))

    def _pending(
        self, agent: Agent, node: UOp, access: Access, operand: UOp, bit: int, cta: int
    ) -> None:
        """File an access under what completes it."""
        kind = operand.src[0].op
        match access.done:
            case "now":
                agent.own[kind] = agent.own.get(kind, 0) | bit
                agent.knows.generic |= bit
                if cta != agent.cta:
                    self.foreign[cta] |= bit
            case "mbar":
                self.foreign[cta] |= bit
                agent.open.setdefault(f"tma {cta}", Group()).local |= bit
            case pipe:
                group = agent.open.setdefault(pipe, Group())
                group.last = node
                group.after |= agent.knows.of(access.proxy)
                if kind is Op.GLOBAL:
                    group.remote |= bit
                else:
                    group.local |= bit
                    if kind is not Op.FRAG:
                        self.foreign[cta] |= bit

    # -- mbarriers ----------------------------------------------------------------------------

    def _barrier(self, agent: Agent, node: UOp, operand: UOp, cta: int) -> Barrier:
        stage = self.program.value(operand.src[1])(agent.env)
        name = operand.src[0].arg.name
        found = self.barriers.get((name, cta, stage))
        if found is None or not agent.knows.async_ >> found.init & 1:
            why = (
                "was never initialised"
                if found is None
                else (f"was initialised by {self.events[found.init]}, which is not ordered before")
            )
            self._refuse(
                agent,
                node,
                f"{name}[{stage}] of CTA {cta} {why}",
                "mbarrier.init, fence.mbarrier_init, then a barrier of all its users",
            )
        return found

    def _init_barrier(self, agent: Agent, node: UOp, operand: UOp) -> None:
        stage = self.program.value(operand.src[1])(agent.env)
        buffer = operand.src[0].arg
        key = (buffer.name, agent.cta, stage)
        if key in self.barriers:
            self._refuse(agent, node, f"{buffer.name}[{stage}] is initialised twice", "init once")
        bit = self._event(agent, node)
        agent.own[Op.MBAR] = agent.own.get(Op.MBAR, 0) | bit
        agent.knows.generic |= bit
        self.barriers[key] = Barrier(
            f"{buffer.name}[{stage}]", buffer.count, buffer.count, init=bit.bit_length() - 1
        )

    def _do_fence_mbar_init(self, agent: Agent, node: UOp, lanes: int) -> None:
        agent.knows.async_ |= agent.own.get(Op.MBAR, 0)

    def _do_mbar_wait(self, agent: Agent, node: UOp, lanes: int) -> Steps:
        bar = self._barrier(agent, node, node.src[0], agent.cta)
        parity = self.program.value(node.src[1])(agent.env)
        while (bar.phase & 1) == parity:
            yield node
        self.steps += 1
        phase = bar.phase - 1
        last = agent.seen.get(id(bar), -1)
        if phase - last > 1:
            self._refuse(
                agent,
                node,
                f"{bar.name} is at phase {phase}, but this warp last saw {last}: the "
                "parity bit cannot tell them apart",
                "wait for every phase, with its own parity",
            )
        agent.seen[id(bar)] = phase
        bar.observed = max(bar.observed, phase)
        if phase >= 0:
            agent.knows.learn(bar.done[phase])

    def _do_mbar_arrive(self, agent: Agent, node: UOp, lanes: int) -> None:
        row = atom(node.arg.atom)
        cta = agent.cta
        if len(row.operands) > 1:
            cta = self.program.value(row.operand(node, "rank"))(agent.env)
        bar = self._barrier(agent, node, node.src[0], cta)
        message = agent.knows.message()
        if cta != agent.cta:
            bit = self._event(agent, node)
            agent.knows.generic |= bit
            self.foreign[cta] |= bit
            if not node.arg.attr("release"):  # relaxed: hands back completed async reads only
                message = Message(0, agent.knows.async_, 0)
        self._arrive(agent, node, bar, lanes, message, node.arg.attr("bytes", 0))

    def _arrive(
        self, agent: Agent, node: UOp, bar: Barrier, lanes: int, message: Message, tx: int = 0
    ) -> None:
        if bar.pending < lanes:
            self._refuse(
                agent,
                node,
                f"{bar.name} gets more arrivals than its count: {bar.state()}",
                "wait for the phase before arriving again, or declare the right count",
            )
        if bar.phase - 1 > bar.observed:
            self._refuse(
                agent,
                node,
                f"{bar.name} enters phase {bar.phase}, but nobody waited for phase {bar.phase - 1}",
                "wait for each phase before arriving for the next",
            )
        bar.arrivers[node] = bar.arrivers.get(node, 0) + lanes
        bar.message.add(message)
        bar.tx += tx
        bar.pending -= lanes
        bar.settle()

    def _do_tma_load(self, agent: Agent, node: UOp, lanes: int) -> None:
        row = atom(node.arg.atom)
        operand = row.operand(node, "bar")
        mask = node.arg.attr("mask") or 0
        targets = [c for c in range(self.info.cluster) if mask >> c & 1] or [agent.cta]
        columns, rows = node.arg.attr("box")
        size = columns * rows * node.arg.attr("element")
        for cta in targets:
            bits = agent.open.pop(f"tma {cta}").local
            bar = self._barrier(agent, node, operand, cta & ~1 if node.arg.attr("leader") else cta)
            message = Message(bits, bits, bits)
            self._later(partial(self._complete, bar, size, message))

    def _complete(self, bar: Barrier, size: int, message: Message) -> None:
        bar.message.add(message)
        bar.tx -= size
        bar.settle()

    def _later(self, land: Callable[[], None]) -> None:
        """Asynchronous work lands now, or as late as it can."""
        if self.schedule == "late":
            self.landing.append(land)
        else:
            land()

    def _do_tcgen05_commit(self, agent: Agent, node: UOp, lanes: int) -> None:
        """An arrival when all earlier tcgen05 operations of the thread are complete.

        Commits of one thread arrive in their order (practice; the ISA does not list the pair).
        """
        done = agent.groups.setdefault("tcgen05", [Group()])[0]
        group = agent.open.pop("tcgen05", Group())
        done.local |= group.local
        done.after |= group.after
        complete = done.local | done.after
        message = Message(complete, complete, complete | agent.knows.tensor_released)
        mask = node.arg.attr("mask")
        targets = [c for c in range(self.info.cluster) if mask >> c & 1] or [agent.cta]
        for cta in targets:
            if cta != agent.cta:
                bit = self._event(agent, node)
                self.foreign[cta] |= bit
                message.async_ |= bit
                done.after |= bit
            bar = self._barrier(agent, node, node.src[0], cta)
            self._later(partial(self._arrive, agent, node, bar, 1, message))

    # -- groups -------------------------------------------------------------------------------

    def _do_mma(self, agent: Agent, node: UOp, lanes: int) -> None:
        """The accesses say it all: operations stay open until they are committed."""

    def _do_commit(self, agent: Agent, node: UOp, lanes: int) -> None:
        pipe = node.arg.attr("pipe")
        agent.groups.setdefault(pipe, []).append(agent.open.pop(pipe, Group()))

    def _do_wait_group(self, agent: Agent, node: UOp, lanes: int) -> None:
        pipe, pending = node.arg.attr("pipe"), node.arg.attr("pending")
        groups = agent.groups.setdefault(pipe, [])
        while len(groups) > pending:
            group = groups.pop(0)
            agent.knows.generic |= group.local
            agent.knows.async_ |= group.local

    def _do_wait_ld(self, agent: Agent, node: UOp, lanes: int) -> None:
        group = agent.open.pop("ld", Group())
        agent.knows.generic |= group.local
        agent.knows.tensor |= group.local

    # -- fences -------------------------------------------------------------------------------

    def _do_fence_proxy_async(self, agent: Agent, node: UOp, lanes: int) -> None:
        """Only the warp's own accesses: a fence by one thread does nothing for others' writes."""
        agent.knows.async_ |= agent.own.get(Op.SMEM, 0)

    def _do_fence_registers(self, agent: Agent, node: UOp, lanes: int) -> None:
        agent.knows.async_ |= agent.own.get(Op.FRAG, 0)

    def _do_fence_before(self, agent: Agent, node: UOp, lanes: int) -> None:
        agent.knows.tensor_released |= agent.knows.tensor

    def _do_fence_after(self, agent: Agent, node: UOp, lanes: int) -> None:
        agent.knows.tensor |= agent.knows.tensor_seen

    # -- rendezvous ---------------------------------------------------------------------------

    def _meet(self, agent: Agent, node: UOp, key: tuple[Any, ...], expected: int) -> Steps:
        meeting = self.rendezvous.setdefault(key, Rendezvous(expected))
        if meeting.expected != expected:
            self._refuse(
                agent,
                node,
                f"barrier {key[-1]} is used with {expected} warps and {meeting.expected}",
                "name the same number of threads in every use",
            )
        mine = meeting.arrive(agent.index, agent.knows.message())
        while meeting.generation == mine:
            yield node
        self.steps += 1
        agent.knows.learn(meeting.done[mine])

    def _do_cta_sync(self, agent: Agent, node: UOp, lanes: int) -> Steps:
        return self._meet(agent, node, (agent.cta, 0), self.info.warps)

    def _do_named_sync(self, agent: Agent, node: UOp, lanes: int) -> Steps:
        use = node.arg
        return self._meet(agent, node, (agent.cta, use.attr("id")), use.attr("threads") // LANES)

    def _do_cluster_arrive(self, agent: Agent, node: UOp, lanes: int) -> None:
        meeting = self.rendezvous.setdefault(("cluster",), Rendezvous(len(self.agents)))
        if agent.cluster_arrivals != agent.cluster_waits:
            self._refuse(agent, node, "arrives twice without a wait", "pair arrive and wait")
        meeting.arrive(agent.index, agent.knows.message())
        agent.cluster_arrivals += 1

    def _do_cluster_wait(self, agent: Agent, node: UOp, lanes: int) -> Steps:
        if agent.cluster_waits >= agent.cluster_arrivals:
            self._refuse(
                agent,
                node,
                "waits for the cluster without having arrived",
                "barrier.cluster.arrive before barrier.cluster.wait",
            )
        meeting = self.rendezvous[("cluster",)]
        mine = agent.cluster_waits
        while meeting.generation <= mine:
            yield node
        self.steps += 1
        agent.cluster_waits += 1
        agent.knows.learn(meeting.done[mine])

    # -- tensor memory ------------------------------------------------------------------------

    def _do_tmem_alloc(self, agent: Agent, node: UOp, lanes: int) -> None:
        if node.arg.attr("cta_group") == 2 and not agent.cluster_waits:
            self._refuse(
                agent,
                node,
                "a pair allocates before its peer is known to run",
                "a cluster barrier before tcgen05.alloc",
            )
        if agent.cta in self.tmem:
            self._refuse(
                agent, node, f"tensor memory is already {self.tmem[agent.cta]}", "alloc once"
            )
        self.tmem[agent.cta] = "allocated"

    def _do_tmem_address(self, agent: Agent, node: UOp, lanes: int) -> None:
        agent.has_address = True

    def _do_tmem_dealloc(self, agent: Agent, node: UOp, lanes: int) -> None:
        if self.tmem.get(agent.cta) != "allocated" or not agent.has_address:
            self._refuse(agent, node, "frees tensor memory it has not", "alloc before dealloc")
        pair = node.arg.attr("cta_group") == 2  # collective: it frees for both CTAs
        ctas = {agent.cta & ~1, agent.cta | 1} if pair else {agent.cta}
        access = Access("tensor memory", "w", "tensor")
        everything = (0, 1 << 20, 0, 1 << 20)
        for key, history in self.histories.items():
            if key[0] is Op.TMEM and key[2] in ctas:
                conflict = history.conflicts(everything, "w", agent.knows.tensor, "")
                if conflict is not None:
                    raise HazardError(explain.race(self, agent, node, access, history, conflict))
        self.tmem[agent.cta] = "deallocated"

    # -- refusals -----------------------------------------------------------------------------

    def waits_for(self, agent: Agent, node: UOp) -> Barrier | None:
        """The mbarrier that a blocked statement waits for, if it is one."""
        if atom(node.arg.atom).effect != "mbar_wait":
            return None
        return self._barrier(agent, node, node.src[0], agent.cta)

    def _refuse(self, agent: Agent, node: UOp, fact: str, fix: str) -> NoReturn:
        raise HazardError(
            f"{show(node)} at {node.site} by {agent.who()}: {fact} [{self.trip.name}]; fix: {fix}"
        )
