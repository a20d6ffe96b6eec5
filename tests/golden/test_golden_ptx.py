"""The emitted PTX, byte for byte: two kernels and a program.

`pytest tests/golden --update-golden` writes what is emitted now; read the difference before you
commit it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptxflow.compiler.backend.ptx import digest, write
from ptxflow.compiler.device import DEVICES
from tests.emulation import text_of
from tests.families import gemm, gqa_decode
from tests.golden.kernels import read
from tests.golden.test_golden_machine import DIGESTS

HERE = Path(__file__).parent


def emitted() -> dict[str, str]:
    """PTX by file."""
    hopper, blackwell = gemm.HOPPER["cooperative, staged, persistent"], gemm.BLACKWELL["pair"]
    decode = gqa_decode.problem(page_size=16, size=64)
    return {
        "sm_90a-cooperative-staged-persistent.ptx": text_of(gemm.problem(), hopper),
        "sm_100a-pair.ptx": text_of(gemm.problem(), blackwell, gemm.B200),
        "sm_90a-decode-one_tile.ptx": text_of(decode, gqa_decode.PATHS["one tile"]),
    }


def numbers() -> dict[str, str]:
    """Digests of the PTX of all kernels whose machine code is pinned."""
    return {str(k): digest(write(k.build(), DEVICES[k.device])) for k in read()}


def test_golden(request: pytest.FixtureRequest) -> None:
    for name, text in emitted().items():
        if request.config.getoption("--update-golden"):
            (HERE / name).write_text(text)
        assert text == (HERE / name).read_text()


@pytest.mark.parametrize("what", ["emitted", pytest.param("numbers", marks=pytest.mark.slow)])
def test_text_does_not_depend_on_the_hash_seed(what: str) -> None:
    program = f"import json; from tests.golden.test_golden_ptx import {what} as f; "
    root = HERE.parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program + "print(json.dumps(f()))"],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    if what == "emitted":
        assert found == {name: (HERE / name).read_text() for name in found} and len(found) == 3
    else:
        assert found == {n: row["ptx"] for n, row in json.loads(DIGESTS.read_text()).items()}
