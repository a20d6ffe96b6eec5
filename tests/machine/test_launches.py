"""Every fault of a launch is refused by check_launch, or by a run under the emulator."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.check import check_launch
from ptxflow.compiler.check.reach import reads_special
from ptxflow.compiler.emulator import Fault, emulate
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.family import Problem, Trial
from ptxflow.compiler.ir import Statement, kernels_of
from ptxflow.compiler.launch import Launch, ScalarParam
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.trials import Attempt, attempt, attempts_of, shape_of, skeleton
from tests.emulation import outside
from tests.families import ROWS, gemm, gqa_decode, mla
from tests.given import BOTH
from tests.machine.launches import faults
from tests.row import Case, Row

#: what only values or bounds of tensors tell
OF_VALUES = re.compile(
    r"grid|map of .*: (?:dimension \d|box \d, \d exchanged|swizzle 0|another dtype)|"
    r"workspace (?:inner_scale|tokens|partial|work|tiles):|workspace .*: thrice"
)
#: what neither finds, and why
FREE = {
    r"moe_place: grid half": "half of one CTA, rounded up, is one",
    r"workspace tiles: ": "a word of the 16 bytes is used",
    r"workspace \w+: thrice": "what is too large is waste, and no more",
    r"mla_prefill\w*: grid twice": "the CTAs beyond find no query, and leave",
    r"workspace (?:tokens|inner_scale|partial|work): ": "which rows there are is data; a trial has "
    "few of those that the sizes are for",
}


def firsts() -> list[Any]:
    """The first case of each family and target that the emulator runs by default."""
    out = []
    for row in ROWS:
        for dev in BOTH:
            mine = [c for c in row.cases if c.device is dev]
            quick = row.quick.get("emulator", [c.label for c in mine])
            case = next((c for c in mine if c.label in quick), mine[0])
            out.append(pytest.param(row, case, id=f"{row.family.name}: {case.label}"))
    return out


def build(row: Row, case: Case, problem: Problem) -> tuple[Statement, Launch]:
    """A case's kernel at another problem."""
    maker, s, dev = row.family, case.strategy, case.device
    return maker.build(problem, s, dev), maker.launch(problem, s, dev)


def built(row: Row, case: Case) -> tuple[Trial, Statement, Launch]:
    """A case on its first emulation problem."""
    small = row.family.trial(case.problem, case.strategy, case.device)
    return small, *build(row, case, small.problem)


def others(row: Row, case: Case, small: Trial) -> Iterator[Attempt]:
    """Its other emulation problems."""
    p, s, dev = case.problem, case.strategy, case.device
    offered, whole = row.family.trials(p, s, dev), skeleton(write(build(row, case, p)[0], dev))
    return attempts_of(shape_of(small.problem, offered.shapes, s, dev, whole)[0], offered.sizes)


def accepted(lowered: Statement, launch: Launch) -> list[tuple[str, Launch]]:
    """The faults that check_launch does not refuse; its refusals say what would fix it."""
    out = []
    for what, bad in faults(launch):
        try:
            check_launch(lowered, bad)
        except SpecError as refusal:
            assert "; fix: " in str(refusal) and "\n" not in str(refusal), refusal
        else:
            out.append((what, bad))
    return out


@pytest.mark.parametrize(("row", "case"), firsts())
def test_the_check_refuses_all_that_no_data_decides(row: Row, case: Case) -> None:
    _, lowered, launch = built(row, case)
    check_launch(lowered, launch)
    assert len(list(faults(launch))) > 8
    missed = [what for what, _ in accepted(lowered, launch)]
    assert not [what for what in missed if not OF_VALUES.search(what)]


def runs(lowered: Statement, small: Trial, launch: Launch, text: str) -> bool:
    """Whether a run is right."""
    case = case_of(small.problem)
    tensors, axes = {n: t.copy() for n, t in case.tensors.items()}, dict(small.problem.axes)
    try:
        report = emulate(text, launch, tensors, axes, grid=small.blocks, arguments=case.arguments)
    except (Fault, ValueError):
        return False
    return not report.hazards and not outside(case, tensors)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "case"), firsts())
def test_the_emulator_refuses_the_rest(row: Row, case: Case) -> None:
    small, lowered, launch = built(row, case)
    text = write(lowered, case.device)
    assert runs(lowered, small, launch, text)
    # who asks how many CTAs there are works through any grid
    any_grid = {k.arg.name for k in kernels_of(lowered) if reads_special(k, "ctas")}
    free = re.compile("|".join([*FREE, *(f"{name}: grid (?:half|twice)$" for name in any_grid)]))
    left = {
        what
        for what, bad in accepted(lowered, launch)
        if not free.match(what) and runs(lowered, small, bad, text)
    }
    for given in others(row, case, small) if left else ():
        lowered, launch = build(row, case, given.problem)
        text = write(lowered, case.device)
        left -= {what for what, bad in accepted(lowered, launch) if what in left
                 and attempt(text, bad, given).error}  # fmt: skip
    assert not left


def _first(launch: Launch, **changes: object) -> Launch:
    given = replace(launch.params[0], **changes)  # type: ignore[arg-type]
    return replace(launch, params=(given, *launch.params[1:]))


_GEMM: dict[str, tuple[Callable[[Launch], Launch], str]] = {
    "box": (lambda k: _first(k, box=(64, 64)), r", map A_map over A: a box of \(64, 64\), and "
            r"tma_load.* at compiler/kernels/gemm/\S+ fills 128 rows of 64 elements; fix: "),
    "swizzle": (lambda k: _first(k, swizzle=0), r"swizzle of 0 bytes, and wgmma.* reads a by a "
                r"descriptor of 128; fix: "),
    "dims": (lambda k: _first(k, dims=("M", "4096")), r"dimensions \[840, 4096\] at strides of "
             r"\[2, 8192\] bytes, of which 8192 is not 840 times 2, at M = 840; fix: "),
    "tensor": (lambda k: _first(k, tensor="B"), r"parameter A_map is given the tensor_map B; fix"),
    "dtype": (lambda k: _first(k, dtype="float32"), r"elements of float32, and those of tma_load"),
    "cluster": (lambda k: replace(k, cluster=(2, 1, 1)), r"clusters of \(2, 1, 1\), and the kern"),
}  # fmt: skip


@pytest.mark.parametrize("what", _GEMM)
def test_a_refusal_says_both_facts(what: str) -> None:
    dev, _, s = gemm.CASES[0]
    lowered, _ = gemm.build(dev, s)
    launch = gemm.GEMM.launch(gemm.problem_for(s), s, dev)
    change, said = _GEMM[what]
    with pytest.raises(SpecError, match=f"launch of gemm.*{said}"):
        check_launch(lowered, change(launch))


def test_what_no_grid_counts_by_is_the_same_for_both_kernels() -> None:
    """Else one hands on parts of other lengths than the other adds up."""
    case = next(c for c in mla.PREFILL_ROW.cases if c.name.startswith("two parts"))
    _, lowered, launch = built(mla.PREFILL_ROW, case)
    check_launch(lowered, launch)
    (second,) = launch.then
    other = tuple(replace(p, value="3") if p == ScalarParam("shares", p.value) else p
                  for p in second.params if isinstance(p, ScalarParam))  # fmt: skip
    pointers = tuple(p for p in second.params if not isinstance(p, ScalarParam))
    with pytest.raises(SpecError, match="parameter shares is given"):
        check_launch(lowered, replace(launch, then=(replace(second, params=pointers + other),)))


@pytest.mark.parametrize("page", [None, 1 << 18])
def test_a_workspace_of_a_quarter(page: int | None) -> None:
    """The trial of this kernel has one chunk a sequence, which needs no workspace; where pages are
    large the sizes that are tried are small."""
    case = next(c for c in gqa_decode.ROW.cases if c.name.startswith("one tile"))
    _, lowered, launch = built(gqa_decode.ROW, case)
    if page:
        problem, maker = case.problem.at(page_size=page), gqa_decode.ROW.family
        lowered = maker.build(problem, case.strategy, case.device)
        launch = maker.launch(problem, case.strategy, case.device)
    check_launch(lowered, launch)
    sums, stats = launch.workspace
    for w in (sums, stats):
        less = replace(w, bytes=f"({w.bytes}) // 4")
        bad = replace(launch, workspace=tuple(less if x is w else x for x in (sums, stats)))
        with pytest.raises(SpecError, match=f"workspace {w.name}: .* reaches byte .*; fix: room"):
            check_launch(lowered, bad)
