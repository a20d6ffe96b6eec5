"""Mistakes of builders that one small problem a kernel does not show: the problems that cover its
text do. Each leaves the kernel right wherever indices are small.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import DEVICES
from ptxflow.compiler.emulator.race import GRANULE
from ptxflow.compiler.family import Problem, Strategy
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
    gqa_decode,
    gqa_prefill,
    mla,
    moe,
)

H200 = DEVICES["h200"]

unit, origin, choice = Combine.unit, Tiling.origin, Sum._choice
find, weight_scale = Search.find, Grouped.weight_scale
stats_of, entry, load_token = Parts.stats_of, Lists.entry, Kernel._load_token
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


#: a line each: what is changed, in which statement, which of those, in the kernel of what
LINES = Path(__file__).with_name("boundaries.jsonl").read_text(encoding="utf-8").splitlines()
BOUNDARIES = {row["name"]: row for row in map(json.loads, LINES)}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDARIES)
def test_what_a_boundary_hides_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that shows at a boundary alone: the last index, the first tile beyond a ring."""
    row = BOUNDARIES[name]
    change, statement, held = row["change"], row["statement"], row["problem"]
    pairs = {n: tuple(held.get(n, {}).items()) for n in ("axes", "constants")}
    problem = Problem(**held | pairs, flops=1.0, bytes=1.0)
    strategy = Strategy(problem.family, tuple(row["choices"].items()))
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
        made.append(str(found[row["which"]]))
        return found[row["which"]].within(whole)

    planted = replace(maker, build=build)
    monkeypatch.setattr(trials, "family", lambda _: planted)
    found = cover(problem, strategy, DEVICES[row["device"]])
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
