"""What a run under the emulator reports of a kernel, and the command that asks for many."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.backend import cache
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import Launch
from ptxflow.eval.verify import emulation, trials
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import stored
from ptxflow.eval.verify.draws import draw_families
from ptxflow.eval.verify.emulation import cached_emulation, run_emulation
from ptxflow.eval.verify.results import read
from ptxflow.eval.verify.strategies import main, table
from ptxflow.eval.verify.trials import Attempt, Outcome, attempt
from ptxflow.eval.verify.value_mutants import candidates
from tests.families import gdn_prefill, moe
from tests.families.gemm import CASES, problem_for


@pytest.mark.parametrize(("family_name", "partly"), [("gemm", True), ("dsa_indexer", False)])
def test_a_brief_run_starts_few_clusters_where_what_they_lack_shows(
    family_name: str, partly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where few are wrong, all decide; integers do not show what they were made of."""
    runs = list[tuple[bool, int]]()

    def told(ptx: str, launch: Launch, given: Attempt) -> Outcome:
        runs.append((any(given.some), given.seed))
        return Outcome(error="1 of 2 elements of C differ" if any(given.some) else "")

    monkeypatch.setattr(trials, "attempt", told)
    (job,) = draw_families([family_name], DEVICES["h200"], 1, 0)
    found = trials.cover(*job, DEVICES["h200"], ())
    assert not found.error and found.schedules == {0, 1}
    assert any(some for some, _ in runs) == partly
    assert all(again == (False, seed) for (some, seed), again in pairwise(runs) if some)


def test_several_chunks_of_two_kernels_are_checked_whole() -> None:
    """Of a delta net's first kernel all that the second reads is there."""
    p, s = gdn_prefill.problem(queries=2, values=4), gdn_prefill.strategy(kernels="two")
    maker, dev = family(s.family), DEVICES["h200"]
    size = max(maker.trials(p, s, dev).sizes, key=lambda size: size.axes["total_seq_len"])
    (given,) = trials.attempts_of(p, [size])
    text = write(maker.build(given.problem, s, dev), dev)
    found = attempt(text, maker.launch(given.problem, s, dev), given)
    assert all(written.all() for written in found.written.values())


def emulated(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, *more: tuple[int, ...]
) -> emulation.Emulation:
    """A kernel in whose text a pattern was replaced."""
    dev, _, s = CASES[0]
    write = emulation.write

    def planted(kernel, device):  # type: ignore[no-untyped-def]
        text, count = re.subn(old, new, write(kernel, device))
        assert count
        return text

    monkeypatch.setattr(emulation, "write", planted)
    return run_emulation(problem_for(s), s, dev, *more)


def test_a_wrong_kernel_is_told_from_a_right_one(monkeypatch: pytest.MonkeyPatch):
    """One bit of a descriptor: the values differ, and the report says how many."""
    result = emulated(monkeypatch, "0x4000004000000000", "0x4000002000000000")
    assert not result.right and result.error


def test_a_right_kernel_is_emulated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dev, _, s = CASES[0]
    problem, emulate, calls = problem_for(s), trials.emulate, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["seed"])
        return emulate(*args, **options)

    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(trials, "emulate", counted)
    first, again = cached_emulation(problem, s, dev), cached_emulation(problem, s, dev)
    assert first == again and first.right and calls[:2] == [0, 1]
    assert len(calls) == first.problems > 1 and first.schedules == 2
    monkeypatch.setattr(trials, "differences", lambda *_: "1 of 2 elements of C differ")
    before, other = len(calls), replace(problem, dtype="bfloat16")
    assert not cached_emulation(other, s, dev).right
    assert not cached_emulation(other, s, dev).right
    assert calls[before:] == [0, 0], "what is wrong is not kept"


def test_a_hazard_alone_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    """The values are right, an ordering lacks: what is printed quotes the statement."""
    result = emulated(monkeypatch, r"\n[^\n]*fence\.mbarrier_init[^\n]*", "", (0,))
    assert result.exact and not result.right and not result.error
    assert re.search(r"line \d+ `cp\.async\.bulk\..*`: .*not fenced .*\(schedule 0\)", str(result))
    assert all(h in str(result) for h in result.hazards)


def test_a_hazard_quotes_both_statements():
    ptx = "first;\n  second a, b;\nthird;"
    assert trials.quoted("line 1: not ordered after line 2", ptx) == (
        "line 1 `first;`: not ordered after line 2 `second a, b;`"
    )
    assert trials.quoted("line 3: `third;` is late", ptx) == "line 3: `third;` is late"
    assert trials.quoted("line 9: gone", ptx) == "line 9: gone"


def test_bfloat16():
    dev, _, s = CASES[0]
    assert run_emulation(replace(problem_for(s), dtype="bfloat16"), s, dev, (0,)).right


def test_the_data_is_exact_in_float32():
    dev, _, s = CASES[0]
    case = case_of(family(s.family).trial(problem_for(s), s, dev).problem)
    ((expected, greatest),) = case.expected.values()
    assert (expected == greatest).all()
    assert np.isnan(case.tensors["C"].astype(np.float32)).all()
    assert not np.isnan(expected.astype(np.float32)).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_number_that_is_none_is_told_from_what_was_there(dtype: str) -> None:
    """Where some clusters run, and what nobody wrote is passed over."""
    case = case_of(replace(problem_for(CASES[0][2]).at(M=8, N=8, K=8), dtype=dtype))
    left = case.tensors["C"].copy()
    left[0, 0] = stored(np.full(1, np.nan), dtype)[0]
    assert trials.differences(case, {"C": left}, {}).startswith("1 of ")


def test_a_factor_within_the_rounding_of_each_element_shows() -> None:
    """7% in the slopes of segments, 2% in that of all rows."""
    small = family("moe").trial(moe.problem(), moe.strategy(), DEVICES["h200"]).problem
    case = case_of(small.at(seq_len=100))
    low, high = case.expected["output"]
    sound = np.where(np.isfinite(low), (low + high) / 2, 0)
    for factor, wrong in ((1.0, ""), (1.02, "all rows of"), (1.07, "segments of output differ")):
        left = stored(np.clip(factor * sound, low, high), "bfloat16")
        assert wrong in trials.differences(case, {"output": left})
        assert bool(wrong) == bool(trials.differences(case, {"output": left}))


ASKED = ["--definition", "gemm_n128_k2048", "--axes", "M=17", "--jobs", "1", "--device", "h200"]


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "verify.json"
    assert main([*ASKED, "--samples", "2", "--mutants", "3", "--out", str(out)]) == 0
    summary = read(out)
    assert summary["all"]["strategies"] == len(summary["rows"]) == 2
    assert summary["all"]["mutants"]["tried"] == 6 and summary["failures"] == []
    printed = capsys.readouterr().out
    assert printed == table(summary) + "\n" and "2 of 2 verified for sm_90a" in printed


@pytest.mark.slow
def test_the_command_names_a_mutant_that_only_the_emulator_catches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With a validator that accepts every mutant, what the emulator finds decides."""
    monkeypatch.setattr("ptxflow.eval.verify.mutation.check", lambda tree, trips, device: ())
    assert main([*ASKED, "--samples", "1", "--mutants", "6", "--schedules", "1"]) == 1
    printed = capsys.readouterr().out
    named = r"\w{16} of gemm_n128_k2048 .*: mutant: .* at \S+:\d+: .*schedule 0"
    count = len(re.findall(named, printed))
    assert count and f"0 killed by the validator, {count} caught by the emulator" in printed


def test_the_command_names_the_stage_that_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def complain(assembly):  # type: ignore[no-untyped-def]
        return ["C7508: planted"]

    monkeypatch.setattr("ptxflow.compiler.backend.ptxas.check", complain)
    assert main([*ASKED, "--samples", "1"]) == 1
    printed = capsys.readouterr().out
    assert "ptxas: C7508: planted" in printed and "0 of 1 verified" in printed


def test_bad_arguments(capsys: pytest.CaptureFixture[str]):
    assert main(["--definition", "gemm_n12", "--jobs", "1"]) == 2
    assert "near names" in capsys.readouterr().err


def test_updates_of_a_chunk_show_what_each_takes_of_others() -> None:
    """Keys are alike and memories long: another factor of an elimination shows in outputs."""
    dev = DEVICES["h200"]
    drawn = draw_families(["gdn_prefill"], dev, 12, 0)
    problem, strategy = next((p, s) for p, s in drawn if s.kernels == "one")
    maker = family("gdn_prefill")
    small = maker.trial(problem, strategy, dev).problem
    shape = maker.trials(problem, strategy, dev).shapes[0]
    tokens = {"num_seqs": 1, "len_cu_seqlens": 2, "total_seq_len": strategy.chunk}
    whole = replace(small, axes=tuple((dict(small.axes) | dict(shape) | tokens).items()))
    kernel = maker.build(whole, strategy, dev)
    launch = maker.launch(whole, strategy, dev)
    given = Attempt(whole, some=(1,))
    wanted = attempt(write(kernel, dev), launch, given)
    assert not wanted.error
    found = [
        c
        for c in candidates(kernel)
        if c.change.endswith("register of b") and "fma_f32(" in str(c.of(kernel))
    ]
    for i in (len(found) // 3, len(found) // 2):
        mutant = found[i].of(kernel)
        outcome = attempt(write(mutant.tree, dev), launch, given, wanted.written)
        assert "differ" in outcome.error, str(mutant)
