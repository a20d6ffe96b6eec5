"""The messages of refusals: who, where, which rule, which facts, and what would fix it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ptxflow.compiler.atoms.table import Access, atom
from ptxflow.compiler.check.program import Agent
from ptxflow.compiler.check.state import History, Past
from ptxflow.compiler.ir import Op, UOp, show

if TYPE_CHECKING:
    from ptxflow.compiler.check.access import Accesses
    from ptxflow.compiler.check.contents import Contents
    from ptxflow.compiler.check.machine import Machine


def race(
    machine: Accesses, agent: Agent, node: UOp, access: Access, history: History, past: Past
) -> str:
    """Two conflicting accesses, and the ordering that is missing between them."""
    earlier = machine.events[past.event]
    missing, fix = _missing(machine, agent, access, history, past)
    return (
        f"race on {history.name}: {show(node)} at {node.site} by {agent.who()} ({access.mode}, "
        f"{access.proxy} proxy) is not ordered after {earlier} ({past.mode}): {missing} "
        f"[{machine.trip.name}]; fix: {fix}"
    )


def _missing(
    machine: Accesses, agent: Agent, access: Access, history: History, past: Past
) -> tuple[str, str]:
    k, bit = agent.knows, past.bit
    earlier = machine.events[past.event]
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


def unwritten(machine: Contents, node: UOp, access: Access, history: History) -> str:
    """A read of what nothing wrote, and who writes there."""
    operand = atom(node.arg.atom).operand(node, access.operand)
    writers = machine.program.writers(operand.src[0])
    return (
        f"reads {history.name}, of which part was never written: {writers} writes it, and no wait "
        "orders the read after that"
    )


def deadlock(machine: Machine, blocked: Iterable[tuple[Agent, UOp]]) -> str:
    """Every blocked warp's statement, the state of what it waits for, and who should arrive."""
    waiting: dict[str, list[str]] = {}
    for agent, node in blocked:
        what = f"{show(node)} at {node.site}"
        what += _awaited(machine, agent, node)
        waiting.setdefault(what, []).append(agent.who())
    told = "; ".join(f"{_fold(who)} at {what}" for what, who in waiting.items())
    return (
        f"deadlock [{machine.trip.name}]: {told}; fix: make somebody arrive, send the bytes or "
        "give the registers that each of these waits for"
    )


def _awaited(machine: Machine, agent: Agent, node: UOp) -> str:
    """The state of what a blocked statement waits for."""
    match atom(node.arg.atom).effect:
        case "mbar_wait":
            bar = machine.waits_for(agent, node)
            arrivers = machine.program.arrivers(node.src[0].src[0])
            return f" ({bar.name} is in {bar.state()}; {arrivers} arrives there)"
        case "registers":
            asked, free = node.arg.attr("registers"), machine.free_registers[agent.cta]
            return (
                f" (a lane has {agent.registers} of the {asked} registers it asks for, and {free} "
                "lie free: no setmaxnreg.dec gives more)"
            )
        case _:
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
