"""A mixture of experts in float8 with block scales, on one rank, with grouped routing."""

from dataclasses import replace

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.ir import Statement, body_of, program, with_body
from ptxflow.compiler.kernels.moe import blackwell, cost, decisions, hopper
from ptxflow.compiler.kernels.moe.combine import ENTRY as COMBINE
from ptxflow.compiler.kernels.moe.combine import Combine
from ptxflow.compiler.kernels.moe.decisions import JOINED
from ptxflow.compiler.kernels.moe.ordered import ENTRY as ROWS
from ptxflow.compiler.kernels.moe.ordered import Ordered
from ptxflow.compiler.kernels.moe.problem import BLOCK, EXPERTS, SCHEMA, WORD
from ptxflow.compiler.kernels.moe.routing import LANES, PERMUTE, ROUTE, Permute, Route
from ptxflow.compiler.kernels.moe.wide import AT_END, AT_START, WIDE
from ptxflow.compiler.launch import Given, InputParam, Launch, launch_of

#: blocks of hidden and of inner sizes on which kernels are emulated, cheap ones first
SHAPES = ((5, 2), (4, 2), (7, 2), (10, 2), (14, 2), (7, 4), (14, 4), (8, 4))
MANY, SPACED = 180, 33  # tokens; of more, so many and those halfway have local experts
CTAS = 13  # of either product, of which none has the same part of all experts' weights
SCALARS: Given = {
    name: InputParam(name, dtype)
    for name, dtype in (("local_expert_offset", "int32"), ("routed_scaling_factor", "float32"))
}


Products = hopper.Products | blackwell.Products


def products(p: Problem, s: Strategy, device: Device) -> tuple[Products, Products]:
    """Both grouped products."""
    make = blackwell.Products if device.has_tmem else hopper.Products
    return make(p, s, device, True), make(p, s, device, False)


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernels: routing, places, both products, the sum over experts; each lets the
    next one begin when it does, or as it ends."""
    up, down = products(p, s, device)
    route = [] if s.route == JOINED else [Route(p, s, device).build()]
    place, total = Permute(p, s, device).build(), Combine(p, s, device).build()
    rows = [Ordered(p, s, device).build()] if up.copied else []
    before = [*route, place, *rows, up.build(), down.build()]
    if s.get("trigger", AT_END) == AT_START:
        before = [with_body(k, (at.grid_launch_dependents(), *body_of(k))) for k in before]
    return program(*before, total)


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Of routing: a CTA with and without tokens for all its warps. Of places: none, some and more
    than two turns of the warps, of tokens and of tiles. Of products: no tile; rings that are not
    filled, filled, past their second turn; several tiles."""
    route, place = Route(p, s, device), Permute(p, s, device)
    out = []
    for tokens in () if place.joined else sorted({1, route.warps}):
        written = (("choices", tokens, 8), ("shares", tokens, 8))
        out.append(Trip(f"{tokens} tokens", (("seq_len", tokens),), written, ROUTE))
    many = 2 * place.warps * LANES
    for tokens, tiles in ((LANES, 0), (LANES, 1), (many, many)):
        values = (("seq_len", tokens), (place.tiles.value.arg[0], tiles))
        listed = (("places", tokens, 8), ("work", tiles, 4), ("tiles", 1, 1))
        name = f"{tokens} tokens, {tiles} tiles"
        out.append(Trip(name, values, listed if tiles > 1 else (), PERMUTE))
    order = Ordered(p, s, device)
    if order.copied:
        held = tuple((row.value.arg[0], i) for i, row in enumerate(order.chosen))
        written = (("ordered", 8, order.hidden), ("ordered_scale", 8, order.hidden // BLOCK))
        out.append(Trip("a token's rows", (*held, ("seq_len", 1), ("rows", 8)), written, ROWS))
    for product in products(p, s, device):
        out += _of_product(product)
    total = Combine(p, s, device)
    held = tuple((row.value.arg[0], 0) for row in total.chosen)
    columns = total.hidden if total.parts == 1 else min(total.hidden, total.columns)
    out.append(Trip("a token", held, (("output", 1, columns),), COMBINE))
    return out


def _of_product(g: Products) -> list[Trip]:
    plan = [(1, 0), (1, 1), (g.stages - 1, 1), (g.stages, 2), (2 * g.stages + 1, 1)]
    plan.append((1, 2 * g.stages + 1))
    out = []
    for steps, tiles in plan:
        held = {g.tiles: tiles, g.mine.left: g.tile_t, g.filled.left: g.tile_t}
        held |= {
            x: 0 for of in (g.mine, g.filled, g.feeding) for x in (of.expert, of.row, of.weight)
        }
        held |= dict.fromkeys(g.line_tokens, 0)
        values = {register.value.arg[0]: n for register, n in held.items()} | {
            "steps": steps,
            "tiles_w": 1,
            "tiles_ahead": 2,
            "seq_len": g.tile_t,
            "rows": g.tile_t,
        }
        written: tuple[tuple[str, int, int], ...] = ()
        if tiles:
            width = g.tile_w // 2 if g.up else g.tile_w
            written = ((("inner" if g.up else "partial"), g.tile_t, width),)
            written += (("inner_scale", g.tile_t, 1),) if g.up else ()
        name = f"{tiles} tiles of {steps} steps"
        out.append(Trip(name, tuple(values.items()), written, g.entry))
    return out


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grids and parameters, as expressions over seq_len."""
    route, place, total = Route(p, s, device), Permute(p, s, device), Combine(p, s, device)
    late = place.dependent and not place.joined
    routes = f"-(-seq_len // {route.warps})"
    steps = (
        launch_of(ROUTE, routes, route.warps, route.params, SCALARS),
        launch_of(
            PERMUTE, "1", place.warps, place.params, SCALARS, place.smem_bytes, dependent=late
        ),
        *_ordered(p, s, device),
        *(product.launch() for product in products(p, s, device)),
        launch_of(
            COMBINE, total.grid, total.warps, total.params, SCALARS, dependent=total.dependent
        ),
    )
    first, *following = steps[1:] if place.joined else steps
    return replace(first, then=tuple(following), workspace=route.workspace)


def _ordered(p: Problem, s: Strategy, device: Device) -> list[Launch]:
    """That of the kernel which copies rows, where there is one."""
    o = Ordered(p, s, device)
    given = {"rows": o.rows}
    made = launch_of(ROWS, "seq_len", o.warps, o.params, given, dependent=o.dependent)
    return [made] if o.copied else []


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """A few local experts of few blocks: rings past their first turn where they are short, tails of
    row tiles, an expert without tokens."""
    inner = max(BLOCK, int(s.up_tile) // 2)
    hidden = max(max(3, s.lag + 1) * BLOCK, int(s.down_tile))
    hidden = -(-hidden // int(s.down_tile)) * int(s.down_tile)
    tokens = min(int(s.tile_t), 32) + 5
    return Trial(_sized(p, tokens, 3, hidden, inner))


def _sized(p: Problem, tokens: int, local: int, hidden: int, inner: int) -> Problem:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "gemm1_out_size": 2 * inner}
    blocks = {"num_hidden_blocks": hidden // BLOCK, "num_intermediate_blocks": inner // BLOCK}
    blocks["num_gemm1_out_blocks"] = 2 * inner // BLOCK
    experts = {"num_experts": EXPERTS, "num_local_experts": local}
    return p.at(seq_len=tokens, **experts, **sizes, **blocks)


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """As many blocks as have the divisions of the problem's and fill no ring that these do not.

    A token without local experts: warps and CTAs that find nothing. Many tokens: warps have two
    of the same expert, some in the second turn, and most experts have none. Tokens for each expert
    that a lane can have, next to those of others, for one more than a tile; CTAs take one tile
    after another, rows reach beyond a quarter of the workspace.
    """
    own, shapes = dict(p.axes), []
    for blocks, inner in SHAPES:
        whole = blocks * BLOCK % int(s.down_tile) or 2 * inner * BLOCK % int(s.up_tile)
        if whole or blocks <= s.lag:
            continue
        local = min(WORD, own["num_local_experts"])
        sized = dict(_sized(p, 1, local, blocks * BLOCK, inner * BLOCK).axes)
        sized["num_experts"] = own["num_experts"]
        del sized["seq_len"]
        shapes.append(sized)
    before = (0,) * (len(launch(p, s, device).steps) - 3)
    apart = max(Permute(p, s, device).warps + 1, MANY // (SPACED - 1) + 1)
    tokens = 1, 1 + (SPACED - 1) * apart, max(60, int(s.tile_t) * 4 // 3 + 6)
    some = (), (*before, 0, 0, SPACED), ()  # the longest comes last: others begin whatever it takes
    ctas = (*before, CTAS, CTAS)
    sizes = (Size({"seq_len": n}, ctas, of) for n, of in zip(tokens, some, strict=True))
    return Trials(tuple(shapes), tuple(sizes))


MOE = Family.of(
    SCHEMA, ("moe",), decisions, cost, Kernels(build, trips, launch, trial, trials), more=WIDE
)
