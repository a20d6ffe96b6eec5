"""The machine code of kernels that together take every branch of the builders.

What is compared first is the PTX with its registers numbered in order of appearance, as names of
registers are free. Where that differs the PTX is assembled, and machine code, registers and spills
decide: ptxas is pinned. `pytest tests/golden --update-golden` writes what is emitted now.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from ptxflow.compiler import cache, sass
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.ptx import write
from tests.golden.kernels import Kernel, read

DIGESTS = Path(__file__).with_name("machine.json")
REGISTER = re.compile(r"%[a-zA-Z_]\w*")
SPECIAL = re.compile(r"%(?:tid|ntid|ctaid|nctaid|laneid|warpid|clusterid|nclusterid|cluster_\w+|"
                     r"smid|clock\w*|globaltimer\w*|dynamic_smem_size)\b")  # fmt: skip


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def numbered(ptx: str) -> str:
    """The text with registers named by their order of appearance in instructions; declarations
    are sorted."""
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        if SPECIAL.match(match[0]):
            return match[0]
        return names.setdefault(match[0], f"%{len(names)}")

    lines = ptx.splitlines()
    code = [REGISTER.sub(name, n) for n in lines if not n.lstrip().startswith(".reg")]
    declared = [REGISTER.sub(name, n) for n in lines if n.lstrip().startswith(".reg")]
    return "\n".join([*code, *sorted(declared)])


def machine(ptx: str, kernel: Kernel) -> dict[str, object]:
    """The digest of the machine code, and what ptxas reports."""
    made = cache.assemble(ptx, DEVICES[kernel.device].arch)
    code = sass.listing(made.cubin, "-c", "-hex")
    usage = made.usage
    return {"sass": digest(code), "registers": usage.registers, "spills": usage.spill_stores}


def test_machine_code(request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update-golden")
    held = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    found = {}
    for kernel in read():
        ptx = write(kernel.build(), DEVICES[kernel.device])
        before = held.get(str(kernel))
        row = {"ptx": digest(numbered(ptx))}
        if before is not None and before["ptx"] == row["ptx"]:
            row = before
        else:
            row |= machine(ptx, kernel)
        found[str(kernel)] = row
    if update:
        rows = ",\n".join(f"{json.dumps(n)}: {json.dumps(r)}" for n, r in found.items())
        DIGESTS.write_text(f"{{\n{rows}\n}}\n")
        held = found
    changed = [n for n, r in found.items() if {**r, "ptx": ""} != {**held.get(n, {}), "ptx": ""}]
    assert not changed and found.keys() == held.keys()
