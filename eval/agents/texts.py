"""Tools for PTX of anybody and for what its instructions ask for; see `tools`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from ptxflow.command import BadInput
from ptxflow.compiler.atoms import Atom, all_atoms
from ptxflow.compiler.atoms.document import UNTIMED, conditions, techniques, timings
from ptxflow.eval.agents.desk import Desk, Json

MOST_LINES = 400


def launch_template(
    desk: Desk,
    ptx: Annotated[str, "the PTX text, its path under the root, or the address of a text"],
    entry: Annotated[str, "one of several kernels"] = "",
) -> Json:
    """A launch for `check_ptx` to fill in: grid, block, and a buffer for each 64-bit parameter."""
    from ptxflow.eval.verify.foreign import read_kernel
    from ptxflow.eval.verify.launch_file import template

    return template(read_kernel(desk.text(ptx), entry))


def check_ptx(
    desk: Desk,
    ptx: Annotated[str, "the PTX text, its path under the root, or the address of a text"],
    launch: Annotated[Json | str, "how it is launched and on what, or the path of such a file"],
    schedules: Annotated[int, "adversarial schedules, 1 to 64"] = 4,
    limit: Annotated[int, "instructions of warps, a schedule"] = 1_000_000,
) -> Json:
    """Run any sm_90a or sm_100a PTX kernel in the emulator, without a GPU, and tell its faults:
    races, missing fences, wrong parity, arrival or transaction counts, use of what is in flight,
    uninitialised or out-of-bounds access, deadlocks with who waits for whom, wrong values.

    Each finding has a line, what is wrong, and what would fix it. `verdict` is clean, faulty or
    stopped (no verdict: `stopped` says why). Take a small launch that reaches every line
    (`launch_template` begins one); buffers with `expected` are compared.
    """
    from ptxflow.eval.verify import check_ptx as command
    from ptxflow.eval.verify.foreign import LIMIT, check
    from ptxflow.eval.verify.launch_file import parse

    if not (1 <= schedules <= 64 and 1 <= limit <= LIMIT):
        raise BadInput(f"schedules must be from 1 to 64, limit from 1 to {LIMIT}")
    folder = desk.root
    if isinstance(launch, str):
        path = desk.path(launch)
        folder = path.parent
        try:
            launch = json.loads(command.read_text(path))
        except ValueError as error:
            raise BadInput(f"{path.name}: not JSON: {error}") from None
    require_files(Desk(desk.root), folder, launch)
    text = desk.text(ptx)
    desk.say("emulating")
    verdict = check(text, parse(launch, "launch", folder), schedules, limit)
    found: Json = json.loads(command.as_json(verdict, ""))
    del found["ptx"], found["version"]
    many = len(found["findings"])
    found["findings"], found["unreached"] = found["findings"][:20], found["unreached"][:40]
    state = "stopped" if verdict.stopped else "faulty" if verdict.errors else "clean"
    return {"verdict": state, "in_all": many} | found


def require_files(desk: Desk, folder: Path, launch: Any) -> None:
    """BadInput where a launch names a file that is not under the root."""
    if isinstance(launch, dict):
        if isinstance(name := launch.get("file"), str):
            desk.path(str(folder / name))
        launch = [*launch.values()]
    if isinstance(launch, list):
        for part in launch:
            require_files(desk, folder, part)


def instruction(
    desk: Desk, name: Annotated[str, "of a row or part of it, as mbar, tma, wgmma, tcgen05, fence"]
) -> Json:
    """What an instruction of sm_90a and sm_100a asks for: who executes and who issues it, what it
    reads and writes through which proxy, what completes it, its effect on barriers, its rules, the
    machine code it must become, and its section of the PTX ISA; what must hold before and after;
    latency in cycles and throughput, measured on sm_90a. Several rows where they fit."""
    wanted = name.lower().replace(".", "_")
    rows = [a for a in all_atoms() if a.name == wanted] or [
        a for a in all_atoms() if wanted in a.name or name.lower() in a.isa.lower()
    ]
    if not rows:
        raise BadInput(f"no row is like {name[:80]!r}; try {[a.name for a in all_atoms()[:12]]}")
    return {"in_all": len(rows), "rows": [instruction_row(a) for a in rows[:8]],
            "others": [a.name for a in rows[8:60]]}  # fmt: skip


def instruction_row(row: Atom) -> Json:
    return {
        "name": row.name, "archs": [*row.archs], "scope": row.scope.name.lower(),
        "lanes": row.lanes.name.lower(), "operands": dict(row.operands),
        "accesses": [asdict(a) for a in row.accesses], "effect": row.effect,
        "only_orders_others": row.orders, "rules": [r.sentence for r in row.rules],
        "sass": [*techniques(row)], "isa": row.isa, **conditions(row),
        "measured": timings(row) or UNTIMED.get(row.name, "not measured"),
    }  # fmt: skip


def read_text(
    desk: Desk,
    text: Annotated[str, "the address of a text that another tool gave, or a path under the root"],
    first: Annotated[int, "line to begin at, from 1"] = 1,
    lines: Annotated[int, f"how many, up to {MOST_LINES}"] = 80,
) -> Json:
    """Read lines of a text that another tool kept (a kernel's PTX, a reference program, an answer
    that was too long), or of a file."""
    if first < 1 or not 1 <= lines <= MOST_LINES:
        raise BadInput(f"first must be at least 1, lines from 1 to {MOST_LINES}")
    whole = desk.text(text).splitlines()
    part = (line[:500] for line in whole[first - 1 : first - 1 + lines])
    return {"first": first, "lines_in_all": len(whole), "text": "\n".join(part)}
