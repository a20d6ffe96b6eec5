"""The session of docs/agents.md, held anew: `python -m tests.agents.transcript docs/agents.md`.

Long parts of answers are left out, which "..." says; a test holds the page to it.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from ptxflow.eval.bench.markdown import publish
from tests.agents.broken import broken, launch
from tests.agents.client import Agent, agent
from tests.agents.scripted import repaired

NORM: dict[str, Any] = {"definition": "rmsnorm_h4096", "axes": {"batch_size": 64}, "device": "h200"}
WIDTH, ITEMS, CHARACTERS = 118, 3, 150


def short(value: Any) -> Any:
    """A value with the first few of what is many, and the beginning of what is long; no digests and
    no shares, which change with any text."""
    if isinstance(value, dict):
        kept = {k: short(v) for k, v in list(value.items())[: 2 * ITEMS + 6]}
        return kept | ({"...": "..."} if len(kept) < len(value) else {})
    if isinstance(value, list):
        return [short(v) for v in value[:ITEMS]] + (["..."] if len(value) > ITEMS else [])
    if isinstance(value, str):
        line = value.splitlines()[0] if value else value
        line = re.sub(r"; \d+ problems cover .*", "", re.sub(r"text://\w+", "text://...", line))
        return line[:CHARACTERS] + ("..." if len(value) > CHARACTERS or "\n" in value else "")
    return value


def shown(calls: list[tuple[str, dict[str, Any], Any]]) -> str:
    """Calls and answers as text."""
    lines = []
    for tool, arguments, answer in calls:
        lines.append(f"> {tool} {json.dumps(short(arguments))}")
        text = json.dumps(short(answer))
        while len(text) > WIDTH:
            cut = text.rfind(" ", 0, WIDTH)
            lines.append(text[:cut])
            text = "  " + text[cut + 1 :]
        lines.append(text)
    return "```text\n" + "\n".join(lines) + "\n```"


def held(agent: Agent) -> str:
    """The session: a strategy from its rules to machine code, then a text and its repair."""
    space = agent.call("space", **NORM)
    first = {d["name"]: d["choices"][0] for d in space["decisions"]}
    told = agent.call("check_strategy", **NORM, choices=first)
    agent.call("lower", **NORM, choices=told["nearest"])
    agent.call("instruction", name="fence_proxy_async")
    repaired(agent, broken("a missing fence"), launch())
    return shown(agent.transcript)


def sections() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, agent(Path(folder)) as found:
        return {"transcript": held(found)}


if __name__ == "__main__":
    publish(sections(), Path(sys.argv[1]) if len(sys.argv) > 1 else None)
