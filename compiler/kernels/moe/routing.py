"""The first kernels: a warp routes a token; one CTA finds a row for each choice of each token.

Experts' rows are in the order of warps and tokens, whatever the schedule: a program gives the same
bits each time.
"""

from __future__ import annotations

from functools import partial

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms.experts import CHOSEN, LANE_EXPERTS, WORD
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, UOp, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, when
from ptxflow.compiler.ir.storage import anywhere, global_tensor, part, rectangle, slot, smem
from ptxflow.compiler.kernels.moe.decisions import JOINED
from ptxflow.compiler.kernels.moe.problem import EXPERTS
from ptxflow.compiler.kernels.moe.shape import NOWHERE, TILE_WORDS, Shape
from ptxflow.compiler.lower import finish
from ptxflow.compiler.tile.tensors import load_global, store_global

ROUTE, PERMUTE = "moe_route", "moe_place"
LANES = 32
TOKENS = 4  # that a CTA routes
PLACE_WARPS = 32  # of the CTA that places; where experts are many, registers leave fewer


#: what routing reads and writes
ROUTED = (
    ("routing_logits", "ptr"),
    ("routing_bias", "ptr"),
    ("choices", "ptr"),
    ("shares", "ptr"),
    ("local_expert_offset", "u32"),
    ("routed_scaling_factor", "u32"),
)


def route_token(g: Shape, token: UOp) -> list[Body]:
    """A warp finds the choices of a token, and their shares."""
    r = g.r
    logits, scores, bias = r("logits", 8), r("scores", 8), r("bias", 8)
    biased, keys, chosen = r("biased", 8), r("keys", 8), r("chosen", 1)
    factor, shares = r("factor", 1), r("weights", 8)
    first = LANE * LANE_EXPERTS
    packed, at_lane, row = r("packed", 4), token * EXPERTS + first, (token, 0, 1, EXPERTS)
    stores = [rectangle(global_tensor(n), token, 0, 1, CHOSEN) for n in ("choices", "shares")]
    return [
        [
            load_global(part(logits, 4 * i, 4), "routing_logits", at_lane + 4 * i, 1, row)
            for i in range(2)
        ],
        load_global(packed, "routing_bias", first, 1, (0, 0, 1, EXPERTS), element=2),
        at.unpack(bias, packed, dtype="bf16"),
        at.sigmoid(scores, logits),
        at.sum_f32(biased, scores, bias),
        at.keep_groups(keys, biased),
        at.take_best(chosen, keys),
        at.mov(factor, param("routed_scaling_factor")),
        at.share_chosen(shares, scores, chosen, factor),
        at.st_chosen(
            param("choices"),
            param("shares"),
            token,
            param("local_expert_offset"),
            *stores,
            chosen,
            shares,
            local=g.local,
        ),
    ]


class Route(Shape):
    """A warp for each token: its choices and their shares, in ascending order of experts."""

    params = (*ROUTED, ("seq_len", "u32"))

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, "t_")
        self.warps = TOKENS

    def build(self) -> UOp:
        """The lowered kernel."""
        token = CTAID * self.warps + WARP
        body = when(token < param("seq_len"), route_token(self, token))
        info = KernelInfo(ROUTE, self.device.arch, self.warps, 1, self.params, self.r.storage)
        return finish(info, body)


class Permute(Shape):
    """One CTA: how many tokens chose each expert, where its rows and tiles begin, and which row a
    token's choice has. Lanes are tokens, or experts."""

    def __init__(self, problem: Problem, s: Strategy, device: Device):
        super().__init__(problem, s, device, "p_")
        self.warps = PLACE_WARPS // (1 if self.words <= 2 else 2 if self.words <= 5 else 4)
        self.joined = bool(s.route == JOINED)
        self.pitch = 4 * WORD * self.words
        self.counts = smem("counts", self.warps * self.pitch, align=128)
        self.smem_bytes = int(self.counts.arg.size)
        self._batches = (param("seq_len") + (LANES - 1)) // LANES  # sets of 32 tokens

    @property
    def params(self) -> tuple[tuple[str, str], ...]:
        routed = ROUTED if self.joined else (("choices", "ptr"),)
        written = ("places", "tokens", "work", "tiles")
        return (*routed, *((name, "ptr") for name in written), ("seq_len", "u32"))

    def build(self) -> UOp:
        """The lowered kernel."""
        body: list[Body] = [self._route() if self.joined else self.wait()]
        body += [*self._count(), at.cta_sync(), *self._begin()]
        body += [self._list_tiles(), self._list_rows()]
        arch, storage = self.device.arch, (self.counts, *self.r.storage)
        late = self.dependent and not self.joined
        info = KernelInfo(PERMUTE, arch, self.warps, 1, self.params, storage, dependent=late)
        return finish(info, body)

    def _route(self) -> list[Body]:
        """All tokens, a warp each in turn; others read what it leaves."""
        token = var("routed")
        tokens = loop(
            token, param("seq_len"), route_token(self, token), start=WARP, step=self.warps
        )
        return [tokens, at.cta_sync()]

    def _load(self, batch: UOp) -> tuple[list[UOp], UOp, UOp]:
        """Statements that load the choices of a lane's token, which they are, and whether there is
        such a token."""
        token = batch * LANES + LANE
        inside = token < param("seq_len")
        choices = self.r("choices", CHOSEN)
        place = rectangle(global_tensor("choices"), batch * LANES, 0, LANES, CHOSEN)
        load = at.ld_global_own if self.joined else partial(at.ld_global, handed=True)
        out = [
            load(
                part(choices, i, 4), param("choices"), token * CHOSEN + i, inside, place, element=4
            )
            for i in range(0, CHOSEN, 4)
        ]
        return out, choices, inside

    def _set(self, word: int) -> UOp:
        return self.r(f"set{word}_", 1)

    def _each_word(self, name: str) -> list[UOp]:
        return [self.r(f"{name}{w}_", 1) for w in range(self.words)]

    def _count(self) -> list[Body]:
        """A warp counts its batches' choices of each expert."""
        sizes, batch = self._each_word("sizes"), var("counted")
        load, choices, inside = self._load(batch)
        step: list[Body] = [load]
        for w, size in enumerate(sizes):
            step.append(at.choosers(self._set(w), choices, inside, first=w * WORD))
            step.append(at.add_size(size, self._set(w)))
        return [
            [at.mov(size, 0) for size in sizes],
            loop(batch, self._batches, step, start=WARP, step=self.warps),
            [
                at.st_shared_lanes(
                    slot(self.counts, 0, WARP * self.pitch + 4 * WORD * w, 4 * WORD),
                    LANE << 2,
                    1,
                    size,
                )
                for w, size in enumerate(sizes)
            ],
        ]

    def _begin(self) -> list[Body]:
        """Every warp works out where experts begin, and its own part of their rows."""
        r = self.r
        rows, tiles = r("all_rows", 1), r("all_tiles", 1)
        out: list[Body] = [at.mov(rows, 0), at.mov(tiles, 0)]
        names = ("totals", "befores", "starts", "firsts", "nexts")
        for w, (total, before, start, first, following) in enumerate(
            zip(*map(self._each_word, names), strict=True)
        ):
            span = (self.warps - 1) * self.pitch + 4 * WORD
            counts = slot(self.counts, 0, 4 * WORD * w, span)
            out += [
                at.add_counts(total, before, counts, WARP, warps=self.warps, pitch=self.pitch),
                at.begin_experts(start, first, rows, tiles, total, tile=self.tile_t),
                at.add_words(following, start, before),
            ]
        write = store_global("tiles", 0, tiles, anywhere("tiles"), LANE < 1)
        return [*out, at.copy(r("tiles", 1), tiles), when(WARP.eq(0), write)]

    def _list_tiles(self) -> Body:
        """A lane for each row tile."""
        batch, found = var("listed"), self.r("found", TILE_WORDS)
        tile = batch * LANES + LANE
        words = zip(*map(self._each_word, ("firsts", "starts", "totals")), strict=True)
        finds = [
            at.find_tile(found, tile, *held_of, tile=self.tile_t, first_expert=w * WORD)
            for w, held_of in enumerate(words)
        ]
        inside = tile < self.value("tiles")
        store = store_global(
            "work", tile * TILE_WORDS, found, (batch * LANES, 0, LANES, TILE_WORDS), inside
        )
        count = (self.value("tiles") + (LANES - 1)) // LANES
        body: list[Body] = [at.mov(found, 0), finds, store]
        return loop(batch, count, body, start=WARP, step=self.warps)

    def _list_rows(self) -> Body:
        """The batches of the warp again: a row for each choice."""
        batch, rows = var("placed"), self.r("rows", CHOSEN)
        load, choices, inside = self._load(batch)
        body: list[Body] = [load, at.mov(rows, NOWHERE)]
        for w, following in enumerate(self._each_word("nexts")):
            body.append(at.choosers(self._set(w), choices, inside, first=w * WORD))
            body.append(at.rank_rows(rows, following, choices, self._set(w), first=w * WORD))
        token = batch * LANES + LANE
        body += [
            store_global(
                "places",
                token * CHOSEN + i,
                part(rows, i, 4),
                (batch * LANES, 0, LANES, CHOSEN),
                inside,
            )
            for i in range(0, CHOSEN, 4)
        ]
        scattered = rectangle(global_tensor("tokens"), batch * LANES, 0, LANES, CHOSEN)
        body.append(at.st_tokens(param("tokens"), token, inside, scattered, rows))
        return loop(batch, self._batches, body, start=WARP, step=self.warps)
