"""Sparse latent attention: every query token sees the rows of a cache that its list names."""

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import (
    Family,
    Kernels,
    PartialSums,
    Problem,
    Size,
    Strategy,
    Trial,
    Trials,
    Trip,
)
from ptxflow.compiler.ir import Statement, program
from ptxflow.compiler.kernels.dsa_sparse import cost, decisions
from ptxflow.compiler.kernels.dsa_sparse.kernel import (
    TOPK,
    AttendToLists,
    CombineChunks,
    Lists,
    kernel,
)
from ptxflow.compiler.kernels.dsa_sparse.problem import SCHEMA
from ptxflow.compiler.kernels.mla.blackwell import DIMS, Blackwell
from ptxflow.compiler.kernels.mla.combine import first_launch, shared, with_sums
from ptxflow.compiler.kernels.mla.decisions import SUM_WARPS
from ptxflow.compiler.kernels.mla.shape import BLOCK, COUNT
from ptxflow.compiler.launch import Launch


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernel, and the one that adds chunks up where there are chunks."""
    k = kernel(p, s, device)
    return program(k.build(), CombineChunks(p, s, device).build()) if k.split else k.build()


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """The first CTA of a list and its last, of as many tiles as they have, or, where these are
    more, past the ring's second turn; and the second kernel."""
    k = kernel(p, s, device)
    lists, most = Lists(k), (2 * k.stages + 1) * k.tile
    numbers = sorted({0, lists.cut - 1})
    out = [_part(k, lists, n, min(lists.topk, n * lists.span + most)) for n in numbers]
    if not k.split:
        return out
    c = CombineChunks(p, s, device)
    written = (("output", c.own_heads, SUM_WARPS * 16), ("lse", 1, c.own_heads))
    values = ((COUNT, 1), ("ctaid", 0))
    return [*out, Trip(f"{lists.cut} chunks", values, written, c.entry)]


def _part(k: AttendToLists, lists: Lists, number: int, topk: int) -> Trip:
    """A CTA of the first token, whose list has so many entries."""
    written: tuple[tuple[str, int, int], ...] = ()
    if not k.split:
        written = (("output", k.own_heads, k.latent), ("lse", 1, k.own_heads))
    elif number == 0:
        written = (("sums", 1, k.blocks * k.across * BLOCK), ("stats", 1, 16 * k.across))
    name = f"part {number} of {lists.cut} of {topk} entries"
    return Trip(name, (("ctaid", number * k.head_ctas), (TOPK, topk)), written, k.problem.family)


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grids and parameters, as expressions over the variable axes."""
    k = kernel(p, s, device)
    numbers = {COUNT: "num_tokens"}
    first = first_launch(k.build(), shared(f"num_tokens * {Lists(k).cut}", k), numbers)
    if not k.split:
        return first
    return with_sums(first, CombineChunks(p, s, device), numbers, "num_tokens")


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Tokens with lists of small heads that the strategy takes: past a ring's second turn, or of
    two chunks and a part, whose last tile is as full as that of the problem."""
    k = kernel(p, s, device)
    longest = 2 * k.chunk if k.split else 2 * k.stages * k.tile
    page, topk = 1 if p["page_size"] == 1 else 16, longest + (p["topk"] % k.tile or k.tile)
    latent = DIMS if isinstance(k, Blackwell) else 16 * max(k.warps, 4)
    heads = {"head_dim_ckv": latent, "head_dim_kpe": 64}
    tokens = 3 if longest < 384 else 2
    return Trial(p.at(num_tokens=tokens, topk=topk, page_size=page, num_pages=40, **heads))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """Lists of the problem's own length and heads, full, mixed and empty; then longer ones, whose
    last CTA has one tile, or that fill a ring more than twice; and for the second kernel alone so
    many tokens that a warp more or less for each row tells."""
    constants = ("topk", "page_size", "head_dim_ckv", "head_dim_kpe")
    topk = max(p["topk"] + int(s.tile), (2 * int(s.stages) + 1) * int(s.tile))
    pages = -(-max(64, p["topk"]) // p["page_size"])
    k = kernel(p, s, device)
    rows, span = k.blocks + 1, Lists(k).span
    sums = PartialSums(span, (p["topk"],) * rows)
    sizes = (
        Size({"num_tokens": 3, "num_pages": pages}),
        Size({"num_tokens": 3, "num_pages": 2 * pages, "topk": topk}),
        *([Size({"num_tokens": rows, "num_pages": pages}, sums=sums)] if k.split else []),
    )
    return Trials(({n: p[n] for n in constants},), sizes)


DSA_SPARSE = Family.of(
    SCHEMA,
    ("dsa_paged",),
    decisions,
    cost,
    Kernels(build, trips, launch, trial, trials),
    accepts=lambda inputs: "sparse_indices" in inputs,
)
