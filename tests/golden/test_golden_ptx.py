"""The emitted PTX, byte for byte: two kernels and a program in full, a digest for the others.

`pytest tests/golden --update-golden` writes what is emitted now; read the difference before you
commit it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptxflow.compiler.compilation import prepare
from tests import gqa_decode_cases as decode
from tests.gemm_cases import CASES, IDS, problem_for

HERE = Path(__file__).parent
FULL = {"sm_90a: cooperative, staged, persistent", "sm_100a: pair", "sm_90a: decode, one tile"}


def emitted() -> dict[str, str]:
    gemms = {
        name: prepare(problem_for(s), s, dev).ptx
        for name, (dev, _, s) in zip(IDS, CASES, strict=True)
    }
    decodes = {
        f"{dev.arch}: decode, {name}": prepare(decode.problem(page_size=16, size=64), s, dev).ptx
        for dev, name, s in decode.CASES
        if name in ("one tile", "chunks are shared")
    }
    groups = {
        f"{dev.arch}: decode by a warpgroup, {name}": prepare(
            decode.problem(64, 4096, page_size, size=64), s, dev
        ).ptx
        for dev in (decode.H200, decode.B200)
        for name, (page_size, s) in decode.GROUP_PATHS.items()
        if name in ("copied rows, values later", "pages in boxes")
    }
    return gemms | decodes | groups


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def path(name: str) -> Path:
    return HERE / f"{name.replace(': ', '-').replace(', ', '-').replace(' ', '_')}.ptx"


def test_golden(request: pytest.FixtureRequest):
    texts, digests = emitted(), HERE / "digests.json"
    if request.config.getoption("--update-golden"):
        for name in FULL:
            path(name).write_text(texts[name])
        digests.write_text(json.dumps({n: digest(t) for n, t in texts.items()}, indent=1) + "\n")
    for name in FULL:
        assert texts[name] == path(name).read_text()
    assert {n: digest(t) for n, t in texts.items()} == json.loads(digests.read_text())


def test_text_does_not_depend_on_the_hash_seed():
    program = (
        "import json; from tests.golden.test_golden_ptx import emitted, digest; "
        "print(json.dumps({n: digest(t) for n, t in emitted().items()}))"
    )
    root = HERE.parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads((HERE / "digests.json").read_text())
