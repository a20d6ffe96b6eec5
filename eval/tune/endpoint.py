"""A language model behind an OpenAI-compatible endpoint, by the standard library alone; recorded.

From the environment: OPENAI_BASE_URL (as http://localhost:8000/v1), OPENAI_API_KEY if one is
needed, and PTXFLOW_MODEL.
"""

import copy
import hashlib
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ptxflow.command import BadInput

MOST = 4 << 20  # bytes of an answer
Answer = tuple[str, Mapping[str, int]]  # the text; tokens by kind
Chat = Callable[[Mapping[str, Any]], Answer]


class ChatError(RuntimeError):
    """No answer, and why, in one line."""


class Endpoint:
    """Asks, and waits so many seconds at most, whatever the other side does."""

    def __init__(self, url: str, key: str = "", seconds: float = 60.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"OPENAI_BASE_URL must begin with http:// or https://, not {url[:80]!r}")
        self.url, self.key, self.seconds = f"{url.rstrip('/')}/chat/completions", key, seconds

    @staticmethod
    def from_environment(seconds: float = 60.0) -> tuple["Endpoint", str]:
        """The endpoint and the model's name; BadInput where the environment does not say."""
        url, model = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("PTXFLOW_MODEL", "")
        if not url or not model:
            raise BadInput("a language model needs OPENAI_BASE_URL and PTXFLOW_MODEL")
        return Endpoint(url, os.environ.get("OPENAI_API_KEY", ""), seconds), model

    def __call__(self, request: Mapping[str, Any]) -> Answer:
        said: queue.SimpleQueue[Answer | ChatError] = queue.SimpleQueue()
        threading.Thread(target=lambda: said.put(self._ask(request)), daemon=True).start()
        try:
            answer = said.get(timeout=self.seconds)
        except queue.Empty:
            raise ChatError(f"{self.url}: no answer within {self.seconds:g} s") from None
        if isinstance(answer, ChatError):
            raise answer
        return answer

    def _ask(self, request: Mapping[str, Any]) -> Answer | ChatError:
        heads = {"Content-Type": "application/json"}
        if self.key:
            heads["Authorization"] = f"Bearer {self.key}"
        try:
            asked = urllib.request.Request(self.url, json.dumps(request).encode(), heads)
            with urllib.request.urlopen(asked, timeout=self.seconds) as response:
                body = response.read(MOST + 1)
            if len(body) > MOST:
                return ChatError(f"{self.url}: the answer exceeds {MOST} bytes")
            return parsed(json.loads(body))
        except urllib.error.HTTPError as error:
            return ChatError(f"{self.url}: HTTP {error.code} {error.reason}")
        except ChatError as error:
            return ChatError(f"{self.url}: {error}")
        except (OSError, ValueError, RecursionError) as error:
            return ChatError(f"{self.url}: {' '.join(str(error).split())[:200]}")
        except Exception as error:  # http.client's own, of an answer that is no HTTP
            return ChatError(f"{self.url}: {type(error).__name__}")


def parsed(body: Any) -> Answer:
    """The text and the tokens of a completion; ChatError where it is none."""
    try:
        text = body["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError
    except (KeyError, IndexError, TypeError):
        raise ChatError("the answer is no chat completion") from None
    usage = body.get("usage") or {}
    counts = usage.items() if isinstance(usage, dict) else ()
    return text, {n: c for n, c in counts if isinstance(c, int)}


class Recorded:
    """A chat whose answers are kept in a file of JSON lines: what it holds is not asked again, and
    without `live` nothing else is. Failures are kept, too; keys never are."""

    def __init__(self, path: Path, live: Chat | None = None) -> None:
        self.path, self.live = path, live
        self.held: dict[str, list[dict[str, Any]]] = defaultdict(list)
        try:
            for row in map(json.loads, path.read_text().splitlines() if path.exists() else ()):
                self.held[digest(row["request"])].append(row)
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(f"{path}: no transcript: {error!r}") from None
        self.told: dict[str, int] = defaultdict(int)

    @property
    def model(self) -> str:
        """The first that answered; "" where none has."""
        return next(
            (str(rows[0]["request"].get("model", "")) for rows in self.held.values() if rows), ""
        )

    def again(self) -> "Recorded":
        """The same answers, from the first on."""
        other = copy.copy(self)
        other.told = defaultdict(int)
        return other

    def __call__(self, request: Mapping[str, Any]) -> Answer:
        name = digest(request)
        place, self.told[name] = self.told[name], self.told[name] + 1
        if place < len(self.held[name]):
            return _replayed(self.held[name][place])
        if self.live is None:
            raise ChatError(f"{self.path} has no answer to this")
        began = time.monotonic()
        row: dict[str, Any] = {"request": dict(request)}
        try:
            row["text"], usage = self.live(request)
            row["usage"] = dict(usage)
        except ChatError as error:
            row["failed"] = str(error)
        row["seconds"] = round(time.monotonic() - began, 3)
        self.held[name].append(row)
        with self.path.open("ab", buffering=0) as file:  # whole, where several processes write
            file.write(json.dumps(row).encode() + b"\n")
        return _replayed(row)


def digest(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _replayed(row: Mapping[str, Any]) -> Answer:
    if "failed" in row:
        raise ChatError(row["failed"])
    return row["text"], row["usage"]
