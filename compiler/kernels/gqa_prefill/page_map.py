"""An index map that is given as text (see `tile.text`): which entry of the page table holds a page.

The table is then [sequences, width], and kv_indptr says alone how many pages each sequence has. The
map is a whole number of `page`, a page's place among those of its sequence, from 0, and `pages`,
how many these are; there are + - * // %, min and max. It must lie from 0 to width - 1 for all that
they can be, which is proven before anything is built. A row a sequence, 64 entries wide, is
`min(page, 63)`; a ring of 8 pages is `page % 8`, behind one that stays
`min(page, 1) + max(page - 1, 0) % 7`. What a later page of a ring took from an earlier one, a mask
should hide.
"""

from dataclasses import dataclass
from typing import Any

from ptxflow.compiler.ir.nodes import Value, const
from ptxflow.compiler.tile import whole
from ptxflow.compiler.tile.text import Body, Language, Refused
from ptxflow.compiler.tile.whole import FUNCTIONS, NUMBERS, TOKENS, Span, span

NAMES = ("page", "pages")
LANGUAGE = Language("an index map", NAMES, NUMBERS, FUNCTIONS, whole=True)
WIDEST = 2**16  # entries of a sequence


@dataclass(frozen=True)
class PageMap:
    """See the module."""

    text: str
    body: Body
    width: int

    @staticmethod
    def parse(text: str, width: int) -> "PageMap":
        """Raises Refused."""
        if not 1 <= width <= WIDEST:
            raise Refused(f"a sequence has 1 to {WIDEST} entries, not {width}")
        body = LANGUAGE.parse(text)
        given = dict.fromkeys(NAMES, Span(0, TOKENS))
        found: Span = LANGUAGE.evaluate(body, given, lambda x: span(x, x), whole.SPANS)
        if "page" not in LANGUAGE.named(body):
            raise Refused("an index map says something of page")
        if found.low < 0 or found.high >= width:
            raise Refused(
                f"the map can be {found.low} to {found.high}, and a sequence has the entries 0 to "
                f"{width - 1}: % {width}, or min and max, keep it there"
            )
        return PageMap(text, body, width)

    def entry(self, page: Any, pages: int) -> Any:
        """Of NumPy's integers: the entry of each page, in its sequence's row."""
        held = {"page": page, "pages": pages}
        return LANGUAGE.evaluate(self.body, held, int, whole.MEANS)

    def place(self, sequence: Value, page: Value, pages: Value) -> Value:
        """The same in a kernel, in the whole table."""
        held = {"page": page, "pages": pages}
        found: Value = LANGUAGE.evaluate(self.body, held, const, whole.VALUES)
        return sequence * self.width + found
