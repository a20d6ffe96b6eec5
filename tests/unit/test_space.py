"""The space is what brute force says, and no walk through its tree can reach a dead end."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxflow.compiler.device import B200, DEVICES, H200, Device
from ptxflow.compiler.family import Decision, Family, Fields, Problem, Rule
from ptxflow.compiler.kernels.gemm.decisions import DECISIONS, RULES, resources
from ptxflow.env.space import Space, decision_digest, enumerate_space, require_same_decisions
from tests.builders import gemm_problem, toy_family


def make_family(decisions: tuple[Decision, ...], rules: tuple[Rule, ...]) -> Family:
    return toy_family("toy", decisions, rules, resources=resources)


GEMM = make_family(DECISIONS, RULES)
TOY = (
    Decision("a", (1, 2, 3), ""),
    Decision("b", ("x", "y"), ""),
    Decision("c", (4, 5), ""),
    Decision("d", (0, 1, 2, 3), ""),
)


def brute_force(space: Space) -> set[tuple[Any, ...]]:
    """Every combination of choices that breaks no rule, one at a time."""
    family, out = space.family, set()
    names = [d.name for d in family.decisions]
    for values in itertools.product(*(d.choices for d in family.decisions)):
        fields = Fields(dict(zip(names, values, strict=True)))
        verdicts = [r.legal(fields, space.problem, space.device) for r in family.rules]
        if all(bool(np.all(v)) for v in verdicts):
            out.add(values)
    return out


def table_rule(reads: tuple[str, ...], refused: list[tuple[Any, ...]]) -> Rule:
    """A rule that refuses the listed combinations of what it reads."""

    def legal(f: Fields, problem: Problem, device: Device) -> Any:
        bad: Any = False
        for row in refused:
            same: Any = True
            for name, value in zip(reads, row, strict=True):
                same = same & (getattr(f, name) == value)
            bad = bad | same
        return np.logical_not(bad)

    return Rule(f"refuses {refused}", reads, legal)


@st.composite
def toy_rules(draw: st.DrawFn) -> tuple[Rule, ...]:
    rules = []
    for _ in range(draw(st.integers(0, 4))):
        reads = tuple(draw(st.permutations([d.name for d in TOY]))[: draw(st.integers(1, 3))])
        choices = [next(d.choices for d in TOY if d.name == name) for name in reads]
        combos = list(itertools.product(*choices))
        rules.append(table_rule(reads, draw(st.lists(st.sampled_from(combos), max_size=8))))
    return tuple(rules)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(toy_rules())
def test_space_is_the_brute_force_filter_and_has_no_dead_ends(rules: tuple[Rule, ...]) -> None:
    family = make_family(TOY, rules)
    problem = gemm_problem(1, 8, 8)
    expected = brute_force(Space(family, problem, B200, np.zeros(0, np.int64)))
    if not expected:
        with pytest.raises(ValueError, match="no strategy is valid"):
            enumerate_space(family, problem, B200)
        return
    space = enumerate_space(family, problem, B200)
    got = [tuple(v for _, v in space.strategy(int(c)).choices) for c in space.codes]
    assert len(got) == len(set(got)) and set(got) == expected
    check_tree(space)


def check_tree(space: Space) -> None:
    """Masks, counts and the tree agree with the leaves; rows are never empty."""
    indices = space.indices()
    for depth, level in enumerate(space.levels[:-1]):
        _, distinct = np.unique(space.codes // space.strides[depth], return_index=True)
        prefixes = indices[distinct, :depth]
        assert len(level) == len(prefixes)
        counts = space.counts(prefixes)
        assert (level.mask == (counts > 0)).all() and level.mask.any(axis=1).all()
        assert (counts.sum(axis=1) == np.diff(level.first)).all()
        below = space.levels[depth + 1]
        rows, choices = np.nonzero(level.mask)
        child = level.child[rows, choices]
        assert (child == np.arange(len(below))).all()  # every node is reached, by one parent
        assert (below.parent == rows).all() and (below.choice == choices).all()
        assert (np.diff(below.first) == counts[rows, choices]).all() and (child >= 0).all()
    assert (space.levels[-1].prefix == space.codes).all()


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
@pytest.mark.parametrize("shape", [(1, 128, 2048), (4096, 4096, 4096)])
def test_gemm_tree_has_no_dead_ends(device: Device, shape: tuple[int, int, int]) -> None:
    check_tree(enumerate_space(GEMM, gemm_problem(*shape), device))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
def test_gemm_4096_has_at_least_2000_strategies(device: Device) -> None:
    assert len(enumerate_space(GEMM, gemm_problem(4096, 4096, 4096), device)) >= 2000


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.integers(1, 9000),
    st.integers(1, 4000).map(lambda n: 8 * n),
    st.integers(1, 2000).map(lambda k: 8 * k),
    st.sampled_from(list(DEVICES.values())),
    st.integers(0, 2**32 - 1),
)
def test_gemm_leaves_break_no_rule_and_their_neighbours_are_judged_alike(
    m: int, n: int, k: int, device: Device, seed: int
) -> None:
    """Against `Family.refusals`, which never sees the enumeration's order or tables."""
    problem = gemm_problem(m, n, k)
    space = enumerate_space(GEMM, problem, device)
    rng = np.random.default_rng(seed)
    members = set(space.codes.tolist())
    for code in space.sample_uniform(6, rng):
        strategy = space.strategy(int(code))
        assert GEMM.refusals(problem, strategy, device) == [] and space.code(strategy) == code
        row = space.indices(np.array([code]))[0]
        at = rng.integers(len(row))
        row[at] = rng.integers(space.sizes[at])
        other = strategy.replace(**{DECISIONS[at].name: DECISIONS[at].choices[row[at]]})
        legal = GEMM.refusals(problem, other, device) == []
        assert legal == (int(row @ space.strides[1:]) in members)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES.keys())
@pytest.mark.parametrize("n", [8, 16, 24, 40])
def test_few_columns_and_many_rows_have_strategies(device: Device, n: int) -> None:
    assert len(enumerate_space(GEMM, gemm_problem(4096, n, 512), device)) > 10


def test_code_names_the_refusing_rules() -> None:
    space = enumerate_space(GEMM, gemm_problem(4096, 4096, 4096), H200)
    pair = space.strategy(int(space.codes[0])).replace(cta_group=2)
    with pytest.raises(ValueError, match="a CTA pair needs tcgen05"):
        space.code(pair)
    with pytest.raises(ValueError, match="not the code of a valid strategy"):
        space.strategy(-1)


def test_a_rule_must_declare_what_it_reads() -> None:
    hidden = Rule("hides a read", ("a",), lambda f, p, d: f.d == 0)
    with pytest.raises(ValueError, match=r"hides a read.*does not declare"):
        enumerate_space(make_family(TOY, (hidden,)), gemm_problem(1, 8, 8), B200)


def test_fields_are_the_choice_values() -> None:
    space = enumerate_space(GEMM, gemm_problem(64, 4096, 4096), H200)
    codes = space.codes[::997]
    fields = space.fields(codes)
    for i, code in enumerate(codes):
        strategy = space.strategy(int(code))
        assert all(getattr(fields, d.name)[i] == getattr(strategy, d.name) for d in DECISIONS)


def test_uniform_samples_are_uniform() -> None:
    space = enumerate_space(make_family(TOY, ()), gemm_problem(1, 8, 8), B200)
    drawn = space.sample_uniform(48_000, np.random.default_rng(0))
    counts = np.array([(drawn == c).sum() for c in space.codes])
    chi2 = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert len(space) == 48 and chi2 < 85  # 47 degrees of freedom: above 85 once in 2000


def test_digest_follows_the_decision_space_and_not_the_problem() -> None:
    a = enumerate_space(GEMM, gemm_problem(1, 128, 2048), B200)
    b = enumerate_space(GEMM, gemm_problem(4096, 4096, 4096), H200)
    fewer = make_family(DECISIONS, RULES[:-1])
    assert a.digest == b.digest != decision_digest(fewer)
    with pytest.raises(ValueError, match="different decision spaces"):
        require_same_decisions([a, enumerate_space(fewer, gemm_problem(1, 128, 2048), B200)])
