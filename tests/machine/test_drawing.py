"""Strategies are drawn of every family that is registered, each apart from the others."""

from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.arguments import UsageError
from ptxflow.env.tasks.definition import load
from ptxflow.eval.verify import mutation, strategies
from ptxflow.eval.verify.draws import draw_families, draw_shapes, places, random_problem
from ptxflow.eval.verify.mutation import Judged, by_family, chosen_structures, structures
from ptxflow.eval.verify.page import mutated
from ptxflow.eval.verify.results import read
from tests.families.gemm import B200, H200


def test_every_family_has_workloads_to_draw_from() -> None:
    held = places()
    assert {"gemm", "gqa_prefill", "mla_decode", "rmsnorm", "sampling"} <= set(held)
    for name, rows in held.items():
        definition, axes = rows[0]
        assert family(name).op_types and set(axes) == set(definition.var_axes)


def test_what_is_drawn_of_a_family_depends_on_the_seed_alone() -> None:
    alone = draw_families(["sampling"], H200, 3, 0)
    both = draw_families(["gdn_decode", "sampling"], H200, 3, 0)
    assert alone == both[3:] and len({problem.definition for problem, _ in alone}) == 3
    assert {strategy.family for _, strategy in both[:3]} == {"gdn_decode"}
    assert alone != draw_families(["sampling"], H200, 3, 1)
    with pytest.raises(UsageError, match=r"no family abacus; there are .*gdn_decode, "):
        draw_families(["abacus"], H200, 1, 0)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("gemm_n128_k2048", set()),
        ("moe_fp8_block_scale_ds_routing_topk8_ng8_kg4_e32_h7168_i2048", {"num_experts"}),
        ("mla_paged_decode_h16_ckv512_kpe64_ps64", set()),
    ],
)
def test_random_shapes_vary_every_axis_that_a_family_takes(name: str, fixed: set[str]) -> None:
    rng = np.random.default_rng(0)
    drawn = [random_problem(load(name), rng)[1] for _ in range(10)]
    values = {axis: {problem[axis] for problem in drawn} for axis, _ in drawn[0].axes}
    assert {axis for axis, found in values.items() if len(found) == 1} == fixed
    assert name.startswith("moe") or {p.dtype for p in drawn} == {"float16", "bfloat16"}


def test_random_shapes_depend_on_seed_and_target_alone() -> None:
    alone, empty = draw_shapes(["sampling"], H200, 3, 0)
    both, _ = draw_shapes(["gdn_decode", "sampling"], H200, 3, 0)
    assert alone == both[3:] and len(alone) == 3 and not empty
    assert len({problem for problem, _ in alone}) == 3
    assert (
        alone
        != draw_shapes(["sampling"], H200, 3, 1)[0]
        != draw_shapes(["sampling"], B200, 3, 1)[0]
    )
    with pytest.raises(UsageError, match="no family abacus"):
        draw_shapes(["abacus"], H200, 1, 0)


def test_kernels_of_several_sizes_of_each_family() -> None:
    jobs = draw_families(["sampling", "gdn_decode"], H200, 6, 0)
    samplers = structures(jobs[:6], H200)
    assert chosen_structures(jobs[:6], H200, 100) == samplers and len(samplers) > 2
    assert chosen_structures(jobs, H200, 1) == [
        samplers[len(samplers) // 2],
        *chosen_structures(jobs[6:], H200, 1),
    ]


def test_rows_of_families() -> None:
    jobs = draw_families(["sampling", "gdn_decode"], H200, 1, 0)
    found = [[Judged("delete", "a", "HazardError", "")] * 2, [Judged("swap", "b", "", "c")]]
    rows = by_family(jobs, found)
    assert rows["sampling"]["all"]["killed"] == 2 and rows["gdn_decode"]["all"]["equivalent"] == 1
    summary = {
        "device": "h200", "families": rows, "kernels": 2, "command": "c", "versions": {},
        "seconds": 1, "processes": 1, **mutation.summarise([j for held in found for j in held]),
    }  # fmt: skip
    text = mutated([summary])
    assert "| h200 | sampling | 1 | 2 | 2 | 0 | 0 | 0 |" in text
    assert "| h200 | all | 2 | 3 | 2 | 0 | 0 | 1 |" in text


@pytest.mark.slow
def test_the_commands_take_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.json"
    asked = ["--families", "sampling", "gdn_decode", "--device", "h200", "--jobs", "1"]
    few = ["--samples", "1", "--schedules", "1", "--mutants", "1"]
    assert strategies.main([*asked, *few, "--out", str(out)]) == 0
    assert list(read(out)["rows"]) == ["sampling", "gdn_decode"]
    few = ["--draws", "1", "--kernels", "1", "--mutants", "3", "--emulate", "1"]
    mutation.main([*asked, *few, "--out", str(out)])
    summary = read(out)
    assert {n: sum(r["all"].values()) for n, r in summary["families"].items()} == {
        "sampling": 3, "gdn_decode": 3,
    }  # fmt: skip
    assert not summary["wrong"]
    capsys.readouterr()
    for wrong in (["--axes", "M=1"], ["--families", "gemm", "--definition", "gemm_n128_k2048"]):
        assert strategies.main(wrong) == mutation.main(wrong) == 2
    assert "name one" in capsys.readouterr().err
