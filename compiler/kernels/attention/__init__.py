"""What attention families share: sequences over page tables, and the problems they are tried on."""

from ptxflow.compiler.family import PartialSums, Problem, Size

UNLIKE = 120  # tokens behind full pages of a sequence, the last of an MMA's eight rows; or only one
BEHIND = 32  # sequences without a token, before those whose sums are added up


def sized(
    p: Problem, sequences: int, queries: int, tokens: int, least: int = 1, spare: int = 2
) -> dict[str, int]:
    """Those axes of a problem that say how many sequences there are, and in all queries and tokens,
    which take `least` pages or more; `spare` ones are no sequence's."""
    own = dict(p.axes)
    pages = max(least, -(-tokens // own.get("page_size", 1)))
    axes = {
        "batch_size": sequences,
        "len_indptr": sequences + 1,
        "total_q": queries,
        "num_kv_indices": pages,
        "num_pages": pages + spare,
        "total_kv": tokens,
    }
    return {name: n for name, n in axes.items() if name in own}


def held_of(page_size: int, tokens: int, prefix: str = "") -> dict[str, int]:
    """What registers hold of a sequence of so many tokens: see `Sequences`."""
    pages = -(-tokens // page_size)
    last = {f"{prefix}last": tokens - (pages - 1) * page_size if pages else 0}
    return {f"{prefix}begin": 0, f"{prefix}end": pages, **(last if page_size > 1 else {})}


def summed(p: Problem, chunk: int, loads: int, warps: int = 1) -> Size:
    """Sequences in chunks, whose numbers leave every remainder by `loads`, which a warp loads at a
    time, end in any of `warps`, in its first turn or the second, the first where a chunk of a token
    less would; beside one chunk, and none. Last ones are full, so that a row which nobody writes
    follows, or lack a token; but a page in one, so that the last begins at a chunk's edge, and a
    token in the last. BEHIND are before all, so that rows are more than the CTAs of one."""
    page, last = p["page_size"], max(2, loads) - 1
    turns = (*(3 * i % (2 * warps) for i in range(last)), 2 * warps - 1)
    each = ((2 + i + loads * turn) * chunk for i, turn in enumerate(turns))
    short = (n * chunk - 1 for n in range(2, last + 3))
    lengths = (*[0] * BEHIND, 1, page * (chunk - 2), 0, *each, *short, chunk + page, 2 * chunk + 1)
    pages = sum(-(-n // page) for n in lengths)
    return Size(sized(p, len(lengths), 0, pages * page), sums=PartialSums(chunk, lengths))


def rows_of(p: Problem, *rows: tuple[int, int]) -> Size:
    """Sequences of so many queries and keys each."""
    page = dict(p.axes).get("page_size", 1)
    tokens = sum(-(-keys // page) * page for _, keys in rows)
    return Size(sized(p, len(rows), sum(n for n, _ in rows), tokens, spare=3), sequences=rows)


def few(count: int, most: int = 4) -> list[int]:
    """2 to `most` of so many, or 1 of one, and all of them."""
    return sorted({min(n, count) for n in range(2, most + 1)} | {count})
