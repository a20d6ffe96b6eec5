"""Rows of probabilities of several kinds, drawn from with one state of the generator.

Of three rows in turn two take a kernel's rare paths: nearly equal elements at the threshold all
over the row, and so many of them that lists overflow; the first of all has filters that keep all.
In these draws fall on the first or the last unit of the last element that is kept, by turns in one
of PLACES: a unit more or less before it, or a filter that ends elsewhere, shows. Others are
softmaxes of normal logits, ascending ones, of which no part tells, peaked ones as language models
give, ones with many equal values or zeros, and uniform ones. The sample must be the one that
integers give.
"""

import numpy as np
import torch

from ptxflow.compiler.atoms.reductions import LEAST
from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels.sampling import FIRST_ROWS, ROWS
from ptxflow.compiler.launch import GENERATOR, Arguments
from ptxflow.eval.bench.references.sampling_integers import UNIT, philox, sample
from ptxflow.eval.verify.cases.case import Case, Tensors, Values, poisoned

#: the random numbers of rare rows are from 0.63 to 0.83: much lies before a draw, and some behind
SEED, OFFSET = 0x0123456789ABCDEF, (5 << 32) + 23517
Row = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
RARE = 3  # rows in turn: a softmax, one that is crowded, one that is not
SPREAD = 640  # elements of a bin that fit all lists, spread over the row
RANGE = 25  # bits of a key that tell elements there: some bits of any first digit, and later ones
#: theirs: a single filter ends at the second, p of what k leaves at the third. Of 8, 16 and 32
#: ranges of the first digit's bins they are in lanes 7, 15 and 30, in 31 of all, in 16, 1 and 3, in
#: 20, 8 and 16, in 0 of all; of later digits in lane 16 behind a first of 12 bits and in 31 of the
#: last, in 0 of any, in 16 behind 10 bits, behind 11, in 31 of any, in later bins of 31 behind 10
LEVELS = (
    (0x1841B2D, 0x1867806, 0x1867A04, 0x186E4D2), (0x0038CB1, 0x003F9F8, 0x003FBFB, 0x003FFFE),
    (0x0F01B2D, 0x0F1E0F3, 0x0F1E4FA, 0x0F2A0A0), (0x0BC1B2D, 0x0BEF07A, 0x0BEF37C, 0x0BFE4D2),
    (0x1FC0001, 0x1FC0003, 0x1FC0006, 0x1FCE4D2), (0x1540001, 0x1540C0D, 0x1540E09, 0x154E4D2),
)  # fmt: skip
LOW = 1  # of these: the least that count, among few that are larger, so that p can end there
#: what is between those two and larger elements, by every digit: in the bins before theirs that
#: their lane has, and in bins of all kinds of the lanes before
STEPS = np.array([*range(1, 16), *range(16, 32, 2), *range(29, 320, 29)])
NEXT = np.multiply.outer([1, 1 << 8, 1 << 16], STEPS)
STRIDE = 37  # through these, in rows that have few of them: some of each kind
WHOLE = 1 << UNIT
MOST = 1 << 24  # units that every float32 can have
SEGMENT = 2048  # elements, at the most, where that is a power of two; of rows in registers, others:
#: elements, after which segments of 1216 and 1280 end; and some of a turn's loads, by quarters
KEPT, LOADED = 72960, 0x1F000
#: where draws fall: in which lane's segments, and lower bits, all of which differ in the first two;
#: 0 is the first of a segment, -1 the last of one, and of KEPT or LOADED, in long rows
PLACES = (21, 0xAAAAA), (10, 0x55555), (26, 0), (22, KEPT - 1), (19, -1), (0, 99), (18, LOADED - 1)
#: which of these draws have of rows that are not crowded and keep one element of many that equal
#: it, and of the row of ROWS whose filter ends at the last element of a lane's bins
ALONE, TIGHT = 4, 6
#: elements that k keeps of FIRST_ROWS' first row, and of the last, of which no part tells: few
#: enough for a first pass of a part; the least of them, with which bins of all digits begin; and in
#: which of PLACES draws of these rows fall
TOP, LEAST_TOP, TOP_PLACES = 120, 2.0**-12 + 2.0**-35, {0: 0, FIRST_ROWS - 1: 2}
SPAN = 512  # elements that a warp has in flight, at the most: four vectors of four a lane
EDGE = 6  # elements at either end of a row of each kind that is counted
FEW = 8  # of so many larger elements one is so by far: in other ranges of bins
FRONT = 64  # elements that have most of a row: its draw falls in the first segment


def rows(batch: int, vocab: int, rng: np.random.Generator) -> Row:
    """probs [batch, vocab] float32, a kind after the other; a row alone is of the last."""
    kinds = (
        lambda: rng.normal(size=vocab),
        lambda: 4 * rng.normal(size=vocab),
        lambda: 6 * np.log1p(np.arange(vocab)),
        lambda: np.round(rng.normal(size=vocab)),
        lambda: np.where(rng.random(vocab) < 0.5, rng.normal(size=vocab), -np.inf),
        lambda: np.zeros(vocab),
        lambda: rng.normal(size=vocab) - np.arange(vocab) / FRONT,
    )
    made = [
        near(vocab, rng, i % RARE == 1, *turns(batch, i))
        if rare(batch, i)
        else _softmax(kinds[(i // RARE - (batch == 1)) % len(kinds)]())
        for i in range(batch)
    ]
    if batch == FIRST_ROWS:
        for i in TOP_PLACES:
            made[i][_spread(vocab)] = _top(ties=not i)
    return np.stack(made)


def rare(batch: int, i: int) -> bool:
    """Whether a row is; of ROWS the first is one, too."""
    return i % RARE > 0 or (not i and batch == ROWS)


def turns(batch: int, i: int) -> tuple[int, int]:
    """Which of PLACES and of LEVELS; those of ROWS that run, 0, 2, 5, 8 and 10, have all of these
    but the last, and the last row of another batch that."""
    if batch == ROWS:
        which = (2 * i + 1) // 5 % 5
        return (3, 0, 2, 4, 6)[which], which
    return 5 if batch == 1 else i % 5, (i - batch) % len(LEVELS)


def place_of(turn: int, vocab: int) -> int:
    """The element on which a draw falls. A lane's segments are of whole chunks."""
    lane, inside = PLACES[turn]
    if inside + 1 in (KEPT, LOADED) and inside < vocab:
        return inside
    if inside in (0, -1):
        size = min(SEGMENT, 1 << (vocab - 1).bit_length() - 1)
        return max(size, lane * vocab // 32 // size * size) + inside
    chunk = 1 << max(3, (vocab // 32).bit_length()) - 3
    width = -(-vocab // (32 * chunk)) * chunk
    return min(lane * width + inside % (1 << width.bit_length() - 1), vocab - 1)


def near(vocab: int, rng: np.random.Generator, crowded: bool, turn: int, which: int) -> Row:
    """Elements of one bin at a distance, and at both ends, some of them larger; `crowded`: and most
    of an eighth of the row, more than lists take, and of its end. What lies between is smaller,
    half of it nothing."""
    place, kind = np.arange(vocab), rng.integers(0, 8, vocab)
    kind[[0, 1, -1, -2]] = 0
    eighth, own = place * 8 // vocab, place_of(turn, vocab) * 8 // vocab
    dense = crowded & ((eighth == own) | (place >= vocab - vocab // 16))
    stride = max(3, (vocab // SPREAD << (turn == 2)) | 1)
    there = (place % stride == 0) & (eighth <= own + 7 * (not crowded))
    there |= (place < EDGE) | (place >= vocab - EDGE)
    least = np.float32(min(0.15 / (there | dense).sum(), 2.0**-14) / 16).view(np.uint32)
    bits = LEAST if which == LOW else int(least)
    keys = (bits - LEAST) >> RANGE << RANGE | np.array(LEVELS[which])
    held = (keys + LEAST).astype(np.uint32).view(np.float32)
    larger, far = held[-1] * rng.uniform(1.5, 6, vocab), rng.random(vocab) < 1 / FEW
    often = None
    if turn == ALONE:  # before the draw many ties that are not kept, and little that is
        t = place_of(turn, vocab)
        often, far[max(0, t - vocab // 8) : t] = (0.1, 0.4, 0.4, 0.1), False
    count = 1 + (far & (kind == 0) & (there | dense)).sum()
    top = min(0.2 / count, 2.0**-12 if which == LOW else 2.0**-7)
    larger = np.where(far, top * rng.uniform(0.5, 1, vocab), larger)
    most = np.where(dense, held[0] / 2, min(held[0] / 4, 0.1 / vocab))
    smaller = rng.uniform(0, most) * (rng.random(vocab) < 0.5)
    first, second = held[1:3].view(np.uint32)
    beside = np.concatenate([NEXT + first, STEPS[None] + second]).astype(np.uint32).view(np.float32)
    row = np.where(kind == 0, larger, rng.choice(held, vocab, p=often))
    counted = there | dense & (kind != 1)
    turns = np.flatnonzero(counted & (kind > 5))
    row[turns] = beside.ravel()[np.arange(len(turns)) * STRIDE % beside.size]
    row[2:EDGE], row[-EDGE:-2] = ([*held[2:], *beside[3 * i, :2]] for i in range(2))
    return np.where(counted, row, smaller).astype(np.float32)


def _spread(vocab: int) -> Values:
    """Where TOP elements are: in all lanes and vectors of a lane, a quarter of them at the end."""
    n, stride = np.arange(TOP), max(137, -(-vocab >> 16) * 68 | 1)  # 15 in the longest run
    spread = n * vocab // TOP // SPAN * SPAN + n % 128 * 4 + (n + n // 32) % 4
    return np.where(n < TOP * 3 // 4, spread, vocab - 1 - (TOP - 1 - n) * stride) % vocab


def _top(ties: bool) -> Row:
    """The least ends the filter: one that is not counted, or twice, moves the end. Of the others
    half share its first digit, and half of these its second, or are `ties`; some have the next."""
    n = np.roll(np.arange(TOP), TOP // 2)
    more = np.choose(n % 4, [n / 40, n / 160, n * 2.0**-14, n * 2.0**-23 * (not ties)])
    return (LEAST_TOP * (1 + more)).astype(np.float32)


def _softmax(logits: Values) -> Row:
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum()).astype(np.float32)


def _units(row: Row) -> Values:
    return np.rint(row.astype(np.float64) * WHOLE).astype(np.int64)


def _rare(tensors: Tensors, batch: int) -> None:
    """k and p of the rare rows, which end at a level, in some rows at the first element of it, and
    of the first row, past all, but of ROWS, where k alone is, and of FIRST_ROWS; and where their
    draws fall."""
    both = {"top_k", "top_p"} <= tensors.keys()
    for i, turn in TOP_PLACES.items() if batch == FIRST_ROWS and "top_k" in tensors else ():
        row = tensors["probs"][i]
        count = _aim(row, LEAST_TOP, i > 0, turn, philox(SEED, OFFSET, i))
        tensors["top_k"][i] = (row > LEAST_TOP).sum() + count
        if both:
            tensors["top_p"][i] = 1
    for i in [i for i in range(batch) if rare(batch, i) or (not i and batch != FIRST_ROWS)]:
        row, turn = tensors["probs"][i], turns(batch, i)[0]
        values, counts = np.unique(row[row > 0], return_counts=True)
        held = np.sort(values[np.argsort(-counts, kind="stable")[:4]])
        ends, one = rare(batch, i), i % RARE == 2 and turn == ALONE
        tight = turn == TIGHT and batch == ROWS
        last = float(held[1 + both - tight]) if ends else -1.0
        if tight:  # nothing of its bin lies behind what the filter ends at
            behind = row[place_of(turn, len(row)) + 1 :]
            behind[behind == last] = 0
        count = _aim(row, last, one, turn, philox(SEED, OFFSET, i))
        units, above, whole = _units(row), row > last, WHOLE
        k = int(above.sum()) + count
        if both and i:  # k ends at the level below, at all of it where that is the last
            more = 0 if tight else int((row == held[1]).sum()) // 2 + 1
            k = int((row >= held[0] if tight else row >= last).sum()) + more
            whole = int(np.sort(units)[-k:].sum())
        if "top_k" in tensors:
            tensors["top_k"][i] = k if i or (ends and not both) else 0
        if "top_p" in tensors:
            goal = int(units[above].sum()) + (2 * count - 1) * round(last * WHOLE) // 2
            tensors["top_p"][i] = (goal + 0.5) / whole if ends else 1
    if "top_k" not in tensors and 1 < batch < ROWS:  # nothing lies before the greatest
        tensors["top_p"][0] = 0


def _aim(row: Row, last: float, one: bool, turn: int, uniform: int) -> int:
    """How many elements that equal the last level are kept, of those above it all: up to that on
    which the draw falls, or `one`. That is at its place, and others are made larger until the draw
    is at its first unit, or its last."""
    place, tie, t = np.arange(len(row)), round(max(last, 0) * WHOLE), place_of(turn, len(row))

    def sums() -> tuple[Values, Values, Values]:
        """What is kept before each element and in all, were it the draw; and equals so far."""
        kept = np.minimum(np.cumsum(row == last), 1) if one else np.cumsum(row == last)
        above = np.where(row > last, _units(row), 0)
        before = np.cumsum(above) - above + tie * (kept - (0 if one else row == last))
        return before, above.sum() + tie * kept, kept

    row[t] = 1 / WHOLE if last < 0 else row.max() if one else last
    before, whole, kept = sums()
    goal = int(before[t] + (_units(row[t : t + 1])[0] - 1) * ((turn + 1) // 2 % 2))

    def lacks(x: int) -> int:
        """What all lack for the draw to be there, if so much is added before it."""
        return -(-(goal + x << 64) // uniform) - int(whole[t]) - x

    more = max(0, int(-lacks(0) / (2.0**64 / uniform - 1)))
    while lacks(more) < 0:
        more += 1
    if _units(row).sum() + more + lacks(more) > 2 * WHOLE - MOST:  # as far as kernels count
        return max(1, int(kept[t]))
    large = (row > 2 * max(last, 0)) & (row < MOST / WHOLE / 4)
    before = place < t - one * len(row) // 8  # a lane that is too early by two shows
    for side, extra in ((before, more), (place > t, lacks(more))):
        which = np.flatnonzero(large & side)
        if len(which) and extra // len(which) < MOST * 3 // 4:
            share = extra // len(which) + (np.arange(len(which)) < extra % len(which))
            row[which] = (_units(row[which]) + share) / WHOLE
    return max(1, int(kept[t]))


def case(problem: Problem, given: bool = True) -> Case:
    """probs, the filters' inputs, and samples; `given`: a part of the generator's state is on the
    device, and the rest by value."""
    batch, vocab = problem["batch_size"], problem["vocab_size"]
    rng = np.random.default_rng([batch, vocab])
    tensors: Tensors = {"probs": rows(batch, vocab, rng)}
    if problem.constant("top_k"):
        tensors["top_k"] = rng.integers(1, min(vocab, 100) + 1, batch, np.int32)
    if problem.constant("top_p"):
        share = rng.uniform(0.05, 0.98, batch)
        limits = rng.choice([-0.5, 0.0, 1.0, 1.5, 1e-6, 1 - 2**-20], batch)
        tensors["top_p"] = np.where(np.arange(batch) % 4 == 3, limits, share).astype(np.float32)
    _rare(tensors, batch)
    inputs = {name: torch.from_numpy(t) for name, t in tensors.items()}
    samples = sample(**inputs, seed=SEED, offset=OFFSET).numpy()
    tensors["samples"] = poisoned((batch,), "int64")
    words = np.array([SEED, OFFSET], np.uint64).view(np.uint32)
    if given:
        state = rng.integers(0, 1 << 32, 4, np.uint32)
        tensors[GENERATOR] = state
        words = words - state  # each modulo 2^32
    seed, offset = words.view(np.uint64).tolist()
    return Case(tensors, {"samples": (samples, samples)}, Arguments(seed=seed, offset=offset))
