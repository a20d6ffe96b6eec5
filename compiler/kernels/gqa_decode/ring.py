"""A warp's ring: it finds the rows of the cache that its tokens have, and copies them by cp.async.

Pages of a tile are asked for a turn before its rows are. Warps share nothing.
"""

from __future__ import annotations

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir.nodes import LANE, WARP, UOp, Value, param
from ptxflow.compiler.ir.statements import Body, when
from ptxflow.compiler.ir.storage import anywhere, slot, smem, value_of
from ptxflow.compiler.kernels.attention.sequences import Sequences
from ptxflow.compiler.kernels.gqa_decode.decisions import pitch, stage_bytes
from ptxflow.compiler.kernels.gqa_decode.problem import ELEMENT
from ptxflow.compiler.kernels.gqa_decode.shape import Shape
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import APART
from ptxflow.compiler.kernels.gqa_decode.warpgroup_decisions import WARP as WARP_SIZE

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

    def ask_if(self, t: UOp, tiles: UOp, stage: Value, mark: str, first: UOp) -> list[UOp]:
        """Asks for tile t. Waits count groups whether there is a tile or not."""
        out = [when(t < tiles, self.ask(stage, mark, first))]
        nothing = self.skip()
        return [*out, when(t >= tiles, nothing)] if nothing else out

    def skip(self) -> list[UOp]:
        """Empty groups in place of a tile's; a wait for the only tile there is does not count."""
        return [at.copies_commit() for _ in range(self._groups)] if self.stages > 1 else []

    def _lane_tokens(self, first: UOp) -> list[UOp]:
        """The tokens whose rows this lane finds; past the end the last one again."""
        count = -(-self.tile // WARP_SIZE)
        return [(first + (i * WARP_SIZE + LANE)).min(self.tokens - 1) for i in range(count)]

    def _page(self, mark: str, i: int) -> UOp:
        """The register with the page of a lane's token."""
        return self.r(f"page_{mark}_{i}", 1)

    def pages(self, mark: str, first: UOp, unread: bool = False) -> list[UOp]:
        """Asks for the pages of a tile."""
        return [
            self.sequences.page(self._page(mark, i).src[0], token, first < self.tokens, unread)
            for i, token in enumerate(self._lane_tokens(first))
        ]

    def next_pages(self, first: UOp) -> list[UOp]:
        """Takes over the pages asked for a tile ago, and asks for those of a tile on."""
        count = -(-self.tile // WARP_SIZE)
        copies = [at.copy(self._page("next", i), self._page("ahead", i)) for i in range(count)]
        return [*copies, *self.pages("ahead", first, unread=True)]

    def buffer(self, storage: UOp, stage: UOp) -> UOp:
        """What a warp has of a stage."""
        return slot(storage, stage, WARP * self.bytes, self.bytes)

    def ask(self, stage: Value, mark: str, first: UOp) -> Body:
        """Copies the rows of a tile, 16 bytes a lane: lanes side by side on a token's row."""
        out: list[Body] = [self._rows(mark, first)]
        pieces = self.row_bytes // CHUNK  # of a token
        span = min(pieces, WARP_SIZE)  # lanes side by side on a token
        lane_offset = LANE // span * self.pitch + (LANE % span << 4)
        for storage, tensor in ((self.keys, "k_cache"), (self.values, "v_cache")):
            for n in range(self.tile * pieces // WARP_SIZE):
                token, piece = divmod(n * WARP_SIZE, pieces)
                row_end = self.pitch if piece + span == pieces else span * CHUNK
                begin = WARP * self.bytes + (token * self.pitch + piece * CHUNK)
                extent = row_end + (WARP_SIZE // span - 1) * self.pitch
                index = value_of(self._row(mark, n)) * (self.size * ELEMENT // CHUNK)
                out.append(
                    at.copy_async(
                        slot(storage, stage, begin, extent),
                        lane_offset,
                        param(tensor),
                        index + ((LANE + piece) % pieces),
                        anywhere(tensor),
                    )
                )
            if self.apart or storage is self.values:
                out.append(at.copies_commit())
        return out

    def _rows(self, mark: str, first: UOp) -> list[UOp]:
        """Rows of the cache: each lane finds those of its tokens, then hears whose it copies."""
        out, rows = list[UOp](), list[UOp]()
        for i, token in enumerate(self._lane_tokens(first)):
            rows.append(self.r(f"row_{mark}_{i}", 1))
            page = value_of(self._page(mark, i))
            out.append(
                at.mov(rows[-1], self.sequences.row(page, token) * self.key_heads + self.head)
            )
        pieces = self.row_bytes // CHUNK
        for n in range(self.tile * pieces // WARP_SIZE):
            token = (n * WARP_SIZE + LANE) // pieces
            source = rows[n * WARP_SIZE // pieces // WARP_SIZE]
            out.append(at.shuffle_from(self._row(mark, n), source, token & 31))
        return out

    def _row(self, mark: str, n: int) -> UOp:
        """The row that the lane's n-th piece of a tile comes from."""
        return self.r(f"from_{mark}_{n}", 1)

    def wait(self, values: bool) -> list[UOp]:
        """Until the keys, or the values, of a tile have landed, for all lanes."""
        later = (self.stages - 1) * self._groups  # of the tiles behind it in the ring
        pending = later + (1 if self.apart and not values else 0)
        return [at.copies_wait(pending=pending), at.warp_sync()]
