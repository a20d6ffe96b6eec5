"""The emitted PTX of latent attention: a digest for every path through the builders.

`pytest tests/golden --update-golden` writes what is emitted now; read the difference before you
commit it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ptxflow.compiler.backend.ptx import write
from tests.mla_cases import CASES, IDS, family_of, problem_of

DIGESTS = Path(__file__).parent / "mla.json"


def emitted() -> dict[str, str]:
    out = {}
    for name, (dev, _, s) in zip(IDS, CASES, strict=True):
        text = write(family_of(s).build(problem_of(s, 64), s, dev), dev)
        out[name] = hashlib.sha256(text.encode()).hexdigest()
    return out


def test_golden(request: pytest.FixtureRequest) -> None:
    found = emitted()
    if request.config.getoption("--update-golden"):
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(DIGESTS.read_text())
