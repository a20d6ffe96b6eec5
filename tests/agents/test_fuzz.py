"""Calls that no agent should make: each is one clear error or an answer, and the server lives."""

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("mcp", reason="the extra ptxflow[mcp] is not installed")

from ptxflow.eval.agents.tools import TOOLS
from tests.agents.broken import RIGHT, launch
from tests.agents.client import Agent, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**70, 1.5, "", "x" * 200_000, "../../etc/passwd", "/etc/shadow", "a\0b",
    "$(id)", "; rm -rf /", "text://../..", "\u2028\U0001f600", "gemm_n4096_k4096", "mine.json",
    "h200", "b200", [], [[[[]]]], {}, {"M": 0}, {"M": 10**30}, {"M": "1024"}, {"M": 64},
    {"tile_k": 64},
    {"tile_k": [64, "128", None]}, {"version": 1}, list(range(5000)),
    {str(i): i for i in range(2000)},
    ".version 8.8\n.target sm_90a\n", RIGHT[:700], launch(), launch() | {"grid": [10**9]},
)  # fmt: skip


def wild(rng: random.Random, schema: "Mapping[str, Any]") -> dict[str, Any]:
    """Arguments by a tool's schema, of which some are missing, wrong or unknown."""
    out: dict[str, Any] = {}
    for name, about in schema["properties"].items():
        if name in schema.get("required", ()) or rng.random() < 0.6:
            out[name] = rng.choice(VALUES)
            if name == "definition" and rng.random() < 0.5:
                out[name] = "gemm_n4096_k4096"
            if name == "device" and rng.random() < 0.5:
                out[name] = "h200"
            if about.get("default") is False:
                out[name] = rng.choice((True, False))
    if out and rng.random() < 0.1:
        del out[rng.choice([*out])]
    if rng.random() < 0.05:
        out["unknown"] = 1
    return out


def fuzz(agent: Agent, calls: int, seed: int) -> int:
    """How many calls were refused."""
    rng = random.Random(seed)
    tools = {t.name: t.input_schema for t in agent.portal.call(agent.client.list_tools).tools}
    refused = 0
    for number in range(calls):
        name = rng.choice([*TOOLS])
        arguments = wild(rng, tools[name])
        if number % 20 == 19:
            agent.cancelled(name, 0.01, **arguments)
            continue
        try:
            agent.ask(name, arguments)
        except Refused as error:
            refused += 1
            assert str(error).strip() and len(str(error)) < 4000, (name, str(error)[:200])
            assert "Traceback" not in str(error)
    return refused


@pytest.mark.parametrize(("calls", "seed"), [(40, 1), pytest.param(500, 2, marks=pytest.mark.slow)])
def test_wild_calls(agent: Agent, calls: int, seed: int) -> None:
    assert fuzz(agent, calls, seed) > calls / 2
    assert agent.call("definitions", like="moe")["definitions"]  # it goes on
