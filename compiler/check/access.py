"""Accesses of the abstract machine: where they fall, what they must know, what completes them.

An access is refused unless its issuer knows, in the access's proxy, every earlier conflicting one.
"""

from typing import Any

from ptxflow.compiler.atoms.table import GENERIC, Access, Atom, atom
from ptxflow.compiler.check import messages
from ptxflow.compiler.check.contents import Contents
from ptxflow.compiler.check.program import Agent, Group
from ptxflow.compiler.check.state import COMMUTING, Barrier, History, Past, Region, Unread
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import Op, Slot, Statement, Value

LANES = 32
K_BYTES = 32  # of K in one wgmma or tcgen05.mma, whatever the type
M_64 = 64 // 16  # as an instruction descriptor has it, in bits 24 and up


class Accesses(Contents):
    """Accesses to the memory of one abstract run."""

    # -- events ---------------------------------------------------------------------------------

    def _shared_event(
        self, agent: Agent, node: Statement, access: Access, key: tuple[Any, ...]
    ) -> int:
        """One event for all like accesses of a warp between two ordering statements.

        They become known together, so telling them apart would change no verdict; messages
        name the statement kept beside the event. TMA loads are not shared: each counts its own
        bytes.
        """
        if access.done == "mbar":
            return self._event(agent, node)
        key = (access.done, access.proxy, *key)
        found = agent.epoch.get(key)
        if found is None:
            found = agent.epoch[key] = self._event(agent, node)
        return found

    def _registers_at_entry(self, agent: Agent) -> None:
        """What the registers hold at entry was written generically."""
        for storage in self.info.storage:
            if storage.op is Op.FRAG and storage not in self.program.private:
                node = self.program.kernel
                bit = self._event(agent, node)
                history = self._history((Op.FRAG, storage.arg.name, agent.index), storage.arg.name)
                whole = (0, storage.arg.size, 0, 1)
                past = Past(bit.bit_length() - 1, bit, node, "w", whole, agent.index, "generic")
                history.past.append(past)
                agent.own[Op.FRAG, True] = agent.own.get((Op.FRAG, True), 0) | bit
                agent.every.generic |= bit

    # -- places -------------------------------------------------------------------------------

    def _places(
        self, agent: Agent, node: Statement, row: Atom, operand: Slot, cta: int
    ) -> list[tuple[History, Region]]:
        """The histories and regions that an operand names, as this warp sees them in this CTA."""
        storage, stage_node, offset_node = operand.src
        value, env = self.program.value, agent.env
        stage, offset = value(stage_node)(env), value(offset_node)(env)
        name = storage.arg.name
        match storage.op:
            case Op.GLOBAL:
                rows, columns, *again = operand.arg
                count, stride = again or (1, 0)
                return [
                    place
                    for i in range(count)
                    for place in self.bands(name, stage, offset + i * stride, rows, columns)
                ]
            case Op.FRAG:
                key: tuple[Any, ...] = (Op.FRAG, name, agent.index)
            case kind:
                key = (kind, name, cta, stage)
        self._bounds(agent, operand, stage, offset)
        across: tuple[tuple[int, int], ...] = ((0, 1),)
        if storage.op is Op.TMEM:
            across = self._lanes(agent, row, cta)
            self._columns(agent, operand, stage, offset, cta)
        elif storage.op is Op.SMEM:
            across = self._bytes(agent, node, row, operand)
        history = self._history(key, f"{name}[{stage}]")
        return [(history, (offset, offset + operand.arg, *part)) for part in across]

    def _lanes(self, agent: Agent, row: Atom, cta: int) -> tuple[tuple[int, int], ...]:
        """Lanes of TMEM that are touched: a warp's quarter, of which 16 rows are half; an MMA's
        all, or of 64 rows the first half of each quarter."""
        memory = self.tmem[cta]
        if memory.state != "allocated":
            agent.refuse(
                f"tensor memory of CTA {cta} is {memory.state}",
                "access TMEM between tcgen05.alloc and tcgen05.dealloc",
            )
        if not agent.has_address and agent.cta == cta:
            agent.refuse("does not know the TMEM address", "read the slot first")
        if not agent.knows.generic & memory.event:
            agent.refuse(
                f"is not ordered after {self.events[memory.event.bit_length() - 1]}, which "
                f"allocates the tensor memory of CTA {cta}",
                "a barrier with the allocating warp",
            )
        if not any(n == "lane" for n, _ in row.operands):
            halves = agent.node.arg.attr("idesc", 0) >> 24 == M_64
            return tuple((i, i + 16) for i in range(0, 128, 32)) if halves else ((0, 128),)
        first = self.program.value(row.operand(agent.node, "lane"))(agent.env) >> 16
        quarter, half = 32 * (agent.warp % 4), agent.node.arg.attr("shape", "").startswith("16x")
        if first not in (quarter, quarter + 16 * half):
            agent.refuse(
                f"lanes {first}.. are out of reach of warp {agent.warp}",
                "a warp reaches lanes 32*(warp % 4) and up",
            )
        return ((first, first + (16 if half else 32)),)

    def _bytes(
        self, agent: Agent, node: Statement, row: Atom, operand: Slot
    ) -> tuple[tuple[int, int], ...]:
        """Bytes of each row that are touched: an MMA takes a slice of K, others what they say, each
        warp of a warpgroup so many further on, or all."""
        step = None
        for (name, kind), node_operand in zip(row.operands, node.src, strict=True):
            if kind == "desc" and node_operand is operand:
                step = node.arg.attr(f"{name}_step")
        if step is not None:
            return ((step, step + K_BYTES),)
        whole = ((0, self.program.row_bytes.get(operand.src[0], 128)),)
        across: tuple[tuple[int, int], ...] = node.arg.attr("across", whole)
        on = agent.warp % 4 * node.arg.attr("each_warp", 0)
        return tuple((low + on, high + on) for low, high in across)

    def _columns(self, agent: Agent, operand: Slot, stage: int, offset: int, cta: int) -> None:
        storage = operand.src[0]
        last = self.program.plan.tmem[storage] + stage * storage.arg.size + offset + operand.arg
        if last > self.tmem[cta].columns:
            agent.refuse(
                f"reaches column {last} of {self.tmem[cta].columns} allocated",
                "allocate what the kernel declares",
            )

    def _bounds(self, agent: Agent, operand: Slot, stage: int, offset: int) -> None:
        buffer = operand.src[0].arg
        if stage >= buffer.stages:
            agent.refuse(f"{buffer.name} has no stage {stage}", "index modulo the stages")
        if offset + operand.arg > buffer.size:
            agent.refuse(
                f"{buffer.name}[{stage}] ends at {buffer.size}, not at {offset + operand.arg}",
                "keep the access inside its stage",
            )

    def _ctas(self, agent: Agent, node: Statement, access: Access) -> list[int]:
        """The CTAs in which an access takes place."""
        use = node.arg
        if access.done == "mbar" and use.attr("mask"):
            return self._masked(agent, use.attr("mask"))
        if access.done == "tcgen05" and use.attr("cta_group") == 2:
            return [agent.cta & ~1, agent.cta | 1]
        row = atom(use.atom)
        if row.operand(node, access.operand).src[0].op is Op.SMEM:
            for (name, _), operand in zip(row.operands, node.src, strict=True):
                if name == "rank":
                    return [self.peer(agent, operand)]
        return [agent.cta]

    def peer(self, agent: Agent, rank: Value) -> int:
        """The CTA of a rank."""
        cta = self.program.value(rank)(agent.env)
        if cta >= self.info.cluster:
            agent.refuse(f"the cluster has no CTA {cta}", "a rank of the cluster")
        return cta

    def _masked(self, agent: Agent, mask: int | None) -> list[int]:
        """The CTAs of a multicast mask; the warp's own where there is none."""
        if not mask:
            return [agent.cta]
        if mask >> self.info.cluster:
            agent.refuse(
                f"mask {mask:#b} names CTAs outside the cluster of {self.info.cluster}",
                "one bit for each rank of the cluster",
            )
        return [c for c in range(self.info.cluster) if mask >> c & 1]

    # -- the access itself --------------------------------------------------------------------

    def _access(
        self, agent: Agent, row: Atom, node: Statement, access: Access, operand: Slot, lanes: int
    ) -> None:
        kind = operand.src[0].op
        if kind is Op.MBAR:
            self._init_barrier(agent, node, operand)
            return
        pipe = self._pipe(agent, node, access)
        known = agent.knows.of(access.proxy, access.mode, access.done)
        reads = access.mode in COMMUTING and access.proxy == GENERIC and lanes > 1
        if access.done == "copies" or reads:  # of what another lane of the warp read or wrote
            known &= ~agent.apart
        for cta in self._ctas(agent, node, access):
            bit = 0
            for history, region in self._places(agent, node, row, operand, cta):
                conflict = history.conflicts(region, access.mode, known, pipe)
                if conflict is not None:
                    raise HazardError(messages.race(self, agent, node, access, history, conflict))
                self._check_data(agent, node, access, history, region)
                if kind is Op.FRAG or history.sums:
                    self._check_sum(agent, node, access, history, region)
                if history.sums or node.arg.attr("begun"):
                    self._check_begun(agent, node, access, history, region)
                bit = bit or self._shared_event(agent, node, access, (kind, cta, lanes))
                event = bit.bit_length() - 1
                if operand.src[0] in self.program.copied:
                    self._check_round(agent, node, access, history, region, known, bit)
                boxed = node.arg.attr("box") and access.done == "mbar"
                boxed = boxed and not node.arg.attr(
                    "apart"
                )  # it says that boxes are of many places
                source = self._source(agent, row, node, region) if boxed else None
                past = Past(
                    event, bit, node, access.mode, region, agent.index, access.proxy, pipe, source
                )
                history.record(past)
                if node.arg.attr("last") == access.operand:
                    history.forget(region)
                spare = node.arg.attr("unread") == access.operand  # it says that nobody need read
                used = access.mode != "r" and self._must_be_used(kind) and not spare
                if access.done == "mbar" or used:
                    history.read(region)
                    history.unread.append(Unread(event, node, region, access.done == "mbar"))
            self._pending(agent, node, access, kind, bit, cta, lanes)

    def _access_private(self, agent: Agent, node: Statement, access: Access, operand: Slot) -> None:
        storage, stage, offset_node = operand.src
        offset = self.program.fixed.get(operand)
        if offset is None:
            offset = self.program.value(offset_node)(agent.env)
            self._bounds(agent, operand, self.program.value(stage)(agent.env), offset)
            if stage.op is Op.CONST and offset_node.op is Op.CONST:
                self.program.fixed[operand] = offset
        states = self.private[agent.index]
        states[storage] = self.program.moves.after(
            states[storage],
            node,
            access,
            operand,
            offset,
            access.mode == "rw" and self._accumulates(agent, node),
            storage in self.demanded,
            agent.refuse,
        )

    def _pipe(self, agent: Agent, node: Statement, access: Access) -> str:
        """Operations of one pipe on one accumulator run in order (PTX ISA: same shape)."""
        if access.mode == "rw" and access.done != "now":
            shape = node.arg.attr("n") or node.arg.attr("idesc")
            return f"{access.done} {agent.index} {shape}"
        return ""

    def _source(
        self, agent: Agent, row: Atom, node: Statement, region: Region
    ) -> tuple[str, int, int] | None:
        """Where a box comes from: its map and first column, and the row that offset 0 would hold.

        Boxes side by side in one operand of an MMA must agree in all three.
        """
        columns, _ = node.arg.attr("box")
        value, env = self.program.value, agent.env
        row_at_0 = value(row.operand(node, "c1"))(env) - region[0] // (
            columns * node.arg.attr("element")
        )
        name = row.operand(node, "map").arg
        return name, value(row.operand(node, "c0"))(env), row_at_0 & 0xFFFFFFFF

    def _pending(
        self,
        agent: Agent,
        node: Statement,
        access: Access,
        kind: Op,
        bit: int,
        cta: int,
        lanes: int,
    ) -> None:
        """File an access under what completes it."""
        if access.done == "now":
            agent.own[kind, lanes > 1] = agent.own.get((kind, lanes > 1), 0) | bit
            agent.knows.generic |= bit
            if cta != agent.cta:
                self.foreign[cta] |= bit
            if lanes > 1 and kind is not Op.FRAG:
                agent.apart |= bit
            return
        if kind is Op.TMEM:
            self.handed |= bit
        elif kind is Op.SMEM:
            self.asynchronous |= bit
        if access.done == "mbar":
            self.foreign[cta] |= bit
            agent.open.setdefault(f"tma {cta}", Group()).local |= bit
            return
        group = agent.open.setdefault(access.done, Group())
        group.last = node
        group.after |= agent.knows.of(access.proxy)
        if kind is Op.GLOBAL:
            group.remote |= bit
        elif kind is Op.FRAG:
            group.registers |= bit
        else:
            group.local |= bit
            self.foreign[cta] |= bit

    # -- mbarriers as objects -----------------------------------------------------------------

    def _init_barrier(self, agent: Agent, node: Statement, operand: Slot) -> None:
        stage = self.program.value(operand.src[1])(agent.env)
        buffer = operand.src[0].arg
        key = (buffer.name, agent.cta, stage)
        if stage >= buffer.stages:
            agent.refuse(f"{buffer.name} has no stage {stage}", "index modulo the stages")
        if key in self.barriers:
            agent.refuse(f"{buffer.name}[{stage}] is initialised twice", "init once")
        bit = self._event(agent, node)
        agent.own[Op.MBAR, False] = agent.own.get((Op.MBAR, False), 0) | bit
        agent.knows.generic |= bit
        self.barriers[key] = Barrier(
            f"{buffer.name}[{stage}]", buffer.count, buffer.count, init=bit.bit_length() - 1
        )

    def _barrier(self, agent: Agent, operand: Slot, cta: int, fenced: bool = False) -> Barrier:
        """The barrier that an operand names, which its user must know to be initialised.

        `fenced`: its user is TMA, a commit or a peer, which sees the initialisation only behind
        fence.mbarrier_init (PTX ISA 9.7.13.4); threads of the CTA need a CTA barrier alone.
        """
        stage = self.program.value(operand.src[1])(agent.env)
        name = operand.src[0].arg.name
        found = self.barriers.get((name, cta, stage))
        k = agent.knows
        known = k.async_ if fenced or cta != agent.cta else k.generic | k.async_
        if found is None or not known >> found.init & 1:
            why = (
                "was never initialised"
                if found is None
                else f"was initialised by {self.events[found.init]}, which is not ordered before"
            )
            agent.refuse(
                f"{name}[{stage}] of CTA {cta} {why}",
                "mbarrier.init, fence.mbarrier_init, then a barrier of all its users",
            )
        return found
