"""PTX text to a cubin: one `ptxas` process per kernel, its report parsed and judged.

`assemble` returns the machine code and what ptxas says about it; `check` turns that into
complaints. Only the `ptxas` executable is used: nvJitLink, cuLink and `ptxas -c` drop `setmaxnreg`
without a word.
"""

import functools
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OVERRIDE = "PTXFLOW_PTXAS"
WHEEL = "nvidia-cuda-nvcc==13.0.88"
DEFAULT_BIN = "/usr/local/cuda/bin"
FLAGS = ("-v", "-warn-spills", "-warn-lmem-usage")
TIMEOUT = 60.0  # seconds; a kernel of this project takes a tenth of one

_NOTE = re.compile(r"\((C75\d\d)\)\s*(.*)")
_WARNING = re.compile(r"ptxas warning\s*:\s*(.*)")
_EXPLAINED = re.compile(r"Local memory used|Registers are spilled")  # `Usage` has the figures
_ERROR = re.compile(r"ptxas (?:\S+, line (\d+); )?(?:error|fatal)\s*:\s*(.*)")
_FIGURES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "smem": re.compile(r"(\d+) bytes smem"),
    "barriers": re.compile(r"used (\d+) barriers"),
    "cmem": re.compile(r"(\d+) bytes cmem"),
}


class ToolMissing(RuntimeError):
    """A command-line tool is not installed; the message says what was sought and what to do."""


class PtxasError(RuntimeError):
    """ptxas refused a program. `line` is 1-based in the PTX, or None where ptxas names none."""

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Usage:
    """What a kernel takes, as ptxas reports it. Sizes in bytes; `smem` is the static part.

    Of several kernels in one program, the largest figure each.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int
    barriers: int
    cmem: int


@dataclass(frozen=True)
class Note:
    """A `(C75xx)` line: ptxas changed or ignored something that the program asked for."""

    code: str
    text: str


@dataclass(frozen=True)
class Assembly:
    """A cubin and the report that came with it. `seconds` is the time of the ptxas that made it."""

    cubin: bytes
    arch: str
    usage: Usage
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]  # other than those on spills and local memory
    version: str  # of ptxas: "13.0.88"
    seconds: float


def find_tool(name: str, override: str, wheel: str) -> Path:
    """The executable `name`: the variable `override`, else the pip wheel's, else a CUDA toolkit's.

    Raises ToolMissing when there is none, or when the override names something else.
    """
    if chosen := os.environ.get(override):
        if os.path.isfile(chosen) and os.access(chosen, os.X_OK):
            return Path(chosen)
        raise ToolMissing(f"{override}={chosen} is not an executable file; unset it or correct it")
    # The wheel, then conda, then CUDA_PATH and CUDA_HOME; then what the shell would run.
    found = _pathfinder(name) or shutil.which(name) or shutil.which(name, path=DEFAULT_BIN)
    if found is None:
        raise ToolMissing(
            f"no {name}: not in an installed {wheel.partition('==')[0]} wheel, under CUDA_PATH or "
            f"CUDA_HOME, on PATH, or in {DEFAULT_BIN}; run `pip install {wheel}`, or set "
            f"{override} to the executable"
        )
    return Path(found)


def _pathfinder(name: str) -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    path: str | None = find_nvidia_binary_utility(name)
    return path


def executable() -> Path:
    """The ptxas in use; raises ToolMissing."""
    return find_tool("ptxas", OVERRIDE, WHEEL)


def version() -> str:
    """The version of the ptxas in use, as in "13.0.88"."""
    return tool_version(executable())


@functools.cache
def tool_version(tool: Path) -> str:
    """The `V1.2.3` that a CUDA tool prints for --version; raises ToolMissing if it prints none."""
    try:
        shown = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolMissing(f"{tool} does not run: {error}") from None
    match = re.search(r"\bV(\d+(?:\.\d+)+)", shown.stdout)
    if match is None:
        raise ToolMissing(f"{tool} --version names no version: {shown.stdout[:80]!r}")
    return match[1]


def assemble(ptx: str, arch: str, *, timeout: float = TIMEOUT) -> Assembly:
    """Assemble PTX text for one target, as in "sm_90a".

    Raises PtxasError with ptxas's message, the line number and the line of PTX; ToolMissing where
    there is no ptxas.
    """
    tool = executable()
    known = version()
    command = [str(tool), f"-arch={arch}", *FLAGS, "-o", "/dev/stdout", "-"]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, input=ptx.encode(), capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise PtxasError(f"ptxas {known} did not finish for {arch} in {timeout:g} s") from None
    seconds = time.perf_counter() - started
    log = done.stderr.decode(errors="replace")
    if done.returncode != 0 or not done.stdout.startswith(b"\x7fELF"):
        raise _refusal(log, ptx, arch, known, done.returncode)
    notes, warnings = parse_remarks(log)
    return Assembly(done.stdout, arch, parse_usage(log), notes, warnings, known, seconds)


def parse_usage(log: str) -> Usage:
    """The resource figures of a `ptxas -v` report; 0 where it says nothing."""
    worst = {
        name: max((int(figure) for figure in pattern.findall(log)), default=0)
        for name, pattern in _FIGURES.items()
    }
    return Usage(**worst)


def parse_remarks(log: str) -> tuple[tuple[Note, ...], tuple[str, ...]]:
    """The `(C75xx)` notes, and the warnings that no figure of `Usage` already carries.

    ptxas prints the notes as info, which -w does not hide and -Werror does not promote.
    """
    notes, warnings = [], []
    for line in log.splitlines():
        if note := _NOTE.search(line):
            notes.append(Note(note[1], note[2].strip()))
        elif (warning := _WARNING.match(line)) and not _EXPLAINED.match(warning[1]):
            warnings.append(warning[1].strip())
    return tuple(notes), tuple(warnings)


def _refusal(log: str, ptx: str, arch: str, known: str, code: int) -> PtxasError:
    who = f"ptxas {known} for {arch}"
    found = _ERROR.search(log)
    if found is None:
        said = log.strip().splitlines()
        return PtxasError(f"{who} ended with {code}: {said[-1] if said else 'no message'}")
    message = found[2].strip()
    if found[1] is None:
        return PtxasError(f"{who}: {message}")
    number = int(found[1])
    lines = ptx.splitlines()
    quoted = lines[number - 1].strip() if number <= len(lines) else ""
    more = len(_ERROR.findall(log)) - 2  # the last one only says that it gave up
    others = f" (and {more} more)" if more > 0 else ""
    return PtxasError(f"{who}: line {number}: {message}: `{quoted}`{others}", number)


def check(assembly: Assembly) -> list[str]:
    """Complaints about a kernel that assembled: notes, warnings, spills, stack; empty is good."""
    out = [f"{note.code}: {note.text}" for note in assembly.notes]
    out += [f"warning: {text}" for text in assembly.warnings]
    usage = assembly.usage
    if usage.spill_stores or usage.spill_loads:
        out.append(
            f"registers spill to local memory: {usage.spill_stores} bytes of stores, "
            f"{usage.spill_loads} bytes of loads at {usage.registers} registers"
        )
    if usage.stack:
        out.append(f"local memory: a stack frame of {usage.stack} bytes")
    return out


def report_json(assembly: Assembly) -> dict[str, Any]:
    """Everything of an assembly but the cubin, as JSON values; `from_report` is the inverse."""
    return {
        "arch": assembly.arch,
        "usage": vars(assembly.usage),
        "notes": [[note.code, note.text] for note in assembly.notes],
        "warnings": list(assembly.warnings),
        "version": assembly.version,
        "seconds": assembly.seconds,
    }


def from_report(cubin: bytes, report: dict[str, Any]) -> Assembly:
    """The assembly of a cubin and its `report_json`."""
    return Assembly(
        cubin=cubin,
        arch=report["arch"],
        usage=Usage(**report["usage"]),
        notes=tuple(Note(*note) for note in report["notes"]),
        warnings=tuple(report["warnings"]),
        version=report["version"],
        seconds=report["seconds"],
    )
