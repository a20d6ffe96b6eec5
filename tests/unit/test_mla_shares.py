"""Parts of an MLA prefill: no more than the launch has CTAs, whatever the lengths."""

from hypothesis import given
from hypothesis import strategies as some

from ptxflow.compiler.kernels.mla import launch
from ptxflow.compiler.kernels.mla.shares import FEWEST
from ptxflow.compiler.launch import ScalarParam, evaluate
from tests.families.mla import problem, wgmma
from tests.given import H200

PARTS, TILE, QUERIES = 4, 64, 4
LAUNCH = launch(problem(True), wgmma(parts=PARTS), H200)
(SHARES,) = (p.value for p in LAUNCH.params if isinstance(p, ScalarParam) and p.name == "shares")


@given(some.lists(some.tuples(some.integers(0, 40), some.integers(0, 9000)), min_size=1))
def test_every_part_has_a_cta(lengths: list[tuple[int, int]]) -> None:
    axes = {"total_q": sum(q for q, _ in lengths), "len_indptr": len(lengths) + 1}
    asked = [(-(-q // QUERIES), -(-keys // TILE)) for q, keys in lengths]
    aim = evaluate(SHARES, axes) - sum(q for q, _ in asked) // 2
    size = max(FEWEST, -(-sum(q * tiles for q, tiles in asked) // aim))
    parts = sum(q * ((tiles - min(tiles, 1)) // size + 1) for q, tiles in asked)
    assert aim > 0 and parts <= evaluate(LAUNCH.grid[0], axes)
