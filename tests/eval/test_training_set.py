"""The workloads of a run: what presets name exists, held-out ones are apart, families are known."""

import itertools
import json
from pathlib import Path

import pytest

from ptxflow.command import BadInput
from ptxflow.env.tasks import training_set
from ptxflow.env.tasks.arguments import find_problem, parse_axes
from ptxflow.env.tasks.definition import DefinitionError, load, names, own_names
from ptxflow.env.tasks.definition_table import HEADS, definition_table
from ptxflow.env.tasks.sequences import axes_of
from ptxflow.env.tasks.training_set import KINDS, PRESETS, Preset, chosen, members, registered

FULL, DEMO = PRESETS["full"], PRESETS["demo"]
OWN = Path(__file__).resolve().parents[1] / "definitions"  # that do not come with ptxflow


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_rows_bind_the_variable_axes_of_their_definitions_and_nothing_else(preset: Preset) -> None:
    for row in preset.rows:
        for name in row.definitions:
            definition = load(name)
            for values in (row.trained, row.held_out, row.typical):
                sizes = {
                    axis: held if isinstance(held, int) else held[0]
                    for axis, held in values.items()
                }
                assert set(axes_of(definition, sizes)) == set(definition.var_axes), name
            definition.bind(axes_of(definition, row.typical))
        apart = [not set(row.trained[a]) & set(row.held_out[a]) for a in row.trained]
        assert all(apart), row.definitions
        assert {name for name, _ in row.unseen} <= set(row.definitions)


def test_no_definition_is_named_twice() -> None:
    named = [name for row in FULL.rows for name in row.definitions]
    assert len(named) == len(set(named))
    assert set(named) <= set(names())


def test_workloads_of_families_are_trained_held_out_or_of_shapes_that_no_definition_has() -> None:
    every = members(chosen("rmsnorm_h4096,gemm_n4096_k4096", FULL), FULL)
    assert [m.kind for m in every] == sorted((m.kind for m in every), key=KINDS.index)
    assert {m.family.name for m in every} == {"gemm", "rmsnorm"}
    problems = [(m.problem.definition, m.problem.axes, m.kind) for m in every]
    assert len(problems) == len(set(problems))
    shapes = {k: {m.problem.axes for m in every if m.kind == k} for k in KINDS}
    assert all(shapes[a].isdisjoint(shapes[b]) for a, b in itertools.combinations(KINDS, 2))
    (label,) = {m.label for m in every if m.kind == "unseen" and m.family.name == "rmsnorm"}
    assert label == "rmsnorm_h4096 hidden_size=5120"
    assert {dict(m.problem.axes)["hidden_size"] for m in every if m.label == label} == {5120}


def test_families_and_names_choose_definitions() -> None:
    assert chosen(None, FULL) == chosen("all", FULL)
    assert all(registered(load(name)) for name in chosen(None, FULL))
    assert chosen("gemm", DEMO) == FULL.rows[0].definitions
    both = chosen("rmsnorm, gemm_n128_k2048, rmsnorm_h128", FULL)
    assert both[-1] == "gemm_n128_k2048" and len(both) == len(set(both)) == 10
    for wrong in ("rmsnrom", "gemm_n4096_k409", " , "):
        with pytest.raises(DefinitionError):
            chosen(wrong, FULL)


def test_a_definition_that_no_row_names_takes_the_row_of_its_family(tmp_path: Path) -> None:
    own = load("rmsnorm_h4096").resized(hidden_size=3072).to_json() | {"name": "mine"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(own))
    row = training_set.row_of(load(path))
    assert row is not None and "rmsnorm_h4096" in row.definitions
    held = members(chosen(str(path), FULL), FULL)
    assert {m.kind for m in held} == {"trained", "held_out"}
    assert len(held) == sum(len(v["batch_size"]) for v in (row.trained, row.held_out))
    in_demo = members(chosen("gemm_n128_k2048,rmsnorm_h512", DEMO), DEMO)
    sizes = [m.axes for m in in_demo if m.family.name == "gemm" and m.kind == "trained"]
    assert sizes == [{"M": 64}, {"M": 1024}], "the demo's own values for the family that it has"


def test_a_definition_without_kernels_or_row_is_refused() -> None:
    with pytest.raises(BadInput, match="no kernel family"):
        members([str(Path(__file__).parents[1] / "unbuilt.json")], FULL)


def test_the_table_of_definitions_gives_axes_that_fit_each_other() -> None:
    head, *lines = definition_table().splitlines()
    starts = [head.index(column) for column in HEADS]
    assert [line[: starts[1]].rstrip() for line in lines] == [*names(), *own_names()]
    for line in lines:
        definition = load(line.split()[0])
        family = registered(definition)
        assert family is not None
        assert line[starts[1] :].split()[:2] == [definition.op_type, family.name]
        held = line[starts[3] :].split("  ")
        axes = parse_axes(text.split()[0] for text in held)
        assert tuple(axes) == definition.var_axes
        definition.bind({name: values[0] for name, values in axes.items()})
        trained = zip(held, axes.values(), strict=True) if definition.name in names() else ()
        for text, (value,) in trained:
            first, last = map(int, text.split()[1].strip("[]").split("-"))
            assert first <= value <= last, line
    assert "  M=1024 [1-8192]" in next(line for line in lines if "gemm_n4096_k4096" in line)


@pytest.mark.parametrize("path", sorted(OWN.glob("*.json")), ids=lambda path: path.stem)
def test_definitions_of_ones_own_have_axes_by_default(path: Path) -> None:
    """Also where the family is named behind another's in its row."""
    definition = load(path)
    axes = training_set.typical_axes(definition)
    assert axes is not None and axes.keys() == set(definition.var_axes)
    assert find_problem(definition, axes)[1].bytes > 0
