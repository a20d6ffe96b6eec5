"""The machine code of kernels that together take every branch of the builders.

What is compared first is the PTX with its registers numbered in order of appearance, as names of
registers are free. Where that differs the PTX is assembled, and machine code, registers and spills
decide: ptxas is pinned. `pytest tests/golden --update-golden` writes what is emitted now.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest

from ptxflow.compiler.backend import cache, sass
from ptxflow.compiler.backend.ptx import digest, write
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.ir import Statement, kernels_of
from ptxflow.eval.verify.draws import definitions
from tests.golden.kernels import TARGETS, Kernel, read

DIGESTS = Path(__file__).with_name("machine.json")
WORD = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")  # half of an instruction


def machine(ptx: str, kernel: Kernel) -> dict[str, object]:
    """The digest of the machine code, and what ptxas reports."""
    made = cache.assemble(ptx, DEVICES[kernel.device].arch)
    words = WORD.findall(sass.listing(made.cubin, "-c", "-hex"))
    assert words
    used = made.usage
    code = hashlib.sha256(" ".join(words).encode()).hexdigest()[:32]
    return {"sass": code, "registers": used.registers, "spills": used.spill_stores}


def assert_well_formed(ptx: str, tree: Statement) -> None:
    """No division by a constant, launch bounds, aligned tensor maps, labels that are there."""
    assert not re.search(r"(div|rem)\.u32 %r\d+, [^,]+, \d+;", ptx)
    assert ptx.startswith(".version 8.8\n")
    entries, kernels = re.split(r"^(?=\.visible \.entry)", ptx, flags=re.M)[1:], kernels_of(tree)
    for text, kernel in zip(entries, kernels, strict=True):
        held = f".minnctapersm {kernel.arg.resident}"
        assert f".reqntid {32 * kernel.arg.warps}, 1, 1\n{held}\n" in text
        maps = [name for name, kind in kernel.arg.params if kind == "map"]
        assert text.count(".param .align 64 .b8") == len(maps)
        assert {*re.findall(r"bra (\w+);", text)} <= {*re.findall(r"^(\w+):$", text, re.M)}


def test_machine_code(request: pytest.FixtureRequest) -> None:
    update = request.config.getoption("--update-golden")
    held = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    found = {}
    for kernel in read():
        tree = kernel.build()
        ptx = write(tree, DEVICES[kernel.device])
        assert_well_formed(ptx, tree)
        before = held.get(str(kernel))
        row: dict[str, object] = {"ptx": digest(ptx)}
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


def test_names_of_registers_are_free_and_nothing_else_is() -> None:
    kernel = read()[0]
    ptx = write(kernel.build(), DEVICES[kernel.device])
    renamed = re.sub(r"%r(?=[\d<])", "%other", ptx)
    assert renamed != ptx and digest(renamed) == digest(ptx)
    assert machine(renamed, kernel) == machine(ptx, kernel)
    changed = ptx.replace("add.u32", "sub.u32", 1)
    assert changed != ptx and digest(changed) != digest(ptx)
    assert machine(changed, kernel) != machine(ptx, kernel)


def test_every_family_is_there_for_both_targets() -> None:
    found = {(k.family, k.device) for k in read()}
    assert found == {(name, device.name) for name in definitions() for device in TARGETS}
