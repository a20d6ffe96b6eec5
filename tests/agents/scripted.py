"""An agent that knows nothing of ptxflow but what the server answers."""

import re
from typing import Any

from tests.agents.client import Agent

MOST = 3  # calls of check_ptx for a repair


def new_strategy(
    agent: Agent, definition: str, axes: dict[str, int], device: str
) -> dict[str, Any]:
    """A strategy that the policy did not draw: one drawn, with another choice of the decisions in
    turn, as the space says that it is open; refusals are mended as `nearest` says. Its `lower`."""
    asked = {"definition": definition, "axes": axes, "device": device}
    drawn = agent.call("sample", **asked, k=4)["strategies"]
    held = drawn[0]["choices"]
    keys = {s["key"] for s in drawn}
    for row in agent.call("space", **asked)["decisions"]:
        name = row["name"]
        others = [
            c for c, n in zip(row["choices"], row["left"], strict=True) if n and c != held[name]
        ]
        for other in others:
            told = agent.call("check_strategy", **asked, choices={**held, name: other})
            choices = {**held, name: other} if told["valid"] else told["nearest"]
            told = told if told["valid"] else agent.call("check_strategy", **asked, choices=choices)
            if not told["valid"] or told["key"] in keys or choices[name] != other:
                continue
            made = agent.call("lower", **asked, choices=choices)
            if made["right"]:
                return made | {"drawn": sorted(keys), "changed": name}
    raise AssertionError("every other choice is refused")


def repaired(agent: Agent, ptx: str, launch: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text, mended as findings say until there are none, and what each call found."""
    seen = []
    for _ in range(MOST):
        found = agent.call("check_ptx", ptx=ptx, launch=launch)
        seen.append(found)
        if found["verdict"] == "clean":
            break
        ptx = mended(ptx.splitlines(), found["findings"][0])
    return ptx, seen


def mended(lines: list[str], finding: dict[str, Any]) -> str:
    """One change, by the words of a finding."""
    at, said = finding["line"] - 1, finding["message"] + finding["fix"]
    barrier = re.search(r"\[\w+\]", lines[at])
    if "fence.proxy.async" in said:
        written = finding["related"][0]  # who accessed through the generic proxy
        lines.insert(written, "    fence.proxy.async.shared::cta;")
    elif "neither 0 nor 1" in said:
        parity = lines[at].rstrip(" ;").rpartition(" ")[2]
        lines.insert(at, f"    and.b32 {parity}, {parity}, 1;")
    elif (left := re.search(r"0 of \d+ arrivals and (\d+) bytes outstanding", said)) and barrier:
        (n,) = (i for i, x in enumerate(lines) if "expect_tx" in x and barrier[0] in x)
        head, _, count = lines[n].rstrip(" ;").rpartition(" ")
        lines[n] = f"{head} {int(count) - int(left[1])};"
    return "\n".join(lines) + "\n"
