"""Mutants of values: what a change makes of a tree, and every verdict."""

import itertools
import json
import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.check import check
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import CompileError, SpecError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, Statement, Value, alu, const, param, var
from ptxflow.compiler.ir.statements import KernelInfo, kernel, kernels_of, loop, when
from ptxflow.compiler.ir.storage import frag, global_tensor, rectangle, slot
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify import value_mutants, value_mutation, value_problems
from ptxflow.eval.verify.emulation import emulate_kernel
from ptxflow.eval.verify.mutants import Mutant
from ptxflow.eval.verify.page import sections
from ptxflow.eval.verify.results import read
from ptxflow.eval.verify.threads import Threads, same_turn
from ptxflow.eval.verify.trials import Attempt, Outcome, attempt
from ptxflow.eval.verify.value_mutants import (
    KINDS,
    candidates,
    drawn,
    multiple_of,
    replaced,
    text_of,
)
from ptxflow.eval.verify.value_mutation import (
    PART,
    VERDICTS,
    Judged,
    holds,
    judge,
    judge_kernel,
    main,
    read_log,
    summarise,
    table,
    tasks,
)
from ptxflow.eval.verify.value_problems import Known
from tests.families import gdn_decode, gqa_decode
from tests.families.rmsnorm import H200, problem, strategy

JOB = (problem(256, 4), strategy(row_threads=32, rows=4))
LARGER = Known(Attempt(JOB[0], some=(1,)), 0, "")


def toy() -> Statement:
    """Two stores in a loop at places that share an expression."""
    row = (CTAID * 4 + WARP) % 8
    r, i = slot(frag("r", 1, "f32")), var("i")
    tile = rectangle(global_tensor("out"), 0, 0, 1, 1)
    stores = [
        at.st_global(param("out"), row * 32 + LANE + n, LANE * 8 < 20, tile, r, element=4)
        for n in (0, i)
    ]
    info = KernelInfo("toy", "sm_90a", 1, 1, (("out", "ptr"), ("n", "u32")), (r.src[0],))
    return kernel(info, at.mov(r, 0), loop(i, param("n"), *stores))


def test_what_a_change_makes_of_a_tree() -> None:
    tree = toy()
    found = list(candidates(tree))
    assert len({(c.old, c.new, c.path) for c in found}) == len(found)
    changes = {(c.kind, c.change, c.path is None) for c in found}
    assert changes >= {
        ("stride", "4 to 5 in mul in index", True),
        ("digit", "8 to 16 in rem in index", False),
        ("operator", "rem's left operand alone in index", True),
        ("operator", "add to sub in index", True),
        ("variable", "ctaid to warp in mul in index", True),
        ("variable", "n to 0 as stop", False),
        ("bound", "1 to 0 as step", False),
        ("bound", "20 to 10 in lt in inside", True),
        ("scale", "0 to 1 as value", False),
        ("immediate", "element 4 to 8", False),
    }
    # no multiple of 8 lies between 20 and 21, and no register beside the only one
    assert ("bound", "20 to 21 in lt in inside", True) not in changes
    assert not any(kind == "register" for kind, *_ in changes)


def test_what_else_must_hold_decides_where_a_condition_counts() -> None:
    tree = toy()
    inside, *others = ((LANE < 4) & (LANE < 8) & (CTAID < 3), LANE < 6, const(1))
    store = replaced(tree.src[1].src[4], LANE * 8 < 20, inside)
    made = kernel(tree.arg, tree.src[0], *(when(condition, store) for condition in others))
    found = {(c.change, c.path) for c in candidates(made) if c.path is not None}
    bounds = {c for c, path in found if path == (2, 0) and c.endswith("in lt in inside")}
    assert bounds >= {"4 to 2 in lt in inside", "3 to 2 in lt in inside"}
    assert [c for c in bounds if c.startswith("8 to")] == ["8 to 0 in lt in inside"]
    assert {change for change, path in found if path == (2,)} == {"1 to 0 as condition"}


def test_an_expression_changes_everywhere_or_at_one_statement() -> None:
    tree = toy()
    twice = [c for c in candidates(tree) if c.change == "4 to 5 in mul in index"]
    assert [c.path for c in twice].count(None) == 1
    texts = {c.path: write(c.of(tree).tree, H200) for c in twice}
    assert len(twice) == 3 == len(set(texts.values()))
    for path, text in texts.items():  # a row is computed once, or in two ways
        factors = set(re.findall(r"mul.lo.u32 %r\d+, %r\d+, ([45]);", text))
        assert factors == ({"5"} if path is None else {"4", "5"})
    assert replaced(CTAID * 4 + 3, CTAID, const(2)) is const(11)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(LANE * 8, 8), (LANE * 8 + 4, 4), (LANE * 24 - WARP * 16, 8), (LANE << 3, 8), (LANE & 12, 4),
     ((LANE * 16) % 8, 8), (LANE // 4, 1), (LANE, 1)],
)  # fmt: skip
def test_multiples_are_so_for_every_lane(value: Value, expected: int) -> None:
    assert multiple_of(value) == expected
    for lane, warp in itertools.product(range(32), range(4)):
        at_lane = replaced(replaced(value, LANE, const(lane)), WARP, const(warp))
        assert at_lane.arg[0] % expected == 0


def test_what_is_the_same_in_every_thread_is_no_mutant() -> None:
    """The toy has one warp and no cluster; what depends on the block is not known."""
    tree = kernel(toy().arg, loop(var("i"), (WARP * 8 + LANE // 32) % 4 + CTAID * 2))
    changes = {c.change for c in candidates(tree)}
    assert "2 to 3 in mul in stop" in changes and "rem to div in stop" not in changes
    assert not any(change.startswith(("8 to", "32 to 64", "warp to 0")) for change in changes)
    assert "32 to 16 in div in stop" in changes


def test_what_is_the_same_in_every_thread_that_executes_it_is_no_mutant() -> None:
    """Half a warp's number is 0 in warps 0 and 1, whatever it is multiplied with."""
    info = replace(toy().arg, warps=4)
    row = slot(toy().arg.storage[0])
    product = WARP // 2 * CTAID
    for condition, count in ((WARP >= 2, 1), ((WARP < 2) & (CTAID < 3), 0)):
        tree = kernel(info, when(condition, [at.mov(row, product)]))
        found = [c for c in candidates(tree) if c.change == "warp to 0 in div in value"]
        assert len(found) == 2 * count  # here, and everywhere
    elsewhere = kernel(info, when(WARP < 2, [at.mov(row, product)]), at.mov(row, product))
    found = [c for c in candidates(elsewhere) if c.change == "warp to 0 in div in value"]
    assert [c.path for c in found] == [None, (1,)]


@pytest.mark.parametrize(("counts", "once"), [((0, 1), True), ((0, 1, 2), False), ((), False)])
def test_a_loop_of_one_turn_at_the_most_leaves_its_variable_as_it_is(
    counts: tuple[int, ...], once: bool
) -> None:
    """The toy's variable, that of a loop over n, is the last summand of an index."""
    trips = [Trip(str(n), (("n", n),)) for n in counts]
    other = Trip("another kernel's", (("n", 7),), (), "other")
    found = [c for c in candidates(toy(), [*trips, other]) if c.path == (1, 1)]
    assert sum(c.change == "add to sub in index" for c in found) == 2 - once


def test_places_in_a_ring_are_the_same_modulo_its_stages() -> None:
    use, tile = var("use"), var("tile")
    place = (tile * 4 + use - 1) % 2
    assert same_turn(place, (tile * 6 + use + 1) % 2) and same_turn(place & 3, place & 3)
    assert not same_turn(place, (tile * 5 + use - 1) % 2) and not same_turn(place, const(1))
    assert not same_turn((use + 3) % 3, use % 3), "3 does not divide 2^32"


def test_what_is_put_in_changes_no_value() -> None:
    """Random expressions of a lane, a block and the variable of a loop of five turns."""
    rng, i = np.random.default_rng(0), var("i")
    names = ("add", "sub", "mul", "min", "div", "rem", "and", "xor", "shr", "lt")
    info = replace(toy().arg, warps=2)
    threads = Threads(info)
    threads.learn(kernel(info, loop(i, CTAID.min(5))))
    shorter = 0
    for _ in range(300):
        parts: list[Value] = [LANE, WARP, CTAID, i, *map(const, (1, 4, 5, 7, 31, 32))]
        for _ in range(4):
            left, right = (parts[n] for n in rng.integers(len(parts), size=2))
            name = names[rng.integers(len(names))]
            if name in ("div", "rem", "shr"):
                right = const(int(rng.integers(1, 9)))
            parts.append(alu(name, left, right))
        whole, less = parts[-1], threads.put_in(parts[-1])
        shorter += whole is not less
        for lane, warp, block, turn in rng.integers((32, 2, 9, 5), size=(12, 4)).tolist():
            found = [whole, less]
            for leaf, number in ((LANE, lane), (WARP, warp), (CTAID, block), (i, turn)):
                found = [replaced(node, leaf, const(number)) for node in found]
            assert found[0] is found[1], (whole, less)
    assert shorter > 30


def test_a_draw_depends_on_its_seed_and_is_spread_over_kinds() -> None:
    maker = family("rmsnorm")
    small = maker.trial(*JOB, H200)
    lowered = maker.build(small.problem, JOB[1], H200)
    first, again, other = (drawn(lowered, H200, 24, np.random.default_rng(s)) for s in (0, 0, 1))
    assert first == again != other and len(first) == 24
    texts = {write(m.tree, H200) for m in first}
    assert len(texts) == 24 and write(lowered, H200) not in texts
    counts = [sum(m.operator == kind for m in first) for kind in {m.operator for m in first}]
    assert len(counts) >= 9 and max(counts) <= 4
    assert {m.operator for m in first} <= set(KINDS)


def _refuse(tree: Statement) -> None:
    raise SpecError("no")


@dataclass
class Scripted:
    """A bench whose runs end as told: on its two problems, then on the larger one."""

    complaints: tuple[str, ...]
    text: str = write(toy(), H200)
    device: Device = H200
    larger: Known = LARGER
    name: str = "bench"
    asked: list[str] = field(default_factory=list)

    def ordered(self) -> list[Known]:
        return [self.larger] * 2

    def others(self) -> list[Known]:
        return [self.larger]

    def run(self, text: str, known: Known) -> Outcome:
        self.asked.append(text)
        if (told := self.complaints[len(self.asked) - 1]) == "broken":
            raise IndexError("7")
        return Outcome(error=told)


@pytest.mark.parametrize(
    ("verdict", "validate", "complaints", "assembled", "asked"),
    [
        ("validator", _refuse, (), "", 0),
        ("emulator", id, ("wrong",), "", 1),
        ("emulator", id, ("", "wrong"), "", 2),
        ("unchanged", id, ("",), "unchanged", 1),
        ("emulator", id, ("", "", "wrong"), "", 3),
        ("escaped", id, ("", "", "", "part", "wrong"), "", 5),
        ("equivalent", id, ("", "", "", "part", ""), "", 5),
        ("equivalent", id, ("", "", "", ""), "", 4),
        ("crashed", id, ("broken",), "", 1),
    ],
)
def test_verdicts(verdict, validate, complaints, assembled, asked, monkeypatch):  # type: ignore[no-untyped-def]
    """Machine code is asked for once; a problem after the one that kills is not."""
    monkeypatch.setattr(value_mutation, "_parses", lambda *given: True)
    monkeypatch.setattr(value_mutation, "_assembled", lambda *given: assembled)
    bench = Scripted(complaints)
    judged = judge(Mutant("stride", "4 to 5", toy(), toy(), ()), validate, bench)
    assert (judged.verdict, judged.kind, len(bench.asked)) == (verdict, "stride", asked)
    assert ("wrong at" in judged.why) == ("wrong" in complaints)


def test_what_no_assembler_knows_is_malformed_and_what_it_makes_the_same_is_unchanged() -> None:
    bench = value_problems.bench_of(JOB, H200, 0)
    assert value_mutation._parses(bench.text, bench)
    assert not value_mutation._parses(bench.text.replace("ld.global", "ld.globe"), bench)
    assembled = partial(value_mutation._assembled, bench=bench)
    assert assembled(bench.text.replace("%r5, %warp;", "%warp, %r5;")) == "unchanged"
    assert assembled(bench.text.replace("ld.global", "ld.globe")) == "malformed"
    assert assembled(bench.text.replace("rsqrt", "sqrt")) == ""


def test_a_run_that_takes_much_longer_than_the_kernel_does_not_end() -> None:
    bench = value_problems.bench_of(JOB, H200, 0)
    known = bench.known[0]
    assert not bench.run(bench.text, known).error
    found = bench.run(bench.text, replace(known, instructions=100 - value_problems.GRACE // 2))
    assert found.fault and "does not end" in found.error
    assert bench.kills[known.attempt] == 1


def test_what_some_clusters_of_the_first_and_the_larger_problem_do_not_write_shows() -> None:
    bench = value_problems.bench_of(JOB, H200, 0)
    text = re.sub(r"\bst\.global\S* .*;", "", bench.text)
    assert bench.larger is not None
    first, larger = (
        replace(k, attempt=replace(k.attempt, some=(1,))) for k in (bench.known[0], bench.larger)
    )
    other = replace(larger)
    bench = replace(bench, larger=larger)
    assert text != bench.text
    for known, told in ((first, True), (larger, True), (other, False)):
        assert not bench.run(bench.text, known).error
        assert ("differ" in bench.run(text, known).error) == told


def test_a_mutant_begins_where_the_launches_before_its_own_end() -> None:
    """What it shows is what the whole call shows, sooner; one of the first kernel runs all."""
    job = (gqa_decode.problem(), gqa_decode.strategy())
    shape, lowered = value_problems.small_kernel(job, H200)
    text = write(lowered, H200)
    made = value_problems.Bench(job, H200, shape, lowered, text, [])
    given = Attempt(shape, 0, family("gqa_decode").trial(*job, H200).blocks)
    second = text.index(".visible .entry", text.index(".visible .entry") + 1)
    whole = made.whole(given)
    for first, count in ((second, 1), (0, 0)):
        place = text.index("ex2.approx", first)
        mutant = text[:place] + text[place:].replace("ex2.approx.ftz", "lg2.approx.ftz", 1)
        assert mutant != text and made.left(mutant, given)[0] == count
        soon = attempt(mutant, made.launch(given), given, done=made.left(mutant, given))
        slow = attempt(mutant, made.launch(given), given)
        assert soon.error == slow.error != ""
        assert (soon.report.instructions < slow.report.instructions) == bool(count)
    again = attempt(text, made.launch(given), given, done=made.left(text, given))
    assert not whole.error and not again.error
    assert all((again.written[n] == whole.written[n]).all() for n in whole.written)


def test_kernels_that_passed_are_not_run_again() -> None:
    maker, job = family("gqa_decode"), (gqa_decode.problem(), gqa_decode.strategy())
    lowered, trips, proven = maker.build(*job, H200), maker.trips(*job, H200), set[object]()
    assert check(lowered, trips, H200, proven) == check(lowered, trips, H200)
    assert len(proven) == 2 and check(lowered, trips, H200, proven) == []
    combine = kernels_of(lowered)[1]
    some = itertools.islice(candidates(combine), 0, 90, 6)
    mutants = [c.of(combine).within(lowered) for c in some]
    told = list[list[str]]()
    for known in (proven, None):
        told.append([])
        for mutant in mutants:
            try:
                check(mutant, trips, H200, known)
            except CompileError as refusal:
                told[-1].append(str(refusal))
    assert told[0] == told[1] != []


def test_a_parameter_that_no_trip_knows_is_refused() -> None:
    maker, job = family("gdn_decode"), (gdn_decode.problem(), gdn_decode.strategy(path="bulk_load"))
    lowered, trips = maker.build(*job, H200), maker.trips(*job, H200)
    mutants = [
        c for c in candidates(lowered) if c.change == "state_present to scale in ne in condition"
    ]
    assert mutants
    with pytest.raises(SpecError, match="does not say what scale is"):
        check(mutants[0].of(lowered).within(lowered), trips, H200)


def test_the_larger_problem_has_the_same_text() -> None:
    maker = family("rmsnorm")
    small = maker.trial(*JOB, H200)
    lowered = maker.build(small.problem, JOB[1], H200)
    rng = np.random.default_rng(0)
    tried = value_problems.larger_problem(lowered, small, JOB[1], H200, rng)
    assert tried.problem["hidden_size"] == small.problem["hidden_size"]  # the text holds it
    own = small.problem["batch_size"]
    assert 2 * own <= tried.problem["batch_size"] <= 3 * own
    assert emulate_kernel(lowered, tried, JOB[1], H200, (0,)).right


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.jsonl"
    work = partial(judge_kernel, H200, 0, log, math.inf, (JOB, 0, 6))
    first = work()
    assert len(first) == 6 and {j.verdict for j in first} <= set(VERDICTS) - {"crashed"}
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:-1], lines[-1][:20]]))  # the last was cut off
    asked = list[Mutant]()
    true_judge = value_mutation.judge

    def counted(mutant, *others):  # type: ignore[no-untyped-def]
        asked.append(mutant)
        return true_judge(mutant, *others)

    monkeypatch.setattr(value_mutation, "judge", counted)
    assert [(j.id, j.verdict) for j in work()] == [(j.id, j.verdict) for j in first]
    assert len(asked) == 1 and len(read_log(log)) == 6
    over = judge_kernel(H200, 0, log, 0.0, (JOB, 0, 9))  # the time is over
    assert sorted(j.id for j in over) == sorted(j.id for j in first)


def test_a_verdict_rests_on_the_problems_that_it_was_reached_on() -> None:
    bench = value_problems.bench_of(JOB, H200, 0)
    judged = Judged("stride", "a", "emulator", by=bench.known[0].name)
    survived = replace(judged, verdict="equivalent", by=bench.name)
    refused = replace(judged, verdict="validator", by="")
    assert all(holds(j, bench) for j in (judged, survived, refused))
    harder = replace(bench, known=[replace(k, data="other") for k in bench.known])
    assert [holds(j, harder) for j in (judged, survived, refused)] == [False, False, True]
    more = replace(bench, known=[*bench.known, replace(bench.known[0], data="other")])
    assert [holds(j, more) for j in (judged, survived, refused)] == [True, False, True]


def test_without_some_candidates_the_others_are_drawn_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree, rng = toy(), np.random.default_rng
    texts = [text_of(m.tree, H200) for m in drawn(tree, H200, 12, rng(0))]
    all_of = list(candidates(tree))
    dropped = {text_of(c.of(tree).tree, H200) for c in all_of[::3]}
    monkeypatch.setattr(
        value_mutants, "candidates",
        lambda kernel, _: (c for c in all_of if text_of(c.of(kernel).tree, H200) not in dropped),
    )  # fmt: skip
    fewer = [text_of(m.tree, H200) for m in drawn(tree, H200, 12, rng(0))]
    rest = set(texts) - dropped
    assert len(rest) > 3 and rest <= set(fewer)


def test_every_mutant_is_of_one_task_and_families_take_turns() -> None:
    other = replace(JOB[0], family="other"), replace(JOB[1], family="other")
    made = tasks([JOB, JOB, other], 4 * PART)
    assert [task[0][1].family for task in made[:2]] == ["rmsnorm", "other"]
    assert sum(last - first for _, first, last in made) == 4 * PART
    assert len(set(made[1::2])) < len(made) == 4


def test_the_table_and_the_page_name_what_escaped() -> None:
    judged = [
        Judged("stride", "a", "validator", "refused", 0.1, 0.0, "gemm"),
        Judged("offset", "b", "escaped", "2 differ", 0.1, 1.0, "moe"),
        Judged("offset", "c", "equivalent", "", 0.1, 2.0, "gemm"),
        Judged(
            "scale",
            "scale 0 to 1 as value, here,: mov(c_sums) at a.py",
            "equivalent",
            "",
            0.1,
            2.0,
            "moe",
        ),
    ]
    summary = summarise(judged)
    assert summary["families"]["gemm"]["validator"] == 1 == summary["all"]["escaped"]
    assert "escaped:\n  moe: b: 2 differ\ncrashed: none\nequivalent:\n  gemm: c" in table(summary)
    made = {"kind": "mutate-values", "device": "h200", "versions": {}, "seconds": 1.0,
            "processes": 1, "command": "ptxflow mutate-values", **summary}  # fmt: skip
    page = sections([made])["mutate-values"]
    assert (
        "| gemm | 1 | 0 | 1 | 0 | 0 | 0 | 0 |" in page and "h200, escaped: moe: b: 2 differ" in page
    )


@pytest.mark.slow
def test_the_command_writes_its_result(tmp_path: Path) -> None:
    out = tmp_path / "values.json"
    asked = ["--families", "rmsnorm", "--draws", "2", "--kernels", "1", "--mutants", "12"]
    assert main([*asked, "--device", "h200", "--jobs", "1", "--out", str(out)]) in (0, 1)
    summary = read(out)
    assert sum(summary["all"].values()) == 12 and set(summary["digests"]) == {"rmsnorm"}
    assert json.loads(out.read_text())["kind"] == "mutate-values"
