"""Write our references into the definition files: `python -m ptxflow.eval.bench.reference_text`.

The JSON files are where the facts of the definitions live (axes, constraints, inputs, outputs,
description); their `reference` is generated from `references`. `--check` writes nothing and fails
when a file is out of step.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ptxflow.command import Parser, require_checkout
from ptxflow.compiler.files import write_whole
from ptxflow.env.tasks.definition import FOLDER, Definition, DefinitionError, load
from ptxflow.eval.bench.references import source


def text_of(definition: Definition) -> str:
    """The file contents of a definition, with the reference generated anew."""
    code = source(definition)
    if code is None:
        raise DefinitionError(f"{definition.name}: no reference of ours fits it")
    data = definition.to_json() | {"reference": code}
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def stale() -> dict[Path, str]:
    """The definition files that differ from what they should be, and the text they should have."""
    wanted = {path: text_of(load(path)) for path in sorted(FOLDER.glob("*/*.json"))}
    return {p: text for p, text in wanted.items() if p.read_text(encoding="utf-8") != text}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0; with --check 1 where a file is out of step."""
    parser = Parser(prog="python -m ptxflow.eval.bench.reference_text", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args(argv).check
    require_checkout("reference_text")
    changed = stale()
    for path, text in changed.items():
        if not check:
            write_whole(path, text)
        print(f"{'stale' if check else 'wrote'} {path.relative_to(FOLDER)}")
    total = len(list(FOLDER.glob("*/*.json")))
    print(f"{total} definitions, {len(changed)} {'stale' if check else 'written'}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
