"""Truth tables: a small kernel with optional statements, run in all 2^n combinations."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ptxflow.compiler.atoms import at
from ptxflow.compiler.check import check
from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.errors import CompileError, HazardError
from ptxflow.compiler.family import Trip
from ptxflow.compiler.ir import Body, KernelInfo, Role, edit, elect, kernels_of, program, role, walk
from ptxflow.compiler.ir.nodes import WARP, Op, Scalar, Statement, Storage, const, param
from ptxflow.compiler.ir.storage import frag, global_tensor, mbar, rectangle, slot, smem, tmem
from ptxflow.compiler.lower import finish

ROWS, N, COLUMNS = 64, 64, 16  # of one operand tile: 16 columns of 16 bits, one K step
TILE = ROWS * COLUMNS * 2
MAPS = (("A_map", "map"), ("B_map", "map"), ("C_map", "map"), ("C", "ptr"))
#: where an MMA reads operands whose descriptors say nothing
STEP: dict[str, Any] = {"a_step": 0, "b_step": 0, "a_desc": 0, "b_desc": 0}
ONCE = [Trip("one run", (("C", 0),))]

A, B = smem("a", TILE, 1), smem("b", TILE, 1)
ACC, OUT = frag("acc", N // 2, "f32"), frag("out", 4, "b32")
D = tmem("d", N)


@dataclass(frozen=True)
class Options:
    """One row of a table: which options are on. Call it to keep statements only if one is on."""

    on: frozenset[str]

    def __getattr__(self, name: str) -> bool:
        return name in self.on

    def __call__(self, name: str, *statements: Body) -> list[Body]:
        return list(statements) if name in self.on else []


def table(
    names: str, build: Callable[[Options], Statement], safe: Callable[[Options], bool], dev: Device
) -> None:
    """Assert that a combination is accepted exactly where `safe` says, and refusals say why."""
    options, wrong, verdicts = names.split(), [], set()
    for chosen in itertools.product((False, True), repeat=len(options)):
        o = Options(frozenset(n for n, c in zip(options, chosen, strict=True) if c))
        told = refusal(build(o), dev)
        assert told is None or "; fix: " in told, told
        verdicts.add(safe(o))
        if safe(o) != (told is None):
            wrong.append(f"{sorted(o.on)}: {'safe, but refused: ' if told else 'accepted'}{told}")
    assert verdicts == {True, False}, "the truth is constant"
    assert not wrong, "\n".join(wrong)


def truth(
    names: str, safe: Callable[..., bool], dev: Device = H200
) -> Callable[[Callable[..., Statement]], Callable[..., None]]:
    """Make a test of what builds a kernel from options: `table` of it, as parametrised."""

    def made(build: Callable[..., Statement]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            table(names, partial(build, **given), partial(safe, **given), dev)

        parameters = list(inspect.signature(build).parameters.values())[1:]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.__doc__, test.__name__ = build.__doc__, build.__name__
        test.table = names.split(), safe, dev  # type: ignore[attr-defined]
        return test

    return made


def atoms(tree: Statement, name: str) -> list[tuple[tuple[int, ...], Statement]]:
    """Where the statements of one instruction are."""
    return [(p, n) for p, n in walk(tree) if n.op is Op.ATOM and n.arg.atom == name]


def put(
    lowered: Statement, number: int, path: tuple[int, ...], *statements: Statement
) -> Statement:
    """The program with these statements in the place of one, in its kernel of that number."""
    kernels = list(kernels_of(lowered))
    kernels[number] = edit(kernels[number], path, statements)
    return program(*kernels) if len(kernels) > 1 else kernels[0]


def refusal(kernel: Statement, dev: Device, trips: list[Trip] = ONCE) -> str | None:
    """The validator's message, or None where it accepts. A static refusal is a broken test."""
    try:
        check(kernel, trips, dev)
    except HazardError as hazard:
        return str(hazard)
    except CompileError as other:
        raise AssertionError(f"not the kernel that was meant: {other}") from None
    return None


def block(dev: Device, *roles: Statement, cluster: int = 1, group: int = 1) -> Statement:
    """A whole kernel: storage and warps are those of the roles, prologue and teardown derived."""
    nodes = list(dict.fromkeys(node for tree in roles for node in inside(tree)))
    storage = tuple(node for node in nodes if node.op in (Op.SMEM, Op.MBAR, Op.FRAG, Op.TMEM))
    ends = [n.arg.first + n.arg.warps for n in nodes if n.op is Op.ROLE]
    return finish(info(dev, storage, max(ends, default=1), cluster, group), *roles)


def inside(node: Any) -> Iterator[Any]:
    """The node and all that it is made of, in order."""
    yield node
    for source in node.src:
        yield from inside(source)


def info(
    dev: Device, storage: tuple[Storage, ...], warps: int, cluster: int = 1, group: int = 1
) -> KernelInfo:
    return KernelInfo("k", dev.arch, warps, cluster, MAPS, storage, cta_group=group)


def one(*body: Body) -> Statement:
    """The body, in one elected lane of each warp."""
    return elect(const(1), *body)


def load(tile: Storage, bar: Storage, stage: Scalar = 0, row: Scalar = 0) -> Statement:
    where = slot(tile, stage), param("A_map"), 0, row, slot(bar, stage)
    return at.tma_load(*where, box=(COLUMNS, tile.arg.size // (2 * COLUMNS)), element=2)


def expect(bar: Storage, size: int = TILE, stage: Scalar = 0) -> Statement:
    return at.mbar_arrive_expect(slot(bar, stage), bytes=size)


def store(tile: Storage, row: int = 0) -> Statement:
    rows = tile.arg.size // (2 * COLUMNS)
    target = rectangle(global_tensor("C"), row, 0, rows, COLUMNS)
    return at.tma_store(slot(tile), param("C_map"), 0, row, target, box=(COLUMNS, rows), element=2)


def write(tile: Storage, warps: int = 1) -> list[Statement]:
    """Generic writes of a tile: each of the warps, counted from 0, its share of the rows."""
    share = tile.arg.size // warps
    place = slot(tile, 0, WARP * share if warps > 1 else 0, share)
    return [at.mov(slot(OUT), 0), at.st_shared_v4(place, 0, slot(OUT))]


def read(tile: Storage, stage: Scalar = 0) -> Statement:
    """Generic reads of a whole tile by the warp."""
    return at.ld_shared(slot(OUT), slot(tile, stage), 0)


def wgmma(a: Storage, b: Storage, accumulate: Scalar = 0, stage: Scalar = 0) -> Statement:
    slots = slot(ACC), slot(a, stage), slot(b, stage)
    return at.wgmma(*slots, accumulate, n=N, dtype="f16", **STEP)


def mma(d: Storage, a: Storage, b: Storage, accumulate: Scalar = 0, group: int = 1) -> Statement:
    slots = slot(d), slot(a), slot(b)
    return at.tcgen05_mma(*slots, accumulate, cta_group=group, idesc=1, **STEP)


# -- a warp that loads operands, and a warpgroup that multiplies on sm_90a -------------------------

FULL, EMPTY = mbar("full", 1, 1), mbar("empty", 1, 4)
DRAIN = at.wgmma_wait(pending=0)


def wait(bar: Storage, parity: int = 0, stage: int = 0) -> Statement:
    return at.mbar_wait(slot(bar, stage), parity)


def consumers(*body: Body) -> Statement:
    return role(Role("consumer", 0, 4), list(body))


def producer(*body: Body) -> Statement:
    return role(Role("producer", 4, 1, elected=True), list(body))


def both(*more: Statement) -> list[Statement]:
    """Load A and B."""
    return [load(A, FULL), load(B, FULL), *more]


def multiply(accumulate: int = 0) -> list[Statement]:
    return [at.wgmma_fence(), wgmma(A, B, accumulate), at.wgmma_commit()]


def two_turns(
    o: Options, use: list[Body], release: list[Body], again: list[Body], empty: Storage = EMPTY
) -> Statement:
    """One stage, filled twice; consumers use it and release it after the first turn."""
    fill = [expect(FULL, 2 * TILE), *both()]
    return block(
        H200,
        producer(fill, o("wait", wait(empty)), fill),
        consumers(wait(FULL), use, release, wait(FULL, 1), again, DRAIN),
    )
