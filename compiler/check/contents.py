"""What a place holds: written before it is read, read before it is overwritten, sums whole."""

from ptxflow.compiler.atoms.table import Access, atom
from ptxflow.compiler.check import messages
from ptxflow.compiler.check.program import Agent
from ptxflow.compiler.check.run import Run
from ptxflow.compiler.check.state import History, Region, minus, overlap, uncovered
from ptxflow.compiler.ir import Op, Statement


class Contents(Run):
    """The part of the abstract machine that follows data, not order."""

    def _must_be_used(self, kind: Op) -> bool:
        """Whether sums and values may not be overwritten or left unread: this run says what it
        computes, so nothing else is worth computing."""
        return bool(self.trip.outputs) and kind in (Op.FRAG, Op.TMEM, Op.SMEM)

    def _check_data(
        self, agent: Agent, node: Statement, access: Access, history: History, region: Region
    ) -> None:
        if access.mode in "ra" or (access.mode == "rw" and self._accumulates(agent, node)):
            self._check_read(agent, node, access, history, region)
        if access.mode != "r" and history.unread:
            for unread in history.unread:
                # threads fill a tile bit by bit, through regions larger than what each one writes
                again = history.kind is Op.SMEM and not unread.loaded and access.proxy == "generic"
                if overlap(unread.region, region) and not again:
                    agent.refuse(
                        f"overwrites {history.name} before anyone read what "
                        f"{self.event_of(unread)} put there",
                        "consume every stage, sum and value that is produced",
                    )

    def _check_sum(
        self, agent: Agent, node: Statement, access: Access, history: History, region: Region
    ) -> None:
        """Nothing is added to a sum that somebody has read, until it is begun anew."""
        if access.mode == "r":
            if region not in history.taken:
                history.taken.append(region)
        elif access.mode == "a" or (access.mode == "rw" and self._accumulates(agent, node)):
            must = history.sums or self._must_be_used(history.kind)
            if must and any(overlap(t, region) for t in history.taken):
                agent.refuse(
                    f"adds to {history.name}, which was read already",
                    "read a sum when it is complete",
                )
        else:
            history.taken = [rest for t in history.taken for rest in minus(t, region)]

    def _check_begun(
        self, agent: Agent, node: Statement, access: Access, history: History, region: Region
    ) -> None:
        """A sum that is begun in memory is read when something was added to it."""
        if access.mode == "r" and any(overlap(f, region) for f in history.fresh):
            agent.refuse(
                f"reads {history.name}, to which nothing was added since it was begun",
                "add to it first, or read what was added to",
            )
        history.fresh = [rest for f in history.fresh for rest in minus(f, region)]
        if node.arg.attr("begun"):
            history.sums = True
            history.fresh.append(region)

    def _check_round(
        self, agent: Agent, node: Statement, access: Access, history: History, region: Region,
        known: int, bit: int,
    ) -> None:  # fmt: skip
        """A stage that copies refill is refilled whole: nothing is read in two rounds."""
        if access.mode != "r":
            history.replace(region)
            if access.done == "copies":
                history.refill(bit, known, node)
            return
        for refill, regions in history.old.items():
            if refill & known and any(overlap(old, region) for old in regions):
                began = self.events[refill.bit_length() - 1]._replace(node=history.began[refill])
                agent.refuse(
                    f"reads {history.name}, of which part was read before "
                    f"{began} began to refill it, and not refilled",
                    "refill all of a stage that is read again",
                )
        history.use(region, bit)

    def _check_read(
        self, agent: Agent, node: Statement, access: Access, history: History, region: Region
    ) -> None:
        if not history.holds(region) and uncovered(region, history.written):
            agent.refuse(
                messages.unwritten(self, node, access, history),
                "wait for the data before reading it, on a barrier that expects all its bytes",
            )
        history.read(region)
        if access.proxy == "generic" or history.kind is not Op.SMEM:
            return
        sources = {p.source for p in history.past if p.source and overlap(p.region, region)}
        if len(sources) > 1 and dict(atom(node.arg.atom).operands)[access.operand] == "desc":
            parts = ", ".join(
                f"{name} at column {column}, row {row} upwards"
                for name, column, row in sorted(sources)
            )
            agent.refuse(
                f"{history.name} holds parts of different tiles ({parts})",
                "let all CTAs that share an operand work on the same tile",
            )

    def _accumulates(self, agent: Agent, node: Statement) -> bool:
        row = atom(node.arg.atom)
        if not any(name == "accumulate" for name, _ in row.operands):
            return True
        return bool(self.program.value(row.operand(node, "accumulate"))(agent.env))
