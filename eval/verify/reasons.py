"""Why mutants of values that nothing kills compute the same: classes of them.

A class is a reading of the statement and of what changes there, not a proof. A mutant is of the
first class whose pattern its family and text have; one of no class is to be looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

OPEN = "to be looked at"
#: (reason, pattern of `family: kind change, where,: statement`)
REASONS: tuple[tuple[str, str], ...] = (
    ("a bound of float32's rounding: eps and the last terms of a series, a threshold below them",
     r": scale summand .*fma_(constants|plus)|sampling: scale .*mov\(floor\)"),
    ("what a first maximum, below all scores, or a sum, times 0 at the first step, begins with",
     r": scale .*mov\(\w*(row_max|sums|row_sum)\w*\)"),
    ("a load of a row that is masked, or weighed with 0, where the index is past the last",
     r"(inside|index),.*: ld_global\(\w*(stats|sums|packed|partial)\w*|hide\("),
    ("an index past the end is clamped: the row is read and weighed with 0",
     r": .*min.*in index,.*copy_async\("),
    ("a sum in place of a maximum that only scales, or a copy of what is not negative",
     r": instruction as (sum_f32|relu_f32|exp2_gap|copy)\b"),
    ("a ring that no problem of this kernel's constants turns twice, or of one stage",
     r": (parity|stage) .*(mbar_|wgmma|tcgen05|ldmatrix|ld_shared)"),
    ("another thread does it: any one of the warp or CTA may",
     r": bound 0 to 1 in eq in condition.*(mbar_init|tmem_alloc|st_shared|tma|bulk)"
     r"|: digit .* in and in condition.*bulk_wait|: bound \d+ to \d+ in eq in condition.*tma_load"),
    ("every value but 0 is true", r": bound \d+ to \d+ as condition"),
    ("more rows are cleared, or cleared again, that hold no key", r"clear_rows\("),
    ("a lane's number in a warp is taken modulo 32, or a bit of it",
     r"(shuffle_from|shuffle_xor)\("),
    ("an element past the last is told from none by another test, or written where nobody reads",
     r": bound .*in inside,.*(st_global|sort_key)|sort_key\(|zero_shared\("),
    ("CTAs of a row ask for the same numbers", r"sampling: digit .*(philox|settle)\("),
    ("tiles, loads or trips more, of nothing: TMA clips, masks hide",
     r": (offset|digit|bound|operator|variable) .*(in stop|as step|in c1|in condition)"),
)  # fmt: skip


def reason(family: str, text: str) -> str:
    """The class of a mutant that nothing kills."""
    told = f"{family}: {text}"
    return next((why for why, pattern in REASONS if re.search(pattern, told)), OPEN)


def counted(mutants: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How many of these (family, text) are of each class, most first."""
    return dict(Counter(reason(*one) for one in mutants).most_common())
