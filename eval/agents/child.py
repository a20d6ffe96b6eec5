"""The process that a call of the server runs in: one at a time, killed where it must end.

The server writes a line {"tool", "arguments"} and reads lines: {"say": stage} while it works, then
{"answer": ...} or {"error": one line}. The child ends, and all that it began, with its input.
"""

import json
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

import ptxflow
from ptxflow.command import one_line

MOST_ANSWER = 64 << 20  # bytes
BEAT = 1.0  # seconds between reports of a call that says nothing


class Ended(RuntimeError):
    """A child ended before its answer; the message says how."""


class Child:
    """The server's side of one process."""

    def __init__(self, process: Process) -> None:
        assert process.stdin and process.stdout
        self.process, self.input = process, process.stdin
        self.lines = BufferedByteReceiveStream(process.stdout)

    @staticmethod
    async def start(root: Path, memory: int) -> "Child":
        """A process with the root as its folder that may have `memory` bytes."""
        where = str(Path(ptxflow.__file__).resolve().parents[1])
        paths = os.pathsep.join(filter(None, (where, os.environ.get("PYTHONPATH"))))
        return Child(
            await anyio.open_process(
                [sys.executable, "-m", "ptxflow.eval.agents.child", str(root), str(memory)],
                stdin=PIPE, stdout=PIPE, stderr=None, start_new_session=True,
                env={**os.environ, "PYTHONPATH": paths},
            )
        )  # fmt: skip

    async def call(self, tool: str, arguments: Mapping[str, Any], say: Any) -> dict[str, Any]:
        """The last message of a call. `say(stage)` is awaited as it goes on, each second at least.
        Raises Ended."""
        stage = "working"
        try:
            await self.input.send(json.dumps([tool, arguments]).encode() + b"\n")
            while True:
                with anyio.move_on_after(BEAT) as waited:
                    message = json.loads(await self.lines.receive_until(b"\n", MOST_ANSWER))
                if waited.cancelled_caught:
                    await say(stage)
                elif "say" in message:
                    stage = message["say"]
                    await say(stage)
                else:
                    return dict(message)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                await self.process.wait()
            raise Ended(f"its process ended with code {self.process.returncode}") from None
        except anyio.DelimiterNotFound:
            raise Ended(f"its answer exceeds {MOST_ANSWER} bytes") from None

    def kill(self) -> None:
        """End it now, with what it began."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def main() -> int:
    """The child's side: calls until its input ends."""
    from ptxflow.eval.agents.tools import TOOLS, Desk, records

    root, memory = Path(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    os.chdir(root)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    calls: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(calls,), daemon=True).start()

    def tell(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    desk = Desk(root, lambda stage: tell(say=stage))
    while True:
        name, arguments = json.loads(calls.get())
        try:
            tell(answer={**TOOLS, "records": records}[name](desk, **arguments))
        except MemoryError:
            tell(error=f"it needs more than {memory >> 20} MiB: ask for a smaller problem")
        except Exception as error:
            tell(error=_said(error))


def _said(error: Exception) -> str:
    """One line; of what nobody foresaw, its kind too, and the rest goes to stderr."""
    if isinstance(error, ValueError | OSError | RuntimeError):
        return " ".join(one_line(error).split())[:2000]
    traceback.print_exc()
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _listen(calls: queue.Queue[str]) -> None:
    for line in sys.stdin:
        calls.put(line)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
