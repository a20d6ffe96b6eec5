"""What synchronising instructions do to the abstract machine: one method for each `effect`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ptxflow.compiler.atoms.table import Access, atom
from ptxflow.compiler.check import messages
from ptxflow.compiler.check.access import LANES, Accesses
from ptxflow.compiler.check.program import Agent, Group, Steps
from ptxflow.compiler.check.state import Barrier, Knowledge, Message, Rendezvous
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import Op, Statement

BYTES = 4  # of a register


class Synchronisation(Accesses):
    """Barriers, groups, fences, rendezvous, tensor memory and registers."""

    # -- mbarriers ----------------------------------------------------------------------------

    def _do_mbar_wait(self, agent: Agent, node: Statement, lanes: int) -> Steps:
        bar = self._barrier(agent, node.src[0], agent.cta)
        parity = self.program.value(node.src[1])(agent.env)
        if parity > 1:
            agent.refuse(f"waits for parity {parity} of {bar.name}", "take the turn modulo 2")
        while (bar.phase & 1) == parity:
            yield node
        self.steps += 1
        phase = bar.phase - 1
        last = max(agent.seen.get(id(bar), -1), bar.newest(agent.known()))
        if phase - last > 1:
            agent.refuse(
                f"{bar.name} is at phase {phase}, but the last that this warp saw, or heard of, is "
                f"{last}: the parity bit cannot tell them apart",
                "wait for every phase, with its own parity, or hear from who did",
            )
        agent.seen[id(bar)] = phase
        self._observe(agent, node, bar)
        if phase >= 0:
            near, far = bar.done[phase]
            agent.learn(near)
            if node.arg.attr("acquire"):
                agent.learn(far)

    def _observe(self, agent: Agent, node: Statement, bar: Barrier) -> None:
        """Seeing a phase complete is an event: whoever arrives for the next must know it; for the
        phase before the first, too, which a wait with parity 1 sees."""
        bit = self._event(agent, node)
        bar.observed |= bit if bar.phase else 0
        bar.saw[bar.phase - 1] = bar.saw.get(bar.phase - 1, 0) | bit
        bar.saw.pop(bar.phase - 3, None)
        self.observations |= bit
        self.handed |= bit
        agent.learn(Message(bit, bit, bit))

    def _do_mbar_arrive(self, agent: Agent, node: Statement, lanes: int) -> None:
        row = atom(node.arg.atom)
        message = agent.message(lanes)
        if not any(name == "rank" for name, _ in row.operands):
            bar = self._barrier(agent, node.src[0], agent.cta)
            self._arrive(agent, node, bar, lanes, message, agent.known(), node.arg.attr("bytes", 0))
            return
        cta = self.peer(agent, row.operand(node, "rank"))
        bar = self._barrier(agent, node.src[0], cta)
        handed = message.relaxed(self.handed, self.asynchronous)
        if cta != agent.cta:
            bit = self._event(agent, node)
            agent.knows.generic |= bit
            self.foreign[cta] |= bit
            self.handed |= bit
            handed.async_ |= bit
            if node.arg.attr("order") == "release":  # and the waiter must acquire at cluster scope
                bar.distant.add(message)
        elif node.arg.attr("order") == "release":
            handed = message
        self._arrive(agent, node, bar, lanes, handed, agent.known())

    def _arrive(
        self,
        agent: Agent,
        node: Statement,
        bar: Barrier,
        lanes: int,
        message: Message,
        seen: int,
        tx: int = 0,
    ) -> None:
        if bar.pending < lanes:
            agent.refuse(
                f"{bar.name} gets more arrivals than its count: {bar.state()}",
                "wait for the phase before arriving again, or declare the right count",
                node,
            )
        if bar.phase and not bar.observed & seen:
            who = "nobody waited" if not bar.observed else "it does not know that anybody waited"
            agent.refuse(
                f"{bar.name} enters phase {bar.phase}, but {who} for phase {bar.phase - 1}",
                "wait for each phase before arriving for the next, or hear from who waited",
                node,
            )
        bar.arrivers[node] = bar.arrivers.get(node, 0) + lanes
        bar.message.add(message)
        bar.heard |= seen
        bar.tx += tx
        bar.pending -= lanes
        self._settle(bar)

    def _settle(self, bar: Barrier) -> None:
        """Complete the phase if nothing is outstanding; no wait for the one before may be left that
        this one's arrivals have not heard of: it could come too late, and then wait for ever."""
        phase, waits = bar.phase, bar.saw.get(bar.phase - 1, 0) & ~bar.heard
        bar.settle()
        if bar.phase > phase and waits:
            wait = self.events[(waits & -waits).bit_length() - 1]
            wait.agent.refuse(
                f"waits for phase {phase - 1} of {bar.name}, and phase {phase} may complete before "
                "it does: nobody who arrives for that has heard of this wait",
                "arrive for a phase after all waits for the one before, or hear from who waited",
                wait.node,
            )

    def _do_tma_load(self, agent: Agent, node: Statement, lanes: int) -> None:
        columns, rows = node.arg.attr("box")
        self._load(agent, node, columns * rows * node.arg.attr("element"))

    def _do_bulk_load(self, agent: Agent, node: Statement, lanes: int) -> None:
        self._load(agent, node, node.arg.attr("bytes"))

    def _load(self, agent: Agent, node: Statement, size: int) -> None:
        """Bytes into CTAs, counted on a barrier of each when they have landed."""
        operand = atom(node.arg.atom).operand(node, "bar")
        for cta in self._masked(agent, node.arg.attr("mask")):
            bits = agent.open.pop(f"tma {cta}").local
            leader = cta & ~1 if node.arg.attr("leader") else cta
            bar = self._barrier(agent, operand, leader, fenced=True)
            seen = agent.known() & self.observations  # before it was issued
            message = Message(bits | seen, bits | seen, bits | seen)
            self._later(partial(self._complete, bar, size, message))

    def _do_st_async(self, agent: Agent, node: Statement, lanes: int) -> None:
        """Each lane's bytes complete on a barrier beside them; whoever waits there at cluster scope
        sees them (PTX ISA 9.7.9.12: complete_tx releases at cluster scope)."""
        row = atom(node.arg.atom)
        cta = self.peer(agent, row.operand(node, "rank"))
        bits = agent.open.pop(f"tma {cta}").local
        bar = self._barrier(agent, row.operand(node, "bar"), cta, fenced=True)
        seen = agent.known() & self.observations
        size = lanes * BYTES * row.operand(node, "src").arg
        message = Message(bits | seen, seen, seen, bits)
        self.sent[agent.cta] |= bits
        self._later(partial(self._complete_far, bar, size, message))

    def _complete_far(self, bar: Barrier, size: int, message: Message) -> None:
        bar.distant.add(message)
        bar.heard |= message.events
        self._complete(bar, size, Message())

    def _complete(self, bar: Barrier, size: int, message: Message) -> None:
        bar.message.add(message)
        bar.heard |= message.events
        bar.tx -= size
        self._settle(bar)

    def _later(self, land: Callable[[], None]) -> None:
        """Asynchronous work lands now, or as late as it can."""
        if self.schedule == "late":
            self.landing.append(land)
        else:
            land()

    def _do_tcgen05_commit(self, agent: Agent, node: Statement, lanes: int) -> None:
        """An arrival when all earlier tcgen05 operations of the thread are complete.

        Commits of one thread arrive in their order (practice; the ISA does not list the pair).
        """
        done = agent.groups.setdefault("tcgen05", [Group()])[0]
        group = agent.open.pop("tcgen05", Group())
        done.local |= group.local
        done.after |= group.after
        k = agent.knows
        seen = agent.known() & self.observations
        complete = done.local | done.after | seen
        released = complete | k.tensor_released | k.tensor_seen
        for cta in self._masked(agent, node.arg.attr("mask")):
            message = Message(complete, complete, released)
            bit = self._event(agent, node)  # the arrival, which must find the CTA there
            self.foreign[cta] |= bit
            self.handed |= bit
            message.async_ |= bit
            done.after |= bit
            bar = self._barrier(agent, node.src[0], cta, fenced=True)
            self._later(partial(self._arrive, agent, node, bar, 1, message, seen))

    # -- groups -------------------------------------------------------------------------------

    def _do_mma(self, agent: Agent, node: Statement, lanes: int) -> None:
        """The accesses say it all: operations stay open until they are committed."""

    def _do_commit(self, agent: Agent, node: Statement, lanes: int) -> None:
        pipe = node.arg.attr("pipe")
        agent.groups.setdefault(pipe, []).append(agent.open.pop(pipe, Group()))

    def _do_wait_group(self, agent: Agent, node: Statement, lanes: int) -> None:
        """Registers go back to the generic proxy: wgmma takes them again behind wgmma.fence."""
        pipe, pending = node.arg.attr("pipe"), node.arg.attr("pending")
        groups = agent.groups.setdefault(pipe, [])
        while len(groups) > pending:
            group = groups.pop(0)
            agent.knows.generic |= group.local | group.registers
            agent.knows.async_ |= group.local
            agent.own[Op.FRAG, True] = agent.own.get((Op.FRAG, True), 0) | group.registers

    def _do_wait_copies(self, agent: Agent, node: Statement, lanes: int) -> None:
        """Each lane knows that its own copies have landed; all do once they meet. As it would its
        own stores, a fence of each lane takes them to the async proxy."""
        groups = agent.groups.setdefault("copies", [])
        while len(groups) > node.arg.attr("pending"):
            local = groups.pop(0).local
            agent.landed |= local
            agent.apart |= local
            agent.own[Op.SMEM, True] = agent.own.get((Op.SMEM, True), 0) | local

    def _do_copies_arrive(self, agent: Agent, node: Statement, lanes: int) -> None:
        """Every lane arrives when its copies so far have landed; who waits there sees them."""
        bits = agent.open.pop("copies", Group()).local
        for group in agent.groups.pop("copies", []):
            bits |= group.local
        bar = self._barrier(agent, node.src[0], agent.cta)
        seen = agent.known() & self.observations
        message = Message(bits | seen, seen, seen)
        self._later(partial(self._arrive, agent, node, bar, lanes, message, agent.known()))

    def _do_wait_ld(self, agent: Agent, node: Statement, lanes: int) -> None:
        group = agent.open.pop("ld", Group())
        agent.knows.generic |= group.local | group.registers
        agent.knows.tensor |= group.local
        agent.apart |= group.local

    def _do_wait_st(self, agent: Agent, node: Statement, lanes: int) -> None:
        """The warp's stores to tensor memory are there for its own later accesses; others come
        after a fence::before_thread_sync."""
        group = agent.open.pop("st", Group())
        agent.knows.generic |= group.local
        agent.knows.tensor |= group.local
        agent.apart |= group.local

    # -- fences -------------------------------------------------------------------------------

    def _parts(self, agent: Agent, lanes: int) -> list[tuple[Knowledge, bool]]:
        """Whose knowledge a fence changes: the elected lane's, and every lane's if all fence."""
        return [(agent.one, False)] + ([(agent.every, True)] if lanes > 1 else [])

    def _do_fence_mbar_init(self, agent: Agent, node: Statement, lanes: int) -> None:
        """It releases at cluster scope: a relaxed cluster barrier behind it hands them over."""
        initialised = agent.own.get((Op.MBAR, False), 0)
        agent.one.async_ |= initialised
        self.handed |= initialised

    def _do_fence_proxy_async(self, agent: Agent, node: Statement, lanes: int) -> None:
        """Only the lane's own accesses: a fence by one thread does nothing for others' writes, and
        none knows of others' fences before they meet."""
        for knows, joint in self._parts(agent, lanes):
            own = agent.own.get((Op.SMEM, joint), 0)
            agent.fenced |= own & ~knows.async_ if joint else 0
            knows.async_ |= own
            knows.tensor |= own

    def _do_fence_registers(self, agent: Agent, node: Statement, lanes: int) -> None:
        agent.every.wgmma |= agent.every.async_ | agent.own.get((Op.FRAG, True), 0)

    def _do_fence_before(self, agent: Agent, node: Statement, lanes: int) -> None:
        for knows, _ in self._parts(agent, lanes):
            knows.tensor_released |= knows.tensor

    def _do_fence_after(self, agent: Agent, node: Statement, lanes: int) -> None:
        for knows, _ in self._parts(agent, lanes):
            knows.tensor |= knows.tensor_seen

    # -- rendezvous ---------------------------------------------------------------------------

    def _meeting(self, agent: Agent, key: tuple[Any, ...], expected: int) -> Rendezvous:
        meeting = self.rendezvous.setdefault(key, Rendezvous(expected))
        if meeting.expected != expected:
            agent.refuse(
                f"barrier {key[-1]} is used with {expected} warps and {meeting.expected}",
                "name the same number of threads in every use",
            )
        if agent.index in meeting.arrived:
            earlier = meeting.arrived[agent.index]
            agent.refuse(
                f"arrives at barrier {key[-1]} again, before what it began at {earlier.site} is "
                "complete",
                "wait on the barrier, or hear from its waiters, before arriving again",
            )
        return meeting

    def _come(self, agent: Agent, node: Statement, meeting: Rendezvous) -> int:
        """Arrive; who meets learns that the generation is complete."""
        if meeting.over and not meeting.over & agent.known():
            agent.refuse(
                f"may be counted with {self.events[meeting.over.bit_length() - 1]} and others, who "
                "use the same barrier",
                "another barrier, or hear from who met there before arriving",
            )
        mine = meeting.arrive(agent.index, node, agent.message(LANES))
        if meeting.generation > mine:
            bit = meeting.over = self._event(agent, node)
            self.handed |= bit
            meeting.done[mine].add(Message(bit, bit, bit))
        return mine

    def _meet(self, agent: Agent, node: Statement, key: tuple[Any, ...], expected: int) -> Steps:
        meeting = self._meeting(agent, key, expected)
        mine = self._come(agent, node, meeting)
        while meeting.generation == mine:
            yield node
        self.steps += 1
        agent.sync_lanes()
        agent.learn(meeting.done[mine])

    def _do_cta_sync(self, agent: Agent, node: Statement, lanes: int) -> Steps:
        return self._meet(agent, node, (agent.cta, 0), self.info.warps)

    def _do_named_sync(self, agent: Agent, node: Statement, lanes: int) -> Steps:
        use = node.arg
        return self._meet(agent, node, (agent.cta, use.attr("id")), use.attr("threads") // LANES)

    def _do_named_arrive(self, agent: Agent, node: Statement, lanes: int) -> None:
        use = node.arg
        key = (agent.cta, use.attr("id"))
        self._come(agent, node, self._meeting(agent, key, use.attr("threads") // LANES))

    def _do_warp_sync(self, agent: Agent, node: Statement, lanes: int) -> None:
        agent.sync_lanes()

    def _do_cluster_arrive(self, agent: Agent, node: Statement, lanes: int) -> None:
        if agent.cluster_arrivals != agent.cluster_waits:
            agent.refuse("arrives twice without a wait", "pair arrive and wait")
        meeting = self.rendezvous.setdefault(("cluster",), Rendezvous(len(self.agents)))
        message = agent.message(LANES)
        if node.arg.attr("order") == "relaxed":
            message = message.relaxed(self.handed, self.asynchronous)
        meeting.arrive(agent.index, node, message)
        agent.cluster_arrivals += 1

    def _do_cluster_wait(self, agent: Agent, node: Statement, lanes: int) -> Steps:
        if agent.cluster_waits >= agent.cluster_arrivals:
            agent.refuse(
                "waits for the cluster without having arrived",
                "barrier.cluster.arrive before barrier.cluster.wait",
            )
        meeting = self.rendezvous[("cluster",)]
        mine = agent.cluster_waits
        while meeting.generation <= mine:
            yield node
        self.steps += 1
        agent.cluster_waits += 1
        agent.sync_lanes()
        agent.learn(meeting.done[mine])

    # -- grids and registers ------------------------------------------------------------------

    def _do_grid_wait(self, agent: Agent, node: Statement, lanes: int) -> None:
        bit = self._event(agent, node)
        self.grid_waits |= bit
        agent.knows.generic |= bit
        agent.knows.async_ |= bit

    def _do_let_dependents(self, agent: Agent, node: Statement, lanes: int) -> None:
        """The next launch of a call relies on this one having waited for what is before the call;
        the next call waits itself."""
        waited = agent.knows.generic & self.grid_waits
        if self.info.chained is not None and not self.program.last and not waited:
            agent.refuse(
                "lets the next launch begin while the grids before the call may still run",
                "griddepcontrol.wait before it",
            )

    def _do_registers(self, agent: Agent, node: Statement, lanes: int) -> Steps:
        """setmaxnreg: dec gives registers to the CTA's pool, inc waits until they are there."""
        asked, up = node.arg.attr("registers"), node.arg.attr("direction") == "inc"
        if asked != agent.registers and (asked > agent.registers) != up:
            agent.refuse(
                f"{node.arg.attr('direction')} to {asked}, but a lane has {agent.registers}",
                "inc above and dec below what the warp has",
            )
        while asked - agent.registers > self.free_registers[agent.cta]:
            yield node
        self.steps += 1
        self.free_registers[agent.cta] -= asked - agent.registers
        agent.registers = asked

    # -- tensor memory ------------------------------------------------------------------------

    def _do_tmem_alloc(self, agent: Agent, node: Statement, lanes: int) -> None:
        memory = self.tmem[agent.cta]
        if node.arg.attr("cta_group") == 2 and not agent.cluster_waits:
            agent.refuse(
                "a pair allocates before its peer is known to run",
                "a cluster barrier before tcgen05.alloc",
            )
        if memory.state != "not allocated":
            agent.refuse(f"tensor memory is already {memory.state}", "alloc once")
        if memory.relinquished:
            agent.refuse("the right to allocate was given up", "alloc before relinquishing")
        memory.state, memory.columns = "allocated", node.arg.attr("columns")
        memory.event = self._event(agent, node)
        agent.knows.generic |= memory.event

    def _do_tmem_relinquish(self, agent: Agent, node: Statement, lanes: int) -> None:
        self.tmem[agent.cta].relinquished = True

    def _do_tmem_address(self, agent: Agent, node: Statement, lanes: int) -> None:
        agent.has_address = True

    def _do_tmem_dealloc(self, agent: Agent, node: Statement, lanes: int) -> None:
        memory = self.tmem[agent.cta]
        if memory.state != "allocated" or not agent.has_address:
            agent.refuse("frees tensor memory it has not", "alloc before dealloc")
        if node.arg.attr("columns") != memory.columns:
            agent.refuse(
                f"frees {node.arg.attr('columns')} columns of {memory.columns}",
                "free the whole allocation",
            )
        pair = node.arg.attr("cta_group") == 2  # collective: it frees for both CTAs
        ctas = {agent.cta & ~1, agent.cta | 1} if pair else {agent.cta}
        for cta in ctas:
            if not agent.knows.generic & self.tmem[cta].event:
                agent.refuse(
                    f"is not ordered after the allocation of CTA {cta}",
                    "a cluster barrier between the pair's alloc and dealloc",
                )
        access = Access("tensor memory", "w", "tensor")
        everything = (0, 1 << 20, 0, 1 << 20)
        for key, history in self.histories.items():
            if key[0] is Op.TMEM and key[2] in ctas:
                conflict = history.conflicts(everything, "w", agent.knows.tensor, "")
                if conflict is not None:
                    raise HazardError(messages.race(self, agent, node, access, history, conflict))
        memory.state = "deallocated"
