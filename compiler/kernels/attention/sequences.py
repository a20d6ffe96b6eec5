"""Sequences over a page table and packed queries, as kernels find them: lengths, pages, chunks of
tokens, tiles of queries.

Lengths are data, so the host launches as many CTAs as chunks there can be: see `Search`.
"""

from ptxflow.compiler.atoms import at
from ptxflow.compiler.ir import frag, loop, slot, value_of
from ptxflow.compiler.ir.nodes import LANE, Scalar, Statement, Storage, Value, value, var
from ptxflow.compiler.launch import Expr, InputParam, Param
from ptxflow.compiler.tile.tensors import load_global

WORD = 4  # bytes of an index
SCALE: dict[str, Param | Expr] = {"sm_scale": InputParam("sm_scale", "float32")}


class Search:
    """Finds the sequence of a CTA's place, where a sequence has a place for each part of it.

    The sequences of `tensor` [sequences + 1], which says where they begin, are cut into parts of
    `size`, in units of which an entry of the tensor has `scale`. Part j of sequence b is at place
    begin(b) * scale // size + b + j: distinct for all, and in order of b, because
    floor(x) + floor(y) <= floor(x + y) and ceil(y) <= floor(y) + 1. So a CTA counts the sequences
    whose first place is not above its own, `wave` times 32 at a time. `prefix` keeps registers of
    two searches apart.
    """

    def __init__(
        self,
        tensor: str,
        size: int,
        scale: int = 1,
        prefix: str = "",
        wave: int = 1,
        word: int = WORD,
    ):
        self.word = word  # bytes of an entry, the low 32 bits of which count
        self.tensor, self.size, self.scale, self.prefix = tensor, size, scale, prefix
        self.wave, self.before, self.which = wave, self.register("before"), self.register("which")
        # the registers with where sequences begin
        self.starts = tuple(self.register(f"start{i or ''}") for i in range(wave))
        self.storage = (*self.starts, self.before, self.which)

    def register(self, name: str) -> Storage:
        return frag(self.prefix + name, 1, "b32")

    def place(self, begin: Value, sequence: Scalar) -> Value:
        """The first place of a sequence."""
        return begin * self.scale // self.size + sequence

    def find(self, place: Scalar, count: Value) -> tuple[list[Statement], Value]:
        """Statements that find the sequence of a place, and the sequence; `count`: of sequences."""
        before, which = self.before, self.which
        base = var(self.prefix + "base")
        loads, counts = list[Statement](), list[Statement]()
        for i, start in enumerate(self.starts):
            there = base + (LANE + 32 * i)
            inside = there < count
            counted = inside & (self.place(value_of(start), there) < value(place) + 1)
            loads.append(load_global(slot(start), self.tensor, there, inside, None, self.word))
            counts.append(at.count_lanes(slot(before), counted))
        body = [
            at.mov(slot(before), 0),
            loop(base, count, loads, counts, step=32 * self.wave, rolled=self.wave > 1),
            at.copy(slot(which), slot(before), found=(self.tensor, 1, count)),
        ]
        return body, value_of(which) - 1


class Sequences:
    """The sequences of a kernel; `prefix` keeps registers of two kernels of a program apart.

    Tensors: kv_indptr [sequences + 1]; where a page holds more than a token, kv_last_page_len.
    `wave`: how many times 32 sequences are looked up at a time.
    """

    def __init__(self, page_size: int, chunk: int, prefix: str = "", wave: int = 1):
        self.page_size, self.chunk = page_size, chunk  # tokens
        self.search = Search("kv_indptr", chunk, page_size, prefix, wave)
        names = ("begin", "end", "last")[: 3 if page_size > 1 else 2]
        self.bounds = tuple(map(self.search.register, names))
        self.storage = (*self.bounds, *self.search.storage)
        self.tables = ("kv_indptr", "kv_last_page_len")[: 2 if page_size > 1 else 1]
        self.begin = value_of(self.bounds[0])  # the first entry of its page table
        pages = value_of(self.bounds[1]) - self.begin
        full = (pages - 1) * page_size + value_of(self.bounds[-1])
        self.tokens = pages if page_size == 1 else pages.min(1) * full  # 0 where it has no page
        self.chunks = (self.tokens + (chunk - 1)) // chunk

    # -- on the host ---------------------------------------------------------------------------

    def places(self) -> Expr:
        """The most chunks there can be."""
        return f"(num_kv_indices * {self.page_size} // {self.chunk} + batch_size)"

    # -- on the device -------------------------------------------------------------------------

    def find(self, place: Scalar, count: Value) -> tuple[list[Statement], Value]:
        """Statements that find the sequence of a place, and the sequence; `count`: of sequences."""
        return self.search.find(place, count)

    def lengths(self, sequence: Scalar) -> list[Statement]:
        """Statements that load where a sequence's pages begin and end."""
        places = (sequence, value(sequence) + 1, sequence)
        tables = ("kv_indptr", "kv_indptr", "kv_last_page_len")
        return [load_index(*each) for each in zip(self.bounds, tables, places, strict=False)]

    def first_place(self, sequence: Scalar) -> Value:
        """The place of its first chunk."""
        return self.search.place(self.begin, sequence)

    def page(
        self, register: Storage, token: Value, inside: Scalar = 1, unread: bool = False
    ) -> Statement:
        """Loads the page of a token; `unread`: the last that is loaded is not used."""
        index = self.begin + token // self.page_size
        return load_index(register, "kv_indices", index, inside, unread)

    def row(self, page: Value, token: Value) -> Value:
        """A token's row in the cache, of all tokens of all pages."""
        return page * self.page_size + token % self.page_size


def load_index(
    register: Storage, tensor: str, index: Scalar, inside: Scalar = 1, unread: bool = False
) -> Statement:
    """Loads an entry of a table; `unread`: the last that is loaded is not used."""
    said = {"unread": "dst"} if unread else {}
    return load_global(slot(register), tensor, index, inside, None, WORD, **said)


class QueryTiles:
    """Tiles of `tile` queries of one sequence; `prefix` keeps registers of two searches apart.

    Tensor: qo_indptr [sequences + 1].
    """

    def __init__(self, tile: int, prefix: str = ""):
        self.tile, self.search = tile, Search("qo_indptr", tile, prefix=prefix + "q_")
        # the registers with where a sequence's queries begin and end
        self.bounds = self.search.register("begin"), self.search.register("end")
        self.storage = (*self.search.storage, *self.bounds)
        self.begin = value_of(self.bounds[0])  # the row of its first query
        self.count = value_of(self.bounds[1]) - self.begin  # how many queries it has

    def places(self, sequences: str) -> str:
        """The most tiles there can be, as an expression of the launch."""
        return f"total_q // {self.tile} + {sequences}"

    def find(self, place: Scalar, count: Value) -> tuple[list[Statement], Value]:
        """Statements that find the sequence of a place, and the sequence; `count`: of sequences."""
        return self.search.find(place, count)

    def lengths(self, sequence: Value) -> list[Statement]:
        """Statements that load where a sequence's queries begin and end."""
        return [
            load_index(register, "qo_indptr", sequence + i)
            for i, register in enumerate(self.bounds)
        ]

    def first(self, place: Scalar, sequence: Value) -> Value:
        """The first query of the tile at a place, of its sequence's."""
        return (value(place) - self.search.place(self.begin, sequence)) * self.tile
