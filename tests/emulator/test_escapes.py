"""Mistakes of builders that one small problem a kernel does not show: the problems that cover its
text do. Each leaves the kernel right wherever indices are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.emulator.race import GRANULE
from ptxflow.compiler.ir import CTAID, LANE, Scalar, Value, kernels_of, loop, slot, value
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.attention.sequences import Search
from ptxflow.compiler.kernels.dsa_indexer import select
from ptxflow.compiler.kernels.dsa_indexer.select import Select
from ptxflow.compiler.kernels.dsa_sparse.kernel import AttendToLists, Lists
from ptxflow.compiler.kernels.gdn_decode.kernel import Kernel
from ptxflow.compiler.kernels.gdn_prefill.chunk_warps import ChunkWarps
from ptxflow.compiler.kernels.gemm.tiling import Tiling
from ptxflow.compiler.kernels.gqa_decode.combine import Combine
from ptxflow.compiler.kernels.gqa_decode.shape import Span
from ptxflow.compiler.kernels.gqa_prefill import schedule
from ptxflow.compiler.kernels.mla.combine import Combine as Parts
from ptxflow.compiler.kernels.mla.decisions import MMA_TOKENS
from ptxflow.compiler.kernels.moe.combine import Combine as Sum
from ptxflow.compiler.kernels.moe.grouped import Grouped
from ptxflow.compiler.kernels.moe.problem import CHOSEN
from ptxflow.compiler.launch import evaluate
from ptxflow.compiler.tile.rings import Ring
from ptxflow.compiler.tile.tensors import load_global
from ptxflow.eval.verify import trials
from ptxflow.eval.verify.trials import cover
from ptxflow.eval.verify.value_mutants import candidates
from tests.families import (
    dsa_indexer,
    dsa_sparse,
    gdn_decode,
    gdn_prefill,
    gemm,
    gemm_fp8,
    gqa_decode,
    gqa_prefill,
    mla,
    moe,
    sampling,
)

H200 = DEVICES["h200"]

unit, query_row, origin = Combine.unit, Span.query_row, Tiling.origin
wait_full, find, weight_scale = Ring.wait_full, Search.find, Grouped.weight_scale
stats_of, entry, load_token = Parts.stats_of, Lists.entry, Kernel._load_token
choice = Sum._choice
tile_at, sweep, streams = schedule.Work.tile_at, Select.sweep, ChunkWarps._streams


def other_chunk(self: Combine, place: Any, head: Scalar, column: Scalar) -> Any:
    """Rows of the workspace of an even chunk for those of an odd one."""
    return unit(self, value(place) >> 1 << 1, head, column)


def first_heads(self: Span, h: int) -> Any:
    """Outputs of the first group of key heads for all."""
    return self.sequence * self.query_heads + h * self.group


def first_step(self: Search, place: Scalar, count: Any) -> Any:
    """Sequences behind the first step of the look-up are not seen."""
    return find(self, place, count.min(32 * self.wave))


def first_turn(index: Any, turns: Scalar, *body: Any, **options: Any) -> Any:
    """The look-up of prefill ends behind its first step."""
    return loop(index, value(turns).min(1), *body, **options)


def first_raster(self: Tiling, tile: Any) -> Any:
    """Tiles behind the second raster group are the last one of it."""
    across = self.tiles_m if self.swapped else self.tiles_n
    return origin(self, tile.min(across * 2 * self.s.raster_group - 1))


def late_parity(self: Ring, use: Scalar) -> Any:
    """A consumer's parity turns once more from the 32nd turn on."""
    turn = value(use) // self.stages
    return at.mbar_wait(slot(self.full, self.stage(use)), (turn & 1) ^ (turn >> 5 & 1))


def first_block(self: Grouped, held: Any, row: Scalar, k: Any) -> Any:
    """The scale of the second product's weights is that of the first block along K."""
    return weight_scale(self, held, row, k if self.up else k * 0)


def other_part(self: Parts, row: Scalar, column: Scalar) -> Any:
    """The maxima and sums of an even chunk for those of an odd one."""
    return stats_of(self, value(row) >> 1 << 1, column)


def short_list(self: Lists, span: Any, token: Scalar) -> Any:
    """Entries from the 384th on are that one."""
    return entry(self, span, value(token).min(383))


def one_turn(index: Any, turns: Scalar, *body: Any, **options: Any) -> Any:
    """Sweeps end behind their first turn."""
    swept = index.arg[0].endswith("_turn")
    return loop(index, value(turns).min(1) if swept else turns, *body, **options)


def even_heads(self: Kernel, name: str, row: Any) -> Any:
    """Query heads of odd number are the ones before."""
    return load_token(self, name, value(row) >> 1 << 1)


def far_ranks(self: Select, name: str, visit: Any) -> Any:
    """CTAs of a cluster but the first sweep the keys of ranks behind theirs."""
    own, self.rank = self.rank, self.rank * 2
    try:
        return sweep(self, name, visit)
    finally:
        self.rank = own


def first_rows(self: AttendToLists, t: Value, span: Any) -> Any:
    """Whether the second of a lane's two entries names something is read from its first."""
    table, index = self.work.entry(
        span, self.work.token(span, t, self.row * MMA_TOKENS + (LANE >> 2))
    )
    return [load_global(self._entry(half).slot, table, index) for half in range(2)]


def other_choice(self: Sum, number: int) -> Any:
    """The last choice of a token is the one before."""
    return choice(self, min(number, CHOSEN - 2))


def near_tokens(self: Sum, number: int) -> Any:
    """Choices of tokens from the 1,024th on are those of that one."""
    return CTAID.min(1023) * CHOSEN + number


def even_queries(self: ChunkWarps) -> Any:
    """Queries of an odd query head are those of the one before."""
    query, *others = streams(self)
    pair = self.place[1] // (2 * self.share) * 2
    return [replace(query, first=pair * self.size), *others]


def near_tiles(self: schedule.Work, step: Scalar) -> Any:
    """Tiles of keys beyond those of the first problem are the last of these."""
    return tile_at(self, value(step).min(self.s.stages + 2))


TALL = gqa_prefill.strategy(consumers=3, share=4, tile_kv=32, stages=1, pin=1, order="tiles")
FLAT = gqa_prefill.strategy(consumers=1, share=8, tile_kv=32, stages=2, overlap=1, pin=1)
INDEXED = dsa_indexer.problem(), dsa_indexer.strategy(tile=64, stages=3)
GROUPED = next(s for device, _, s in gemm.CASES if device is H200 and s.raster_group > 1)
Plant = tuple[Any, str, Callable[..., Any], Any, Any]
PLANTS: dict[str, Plant] = {
    "E1 another chunk": (Combine, "unit", other_chunk, gqa_decode.problem(),
        gqa_decode.strategy(tiles=16)),
    "E3 other heads": (Span, "query_row", first_heads, gqa_decode.problem(), gqa_decode.strategy()),
    "E4 later sequences, decoding": (Search, "find", first_step, gqa_decode.problem(),
        gqa_decode.strategy()),
    "E4 later sequences, prefill": (schedule, "loop", first_turn, gqa_prefill.problem(64),
        gqa_prefill.strategy()),
    "E9 raster groups": (Tiling, "origin", first_raster, gemm.problem(m=581, n=1024, k=1024),
        GROUPED),
    "E10 the 32nd turn": (Ring, "wait_full", late_parity, gemm.problem_for(gemm.CASES[0][2]),
        gemm.CASES[0][2]),
    "E8 blocks of the second product": (Grouped, "weight_scale", first_block, moe.problem(),
        moe.strategy()),
    "E8 the last choice": (Sum, "_choice", other_choice, moe.problem(), moe.strategy()),
    "E8 tokens from 1,024 on": (Sum, "_choice", near_tokens, moe.problem(), moe.strategy()),
    "E6 mixed lists": (AttendToLists, "_look", first_rows, dsa_sparse.problem(),
        dsa_sparse.strategy()),
    "E5 another chunk of MLA": (Parts, "stats_of", other_part, mla.problem(),
        mla.decode(chunk=768)),
    "E6 long lists": (Lists, "entry", short_list, dsa_sparse.problem(topk=2048),
        dsa_sparse.strategy()),
    "E7 the second turn of a sweep": (select, "loop", one_turn, dsa_indexer.problem(),
        dsa_indexer.strategy()),
    "E7 ranks over 0 of a cluster": (Select, "sweep", far_ranks, dsa_indexer.problem(),
        dsa_indexer.strategy(ctas=2)),
    "E11 later tiles of keys": (schedule.Work, "tile_at", near_tiles, gqa_prefill.problem(64),
        gqa_prefill.strategy()),
    "another query head of a delta net": (Kernel, "_load_token", even_heads, gdn_decode.problem(),
        gdn_decode.strategy()),
    "another query head of a delta net's prefill": (ChunkWarps, "_streams", even_queries,
        gdn_prefill.problem(queries=4, values=8), gdn_prefill.strategy()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_what_small_indices_hide_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, method, planted, problem, strategy = PLANTS[name]
    monkeypatch.setattr(holder, method, planted)
    assert cover(problem, strategy, H200).error


#: (problem, strategy, what is changed, in which statement, which of those)
ONE_MORE: dict[str, tuple[Any, ...]] = {
    "a tile of queries that begins a token earlier": (
        gqa_prefill.problem(), gqa_prefill.strategy(share=2, stages=1, overlap=0),
        "64 to 63 in mul in parity", "mbar_wait(v_full)", 0,
    ),
    "the entry behind the last of a list": (
        dsa_indexer.problem(), dsa_indexer.strategy(), "lt of one more in inside",
        "put_place(chosen", 1,
    ),
    **{
        f"a list with room for one more, by {name}": (
            dsa_indexer.problem(), dsa_indexer.strategy(), "255 to 254 in add in value",
            "mov(", which,
        )
        for name, which in (("the first digit", 0), ("a later one", 1))
    },
    **{
        f"the row behind the last of a sequence on a B200, {name}": (
            gqa_prefill.problem(), gqa_prefill.strategy(share=4, stages=3),
            "lt of one more in inside", "st_global(output, output, line)", which,
        )
        for name, which in (("with keys", 0), ("without", 30))
    },
    "of the last score chosen, low bits beside a position's": (
        dsa_indexer.problem(), dsa_indexer.strategy(bits=12), "1 to 2 in shr in value",
        "select.py:323", 0,
    ),
    "scores from 1 on, beside small ones": (
        dsa_indexer.problem(), dsa_indexer.strategy(tile=64, stages=3), "0 to 1 as value",
        "hopper.py:80", 0,
    ),
    "tiles of a span on a B200, of a sequence that ended before": (
        dsa_indexer.problem(), dsa_indexer.strategy(tile=128, span=1024),
        "sub's left operand alone in stop", "loop of mbar_wait, tcgen05_fence_after", 0,
    ),
    "half of a digit's range on a B200, for keys alone in a warp's": (
        dsa_indexer.problem(), dsa_indexer.strategy(bits=10), "32 to 33 in min in inside",
        "ballot(s_near0", 0,
    ),
    "rows of tiles, for a last one with one row": (
        gemm.problem(34, 128, 2048), gemm.swapped(tile_n=32), "32 to 33 in div in c1",
        "tma_load(a, B_map", 0,
    ),
    "keys at the end of a last tile that is nearly full": (
        gqa_decode.problem(), gqa_decode.strategy(tiles=4, tile=16), "16 to 17 in mul in inside",
        "hide(", 1,
    ),
    "a chunk behind the last, in a turn of four": (
        gqa_decode.problem(), gqa_decode.strategy(sum_chunks=4), "3 to 2 in add in inside",
        "ld_global_coherent(c_", 0,
    ),
    "another chunk, in a turn of four": (
        mla.problem(), mla.decode(sum_chunks=4), "2 to 3 in add in index",
        "ld_global_coherent(c_stats0_2", 0,
    ),
    "tokens behind a query, where a sequence ends in a tile's first rows": (
        mla.problem(prefill=True), mla.prefill(queries=1, parts=1),
        "sub's left operand alone in inside", "hide(score0_", 0,
    ),
    "tokens behind a query of a later sequence in parts": (
        mla.problem(prefill=True), mla.prefill(parts=8), "q_end to q_begin in sub in inside",
        "hide(score0_", 0,
    ),
    "where another sequence's keys begin, by who gathers tokens": (
        mla.problem(prefill=True), mla.prefill(queries=1, parts=1, stages=2, tile=64, warps=8),
        "qo_indptr to kv_indptr as base", "ld_global(g_q_begin", 0,
    ),
    "no lane that stores log-sum-exps of chunks": (
        mla.problem(), mla.decode(), "4 to 0 in lt in inside", "st_global(lse, lse, c_", 0
    ),
    **{
        f"log-sum-exps of other heads: {change}": (
            dsa_sparse.problem(), dsa_sparse.strategy(), change, "st_global(lse, lse, c_", 0
        )
        for change in (
            "32 to 31 in div in index", "32 to 64 in div in index", "16 to 32 in mul in index"
        )
    },
    **{
        f"of a mixture of experts, {name}": (
            moe.problem(), moe.strategy(persistent=1, up_stages=3, route="joined"), *planted
        )
        for name, *planted in (
            ("a CTA's second tile", "ctas to lane in mul in value", "mov(d_t", 0),
            ("tokens of an expert, and others", "and's left operand alone", "ballot(p_t", -1),
            ("the second best of a lane", "2 to 3 as register of b", "min_f32(p_t", 0),
            ("experts of a word's second half", "31 to 15 in and in index", "shuffle_from(p_t", -1),
            ("tokens of the 22nd", "21 to 10 in eq in inside", "either(p_t", 0),
            ("tokens of the last, and the first", "2147483648 to -2147483647", "ballot(p_t", 0),
            ("an expert that is a lane's fifth", "4 to 3 in add in yes", "either(p_t", 0),
            ("rows behind the third warp's", "3 to 1 in lt in inside", "either(p_t", 0),
            ("stages of a second tile", "to 0 in mul in stage of a", "wgmma(u_t", 1),
        )
    },
    "heads of a sequence in one chunk": (
        mla.problem(), mla.decode(chunk=768), "lane to 0 in shr in index",
        "st_global(output, output, t", -1,
    ),
    "the last part of a later sequence": (
        mla.problem(prefill=True), mla.wgmma(parts=8, sum_chunks=2),
        "c_q_end to c_end in sub in inside", "ld_global_coherent(c_sums0_1_", 0,
    ),
    **{
        f"values of another turn: {change}": (
            gqa_prefill.problem(), TALL, f"{change} in parity", "mbar_wait(v_full)", which
        )
        for change, which in (("mul's right operand alone", 0), ("48 to 96 in add", 0))
    },
    "keys of a tile of queries of the first sequence": (
        gqa_prefill.problem(), TALL, "q_first to 0 in div in c1", "tma_load(k_tiles", 0
    ),
    **{
        f"tokens behind the last, {change}": (*INDEXED, change, "sort_key(t3_", 0)
        for change in ("64 to 63 in mul in inside", "3 to 4 in and in inside")
    },
    "tiles of a raster group that ends a row before a tile's": (
        gemm_fp8.problem(256, 2112), gemm_fp8.once(
            tile_m=64, tile_n=32, consumers=1, cluster="2x1", num_stages=6, raster_group=4
        ), "128 to 127 in div in index", "ld_global(t5_, B_scale", -1,
    ),
    "the row behind the last, in the second half of a warp's": (
        gemm.problem(16, 6144), gemm.strategy(tile_n=32, consumers=1, epilogue="direct"),
        "lt of one more in inside", "st_global(C, C, out", 1,
    ),
    "sums that go on where there are none, of a tile before one of more keys": (
        gqa_prefill.problem(kv_heads=4), FLAT.replace(consumers=2, stages=1),
        "16 to 32 in mul in accumulate", "wgmma_registers(acc", 0,
    ),
    "keys that the query behind a tile's last sees": (
        gqa_prefill.problem(64, kv_heads=4), FLAT.replace(overlap=0, pin=0),
        "8 to 9 in add in c1", "tma_load(k_tiles", 0,
    ),
    **{
        f"a tile's queries less one, {name}": (
            gqa_prefill.problem(1, kv_heads=4), FLAT.replace(share=2, order="tiles"),
            "32 to 31 in div in index", "st_global(output, output, line)", which,
        )
        for which, name in enumerate(("before a sequence", "of all tiles"))
    },
    "a tile of keys of a sequence a key short of one": (
        gqa_prefill.problem(), gqa_prefill.strategy(), "64 to 63 in div", "first, everywhere", 0
    ),
    "a tile of keys of a sequence in one part": (
        gqa_prefill.problem(),
        gqa_prefill.strategy(consumers=1, share=2, parts=3, least=4, query_box="tile"),
        "64 to 63 in div", "stop, everywhere", 0,
    ),
    "a threshold in the first lane of a later digit": (
        sampling.problem(65536, 4, sampling.P), sampling.strategy(),
        "32 to 0 in eq in inside", "either(", 3,
    ),
    "a full tile's columns behind the first tile": (
        gemm.problem(512, 4096), gemm.strategy(
            tile_m=64, tile_n=96, consumers=1, tile_k=32, cluster="1x2", epilogue="direct"
        ), "2 to 3 in mul in index", "st_global(C, C, out", -4,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_MORE)
def test_what_a_boundary_hides_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that shows at a boundary alone: the last index, the first tile beyond a ring."""
    problem, strategy, change, statement, which = ONE_MORE[name]
    maker, made = family(problem.family), list[str]()

    def build(*given: Any) -> Any:
        whole = maker.build(*given)
        found = [
            mutant
            for kernel in kernels_of(whole)
            for c in candidates(kernel)
            if (c.path is None) == ("everywhere" in statement) and change in c.change
            if statement in str(mutant := c.of(kernel))
        ]
        if not found:
            return whole
        made.append(str(found[which]))
        return found[which].within(whole)

    planted = replace(maker, build=build)
    monkeypatch.setattr(trials, "family", lambda _: planted)
    found = cover(problem, strategy, DEVICES["b200"] if "B200" in name else H200)
    assert made and (found.error or found.hazards)


WORKSPACES = {
    "gqa_decode": (gqa_decode.problem(), gqa_decode.strategy(tiles=16)),
    "mla_decode": (mla.problem(), mla.decode()),
    "mla_prefill": (mla.problem(prefill=True), mla.prefill(parts=4, sum_chunks=2)),
    "dsa_indexer": (dsa_indexer.problem(), dsa_indexer.strategy()),
    "dsa_sparse": (dsa_sparse.problem(), dsa_sparse.strategy()),
    "moe": (moe.problem(), moe.strategy()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKSPACES)
def test_a_quarter_of_a_workspace_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2, each of the program's workspaces alone, where a quarter of it is a granule or more."""
    problem, strategy = WORKSPACES[name]
    maker = family(name)
    held = maker.launch(problem, strategy, H200).workspace
    assert held
    axes = dict(problem.axes)

    def launched(which: str) -> Any:
        def launch(*given: Any) -> Any:
            whole = maker.launch(*given)
            less = [replace(w, bytes=f"({w.bytes}) // 4") for w in whole.workspace]
            kept = zip(whole.workspace, less, strict=True)
            return replace(whole, workspace=tuple(b if a.name == which else a for a, b in kept))

        return launch

    escaped = set[str]()
    for each in held:
        planted = replace(maker, launch=launched(each.name))
        monkeypatch.setattr(trials, "family", lambda _, planted=planted: planted)
        try:
            found = bool(cover(problem, strategy, H200).error)
        except ValueError as error:  # of a tensor map
            found = "it spans" in str(error)
        if not found and evaluate(each.bytes, axes) > 4 * GRANULE:
            escaped.add(each.name)
    assert not escaped
