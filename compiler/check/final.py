"""What must hold when the last warp leaves: nothing in flight or left over, all of C written."""

from ptxflow.compiler.check.program import Agent, Group
from ptxflow.compiler.check.run import Run
from ptxflow.compiler.check.state import uncovered
from ptxflow.compiler.errors import HazardError
from ptxflow.compiler.ir import show


def check_end(run: Run) -> None:
    """Raise HazardError for grids before that nobody awaited, work in flight, unbalanced
    barriers, unread stages, TMEM leaks."""
    if run.info.dependent and not run.grid_waits:
        raise HazardError(
            f"the kernel ends without griddepcontrol.wait [{run.trip.name}]: it may end before "
            "the grids before it, and who waits for it alone does not find what they write; fix: a "
            "wait on every path of some warp"
        )
    for agent in run.agents:
        _in_flight(agent)
    for cta in range(run.info.cluster):
        _left_over(run, cta)
    for bar in run.barriers.values():
        if bar.tx or bar.pending != bar.count:
            raise HazardError(
                f"the kernel ends with {bar.name} half way: {bar.state()} [{run.trip.name}]; "
                "fix: balance the arrivals and bytes of each phase"
            )
    for history in run.histories.values():
        for unread in history.unread:
            raise HazardError(
                f"nobody reads what {run.event_of(unread)} put into {history.name} "
                f"[{run.trip.name}]; fix: consume every stage, sum and value that is produced"
            )
    last = ((w, *state) for w, states in enumerate(run.private) for state in states.items())
    for warp, storage, number in last:
        for node, _ in run.program.moves.states[number].unread:
            what = f"{show(node)} at {node.site} by {run.agents[warp].who()}"
            raise HazardError(
                f"nobody reads what {what} put into {storage.arg.name} [{run.trip.name}]; "
                "fix: consume every stage, sum and value that is produced"
            )
    for key, meeting in run.rendezvous.items():
        if meeting.arrived:
            left = ", ".join(sorted({f"{show(n)} at {n.site}" for n in meeting.arrived.values()}))
            raise HazardError(
                f"the kernel ends with barrier {key[-1]} half way: {len(meeting.arrived)} of "
                f"{meeting.expected} warps have arrived ({left}) [{run.trip.name}]; "
                "fix: a wait for each arrival"
            )
    _tensor_memory(run)
    _check_output(run)


def _tensor_memory(run: Run) -> None:
    """Each CTA frees its tensor memory, and gives up the right to allocate it."""
    for cta, memory in enumerate(run.tmem):
        if memory.state == "allocated":
            raise HazardError(
                f"CTA {cta} exits with tensor memory allocated [{run.trip.name}]; "
                "fix: tcgen05.dealloc after the last access"
            )
        if memory.state != "not allocated" and not memory.relinquished:
            raise HazardError(
                f"CTA {cta} never gives up the right to allocate tensor memory "
                f"[{run.trip.name}]; fix: tcgen05.relinquish_alloc_permit after the alloc, "
                "else another CTA of the SM hangs in its own"
            )


def _in_flight(agent: Agent) -> None:
    """Every asynchronous operation but tcgen05's must have been waited for by its own warp."""
    waiting: list[tuple[str, Group]] = [*agent.open.items()]
    waiting += [(pipe, g) for pipe, groups in agent.groups.items() for g in groups]
    known = agent.known()
    for pipe, group in waiting:
        if pipe != "tcgen05" and group.last is not None and group.flying() & ~known:
            raise HazardError(
                f"{agent.who()} exits with {show(group.last)} at {group.last.site} in flight on "
                f"{pipe}; fix: commit it and wait for it before the end"
            )


def _left_over(run: Run, cta: int) -> None:
    """Whatever reached into a CTA must be known there when its last warp leaves."""
    known = over = 0
    for agent in run.agents:
        if agent.cta == cta:
            known |= agent.known()
            over |= agent.every.over | agent.one.over
    unfinished = run.sent[cta] & ~(known | over)
    if unfinished:
        event = run.events[unfinished.bit_length() - 1]
        raise HazardError(
            f"CTA {cta} may exit before {event} has arrived [{run.trip.name}]; fix: a cluster "
            "barrier at which whoever waited for it arrives"
        )
    missing = run.foreign[cta] & ~known
    if missing:
        event = run.events[missing.bit_length() - 1]
        raise HazardError(
            f"CTA {cta} may exit before {event} has reached it [{run.trip.name}]; fix: wait "
            "for it, or a cluster barrier before the end"
        )


def _check_output(run: Run) -> None:
    for name, rows, columns in run.trip.outputs:
        for history, region in run.bands(name, 0, 0, rows, columns):
            left = uncovered(region, history.written)
            if left:
                r0, r1, c0, c1 = left[0]
                raise HazardError(
                    f"{name}: rows {r0}..{r1 - 1}, columns {c0}..{c1 - 1} are never written "
                    f"[{run.trip.name}]; fix: cover every tile"
                )
