"""`verify --renew`: the rows of some families in a result of all, made anew."""

import pytest

from ptxflow.env.tasks.arguments import UsageError
from ptxflow.eval.verify.results import Summary, median_and_max
from ptxflow.eval.verify.strategies import STAGES, joined


def row(passed: int, longest: float, registers: list[int] | None) -> Summary:
    return {
        "strategies": 2, "kernels": str(passed), "passed": dict.fromkeys(STAGES, passed),
        "registers": registers, "smem_bytes": [0, 8], "spill_bytes": [0, 0], "problems": [1, 2],
        "validator_s": {"median": 1.0, "max": longest},
        "emulator_s": {"median": 1.0, "max": longest}, "covered": {"items": 10, "open": passed},
        "mutants": dict.fromkeys(("tried", "killed", "caught", "right"), 0),
    }  # fmt: skip


def result(command: str, rows: dict[str, Summary], names: list[str], failed: list[str]) -> Summary:
    return {
        "command": f"ptxflow verify --samples 2 {command}", "rows": rows,
        "all": next(iter(rows.values())),
        "definitions": {n: {"strategies": 1, "verified": 1} for n in names},
        "failures": [f"key of {n} (axes): why" for n in failed], "caught": [],
    }  # fmt: skip


def test_rows_definitions_failures_and_sums_are_those_of_the_newer_run() -> None:
    old = {"rmsnorm": row(2, 3.0, [8, 9]), "gemm": row(1, 5.0, [16, 32])}
    failed = ["gemm_n128_k2048", "rmsnorm_h128"]
    whole = result("--jobs 8", old, ["gemm_n128_k2048", "rmsnorm_h128"], failed)
    part = result("--families gemm --renew a.json", {"gemm_n256_k7168": row(2, 1.0, None)},
                  ["gemm_n256_k7168"], [])  # fmt: skip
    made = joined(whole, part)
    assert made["rows"] == {"rmsnorm": old["rmsnorm"], "gemm": part["all"]}
    assert list(made["definitions"]) == ["gemm_n256_k7168", "rmsnorm_h128"]
    assert made["failures"] == [whole["failures"][1]]
    total = made["all"]
    assert (total["strategies"], total["passed"]["rules"]) == (4, 4)
    assert (total["registers"], total["covered"]) == ([8, 9], {"items": 20, "open": 4})
    assert median_and_max(total["emulator_s"]) == "- (3.00)"


@pytest.mark.parametrize("command", ["--samples 3 --families gemm", "--seed 1 --families gemm"])
def test_other_draws_do_not_join(command: str) -> None:
    whole = result("", {"gemm": row(2, 1.0, None)}, ["gemm_n128_k2048"], [])
    with pytest.raises(UsageError, match="is no part of"):
        joined(whole, result(command, {"gemm": row(2, 1.0, None)}, ["gemm_n128_k2048"], []))
