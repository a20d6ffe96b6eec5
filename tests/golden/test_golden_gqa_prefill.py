"""The emitted PTX of gqa_prefill: a digest for every path through the builder.

`pytest tests/golden --update-golden` writes what is emitted now; read the difference before you
commit it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from ptxflow.compiler.backend.ptx import write
from tests.gqa_prefill_cases import B200, H200, PATHS, PREFILL, TMEM_PATHS, problem

DIGESTS = Path(__file__).parent / "gqa_prefill.json"


def emitted() -> dict[str, str]:
    texts = {
        f"{dev.arch}: {name}": write(PREFILL.build(problem(page), s, dev), dev)
        for dev, paths in ((H200, PATHS), (B200, TMEM_PATHS))
        for name, (page, s) in paths.items()
    }
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def test_golden(request: pytest.FixtureRequest) -> None:
    found = emitted()
    if request.config.getoption("--update-golden"):
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(DIGESTS.read_text())
