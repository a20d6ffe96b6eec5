"""The definitions that come with ptxflow, one a line.

    ptxflow definitions | grep rmsnorm

Of each the name, the op, the family that builds its kernels, and its variable axes: the value that
`--axes` has by default, and in brackets from where to where policies were trained; without them
none was. Other values and definitions of one's own, as JSON files, are taken too.
"""

from collections.abc import Sequence

from ptxflow.command import Parser, align
from ptxflow.env.tasks.arguments import product
from ptxflow.env.tasks.definition import Definition, load, names, own_names
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import registered, row_of

HEADS = ("definition", "op", "family", "axes: default [trained]")


def axes_text(definition: Definition) -> str:
    """`M=1024 [1-8192]` for each variable axis; its name alone where no workload is trained."""
    row = row_of(definition)
    if row is None:
        return " ".join(definition.var_axes)
    typical = axes_of(definition, row.typical)
    if definition.name in own_names():
        return " ".join(f"{axis}={typical[axis]}" for axis in definition.var_axes)
    trained = [axes_of(definition, sizes) for sizes in product(row.trained)]
    return "  ".join(
        f"{axis}={typical[axis]} [{min(t[axis] for t in trained)}-{max(t[axis] for t in trained)}]"
        for axis in definition.var_axes
    )


def definition_table() -> str:
    """A head and a line for each definition, in columns, without a newline at the end."""
    rows = [HEADS]
    for definition in map(load, (*names(), *own_names())):
        family = registered(definition)
        cells = definition.name, definition.op_type, family.name if family else "none"
        rows.append((*cells, axes_text(definition)))
    return align(rows)


def main(argv: Sequence[str] | None = None) -> int:
    Parser(description=__doc__).parse_args(argv)
    print(definition_table())
    return 0
