"""A grouped product of experts' rows and weights in float8: tiles, the ring, and what fills it.

The same for both products. *Up* gathers tokens' rows and multiplies by gemm1_weights; eight rows of
their first half alternate with the eight of the second that gate them, so that a warp, and on
sm_90a a lane, has both. *Down* reads what the first product left, row after row.

A CTA takes row tiles times weight tiles, one after another as far as there are any: how many, only
the device knows. A step is one block of K, 128 elements: 128 bytes of every row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ptxflow.compiler.atoms import at
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir import const, param, special, value, var
from ptxflow.compiler.ir.nodes import CTAID, LANE, WARP, Scalar, Slot, Statement, Storage, Value
from ptxflow.compiler.ir.statements import Body, KernelInfo, Params, elect, loop, parameters, when
from ptxflow.compiler.ir.storage import anywhere, global_tensor, rectangle, slot, smem
from ptxflow.compiler.kernels.moe.decisions import (
    BFLOAT16,
    GATHERS,
    LINES,
    OWN,
    WEIGHTS,
    copiers,
    smem_bytes,
)
from ptxflow.compiler.kernels.moe.problem import BLOCK
from ptxflow.compiler.kernels.moe.shape import TILE_WORDS, Shape
from ptxflow.compiler.launch import Expr, Launch, Param, TensorMapParam, launch_of
from ptxflow.compiler.layout import SmemTile
from ptxflow.compiler.lower import finish, single
from ptxflow.compiler.tile.rings import Ring, Tiles
from ptxflow.compiler.tile.tensors import load_global, store_global
from ptxflow.compiler.tile.values import Float32, Registers, UInt32

ROW = 128  # bytes of a row in a step
GATE_ROWS = 8  # rows of one half that stand together
ENTRIES = {True: "moe_up", False: "moe_down"}


@dataclass(frozen=True)
class Found:
    """What a role, by its letter, knows of its tile: its weights' number, and a line of `work`."""

    who: str
    weight: UInt32
    expert: UInt32
    row: UInt32
    left: UInt32

    @staticmethod
    def of(r: Registers, who: str) -> "Found":
        return Found(who, *(r.uint32() for _ in range(4)))


class Grouped(Shape):
    """Either product."""

    acc: Slot  # sums of all K
    store: Callable[[], Body]  # what becomes of them

    def __init__(self, problem: Problem, s: Strategy, device: Device, up: bool):
        super().__init__(problem, s, device, "u_" if up else "d_")
        self.up, self.entry = up, ENTRIES[up]
        self.consumers: int = s.consumers
        self.consumer_warps = 4 * self.consumers
        self.swapped = bool(s.swap)
        self.k = self.hidden if up else self.inner
        self.n = 2 * self.inner if up else self.hidden
        self.tile_w: int = s.up_tile if up else s.down_tile
        self.stages: int = s.up_stages if up else s.down_stages
        self.lag = min(int(s.lag), self.stages - 1)
        self.scale_sets = 1 if up else BLOCK // self.granule  # of the tokens, in a step
        self.token_tile = SmemTile(self.tile_t, BLOCK, 1, ROW)
        self.weight_tile = SmemTile(self.tile_w, BLOCK, 1, ROW)
        self.tokens = smem("token_tiles", self.token_tile.bytes, self.stages)
        self.weights = smem("weight_tiles", self.weight_tile.bytes, self.stages)
        self.scales = smem("scale_rows", self.scale_sets * self.tile_t * 4, self.stages, align=128)
        self.copiers: int = int(copiers(self.s.fields(), self.device))
        self.gathers = up and not self.copied
        self.source = "inner" if not up else "ordered"  # of rows in the order of experts
        fillers = self.copiers + 1 if self.gathers else 1
        frees = self.consumer_warps + int(device.has_tmem)  # with tcgen05 a commit, too
        self.ring = Ring.of("ring", self.stages, fillers, frees)
        self.steps = const(self.k // BLOCK, "steps")
        self.tiles_w = const(self.n // self.tile_w, "tiles_w")
        self.fed = up and s.get("feeder", GATHERS) == OWN
        self.ahead = int(s.get("ahead", 0)) if up else 0
        self._own_rows = self.tile_t // self.copiers  # rows of the tile that a warp copies
        self.lines = self._own_rows // LINES  # groups of rows that a warp copies together
        scale_words = -(-self._own_rows // 32)  # rows of which a lane copies the scale
        r = self.r
        self.tiles = r.uint32()  # of rows
        self.mine, self.filled, self.feeding = (Found.of(r, who) for who in "cpf")
        self.line_tokens = [r.uint32() for _ in range(self.lines)]
        self.scale_tokens = [r.uint32() for _ in range(scale_words)]

    # -- which tile ----------------------------------------------------------------------------

    def find(self) -> list[Body]:
        """What a role does first."""
        return [self.wait(), self.word(self.tiles, "tiles", 0)]

    @property
    def my_tiles(self) -> Value:
        """How many tiles this CTA takes."""
        ctas, all_tiles = special("ctas"), self.tiles.value * self.tiles_w
        return (all_tiles + (ctas - 1 - CTAID)) // ctas

    def each_tile(self, of: Found, body: Callable[[Value], Body]) -> Statement:
        """`body(sequence number)` for each tile, of which a role keeps what it reads."""
        i = var(f"tile_{of.who}")
        tile = CTAID + i * special("ctas")
        by_weights = self.s.order == WEIGHTS
        across: Scalar = self.tiles_w if by_weights else self.tiles.value
        inner, outer = tile % across, tile // across
        at_row, at_weight = (outer, inner) if by_weights else (inner, outer)
        read = self._read(of.who)
        found = [
            at.mov(of.weight, at_weight) if "weight" in read else None,
            *(
                self.word(getattr(of, name), "work", at_row * TILE_WORDS + word)
                for word, name in enumerate(("expert", "row", "left"))
                if name in read
            ),
        ]
        return loop(i, self.my_tiles, found, body(i), rolled=True)

    def _read(self, who: str) -> str:
        """What a role looks at of a tile."""
        if who == "f":
            return "weight expert"
        if who == "p" and self.fed:
            return "row left"
        return "weight expert row left" if self.gathers or who == "c" else "weight expert row"

    def use(self, sequence: Value, k: Value) -> Value:
        return sequence * self.steps + k

    def multiply(self, sequence: Value) -> list[Body]:
        """A tile: all steps, and what becomes of its sums."""
        k = var("k")
        return [
            at.mov(self.acc, 0),
            loop(k, self.steps, self.step(self.use(sequence, k), k)),
            self.store(),
        ]

    def step(self, use: Value, k: Value) -> list[Body]:
        """A block of K, added to the sums of all."""
        raise NotImplementedError

    # -- filling -------------------------------------------------------------------------------

    def produce(self, first: int) -> list[Body]:
        """What the warps from `first` on do."""
        k = var("k_load")
        if not self.gathers:
            fill = self.each_tile(self.filled, lambda i: self._filled(i, k))
            return [when(WARP.eq(first), self.find(), fill)]
        warp = WARP - first

        def gather(i: Value) -> Body:
            gathered = loop(k, self.steps, self._gather(i, k, warp))
            ahead = None if self.fed else self._prefetch(self.filled, warp)
            return [self._look_up(warp), gathered, ahead]

        uses = self.my_tiles * self.steps
        last = [
            when(const(back) < uses, self._hand_over(uses - 1 - back, back))
            for back in reversed(range(self.lag))
        ]
        copy = when(warp < self.copiers, self.find(), self.each_tile(self.filled, gather), last)
        if not self.fed:
            return [copy]
        fed = when(warp.eq(self.copiers), self.find(), self.each_tile(self.feeding, self._feed))
        return [copy, fed]

    def _feed(self, i: Value) -> list[Body]:
        """The weights of a tile of the first product, by a warp of their own."""
        k = var("k_feed")
        use = self.use(i, k)
        expect = self.ring.expect(use, self.weight_tile.bytes)
        fill = single(self.ring.wait_empty(use), expect, *self._weights(use, k, self.feeding))
        return [loop(k, self.steps, fill), self._prefetch(self.feeding, const(0))]

    def _prefetch(self, of: Found, warp: Value) -> Body:
        """What the second product reads first of a share of the expert's weights, into L2."""
        tall, j = int(self.s.down_tile), var("tile_ahead")
        every = const(self.hidden // tall, "tiles_ahead")
        mine = of.weight.value
        share = (every + (self.tiles_w - 1 - mine)) // self.tiles_w
        row = of.expert.value * self.hidden + (mine + j * self.tiles_w) * tall
        boxes = [
            at.tma_prefetch(
                param("gemm2_weights_map"), k * BLOCK, row, box=(BLOCK, tall), element=1
            )
            for k in range(self.ahead)
        ]
        return elect(warp.eq(0), loop(j, share, boxes, rolled=True)) if boxes else None

    def _weights(self, use: Value, k: Value, of: Found) -> list[Statement]:
        """The TMA of a stage's weights."""
        stage = self.ring.stage(use)
        bar, target = slot(self.ring.full, stage), slot(self.weights, stage)
        expert, tile = of.expert.value, of.weight.value
        box = (BLOCK, self.tile_w)
        if not self.up:
            row = expert * self.n + tile * self.tile_w
            tiles = Tiles("weights", self.ring, self.weights, self.weight_tile)
            return tiles.load(use, k * BLOCK, [row], self.tile_w)
        groups = self.tile_w // (2 * GATE_ROWS)
        place = (k * BLOCK, 0, 0, tile * groups, expert)
        return [at.tma_load_5d(target, param("weights_map"), *place, bar, box=box, element=1)]

    def _filled(self, i: Value, k: Value) -> list[Body]:
        """A tile whose rows are in order."""
        return [
            loop(k, self.steps, single(*self._fill(i, k))),
            self._prefetch(self.filled, const(0)),
        ]

    def _fill(self, i: Value, k: Value) -> list[Statement]:
        """A stage of a product whose rows are in order, by one lane."""
        use = self.use(i, k)
        stage = self.ring.stage(use)
        bar, row = slot(self.ring.full, stage), self.filled.row.value
        each = self.tile_t * 4
        bytes_ = self.token_tile.bytes + self.weight_tile.bytes + self.scale_sets * each
        scales = [
            at.bulk_load(
                slot(self.scales, stage, j * each, each),
                param(f"{self.source}_scale"),
                (k * self.scale_sets + j) * param("rows") + row,
                anywhere(f"{self.source}_scale"),
                bar,
                bytes=each,
                element=4,
            )
            for j in range(self.scale_sets)
        ]
        tokens = at.tma_load_handed(
            slot(self.tokens, stage),
            param(f"{self.source}_map"),
            k * BLOCK,
            row,
            bar,
            anywhere(self.source),
            box=(BLOCK, self.tile_t),
            element=1,
        )
        expect = at.mbar_arrive_expect(bar, bytes=bytes_)
        weights = self._weights(use, k, self.filled)
        return [self.ring.wait_empty(use), expect, *weights, tokens, *scales]

    def _look_up(self, warp: Value) -> list[Statement]:
        """The tokens of a warp's rows: of the lane's lines, and of a row for each lane."""
        first = warp * self._own_rows
        of = self.filled
        rows = [(x, first + LINES * g + (LANE >> 3)) for g, x in enumerate(self.line_tokens)]
        rows += [(x, first + 32 * w + LANE) for w, x in enumerate(self.scale_tokens)]
        return [self.word(x, "tokens", of.row.value + row, row < of.left.value) for x, row in rows]

    def _gather(self, i: Value, k: Value, warp: Value) -> list[Body]:
        """A warp's part of a stage of the first product; the first warp asks for weights, too."""
        use = self.use(i, k)
        stage = self.ring.stage(use)
        first, chunk = warp * self._own_rows, LANE & 7
        expect = self.ring.expect(use, self.weight_tile.bytes)
        copies = []
        for g, token in enumerate(self.line_tokens):
            row = first + LINES * g
            line = row + (LANE >> 3)
            copies.append(
                at.copy_chunks(
                    slot(self.tokens, stage, row * ROW, LINES * ROW),
                    (LANE >> 3) * ROW + ((chunk ^ (line & 7)) << 4),
                    param("hidden_states"),
                    token.value,
                    k * BLOCK + (chunk << 4),
                    1,
                    anywhere("hidden_states"),
                    pitch=self.hidden,
                    element=1,
                )
            )
        scales = [
            at.copy_async(
                slot(
                    self.scales, stage, (first + 32 * w) * 4, min(self._own_rows - 32 * w, 32) * 4
                ),
                LANE << 2,
                param("hidden_states_scale"),
                k * param("seq_len") + token.value,
                self._own_rows - 32 * w > LANE if self._own_rows - 32 * w < 32 else 1,
                anywhere("hidden_states_scale"),
                size=4,
            )
            for w, token in enumerate(self.scale_tokens)
        ]
        before = const(self.lag - 1) < use
        weights = self._weights(use, k, self.filled)
        fill = elect(warp.eq(0), self.ring.wait_empty(use), expect, *weights)
        return [
            None if self.fed else fill,
            self.ring.wait_empty(use),
            copies,
            scales,
            at.copies_commit(),
            when(before, self._hand_over(use - self.lag, self.lag)),
        ]

    def _hand_over(self, use: Value, pending: int) -> list[Statement]:
        return self.ring.landed(use, pending)

    # -- scales --------------------------------------------------------------------------------

    def weight_scale(self, held: Float32, row: Scalar, k: Value) -> Statement:
        """Demand the scale of the weights' rows from `row` on, of the consumer's expert."""
        tensor = "gemm1_weights_scale" if self.up else "gemm2_weights_scale"
        blocks = self.n // BLOCK
        block = self.mine.expert.value * blocks + value(row) // BLOCK
        index = block * (self.k // BLOCK) + k
        return load_global(held.slot, tensor, index)

    def release(self, use: Value) -> list[Statement]:
        """A warp has read its part of a stage, its scales too, which a bulk copy may overwrite."""
        fence = [] if self.gathers else [at.fence_proxy_async()]
        return [*fence, at.warp_sync(), self.ring.release(use)]

    # -- what a tile leaves --------------------------------------------------------------------

    @property
    def first_column(self) -> Value:
        """Of the tile, in what the product leaves."""
        width = self.tile_w // 2 if self.up else self.tile_w
        return self.mine.weight.value * width

    def row(self, inside_tile: Scalar) -> tuple[Value, Value]:
        """A row of the tile among all rows, and whether it is one."""
        row = value(inside_tile)
        return self.mine.row.value + row, row < self.mine.left.value

    def place(self, tensor: str, row: Scalar, column: Scalar, rows: int, columns: int) -> Slot:
        """A part of the tile, for the validator."""
        return rectangle(global_tensor(tensor), self.mine.row.value + row, column, rows, columns)

    def put_scale(
        self, first: Scalar, rows: int, token: Scalar, scale: Slot, mine: Value | None = None
    ) -> Statement:
        """The scale of a lane's token, where it is `mine`; the warp has `rows` from `first` on."""
        (row, inside), tile = self.row(token), self.mine.weight.value
        place = self.place("inner_scale", first, tile, rows, 1)
        index = tile * param("rows") + row
        there = inside if mine is None else inside & mine
        return store_global("inner_scale", index, scale, place, there)

    def put_partial(self, index: Value, inside: Value, place: Slot, held: Slot) -> Statement:
        """One of an expert's outputs, rounded where these are."""
        if self.s.partials == BFLOAT16:
            return at.st_global_narrow(param("partial"), index, inside, place, held, dtype="bf16")
        return store_global("partial", index, held, place, inside)

    # -- the whole -----------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        if self.up:
            maps = "weights_map gemm2_weights_map" if self.ahead else "weights_map"
            if self.copied:
                return parameters(
                    f"{maps} ordered_map: map, ordered_scale gemm1_weights_scale work tiles inner "
                    "inner_scale: ptr, rows: u32"
                )
            return parameters(
                f"{maps}: map, hidden_states hidden_states_scale gemm1_weights_scale tokens work "
                "tiles inner inner_scale: ptr, seq_len rows: u32"
            )
        return parameters(
            "weights_map inner_map: map, inner_scale gemm2_weights_scale work tiles partial: ptr, "
            "rows: u32"
        )

    def whole(
        self, warps: int, storage: Sequence[Storage], *roles: Statement, drained: bool = False
    ) -> Statement:
        """The lowered kernel."""
        storage = (
            self.ring.full,
            self.ring.empty,
            self.scales,
            *storage,
            self.tokens,
            self.weights,
            *self.r.storage,
        )
        info = KernelInfo(
            self.entry, self.device.arch, warps, 1, self.params, storage, dependent=self.dependent
        )
        return finish(info, *roles, drained=drained)

    def launch(self) -> Launch:
        tiles = f"{self.row_tiles} * {self.n // self.tile_w}"
        ctas = self.device.sms * int(self.s.get("up_ctas" if self.up else "down_ctas", 1))
        grid = f"min({ctas}, {tiles})" if self.s.persistent else tiles
        maps = {"weights_map": self._weights_map, f"{self.source}_map": self._rows_map}
        maps["gemm2_weights_map"] = self._down_map
        given: dict[str, Param | Expr] = {**maps, "rows": self.rows}
        shared, warps = int(smem_bytes(self.s.fields(), self.up)), self.consumer_warps + 4
        late = self.dependent
        return launch_of(self.entry, grid, warps, self.params, given, shared, dependent=late)

    @property
    def _weights_map(self) -> TensorMapParam:
        """Of the first product: K, eight rows, both halves, groups of eight rows, experts."""
        k, n, tile = self.k, self.n, self.tile_w
        if not self.up:
            return self._down_map
        half, groups = n // 2, n // (2 * GATE_ROWS)
        dims = (k, GATE_ROWS, 2, groups, self.local)
        strides = (k, half * k, GATE_ROWS * k, n * k)
        box = (BLOCK, GATE_ROWS, 2, tile // (2 * GATE_ROWS), 1)
        shape = tuple(map(str, dims)), tuple(map(str, strides))
        return TensorMapParam("gemm1_weights", "uint8", *shape, box, ROW, self.promotion)

    @property
    def _down_map(self) -> TensorMapParam:
        """Of the second product: K, rows of all experts."""
        k, box = str(self.inner), (BLOCK, int(self.s.down_tile))
        rows = k, str(self.local * self.hidden)
        return TensorMapParam("gemm2_weights", "uint8", rows, (k,), box, ROW, self.promotion)

    @property
    def _rows_map(self) -> TensorMapParam:
        k, box = str(self.k), (BLOCK, self.tile_t)
        return TensorMapParam(self.source, "uint8", (k, self.rows), (k,), box, ROW)
