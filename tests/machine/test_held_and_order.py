"""Values that registers hold, and what kernels of a program hand on: each rule, and its refusal."""

from collections.abc import Callable

import pytest

from ptxflow.compiler.atoms import at
from ptxflow.compiler.check import check, check_launch
from ptxflow.compiler.errors import HazardError, SpecError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir.nodes import CTAID, LANE, Scalar, Statement, Storage, UOp, param, var
from ptxflow.compiler.ir.statements import Body, KernelInfo, loop, program, when
from ptxflow.compiler.ir.storage import frag, global_tensor, rectangle, slot, smem, value_of
from ptxflow.compiler.launch import Launch, PointerParam, Workspace
from ptxflow.compiler.lower import finish
from tests.given import H200

COUNT, HELD, OTHER = frag("count", 1, "b32"), frag("held", 1, "b32"), frag("other", 1, "b32")
TENSORS = "ACVW"
TILE = smem("tile", 1024, 1, align=16)
N = value_of(COUNT)
TRIPS = [Trip(f"{n} times", (("count", n), ("held", 0))) for n in (0, 1, 3)]


def kernel(*body: Body, name: str = "k", dependent: bool = False) -> Statement:
    pointers = tuple((tensor, "ptr") for tensor in TENSORS)
    storage = (COUNT, HELD, OTHER, TILE)
    info = KernelInfo(name, H200.arch, 1, 1, pointers, storage, dependent=dependent)
    return finish(info, *[s for s in _flat(body) if s is not None])


def _flat(body: Body) -> list[Statement]:
    if body is None or isinstance(body, UOp):
        return [body] if body is not None else []
    return [s for part in body for s in _flat(part)]


def load(into: Storage, index: Scalar = 0, tensor: str = "A", handed: bool = False) -> Statement:
    place = rectangle(global_tensor(tensor), 0, 0, 1, 1)
    row = at.ld_global_coherent if handed else at.ld_global
    return row(slot(into), param(tensor), index, 1, place, element=4)


def put(tensor: str = "C", register: Storage = OTHER) -> Statement:
    place = rectangle(global_tensor(tensor), 0, 0, 1, 1)
    return at.st_global(param(tensor), 0, LANE < 1, place, slot(register), element=4)


def work() -> list[Statement]:
    return [at.mov(slot(OTHER), 1), put()]


def repeat(times: Scalar) -> Statement:
    return loop(var("i"), times, work())


def read(offset: Scalar) -> Statement:
    return at.ld_shared(slot(OTHER), slot(TILE, 0, offset, 128), 0)


def test_data_may_decide_branches_loops_and_places() -> None:
    proofs = check(
        kernel(load(COUNT), repeat(N), when(N < 2, work()), load(OTHER, N), put()), TRIPS, H200
    )
    assert len(proofs) == 1 + len(TRIPS)


PARTED = "lanes would part, as count differs"
REFUSED: dict[str, tuple[Callable[[], list[Body]], str]] = {
    "before it is written": (lambda: [repeat(N), load(COUNT)], "no instruction before it"),
    "in another block": (lambda: [when(CTAID < 9, load(COUNT)), repeat(N)],
        "no instruction before it in this block"),
    "written twice": (lambda: [load(COUNT), load(COUNT, 1), repeat(N)],
        "count, which is written more than once"),
    "lanes have their own loops": (lambda: [load(COUNT, LANE), repeat(N)], PARTED),
    "lanes have their own branches": (
        lambda: [load(HELD, LANE), at.copy(slot(COUNT), slot(HELD)), when(N < 2, work())], PARTED),
    "lanes have their own stage": (lambda: [load(COUNT, LANE), read(N * 128)], PARTED),
    "the second of two": (
        lambda: [load(HELD, LANE), load(COUNT, value_of(HELD)), repeat(N)], PARTED),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_held_values_that_are_refused(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(SpecError, match=message):
        check(kernel(*body()), TRIPS, H200)


def test_lanes_may_have_their_own_addresses_of_data() -> None:
    assert check(kernel(load(HELD, LANE), load(OTHER, value_of(HELD)), put()), TRIPS, H200)


def test_a_trip_says_what_registers_hold() -> None:
    with pytest.raises(SpecError, match="trip once does not say what count hold"):
        check(kernel(load(COUNT), repeat(N)), [Trip("once", ())], H200)


# -- programs -------------------------------------------------------------------------------------


def first(name: str = "first", dependent: bool = False, tensor: str = "W") -> Statement:
    return kernel(at.mov(slot(OTHER), 1), put(tensor), name=name, dependent=dependent)


def second(waits: bool = True, dependent: bool = True, tensor: str = "W") -> Statement:
    body = [at.grid_wait() if waits else None, load(OTHER, 0, tensor, handed=True), put()]
    return kernel(*body, name="second", dependent=dependent)


ONE = [Trip("one", (), entry=name) for name in ("first", "second")]


PARAMS = tuple(map(PointerParam, TENSORS))


def launch(then: Launch | None = None, workspace: tuple[str, ...] = ("W",)) -> Launch:
    then = then or Launch("second", ("1", "1", "1"), 32, (1, 1, 1), 1024, PARAMS, dependent=True)
    spaces = tuple(Workspace(name, "4") for name in workspace)
    return Launch(
        "first", ("1", "1", "1"), 32, (1, 1, 1), 1024, PARAMS, then=(then,), workspace=spaces
    )


def test_a_kernel_reads_what_one_before_it_wrote() -> None:
    pair = program(first(), second())
    assert len(check(pair, ONE, H200)) == 4
    check_launch(pair, launch())


def test_a_plain_launch_waits_by_itself() -> None:
    pair = program(first(), second(waits=False, dependent=False))
    assert len(check(pair, ONE, H200)) == 4


def test_a_dependent_launch_waits_before_it_reads() -> None:
    with pytest.raises(HazardError, match="while the grids before may still run"):
        check(program(first(), second(waits=False)), ONE, H200)


def test_it_need_not_wait_for_what_no_kernel_wrote() -> None:
    early = kernel(load(OTHER), at.grid_wait(), put(), name="second", dependent=True)
    assert check(program(first(), early), ONE, H200)


def test_it_waits_though_it_reads_nothing() -> None:
    """Else it may end before the kernel before it, and what follows waits for it alone."""
    idle = kernel(at.mov(slot(OTHER), 1), name="second", dependent=True)
    with pytest.raises(HazardError, match="ends without griddepcontrol"):
        check(program(first(), idle), ONE, H200)
    waiting = kernel(at.mov(slot(OTHER), 1), at.grid_wait(), name="second", dependent=True)
    assert check(program(first(), waiting), ONE, H200)


def test_it_waits_before_it_overwrites_what_the_one_before_reads() -> None:
    reads = kernel(load(OTHER, 0, "C", handed=True), put("W"), name="first")
    body = [at.mov(slot(OTHER), 1), put("C")]
    with pytest.raises(HazardError, match="while the grids before may still run"):
        check(program(reads, kernel(*body, name="second", dependent=True)), ONE, H200)
    assert check(
        program(reads, kernel(at.grid_wait(), *body, name="second", dependent=True)), ONE, H200
    )


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ((first(), first()), "share a name"),
        ((first(dependent=True), second()), "launched first and dependent"),
    ],
)
def test_programs_that_are_refused(kernels: tuple[Statement, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check(program(*kernels), ONE, H200)


def test_every_kernel_has_a_trip() -> None:
    with pytest.raises(SpecError, match="kernel second has no trip"):
        check(program(first(), second()), ONE[:1], H200)


PLAIN = Launch("second", ("1", "1", "1"), 32, (1, 1, 1), 1024, PARAMS)
SMALL = Launch("second", ("1", "1", "1"), 32, (1, 1, 1), 512, PARAMS, dependent=True)


@pytest.mark.parametrize(
    ("pair", "how", "message"),
    [
        ((first(), second()), launch(PLAIN), "second is not launched as dependent"),
        ((first(), second()), launch(SMALL), "with 512 bytes of shared memory"),
        ((second(), first()), launch(), "are launched as"),
        ((first(), second(tensor="V")), launch(workspace=("W", "V")), "V: a kernel reads it bef"),
        ((first(), second(tensor="A")), launch(), "workspace W: no kernel reads there"),
    ],
)
def test_launches_that_are_refused(
    pair: tuple[Statement, Statement], how: Launch, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        check_launch(program(*pair), how)
