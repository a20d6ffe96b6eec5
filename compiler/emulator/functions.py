"""The .func definitions of a PTX text; the parser puts a function's body where it is called."""

import re
from dataclasses import dataclass

from ptxflow.compiler.emulator.fault import PtxSyntaxError

HEAD = re.compile(r"(?:\.(?:visible|extern|weak)\s+)*\.func\b([^{;]*)([{;])")
_FUNCTION = re.compile(
    r"(?:\.noreturn\s+)?(?:\(([^)]*)\)\s*)?([A-Za-z_$%][\w$]*)\s*(?:\(([^)]*)\))?\s*(?:\.noreturn)?\s*$"
)
_FORMAL = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+([A-Za-z_$%][\w$]*)(\[\d+\])?$")


@dataclass(frozen=True)
class Function:
    """Its results and parameters as (type, name), and where its body begins in the text."""

    name: str
    results: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    at: int


def functions(text: str) -> dict[str, Function]:
    """By name, those that have a body."""
    out = {}
    for head in HEAD.finditer(text):
        if head[2] == ";":
            continue
        line = text.count("\n", 0, head.start()) + 1
        match = _FUNCTION.match(" ".join(head[1].split()))
        if not match:
            raise PtxSyntaxError(f"line {line}: unknown function {' '.join(head[0].split())!r}")
        results, name, parameters = match.groups()
        out[name] = Function(name, _formals(results, line), _formals(parameters, line), head.end())
    return out


def _formals(declared: str | None, line: int) -> tuple[tuple[str, str], ...]:
    return tuple(formal(d, line) for d in (declared or "").split(",") if d.strip())


def formal(declared: str, line: int) -> tuple[str, str]:
    """The type and name of a scalar in parameter space."""
    match = _FORMAL.match(declared.strip())
    if not match or match[3]:
        raise PtxSyntaxError(f"line {line}: {declared.strip()!r} is not a scalar .param")
    return match[1], match[2]
