"""The layout algebra, every operation against its definition on small layouts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxflow.compiler.layout import (
    IntTuple,
    Layout,
    LayoutError,
    coalesce,
    complement,
    composition,
    concat,
    flatten,
    from_offsets,
    logical_divide,
    logical_product,
    right_inverse,
)

seeded = settings(derandomize=True, deadline=None, database=None, max_examples=100)


def with_strides(shape: IntTuple) -> st.SearchStrategy[Layout]:
    def strides(s: IntTuple) -> st.SearchStrategy[IntTuple]:
        if isinstance(s, int):
            return st.integers(0, 12)
        return st.tuples(*map(strides, s))

    return strides(shape).map(lambda d: Layout(shape, d))


shapes = st.recursive(
    st.integers(1, 5),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple),
    max_leaves=4,
)
layouts = shapes.filter(lambda s: math.prod(flatten(s)) <= 120).flatmap(with_strides)


@st.composite
def compact(draw: st.DrawFn) -> Layout:
    """A bijection onto 0 .. size-1: strides are the running product in some order of the modes."""
    modes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
    shape = draw(modes.filter(lambda s: math.prod(s) <= 120))
    stride, running = [0] * len(shape), 1
    for i in draw(st.permutations(range(len(shape)))):
        stride[i], running = running, running * shape[i]
    return Layout(tuple(shape), tuple(stride))


def coordinates(shape: IntTuple) -> list[IntTuple]:
    """Every coordinate, the first mode fastest."""
    if isinstance(shape, int):
        return list(range(shape))
    tuples = itertools.product(*(coordinates(s) for s in reversed(shape)))
    return [tuple(reversed(t)) for t in tuples]


def dot(coordinate: IntTuple, stride: IntTuple) -> int:
    return sum(c * d for c, d in zip(flatten(coordinate), flatten(stride), strict=True))


def table(a: Layout) -> list[int]:
    return [dot(c, a.stride) for c in coordinates(a.shape)]


@seeded
@given(layouts)
def test_a_layout_is_the_sum_of_coordinate_times_stride(a: Layout) -> None:
    points = coordinates(a.shape)
    expected = table(a)
    assert a.size == len(points) and a.cosize == max(expected) + 1
    assert [a(c) for c in points] == expected
    assert [a(i) for i in range(a.size)] == expected
    assert a.offsets().tolist() == expected


def test_a_coordinate_may_be_linear_in_a_nested_mode() -> None:
    a = Layout((2, (3, 4)), (1, (10, 100)))
    assert a((1, 5)) == a((1, (2, 1))) == 121
    for outside in (24, -1, (2, 0), (0, 12), (0, (0, 4)), (0, 0, 0), ((0, 0), 0)):
        with pytest.raises(IndexError):
            a(outside)


@pytest.mark.parametrize("bad", [((2, 3), 1), (2, (1, 2)), ((2, 0), (1, 1)), (2, -1), ((2,), 1)])
def test_malformed_layouts_are_refused(bad: tuple[IntTuple, IntTuple]) -> None:
    with pytest.raises(LayoutError):
        Layout(*bad)


@seeded
@given(layouts)
def test_coalesce_keeps_the_map_and_has_the_fewest_modes(a: Layout) -> None:
    short = coalesce(a)
    assert table(short) == table(a)
    assert short == from_offsets(table(a)) == coalesce(short)


def all_layouts(size: int, top: int) -> list[Layout]:
    """Every flat layout of a size with shapes above 1 and strides up to `top`."""

    def factorings(n: int) -> list[tuple[int, ...]]:
        rest = [(s, *t) for s in range(2, n + 1) if n % s == 0 for t in factorings(n // s)]
        return rest if n > 1 else [()]

    return [
        Layout(shape, stride)
        for shape in factorings(size)
        for stride in itertools.product(range(top + 1), repeat=len(shape))
    ]


def test_offsets_are_a_layout_exactly_when_some_layout_has_them() -> None:
    for size, top in ((4, 4), (6, 3)):
        possible = {tuple(table(a)) for a in all_layouts(size, 3 * top)}
        for tail in itertools.product(range(top + 1), repeat=size - 1):
            offsets = (0, *tail)
            if offsets in possible:
                assert tuple(table(from_offsets(offsets))) == offsets
            else:
                with pytest.raises(LayoutError):
                    from_offsets(offsets)


@seeded
@given(layouts, layouts)
def test_composition_is_right_or_refused(a: Layout, b: Layout) -> None:
    if b.cosize > a.size:
        with pytest.raises(LayoutError, match="leave the domain"):
            composition(a, b)
        return
    try:
        r = composition(a, b)
    except LayoutError:
        return
    assert [r(c) for c in coordinates(b.shape)] == [a(b(c)) for c in coordinates(b.shape)]


def test_composition_refuses_only_what_no_layout_is() -> None:
    """Against every pair of small layouts: a result exists iff each mode and their sum is one."""
    seen = {True: 0, False: 0}
    inner = [*all_layouts(4, 5), *all_layouts(6, 3)]
    for a in [*all_layouts(8, 4), *all_layouts(12, 2)][::3]:
        for b in (b for b in inner if b.cosize <= a.size):
            wanted = [a(b(i)) for i in range(b.size)]
            index, forced, possible = 1, [], True
            for s, _ in b.modes:
                part = wanted[: index * (s - 1) + 1 : index]
                try:
                    forced.append(from_offsets(part))
                except LayoutError:
                    possible = False
                index *= s
            possible = possible and table(concat(*forced)) == wanted
            try:
                r = composition(a, b)
            except LayoutError:
                assert not possible, (a, b)
            else:
                assert table(r) == wanted
            seen[possible] += 1
    assert min(seen.values()) > 500, seen


def test_composition_that_carries_is_refused() -> None:
    a, b = Layout((4, 4), (1, 100)), Layout((2, 2), (2, 3))
    with pytest.raises(LayoutError, match="carry"):
        composition(a, b)
    with pytest.raises(LayoutError, match="unevenly"):
        composition(Layout((4, 4), (1, 100)), Layout(3, 3))
    assert composition(Layout((4, 4), (1, 100)), Layout((2, 4), (4, 1))) == Layout((2, 4), (100, 1))


@seeded
@given(
    shapes.filter(lambda s: math.prod(flatten(s)) <= 16).flatmap(with_strides), st.integers(1, 60)
)
def test_complement_is_the_tiling_or_refused(a: Layout, extent: int) -> None:
    """Of translates that tile an interval there is one set at most: fill the lowest gap."""
    image, covered, starts = table(a), set[int](), []
    tiles = True
    while tiles and len(covered) < extent:
        low = next(i for i in range(extent + 1) if i not in covered)
        copy = {low + x for x in image}
        tiles = len(copy) == len(image) and not copy & covered and max(copy) < extent
        covered |= copy
        starts.append(low)
    try:
        expected = from_offsets(starts) if tiles else None
    except LayoutError:
        expected = None
    if expected is None:
        with pytest.raises(LayoutError):
            complement(a, extent)
        return
    b = complement(a, extent)
    assert b == expected
    assert sorted(table(concat(a, b))) == list(range(extent))


@seeded
@given(compact(), st.data())
def test_divide_splits_into_tile_and_rest(a: Layout, data: st.DataObject) -> None:
    divisors = [d for d in range(1, a.size + 1) if a.size % d == 0]
    size = data.draw(st.sampled_from(divisors))
    step = data.draw(st.sampled_from([d for d in divisors if (a.size // size) % d == 0]))
    tile = Layout(size, step)
    try:
        r = logical_divide(a, tile)
    except LayoutError:
        return
    assert sorted(table(r)) == sorted(table(a))
    inside = [r((i, 0)) for i in range(size)]
    assert inside == [a(tile(i)) for i in range(size)]
    others = complement(tile, a.size)
    for j in range(others.size):
        assert [r((i, j)) for i in range(size)] == [a(tile(i) + others(j)) for i in range(size)]


@pytest.mark.parametrize(
    ("a", "tile", "expected"),
    [
        (Layout(16, 3), Layout(4, 1), Layout((4, 4), (3, 12))),
        (Layout((4, 6), (1, 4)), Layout(4, 2), Layout((4, (2, 3)), (2, (1, 8)))),
        (Layout((8, 8), (8, 1)), Layout(8, 8), Layout((8, 8), (1, 8))),
    ],
)
def test_divide_by_hand(a: Layout, tile: Layout, expected: Layout) -> None:
    assert logical_divide(a, tile) == expected


@seeded
@given(compact(), compact().filter(lambda b: b.size <= 16))
def test_product_repeats_without_overlap(a: Layout, copies: Layout) -> None:
    r = logical_product(a, copies)
    assert [r((i, 0)) for i in range(a.size)] == table(a)
    assert sorted(table(r)) == list(range(a.size * copies.size))
    for j in range(copies.size):
        assert r((0, j)) == a.size * copies(j)


def test_product_fills_the_holes_first() -> None:
    assert logical_product(Layout(4, 2), Layout(2, 1)) == Layout((4, 2), (2, 1))
    assert logical_product(Layout(4, 2), Layout(2, 2)) == Layout((4, 2), (2, 8))
    with pytest.raises(LayoutError):
        logical_product(Layout(4, 2), Layout(3, 1))


@seeded
@given(layouts)
def test_right_inverse_undoes(a: Layout) -> None:
    r = right_inverse(a)
    assert [a(r(k)) for k in range(r.size)] == list(range(r.size))
    assert all(d != r.size for s, d in a.modes if s > 1), "a whole mode could still be appended"


@seeded
@given(compact())
def test_right_inverse_of_a_bijection_is_its_inverse(a: Layout) -> None:
    r = right_inverse(a)
    assert r.size == a.size
    assert [r(a(i)) for i in range(a.size)] == list(range(a.size))
