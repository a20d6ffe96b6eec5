"""Where a library's outputs differ from our reference: what records keep of it, and its text.

A library that is timed all the same says here how it differs, each output apart. Neither torch nor
a GPU is needed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]
#: by output that is not as the reference: `beyond` elements of `total` outside the tolerance of a
#: library, the largest `error`, and that over the tolerance (`times`; both None where an element is
#: drawn or not finite). None instead where the library does not compute the output at all.
Outputs = Mapping[str, Json | None]


def describe(outputs: Outputs) -> str:
    """`lse: 3 of 2,048 elements beyond tolerance, by 0.0012 at most (5.1 times it); o: ...`."""
    return "; ".join(f"{name}: {_one(found)}" for name, found in outputs.items())


def _one(found: Json | None) -> str:
    if found is None:
        return "not computed"
    text = f"{found['beyond']:,} of {found['total']:,} elements beyond tolerance"
    if found["error"] is None:
        return text
    return f"{text}, off by {found['error']:.2g} at most, {found['times']:.2g} times what it allows"


def named(baseline: str, disagree: Mapping[str, Outputs]) -> str:
    """The baseline's name, and how it differs in brackets: `fa2 (lse: 3 of ...)`."""
    return f"{baseline} ({describe(disagree[baseline])})" if baseline in disagree else baseline


def merge(several: Iterable[Outputs]) -> Outputs:
    """Of several workloads: elements added up, the largest errors. Missing outputs stay missing."""
    found: dict[str, Json | None] = {}
    for outputs in several:
        for name, one in outputs.items():
            before = found.get(name)
            found[name] = one if one is None or before is None else _sum(before, one)
    return found


def _sum(a: Json, b: Json) -> Json:
    """Without an error where either has none: it is not known which is the larger."""
    counts = {name: a[name] + b[name] for name in ("beyond", "total")}
    known = None not in (a["error"], b["error"])
    largest = {name: max(a[name], b[name]) if known else None for name in ("error", "times")}
    return counts | largest
