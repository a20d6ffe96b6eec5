"""A report as one HTML file that needs no network: text, tables, plots as data.

Tables come as Markdown and plots as PNG files; nothing is fetched, and no script is run.
"""

import base64
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto;
       padding: 0 1rem; }
h1, h2, h3 { font-weight: 600; line-height: 1.25; } h2 { margin-top: 2.5rem; }
nav { font-size: 13px; columns: 15rem; }
nav ul { list-style: none; margin: 0; padding: 0; } nav ul ul { padding-left: 1rem; }
nav li { break-inside: avoid; } nav a { color: #1a4f8b; text-decoration: none; }
nav summary { cursor: pointer; }
@media (min-width: 80rem) {
  body { max-width: 78rem; display: grid; grid-template-columns: 15rem minmax(0, 1fr);
         column-gap: 2rem; }
  nav { columns: auto; position: sticky; top: 1rem; align-self: start; max-height: 95vh;
        overflow-y: auto; }
}
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; }
th, td { padding: 3px 9px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { background: #f4f4f4; white-space: normal; vertical-align: bottom; }
td.left, th.left { text-align: left; }
tr:hover td { background: #f8fbff; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption, .note { color: #555; font-size: 13px; }
code { background: #f4f4f4; padding: 0 3px; font-size: 12.5px; }
"""


@dataclass(frozen=True)
class Plot:
    """A PNG file, what it shows, and the command that makes it."""

    path: Path
    caption: str
    command: str


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, tables in Markdown and plots; one of level 3 is a part of the last of
    level 2 before it."""

    title: str
    text: str = ""
    tables: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    level: int = 2


def page(title: str, intro: str, sections: Iterable[Section]) -> str:
    """The whole file."""
    held = [s for s in sections if s.tables or s.plots]
    body = "\n".join(_section(s) for s in held)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{_contents(held)}\n<main>\n<h1>{html.escape(title)}</h1>\n<p>{_inline(intro)}</p>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _contents(sections: Sequence[Section]) -> str:
    """A link a section; parts of a section are folded under it."""
    items: list[tuple[str, list[str]]] = []
    for section in sections:
        link = f'<a href="#{_anchor(section.title)}">{html.escape(section.title)}</a>'
        if section.level == 2 or not items:
            items.append((link, []))
        else:
            items[-1][1].append(link)
    rows = "\n".join(f"<li>{_folded(link, parts)}</li>" for link, parts in items)
    return f"<nav><ul>\n{rows}\n</ul></nav>"


def _folded(link: str, parts: Sequence[str]) -> str:
    if not parts:
        return link
    inner = "".join(f"<li>{part}</li>" for part in parts)
    return f"<details><summary>{link}</summary><ul>{inner}</ul></details>"


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _section(section: Section) -> str:
    heading = f"h{section.level}"
    parts = [f'<{heading} id="{_anchor(section.title)}">{html.escape(section.title)}</{heading}>']
    if section.text:
        parts.append(f"<p>{_inline(section.text)}</p>")
    parts += [_figure(plot) for plot in section.plots]
    parts += [_block(text) for text in section.tables]
    return "\n".join(parts)


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.path.read_bytes()).decode()
    return (
        f'<figure><img alt="{html.escape(plot.caption)}" src="data:image/png;base64,{data}">\n'
        f"<figcaption>{html.escape(plot.caption)} Made by <code>{html.escape(plot.command)}</code>"
        "</figcaption></figure>"
    )


def _block(text: str) -> str:
    """A Markdown table, and the paragraphs after it."""
    out = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            out.append(_table(block))
        elif block.strip():
            out.append(f'<p class="note">{_inline(block)}</p>')
    return "\n".join(out)


def _table(text: str) -> str:
    head, marks, *rows = ([c.strip() for c in line.strip("|").split("|")]
                          for line in text.splitlines())  # fmt: skip
    sides = ["left" if not m.endswith(":") else "" for m in marks]

    def row(cells: Sequence[str], tag: str) -> str:
        shown = (
            f'<{tag} class="left">{_inline(c)}</{tag}>' if s else f"<{tag}>{_inline(c)}</{tag}>"
            for c, s in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="wide"><table><thead>{row(head, "th")}</thead>\n<tbody>\n{body}\n'
        "</tbody></table></div>"
    )


def _inline(text: str) -> str:
    """Escaped, with `code`."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
