"""Machine code as evidence: disassemble a cubin and look for what the strategy claims to use.

`data/sass_signatures.json` maps a technique ("TMA tensor load") to the instruction that must appear
for it, with an example per target. A missing signature means that ptxas compiled the idea away;
`BRA.U.ANY` means that it could not prove a single issuing thread and wrapped the issue in a loop.
"""

import difflib
import functools
import itertools
import json
import os
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from ptxflow.compiler.backend import cache
from ptxflow.compiler.backend.ptxas import ToolMissing, find_tool, tool_version

OVERRIDE = "PTXFLOW_NVDISASM"
WHEEL = "nvidia-cuda-nvdisasm"
TIMEOUT = 120.0  # seconds
BATCH = 64  # cubins for one nvdisasm
INSTRUCTION_BYTES = 16
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
    return (files("ptxflow.compiler.backend") / "sass_signatures.json").read_text()


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


def listing(image: bytes, *flags: str, timeout: float = TIMEOUT) -> str:
    """What nvdisasm prints for a file with these bytes; raises SassError."""
    tool = executable()
    with tempfile.TemporaryDirectory(prefix="ptxflow-") as folder:  # it cannot read a pipe
        path = Path(folder) / "image"
        path.write_bytes(image)
        command = [str(tool), "-ndf", *flags, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
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
    """The machine instructions of one cubin, branches by label; raises SassError or ToolMissing."""
    instructions = parse(listing(cubin, "-c", timeout=timeout))
    if not instructions:
        raise SassError("nvdisasm found no instructions in the cubin")
    return instructions


def code(cubin: bytes) -> bytes:
    """The bytes of all code sections of a cubin (a 64-bit ELF); raises SassError."""
    try:
        if not cubin.startswith(b"\x7fELF\x02"):
            raise ValueError
        (table,) = struct.unpack_from("<Q", cubin, 0x28)
        width, number, names_index = struct.unpack_from("<3H", cubin, 0x3A)
        # name, type, flags, address, offset, size
        sections = [struct.unpack_from("<2I4Q", cubin, table + i * width) for i in range(number)]
        names = sections[names_index][4]
        return b"".join(
            cubin[offset : offset + size]
            for name, _, _, _, offset, size in sections
            if cubin.startswith(b".text.", names + name)
        )
    except (struct.error, ValueError, IndexError):
        raise SassError("not a cubin, or a torn one") from None


def disassemble_together(cubins: Sequence[bytes], arch: str) -> list[list[Instruction]]:
    """The instructions of many cubins of one target, by a single nvdisasm.

    It takes a third of a second to start and no time to speak of for a kernel, so their code goes
    through end to end. Branch targets are then plain addresses, and function names are lost.
    """
    images = [code(cubin) for cubin in cubins]
    merged = parse(listing(b"".join(images), "-b", arch.replace("sm_", "SM")))
    if len(merged) * INSTRUCTION_BYTES != sum(map(len, images)):
        raise SassError(f"nvdisasm skipped instructions of {len(cubins)} cubins for {arch}")
    rest = iter(merged)
    return [list(itertools.islice(rest, len(image) // INSTRUCTION_BYTES)) for image in images]


def stalls(cubin: bytes) -> tuple[float, float]:
    """Of a cubin's instructions as they stand: the cycles that each makes its warp stall, in the
    mean, and the share that wait for a scoreboard, too. The control word of an instruction has the
    cycles in bits 105 to 108, scoreboards to wait for in 116 to 121 (Jia et al., arXiv:1804.06826,
    2.1, for Volta; listings for sm_90a and sm_100a agree); no target since issues two at a time."""
    high = np.frombuffer(code(cubin), "<u8")[1::2]
    return float((high >> 41 & 0xF).mean()), float((high >> 52 & 0x3F != 0).mean())


def count(instructions: Iterable[Instruction]) -> dict[str, int]:
    """How often each technique of the table appears, in the table's order."""
    interesting = _any_signature().match
    texts = Counter(i.text for i in instructions if interesting(i.text))
    counts = {
        name: sum(n for text, n in texts.items() if row.pattern.match(text))
        for name, row in signatures().items()
    }
    return {name: n for name, n in counts.items() if n}


Findings = tuple[dict[str, int], list[str]]  # counts, and the forbidden opcodes


def _examine(cubins: Sequence[bytes], arch: str) -> list[Findings]:
    lint = [signature(technique).pattern for technique in FORBIDDEN]
    return [
        (count(body), sorted({i.opcode for i in body if any(p.match(i.text) for p in lint)}))
        for body in disassemble_together(cubins, arch)
    ]


def check(cubin: bytes, arch: str, expected: Iterable[str]) -> SassReport:
    """Look for every expected technique, and for what must never appear.

    Raises KeyError on an unknown technique, ValueError on one that the target does not have.
    """
    return check_many([(cubin, arch, expected)])[0]


def check_many(
    jobs: Iterable[tuple[bytes, str, Iterable[str]]], workers: int | None = None
) -> list[SassReport]:
    """`check` on (cubin, arch, expected) triples; reports in the order of the jobs.

    Findings are kept in the store by the cubin's hash; the others are disassembled in batches.
    """
    asked = [(cubin, arch, tuple(expected)) for cubin, arch, expected in jobs]
    for _, arch, expected in asked:
        for technique in expected:
            if not signature(technique).exists_on(arch):
                raise ValueError(f"{technique!r} has no machine form on {arch}")
    found = _findings({(cubin, arch) for cubin, arch, _ in asked}, workers or os.cpu_count() or 1)
    reports = []
    for cubin, arch, expected in asked:
        counts, forbidden = found[cubin, arch]
        missing = tuple(technique for technique in expected if technique not in counts)
        reports.append(SassReport(counts, missing, tuple(forbidden)))
    return reports


def _findings(wanted: set[tuple[bytes, str]], workers: int) -> dict[tuple[bytes, str], Findings]:
    kept, tool = cache.store(), tool_version(executable())
    names = {key: cache.key("sass", *key, tool, _table_text()) for key in wanted}
    found: dict[tuple[bytes, str], Findings] = {}
    missing: dict[str, list[bytes]] = {}
    for key, name in names.items():
        if (payload := kept.get(name)) is not None:
            found[key] = tuple(json.loads(payload))
        else:
            missing.setdefault(key[1], []).append(key[0])
    batches = [
        (cubins[i : i + BATCH], arch)
        for arch, cubins in missing.items()
        for i in range(0, len(cubins), BATCH)
    ]
    with ThreadPoolExecutor(workers) as pool:
        for (cubins, arch), results in zip(
            batches, pool.map(lambda batch: _examine(*batch), batches), strict=True
        ):
            for cubin, result in zip(cubins, results, strict=True):
                found[cubin, arch] = result
                kept.put(names[cubin, arch], json.dumps(result).encode())
    return found
