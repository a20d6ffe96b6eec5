"""The emitted PTX of gdn_prefill: a digest for every path through the builder.

`pytest tests/golden --update-golden` writes what is emitted now; read the difference before you
commit it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ptxflow.compiler.backend.ptx import write
from tests.gdn_prefill_cases import CASES, IDS, PREFILL, problem

DIGESTS = Path(__file__).parent / "gdn_prefill.json"


def emitted() -> dict[str, str]:
    texts = [write(PREFILL.build(problem(), s, dev), dev) for dev, _, s in CASES]
    return {
        name: hashlib.sha256(text.encode()).hexdigest()
        for name, text in zip(IDS, texts, strict=True)
    }


def test_golden(request: pytest.FixtureRequest) -> None:
    found = emitted()
    if request.config.getoption("--update-golden"):
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(DIGESTS.read_text())
