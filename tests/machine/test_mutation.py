"""Mutants: enumerated, all different, and a part of them judged (`eval.mutation` judges all)."""

import re
from itertools import islice
from pathlib import Path

import pytest

from ptxflow.compiler.ir import kernels_of
from ptxflow.eval.verify import mutation
from ptxflow.eval.verify.emulation import Emulation
from ptxflow.eval.verify.mutants import OPERATORS, mutants
from ptxflow.eval.verify.mutation import Judged, structures
from ptxflow.eval.verify.results import read
from tests.families import ROWS, Row, gemm

PART = 4  # mutants of each kernel that are judged here


def test_mutants_are_different_trees():
    seen = set()
    for dev, _, s in gemm.CASES[::4]:
        kernel, _ = gemm.build(dev, s)
        found = list(mutants(kernel))
        trees = {m.tree for m in found}
        assert len(trees) == len(found) > 100 and kernel not in trees
        seen |= {m.operator for m in found}
    assert seen >= set(OPERATORS) - {"rank"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.family.name)
def test_every_family_has_mutants(row: Row) -> None:
    """Whatever its operands are."""
    case = row.cases[0]
    for kernel in kernels_of(row.family.build(case.problem, case.strategy, case.device)):
        assert all(m.tree != kernel for m in mutants(kernel))


@pytest.mark.parametrize(
    "i",
    [pytest.param(i, id=n, marks=[pytest.mark.slow] * (i % 6 > 0)) for i, n in enumerate(gemm.IDS)],
)
def test_a_part_of_the_mutants(i):  # type: ignore[no-untyped-def]
    """Another part of each kernel, spread evenly over its mutants."""
    dev, _, s = gemm.CASES[i]
    kernel, trips = gemm.build(dev, s)
    found = list(mutants(kernel))
    stride = len(found) // PART
    judged = list(mutation.judge(kernel, trips, dev, found[i % stride :: stride]))
    assert len(judged) >= PART
    wrong = [j for j in judged if j.verdict in ("survived", "refused")]
    assert not wrong, wrong


def test_the_table_counts_what_is_harmful():
    right, wrong = Emulation({}, 3, True, 0.5), Emulation({}, 3, False, 0.5, "1 differs")
    racing = Emulation({}, 3, True, 0.5, hazards=("a race",))
    judged = [
        Judged("delete", "a", "HazardError", ""),
        Judged("swap", "b", "", "they commute", emulation=right),
        Judged("swap", "c", "", "", emulation=wrong),
        Judged("swap", "d", "HazardError", "they commute"),
        Judged("swap", "e", "", "", emulation=right),
        Judged("swap", "f", "", "", emulation=racing),
        Judged("swap", "g", "", "they commute", emulation=wrong),
    ]
    assert [j.verdict for j in judged] == [
        "killed", "equivalent", "caught", "refused", "survived", "caught", "equivalent",
    ]  # fmt: skip
    text = mutation.table(mutation.summarise(judged))
    assert "of 7 mutants 4 are not on the list of equivalent mutants" in text
    assert "the validator kills 25.00%" in text
    assert "right under 3 schedules: 2 of 5; 1 of the others show a fault or hazard" in text
    assert "equivalent:\n      2 they commute\nsurvivors:\n      1 e\n" in text
    assert "equivalent, but refused:\n      1 d\ncaught by their values:\n      1 c\n" in text
    assert "fault or hazard:\n      1 f: hazard: a race\nequivalent, and WRONG:\n" in text
    assert text.endswith("      1 g: 1 differs")


def test_one_kernel_for_each_structure():
    s = gemm.HOPPER["multicast B"]
    wider = type(s)(s.family, tuple({**dict(s.choices), "tile_n": 256, "mma_n": 256}.items()))
    assert structures([(gemm.problem(), wider), (gemm.problem(), s)], gemm.H200) == [
        (gemm.problem(), s)
    ]
    others = [(gemm.problem_for(s), s) for s in gemm.BLACKWELL.values()]
    assert len(structures(others, gemm.B200)) >= 8


def test_drawn_mutants_are_some_of_the_kernels_own():
    """The draw depends on its seed alone, and repeats none."""
    kernel, _ = gemm.build(*gemm.CASES[0][::2])
    found = list(mutants(kernel))
    drawn = [mutation.pick(found, 5, (seed,)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(set(ms)) == 5 and set(ms) <= set(found) for ms in drawn)
    assert mutation.pick(found, 10**6, (0,)) == found


def test_a_wrong_mutant_that_is_accepted_is_named(monkeypatch: pytest.MonkeyPatch):
    """A validator that accepts everything: the emulator says which mutants it let through."""
    monkeypatch.setattr("ptxflow.eval.verify.mutation.check", lambda tree, trips, device: ())
    some = lambda kernel: [m for m in mutants(kernel) if m.operator == "bytes"][:2]  # noqa: E731
    monkeypatch.setattr("ptxflow.eval.verify.mutation.mutants", some)
    dev, _, s = gemm.CASES[0]
    judged = mutation.judge_strategy(dev, (0,), (gemm.problem_for(s), s))
    assert [j.wrong for j in judged] == [True, True]
    assert all(re.search(r"bytes .* at compiler/\S+:\d+: .*\(schedule 0\)", str(j)) for j in judged)
    assert mutation.summarise(judged)["all"]["caught"] == 2


@pytest.mark.slow
def test_the_command_writes_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The whole command, on a few mutants of one kernel."""
    few = lambda kernel: islice(mutants(kernel), 0, None, 20)  # noqa: E731
    monkeypatch.setattr("ptxflow.eval.verify.mutation.mutants", few)
    out = tmp_path / "mutation.json"
    asked = ["--definition", "gemm_n128_k2048", "--axes", "M=4096", "--draws", "1", "--jobs", "1"]
    assert mutation.main([*asked, "--device", "h200", "--out", str(out)]) == 0
    summary = read(out)
    assert summary["kernels"] == 1 and summary["all"]["killed"] > 5
    assert summary["command"] == " ".join(["ptxflow mutation", *asked, "--device h200"])
    assert mutation.table(summary) in capsys.readouterr().out


def test_bad_arguments(capsys: pytest.CaptureFixture[str]):
    assert mutation.main(["--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
    assert mutation.main(["--out", "no/such/folder/x.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
