"""What must hold between the kernels of a program, which hand tensors on through global memory.

A launch begins when the one before it has ended and its writes are visible, unless it is dependent:
then it waits for it itself (griddepcontrol.wait), which the abstract machine asks of every access.
"""

from collections.abc import Sequence
from functools import lru_cache

from ptxflow.compiler.atoms.table import atom
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import Op, Statement, walk


@lru_cache(16)
def touched(kernel: Statement) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the global tensors that a kernel reads, and that it writes."""
    reads, writes = set[str](), set[str]()
    for _, node in walk(kernel):
        row = atom(node.arg.atom) if node.op is Op.ATOM else None
        for access in row.accesses if row else ():
            storage = row.operand(node, access.operand).src[0] if row else node
            if storage.op is Op.GLOBAL:
                (reads if access.mode == "r" else writes).add(storage.arg.name)
                if access.mode in ("rw", "a"):
                    reads.add(storage.arg.name)
    return frozenset(reads), frozenset(writes)


def check_order(kernels: Sequence[Statement]) -> None:
    """Raise SpecError for kernels of one name, and for a first kernel that does not wait."""
    names = [k.arg.name for k in kernels]
    if len(set(names)) < len(names):
        raise SpecError(f"kernels of a program share a name: {names}")
    first = kernels[0].arg
    if len(kernels) > 1 and first.dependent and first.chained is None:
        raise SpecError(
            f"{names[0]} is launched first and dependent: the last kernel of the call before may "
            "still read the workspace that it writes; fix: launch it behind everything"
        )


def read_after_write(kernels: Sequence[Statement]) -> set[str]:
    """Tensors that a kernel reads and one before it wrote, or it itself."""
    written, out = set[str](), set[str]()
    for kernel in kernels:
        reads, writes = touched(kernel)
        written |= writes
        out |= reads & written
    return out


def read_unwritten(kernels: Sequence[Statement], workspace: set[str]) -> set[str]:
    """Parts of the workspace that a kernel reads before any has written them."""
    written, out = set[str](), set[str]()
    for kernel in kernels:
        reads, writes = touched(kernel)
        out |= (reads & workspace) - written - writes
        written |= writes
    return out


def awaited(kernels: Sequence[Statement], kernel: Statement) -> frozenset[str] | None:
    """What a dependent launch of a program must wait for: the tensors that kernels before it touch,
    and one of them writes or it does itself. None for the first, which only chained calls have
    dependent: everything."""
    if kernel is kernels[0]:
        return None
    reads, writes = set[str](), set[str]()
    for earlier in kernels[: kernels.index(kernel)]:
        read, written = touched(earlier)
        reads |= read
        writes |= written
    return frozenset(writes | (reads & touched(kernel)[1]))
