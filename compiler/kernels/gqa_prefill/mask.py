"""A mask that is given as text (see `tile.text`): which keys a query sees, beside causality.

It is a condition on whole numbers: `q` and `k`, the places of the query and of the key among the
tokens of their sequence, from 0; `keys`, how many tokens it has, and `queries`, how many of these,
the last ones, ask. There are + - * // %, min and max, comparisons, and, or, not; // and % are by a
number above 0, and round down. A window of 256 keys is `q - k < 256`, beside four that all see
`or k < 4`; documents of 512 tokens are `q // 512 == k // 512`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxflow.compiler.ir.nodes import Op, Value, const
from ptxflow.compiler.tile import whole
from ptxflow.compiler.tile.text import Body, Language, Refused
from ptxflow.compiler.tile.whole import FUNCTIONS, OPERATORS, TOKENS, Span, Truth, span

NAMES = ("q", "k", "queries", "keys")
LANGUAGE = Language("a mask", NAMES, OPERATORS, FUNCTIONS, whole=True)


@dataclass(frozen=True)
class Mask:
    """See the module."""

    text: str
    body: Body

    @staticmethod
    def parse(text: str) -> "Mask":
        """Raises Refused."""
        body = LANGUAGE.parse(text)
        some = Span(0, TOKENS)
        given = dict.fromkeys(NAMES, some) | {"q": Span(-TOKENS, TOKENS)}
        found = LANGUAGE.evaluate(body, given, lambda x: span(x, x), whole.SPANS)
        if isinstance(found, Span):
            raise Refused("a mask is a condition, and this is a number")
        if not LANGUAGE.named(body) & {"q", "k"}:
            raise Refused("a mask says something of q or of k")
        return Mask(text, body)

    def sees(self, q: Any, k: Any, queries: int, keys: int) -> Any:
        """Of NumPy's integers: where a query sees a key, if causality lets it."""
        held = dict(zip(NAMES, (q, k, queries, keys), strict=True))
        found = LANGUAGE.evaluate(self.body, held, int, whole.MEANS)
        return np.broadcast_to(found, np.broadcast_shapes(np.shape(q), np.shape(k)))

    def condition(self, given: Mapping[str, Value]) -> Value:
        """The same in a kernel, of its values. Raises Refused where it is always so, or never."""
        found: Truth = LANGUAGE.evaluate(self.body, given, const, whole.VALUES)
        if found.yes.op is Op.CONST:
            raise Refused(f"a mask that is always {bool(found.yes.arg[0])}")
        return found.yes
