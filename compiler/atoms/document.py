"""The atom table as a page, instructions.md: `python -m ptxflow.compiler.atoms.document`.

A pure function of the rows; a test keeps the committed page equal to it.
"""

from __future__ import annotations

import itertools
import sys

from ptxflow.compiler.atoms import Access, Atom, all_atoms
from ptxflow.compiler.ir import Op, UOp, Use

#: values of the attributes on which rows make the machine code depend
ATTRIBUTES: dict[str, tuple[object, ...]] = {
    "dtype": ("f16", "bf16", "e4m3"),
    "kind": ("f16", "f8f6f4"),
    "cta_group": (1, 2),
    "direction": ("inc", "dec"),
}
COLUMNS = ("atom", "operands", "scope", "lanes", "accesses", "sync", "machine code", "PTX ISA")
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


def page() -> str:
    """The whole page in Markdown."""
    parts = [HEAD]
    for archs in dict.fromkeys(row.archs for row in all_atoms()):
        rows = [row for row in all_atoms() if row.archs == archs]
        parts.append(f"## {' and '.join(archs)}\n\n{_table(rows)}")
    ruled = [(row.name, rule.sentence) for row in all_atoms() for rule in row.rules]
    parts.append(RULES + "\n" + "\n".join(f"- `{name}`: {text}" for name, text in ruled) + "\n")
    return "\n".join(parts)


def techniques(row: Atom) -> tuple[str, ...]:
    """Every technique that some use of the atom claims."""
    if not callable(row.sass):
        return row.sass
    found: dict[str, None] = {}
    for values in itertools.product(*ATTRIBUTES.values()):
        use = Use(row.name, tuple(zip(ATTRIBUTES, values, strict=True)))
        found |= dict.fromkeys(row.sass(UOp(Op.ATOM, (), use)))
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
    sys.stdout.write(page())
