"""Machine code as evidence: disassemble a cubin and look for what the strategy claims to use.

`data/sass_signatures.json` maps a technique ("TMA tensor load") to the instruction that must appear
for it, with an example per target. A missing signature means that ptxas compiled the idea away;
`BRA.U.ANY` means that it could not prove a single issuing thread and wrapped the issue in a loop.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ptxflow.compiler import cache
from ptxflow.compiler.ptxas import ToolMissing, find_tool, tool_version

OVERRIDE = "PTXFLOW_NVDISASM"
WHEEL = "nvidia-cuda-nvdisasm"
TIMEOUT = 120.0  # seconds
FORBIDDEN = ("non-uniform issue loop (lint)",)

# A line: the address in a comment, perhaps a guard, the instruction up to the semicolon.
_LINE = re.compile(
    r"\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@(!?U?P(?:\d+|T))\s+)?([A-Z][^;]*?)\s*;"
)
_FUNCTION = re.compile(r"\.text\.(\S+):$")
# Scheduling annotations that some versions print after the operands.
_CONTROL = re.compile(r"\s+(?:[&?][\w=,{}.]+\s*)+$")


class SassError(RuntimeError):
    """nvdisasm refused a cubin."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction: `text` begins at the opcode, `guard` is its predicate or empty."""

    function: str
    address: int  # bytes from the start of the section
    guard: str  # "!P0", "UP1"
    text: str  # "UTMALDG.2D [UR8], [UR4]"

    @property
    def opcode(self) -> str:
        """The mnemonic with its modifiers: "UTMALDG.2D"."""
        return self.text.partition(" ")[0]


@dataclass(frozen=True)
class Signature:
    """The machine form of a technique; `examples` holds a sample instruction per target."""

    technique: str
    pattern: re.Pattern[str]
    examples: tuple[tuple[str, str], ...]

    def exists_on(self, arch: str) -> bool:
        """Whether the target has the technique; unknown without any example counts as yes."""
        have = {target for target, example in self.examples if example}
        return not have or arch in have


@dataclass(frozen=True)
class SassReport:
    """How often each technique appears in a cubin, and how that differs from what was expected."""

    counts: dict[str, int]  # techniques that appear
    missing: tuple[str, ...]
    forbidden: tuple[str, ...]  # the opcodes found, as in "BRA.U.ANY"

    @property
    def ok(self) -> bool:
        return not self.missing and not self.forbidden

    def complaints(self) -> list[str]:
        """One line per fault; empty when the machine code is as expected."""
        out = [f"the machine code has no {technique}" for technique in self.missing]
        return out + [f"the machine code has {opcode}" for opcode in self.forbidden]


def _table_text() -> str:
    return (files("ptxflow.compiler") / "data" / "sass_signatures.json").read_text()


@functools.cache
def signatures() -> dict[str, Signature]:
    """The table of signatures by technique."""
    rows = json.loads(_table_text())
    return {
        row["technique"]: Signature(
            row["technique"],
            re.compile(row["regex"]),
            tuple((name, row[name]) for name in row if name.startswith("sm_")),
        )
        for row in rows
    }


@functools.cache
def _any_signature() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{s.pattern.pattern})" for s in signatures().values()))


def signature(technique: str) -> Signature:
    """The signature of a technique; an unknown name raises KeyError with the nearest ones."""
    try:
        return signatures()[technique]
    except KeyError:
        near = difflib.get_close_matches(technique, signatures(), 3, 0.3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise KeyError(f"no SASS signature for {technique!r}{hint}") from None


def executable() -> Path:
    """The nvdisasm in use; raises ToolMissing."""
    return find_tool("nvdisasm", OVERRIDE, WHEEL)


def listing(cubin: bytes, *, timeout: float = TIMEOUT) -> str:
    """The text that nvdisasm prints for the code sections of a cubin; raises SassError."""
    tool = executable()
    with tempfile.TemporaryDirectory(prefix="ptxflow-") as folder:  # it cannot read a pipe
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            done = subprocess.run(
                [tool, "-c", "-ndf", path], capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise SassError(f"nvdisasm did not finish in {timeout:g} s") from None
        except OSError as error:
            raise ToolMissing(f"{tool} does not run: {error}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SassError(f"nvdisasm: {said[-1] if said else f'ended with {done.returncode}'}")
    return done.stdout


def parse(text: str) -> list[Instruction]:
    """The instructions of a listing, without guards, comments and scheduling annotations."""
    function, out = "", []
    for line in text.splitlines():
        if found := _LINE.match(line):
            body = _CONTROL.sub("", found[3])
            out.append(Instruction(function, int(found[1], 16), found[2] or "", body))
        elif start := _FUNCTION.match(line):
            function = start[1]
    return out


def disassemble(cubin: bytes, *, timeout: float = TIMEOUT) -> list[Instruction]:
    """The machine instructions of a cubin, in order; raises SassError or ToolMissing."""
    instructions = parse(listing(cubin, timeout=timeout))
    if not instructions:
        raise SassError("nvdisasm found no instructions in the cubin")
    return instructions


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """How often each technique of the table appears, in the table's order."""
    interesting = _any_signature().match
    texts = Counter(i.text for i in instructions if interesting(i.text))
    counts = {
        name: sum(n for text, n in texts.items() if row.pattern.match(text))
        for name, row in signatures().items()
    }
    return {name: n for name, n in counts.items() if n}


def _cached_counts(cubin: bytes) -> tuple[dict[str, int], list[str]]:
    """Counts and forbidden opcodes; kept in the store, as starting nvdisasm is what costs."""
    kept = cache.store()
    name = cache.key("sass", cubin, tool_version(executable()), _table_text())
    if (payload := kept.get(name)) is not None:
        counts, forbidden = json.loads(payload)
        return counts, forbidden
    instructions = disassemble(cubin)
    counts = count(instructions)
    lint = [signature(technique).pattern for technique in FORBIDDEN]
    forbidden = sorted({i.opcode for i in instructions if any(p.match(i.text) for p in lint)})
    kept.put(name, json.dumps([counts, forbidden]).encode())
    return counts, forbidden


def check(cubin: bytes, arch: str, expected: Iterable[str]) -> SassReport:
    """Look for every expected technique, and for what must never appear.

    Raises KeyError on an unknown technique, ValueError on one that the target does not have.
    """
    wanted = tuple(expected)
    for technique in wanted:
        if not signature(technique).exists_on(arch):
            raise ValueError(f"{technique!r} has no machine form on {arch}")
    counts, forbidden = _cached_counts(cubin)
    missing = tuple(technique for technique in wanted if technique not in counts)
    return SassReport(counts, missing, tuple(forbidden))


def check_many(
    jobs: Iterable[tuple[bytes, str, Iterable[str]]], workers: int | None = None
) -> list[SassReport]:
    """`check` on (cubin, arch, expected) triples in parallel; reports in the order of the jobs."""
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        return list(pool.map(lambda job: check(*job), jobs))
