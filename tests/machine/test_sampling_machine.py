"""The validator proves sampling kernels, and misses every barrier and value that is taken out."""

from __future__ import annotations

import pytest

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.errors import CompileError, SpecError
from ptxflow.compiler.ir import (
    CTA_RANK,
    LANE,
    Body,
    Op,
    Role,
    UOp,
    edit,
    frag,
    kernel,
    role,
    slot,
    smem,
    walk,
)  # fmt: skip
from tests.machine.truth import Options, info, table
from tests.sampling_cases import CASES, H200, IDS, SAMPLING, problem

VOCAB = 4000


@pytest.mark.parametrize(("dev", "filters", "s"), CASES, ids=IDS)
def test_every_ordering_statement_is_needed(dev, filters, s):  # type: ignore[no-untyped-def]
    p = problem(VOCAB, 4, filters)
    kernel_, trips = SAMPLING.build(p, s, dev), SAMPLING.trips(p, s, dev)
    assert len(check(kernel_, trips, dev)) == len(trips) + 1
    check_launch(kernel_, SAMPLING.launch(p, s, dev))
    atoms = [(path, node) for path, node in walk(kernel_) if node.op is Op.ATOM]
    barriers = [path for path, node in atoms if atom(node.arg.atom).orders]
    assert len(barriers) >= 8
    for path in {*barriers, *(path for path, _ in atoms[:: max(1, len(atoms) // 12)])}:
        with pytest.raises(CompileError, match="; fix: "):
            check(edit(kernel_, path, ()), trips, dev)


def test_everything_is_zeroed_before_it_is_added_to() -> None:
    _, filters, s = CASES[2]
    p = problem(VOCAB, 4, filters)
    kernel_, trips = SAMPLING.build(p, s, H200), SAMPLING.trips(p, s, H200)
    zeros = [p for p, n in walk(kernel_) if n.op is Op.ATOM and n.arg.atom == "zero_shared"]
    assert len(zeros) > 10
    for path in zeros:
        with pytest.raises(CompileError, match="was never written"):
            check(edit(kernel_, path, ()), trips, H200)


# -- shared atomics: they commute with each other, and with nothing else ---------------------------

BINS, DUMP = smem("bins", 512), smem("dump", 512)
WORDS, NONE = frag("words", 4, "b32"), frag("none", 1, "b32")
SUM, FOUND = frag("sum", 1, "b32"), frag("found", 2, "b32")
MEET: list[UOp] = [at.cluster_arrive(), at.cluster_wait()]


def count() -> list[UOp]:
    """A warp counts four registers into seven bits' bins, of its own CTA."""
    given = slot(WORDS), slot(NONE), slot(NONE)
    add = at.histogram(slot(BINS), slot(DUMP, 0, 0, 128), *given, shift=23, bits=7)
    return [at.mov(slot(WORDS), 0), at.mov(slot(NONE), 0), add]


def zero() -> list[UOp]:
    return [at.zero_shared(slot(BINS)), at.zero_shared(slot(DUMP))]


def look() -> UOp:
    return at.ld_shared(slot(SUM), slot(BINS), LANE * 4)


def block(*body: Body, warps: int, cluster: int = 1) -> UOp:
    storage = (BINS, DUMP, WORDS, NONE, SUM, FOUND)
    return kernel(info(H200, storage, warps, cluster), *body)  # type: ignore[arg-type]


def test_atomics_of_several_warps() -> None:
    """Zeros come before, readers after, and nothing between two warps that add."""

    def build(o: Options) -> UOp:
        start: list[Body] = [role(Role("first", 0, 1), *zero())]
        return block(
            *start, *o("ready", at.cta_sync()), role(Role("all", 0, 2), *count()),
            *o("done", at.cta_sync()), role(Role("reader", 0, 1), look()), warps=2,
        )  # fmt: skip

    table("ready done", build, lambda o: o.ready and o.done, H200)


def test_what_was_counted_is_not_zeroed_at_once() -> None:
    """Zeroing for the next turn waits for the readers of this one."""

    def build(o: Options) -> UOp:
        return block(
            role(Role("first", 0, 1), *zero()), at.cta_sync(), role(Role("all", 0, 2), *count()),
            at.cta_sync(), role(Role("reader", 0, 1), look()), *o("read", at.cta_sync()),
            role(Role("second", 1, 1), at.zero_shared(slot(BINS))), warps=2,
        )  # fmt: skip

    table("read", build, lambda o: o.read, H200)


def test_atomics_are_not_ordered_by_their_own_warp_alone() -> None:
    """One that knows the zeros does not make them known to another's."""

    def build(o: Options) -> UOp:
        return block(
            role(Role("first", 0, 1), *zero(), *count()), *o("ready", at.cta_sync()),
            role(Role("second", 1, 1), *count()), at.cta_sync(),
            role(Role("reader", 0, 1), look()), warps=2,
        )  # fmt: skip

    table("ready", build, lambda o: o.ready, H200)


def test_bins_that_all_ctas_read() -> None:
    """Peers read behind a barrier of the cluster that releases, and nobody leaves before."""

    def build(o: Options) -> UOp:
        meet = MEET if o.release else [at.cluster_arrive_relaxed(), at.cluster_wait()]
        read = at.sum_peers(slot(SUM), slot(BINS), LANE * 4, CTA_RANK, cluster=2)
        return block(
            *zero(), *count(), *(o("meet", *meet)), read, *o("stay", *MEET), warps=1, cluster=2
        )

    table("meet release stay", build, lambda o: o.meet and o.release and o.stay, H200)


def test_a_word_that_peers_add_to() -> None:
    """The owner zeroes it, all meet, peers add, all meet, and the owner reads."""

    def build(o: Options) -> UOp:
        word = slot(BINS, 0, 0, 4)
        body: list[Body] = [at.mov(slot(FOUND), 0), at.add_peer(word, slot(FOUND), 0)]
        last = at.ld_shared(slot(SUM), word, 0)
        return block(
            at.zero_shared(slot(BINS)), *o("ready", *MEET), *body, *o("done", *MEET), last,
            warps=1, cluster=2,
        )  # fmt: skip

    table("ready done", build, lambda o: o.ready and o.done, H200)


def test_bins_that_nothing_was_counted_into() -> None:
    """Zeros alone are no sum: whoever reads them forgot to count, or counted elsewhere."""

    def build(o: Options) -> UOp:
        zeros = [at.zero_shared(slot(BINS), begun=True), at.zero_shared(slot(DUMP))]
        return block(
            role(Role("first", 0, 1), *zeros, *o("counted", *count())), at.cta_sync(),
            role(Role("reader", 0, 1), look()), warps=2,
        )  # fmt: skip

    table("counted", build, lambda o: o.counted, H200)


def test_a_sum_over_another_cluster_is_refused() -> None:
    read = at.sum_peers(slot(SUM), slot(BINS), LANE * 4, CTA_RANK, cluster=4)
    with pytest.raises(SpecError, match="asks 4 CTAs of a cluster of 2"):
        check(block(*zero(), *MEET, read, *MEET, warps=1, cluster=2), [], H200)
