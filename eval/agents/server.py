"""An MCP server over stdio: what a coding agent needs to write GPU kernels with ptxflow.

It offers definitions, spaces of strategies with their rules, samples of the policy, the compiler,
the emulator for any PTX, the instruction table and roofs as tools, and long texts as resources. An
agent starts it as `ptxflow mcp --root FOLDER` (docs/agents.md); it needs the extra ptxflow[mcp].

Every call runs in a process of its own, with limits of time and memory; one that hangs, crashes or
is cancelled ends alone. Files are read and written under --root only, and no shell is run.
"""

import hashlib
import inspect
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from ptxflow import __version__
from ptxflow.command import BadInput, Parser, reports
from ptxflow.env.tasks.arguments import positive_int

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.tools import Tool

    from ptxflow.eval.agents.child import Child

TEXT = "text://"
MOST_KEPT = 64 << 20  # characters of texts: the oldest go
MOST_SAID = 40_000  # characters of an answer: what is longer becomes a text
INSTRUCTIONS = """\
ptxflow compiles strategies for GPU operators to checked PTX and machine code, without a GPU.
A kernel: `definitions`, `space` (decisions, rules), then `sample` or your own choices,
`check_strategy`, `lower`. PTX of your own: `launch_template`, then `check_ptx` until it is clean.
`instruction` explains what hardware asks of an instruction, `roofline` how fast a kernel can be.
Refusals are sentences of rules: change what they read. Texts have addresses for `read_text`."""


@dataclass
class Calls:
    """Runs tools in children that are kept between calls, `jobs` at a time."""

    root: Path
    seconds: float
    memory: int
    jobs: int
    idle: "list[Child]" = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    _free: Any = None

    async def call(self, tool: str, arguments: dict[str, Any], say: Any) -> dict[str, Any]:
        """A tool's answer; a RuntimeError of one line where there is none."""
        import anyio

        from ptxflow.eval.agents.child import Child, Ended

        self._free = self._free or anyio.Semaphore(self.jobs)
        given = {n: self.resolved(n, v) for n, v in arguments.items()}
        async with self._free:
            began, message = time.monotonic(), None
            child = self.idle.pop() if self.idle else await Child.start(self.root, self.memory)

            async def said(stage: str) -> None:
                await say(time.monotonic() - began, self.seconds, f"{tool}: {stage}")

            try:
                with anyio.fail_after(self.seconds):
                    message = await child.call(tool, given, said)
            except TimeoutError:
                raise RuntimeError(
                    f"{tool} was stopped after {self.seconds:g} s: ask for less at a time"
                ) from None
            except Ended as error:
                raise RuntimeError(f"{tool}: {error}; the server goes on") from None
            finally:
                if message:
                    self.idle.append(child)
                else:
                    child.kill()
        if "error" in message:
            raise RuntimeError(message["error"])
        return self.shortened(message["answer"])

    def resolved(self, name: str, value: Any) -> Any:
        """The text behind an address."""
        if name not in ("ptx", "text") or not value.startswith(TEXT):
            return value
        found = self.texts.get(value)
        if found is None:
            raise RuntimeError(f"no text has the address {value[:80]}")
        return found if "\n" in found else found + "\n"

    def shortened(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer with addresses for its texts, and for all of it where it is long."""
        kept = {name: self.keep(text, name) for name, text in answer.pop("texts", {}).items()}
        answer |= {"texts": kept} if kept else {}
        whole = json.dumps(answer, indent=1)
        if len(whole) <= MOST_SAID:
            return answer
        return {"too_long": f"{len(whole)} characters", "texts": {"answer.json": self.keep(whole)}}

    def keep(self, text: str, name: str = "answer.json") -> str:
        """The address of a text, kept until newer ones need the room."""
        address = f"{TEXT}{hashlib.sha256(text.encode()).hexdigest()[:16]}/{name}"
        self.texts[address] = text
        while sum(map(len, self.texts.values())) > MOST_KEPT and len(self.texts) > 1:
            del self.texts[next(iter(self.texts))]
        return address

    def close(self) -> None:
        for child in self.idle:
            child.kill()


def as_tool(name: str, function: Callable[..., Any], calls: Calls, writes: bool) -> "Tool":
    """The tool of a function: its schema is the signature behind the desk, the texts of its
    `Annotated` are descriptions, and arguments that it does not have are refused."""
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.mcpserver.tools import Tool
    from mcp_types import ToolAnnotations
    from pydantic import Field

    _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
    shown = []
    for p in parameters:
        kind = p.annotation
        if get_origin(kind) is Annotated:
            bare, doc = get_args(kind)
            kind = Annotated[bare, Field(description=doc)]
        shown.append(p.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=Context)

    async def run(*, ctx: Context, **arguments: Any) -> dict[str, Any]:
        try:
            return await calls.call(name, arguments, ctx.report_progress)
        except RuntimeError as error:
            raise ToolError(str(error)) from None

    signature = inspect.Signature([*shown, context], return_annotation=dict[str, Any])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*shown, context)} | {
        "return": dict[str, Any]
    }
    tool = Tool.from_function(
        run, name=name, description=inspect.getdoc(function),
        annotations=ToolAnnotations(read_only_hint=not writes, open_world_hint=False),
    )  # fmt: skip
    model = tool.fn_metadata.arg_model
    model.model_config["extra"] = "forbid"
    model.model_rebuild(force=True)
    return tool.model_copy(update={"parameters": model.model_json_schema(by_alias=True)})


def server(calls: Calls) -> "MCPServer[Any]":
    """The server of all tools and resources."""
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ResourceNotFoundError

    from ptxflow.compiler.atoms.document import page
    from ptxflow.env.tasks.definition import DefinitionError, load, names, own_names
    from ptxflow.eval.agents.tools import TOOLS, WRITERS

    @asynccontextmanager
    async def life(_: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            calls.close()

    made = MCPServer(
        "ptxflow", version=__version__, instructions=INSTRUCTIONS, lifespan=life,
        tools=[as_tool(n, f, calls, n in WRITERS) for n, f in TOOLS.items()],
        log_level="ERROR",
    )  # fmt: skip
    listed = (*names(), *own_names())

    @made.resource("definition://{name}", mime_type="application/json")
    def a_definition(name: str) -> str:
        """A definition, whole, with its reference program."""
        try:
            return json.dumps(load(name if name in listed else f"{name[:80]}?").to_json(), indent=1)
        except DefinitionError as error:
            raise ResourceNotFoundError(str(error)) from None

    @made.resource("records://{name}", mime_type="application/json")
    async def some_records(name: str) -> str:
        """Of a definition the fastest right measured kernel at each size on each device."""
        if name not in listed:
            raise ResourceNotFoundError(f"no definition is called {name[:80]!r}")

        async def nobody(*_: Any) -> None: ...

        found = await calls.call("records", {"name": name}, nobody)
        if "too_long" in found:
            return calls.texts[found["texts"]["answer.json"]]
        return json.dumps(found, indent=1)

    @made.resource("page://instructions", mime_type="text/markdown")
    def instructions() -> str:
        """The instruction table, whole."""
        return page()

    @made.resource(TEXT + "{digest}/{name}", mime_type="text/plain")
    def a_text(digest: str, name: str) -> str:
        """A text that a tool gave the address of."""
        try:
            return calls.texts[f"{TEXT}{digest}/{name}"]
        except KeyError:
            raise ResourceNotFoundError("no text has this address, or no longer") from None

    return made


@reports("mcp")
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, brief="mcp")
    parser.add_argument("--root", type=Path, default=Path(), metavar="DIR",
                        help="the folder that calls may use (default: this one)")  # fmt: skip
    parser.add_argument("--seconds", type=positive_int, default=120, metavar="S",
                        help="after which a call is ended (default: 120)")  # fmt: skip
    parser.add_argument("--memory", type=positive_int, default=8192, metavar="MIB",
                        help="that a call may have (default: 8192)")  # fmt: skip
    parser.add_argument("--jobs", type=positive_int, default=min(4, os.cpu_count() or 1),
                        help="calls at a time (default: one a core, 4 at most)")  # fmt: skip
    args = parser.parse_args(argv)
    if not args.root.is_dir():
        raise BadInput(f"--root {args.root}: no such folder")
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise BadInput("the package mcp is missing: pip install 'ptxflow[mcp]'") from None
    server(Calls(args.root.resolve(), args.seconds, args.memory << 20, args.jobs)).run("stdio")
    return 0
