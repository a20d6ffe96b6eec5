"""The pinned list of equivalent mutants: which mutants change nothing, and why.

`reason` looks at the changed statements alone and not at the validator's verdict, so that the list
works both ways: what it names must be accepted, and what is accepted must be on it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product, takewhile

from ptxflow.compiler.atoms import atom
from ptxflow.compiler.atoms.table import Access, all_atoms
from ptxflow.compiler.check import Program
from ptxflow.compiler.check.values import registers_of
from ptxflow.compiler.ir import KernelInfo, body_of, walk
from ptxflow.compiler.ir.nodes import Op, Slot, Statement, Storage, UOp, Use, const, special
from ptxflow.eval.verify.mutants import Mutant, orders

LANES = range(32)
CHUNK = 16  # bytes that a lane stores in shared memory


@dataclass(frozen=True)
class Equivalence:
    """A kind of equivalent mutant: the sentence is the reason."""

    why: str
    holds: Callable[[Statement, Mutant], bool]


def reason(kernel: Statement, mutant: Mutant) -> str:
    """Why a mutant computes the same as the kernel, or nothing."""
    for entry in EQUIVALENT:
        if entry.holds(kernel, mutant):
            return entry.why
    return ""


# -- what a statement is and touches --------------------------------------------------------------


def names(node: Statement) -> set[str]:
    """The atoms of a statement and of what stands in it, by `said`."""
    return {said(n.arg) for _, n in walk(node) if n.op is Op.ATOM}


def said(use: Use) -> str:
    """An atom's name, with its memory order where that is not the usual one."""
    usual = dict(atom(use.atom).defaults)
    orders = [v for n, v in use.attrs if n in ("acquire", "order") and v != usual.get(n, v)]
    return " ".join([use.atom, *orders])


def registers(node: Statement) -> set[str]:
    """The registers that a statement writes."""
    places = list[Storage]()
    for _, inner in walk(node):
        if inner.op is Op.ATOM:
            row = atom(inner.arg.atom)
            places += [row.operand(inner, a.operand).src[0] for a in row.accesses if a.mode != "r"]
    return {place.arg.name for place in places if place.op is Op.FRAG}


def warps(kernel: Statement, node: Statement) -> set[int] | None:
    """The warps of a block that may run a statement; None: that depends on more than the warp."""
    info: KernelInfo = kernel.arg
    every = set(range(info.warps))
    if node.op is Op.ROLE:
        return set(range(node.arg.first, node.arg.first + node.arg.warps))
    if node.op is not Op.IF:
        return every
    value, ranks = _program(kernel).value(node.src[0]), range(info.cluster)
    try:
        return {w for w in every if any(value({"warp": w, "cta_rank": r}) for r in ranks)}
    except KeyError:
        return None


_program = lru_cache(maxsize=8)(Program)


class _Anything(dict[str, int]):
    """An environment in which every name has a value."""

    def __init__(self, default: int, **known: int):
        super().__init__(known)
        self.default = default

    def __missing__(self, name: str) -> int:
        return self.default


#: (CTA, stage), [lo, hi) in the storage's unit, [lo, hi) across
Cell = tuple[tuple[int, int], int, int, int, int]


def _cells(kernel: Statement, node: Statement, operand: Slot) -> Iterator[list[Cell]]:
    """The places of an operand, in several environments."""
    program = _program(kernel)
    storage, stage_node, offset_node = operand.src
    row = atom(node.arg.atom)
    chunks = any(name == "offset" for name, _ in row.operands) and storage.op is Op.SMEM
    lane_offset = row.operand(node, "offset") if chunks else const(0)
    remote = any(name == "rank" for name, _ in row.operands) and storage.op is Op.SMEM
    rank = row.operand(node, "rank") if remote else special("cta_rank")
    for default, warp, lane in product((1, 2, 3), range(4), LANES if chunks else range(1)):
        env = _Anything(default, warp=warp, lane=lane)
        stage, first = program.value(stage_node)(env), program.value(offset_node)(env)
        if storage.op is Op.GLOBAL:
            rows, columns, *again = operand.arg
            count, stride = again or (1, 0)
            starts = range(first, first + count * stride, stride) if count > 1 else [first]
            yield [((0, 0), stage, stage + rows, c, c + columns) for c in starts]
            continue
        place = program.value(rank)(env), stage
        if chunks:
            first += program.value(lane_offset)(env)
            yield [(place, first, first + CHUNK, 0, 1)]
        else:
            yield [(place, first, first + operand.arg, 0, 1)]


def _meet(p: Cell, q: Cell) -> bool:
    return p[0] == q[0] and p[1] < q[2] and q[1] < p[2] and p[3] < q[4] and q[3] < p[4]


def _apart(kernel: Statement, one: Statement, a: Slot, two: Statement, b: Slot) -> bool:
    """Two operands never name the same place."""
    if a.src[0] is not b.src[0]:
        return True
    places = zip(_cells(kernel, one, a), _cells(kernel, two, b), strict=False)
    return not any(_meet(p, q) for ps, qs in places for p in ps for q in qs)


def _summands(one: Statement, two: Statement) -> bool:
    """Two that add to the same sum: their order changes its rounding at most."""
    if one.arg.atom != two.arg.atom:
        return False
    if one.arg.atom == "add_f32":
        return one.src[0] is two.src[0]
    if one.arg.atom not in ("wgmma", "tcgen05_mma"):
        return False
    added = [atom(n.arg.atom).operand(n, "accumulate") for n in (one, two)]
    return one.src[0] is two.src[0] and all(a.op is Op.CONST and a.arg[0] == 1 for a in added)


def commute(kernel: Statement, one: Statement, two: Statement) -> bool:
    """Neither orders anything, and what one writes the other does not touch; branches are what
    stands in them."""
    for node, other in ((one, two), (two, one)):
        if node.op is Op.IF:
            known = registers(other) & registers_of(node.src[0])
            return not known and all(commute(kernel, inner, other) for inner in body_of(node))
    if one.op is not Op.ATOM or two.op is not Op.ATOM or orders(one) or orders(two):
        return False
    if atom(one.arg.atom).effect not in _PLAIN or atom(two.arg.atom).effect not in _PLAIN:
        return False
    if registers(one) & registers_of(two) or registers(two) & registers_of(one):
        return False
    if _summands(one, two):
        return True
    first, second = atom(one.arg.atom), atom(two.arg.atom)
    return all(
        (_only_reads(one, x) and _only_reads(two, y))
        or _apart(kernel, one, first.operand(one, x.operand), two, second.operand(two, y.operand))
        for x in first.accesses
        for y in second.accesses
    )


def _only_reads(node: Statement, access: Access) -> bool:
    """It leaves what it reads there to be read."""
    return access.mode == "r" and node.arg.attr("last") != access.operand


def unordered(kernel: Statement, one: Statement, two: Statement) -> bool:
    """One orders others, the other computes in registers that only its own thread's ordinary
    instructions touch."""
    if orders(one) == orders(two):
        return False
    computes, rest = (two, one) if orders(one) else (one, two)
    if not _in_registers(kernel, computes):
        return False
    used = set().union(*(registers_of(s) for s in _operands(rest)))
    return not (_places(computes) & _places(rest) or registers(computes) & used)


def _operands(node: Statement) -> list[UOp]:
    """Values and places that a statement, or what stands in it, names."""
    return [s for _, inner in walk(node) for s in inner.src if not isinstance(s, Statement)]


def _places(node: Statement) -> set[UOp]:
    return {s.src[0] for s in _operands(node) if s.op is Op.SLOT}


def _in_registers(kernel: Statement, node: Statement) -> bool:
    """Instructions that order nothing and touch private registers alone."""
    if node.op is Op.IF:
        return all(_in_registers(kernel, inner) for inner in body_of(node))
    if node.op is not Op.ATOM or orders(node) or atom(node.arg.atom).effect:
        return False
    return _places(node) <= _program(kernel).private


#: effects that order nothing: what arrives adds its bytes to a barrier, in any order
_PLAIN = {"", "mma", "tma_load", "bulk_load", "st_async"}


# -- the list -------------------------------------------------------------------------------------

STORES = {"st_global", "st_global_narrow", "st_shared_v4", "stmatrix_x4"}
LOADS = {row.name for row in all_atoms() if row.effect in ("tma_load", "bulk_load")}
HINTS = {"prefetch_map", "tma_prefetch", "grid_launch_dependents"}
FENCES = {"tcgen05_fence_before", "tcgen05_fence_after"}
RELEASES = {"mbar_arrive", "mbar_arrive_peer", "mbar_arrive_peer release"}

# of the kernel and two neighbours, in their first order
Pair = Callable[[Statement, Statement, Statement], bool]


def _reordered(
    why: str,
    holds: Pair,
    where: Callable[[Statement], bool] = lambda kernel: True,
    operators: tuple[str, ...] = ("swap", "move"),
) -> Equivalence:
    """Two neighbours that may change places, in kernels with the property `where`."""

    def applies(kernel: Statement, mutant: Mutant) -> bool:
        return mutant.operator in operators and where(kernel) and holds(kernel, *mutant.nodes)

    return Equivalence(why, applies)


def _passing(first: set[str], second: set[str]) -> Pair:
    """A statement of the first atoms alone and one of the second alone, in either order."""

    def holds(kernel: Statement, one: Statement, two: Statement) -> bool:
        a, b = names(one), names(two)
        return bool(a and b) and ((a <= first and b <= second) or (a <= second and b <= first))

    return holds


def _in_order(first: set[str], second: set[str]) -> Pair:
    """The second statement, of just these atoms, is moved before the first, of just those."""
    return lambda kernel, one, two: (names(one), names(two)) == (first, second)


def _about(bar: str, *others: str) -> Pair:
    """An arrival at one barrier passes a statement that has none of the other atoms in it."""

    def holds(kernel: Statement, one: Statement, two: Statement) -> bool:
        for node, other in ((one, two), (two, one)):
            inner = [n for _, n in walk(node) if n.op is Op.ATOM]
            alone = len(inner) == 1 and said(inner[0].arg) in {*RELEASES, "mbar_arrive_expect"}
            if alone and inner[0].src[0].src[0].arg.name == bar:
                return not names(other) & set(others)
        return False

    return holds


def _drains(kernel: Statement, one: Statement, two: Statement) -> bool:
    """The loop that waits for all releases of a ring passes what else ends a thread's work."""
    ends = {"bulk_wait_read", "tcgen05_commit", "tma_store", "bulk_commit", *STORES}
    for node, other in ((one, two), (two, one)):
        loops = (n for _, n in walk(node) if n.op is Op.LOOP)
        if names(node) == {"mbar_wait"} and any(n.src[0].arg[0] == "drain" for n in loops):
            return names(other) <= ends
    return False


def _one_tile(kernel: Statement) -> bool:
    """No loop over tiles."""
    loops = (n.src[0].arg[0] for _, n in walk(kernel) if n.op is Op.LOOP)
    return not any(name.startswith("tile_") for name in loops)


def _pairs(kernel: Statement) -> bool:
    return bool(kernel.arg.cta_group == 2)


def _on(arch: str) -> Callable[[Statement], bool]:
    return lambda kernel: bool(kernel.arg.arch == arch)


def _not_specialised(kernel: Statement) -> bool:
    """One role alone loads, and it uses what it loads."""
    roles = [names(s) for s in kernel.src if s.op is Op.ROLE and names(s) & LOADS]
    return len(roles) == 1 and bool(roles[0] & {"wgmma", "tcgen05_ld"})


def _last_release(kernel: Statement, one: Statement, two: Statement) -> bool:
    """In a block of one tile, the release of the last stage passes the wait for its last MMA."""
    for wait, release in ((one, two), (two, one)):
        if (names(wait), names(release)) == ({"wgmma_wait"}, {"mbar_arrive_peer"}):
            last = wait.op is Op.ATOM and wait.arg.attr("pending") == 0
            return last and _one_tile(kernel)
    return False


def _refill(kernel: Statement, one: Statement, two: Statement) -> bool:
    """A step's commit, or the step, passes the refill of the step before."""
    step, refill = names(one), names(two)
    waits = {"mbar_wait", "mbar_arrive_expect"}
    return (
        "tcgen05_commit" in step
        and step <= {"mbar_wait", "tcgen05_fence_after", "tcgen05_mma", "tcgen05_commit"}
        and waits <= refill <= waits | LOADS
        and two.op is Op.IF
    )


def _begins_only(kernel: Statement, one: Statement, two: Statement) -> bool:
    """A role that loads and multiplies passes the last meeting of the cluster."""
    works = STORES | {"tcgen05_ld", "wgmma"}
    return one.op is Op.ROLE and names(two) == {"cluster_arrive"} and not names(one) & works


def _sums(kernel: Statement, one: Statement, two: Statement) -> bool:
    """The role that sums parts passes a meeting of the cluster that follows their arrival."""
    role, meeting = sorted((names(one), names(two)), key=len, reverse=True)
    return "add_f32" in role and meeting <= {"cluster_arrive relaxed", "cluster_wait"}


def _other_warps(kernel: Statement, one: Statement, two: Statement) -> bool:
    a, b = warps(kernel, one), warps(kernel, two)
    return a is not None and b is not None and not a & b


def _threads_only(kernel: Statement, one: Statement, two: Statement) -> bool:
    """An mbarrier.init moves past the fence, of a barrier that only threads of its CTA use, and
    learn of from a meeting that is not relaxed."""
    if names(one) | names(two) != {"mbar_init", "fence_mbar_init"} or one.op is not Op.ATOM:
        return False
    prologue = takewhile(lambda node: node.op is not Op.ROLE, kernel.src)
    if not any(names(node) & {"cta_sync", "cluster_arrive"} for node in prologue):
        return False
    bar = (one if one.arg.atom == "mbar_init" else two).src[0].src[0]
    users = {said(n.arg) for n in _program(kernel).users[bar]}
    return users <= {"mbar_init", "mbar_wait", "mbar_arrive", "mbar_arrive_expect"}


# changes of one statement


def _hints(kernel: Statement, mutant: Mutant) -> bool:
    """A statement that only prefetches, or lets later launches begin, is moved or left out."""
    moved = mutant.operator in ("swap", "move", "delete")
    return moved and any(names(node) and names(node) <= HINTS for node in mutant.nodes)


def _free_barrier(kernel: Statement, mutant: Mutant) -> bool:
    if mutant.change != "next barrier":
        return False
    used = {n.arg.attr("id") for _, n in walk(kernel) if n.op is Op.ATOM}
    return mutant.nodes[0].arg.attr("id") + 1 not in used


def _same_registers(kernel: Statement, mutant: Mutant) -> bool:
    if mutant.operator != "number" or mutant.change not in ("inc", "dec"):
        return False
    return bool(mutant.nodes[0].arg.attr("registers") == _program(kernel).launched)


def _tensor_memory_only(kernel: Statement, mutant: Mutant) -> bool:
    if mutant.change != "relaxed mbar_arrive_peer":
        return False
    return bool(mutant.nodes[0].src[0].src[0].arg.name == "acc_empty")


def _pair_leaves(kernel: Statement, mutant: Mutant) -> bool:
    """The meeting before a pair frees tensor memory is relaxed, in a block of one tile."""
    if mutant.change != "relaxed cluster_arrive" or not _one_tile(kernel):
        return False
    prologue = takewhile(lambda node: node.op is not Op.ROLE, mutant.tree.src)
    return _pairs(kernel) and any("cluster_arrive" in names(node) for node in prologue)


EQUIVALENT = (
    _reordered("different warps run them: their order in the text means nothing", _other_warps),
    _reordered("neither orders anything, and they touch different places", commute),
    _reordered("a thread's registers need no order", unordered),
    Equivalence("it says what may begin early, and what follows waits itself", _hints),
    _reordered(
        "the bytes may land before they are expected, while the phase lacks an arrival",
        _passing({"mbar_arrive_expect"}, LOADS),
    ),
    _reordered("the order of arrivals means nothing", _passing(RELEASES, RELEASES)),
    _reordered(
        "tcgen05 fences order accesses to tensor memory alone",
        _passing(FENCES, {*STORES, "st_async_v4", "pack", "bulk_wait_read"}),
    ),
    _reordered("two fences for different accesses", _passing(FENCES, {"fence_proxy_async"})),
    _reordered(
        "they touch different places, and all warps meet after both",
        _in_order({"mbar_init", "fence_mbar_init"}, {"tmem_alloc", "tmem_relinquish"}),
    ),
    _reordered(
        "a pair meets twice before anyone uses a barrier",
        _in_order({"mbar_init", "fence_mbar_init"}, {"cluster_arrive relaxed"}),
        _pairs,
    ),
    _reordered(
        "the barrier hands over staging memory, not registers or tensor memory",
        _passing({"named_sync"}, {"pack", "tcgen05_ld"}),
    ),
    _reordered(
        "the arrival releases tensor memory, the proxy fence is for staged memory",
        _passing(RELEASES, {"fence_proxy_async"}),
        _on("sm_100a"),
    ),
    _reordered(
        "the arrival releases a stage, which the other statement does not touch",
        _passing(RELEASES, {"pack", "bulk_wait_read"}),
        _on("sm_90a"),
    ),
    _reordered(
        "what the role begins, others of its CTA see complete and then arrive",
        _begins_only,
        operators=("move",),
    ),
    _reordered(
        "the CTA sums what has arrived in its own memory, and meets for the others",
        _sums,
        operators=("move",),
    ),
    _reordered(
        "the thread has itself waited for the phase before the one that it opens",
        _in_order({"mbar_wait"}, {"mbar_arrive_expect"}),
        _not_specialised,
    ),
    _reordered(
        "the refill waits for the commit of an earlier step, so that both orders do", _refill
    ),
    _reordered(
        "the barrier's users are threads of the CTA, which the next barrier of the CTA orders",
        _threads_only,
    ),
    _reordered(
        "the store reads staging memory, which the other statement does not touch",
        _passing({"tma_store", "bulk_commit"}, {"pack", "tcgen05_ld", "tcgen05_wait_ld"}),
    ),
    _reordered("peers release stages until the thread ends, whatever else it does before", _drains),
    _reordered("the last release of a stage only lets peers leave", _last_release),
    _reordered(
        "passing a turn says what was waited for, not what came of it",
        _about("turn", "mbar_wait"),
        operators=("move",),
    ),
    _reordered(
        "the parts may be expected at any time before the wait for them",
        _about("parts", "mbar_wait .acquire.cluster", "cluster_arrive relaxed"),
        operators=("move",),
    ),
    Equivalence("another named barrier that nobody uses", _free_barrier),
    Equivalence("the count is what the lanes have: neither direction changes it", _same_registers),
    Equivalence("waits for more groups than it has to", lambda kernel, m: m.change == "-1"),
    Equivalence("hands over tensor memory alone, which its own fences order", _tensor_memory_only),
    Equivalence("hands over tensor memory alone, which its own fences order", _pair_leaves),
)
