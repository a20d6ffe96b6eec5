"""An agent's side: the SDK's own client over stdio, called from plain functions."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.types import TextResourceContents

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 200.0  # seconds that an answer may take


class Refused(Exception):
    """What the server said instead of an answer."""


class Agent:
    """`transcript` has every call with its answer, or what was said instead."""

    def __init__(self, portal: BlockingPortal, client: Client) -> None:
        self.portal, self.client = portal, client
        self.transcript: list[tuple[str, dict[str, Any], Any]] = []

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        return self.ask(tool, arguments)

    def ask(
        self,
        tool: str,
        arguments: dict[str, Any],
        progress: Callable[[float, float | None, str | None], None] | None = None,
    ) -> dict[str, Any]:
        """The structured answer; Refused with the one text there is."""

        async def told(done: float, whole: float | None, message: str | None) -> None:
            if progress:
                progress(done, whole, message)

        result = self.portal.call(self._call, tool, arguments, told)
        (content,) = result.content
        if result.is_error:
            self.transcript.append((tool, arguments, content.text))
            raise Refused(content.text)
        assert json.loads(content.text) == result.structured_content
        self.transcript.append((tool, arguments, result.structured_content))
        return dict(result.structured_content)

    async def _call(self, tool: str, arguments: dict[str, Any], told: Any) -> Any:
        with anyio.fail_after(LONGEST):
            return await self.client.call_tool(tool, arguments, progress_callback=told)

    def cancelled(self, tool: str, seconds: float, **arguments: Any) -> bool:
        """Call a tool and give up after a while; whether it was still at it."""

        async def call() -> bool:
            with anyio.move_on_after(seconds) as scope:
                await self.client.call_tool(tool, arguments)
            return scope.cancelled_caught

        return self.portal.call(call)

    def read(self, address: str) -> str:
        (content,) = self.portal.call(self.client.read_resource, address).contents
        assert isinstance(content, TextResourceContents)
        return content.text


@contextmanager
def agent(root: Path, *options: str) -> Iterator[Agent]:
    """A server of its own, with `root`, and an agent beside it."""
    clean = {n: v for n, v in os.environ.items() if not n.startswith("COV")}
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "ptxflow", "mcp", "--root", str(root), "--jobs", "1", *options],
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=root,
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(stdio_client(server))) as client,
    ):
        yield Agent(portal, client)
