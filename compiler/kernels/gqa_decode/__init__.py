"""Grouped-query attention of one query token a sequence over paged keys and values."""

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.ir import Statement, program
from ptxflow.compiler.kernels.attention import few, held_of, rows_of, sized, summed
from ptxflow.compiler.kernels.attention.sequences import SCALE
from ptxflow.compiler.kernels.gqa_decode import cost, decisions
from ptxflow.compiler.kernels.gqa_decode.blackwell import Blackwell
from ptxflow.compiler.kernels.gqa_decode.combine import ENTRY as COMBINE
from ptxflow.compiler.kernels.gqa_decode.combine import Combine
from ptxflow.compiler.kernels.gqa_decode.decisions import SYNC
from ptxflow.compiler.kernels.gqa_decode.hopper import Hopper
from ptxflow.compiler.kernels.gqa_decode.kernel import Chunks
from ptxflow.compiler.kernels.gqa_decode.problem import SCHEMA
from ptxflow.compiler.kernels.gqa_decode.shape import ENTRY, STATS, Span
from ptxflow.compiler.kernels.gqa_decode.wide import WIDE
from ptxflow.compiler.launch import Launch, Workspace, launch_of
from ptxflow.compiler.lower import layout

MOST_EMULATED = 512  # tokens, where a ring does not need more


def kernel(p: Problem, s: Strategy, device: Device) -> Chunks | Hopper | Blackwell:
    """The first kernel."""
    if s.mma == SYNC:
        return Chunks(p, s, device)
    return Blackwell(p, s, device) if device.has_tmem else Hopper(p, s, device)


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernels: chunks, then what they come to; or one of whole sequences."""
    k = kernel(p, s, device)
    return k.build() if k.entire else program(k.build(), Combine(p, s, device).build())


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Of chunks: rings that are not filled, filled, taken more than twice, with tails; alone, and
    the second of a sequence, with nothing or a tail. Of sums: none, as many as a warp and as all
    load at a time, one more, twice as many and one; one chunk, which leaves nothing to do; of as
    many sequences as a CTA has blocks of."""
    k, c = kernel(p, s, device), Combine(p, s, device)
    stride = k.chunk // k.tiles
    filled = k.stages * stride
    lengths = (1, filled - stride, filled, filled + 1, 2 * filled + k.tile + 1)
    if k.entire:
        return [_shared_trip(k, n) for n in sorted({0, *lengths})]
    out = [_chunk_trip(k, n, 0) for n in sorted({min(n, k.chunk) for n in lengths} - {0})]
    out += [_chunk_trip(k, n, k.chunk) for n in (0, stride - 1)]
    pairs = max(1, c.groups_per_cta // c.groups)
    rows = (pairs - 1) // k.columns * k.group + min(k.group, ((pairs - 1) % k.columns + 1) * 8)
    span = min(c.groups_per_cta, c.groups) * 16 * c.each
    turn = c.loads * (c.warps // c.groups_per_cta)
    batch = -(-c.groups_per_cta // c.groups_per_sequence)
    for chunks in sorted({0, 1, c.loads, turn, turn + 1, 2 * turn + 1}):
        written = (("output", rows, span), ("lse", rows, 1)) if chunks != 1 else ()
        held = (("batch_size", batch), *held_of(k.page_size, chunks * k.chunk, "c_").items())
        out.append(Trip(f"{chunks} chunks", held, written, COMBINE))
    return out


def _together(k: Span) -> int:
    """Key heads of a CTA of which it has all heads, so that these lie side by side, or one."""
    return k.cta_heads if k.side == k.columns else 1


def _rows(k: Span) -> int:
    """Heads side by side that a CTA has."""
    return (_together(k) - 1) * k.group + min(k.group, 8 * k.side)


def _chunk_trip(k: Span, tokens: int, start: int) -> Trip:
    """So many tokens behind those that other CTAs take; they are the sequence's only chunk where
    there are no others."""
    values = {"batch_size": 1, "before": 1, "ctas": k.parts * k.ctas}
    values |= {register.arg.name: 0 for register in k.sequences.search.starts}
    values["which"] = 0 if start else 1  # 0: place 0 is the second of its sequence
    values |= dict.fromkeys(k.every_told_row, 0)
    units, rows = _together(k) * k.side, _rows(k)  # of the workspace, and of the outputs
    written: tuple[tuple[str, int, int], ...] = ()
    if tokens and start:
        written = (("sums", units, k.row_floats), ("stats", units, STATS))
    elif tokens:
        written = (("output", rows, k.size), ("lse", rows, 1))
    length = held_of(k.page_size, start + tokens)
    name = f"{tokens} tokens behind {start}" if start else f"{tokens} tokens"
    return Trip(name, tuple((values | length).items()), written, ENTRY)


def _shared_trip(k: Span, tokens: int) -> Trip:
    """The first sequence, of so many tokens, by the cluster that has its first heads."""
    values = {"batch_size": 1, "ctas": k.parts * k.ctas} | dict.fromkeys(k.every_told_row, 0)
    rows = _rows(k)
    written = (("output", rows, k.size), ("lse", rows, 1))
    held = values | held_of(k.page_size, tokens)
    return Trip(f"{tokens} tokens", tuple(held.items()), written, ENTRY)


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grids and parameters, as expressions over batch_size and num_kv_indices."""
    k, c = kernel(p, s, device), Combine(p, s, device)
    info = k.build().arg
    shared, passed = layout(info).smem_bytes, SCALE | k.maps
    if k.entire:
        grid = f"batch_size * {k.parts * k.ctas}"
        return launch_of(ENTRY, grid, info.warps, k.params, passed, shared, cluster=k.ctas)
    places = k.sequences.places()
    rows = f"{places} * {k.key_heads * k.columns}"
    blocks = f"-(-batch_size * {c.groups_per_sequence} // {c.groups_per_cta})"
    combine = launch_of(
        COMBINE, blocks, c.warps, c.params, smem_bytes=c.smem_bytes, dependent=bool(s.dependent)
    )
    floats = (("sums", k.row_floats), ("stats", STATS))
    workspace = tuple(Workspace(name, f"{rows} * {4 * n}") for name, n in floats)
    grid = f"{places} * {k.parts * k.ctas}"
    return launch_of(
        ENTRY, grid, info.warps, k.params, passed, shared, k.ctas, then=(combine,),
        workspace=workspace,
    )  # fmt: skip


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Three sequences, of which one is empty and others are uneven, with all key heads' CTAs; long
    enough for three chunks, or if those are long, for each stage of a ring three times."""
    k = kernel(p, s, device)
    turns = (3 * k.stages + 1) * k.chunk // k.tiles
    tokens = max(min(2 * k.chunk, MOST_EMULATED), min(turns, k.chunk)) + k.tile + 3
    if k.entire:
        tokens = (k.stages + 2) * k.chunk + k.tile + 3
    heads = {"num_kv_heads": k.cta_heads, "num_qo_heads": k.cta_heads * k.group}
    return Trial(p.at(**heads, **sized(p, 3, 0, tokens, least=4)))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """Two groups of key heads: made sums of chunks; sequences of several chunks, one from a chunk's
    edge, one a key short of one, one of a key from one on; many, few of which have a page, a chunk
    or some of each half of a tile and of an MMA's keys, so that each of several steps of the
    look-up finds another, of which the last is summed up. Of clusters: rings taken more than once,
    and several sequences."""
    k = kernel(p, s, device)
    groups, each = -(-k.key_heads // k.cta_heads), k.cta_heads
    shapes = tuple(
        {"num_kv_heads": n * each, "num_qo_heads": n * each * k.group} for n in few(groups)
    )

    def size(batch: int, tokens: int, some: tuple[int, ...] = ()) -> Size:
        return Size(sized(p, batch, 0, tokens, least=2), None, some)

    if k.entire:
        rest = k.tile + 3
        long, short = (k.stages + 2) * k.chunk + rest, k.chunk + rest
        return Trials(shapes, (size(1, long, (1,)), size(3, short)))
    short = min(k.page_size, k.chunk) // 2
    page, half = p["page_size"], k.tile // 2 + 3
    keys = {2: page, 28: 11, 34: half, 60: k.chunk, 66: page, 92: k.chunk, 98: page, 124: 11}
    long, other = 2 * k.chunk - short, k.chunk + k.tile + 1
    begun = page * (-(-long // page) + -(-other // page))  # slots of both
    later = ((1, keys.get(i, 0)) for i in range(2, 128))
    sizes = (
        summed(p, k.chunk, int(s.sum_chunks), int(s.sum_warps) if s.sum_split else 1),
        rows_of(
            p, (1, long), (1, other), (1, -begun % k.chunk), (1, 1), *later, (1, 2 * k.chunk - 1)
        ),
        size(131, 24 * k.page_size, (8, 8) if k.ctas > 1 else ()),
    )
    return Trials(shapes, sizes)


GQA_DECODE = Family.of(
    SCHEMA,
    ("gqa_paged",),
    decisions,
    cost,
    Kernels(build, trips, launch, trial, trials),
    more=WIDE,
    accepts=lambda inputs: "qo_indptr" not in inputs,
)
