"""Problems are what a family can build, and their spaces what the hardware can run: all families
of the table."""

import numpy as np
import pytest

from ptxflow.compiler.check import check_spec
from ptxflow.compiler.family import Family, Strategy
from ptxflow.compiler.ir import kernels_of
from ptxflow.compiler.kernels import family_for
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from ptxflow.env.features import describe_problem
from ptxflow.env.tasks.definition import load, names
from tests.families import ROWS
from tests.given import BOTH
from tests.row import Bad, Case, Refused, Row, Size, cases, items, space


@pytest.mark.parametrize("name", names())
def test_recorded_definitions_have_a_family(name: str) -> None:
    """One alone, with a row in the table; its problems are of work and traffic."""
    given = load(name)
    maker = family_for(given.op_type, given.inputs)
    takers = [
        row.family
        for row in ROWS
        if given.op_type in row.family.op_types and row.family.accepts(given.inputs)
    ]
    assert takers == [maker] and all(part in name for part in maker.name.split("_"))
    p = maker.problem(given.to_json(), {axis: 3 for axis in given.var_axes} | _pairs(given.axes))
    assert p.family == maker.name and p.flops > 0 and p.bytes > 0


def _pairs(axes: object) -> dict[str, int]:
    """Lengths that are one more than the number of sequences."""
    return {n: 4 for n in ("len_indptr", "len_cu_seqlens") if n in axes}  # type: ignore[operator]


@pytest.mark.parametrize(("row", "bad"), items(ROWS, "bad"))
def test_what_cannot_be_built_is_named(row: Row, bad: Bad) -> None:
    with pytest.raises(ValueError, match=bad.message) as caught:
        row.family.problem(bad.definition, bad.axes)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(f"{bad.definition['name']}: ")


@pytest.mark.parametrize(("row", "size"), items(ROWS, "sizes"))
def test_spaces_hold_what_runs(row: Row, size: Size) -> None:
    """The model of their speed is finite, and not above the roofline."""
    p = size.problem
    for dev in size.devices:
        found = space(p, dev)
        f = found.fields()
        assert len(found) >= size.least
        assert np.all(size.holds(f, p, dev))
        taken = row.family.resources(f, p, dev)
        assert np.all(taken.smem_bytes <= dev.smem_per_block) and np.all(taken.occupancy >= 1)
        assert np.all(taken.registers <= dev.registers_per_thread + 1)  # given out by eights
        assert np.all(taken.threads <= 1024) and np.all(taken.tmem_columns <= 512)
        tflops, roofline = model_tflops(row.family, f, p, dev), p.roofline_tflops(dev)
        assert np.isfinite(tflops).all() and (tflops > 0).all()
        assert size.near * roofline <= tflops.max() <= roofline
        assert tflops.min() < size.spread * tflops.max()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.family.name)
def test_features_have_the_same_names_for_every_problem(row: Row) -> None:
    for dev in BOTH:
        told = [describe_problem(size.problem, dev) for size in row.sizes]
        assert all(features.keys() == told[0].keys() for features in told)
        values = np.array([list(features.values()) for features in told])
        assert np.isfinite(values).all() and np.abs(values).max() <= row.largest_feature


def _maker(row: Row, s: Strategy) -> Family:
    """The family, or where a strategy names what is not listed its wide one."""
    listed = {*s.to_json()["choices"]} <= {d.name for d in row.family.decisions}
    return row.family if listed else row.family.wide


@pytest.mark.parametrize(("row", "refused"), items(ROWS, "refused"))
def test_rules_refuse_by_their_sentence(row: Row, refused: Refused) -> None:
    maker = _maker(row, refused.strategy)
    told = maker.refusals(refused.problem, refused.strategy, refused.device)
    assert any(refused.sentence in line for line in told), told


@pytest.mark.parametrize(("row", "case"), cases(ROWS, "layout"))
def test_cases_are_legal_and_take_what_rules_count(row: Row, case: Case) -> None:
    """Shared memory to the byte, or so many more at most; threads and tensor memory. All rules of
    instructions hold."""
    p, s, dev = case.problem, case.strategy, case.device
    maker = _maker(row, s)
    assert row.forced or maker.refusals(p, s, dev) == []
    taken, launch = maker.resources(s.fields(), p, dev), maker.launch(p, s, dev)
    kernels = kernels_of(row.family.build(p, s, dev))
    plans = [kernel.arg for kernel in kernels]
    laid = max(layout(plan).smem_bytes for plan in plans)
    assert laid <= taken.smem_bytes <= laid + row.slack
    assert max(layout(plan).tmem_columns for plan in plans) == taken.tmem_columns
    for kernel, step in zip(kernels, launch.steps, strict=True):
        laid = layout(kernel.arg).smem_bytes
        assert 32 * kernel.arg.warps == step.block and check_spec(kernel, dev) > 10
        assert laid == step.smem_bytes or (row.slack and laid < step.smem_bytes)
    counted = max(plans, key=lambda info: layout(info).smem_bytes)  # of two kernels the larger
    assert counted.warps * 32 == taken.threads or row.family.name == "moe"  # of its products
