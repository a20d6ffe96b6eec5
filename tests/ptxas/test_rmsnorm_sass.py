"""What an RMSNorm strategy says of its loads is how the assembler orders them."""

from __future__ import annotations

import pytest

from ptxflow.compiler.backend import sass
from ptxflow.compiler.compilation import CompiledKernel, compile_chunk
from ptxflow.compiler.device import Device
from tests.families.rmsnorm import problem, strategy
from tests.families.row import B200, H200, crossed


def loads_before_the_sum(row_threads: int, residual: bool, dev: Device) -> dict[str, int]:
    """Loads from global memory before the first shuffle, by when the weights are loaded."""
    found = {}
    chosen = {w: strategy(row_threads=row_threads, rows=1, weights=w) for w in ("early", "late")}
    p = problem(4096, residual=residual)
    for when, made in zip(
        chosen, compile_chunk([(p, s, dev) for s in chosen.values()]), strict=True
    ):
        assert isinstance(made, CompiledKernel), made
        names = [i.opcode.partition(".")[0] for i in sass.disassemble(made.cubin)]
        found[when] = names[: names.index("SHFL")].count("LDG")
    return found


@pytest.mark.parametrize(("dev", "residual", "row_threads"), [
    pytest.param(*case, marks=[pytest.mark.slow] * slow)
    for *case, slow in crossed((H200, B200), (False, True), (256, 512))
])  # fmt: skip
def test_early_weights_do_not_wait_for_the_row(
    dev: Device, residual: bool, row_threads: int
) -> None:
    """Else a kernel of one row waits for memory twice, one time after the other."""
    vectors = 4096 // 8 // row_threads
    found = loads_before_the_sum(row_threads, residual, dev)
    assert found["early"] == (2 + residual) * vectors
    assert found["late"] <= found["early"]
