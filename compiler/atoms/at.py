"""All atoms' constructors: operands by position, attributes by keyword; at.pyi has their types."""

from ptxflow.compiler.atoms.table import CONSTRUCTORS, Constructor


def __getattr__(name: str) -> Constructor:
    try:
        return CONSTRUCTORS[name]
    except KeyError:
        raise AttributeError(f"no atom {name!r}; known: {', '.join(CONSTRUCTORS)}") from None
