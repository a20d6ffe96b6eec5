"""Markdown tables, and the sections of pages that commands write.

A section lies between `<!-- table NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ptxflow.command import BadInput
from ptxflow.compiler.files import write_whole

SECTION = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.S)
NUMBER = re.compile(r"[\d,.]+( \([\d.]+\))?|\d+-\d+|-")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], left: int | None = 1) -> str:
    """A table, the first `left` columns flush left; None: all but those of numbers."""
    body = [[str(cell) for cell in row] for row in rows]
    numbers = [all(NUMBER.fullmatch(row[i]) for row in body) for i in range(len(head))]
    right = numbers if left is None else [i >= left for i in range(len(head))]
    marks = ["--:" if r else "---" for r in right]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *body))


def picture(caption: str, path: str) -> str:
    """An image, and below it what it shows."""
    return f"![{caption}]({path})\n\n{caption}"


def quoted(page: str) -> dict[str, str]:
    """The sections that a page holds, by name."""
    return {match[2]: match[3].strip("\n") for match in SECTION.finditer(page)}


def placed(page: str, found: Mapping[str, str]) -> str:
    """The page with these sections; BadInput where it has no place for one."""
    if missing := found.keys() - quoted(page).keys():
        raise BadInput(f"the page has no table {', '.join(sorted(missing))}")

    def put(match: re.Match[str]) -> str:
        return f"{match[1]}{found.get(match[2], match[3].rstrip())}\n{match[4]}"

    return SECTION.sub(put, page)


def renewed(page: str, found: Mapping[str, str]) -> str:
    """The page with all its sections; BadInput where one is not among these."""
    names = quoted(page).keys()
    if unknown := names - found.keys():
        raise BadInput(
            f"no table {', '.join(sorted(unknown))}; there are {', '.join(sorted(found))}"
        )
    return placed(page, {name: found[name] for name in names})


def publish(found: Mapping[str, str], page: Path | None) -> None:
    """Put these sections into a page; print them where none is named."""
    if page is None:
        print("\n\n".join(found.values()))
    else:
        write_whole(page, placed(page.read_text(encoding="utf-8"), found))
