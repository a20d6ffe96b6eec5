"""The abstract machine: warps as coroutines over events and knowledge, no data.

Every warp of one cluster runs the lowered kernel with small trip counts. Accesses are checked
against what their issuer knows in their proxy, so one run finds races that any schedule could show;
several schedules (who runs first, how late asynchronous work lands) find parity and phase mistakes.
"""

from ptxflow.compiler.atoms.table import Atom, atom
from ptxflow.compiler.check import messages
from ptxflow.compiler.check.access import LANES
from ptxflow.compiler.check.final import check_end
from ptxflow.compiler.check.program import Agent, Steps, Straight
from ptxflow.compiler.check.state import Barrier
from ptxflow.compiler.check.sync import Synchronisation
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import Op, Statement, UOp, body_of

SCHEDULES = ("eager", "late")  # late: asynchronous work lands only when nobody can go on
_STEP_LIMIT = 2_000_000


class Machine(Synchronisation):
    """One abstract run of a program."""

    def run(self) -> int:
        """Run to the end; the number of statements executed."""
        order = self.agents if self.schedule == "eager" else self.agents[::-1]
        running = [(a, self._warp(a)) for a in order]
        blocked: dict[int, Statement] = {}
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
                    waiting = [
                        (a, blocked[a.index], self._awaited(a, blocked[a.index]))
                        for a, _ in running
                    ]
                    raise HazardError(messages.deadlock(self, waiting))
                self.landing.pop(0)()
        for land in self.landing:
            land()
        check_end(self)
        return self.steps

    def _warp(self, agent: Agent) -> Steps:
        self._registers_at_entry(agent)
        for statement in self.program.kernel.src:
            if statement.op is Op.ROLE:
                spec = statement.arg
                if not spec.first <= agent.warp < spec.first + spec.warps:
                    continue
                agent.enter(spec.name)
                yield from self._block(agent, statement.src, LANES, spec.elected)
            else:
                agent.enter("block")
                yield from self._block(agent, (statement,), LANES)

    def _block(
        self, agent: Agent, body: tuple[Statement, ...], lanes: int, elected: bool = False
    ) -> Steps:
        alone = elected and lanes > 1
        if alone:
            agent.elect()
        for statement in self.program.parts(body):
            if isinstance(statement, Straight):
                self._straight(agent, statement, 1 if elected else lanes)
                continue
            try:
                if statement.op is Op.ATOM:
                    row, mine = atom(statement.arg.atom), 1 if elected else lanes
                    self._atom(agent, statement, row, mine)
                    if row.effect:
                        yield from getattr(self, f"_do_{row.effect}")(agent, statement, mine) or ()
                else:
                    yield from self._branch(agent, statement, 1 if elected else lanes)
            except ZeroDivisionError:
                raise HazardError(f"{agent.who()} at {statement.site}: divides by zero") from None
        if alone:
            agent.rejoin()

    def _straight(self, agent: Agent, row: Straight, lanes: int) -> None:
        states, count = self.private[agent.index], len(row.body)
        key = (bool(self.demanded), *map(states.__getitem__, row.places))
        made = row.made.get(key)
        if made is None or self.steps + count > _STEP_LIMIT:
            for node in row.body:
                self._atom(agent, node, atom(node.arg.atom), lanes)
            row.made[key] = tuple(map(states.__getitem__, row.places))
        else:
            self.steps += count
            states.update(zip(row.places, made, strict=True))

    def _branch(self, agent: Agent, node: Statement, lanes: int) -> Steps:
        value = self.program.value
        match node.op:
            case Op.LOOP:
                start, stop, step = (value(s)(agent.env) for s in node.src[1:4])
                name = node.src[0].arg[0]
                if step < 1:
                    raise HazardError(
                        f"{agent.who()} at {node.site}: a loop has a step of {step}; it must "
                        "be 1 or more"
                    )
                for i in range(start, stop, step):
                    agent.env[name] = i
                    yield from self._block(agent, body_of(node), lanes)
            case Op.IF:
                if value(node.src[0])(agent.env):
                    yield from self._block(agent, body_of(node), lanes, node.arg)
            case _:
                raise HazardError(f"{node.op} at {node.site} is not a statement")

    def _atom(self, agent: Agent, node: Statement, row: Atom, lanes: int) -> None:
        self.steps += 1
        agent.node = node
        if self.steps > _STEP_LIMIT:
            raise HazardError(f"{agent.who()} at {node.site}: the run does not end")
        if self.info.dependent:
            self._after_the_grids_before(agent, node, row)
        for access, operand, private in self.program.accesses(node, row):
            if private:
                self._access_private(agent, node, access, operand)
            else:
                self._access(agent, row, node, access, operand, lanes)
        if row.orders:
            agent.epoch.clear()

    def _after_the_grids_before(self, agent: Agent, node: Statement, row: Atom) -> None:
        """A dependent launch starts while the grid before it may still read and write. The first
        launch of a program waits for all before it, so that in the others only what kernels of the
        program write must be awaited."""
        awaited, constant = self.program.awaited, self.info.chained or ()
        touches = any(
            kind in ("map", "global") and _tensor(row.operand(node, name)) not in constant
            for name, kind in row.operands
        )
        if awaited is not None:
            places = [s.src[0] for s in node.src if s.op is Op.SLOT]
            touches = any(kind == "map" for _, kind in row.operands) or any(
                s.op is Op.GLOBAL and s.arg.name in awaited for s in places
            )
        if touches and not agent.knows.generic & self.grid_waits:
            agent.refuse(
                "accesses global memory while the grids before may still run",
                "griddepcontrol.wait before the first access of a dependent launch",
            )

    def _awaited(self, agent: Agent, node: Statement) -> Barrier | None:
        """The mbarrier that a blocked statement waits for."""
        if atom(node.arg.atom).effect != "mbar_wait":
            return None
        return self._barrier(agent, node.src[0], agent.cta)


def _tensor(operand: UOp) -> str:
    """The name of the tensor that a map or a place in global memory is of."""
    name: str = operand.src[0].arg.name if operand.op is Op.SLOT else operand.arg
    return name.removesuffix("_map")
