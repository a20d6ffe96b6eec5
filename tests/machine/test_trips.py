"""Trip classes run every path of the loops: none, a part, as many as stages, past a second turn."""

from __future__ import annotations

from tests.families import dsa_sparse, gdn_prefill, mla
from tests.families.row import BOTH, H200


def test_chunks_of_a_recurrence_take_every_turn() -> None:
    """No chunk, a part of one, two, as many as stages, and past the ring's second turn."""
    p, s = gdn_prefill.problem(), gdn_prefill.PATHS["two tiles a warp"]
    ends = {dict(t.values)["end"] for t in gdn_prefill.PREFILL.trips(p, s, H200)}
    assert {-(-end // s.chunk) for end in ends} == {0, 1, 2, s.stages, 2 * s.stages + 1}
    assert any(0 < end < s.chunk for end in ends)


def test_lists_have_the_tiles_that_ctas_have() -> None:
    """A whole list, its first and its last chunk; if long, as far as past a ring's second turn."""

    def runs(topk: int, **choices: int) -> list[str]:
        p, s = dsa_sparse.problem(16, latent=128, topk=topk), dsa_sparse.strategy(**choices)
        return [trip.name for trip in dsa_sparse.SPARSE.trips(p, s, H200)]

    assert runs(256, chunk=0) == ["part 0 of 1 of 160 entries"]
    assert runs(100, chunk=0) == ["part 0 of 1 of 100 entries"]
    cut = ["part 0 of 3 of 160 entries", "part 2 of 3 of 250 entries", "3 chunks"]
    assert runs(250, chunk=96) == cut


def test_ctas_that_share_heads_write_their_own() -> None:
    for case in (*mla.DECODE_ROW.cases, *mla.PREFILL_ROW.cases):
        if case.name.startswith("128 heads"):
            maker = mla.DECODE if case.strategy.family == "mla_decode" else mla.PREFILL
            for dev in BOTH:
                trips = maker.trips(case.problem, case.strategy, dev)
                outputs = {out for t in trips for out in t.outputs}
                assert {rows for name, rows, _ in outputs if name == "output"} == {64}
