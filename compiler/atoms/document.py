"""The atom table as a page: `python -m ptxflow.compiler.atoms.document`, which prints it, writes
the table as signatures, too: at.pyi, which mypy and editors read.

Pure functions of the rows; a test keeps what is committed equal to them.
"""

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptxflow.compiler.atoms import Access, Atom, all_atoms
from ptxflow.compiler.atoms.table import TYPES
from ptxflow.compiler.ir import Op, Statement, Use

#: values of the attributes on which rows make the machine code depend
ATTRIBUTES: dict[str, tuple[object, ...]] = {
    "dtype": ("f16", "bf16", "e4m3"),
    "kind": ("f16", "f8f6f4"),
    "cta_group": (1, 2),
    "direction": ("inc", "dec"),
    "mask": (0, 1),
}
COLUMNS = ("atom", "operands", "scope", "lanes", "accesses", "sync", "machine code", "PTX ISA")
MEASURED = Path(__file__).parent / "measured"
#: rows of sm_90a that micro-benchmarks leave out, for a time would say nothing
UNTIMED = {
    "mbar_init": "a barrier is initialised once, before anything waits for it",
    "set_max_registers": "it waits until other warps have given registers back",
}
#: when what an access does is complete, by its `done`
COMPLETE = {
    "now": "at once", "mbar": "when the phase of its mbarrier completes",
    "bulk": "behind a wait for its bulk group", "wgmma": "behind wgmma.wait_group",
    "tcgen05": "at a tcgen05.commit", "ld": "behind tcgen05.wait::ld", "st": "behind wait::st",
    "copies": "behind a wait for the lane's copies",
}  # fmt: skip
HEAD = """\
# Atoms

One row per instruction that the compiler can emit; the rows are in `compiler/atoms/`. This page is
made by `python -m ptxflow.compiler.atoms.document > eval/results/instructions.md`.

- **operands**: name and kind. `smem`, `desc` (shared memory through a matrix descriptor), `mbar`,
  `tmem`, `frag` (registers) and `global` name storage; `value` is a number, `map` a tensor map.
- **scope**: who must execute it together. **lanes**: `all` of the warp issue it, `one` does, or
  `any` number may (an arrive counts them).
- **accesses**: operand, r(ead), w(rite) or a(tomic update), the proxy, and what completes it where
  it is asynchronous: `mbar` (bytes counted by the mbarrier), `bulk`, `wgmma` (their groups),
  `tcgen05` (a commit) or `ld` (tcgen05.wait::ld).
- **sync**: its transition in the abstract machine; a star marks atoms that exist only to order
  others, each of which a test deletes from every kernel and expects the validator to refuse.
- **machine code**: the techniques of `compiler/backend/sass_signatures.json` that must show up in
  the SASS of a kernel that uses it; some depend on an attribute.
- **PTX ISA**: the section that the row was read from.
"""
RULES = """\
## Rules

What the validator asks of every use, besides kinds of operands, scope and lanes.
"""
TIMED = """\
## Measured on sm_90a

By `ptxflow microbench`, the first of the files in `compiler/atoms/measured/`. Cycles are of steps
that wait for each other, with the 5th and 95th percentile over SMs where they differ; rates
are steps a cycle of an SM, of a warp or a warpgroup each, at the most warps that were tried. A step
of several rows, or of several machine instructions (SASS), is timed as a whole. Nothing is measured
on sm_100a.

Not timed: {untimed}.
"""

STUB = """\
# made by `python -m ptxflow.compiler.atoms.document`
from ptxflow.compiler.atoms.table import Held
from ptxflow.compiler.ir import Scalar, Slot, Statement, Value

"""
#: what an operand of a kind is; a slot where none is said
CLASSES = {"value": "Scalar", "map": "Value", "frag": "Slot | Held"}
#: what the validator may be told of an access to storage of a kind
FACTS = {
    "frag": {"last": "str?", "unread": "str?", "alike": "bool?"},
    "smem": {"last": "str?", "unread": "str?", "across": "spans?", "each_warp": "int?"},
}


def page() -> str:
    """The whole page in Markdown."""
    parts = [HEAD]
    for archs in dict.fromkeys(row.archs for row in all_atoms()):
        rows = [row for row in all_atoms() if row.archs == archs]
        parts.append(f"## {' and '.join(archs)}\n\n{_table(rows)}")
    untimed = "; ".join(f"`{name}`: {why}" for name, why in UNTIMED.items())
    parts.append(TIMED.format(untimed=untimed) + "\n" + _timings())
    ruled = [(row.name, rule.sentence) for row in all_atoms() for rule in row.rules]
    parts.append(RULES + "\n" + "\n".join(f"- `{name}`: {text}" for name, text in ruled) + "\n")
    return "\n".join(parts)


def stub() -> str:
    """The whole of at.pyi: a constructor a row."""
    return STUB + "".join(map(_signature, all_atoms()))


def _signature(row: Atom) -> str:
    known, kinds, attrs = dict(row.defaults), dict(row.operands), dict(row.attrs)
    for name in (n for n, kind in row.operands if kind == "desc"):
        attrs |= {f"{name}_desc": "int", f"{name}_step": "int?"}
    for access in row.accesses:
        attrs = FACTS.get(kinds[access.operand], {}) | attrs
    said = [_parameter(n, CLASSES.get(kind, "Slot"), known) for n, kind in row.operands]
    said += ["/"] * bool(said) + ["*"] * bool(attrs)
    said += [_parameter(n, attrs[n], known) for n in sorted(attrs)]
    return f"def {row.name}({', '.join(said)}) -> Statement: ...\n"


def _parameter(name: str, kind: str, known: Mapping[str, object]) -> str:
    said = TYPES.get(kind.rstrip("?"), kind) + " | None" * (known.get(name, ...) is None)
    if name in known:
        return f"{name}: {said} = {known[name]!r}".replace("'", '"')
    return f"{name}: {said}" + " = ..." * kind.endswith("?")


def records() -> list[dict[str, Any]]:
    """Of micro-benchmarks, a GPU each."""
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(MEASURED.glob("*.json"))]


def timings(row: Atom) -> dict[str, dict[str, Any]]:
    """What micro-benchmarks say of a row on the first GPU of each kind, by its name and the probe.
    Latency is cycles: the median, percentiles 5 and 95 over SMs, the least and greatest of a
    repeat; throughput steps a cycle of an SM by warps, with the same percentiles."""
    return {
        record["gpu"]["name"]: found
        for record in reversed(records())
        if (found := {n: p for n, p in record["probes"].items() if row.name in p["rows"]})
    }


def conditions(row: Atom) -> dict[str, list[str]]:
    """What must hold before a row and what does after it, with what its accesses conflict, and
    which operands are registers: as its accesses and scope say."""
    memory = [a for a in row.accesses if dict(row.operands)[a.operand] != "frag"]
    scope = row.scope.name.lower()
    before = [] if scope == "thread" else [f"the whole {scope} is converged and executes it"]
    for a in memory:
        earlier = "writes" if a.mode == "r" else "accesses"
        before.append(f"earlier {earlier} of {a.operand} are known to the {a.proxy} proxy")
    done = {"r": "has been read", "w": "has been written", "rw": "has been updated"}
    after = [f"{a.operand} {done.get(a.mode, 'has been added to')} {COMPLETE[a.done]}"
             for a in row.accesses]  # fmt: skip
    others = {"r": "a write", "a": "any access but an atomic one"}
    conflicts = [f"{a.operand}: {others.get(a.mode, 'any access')} that is not ordered with it"
                 for a in memory]  # fmt: skip
    registers = [name for name, kind in row.operands if kind == "frag"]
    return {"before": before, "after": after, "conflicts": conflicts, "registers": registers}


def _timings() -> str:
    first = records()[0]
    gpu = first["gpu"]
    lines = [("probe", "SASS", "cycles", "a cycle and SM"), ("---", "--:", "--:", "--:")]
    lines += [(f"`{name}`", *_figures(p)) for name, p in first["probes"].items()]
    told = (
        f"{gpu['name']}, driver {gpu['driver']}, {gpu['sm_clock_mhz']} MHz, ptxas {first['ptxas']}."
    )
    return f"{told}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _figures(probe: Mapping[str, Any]) -> tuple[str, str, str]:
    if "refused" in probe:
        return "-", str(probe["refused"]), "-"
    cycles, low, high, *_ = probe.get("latency", ("-", "-", "-"))
    rates = probe.get("throughput", {"0": "-"})
    rate = rates[max(rates, key=int)][0]
    spread = f" ({low:g} to {high:g})" if low != high else ""
    shown = [f"{x:g}" if isinstance(x, float) else "-" for x in (probe["sass"], cycles, rate)]
    return shown[0], shown[1] + spread, shown[2]


def techniques(row: Atom) -> tuple[str, ...]:
    """Every technique that some use of the atom claims."""
    if not callable(row.sass):
        return row.sass
    found: dict[str, None] = {}
    for values in itertools.product(*ATTRIBUTES.values()):
        use = Use(row.name, tuple(zip(ATTRIBUTES, values, strict=True)))
        found |= dict.fromkeys(row.sass(Statement(Op.ATOM, (), use)))
    return tuple(found)


def _table(rows: list[Atom]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: Atom) -> tuple[str, ...]:
    operands = ", ".join(f"{name} {kind}" for name, kind in row.operands)
    sync = row.effect.replace("_", " ") + (" \\*" if row.orders else "")
    return (
        f"`{row.name}`",
        operands,
        row.scope.name.lower(),
        row.lanes.name.lower(),
        "; ".join(map(_access, row.accesses)),
        sync,
        "; ".join(techniques(row)).replace("|", "\\|"),
        row.isa,
    )


def _access(access: Access) -> str:
    done = "" if access.done == "now" else f", {access.done}"
    return f"{access.operand} {access.mode} {access.proxy}{done}"


if __name__ == "__main__":
    Path(__file__).with_name("at.pyi").write_text(stub(), encoding="utf-8")
    sys.stdout.write(page())
