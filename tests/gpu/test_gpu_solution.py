"""Solutions on the GPU: of a norm, a product and an attention, each at three sizes."""

from __future__ import annotations

from typing import Any

import pytest

from ptxflow.compiler.device import H200
from ptxflow.compiler.library.member import single
from ptxflow.eval.bench.call_cost import ROWS, kernel_for
from ptxflow.eval.bench.worker import Worker
from ptxflow.eval.sample.solution import solution

pytestmark = pytest.mark.gpu
SIZES = (
    [{"batch_size": m} for m in (1, 16, 777)],
    [{"M": m} for m in (1, 17, 1000)],
    [
        {"batch_size": n, "num_pages": 4 * n, "len_indptr": n + 1, "num_kv_indices": 4 * n}
        for n in (1, 4, 33)
    ],
)


@pytest.mark.parametrize(("row", "sizes"), zip(ROWS, SIZES, strict=True))
def test_a_solution_is_right_by_itself(worker: Worker, row: Any, sizes: Any) -> None:
    """Compared with the reference, on fresh inputs, where torch may compute nothing."""
    definition, kernel = kernel_for(row, H200)
    data = solution(*single(definition.to_json(), kernel), "test")
    for axes in sizes:
        outcome = worker.run(
            {
                "definition": definition.to_json(), "axes": axes, "solution": data,
                "seeds": [1, 2], "rounds": 5, "settle": 0.1,
            },
            timeout=120,
        )  # fmt: skip
        assert outcome["status"] == "ok", (axes, outcome)
