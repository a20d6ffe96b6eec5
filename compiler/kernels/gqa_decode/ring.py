"""A warp's ring: it finds the rows of the cache that its tokens have, and copies them by cp.async.

Pages of a tile are asked for a turn before its rows are. Warps share nothing.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, param
from ptxflow.compiler.ir.statements import when
from ptxflow.compiler.ir.storage import anywhere, slot, smem
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.gqa_decode.decisions import pitch, stage_bytes
from ptxflow.compiler.kernels.gqa_decode.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_decode.shape import Shape
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import APART
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import WARP as WARP_SIZE
from ptxflow.compiler.tile.values import UInt32, emit, traced, where

CHUNK = 16  # bytes of a copy


class Ring:
    """Tiles of keys and values of a warp, of the key heads from `head` on.

    `pitch`, `bytes`: of a token's row in a tile, and of a tile.
    """

    def __init__(self, shape: Shape, sequences: Sequences, head: UOp):
        s, f = shape.s, shape.s.fields()
        self.r, self.sequences, self.head = shape.r, sequences, head
        self.tokens, self.key_heads, self.size = sequences.tokens, shape.key_heads, shape.size
        self.tile, self.stages, self.apart = int(s.tile), int(s.stages), s.arrival == APART
        self.pitch = int(pitch(f, shape.problem))
        self.bytes = int(stage_bytes(f, shape.problem))
        self.row_bytes = int(s.heads) * self.size * ELEMENT
        self.keys, self.values = (
            smem(name, int(s.warps) * self.bytes, self.stages, align=128)
            for name in ("keys", "values")
        )
        self._groups = 2 if self.apart else 1  # groups of copies for a tile

    def ask_if(self, t: UOp, tiles: UOp, stage: Value, mark: str, first: UOp) -> None:
        """Asks for tile t. Waits count groups whether there is a tile or not."""
        with where(t < tiles):
            self.ask(stage, mark, first)
        if nothing := traced(self.skip):
            emit(when(t >= tiles, nothing))

    def skip(self) -> None:
        """Empty groups in place of a tile's; a wait for the only tile there is does not count."""
        if self.stages > 1:
            emit([at.copies_commit() for _ in range(self._groups)])

    def _lane_tokens(self, first: UOp) -> list[UOp]:
        """The tokens whose rows this lane finds; past the end the last one again."""
        count = -(-self.tile // WARP_SIZE)
        return [(first + (i * WARP_SIZE + LANE)).min(self.tokens - 1) for i in range(count)]

    def _page(self, mark: str, i: int) -> UInt32:
        """The page of a lane's token."""
        return self.r.uint32(name=f"page_{mark}_{i}")

    def pages(self, mark: str, first: UOp, unread: bool = False) -> None:
        """Asks for the pages of a tile."""
        for i, token in enumerate(self._lane_tokens(first)):
            page = self._page(mark, i).slot.src[0]
            emit(self.sequences.page(page, token, first < self.tokens, unread))

    def next_pages(self, first: UOp) -> None:
        """Takes over the pages asked for a tile ago, and asks for those of a tile on."""
        for i in range(-(-self.tile // WARP_SIZE)):
            self._page("next", i).set(self._page("ahead", i))
        self.pages("ahead", first, unread=True)

    def buffer(self, storage: UOp, stage: UOp) -> UOp:
        """What a warp has of a stage."""
        return slot(storage, stage, WARP * self.bytes, self.bytes)

    def ask(self, stage: Value, mark: str, first: UOp) -> None:
        """Copies the rows of a tile, 16 bytes a lane: lanes side by side on a token's row."""
        pieces = self.row_bytes // CHUNK  # of a token
        span = min(pieces, WARP_SIZE)  # lanes side by side on a token
        lane_offset = LANE // span * self.pitch + (LANE % span << 4)
        rows = self._rows(mark, first, pieces)
        for storage, tensor in ((self.keys, "k_cache"), (self.values, "v_cache")):
            for n, row in enumerate(rows):
                token, piece = divmod(n * WARP_SIZE, pieces)
                row_end = self.pitch if piece + span == pieces else span * CHUNK
                begin = WARP * self.bytes + (token * self.pitch + piece * CHUNK)
                place = slot(storage, stage, begin, row_end + (WARP_SIZE // span - 1) * self.pitch)
                index = row * (self.size * ELEMENT // CHUNK) + ((LANE + piece) % pieces)
                emit(at.copy_async(place, lane_offset, param(tensor), index, anywhere(tensor)))
            if self.apart or storage is self.values:
                emit(at.copies_commit())

    def _rows(self, mark: str, first: UOp, pieces: int) -> list[UOp]:
        """The rows of the cache that a lane's pieces of a tile come from: each lane finds those of
        its tokens, then hears whose it copies."""
        rows, out = list[UInt32](), list[UOp]()
        for i, token in enumerate(self._lane_tokens(first)):
            row = self.sequences.row(self._page(mark, i).value, token)
            rows.append(self.r.uint32(row * self.key_heads + self.head))
        for n in range(self.tile * pieces // WARP_SIZE):
            token, own = (n * WARP_SIZE + LANE) // pieces, self.r.uint32()
            source = rows[n * WARP_SIZE // pieces // WARP_SIZE]
            emit(at.shuffle_from(own.slot, source.slot, token & 31))
            out.append(own.value)
        return out

    def wait(self, values: bool) -> None:
        """Until the keys, or the values, of a tile have landed, for all lanes."""
        later = (self.stages - 1) * self._groups  # of the tiles behind it in the ring
        pending = later + (1 if self.apart and not values else 0)
        emit(at.copies_wait(pending=pending), at.warp_sync())
