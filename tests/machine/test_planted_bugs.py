"""Bugs planted in kernels of every family are refused, and the message says what is wrong."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.atoms import atom as row_of
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.device import H200
from ptxflow.compiler.errors import CompileError, HazardError, SpecError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.ir.nodes import Op, Slot, Statement, Use, Value, const, param
from ptxflow.compiler.ir.statements import body_of, edit, kernels_of, loop, program, walk, when
from ptxflow.compiler.ir.storage import global_tensor, rectangle, slot
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.dsa_indexer.select import Sorting
from ptxflow.compiler.kernels.gdn_prefill.kernel import Kernel
from ptxflow.eval.verify.mutants import mutants
from tests.families import (
    dsa_indexer,
    dsa_sparse,
    gdn_decode,
    gdn_prefill,
    gqa_decode,
    gqa_prefill,
    mla,
    moe,
    rmsnorm,
    sampling,
)
from tests.machine.truth import atoms, put

Plant = Callable[[list[Statement]], None]
Nodes = tuple[Statement, ...]


@dataclass(frozen=True)
class Bug:
    """What is changed in the kernels of a program, and a part of the refusal."""

    problem: Problem
    strategy: Strategy
    plant: Plant
    message: str = "; fix: "
    launched: bool = False  # the launch alone shows it

    def check(self) -> None:
        maker, p, s = family(self.strategy.family), self.problem, self.strategy
        kernels = list(kernels_of(maker.build(p, s, H200)))
        before = tuple(kernels)
        self.plant(kernels)
        assert tuple(kernels) != before
        lowered = program(*kernels) if len(kernels) > 1 else kernels[0]
        if not self.launched:
            check(lowered, maker.trips(p, s, H200), H200)
        check_launch(lowered, maker.launch(p, s, H200))


def instead(
    number: int, name: str, turn: int, new: Callable[[Statement], Statement | Nodes]
) -> Plant:
    """Another statement in the place of one, of its kernel and of that name."""

    def plant(kernels: list[Statement]) -> None:
        path, node = atoms(kernels[number], name)[turn]
        made = new(node)
        kernels[number] = edit(kernels[number], path, made if isinstance(made, tuple) else (made,))

    return plant


def deleted(number: int, name: str, turn: int = 0) -> Plant:
    return instead(number, name, turn, lambda node: ())


def one_more_pending(node: Statement) -> Statement:
    later = Use(node.arg.atom, (("pending", node.arg.attr("pending") + 1),))
    return Statement(Op.ATOM, node.src, later, node.site)


def exchanged(first: int, second: int) -> Plant:
    def plant(kernels: list[Statement]) -> None:
        kernels[first], kernels[second] = kernels[second], kernels[first]

    return plant


def stored(tensor: str, number: int, all_of: bool = True) -> Plant:
    """A kernel without its stores to a workspace."""

    def plant(kernels: list[Statement]) -> None:
        def found() -> list[tuple[int, ...]]:
            stores = atoms(kernels[number], "st_global")
            return [path for path, n in stores if n.src[3].src[0].arg.name == tensor]

        paths = found() if all_of else found()[:1]
        while paths:
            kernels[number] = edit(kernels[number], paths[0], ())
            paths = found() if all_of else []

    return plant


def attrs(node: Statement, **changes: object) -> Statement:
    made: Statement = getattr(at, node.arg.atom)(*node.src, **(dict(node.arg.attrs) | changes))
    return made


def drain_left_pending(kernels: list[Statement]) -> None:
    """Outputs are rescaled while they are computed."""
    loose = [p for p, n in atoms(kernels[0], "wgmma_wait") if n.arg.attr("pending") == 0]
    kernels[0] = edit(kernels[0], loose[1], (at.wgmma_wait(pending=1),))


def back_to_what_is_constant(node: Statement) -> Statement:
    old = node.src[3]
    place = Slot(Op.SLOT, (global_tensor("state"), *old.src[1:]), old.arg)
    return Statement(Op.ATOM, (*node.src[:3], place), node.arg, node.site)


def output_read_as_constant(load: Statement) -> tuple[Statement, ...]:
    place = rectangle(global_tensor("output"), 0, 0, 1, 8)
    operands = (load.src[0], param("output"), const(0), const(1), place)
    return load, at.ld_global(*operands, element=2)


def asked_late(kernels: list[Statement]) -> None:
    """The third stage is filled where there are more steps than stages alone."""
    path, _ = atoms(kernels[0], "bulk_load")[2]
    *_, asked = (node for p, node in walk(kernels[0]) if p == path[:-1])
    given, fits = asked.src[0].src
    made = when(given & (const(4) < fits.src[1]), *body_of(asked))
    kernels[0] = edit(kernels[0], path[:-1], (Statement(made.op, made.src, True, asked.site),))


def one_buffer(kernels: list[Statement]) -> None:
    """The next rows' parts overtake warps that still read the last ones."""
    for path, node in list(walk(kernels[0])):
        if node.op is Op.ATOM and node.arg.atom in ("st_shared", "ld_shared"):
            place = node.src[node.arg.atom == "ld_shared"]
            same = slot(place.src[0], 0, place.src[2], place.arg)
            operands = tuple(same if s is place else s for s in node.src)
            bad = Statement(Op.ATOM, operands, node.arg, node.site)
            kernels[0] = edit(kernels[0], path, (bad,))


def added_behind_its_reader(kernels: list[Statement]) -> None:
    """A sum is added to once more when it was read."""
    kernel = kernels[0]
    (path, _), (end, total) = atoms(kernel, "fma_f32")[0], atoms(kernel, "sum_f32")[0]
    chunks = dict(walk(kernel))[path[:-1]]
    kernels[0] = edit(kernel, end, (total, loop(chunks.src[0], 1, *body_of(chunks))))


class Late(Kernel):
    """Copies come into the place of the chunk that main warps still read."""

    def ask_ahead(self, n: Value):  # type: ignore[no-untyped-def]
        return super().ask_ahead(n + 1)


class Single(Kernel):
    """What helpers hand over has one buffer, which main warps still read."""

    def gate(self, n, which):  # type: ignore[no-untyped-def]
        return _first(super().gate(n, which))

    def _gate_part(self, n, which, i):  # type: ignore[no-untyped-def]
        return _first(super()._gate_part(n, which, i))


def _first(place: Slot) -> Slot:
    return slot(place.src[0], const(0), place.src[2], place.arg)


def built_by(made: type[Kernel]) -> Plant:
    p, s = gdn_prefill.problem(), gdn_prefill.PATHS["one block, in pairs"]

    def plant(kernels: list[Statement]) -> None:
        kernels[0] = made(p, s, H200).build()

    return plant


def _decode(plant: Plant, message: str, launched: bool = False) -> Bug:
    p = gqa_decode.problem(64, 4096)
    return Bug(p, gqa_decode.strategy(), plant, message, launched)


def _moe(plant: Plant, message: str, launched: bool = False) -> Bug:
    small = moe.problem(local=3, hidden=512, inner=512)
    return Bug(small, moe.HOPPER["columns"], plant, message, launched)


def _indexer(plant: Plant) -> Bug:
    return Bug(dsa_indexer.problem(topk=64), dsa_indexer.strategy(ctas=2), plant)


def _mla(new: Statement, message: str) -> Bug:
    p = mla.problem(False, 16, heads=16, latent=128, rope=64)
    return Bug(p, mla.decode(chunk=128), instead(0, "named_sync", 0, lambda node: new), message)


def _norm(plant: Plant, message: str, hidden: int = 512, **changes: int | str) -> Bug:
    return Bug(rmsnorm.problem(hidden), rmsnorm.strategy(**changes), plant, message)


RUNS, EARLY = "while the grids before may still", "launched first and dependent"
BUGS = {
    "gqa_decode: no wait for the grid before": _decode(deleted(1, "grid_wait"), RUNS),
    "gqa_decode: sums come first": _decode(exchanged(0, 1), EARLY),
    "gqa_decode: the same twice": _decode(lambda ks: ks.append(ks[1]), "share a name"),
    "gqa_decode: sums that nobody writes": _decode(stored("sums", 0), "sums", True),
    "gqa_prefill: outputs in flight": Bug(
        gqa_prefill.problem(), gqa_prefill.strategy(), drain_left_pending, r"rescale_rows|pack"
    ),
    "mla: a barrier of too few": _mla(at.named_sync(id=1, threads=96), "barrier|arrives|warps"),
    "mla: a warp alone meets": _mla(at.warp_sync(), "race|never written"),
    "indexer: entries to another CTA than the leader": _indexer(
        instead(1, "gather_entries", 0,
                lambda n: Statement(n.op, (*n.src[:-1], const(1)), n.arg, n.site))
    ),
    "indexer: bytes of scales not counted": _indexer(
        instead(0, "mbar_arrive_expect", 1, lambda n: attrs(n, bytes=128 * 128))
    ),
    "indexer: entries not zeroed": _indexer(
        instead(1, "zero_shared", 1, lambda n: at.warp_sync())
    ),
    "gdn_decode: a store to what is constant": Bug(
        gdn_decode.problem(), gdn_decode.strategy(path="bulk"),
        instead(0, "bulk_store", 0, back_to_what_is_constant), "reads as constant what bulk_store",
    ),
    "gdn_decode: a stage is filled if there are more": Bug(
        gdn_decode.problem(1), gdn_decode.strategy(
            path="bulk_load", row_threads=32, rows_in_flight=1, warps=1, head_ctas=32,
            ctas_per_sm=4, stages=4, reduction="apart"),
        asked_late, r"deadlock \[1 tiles of 3 steps\]",
    ),
    **{
        f"gdn_prefill: {made.__doc__}": Bug(
            gdn_prefill.problem(), gdn_prefill.PATHS["one block, in pairs"], built_by(made), fact
        )
        for made, fact in ((Late, "queries|keys|values|in flight"), (Single, "gates"))
    },
    "moe: no wait for the grid before": _moe(deleted(1, "grid_wait"), RUNS),
    "moe: counts are read too early": _moe(deleted(1, "cta_sync"), "cta_sync|not ordered|barrier"),
    "moe: gathered rows are handed over early": _moe(
        instead(2, "copies_wait", 0, one_more_pending), "token_tiles|scale_rows"
    ),
    "moe: rows before their places": _moe(exchanged(1, 2), "are launched as"),
    "moe: a list that nobody writes": _moe(stored("work", 1, all_of=False), "work", True),
    "rmsnorm: one buffer": _norm(one_buffer, r"st_shared\(parts", ctas_per_sm=2),
    "rmsnorm: a sum goes on": _norm(
        added_behind_its_reader, r"nobody reads what copy\(", 1024, residency="reread"
    ),
    "rmsnorm: the output is constant": _norm(
        instead(0, "ld_global", 0, output_read_as_constant), "reads as constant what st_global",
        ctas_per_sm=2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_refused(name: str) -> None:
    with pytest.raises((HazardError, SpecError), match=BUGS[name].message):
        BUGS[name].check()


def _program(p: Problem, s: Strategy) -> tuple[Statement, Callable[[Statement], object]]:
    """The kernels of a strategy, and the validator for their like."""
    maker = family(s.family)
    lowered, trips = maker.build(p, s, H200), maker.trips(p, s, H200)
    return lowered, lambda tree: check(tree, trips, H200)


def _edits(
    lowered: Statement, of: Callable[[int, Statement], bool], new: Callable[[Statement], Nodes]
) -> Iterator[Statement]:
    for number, kernel in enumerate(kernels_of(lowered)):
        for path, node in walk(kernel):
            if node.op is Op.ATOM and of(number, node):
                yield put(lowered, number, path, *new(node))


@pytest.mark.parametrize("name", ["a warp alone, values later", "chunks are shared"])
def test_a_wait_for_a_group_fewer_is_missed(name: str) -> None:
    s = gqa_decode.PATHS[name].replace(dependent=1)
    lowered, proven = _program(gqa_decode.problem(64, 4096), s)
    trees = list(_edits(lowered, lambda _, n: n.arg.atom == "copies_wait",
                        lambda n: (one_more_pending(n),)))  # fmt: skip
    assert trees
    for tree in trees:
        with pytest.raises(CompileError, match="; fix: "):
            proven(tree)


def test_every_barrier_of_a_sort_is_needed() -> None:
    """Of the loop that brings entries of different warps together."""
    p, s = dsa_indexer.problem(topk=1056), dsa_indexer.strategy(threads=1024)
    maker = dsa_indexer.INDEXER
    lowered = maker.build(p, s, H200)
    few = [t for t in maker.trips(p, s, H200) if t.name in ("1 tiles", "1056 tokens")]
    source, first = inspect.getsourcelines(Sorting)
    of_sort = {f"compiler/kernels/dsa_indexer/select.py:{first + i}" for i in range(len(source))}
    trees = list(_edits(
        lowered,
        lambda _, n: n.site in of_sort and row_of(n.arg.atom).orders,
        lambda n: (),
    ))  # fmt: skip
    check(lowered, few, H200)
    assert len(trees) == 2
    for tree in trees:
        with pytest.raises(CompileError, match="; fix: "):
            check(tree, few, H200)


@pytest.mark.parametrize(
    ("name", "count"), [("ld_global", 2), ("copy_async", 8), ("copies_arrive", 1), ("mbar_wait", 2)]
)
def test_statements_of_lists_are_needed(name: str, count: int) -> None:
    """Entries as warps that multiply load them, rows, and the order between them and readers."""
    p = dsa_sparse.problem(16, latent=128, topk=250)
    lowered, proven = _program(p, dsa_sparse.strategy(chunk=0))
    paths = [path for path, _ in atoms(lowered, name)]
    assert len(paths) >= count
    for path in paths[-count:]:
        with pytest.raises(CompileError, match="; fix: "):
            proven(edit(lowered, path, ()))


def test_scores_are_not_added_to_those_of_the_step_before() -> None:
    """A sum that wgmma goes on with after it was read, though nothing else is out of order."""
    kernel, proven = _program(gqa_prefill.problem(), gqa_prefill.strategy())
    told = []
    for mutant in mutants(kernel):
        if mutant.change == "accumulate 1" and mutant.nodes[0].arg.atom == "wgmma":
            with pytest.raises(HazardError) as refused:
                proven(mutant.tree)
            told.append(str(refused.value))
    assert any("adds to scores, which was read already" in text for text in told), told


def test_everything_is_zeroed_before_it_is_added_to() -> None:
    p = sampling.problem(4000, 4, sampling.EACH)
    kernel, proven = _program(p, sampling.PATHS["a cluster, both"][1])
    zeros = [path for path, _ in atoms(kernel, "zero_shared")]
    assert len(zeros) >= 8
    for path in zeros:
        with pytest.raises(CompileError, match="was never written"):
            proven(edit(kernel, path, ()))
