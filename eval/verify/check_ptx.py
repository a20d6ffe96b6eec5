"""Check any sm_90a or sm_100a PTX kernel without a GPU: races, barriers, fences, bounds, deadlocks.

The kernel runs in the emulator under adversarial schedules, on the launch that a JSON file
describes. docs/check-ptx.md says what is found and what is not. Exit code: 0 nothing was found,
1 something was, 2 the text, the launch or the limit did not allow a verdict.

examples:
  ptxflow check-ptx kernel.ptx --launch-template > launch.json
  ptxflow check-ptx kernel.ptx --launch launch.json
  ptxflow check-ptx kernel.ptx --launch launch.json --schedules 16 --format sarif --out check.sarif
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ptxflow import __version__
from ptxflow.command import BadInput, Parser, reports
from ptxflow.compiler.files import write_whole
from ptxflow.env.tasks.arguments import positive_int
from ptxflow.eval.verify import foreign
from ptxflow.eval.verify.foreign import Finding, Verdict
from ptxflow.eval.verify.launch_file import read, template

SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PAGE = "https://github.com/ptxflow/ptxflow/blob/main/docs/check-ptx.md"


def as_text(verdict: Verdict, path: str) -> str:
    """A finding a line (what each warp waits for below a deadlock), and a line that sums up."""
    lines = []
    for f in verdict.findings:
        fix = "" if "\n" in f.message else f"; fix: {f.rule.fix}"
        lines.append(f"{path}:{f.line}: {f.rule.id}: {f.message}{fix}")
    found, notes = verdict.errors, len(verdict.findings) - verdict.errors
    counts = f"{found or 'no'} finding{'s' * (found != 1)}" + f", {notes} to note" * (notes > 0)
    lines.append(
        f"{path}: {counts} in {verdict.schedules} schedules, "
        f"{verdict.instructions:,} instructions; {_unreached(verdict)}"
    )
    return "\n".join(lines)


def _unreached(verdict: Verdict) -> str:
    lines = verdict.unreached
    if not lines:
        return "every line was executed"
    some = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
    return f"{len(lines)} lines were never executed, nothing is known of them: {some}"


def as_json(verdict: Verdict, path: str) -> str:
    findings = [
        {
            "rule": f.rule.id, "level": f.rule.level, "line": f.line, "related": f.related,
            "message": f.message, "fix": f.rule.fix, "schedules": f.schedules,
        }
        for f in verdict.findings
    ]  # fmt: skip
    whole = {
        "version": 1, "ptx": path, "findings": findings, "schedules": verdict.schedules,
        "instructions": verdict.instructions, "unreached": verdict.unreached,
        "stopped": verdict.stopped,
    }  # fmt: skip
    return json.dumps(whole, indent=1)


def as_sarif(verdict: Verdict, path: str) -> str:
    """SARIF 2.1.0 (OASIS), which code scanning services read."""

    def place(line: int) -> dict[str, Any]:
        region = {"region": {"startLine": line}} if line else {}
        return {
            "physicalLocation": {
                "artifactLocation": {"uri": quote(Path(path).as_posix())},
                **region,
            }
        }

    def result(f: Finding) -> dict[str, Any]:
        return {
            "ruleId": f.rule.id,
            "ruleIndex": foreign.RULES.index(f.rule),
            "level": f.rule.level,
            "message": {"text": f.message},
            "locations": [place(f.line)],
            "relatedLocations": [{"id": i, **place(n)} for i, n in enumerate(f.related)],
            "properties": {"schedules": f.schedules},
        }

    rules = [{"id": r.id, "help": {"text": r.fix}} for r in foreign.RULES]
    notes = [{"level": "error", "message": {"text": verdict.stopped}}] if verdict.stopped else []
    run = {
        "tool": {
            "driver": {
                "name": "ptxflow check-ptx", "version": __version__, "informationUri": PAGE,
                "rules": rules,
            }
        },
        "invocations": [
            {"executionSuccessful": not verdict.stopped, "toolExecutionNotifications": notes}
        ],
        "results": [result(f) for f in verdict.findings],
    }  # fmt: skip
    return json.dumps({"$schema": SARIF, "version": "2.1.0", "runs": [run]}, indent=1)


FORMATS: dict[str, Callable[[Verdict, str], str]] = {
    "text": as_text, "json": as_json, "sarif": as_sarif,
}  # fmt: skip


def read_text(path: Path) -> str:
    """A PTX file; BadInput where it is too large or no text."""
    size = path.stat().st_size
    if size > foreign.MOST_TEXT:
        raise BadInput(f"{path}: {size} bytes exceed {foreign.MOST_TEXT}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: no UTF-8 text: {error.reason} at byte {error.start}") from None


def parser() -> Parser:
    out = Parser(prog="ptxflow check-ptx", description=__doc__, brief="check-ptx")
    out.add_argument("ptx", type=Path, help="the PTX text")
    out.add_argument("--launch", type=Path, metavar="JSON", help="how it is launched, on what")
    out.add_argument("--launch-template", action="store_true", help="print one to fill in")
    out.add_argument("--entry", default="", help="for the template: one of several kernels")
    out.add_argument("--schedules", type=positive_int, default=4, metavar="N",
                     help="adversarial schedules (default 4)")  # fmt: skip
    out.add_argument("--limit", type=positive_int, default=foreign.LIMIT, metavar="N",
                     help=f"instructions of a schedule (default {foreign.LIMIT})")  # fmt: skip
    out.add_argument("--format", choices=FORMATS, default="text")
    out.add_argument("--out", type=Path, metavar="FILE", help="write there, not to stdout")
    return out


@reports("check-ptx")
def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    text = read_text(args.ptx)
    if args.launch_template:
        print(json.dumps(template(foreign.read_kernel(text, args.entry)), indent=1))
        return 0
    if args.launch is None:
        raise BadInput("--launch is needed; --launch-template prints one")
    try:
        verdict = foreign.check(text, read(args.launch), args.schedules, args.limit)
    except BadInput as error:
        named = str(error).startswith(str(args.launch))
        raise BadInput(str(error) if named else f"{args.ptx}: {error}") from None
    shown = FORMATS[args.format](verdict, str(args.ptx)) + "\n"
    if args.out:
        write_whole(args.out, shown)
    else:
        sys.stdout.write(shown)
    if verdict.stopped:
        raise BadInput(f"{args.ptx}: {verdict.stopped}")
    return int(verdict.errors > 0)
