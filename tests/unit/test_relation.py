"""A space by relation is the listed one, mask by mask and count by count, and there at any size."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.family import Choice, Decision, Family, Problem, Rule, rule
from ptxflow.compiler.kernels.gemm.decisions import accumulators, smem_bytes
from ptxflow.env import relation
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.space import EmptySpace, Space, enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load, names
from ptxflow.env.tasks.workload import workloads
from tests.builders import gemm_problem
from tests.unit.test_space import GEMM, TOY, make_family, toy_rules


def check(space: Space, related: RelationSpace, rng: np.random.Generator) -> None:
    """All strategies in order, all counts after all prefixes, and three conditional spaces."""
    every = related.at(np.arange(len(related)))
    assert len(related) == len(space) and (every == space.codes).all()
    for a, b in zip(related.layers, RelationSpace.of(space).layers, strict=True):
        assert np.array_equal(a.child, b.child) and np.array_equal(a.counts, b.counts)
    for depth, level in enumerate(space.levels[:-1]):
        prefixes = space.indices(level.prefix * space.strides[depth])[:, :depth]
        assert (related.counts(prefixes) == space.counts(prefixes)).all()
        wild = rng.integers(space.sizes[:depth], size=(100, depth))
        assert (related.mask(wild) == space.mask(wild)).all()
    for _ in range(3):
        fixed, left = some_choices(space, rng)
        held = related.given(fixed)
        every = held.at(np.arange(len(held)))
        assert (every == space.codes[left]).all()


def some_choices(
    space: Space, rng: np.random.Generator
) -> tuple[dict[str, list[Choice]], np.ndarray[Any, Any]]:
    """Choices to which some decisions are held, those of one strategy among them, and which of all
    strategies have them."""
    rows, fixed = space.indices(), {}
    seed, left = rows[rng.integers(len(rows))], np.ones(len(rows), bool)
    for at in rng.choice(len(seed), size=rng.integers(1, 4), replace=False):
        allowed = rng.random(space.sizes[at]) < 0.3
        allowed[seed[at]] = True
        fixed[space.decisions[at].name] = [
            c for c, a in zip(space.decisions[at].choices, allowed, strict=True) if a
        ]
        left &= allowed[rows[:, at]]
    return fixed, left


@pytest.mark.parametrize(("table", "each"), [(1, 0), (6, 0), (1, 32), (relation.TABLE, 32)])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(toy_rules())
def test_rules_of_any_form_leave_what_is_listed(
    table: int, each: int, rules: tuple[Rule, ...]
) -> None:
    """Whether tables are made at once (their bound is far), on the way, or row by row (1, 0)."""
    family, problem = make_family(TOY, rules), gemm_problem(1, 8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relation, "TABLE", table)
        patch.setattr(relation, "EACH", each)
        try:
            space = enumerate_space(family, problem, B200)
        except EmptySpace:
            with pytest.raises(EmptySpace, match=r"no strategy is valid.*refuses"):
                relate(family, problem, B200)
            return
        check(space, relate(family, problem, B200), np.random.default_rng(len(space)))


def problems(name: str, others: int) -> list[tuple[Family, Problem]]:
    """Of a workload that comes with the definition, and of others that a family takes: of other
    variable axes, and about twice as many of other constant ones."""
    rng, definition = np.random.default_rng(7), load(name)
    held = [dict(w.axes) for w in workloads(name) if not w.refusal]
    found = [find_problem(definition, held[0])]
    for turn in range(50 * others):
        axes, changed = held[rng.integers(len(held))], definition
        if turn % 3 == 0:
            factor = 2 ** rng.uniform(-2, 2)
            axes = {n: max(1, int(v * factor)) for n, v in axes.items()}
        else:
            factors = rng.choice([0.5, 0.75, 1, 1, 1.25, 2], len(definition.const_axes))
            sizes = zip(definition.const_axes.items(), factors, strict=True)
            changed = definition.resized(**{n: max(1, int(v * f)) for (n, v), f in sizes})
        with suppress(ValueError):  # what no kernel takes, or axes of attention that do not agree
            found.append(find_problem(changed, axes))
        if len(found) > others:
            break
    return found


@pytest.mark.parametrize("device", [B200, H200], ids=lambda d: d.name)
def test_a_definition_of_each_family(device: Device) -> None:
    seen = set()
    for name in names():
        family, problem = problems(name, 0)[0]
        if family.name not in seen and family.name != "moe":
            seen.add(family.name)
            space = enumerate_space(family, problem, device)
            check(space, relate(family, problem, device), np.random.default_rng(0))
    assert len(seen) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("device", [B200, H200], ids=lambda d: d.name)
@pytest.mark.parametrize("name", names())
def test_every_definition_at_several_sizes(name: str, device: Device) -> None:
    asked = problems(name, 4)
    assert len(asked) == 5
    for family, problem in asked:
        try:
            space = enumerate_space(family, problem, device)
        except EmptySpace:
            with pytest.raises(EmptySpace):
                relate(family, problem, device)
            continue
        check(space, relate(family, problem, device), np.random.default_rng(0))


STEPS = {
    "tile_m": tuple(range(64, 264, 8)),
    "tile_n": tuple(range(8, 264, 8)),
    "tile_k": tuple(range(16, 144, 16)),
    "num_stages": tuple(range(2, 13)),
    "split_k": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
}
FINER = (
    Decision("epilogue_width", (16, 32, 64, 128), ""),
    Decision("epilogue_stages", (1, 2, 3, 4), ""),
    Decision("prefetch", tuple(range(8)), ""),
    Decision("unroll", (1, 2, 4, 8), ""),
    *(Decision(f"{role}_regs", tuple(range(24, 256, 8)), "") for role in ("mma", "store", "load")),
)
WIDE = (
    rule(
        "blocks of the epilogue exceed the shared memory",
        "cta_group swap tile_m tile_n consumers schedule tile_k split_k epilogue num_stages "
        "epilogue_width epilogue_stages",
        lambda f, p, d: (
            smem_bytes(f, d) + f.epilogue_width * f.epilogue_stages * f.tile_m * 2
            <= d.smem_per_block
        ),
    ),
    rule("is never there", "prefetch num_stages", lambda f, p, d: f.prefetch <= f.num_stages),
    rule("cuts a block", "epilogue_width tile_n", lambda f, p, d: f.tile_n % f.epilogue_width == 0),
    rule(
        "roles exceed the register file",
        "consumers warp_specialized mma_regs store_regs load_regs",
        lambda f, p, d: (
            f.consumers * f.mma_regs + f.store_regs + f.warp_specialized * f.load_regs <= 512
        ),
    ),
    rule(
        "sums exceed the registers of their role",
        "tile_m tile_n consumers schedule mma_regs",
        lambda f, p, d: accumulators(f, d) + 40 <= f.mma_regs,
    ),
)


def finer(held: dict[str, tuple[Choice, ...]] | None = None) -> Family:
    """GEMM's family with more choices, decisions and rules; or with these choices alone."""
    choices = STEPS | (held or {})
    decisions = [
        replace(d, choices=tuple(choices.get(d.name, d.choices))) for d in (*GEMM.decisions, *FINER)
    ]
    return make_family(tuple(decisions), (*GEMM.rules, *WIDE))


@pytest.mark.parametrize(
    ("m", "device"),
    [(17, H200), *(pytest.param(m, B200, marks=pytest.mark.slow) for m in (17, 4096))],
)
def test_boxes_of_a_space_that_nobody_can_list(m: int, device: Device) -> None:
    """Boxes of choices around strategies that were drawn have what enumeration lists in them."""
    problem, rng = gemm_problem(m, 4096, 4096), np.random.default_rng(0)
    space, listed = relate(finer(), problem, device), 0
    assert len(space) > 10**11
    for _ in range(4):
        rows, held = space.indices(space.sample_uniform(3, rng)), {}
        order, most = rng.permutation(len(space.sizes)), 10**4
        for at in order:
            choices = space.decisions[at].choices
            taken = list(dict.fromkeys(rows[:, at])) if most > 1 else [rows[0, at]]
            held[space.decisions[at].name] = tuple(choices[i] for i in sorted(taken))
            most //= len(taken)
        box = enumerate_space(finer(held), problem, device)
        inside = space.given(held)
        found = inside.fields(inside.at(np.arange(len(inside))))
        for d in box.decisions:
            assert (getattr(box.fields(), d.name) == getattr(found, d.name)).all()
        listed += len(box)
    assert listed > 100


def test_the_diagram_is_the_least_one_however_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, spaces = gemm_problem(17, 4096, 4096), []
    family = finer({"tile_m": (64, 128, 256), "tile_n": tuple(range(8, 264, 24))})
    for table, each in ((1 << 8, 0), (relation.TABLE, relation.EACH)):
        monkeypatch.setattr(relation, "TABLE", table)
        monkeypatch.setattr(relation, "EACH", each)
        spaces.append(relate(family, problem, B200))
    for a, b in zip(*(s.layers for s in spaces), strict=True):
        assert (a.child == b.child).all() and (a.counts == b.counts).all()
        assert len({row.tobytes() for row in a.child}) == len(a.child) and a.counts.any(1).all()


def test_draws_are_uniform_and_of_what_is_fixed() -> None:
    space = relate(make_family(TOY, ()), gemm_problem(1, 8, 8), B200).given(
        {"b": ("y",), "d": (1, 3)}
    )
    drawn = space.sample_uniform(12_000, np.random.default_rng(0))
    codes, counts = np.unique(drawn, return_counts=True)
    assert len(codes) == len(space) == 12
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 31  # 11 degrees of freedom: once in 1000
    assert set(space.fields(drawn).d) == {1, 3} and set(space.fields(drawn).b) == {"y"}


def chain(*rules: Rule) -> Family:
    """Whose product of choices is 2^72."""
    return make_family(tuple(Decision(f"d{i}", tuple(range(8)), "") for i in range(24)), rules)


def test_codes_go_beyond_64_bits_and_back() -> None:
    def ascend(i: int) -> Rule:
        return rule("descends", f"d{i - 1} d{i}",
                    lambda f, p, d: getattr(f, f"d{i - 1}") <= getattr(f, f"d{i}"))  # fmt: skip

    space = relate(chain(*map(ascend, range(1, 24))), gemm_problem(1, 8, 8), H200)
    assert len(space) == math.comb(24 + 7, 7)  # ways to ascend
    drawn = space.sample_uniform(20, np.random.default_rng(0))
    assert max(drawn) > 2**64
    for code in drawn:
        assert space.code(space.strategy(code)) == code
    with pytest.raises(ValueError, match="not the code of a valid strategy"):
        space.strategy(8)
    with pytest.raises(ValueError, match="does not fit"):
        enumerate_space(space.family, space.problem, H200)


def test_what_is_refused_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gemm_problem(17, 4096, 4096)
    toy = relate(make_family(TOY, ()), problem, B200)
    with pytest.raises(KeyError, match=r"no decisions .'e'.; there are"):
        toy.given({"e": (1,)})
    with pytest.raises(EmptySpace, match="no strategy is valid with"):
        toy.given({"a": (7,)})
    hidden = Rule("hides a read", ("a",), lambda f, p, d: f.d == 0)
    with pytest.raises(ValueError, match=r"hides a read.*does not declare"):
        relate(make_family(TOY, (hidden,)), problem, B200)
    with pytest.raises(ValueError, match=r"strategies, of 2\^62 at most"):
        relate(chain(), problem, B200)
    monkeypatch.setattr(relation, "EDGES", 10_000)
    with pytest.raises(ValueError, match=r"kinds of prefixes wait for 'split_k', of 833 at most"):
        relate(finer(), problem, B200)
