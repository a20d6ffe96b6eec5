"""The messages of refusals: who, where, which rule, which facts, and what would fix it."""

import re
from collections.abc import Iterable

from ptxflow.compiler.atoms.table import Access, atom
from ptxflow.compiler.check.program import Agent
from ptxflow.compiler.check.run import Run
from ptxflow.compiler.check.state import Barrier, History, Past
from ptxflow.compiler.ir import Op, Statement, show


def race(
    run: Run, agent: Agent, node: Statement, access: Access, history: History, past: Past
) -> str:
    """Two conflicting accesses, and the ordering that is missing between them."""
    earlier = run.event_of(past)
    missing, fix = _missing(run, agent, access, history, past)
    return (
        f"race on {history.name}: {show(node)} at {node.site} by {agent.who()} ({access.mode}, "
        f"{access.proxy} proxy) is not ordered after {earlier} ({past.mode}): {missing} "
        f"[{run.trip.name}]; fix: {fix}"
    )


def _missing(
    run: Run, agent: Agent, access: Access, history: History, past: Past
) -> tuple[str, str]:
    k, bit = agent.knows, past.bit
    earlier = run.event_of(past)
    if k.tensor_seen & bit and access.proxy == "tensor":
        return "seen, but not fenced", "tcgen05.fence::after_thread_sync after the wait"
    if access.done == "wgmma" and (k.async_ & bit or (history.kind is Op.FRAG and k.generic & bit)):
        return (
            "known to the warp, but not to its wgmmas",
            "wgmma.fence after the earlier access and the wait for it",
        )
    if k.generic & bit and access.proxy != "generic" and history.kind is not Op.TMEM:
        return "known to the generic proxy only", "fence.proxy.async after the earlier access"
    if agent.every.of(access.proxy) & bit:
        return (
            "done by all lanes, of which each knows its own part",
            "bar.warp.sync after the earlier access",
        )
    if earlier.agent is agent:
        return "still in flight", "commit it and wait for it first"
    if access.proxy == "tensor" and earlier.agent.every.tensor & bit:
        return (
            "complete, but not released",
            "tcgen05.fence::before_thread_sync and an arrive after the earlier access",
        )
    if past.proxy == "generic" and earlier.agent.cta != agent.cta:
        return (
            "nothing hands it over at cluster scope",
            "mbarrier.arrive.release.cluster after it, and an acquire.cluster wait before this",
        )
    if atom(earlier.node.arg.atom).effect == "tma_load":
        return (
            "its bytes are not known to have landed",
            "arrive.expect_tx with all bytes of the phase, and a wait on that barrier",
        )
    return (
        "not known to be complete",
        "a wait on a barrier that the earlier access completes or its issuer arrives at",
    )


def unwritten(run: Run, node: Statement, access: Access, history: History) -> str:
    """A read of what nothing wrote, and who writes there."""
    writers = run.program.writers(atom(node.arg.atom).operand(node, access.operand).src[0])
    return (
        f"reads {history.name}, of which part was never written: {writers} writes it, and no wait "
        "orders the read after that"
    )


def deadlock(run: Run, blocked: Iterable[tuple[Agent, Statement, Barrier | None]]) -> str:
    """Every blocked warp's statement, the state of what it waits for, and who should arrive.

    The barrier is the mbarrier that the statement waits for, None for other statements.
    """
    waiting: dict[str, list[str]] = {}
    for agent, node, bar in blocked:
        what = f"{show(node)} at {node.site}"
        what += _awaited(run, agent, node, bar)
        waiting.setdefault(what, []).append(agent.who())
    who_waits = "; ".join(f"{_fold(who)} at {what}" for what, who in waiting.items())
    return (
        f"deadlock [{run.trip.name}]: {who_waits}; fix: make somebody arrive, send the bytes or "
        "give the registers that each of these waits for"
    )


def _awaited(run: Run, agent: Agent, node: Statement, bar: Barrier | None) -> str:
    """The state of what a blocked statement waits for."""
    if bar is not None:
        arrivers = run.program.arrivers(node.src[0].src[0])
        return f" ({bar.name} is in {bar.state()}; {arrivers} arrives there)"
    if atom(node.arg.atom).effect == "registers":
        asked, free = node.arg.attr("registers"), run.free_registers[agent.cta]
        return (
            f" (a lane has {agent.registers} of the {asked} registers it asks for, and {free} "
            "lie free: no setmaxnreg.dec gives more)"
        )
    return ""


def _fold(who: list[str]) -> str:
    """`consumer warps 0, 1, 2 of CTA 0` for names that differ in their warp alone."""
    parts: dict[tuple[str, str], list[str]] = {}
    for name in who:
        match = re.fullmatch(r"(.*) warp (\d+) (.*)", name)
        assert match is not None
        parts.setdefault((match[1], match[3]), []).append(match[2])
    return ", ".join(
        f"{role} warp{'s' * (len(warps) > 1)} {', '.join(warps)} {cta}"
        for (role, cta), warps in parts.items()
    )
