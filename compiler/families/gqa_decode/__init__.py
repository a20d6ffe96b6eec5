"""Grouped-query attention of one query token a sequence over paged keys and values."""

from __future__ import annotations

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.families import register
from ptxflow.compiler.families.gqa_decode.combine import ENTRY as COMBINE
from ptxflow.compiler.families.gqa_decode.combine import Combine
from ptxflow.compiler.families.gqa_decode.decisions import DECISIONS, RULES, resources
from ptxflow.compiler.families.gqa_decode.kernel import ENTRY, STATS, Chunks
from ptxflow.compiler.families.gqa_decode.load import COSTS, features, load
from ptxflow.compiler.families.gqa_decode.problem import problem
from ptxflow.compiler.ir import UOp, program
from ptxflow.compiler.launch import (
    InputParam,
    Launch,
    Param,
    PointerParam,
    ScalarParam,
    Workspace,
)
from ptxflow.compiler.strategy import Family, Problem, Strategy, Trial, Trip


def build(p: Problem, s: Strategy, device: Device) -> UOp:
    """The lowered kernels: chunks, then what they come to."""
    return program(Chunks(p, s, device).build(), Combine(p, s, device).build())


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Chunks that are full, a token longer than a tile, a token short of one, one token, none; for
    sums none, one, as many as are loaded at a time, one more, twice as many and one."""
    k, c = Chunks(p, s, device), Combine(p, s, device)
    tile = k.tile
    lengths = sorted({0, 1, tile - 1, tile + 1, k.chunk // 2 + 1, k.chunk, k.chunk + 1})
    out = []
    groups = k.key_heads // k.heads
    for length in lengths:
        values = {"batch_size": 1, "before": 1, "which": 1, "start": 0, "ctas": groups}
        units = k.heads * k.columns
        written = (("sums", units, k.row_floats), ("stats", units, STATS)) if length else ()
        name = f"{length} tokens of {k.chunk}"
        out.append(Trip(name, (*values.items(), *_length(k.page_size, length, "")), written, ENTRY))
    pairs = max(1, c.warps // c.blocks)
    rows = (pairs - 1) // k.columns * k.group + min(k.group, ((pairs - 1) % k.columns + 1) * 8)
    for chunks in sorted({0, 1, c.loads, c.loads + 1, 2 * c.loads + 1}):
        span = min(c.warps, c.blocks) * 16
        written = (("output", rows, span), ("lse", rows, 1))
        held = (("batch_size", 1), *_length(k.page_size, chunks * k.chunk, "c_"))
        out.append(Trip(f"{chunks} chunks", held, written, COMBINE))
    return out


def _length(page_size: int, tokens: int, prefix: str) -> tuple[tuple[str, int], ...]:
    """What registers hold of a sequence of so many tokens."""
    pages = -(-tokens // page_size)
    out = ((f"{prefix}begin", 0), (f"{prefix}end", pages))
    if page_size == 1:
        return out
    return (*out, (f"{prefix}last", tokens - (pages - 1) * page_size if pages else 0))


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grids and parameters, as expressions over batch_size and num_kv_indices."""
    k, c = Chunks(p, s, device), Combine(p, s, device)
    places = k.sequences.places()
    rows = f"{places} * {k.key_heads * k.columns}"
    combine = Launch(
        entry=COMBINE,
        grid=(f"-(-batch_size * {c.blocks_per_sequence} // {c.warps})", "1", "1"),
        block=32 * c.warps,
        cluster=(1, 1, 1),
        smem_bytes=0,
        params=tuple(map(_param, c.params)),
        dependent=bool(s.dependent),
    )
    lowered = k.build().arg
    return Launch(
        entry=ENTRY,
        grid=(f"{places} * {k.key_heads // k.heads}", "1", "1"),
        block=32 * k.warps,
        cluster=(1, 1, 1),
        smem_bytes=k.smem_bytes,
        params=tuple(map(_param, lowered.params)),
        then=(combine,),
        workspace=(
            Workspace("sums", f"{rows} * {4 * k.row_floats}"),
            Workspace("stats", f"{rows} * {4 * STATS}"),
        ),
    )


def _param(param: tuple[str, str]) -> Param:
    name, kind = param
    if name == "sm_scale":
        return InputParam(name, "float32")
    return PointerParam(name) if kind == "ptr" else ScalarParam(name, name)


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Three sequences, of which one is empty and others are uneven, with all key heads' CTAs."""
    k = Chunks(p, s, device)
    tokens = 2 * k.chunk + k.tile + 3
    pages = max(4, -(-tokens // k.page_size))
    axes = {
        **dict(p.axes),
        "batch_size": 3,
        "num_kv_heads": k.heads,
        "num_qo_heads": k.heads * k.group,
        "len_indptr": 4,
        "num_kv_indices": pages,
        "num_pages": pages + 2,
    }
    return Trial(replace(p, axes=tuple(axes.items())))


GQA_DECODE = register(
    Family(
        name="gqa_decode",
        op_types=("gqa_paged",),
        decisions=DECISIONS,
        rules=RULES,
        problem=problem,
        resources=resources,
        load=load,
        features=features,
        costs=COSTS,
        build=build,
        trips=trips,
        launch=launch,
        trial=trial,
        accepts=lambda inputs: "qo_indptr" not in inputs,
    )
)
