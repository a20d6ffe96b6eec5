"""What commands share: their parser, their tables, and how bad input ends them; the standard
library alone."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

CLUSTER = "PTXFLOW_CLUSTER"
LOCAL = "local:"  # before the number of GPUs: a cluster of this machine
Main = TypeVar("Main", bound=Callable[..., int])


class BadInput(ValueError):
    """What the user asked for cannot be done; the message is one line."""


def as_started(text: str) -> str:
    """A text that names `python sample.py`: as it is, or with `ptxflow sample` where that is how
    the program was started."""
    if not sys.argv[0].startswith("ptxflow "):
        return text
    return re.sub(r"\b(?:python )?(sample|train)\.py", r"ptxflow \1", text)


class Parser(argparse.ArgumentParser):
    """Help as it is written, with commands named as they were started. With `brief`, a wrong
    argument is one line that begins with this name, instead of the usage."""

    def __init__(self, *, brief: str = "", **options: Any):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)
        self.prog = as_started(self.prog)
        self.brief = brief

    def format_help(self) -> str:
        return as_started(super().format_help())

    def error(self, message: str) -> NoReturn:
        if not self.brief:
            super().error(message)
        print(f"{self.brief}: {message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def reports(name: str, *failures: type[Exception]) -> Callable[[Main], Main]:
    """Decorates a command's `main`: BadInput, OSError and `failures` become one line on stderr that
    begins with the command's name, and exit code 2."""
    caught: tuple[type[Exception], ...] = (BadInput, OSError, *failures)

    def decorate(main: Main) -> Main:
        @functools.wraps(main)
        def reporting(argv: Sequence[str] | None = None) -> int:
            try:
                return main(argv)
            except BrokenPipeError:  # who reads has enough: see `ptxflow.__main__.run`
                raise
            except caught as error:
                print(f"{name}: {one_line(error)}", file=sys.stderr)
                return 2

        return cast(Main, reporting)

    return decorate


def one_line(error: Exception) -> str:
    """What is printed of an error; of a file's, its name and why."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class _Cluster(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values)
        os.environ[CLUSTER] = values


def add_cluster(parser: Any) -> None:
    """`--cluster` for a command that measures: `eval.bench.campaign.machines` reads it."""
    parser.add_argument(
        "--cluster", action=_Cluster, metavar="ADDRESS",
        help="measure and compile on the workers of a Dask scheduler, tcp://HOST:8786, or of one "
        f"made here for N GPUs, {LOCAL}N, instead of this process's own (default: ${CLUSTER})",
    )  # fmt: skip


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
