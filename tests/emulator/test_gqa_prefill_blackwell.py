"""What kernels for tcgen05 must not leave out: waits, fences, and maps of single rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import Op, edit, walk
from ptxflow.compiler.launch import TensorMapParam
from ptxflow.eval.verify.cases.causal import case
from tests.families.gqa_prefill import B200, PREFILL, sized, strategy

MISSING = {
    "the wait for stores of weights": ("tcgen05.wait::st.sync.aligned;", "no wait::st"),
    "the wait for loads of scores": ("tcgen05.wait::ld.sync.aligned;", "no wait::ld"),
    "what orders it behind a wait": ("tcgen05.fence::after_thread_sync;", "fence::after"),
    "what releases it": ("tcgen05.fence::before_thread_sync;", "fence::before"),
    "zeros seen by products": ("fence.proxy.async", "fence.proxy.async"),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_told(name: str) -> None:
    p, s = sized([70], [70]), strategy(consumers=1, tile_kv=32)
    statement, message = MISSING[name]
    text = write(PREFILL.build(p, s, B200), B200)
    lines = [line for line in text.splitlines() if not line.strip().startswith(statement)]
    assert len(lines) < len(text.splitlines())
    assert message in complaints(p, s, "\n".join(lines), [70])


def test_weights_are_not_overwritten_while_they_are_multiplied() -> None:
    """Scores of the next step lie over them."""
    p, s = sized([200], [200]), strategy(consumers=1, tile_kv=32, overlap=0)
    kernel = PREFILL.build(p, s, B200)
    assert not complaints(p, s, write(kernel, B200), [200])
    waits = [
        path
        for path, node in walk(kernel)
        if node.op is Op.ATOM and node.arg.atom == "mbar_wait" and str(node.src[0]) == "summed"
    ]
    told = complaints(p, s, write(edit(kernel, waits[0], ()), B200), [200])
    assert "overwrites A of the mma" in told


def test_a_gather_takes_maps_of_single_rows() -> None:
    p, s = sized([70], [70], page=1), strategy(consumers=1, tile_kv=32)
    text, given = write(PREFILL.build(p, s, B200), B200), case(p, [70], queries=[70])
    launch = PREFILL.launch(p, s, B200)
    wide = [
        replace(x, box=(64, 4)) if isinstance(x, TensorMapParam) and x.tensor == "v_cache" else x
        for x in launch.params
    ]
    launch = replace(launch, params=tuple(wide))
    with pytest.raises(Fault, match="a tensor map with a box of 4 rows"):
        emulate(text, launch, given.tensors, dict(p.axes), arguments=given.arguments)


def complaints(p: Problem, s: Strategy, text: str, lengths: list[int]) -> str:
    """The fault, or the hazards."""
    given = case(p, lengths, queries=lengths)
    launch, axes = PREFILL.launch(p, s, B200), dict(p.axes)
    try:
        report = emulate(text, launch, given.tensors, axes, arguments=given.arguments)
    except Fault as fault:
        return str(fault)
    return "; ".join(map(str, report.hazards))
