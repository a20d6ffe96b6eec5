"""Tiles that clusters share along K: each step of each tile is somebody's, once, and summed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ptxflow.compiler.ir import FOLD, Op, UOp, const, param
from ptxflow.compiler.kernels.gemm.combine import CTAS, ENTRY
from ptxflow.compiler.kernels.gemm.tail import Share, Tail
from ptxflow.compiler.launch import evaluate
from tests.families.gemm import GEMM, SHARED, problem


def number(node: UOp, known: dict[UOp, int]) -> int:
    """A value, as 32 bits hold it."""
    if node not in known:
        sources = [number(source, known) for source in node.src]
        known[node] = node.arg[0] if node.op is Op.CONST else FOLD[node.arg](*sources)
    return known[node]


@given(st.integers(1, 40), st.integers(1, 16), st.integers(2, 8), st.data())
def test_parts_are_all_steps_of_all_tiles_once(
    tiles: int, clusters: int, most: int, data: st.DataObject
) -> None:
    steps = data.draw(st.integers(most, 30))  # of K, as many as may share them
    tail = Tail(param("tiles"), const(steps, "k_trips"), param("clusters"), 1, most)
    values = {param("tiles"): tiles, param("clusters"): clusters}
    done, rows, sums = Counter[tuple[int, int]](), dict[int, set[int]](), list[set[int]]()

    for c in range(clusters):
        share, before = Share(tail, const(c)), 0
        whole = number(share.whole, values)
        for turn in map(const, range(number(share.count, values))):
            tile, k, n = (number(f(turn), values) for f in (share.number, share.first, share.steps))
            assert n > 0 and number(share.before(turn), values) == before
            before += n
            done.update((tile, k + i) for i in range(n))
            part = turn.arg[0] >= whole
            assert part or (k, n) == (0, steps)
            if part:
                row = number(tail.row(share.cluster + share.tile + turn - share.whole), values)
                assert row < 2 * clusters and all(row not in r for r in rows.values())
                rows.setdefault(tile, set()).add(row)
        assert number(share.all_steps, values) == before
    assert done == {(t, k): 1 for t in range(tiles) for k in range(steps)}
    for i in range(number(tail.shared, values)):
        first, last = (
            number(tail.sharer(const(k)), values) for k in (i * steps, i * steps + steps - 1)
        )
        sums.append({number(tail.row(const(s + i)), values) for s in range(first, last + 1)})
        assert rows.pop(number(tail.tile(const(i)), values)) == sums[-1]
    assert not rows
    assert bool(sums) == (0 < 4 * (tiles % clusters) <= 3 * clusters)
    assert all(len(s) <= most + 1 for s in sums)


@given(st.sampled_from(SHARED), st.integers(1, 9000))
def test_sums_are_launched_for_the_clusters_that_there_are(case, m: int) -> None:  # type: ignore[no-untyped-def]
    """The second kernel tells the first one's clusters from its own; the workspace is bounded."""
    device, _, s = case
    first = GEMM.launch(problem(), s, device)
    (second,) = first.then
    assert second.entry == ENTRY and second.dependent
    assert evaluate(second.grid[0], {"M": m}) == CTAS * evaluate(first.grid[0], {"M": m})
    assert first.workspaces({"M": m})[1] <= 2 * device.sms * s.tile_m * s.tile_n * 4
