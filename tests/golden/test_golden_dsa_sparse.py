"""The emitted PTX of sparse attention: a digest for every path through the builders.

`pytest tests/golden --update-golden` writes what is emitted now; read the difference before you
commit it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ptxflow.compiler.backend.ptx import write
from tests.dsa_cases import CASES, IDS, SPARSE, problem

DIGESTS = Path(__file__).parent / "dsa_sparse.json"


def emitted() -> dict[str, str]:
    out = {}
    for name, (dev, _, s, topk) in zip(IDS, CASES, strict=True):
        text = write(SPARSE.build(problem(64, topk=topk), s, dev), dev)
        out[name] = hashlib.sha256(text.encode()).hexdigest()
    return out


def test_golden(request: pytest.FixtureRequest) -> None:
    found = emitted()
    if request.config.getoption("--update-golden"):
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(DIGESTS.read_text())
