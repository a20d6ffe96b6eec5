"""The emitted PTX of indexers: a digest for every path through the builders.

`pytest tests/golden --update-golden` writes what is emitted now; read the difference before you
commit it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.kernels.dsa_indexer import DSA_INDEXER
from tests.dsa_indexer_cases import CASES, IDS, SORTED, SORTED_IDS, problem

DIGESTS = Path(__file__).parent / "dsa_indexer.json"


def emitted() -> dict[str, str]:
    out = {}
    cases = [(name, problem(), *c) for name, c in zip(IDS, CASES, strict=True)]
    long = problem(topk=2048)
    cases += [(name, long, *c) for name, c in zip(SORTED_IDS, SORTED, strict=True)]
    for name, p, dev, _, s in cases:
        text = write(DSA_INDEXER.build(p, s, dev), dev)
        out[name] = hashlib.sha256(text.encode()).hexdigest()
    return out


def test_golden(request: pytest.FixtureRequest) -> None:
    found = emitted()
    if request.config.getoption("--update-golden"):
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(DIGESTS.read_text())
