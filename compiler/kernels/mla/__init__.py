"""Latent attention over pages: one query a sequence, or packed queries that see what is before."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Choice, Family, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.ir import Statement, program
from ptxflow.compiler.kernels.attention import UNLIKE, held_of, rows_of, sized, summed
from ptxflow.compiler.kernels.mla import cost, decisions
from ptxflow.compiler.kernels.mla.attend import Attend
from ptxflow.compiler.kernels.mla.blackwell import DIMS, Blackwell
from ptxflow.compiler.kernels.mla.combine import (
    Combine,
    CombineParts,
    first_launch,
    shared,
    with_sums,
)
from ptxflow.compiler.kernels.mla.hopper import Hopper
from ptxflow.compiler.kernels.mla.hopper_decisions import ALWAYS, MMA_SYNC, WGMMA
from ptxflow.compiler.kernels.mla.hopper_group import SITES
from ptxflow.compiler.kernels.mla.problem import PACKED, PREFILL, SCHEMA
from ptxflow.compiler.kernels.mla.shape import BLOCK, COUNT, SHARES
from ptxflow.compiler.kernels.mla.shares import FEWEST
from ptxflow.compiler.kernels.mla.span import PLANNING, Work
from ptxflow.compiler.launch import Launch

Written = tuple[tuple[str, int, int], tuple[str, int, int]]  # tensors, rows, columns
CUT, MANY = 3, 33  # in trip classes: parts of a tile of queries; sequences of a second look-up
LONG = 768  # tokens of a chunk: the emulator takes a second for about 500


def kernel(p: Problem, s: Strategy, device: Device) -> Attend | Hopper:
    """The first kernel, or the only one."""
    if decisions.by_tcgen05(s.fields(), p, device):
        return Blackwell(p, s, device)
    by_wgmma = s.family == PREFILL and s.core == WGMMA
    return Hopper(p, s, device) if by_wgmma else Attend(p, s, device)


def combine(p: Problem, s: Strategy, device: Device) -> Combine:
    """The second kernel."""
    return (CombineParts if s.family == PREFILL else Combine)(p, s, device)


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernel, and the one that adds chunks or parts up where there are some."""
    k = kernel(p, s, device)
    return program(k.build(), combine(p, s, device).build()) if k.split else k.build()


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Spans of no tile, one, as many as the ring has stages, one fewer, and past its second turn;
    of a whole sequence, of a part, and CTAs without any; queries that fill a CTA and do not; and
    the second kernel."""
    k = kernel(p, s, device)
    counts = {0, 1, k.stages - 1, k.stages, 2 * k.stages + 1}
    asked = {0, 1, k.queries, k.queries + 1}
    if isinstance(k, Hopper):  # whose warpgroups have every other tile
        counts |= {2, 2 * k.stages + 2}
        some = [_some(k, 2, rows, 1) for rows in sorted(asked - {k.queries})]
        out = [_some(k, n, k.queries, r) for n in sorted(counts) for r in (0, 1)]
        return [*some, *out, *_parts(p, s, device, counts)]
    if not k.decodes:
        out = [_some(k, n, rows) for n in sorted(counts) for rows in sorted(asked)]
        return [*out, *_parts(p, s, device, counts)]
    if not k.split:
        return [_chunk(k, n, 0) for n in sorted(counts)]
    most = k.chunk // k.tile
    found = sorted({min(n, most) for n in counts})
    first = [_chunk(k, n, number) for number in (0, 1) for n in found]
    return first + [_sum(Combine(p, s, device), n) for n in _sums(int(s.sum_chunks))]


def _sums(loads: int) -> list[int]:
    return sorted({0, 1, 2, loads, loads + 1, 2 * loads + 1})


def _chunk(k: Attend, tiles: int, number: int) -> Trip:
    """Chunk 0 of a sequence that has no other, or the second, of so many tiles.

    The second is at place 0, whose rows of the workspace it writes, of a sequence that begins
    before it.
    """
    tokens = tiles * k.tile - 3 if tiles else 0
    mine = {"which": 1 - number, **held_of(k.page_size, number * k.chunk + tokens)}
    values = {COUNT: 1, "ctaid": 0, **_each(k, mine)}
    written = _outputs(k, 1) if not number else _row(k) if tiles else ()
    name = f"{tiles} tiles of {'a part' if number else 'a whole sequence'}"
    return Trip(name, tuple(values.items()), written, k.problem.family)


def _outputs(k: Attend | Hopper, asked: int) -> Written:
    """What the first CTA of a sequence writes of so many queries; where CTAs share heads, of one,
    whose rows follow one another."""
    if k.head_ctas > 1:
        return ("output", k.own_heads, k.latent), ("lse", 1, k.own_heads)
    return ("output", asked * k.heads, k.latent), ("lse", asked, k.heads)


def _row(k: Attend | Hopper) -> Written:
    """What a CTA hands on."""
    return ("sums", 1, k.blocks * k.across * BLOCK), ("stats", 1, 2 * k.outputs.wide * k.across)


def _sum(c: Combine, chunks: int) -> Trip:
    values = {COUNT: 1, **held_of(c.page_size, chunks * c.chunk, "c_")}
    return Trip(f"{chunks} chunks", tuple(values.items()), _share(c) if chunks > 1 else (), c.entry)


def _share(c: Combine) -> Written:
    """What the first CTA of the second kernel writes."""
    dims = decisions.SUM_WARPS * c.each * c.outputs.dims
    return ("output", c.own_heads, dims), ("lse", 1, c.own_heads)


def _parts(p: Problem, s: Strategy, device: Device, counts: Iterable[int]) -> list[Trip]:
    """The last parts of so many tiles each, and one behind a sequence's only tile; parts that have
    all tiles; the sums of as many parts as the second kernel tells apart, of a query and of the
    last that a tile of queries has room for, if it is there."""
    k = kernel(p, s, device)
    if not k.split:
        return []
    last = [_queries(k, n * CUT, k.queries, 1, CUT - 1, n) for n in sorted({*counts} - {0})]
    whole = [_queries(k, 2, rows, size=2) for rows in sorted({0, 1, k.queries, k.queries + 1})]
    c = CombineParts(p, s, device)
    some = [_added(c, n, 1) for n in _sums(c.loads)]
    others = [_added(c, CUT, rows, c.queries - 1) for rows in (c.queries, c.queries + 1)]
    return [*last, _queries(k, 1, k.queries, 0, 1), *whole, *some, *others]


def _added(c: CombineParts, tiles: int, asked: int, query: int = 0) -> Trip:
    """The sums of a query of the first sequence, of so many tiles, of which each part has one."""
    tokens = tiles * c.tile - 3 if tiles else 0
    mine = {"s_which": 0, "s_first": 0, "s_size": 1, "q_begin": 0, "q_end": asked}
    mine |= {"s_chunks": tiles, "s_part": 0, "s_column": query * c.pieces}
    mine |= held_of(c.page_size, tokens)
    ctaid = query * c.head_ctas * (c.blocks // c.each // decisions.SUM_WARPS)
    values = {COUNT: MANY if asked > 1 else 1, SHARES: 1, "ctaid": ctaid}
    values |= {f"c_{name}": n for name, n in mine.items()}
    name, put = f"{tiles} parts of query {query} of {asked}", asked > query == 0 and tiles != 1
    return Trip(name, tuple(values.items()), _share(c) if put else (), c.entry)


def _some(k: Attend | Hopper, tiles: int, asked: int, rises: int = 0) -> Trip:
    """So many tiles: the first part, or all."""
    return _queries(k, tiles * (CUT if k.split else 1), asked, rises, size=max(1, tiles))


def _queries(
    k: Attend | Hopper, tiles: int, asked: int, rises: int = 0, number: int = 0, size: int = 1
) -> Trip:
    """The CTA that has the last queries of so many, and part `number` of so many tiles; `rises`:
    and so do maxima, far enough to rescale sums; `size`: tiles of a part at the most."""
    tokens = tiles * k.tile - 3 if tiles else 0
    places = -(-asked // k.queries)
    ctas = max(1, places) * k.head_ctas
    mine = {"q_begin": 0, "q_end": asked, **held_of(k.page_size, tokens)}
    mine |= {f"{site}_rises": rises for site in SITES}
    parts = -(-max(1, tiles) // size)
    share, behind = -(-max(1, tiles) // parts), number >= places * parts
    split = {"s_which": int(behind), "s_first": 0, "s_size": size, "s_share": share}
    split |= {"s_tile": number % parts * share}
    split |= {"s_from": max(0, places - 1 - number // parts) * k.queries}
    last = number * k.head_ctas if k.split else ctas - 1
    values = {COUNT: 1, "ctas": ctas, "ctaid": last}
    values |= {COUNT: MANY if number else 1, SHARES: 1} if k.split else {}
    values |= _each(k, mine | (split if k.split else {"q_which": 1}))
    values |= {f"{PLANNING}{name}": n for name, n in (mine | split).items()} if k.split else {}
    written = _outputs(k, asked) if tiles <= size or not k.split else _row(k)
    name = f"{tiles} tiles for {asked} queries" + (", rising maxima" if rises else "")
    name += f", part {number} of {size}" if k.split else ""
    first = asked == k.queries and number == 0 and (tiles > 0 or not k.split)
    return Trip(name, tuple(values.items()), written if first else (), k.problem.family)


def _each(k: Attend | Hopper, mine: dict[str, int]) -> dict[str, int]:
    """What the registers of each role hold."""
    return {prefix + name: n for prefix in k.prefixes for name, n in mine.items()}


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grids and parameters, as expressions over the variable axes."""
    k = kernel(p, s, device)
    work, count = Work(k), "batch_size" if k.decodes else "(len_indptr - 1)"
    grid = rows = count
    numbers = {COUNT: count}
    if not k.decodes:
        grid = work.tiles.places(count)
        if k.split:
            # about so many CTAs for a tile of queries, and whole rounds of all SMs
            some, sms = f"({grid}) * {k.cut}", device.sms // k.head_ctas
            rounds = f"({some} + {sms // 2}) // {sms} * {sms}"
            numbers[SHARES] = f"max({rounds}, min({some}, {sms}))"
            grid, rows = f"({numbers[SHARES]} + ({grid} + 1) // 2)", "total_q"
    elif k.split:
        grid = work.sequences.places()
    first = first_launch(k.build(), shared(grid, k), numbers)
    return with_sums(first, combine(p, s, device), numbers, rows) if k.split else first


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Sequences of small heads past a ring's second turn, in parts twice as long, or of several
    chunks: three, of which one is empty and the others uneven, or one alone where chunks are
    long."""
    k = kernel(p, s, device)
    page = 1 if p["page_size"] == 1 else 16
    sequences = 3 if k.chunk < LONG else 1
    turn = (2 * k.stages + 1) * k.tile + 3
    tokens = min(2, sequences) * k.chunk + k.tile + 3 if k.chunk else turn * min(k.cut, 2)
    latent = DIMS if isinstance(k, Blackwell) else 16 * max(k.warps, 4)
    p = p.at(page_size=page, head_dim_ckv=latent, head_dim_kpe=64)
    return Trial(p.at(**sized(p, sequences, 2 * k.queries + 3, tokens, least=3)))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """Heads of full size: two sequences whose last chunks, or parts under a query, have full tiles
    and one key, lack one or end elsewhere in a tile, after a chunk but for a token, and the token;
    made sums; where parts are few, sequences of several, and some that end anywhere in a tile;
    many, few of which have tokens, and whose look-up takes several steps; a ring beyond its 32nd
    turn, in prefill under queries that see one token of the last tile or none; instead of all
    parts the last, a tile shorter, of an odd number of tiles."""
    k = kernel(p, s, device)
    page = p["page_size"]

    def size(count: int, queries: int, tokens: int, some: tuple[int, ...] = ()) -> Size:
        return Size(sized(p, count, queries, tokens), None, some)

    many = size(34, 12, 5 * page, (-16 * k.head_ctas, 8) if k.cut > 1 else ())
    full = (k.chunk or 2 * k.stages * k.tile) + k.tile if k.decodes else 4 * k.tile
    chunk = ((1, k.chunk - 1), (1, 1)) if k.chunk else ()
    few = k.cut <= 2 and not k.decodes
    most = max(5, min(34 * k.stages, 8192 // k.tile))
    last = size(1, max(1, 2 * k.queries - 1), (most - 1) * k.tile + 1, (2, 8))
    if k.cut > 1:
        parts = _aim(k, k.queries, 1, 1)
        tiles = parts * 2 * max(3, min(k.stages + 1, most // parts // 2)) - 1
        last = rows_of(p, (k.queries, (tiles - 1) * k.tile + 1))
        last = replace(last, blocks=((2 * parts - 1) * k.head_ctas, 0), some=(1, 8))  # the middle
    sizes = (
        rows_of(p, *chunk, (1, full + 1), (1, k.tile + UNLIKE))
        if k.decodes
        else size(2, max(5, 3 * k.queries + 1), 2 * full + page + UNLIKE),
        *([summed(p, k.chunk, int(s.sum_chunks))] if k.chunk else []),
        *([size(3, 2 * k.queries + 3, ((2 * k.stages + 1) * k.tile + 3) * k.cut)] if few else []),
        *([size(4, 8 * k.queries, 4 * max(29, page))] if few else []),
        *([_later(p, k, int(s.sum_chunks)), *_fewer(p, k)] if k.cut > 1 else []),
        many,
        last,
    )
    return Trials(({n: p[n] for n in ("page_size", "head_dim_ckv", "head_dim_kpe")},), sizes)


def _aim(k: Attend | Hopper, queries: int, sequences: int, places: int) -> int:
    """The parts that there should be of the tokens of so many tiles of queries, `places`."""
    some, sms = (queries // k.queries + sequences) * k.cut, k.device.sms // k.head_ctas
    return max((some + sms // 2) // sms * sms, min(some, sms)) - places // 2


def _fewer(p: Problem, k: Attend | Hopper) -> list[Size]:
    """Of three tiles each there is a part more than SMs take in some rounds, so that each has four;
    were the last tile of any but the last sequence not counted, there were none more. Of the first
    sequence the number of parts tells; after it one has as many as a wrong number would reach."""
    sms, found = k.device.sms // k.head_ctas, list[tuple[int, ...]]()
    for rounds, short, long in product(range(1, 4), range(1, 9), range(1, sms // 2)):
        parts, left = divmod(rounds * sms - 4 - short, long)
        tiles, aim = 3 * parts - 2, _aim(k, (short + long) * k.queries + 2, 4, short + long + 2)
        if not left and parts > 1 and 2 * aim < 12 + long * tiles + short <= 3 * aim:
            found.append((tiles * (12 + long * k.queries), tiles, long, short))  # what it costs
    q, t, some = k.queries, k.tile, (-4 * k.head_ctas,) * 2
    ahead = (1, 6 * t + 1), (1, 4 * t + 1)
    return [
        replace(rows_of(p, *ahead, (long * q, tiles * t - t + 1), (short * q, 1)), some=some)
        for _, tiles, long, short in sorted(found)[:1]  # none on a device of few SMs
    ]


def _later(p: Problem, k: Attend | Hopper, loads: int) -> Size:
    """Behind a tile of queries, queries without keys, and two tiles, of which the last alone sees
    some: sequences whose tiles are of one part and of two, of two and three, and so on, so that
    last ones have any place among `loads`: the first tile sees all that its parts can hold, more
    than one where there are, and the one query behind it a key more."""
    most = max(3, loads + 1)
    tokens = [FEWEST * (n - 1) * k.tile + 1 for n in range(most, max(1, most - loads), -1)]
    behind = ((k.queries + 1, n) for n in tokens)
    return rows_of(p, (k.queries, FEWEST * k.tile + 1), (3, 0), (2 * k.queries, k.queries), *behind)


def revise(choices: Mapping[str, Choice]) -> Mapping[str, Choice] | None:
    """Choices of a prefill before there was one by wgmma, or one in parts."""
    by_wgmma: dict[str, Choice] = {"core": MMA_SYNC, "lead": 0, "pieces": 1, "rescale": ALWAYS}
    return {**by_wgmma, "parts": 1, "dependent": 0, "sum_chunks": 1, **choices}


MLA_DECODE = Family(
    name=SCHEMA.family,
    op_types=("mla_paged",),
    decisions=decisions.DECODE_DECISIONS,
    rules=decisions.DECODE_RULES,
    problem=SCHEMA.problem,
    held=SCHEMA.held,
    resources=decisions.resources,
    demand=cost.demand,
    features=cost.features,
    costs=cost.COSTS,
    build=build,
    trips=trips,
    launch=launch,
    trial=trial,
    trials=trials,
    accepts=lambda inputs: "qo_indptr" not in inputs,
)
MLA_PREFILL = replace(
    MLA_DECODE,
    name=PREFILL,
    problem=PACKED.problem,
    held=PACKED.held,
    decisions=decisions.PREFILL_DECISIONS,
    rules=decisions.PREFILL_RULES,
    resources=decisions.prefill_resources,
    demand=cost.prefill_demand,
    features=cost.prefill_features,
    revise=revise,
    accepts=lambda inputs: "qo_indptr" in inputs,
)
