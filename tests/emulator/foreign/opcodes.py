"""Print which instructions the fixtures hold: `python tests/emulator/foreign/opcodes.py [NAME...]`.

A Markdown table for each kind of instruction, the most frequent first; with names, of the fixtures
whose name contains one of them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).parent
KINDS = (  # the first pattern that matches decides
    ("tcgen05", r"tcgen05"),
    ("wgmma and mma", r"wgmma|mma|wmma|ldmatrix|stmatrix"),
    ("TMA and other asynchronous copies", r"cp\.|fence\.proxy|prefetch|tensormap"),
    ("barriers and fences", r"mbarrier|bar|barrier|fence|membar|griddep"),
    ("lanes and the cluster", r"elect|shfl|vote|redux|match|activemask|mapa|setmaxnreg|getctarank"),
    ("bits", r"prmt|bfi|bfe|lop3|shf|popc|clz|brev|bfind|fns|szext|bmsk"),
    ("memory", r"ld|st|atom|red\b|cvta|isspacep"),
    ("control", r"bra|brx|ret|exit|call|trap"),
    ("conversion and moves", r"cvt|mov|selp"),
    ("float", r".*\.(b?f16(x2)?|f32(x2)?|f64)\b"),
    ("integers and predicates", r".*"),
)


def opcodes(ptx: str) -> list[str]:
    """The opcode of every instruction of a PTX text without comments."""
    body = re.sub(r"^\s*\.(loc|pragma|file)\b.*$", "", ptx[ptx.index("\n{") :], flags=re.M)
    out = []
    for statement in body.split(";"):
        text = re.sub(r"^[\s{}]*(?:[\w$]+:(?!:)[\s{}]*)*", "", statement)
        text = re.sub(r"^@!?[\w%$]+\s+", "", text).strip()
        if text and not text.startswith("."):
            out.append(re.match(r"[^\s{]+", text)[0])  # type: ignore[index]
    return out


def kind(opcode: str) -> str:
    return next(name for name, pattern in KINDS if re.match(pattern, opcode))


def main(names: list[str]) -> None:
    counts: Counter[str] = Counter()
    holders: dict[str, list[str]] = defaultdict(list)
    paths = [p for p in sorted(HERE.glob("*.ptx")) if not names or any(n in p.stem for n in names)]
    for number, path in enumerate(paths, 1):
        print(f"{number}. {path.stem}")
        for opcode, count in Counter(opcodes(path.read_text())).items():
            counts[opcode] += count
            holders[opcode].append(str(number))
    for name, _ in KINDS:
        rows = [(c, o) for o, c in counts.items() if kind(o) == name]
        if rows:
            print(f"\n## {name}\n\n| instruction | count | fixtures |\n|---|--:|---|")
            for count, opcode in sorted(rows, key=lambda row: (-row[0], row[1])):
                print(f"| `{opcode}` | {count} | {' '.join(holders[opcode])} |")


if __name__ == "__main__":
    main(sys.argv[1:])
