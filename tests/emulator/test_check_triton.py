"""check-ptx on what Triton compiles here, offline: values are right, and the findings are those of
the letter of the ISA that docs/check-ptx.md speaks of. Skipped where there is no Triton."""

# mypy: ignore-errors

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ptxflow.eval.verify.foreign import check
from tests.emulator.described import fixture_described
from tests.emulator.foreign.fixtures import HERE, made

pytestmark = pytest.mark.slow
pytest.importorskip("triton")
sys.path.insert(0, str(HERE))
import make_triton as triton  # noqa: E402


def elementwise(kernel: str, arch: int, dtype: str, inputs: dict, **constants) -> triton.Case:
    """One program for 256 elements, or for a row of 300."""
    rows = kernel in ("softmax", "layer_norm")
    shape = ["R", "N"] if rows else ["N"]
    recipe = {"vector_add": "sum"}.get(kernel, kernel)
    out = {"vector_add": "z"}.get(kernel, "y")
    tensors = {
        x: triton.tensor(s or shape, dtype, "normal", i) for i, (x, s) in enumerate(inputs.items())
    }
    return triton.Case(
        f"{kernel}_{dtype}_sm{arch}", arch, kernel,
        {f"{x}_ptr": f"*{dtype}" for x in (*inputs, out)} | {"N": "N"}, constants,
        "R" if rows else "-(-N // 256)", {"R": 3, "N": 300},
        tensors | {out: triton.tensor(shape, dtype, "nan")},
        {out: {"recipe": recipe, "of": list(inputs), "atol": 2e-3, "rtol": 2e-2}},
        {"num_warps": 4},
    )  # fmt: skip


CASES = [
    case
    for arch in (90, 100)
    for dtype in ("fp32", "bf16")
    for case in (
        elementwise("vector_add", arch, dtype, {"x": None, "y": None}, BLOCK=256),
        elementwise("dropout", arch, dtype, {"x": None}, SEED=7, P=0.5, BLOCK=256),
        elementwise("softmax", arch, dtype, {"x": None}, BLOCK=512),
        elementwise("layer_norm", arch, dtype, {"x": None, "w": ["N"], "b": ["N"]}, BLOCK=128),
    )
]
LETTER = {"mbarrier-lifetime", "tcgen05-fence", "proxy-fence", "mbarrier-count", "same-value"}


@pytest.mark.parametrize("case", [*CASES, *triton.CASES], ids=lambda case: case.name)
def test_what_triton_compiles(case, tmp_path: Path) -> None:
    ptx, side = triton.compile_case(case)
    verdict = check(ptx, fixture_described(tmp_path, made(ptx, side)), 2)
    assert not verdict.stopped
    assert {f.rule.id for f in verdict.findings} <= (LETTER if case in triton.CASES else set())
