"""Command lines whose help names commands as they were started; the standard library alone."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def told(text: str) -> str:
    """A text that names `python sample.py`: as it is, or with `ptxflow sample` where that is how
    the program was started."""
    if not sys.argv[0].startswith("ptxflow "):
        return text
    return re.sub(r"\b(?:python )?(sample|train)\.py", r"ptxflow \1", text)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose help is told so."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.prog = told(self.prog)

    def format_help(self) -> str:
        return told(super().format_help())


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns as wide as they need."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def require_checkout(name: str) -> None:
    """Exit 2 with a line where ptxflow is installed apart from its repository, whose files the
    command of that name reads or writes."""
    if not (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
        print(f"{name}: it is about files of the repository: run it in a checkout", file=sys.stderr)
        raise SystemExit(2)
