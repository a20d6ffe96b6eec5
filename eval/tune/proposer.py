"""A language model that is told the rules proposes strategies, in the policy's place, or writes
parts of kernels as text (`eval.verify.glue`).

It answers with JSON by a schema. What it says goes through the rules, and refusals go back to it
as sentences. What it costs is counted, what was said is kept (`endpoint.Recorded`), so that
others can play it again without a model. A model that fails costs its timeout: nothing is proposed.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
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
WRITTEN = """\
You write a part of a GPU kernel, as a text. Answer with JSON alone: {"text": "..."}. The kernel is
compiled and emulated, and what is wrong of it comes back to you. This is what the text can be:"""
TEXT = {"name": "text", "strict": True, "schema": {
    "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"],
    "additionalProperties": False}}  # fmt: skip


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
    why there was no answer, or none that was any good."""

    chat: Chat
    name: str
    returns: int = 3  # times that refusals go back
    tokens: dict[str, int] = field(default_factory=lambda: {"prompt": 0, "completion": 0})
    failed: list[str] = field(default_factory=list)

    def propose(self, asked: Asked) -> list[Strategy]:
        found: dict[str, Strategy] = {}

        def heard(text: str) -> str:
            accepted, refused = judged(text, asked, found)
            found.update((s.key, s) for s in accepted)
            if not refused or len(found) >= asked.k:
                return ""
            return f"{len(found)} of {asked.k} are valid. Refused:\n" + "\n".join(refused)

        if not self.talk(TASK, told(asked), schema(asked), heard):
            self.failed.append(
                f"{len(found)} of {asked.k} strategies after {self.returns + 1} answers"
            )
        return list(found.values())[: asked.k]

    def write(self, syntax: str, goal: str, judge: Callable[[str], str]) -> str:
        """A text that the judge does not refuse, or ""; `syntax` says what there is, `goal` what is
        wanted. The judge says in a line why it refuses a text, or nothing (`glue.judge`)."""
        right = ""

        def heard(answer: str) -> str:
            nonlocal right
            try:
                text = json.loads(_bare(answer))["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError, RecursionError):
                return 'Refused: the answer is no JSON object {"text": "..."}'
            if why := judge(text):
                return f"Refused: {why}"
            right = text
            return ""

        if not self.talk(f"{WRITTEN}\n{syntax}", goal, TEXT, heard):
            self.failed.append(f"no right text after {self.returns + 1} answers")
        return right

    def talk(
        self, task: str, first: str, form: Mapping[str, Any], heard: Callable[[str], str]
    ) -> bool:
        """Ask until nothing goes back of an answer, or it does not answer; False where refusals
        have gone back as often as they may."""
        messages = [{"role": "system", "content": task}, {"role": "user", "content": first}]
        for _ in range(self.returns + 1):
            try:
                text, usage = self.chat({
                    "model": self.name, "messages": messages, "temperature": 0,
                    "response_format": {"type": "json_schema", "json_schema": form},
                })  # fmt: skip
            except ChatError as error:
                self.failed.append(str(error))
                return True
            for kind in self.tokens:
                self.tokens[kind] += usage.get(f"{kind}_tokens", 0)
            if not (said := heard(text)):
                return True
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": said}]
        return False


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


def _bare(text: str) -> str:
    """Without the fence that some put around it."""
    return text.strip().removeprefix("```json").strip("`\n ")


def judged(text: str, asked: Asked, found: dict[str, Strategy]) -> tuple[list[Strategy], list[str]]:
    """The valid and new strategies of an answer, and a sentence for each other thing in it."""
    try:
        rows = json.loads(_bare(text))["strategies"]
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
