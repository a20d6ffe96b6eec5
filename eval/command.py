"""Command lines whose help names commands as they were started; the standard library alone."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any


def told(text: str) -> str:
    """A text that names `python -m ptxflow.eval.report` or `python sample.py`: as it is, or with
    `ptxflow report` and `ptxflow sample` where that is how the program was started."""
    if not sys.argv[0].startswith("ptxflow "):
        return text
    text = re.sub(r"\b(?:python )?(sample|train|evaluate)\.py", r"ptxflow \1", text)
    pattern = r"python -m ptxflow\.eval\.(\w+)"
    return re.sub(pattern, lambda found: f"ptxflow {found[1].replace('_', '-')}", text)


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose help is told so."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.prog = told(self.prog)

    def format_help(self) -> str:
        return told(super().format_help())


def require_checkout(name: str) -> None:
    """Exit 2 with a line where ptxflow is installed apart from its repository, whose files the
    command of that name reads or writes."""
    if not (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
        print(f"{name}: it is about files of the repository: run it in a checkout", file=sys.stderr)
        raise SystemExit(2)
