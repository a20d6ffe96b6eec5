"""A language model that is told the rules proposes strategies, in the policy's place.

It answers with JSON by a schema. Each proposal goes through the rules, and refusals go back to it
as sentences. What it costs is counted, what was said is kept (`endpoint.Recorded`), so that
others can play it again without a model. A model that fails costs its timeout: nothing is proposed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ptxflow.command import BadInput
from ptxflow.compiler.family import Choice, Family, Strategy
from ptxflow.env.space import Space, StrategySpace
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.tune.endpoint import Chat, ChatError

Given = Mapping[str, Choice | list[Choice]]
SHOWN = 24  # of what was tried, the fastest and the last
MOST_REFUSED = 12  # sentences that go back at a time
TASK = """\
You choose strategies of a GPU kernel: one choice of every decision, for one problem on one device.
Answer with JSON alone: {"strategies": [{decision: choice, ...}, ...]}, the best first, none twice.
A strategy that breaks a rule is refused with the sentence of the rule. Time in microseconds counts;
a kernel that does not compile without spills, or is wrong, is worth nothing."""


@dataclass(frozen=True)
class Tried:
    """What came of a strategy: microseconds, infinite where it was refused or is wrong."""

    strategy: Strategy
    us: float = math.inf
    why: str = ""

    @property
    def right(self) -> bool:
        return math.isfinite(self.us)


@dataclass(frozen=True)
class Asked:
    """k strategies of a space, new after what was tried; `known`: sentences of what was learned
    elsewhere, of a knowledge base."""

    space: StrategySpace
    k: int
    history: Sequence[Tried] = ()
    known: Sequence[str] = ()

    @property
    def seen(self) -> set[str]:
        return {t.strategy.key for t in self.history}

    @cached_property
    def choices(self) -> dict[str, tuple[Choice, ...]]:
        """By decision; of a space in a list those that it has, as it may be a part."""
        every = {d.name: tuple(d.choices) for d in self.space.decisions}
        if not isinstance(self.space, Space):
            return every
        held = map(np.unique, self.space.indices().T)
        return {
            n: tuple(cs[i] for i in own) for (n, cs), own in zip(every.items(), held, strict=True)
        }


@dataclass
class Model:
    """A language model as a proposer. `tokens` are those of prompts and of answers; `failed` says
    why there was no answer, or none that held a strategy."""

    chat: Chat
    name: str
    returns: int = 3  # times that refusals go back
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "completion": 0})
    failed: list[str] = field(default_factory=list)

    def propose(self, asked: Asked) -> list[Strategy]:
        messages = [{"role": "system", "content": TASK}, {"role": "user", "content": told(asked)}]
        found: dict[str, Strategy] = {}
        for _ in range(self.returns + 1):
            try:
                text, usage = self.chat({
                    "model": self.name, "messages": messages, "temperature": 0,
                    "response_format": {"type": "json_schema", "json_schema": schema(asked)},
                })  # fmt: skip
            except ChatError as error:
                self.failed.append(str(error))
                break
            for kind in self.tokens:
                self.tokens[kind] += usage.get(f"{kind}_tokens", 0)
            accepted, refused = judged(text, asked, found)
            found |= {s.key: s for s in accepted}
            if not refused or len(found) >= asked.k:
                break
            said = f"{len(found)} of {asked.k} are valid. Refused:\n" + "\n".join(refused)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
        else:
            self.failed.append(
                f"{len(found)} of {asked.k} strategies after {self.returns + 1} answers"
            )
        return list(found.values())[: asked.k]


def told(asked: Asked) -> str:
    """The problem, the device's limits and floors, the rules, what was tried."""
    space = asked.space
    problem, device = space.problem, space.device
    floors = Floors.of(problem, device)
    axes = ", ".join(f"{n}={v}" for n, v in problem.axes)
    lines = [
        f"{asked.k} strategies for {problem.definition} ({space.family.name}; {axes}; "
        f"{problem.dtype}) on {device.name} ({device.arch}, {device.sms} SMs, "
        f"{device.smem_per_block} bytes of shared memory a block, {device.registers_per_sm} "
        f"registers an SM, {device.registers_per_thread} a thread).",
        f"No kernel is faster than {floors.attainable:.2f} us; the bound is the {floors.bound}.",
        "Decisions:",
        *(
            f"- {d.name}: {d.doc}: {', '.join(map(str, asked.choices[d.name]))}"
            for d in space.decisions
        ),
        "Rules:",
        *(f"- {r.sentence} ({', '.join(r.reads)})" for r in space.family.rules),
    ]
    if asked.known:
        lines += ["Learned elsewhere:", *(f"- {line}" for line in asked.known)]
    fastest = sorted(asked.history, key=lambda t: t.us)[: SHOWN // 2]
    shown = dict.fromkeys([*fastest, *asked.history[-SHOWN // 2 :]])
    for tried in shown:
        came = f"{tried.us:.2f} us" if tried.right else f"nothing: {tried.why}"
        lines.append(f"Tried {json.dumps(space.family.choices(tried.strategy))}: {came[:300]}")
    return "\n".join(lines)


def schema(asked: Asked) -> dict[str, Any]:
    """What an answer must be, as JSON schema."""
    choices = {name: {"enum": [*own]} for name, own in asked.choices.items()}
    strategy = {"type": "object", "properties": choices, "required": [*choices],
                "additionalProperties": False}  # fmt: skip
    whole = {"type": "object", "required": ["strategies"], "additionalProperties": False,
             "properties": {"strategies": {"type": "array", "items": strategy}}}  # fmt: skip
    return {"name": "strategies", "strict": True, "schema": whole}


def judged(text: str, asked: Asked, found: dict[str, Strategy]) -> tuple[list[Strategy], list[str]]:
    """The valid and new strategies of an answer, and a sentence for each other thing in it."""
    body = text.strip().removeprefix("```json").strip("`\n ")  # the fence that some put around it
    try:
        rows = json.loads(body)["strategies"]
        if not isinstance(rows, list) or not rows:
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        return [], ['the answer is no JSON object {"strategies": [{decision: choice, ...}]}']
    family, problem, device = asked.space.family, asked.space.problem, asked.space.device
    good, refused = dict[str, Strategy](), list[str]()
    for number, row in enumerate(rows[: 4 * asked.k], 1):
        try:
            if not isinstance(row, dict):
                raise BadInput("is no object of choices")
            held = {n: c[0] for n, c in allowed(family, row).items()}
            if lacks := [d.name for d in family.decisions if d.name not in held]:
                raise BadInput(f"has no choice of {', '.join(lacks)}")
            strategy = family.strategy(held)
            if broken := family.refusals(problem, strategy, device):
                raise BadInput("; ".join(broken))
            for name, own in asked.choices.items():
                if held[name] not in own:
                    raise BadInput(f"is not in this part: {name} must be one of {[*own]}")
            if strategy.key in {*asked.seen, *found, *good}:
                raise BadInput("was there before")
            good[strategy.key] = strategy
        except BadInput as error:
            refused.append(f"- strategy {number}: {error}")
    return list(good.values()), refused[:MOST_REFUSED]


def allowed(family: Family, fixed: Given) -> dict[str, tuple[Choice, ...]]:
    """Choices as the decisions have them, numbers given as text, too; BadInput names the others."""
    offered = {d.name: {str(c): c for c in d.choices} for d in family.decisions}
    found: dict[str, tuple[Choice, ...]] = {}
    for name, given in fixed.items():
        if name not in offered:
            raise BadInput(f"{family.name} has no decision {name[:80]!r}; it has {[*offered]}")
        wanted = [str(c) for c in (given if isinstance(given, list) else [given])]
        if wrong := [c for c in wanted if c not in offered[name]]:
            raise BadInput(f"{name} must be one of {[*offered[name].values()]}, not {wrong[0]!r}")
        found[name] = tuple(offered[name][c] for c in wanted)
    return found
