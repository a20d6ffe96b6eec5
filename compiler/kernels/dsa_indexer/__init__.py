"""The indexer of sparse attention: scores of all cached tokens, and the best of each sequence."""

from dataclasses import replace

from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Family, Kernels, Problem, Size, Strategy, Trial, Trials, Trip
from ptxflow.compiler.ir import Statement, program
from ptxflow.compiler.kernels.dsa_indexer import blackwell, cost, decisions, hopper
from ptxflow.compiler.kernels.dsa_indexer.problem import SCHEMA
from ptxflow.compiler.kernels.dsa_indexer.score import ENTRY, SCORES
from ptxflow.compiler.kernels.dsa_indexer.select import ENTRY as SELECT
from ptxflow.compiler.kernels.dsa_indexer.select import VECTOR, Select
from ptxflow.compiler.launch import Launch

TRIAL_TOPK, TRIAL_SORTED = 64, decisions.MAX_RANKED + 32
MOST_SWEPT = 1 << 14  # tokens of a sweep's turn that is emulated twice
MANY = 2 + 32  # sequences, two of which have tokens
MOST_TURNS = 3  # of an abstract run through a list
MOST_LEVELS = 7  # of one that sorts: two through shared memory, of which one takes two steps
Score = blackwell.Kernel | hopper.Kernel


def scorer(p: Problem, s: Strategy, device: Device) -> Score:
    return blackwell.Kernel(p, s, device) if device.has_tmem else hopper.Kernel(p, s, device)


def build(p: Problem, s: Strategy, device: Device) -> Statement:
    """The lowered kernels: scores, then the choice."""
    return program(scorer(p, s, device).build(), Select(p, s, device).build())


def trips(p: Problem, s: Strategy, device: Device) -> list[Trip]:
    """Of scores: no token, rings that are not filled, filled, and past their second turn, with
    tails. Of the choice: no token; few, which are all listed; many, in one turn and more, of which
    the first digit is enough, or all are needed."""
    k, c = scorer(p, s, device), Select(p, s, device)
    most = k.span // k.tile
    steps = {0, 1, k.stages - 1, k.stages, k.stages + 1, 2 * k.stages + 1, most}
    out = [_score_trip(k, n, tail) for n in sorted(steps) if n <= most for tail in (0, 1)[: n + 1]]
    each = VECTOR * c.loads * c.threads * c.ctas
    many = c.slots + 1
    out += [_select_trip(c, length, 0) for length in (0, 1, c.slots, many)]
    return [*out, _select_trip(c, max(many, 2 * each + 1), many)]


def _score_trip(k: Score, steps: int, tail: int) -> Trip:
    """So many tiles, the last of which lacks `tail` tokens."""
    length = steps * k.tile - tail
    values = {"length": length, "spans": 1, "width": k.span // k.page + 1}
    written = ((SCORES, 1, length),) if length else ()
    name = f"{steps} tiles" + (", a tail" if tail else "")
    return Trip(name, tuple(values.items()), written, ENTRY)


def _select_trip(c: Select, length: int, left: int) -> Trip:
    """A sequence of so many tokens; `left`: those that are not below the bound, at every digit."""
    listed = min(length, c.slots)
    values = {
        "s_length": length,
        "s_left": left,
        "s_listed": listed,
        "s_turns": min(listed, MOST_TURNS),  # of eight entries; more read the same list as often
        "s_levels": min((max(listed, 1) - 1).bit_length(), MOST_LEVELS),
        "width": -(-length // c.page) + 1,
        **{f"s_near{i}": 1 for i in range(c.loads)},
    }
    name = f"{length} tokens" + (", by all digits" if left else "")
    return Trip(name, tuple(values.items()), (("topk_indices", 1, c.topk),), SELECT)


def launch(p: Problem, s: Strategy, device: Device) -> Launch:
    """Grids and parameters, as expressions over batch_size, max_num_pages and num_pages."""
    f, k = s.fields(), scorer(p, s, device)
    first = k.launch(int(decisions.score_threads(f, device)), int(decisions.score_smem(f, p)))
    return replace(first, then=(Select(p, s, device).launch(),))


def trial(p: Problem, s: Strategy, device: Device) -> Trial:
    """Four sequences, one of them empty, one of a few tokens, one of many equal scores; the longest
    fills rings more than twice, and needs digits."""
    topk = TRIAL_SORTED if decisions.is_sorted(p) else min(p["topk"], TRIAL_TOPK)
    page, most = p["page_size"], s.room * topk
    rings = min(2 * s.stages * s.tile, s.span) + s.tile // 2 + 5
    pages = -(-max(most + page + 9, rings) // page) + 1
    return Trial(p.at(batch_size=4, topk=topk, max_num_pages=pages, num_pages=3 * pages + 2))


def trials(p: Problem, s: Strategy, device: Device) -> Trials:
    """The problem's own number of tokens to choose: sequences of which all are ranked, of more, and
    of several spans; of a few tokens, and of as many as are chosen; two, behind more empty ones
    than a CTA has warps, of which one more than the list has room for are alike, some alone in a
    warp's tokens; a single one that takes two turns of a sweep, or, where these are long, all loads
    of one."""
    page, topk = p["page_size"], p["topk"]
    turn = VECTOR * int(s.loads * s.threads * s.ctas)
    ranked = s.room * topk
    spans = [max(ranked, topk + topk // 2), ranked + topk // 2 + 2 * page, 2 * s.span + 5]

    def size(batch: int, tokens: int) -> Size:
        n, spare = -(-tokens // page), s.room if batch in (1, MANY) else 2
        return Size({"batch_size": batch, "max_num_pages": n, "num_pages": batch * n + spare})

    crowd = MANY, ranked + 513
    sizes = [size(*n) for n in ((6, spans[0]), crowd, (3, max(spans)), (4, spans[1]))]
    swept = turn if turn <= MOST_SWEPT else turn - turn // int(s.loads)
    if swept:
        sizes.append(size(1, max(swept, ranked + topk) + page + 9))
    return Trials(({"topk": topk},), tuple(sizes))


DSA_INDEXER = Family.of(
    SCHEMA,
    ("dsa_paged",),
    decisions,
    cost,
    Kernels(build, trips, launch, trial, trials),
    accepts=lambda inputs: "k_index_cache_fp8" in inputs,
)
