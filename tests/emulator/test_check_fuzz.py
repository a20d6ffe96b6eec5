"""check-ptx on texts and launches that were damaged at random: findings, or one line, no more."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ptxflow.command import BadInput
from ptxflow.eval.verify.foreign import check
from ptxflow.eval.verify.launch_file import parse
from tests.emulator.described import fixture_described
from tests.emulator.foreign.fixtures import HERE, NAMES, load

SMALL = [name for name in NAMES if (HERE / f"{name}.ptx").stat().st_size < 21_000]
_WORDS = (
    "{ } [ ] ; , @ ! % | . : \0 é < ( ) 0x -1 1e9 4294967296 99999999999999999999 0f7F800000 nan _ "
    "%p1 %r1 %rd1 %tid.w bra ret call .reg .shared .local .entry /* // $L L: {{{{ mov.u32 "
    "ld.global.v4.u32 tcgen05.ld wgmma.mma_async"
)
WORDS = [*_WORDS.split(), ".reg .b32 %z<9999999>;", ".local .b8 q[99999999];", ".shared .b8 z[99];"]
VALUES: list[Any] = [
    None, 0, -1, 1, 3, 2**31, 2**64, 1.5, float("nan"), float("inf"), "", "a", "x" * 999, [], [0],
    [[1]], list(range(1, 11)), {}, {"a": 1}, True, "zeros", "../x",
]  # fmt: skip


def damaged_text(text: str, rng: random.Random) -> str:
    """Words removed, doubled, replaced or put in, lines swapped, numbers changed, the end cut."""
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        spans = [m.span() for m in re.finditer(r"[\w.%$:]+|[^\w\s]", text)]
        (a, b), (c, d) = rng.choice(spans), rng.choice(spans)
        lines = text.split("\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
        text = rng.choice([
            text[:a] + text[b:], text[:a] + rng.choice(WORDS) + text[b:], "\n".join(lines),
            text[:a] + rng.choice(WORDS) + " " + text[a:], text[:a] + text[c:d] + text[b:],
            re.sub(r"\b\d+\b", str(rng.choice([0, 1, 7, 31, 2**32, 10**30])), text, count=1),
            text if rng.random() < 0.7 else text[: rng.randrange(len(text))],
        ])  # fmt: skip
    return text


def damaged_launch(data: Any, rng: random.Random) -> Any:
    """Values removed or replaced, at any depth."""
    holders: list[Any] = [data]
    for held in holders:
        inner = held.values() if isinstance(held, dict) else held
        holders += [v for v in inner if isinstance(v, dict | list) and v]
    for _ in range(rng.choice([1, 1, 2, 3])):
        held = rng.choice(holders)
        key = rng.choice(list(held) if isinstance(held, dict) else range(len(held)))
        held[key] = rng.choice(VALUES)
        if rng.random() < 0.3:
            del held[key]
            if isinstance(held, dict) or not held:
                return data
    return data


@cache
def sample(name: str, folder: Path) -> tuple[str, str]:
    """A fixture's text and launch.json, whose files lie in the folder."""
    (folder / name).mkdir()
    fixture = load(name)
    fixture_described(folder / name, fixture)
    return fixture.ptx, (folder / name / "launch.json").read_text()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["text", "launch"])
@pytest.mark.parametrize("part", range(10))
def test_damage_is_a_finding_or_a_line(what: str, part: int, home: Path) -> None:
    """30 of each part; what the emulator itself trips over would say so."""
    kinds: dict[str, Callable[..., Any]] = {"text": damaged_text, "launch": damaged_launch}
    for seed in range(30 * part, 30 * part + 30):
        rng = random.Random(seed)
        name = rng.choice(SMALL)
        ptx, launch = sample(name, home)
        data = json.loads(launch)
        if what == "text":
            ptx = kinds[what](ptx, rng)
        else:
            data = kinds[what](data, rng)
        try:
            verdict = check(ptx, parse(data, folder=home / name), 2, 20_000)
        except BadInput as error:
            assert "\n" not in str(error) and len(str(error)) < 500, (seed, name)
            assert "Error:" not in str(error), (seed, name, error)
        else:
            assert "Error:" not in verdict.stopped, (seed, name, verdict.stopped)
