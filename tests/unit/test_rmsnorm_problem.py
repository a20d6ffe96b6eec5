"""The work of an RMSNorm problem, its epsilon, and strategies as they were recorded before."""

from __future__ import annotations

import pytest

from ptxflow.env.cost import model_tflops
from ptxflow.env.tasks.definition import load, names
from tests.families.rmsnorm import B200, H200, RMSNORM, problem, strategy
from tests.families.row import space

DEFINITIONS = [name for name in names() if load(name).op_type == "rmsnorm"]


def test_work_is_counted() -> None:
    p = problem(4096, 3)
    assert (p["batch_size"], p["hidden_size"], p.dtype) == (3, 4096, "bfloat16")
    assert p.flops == 4 * 3 * 4096 and p.bytes == 2 * (2 * 3 + 1) * 4096
    fused = problem(4096, 3, residual=True)
    assert fused.flops == 5 * 3 * 4096 and fused.bytes == 2 * (3 * 3 + 1) * 4096
    assert p.bound(H200) == fused.bound(B200) == "memory"


@pytest.mark.parametrize("name", DEFINITIONS)
def test_eps_is_the_one_of_the_definition(name: str) -> None:
    given = load(name)
    p = RMSNORM.problem(given.to_json(), given.bind({"batch_size": 7}))
    assert f"eps = {p.constant('eps')!r}".replace("e-0", "e-") in given.description.replace(
        "e-0", "e-"
    )
    assert p.constant("residual") == ("residual" in given.inputs)


def test_measurements_of_decisions_that_made_no_difference_are_kept() -> None:
    """As recorded when they were decisions; where a hint did make one, its choice stays."""
    gone: dict[str, int | str] = {"parts": 4, "store_cache": "no_allocate"}
    hints: dict[str, int | str] = {"load_cache": "evict_first", "load_prefetch": 256}
    kept, again = strategy(), strategy(residency="reread")
    assert RMSNORM.revise({**dict(kept.choices), **hints, **gone}) == dict(kept.choices)
    assert RMSNORM.revise({**dict(again.choices), **hints, **gone}) == {
        **dict(again.choices), **hints
    }  # fmt: skip


def test_reading_rows_again_is_slower() -> None:
    found = space(problem(7168, 16384))
    f = found.fields()
    tflops = model_tflops(RMSNORM, f, found.problem, H200)
    assert tflops.max() > tflops[f.residency == "reread"].max()
