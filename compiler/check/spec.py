"""Static rules: nesting, operand kinds, scope against role, resource budgets.

What no rule matches is illegal: an unknown atom, an operand of another kind, an atom of another
architecture.
"""

from dataclasses import dataclass

from ptxflow.compiler.atoms.table import KINDS, READ_ONLY, STORAGE_OF, Atom, Lanes, Scope, atom
from ptxflow.compiler.check.program import registers_at_launch
from ptxflow.compiler.check.reach import Slots
from ptxflow.compiler.device import Device
from ptxflow.compiler.errors import SpecError
from ptxflow.compiler.ir import KernelInfo, Op, Role, Statement, Storage, Value, body_of, show, walk
from ptxflow.compiler.lower import layout


@dataclass(frozen=True)
class Place:
    """Where a statement stands: its role, whether one lane runs it, what was branched on."""

    role: Role
    elected: bool = False
    conditional: bool = False


def check_spec(kernel: Statement, device: Device) -> int:
    """Check every static rule; the number of checks that held. Raises SpecError at the first."""
    info: KernelInfo = kernel.arg
    whole = Role("block", 0, info.warps)
    held = _budgets(kernel, device)
    for statement in kernel.src:
        held += _statement(statement, Place(whole), info)
    return held + _read_only(kernel) + _offsets(kernel)


def _offsets(kernel: Statement) -> int:
    """Lanes' offsets into shared memory end in the slot that the access names."""
    touches = list(Slots(kernel).touches())
    for touch in touches:
        if not touch.exact:
            _fail(
                touch.node,
                f"a lane's offset reaches byte {touch.least} of its slot of {touch.tensor}, "
                "behind the end; fix: keep the offset inside, or name a larger slot",
            )
    return len(touches)


def _read_only(kernel: Statement) -> int:
    """What is read through the read-only path is written nowhere in the kernel (9.7.9.9 ld.nc)."""
    reads, written = list[tuple[Statement, Storage]](), dict[Storage, Statement]()
    for _, node in walk(kernel):
        for access in atom(node.arg.atom).accesses if node.op is Op.ATOM else ():
            storage: Storage = atom(node.arg.atom).operand(node, access.operand).src[0]
            if access.proxy == READ_ONLY:
                reads.append((node, storage))
            elif access.mode != "r":
                written[storage] = node
    for node, storage in reads:
        if storage in written:
            writer = written[storage]
            _fail(node, f"reads as constant what {show(writer)} at {writer.site} writes")
    return len(reads)


def _fail(node: Statement, fact: str) -> None:
    raise SpecError(f"{show(node)} at {node.site}: {fact}")


def _statement(node: Statement, place: Place, info: KernelInfo) -> int:
    match node.op:
        case Op.ATOM:
            return _atom(node, place, info)
        case Op.ROLE:
            if place.role.name != "block":
                _fail(node, "a role inside a role")
            place = Place(node.arg, node.arg.elected)
            _splits_registers(node)
        case Op.IF:
            _uniform(node, node.src[:1])
            place = Place(place.role, place.elected or node.arg, True)
        case Op.LOOP:
            _uniform(node, node.src[1:4])
        case _:
            _fail(node, f"{node.op.name} is not a statement")
    return sum(_statement(s, place, info) for s in body_of(node))


def _splits_registers(node: Statement) -> None:
    """A role that counts on a number of registers begins by asking for them."""
    regs, first = node.arg.regs, node.src[0] if node.src else node
    if regs and not (
        first.op is Op.ATOM
        and atom(first.arg.atom).effect == "registers"
        and first.arg.attr("registers") == regs
    ):
        _fail(node, f"role {node.arg.name} is to have {regs} registers: begin with setmaxnreg")


def _uniform(node: Statement, values: tuple[Value, ...]) -> None:
    """Lanes of a warp branch together: barriers and .aligned instructions rely on it."""
    if any(_depends(v, "lane") for v in values):
        _fail(node, "branches on the lane: lanes must stay together, use elect")


def _depends(node: Value, name: str) -> bool:
    if node.op is Op.VAR:
        return bool(node.arg == (name, "special"))
    return any(_depends(s, name) for s in node.src)


def _atom(node: Statement, place: Place, info: KernelInfo) -> int:
    try:
        row = atom(node.arg.atom)
    except KeyError as unknown:
        raise SpecError(f"at {node.site}: {unknown.args[0]}") from None
    if info.arch not in row.archs:
        _fail(node, f"not an instruction of {info.arch}")
    if len(node.src) != len(row.operands):
        _fail(node, f"takes {len(row.operands)} operands")
    for (name, kind), operand in zip(row.operands, node.src, strict=True):
        if operand.op not in KINDS[kind]:
            _fail(node, f"operand {name} must be of kind {kind}, not {operand.op.name}")
        if kind in STORAGE_OF and operand.src[0].op is not STORAGE_OF[kind]:
            _fail(node, f"operand {name} must lie in {STORAGE_OF[kind].name}")
    if node.arg.attr("cta_group", info.cta_group) != info.cta_group:
        _fail(node, f"cta_group must be {info.cta_group} throughout the kernel")
    for rule in row.rules:
        if not rule.holds(node):
            _fail(node, rule.sentence)
    _scope(node, row, place)
    return len(row.operands) + len(row.rules) + 2


def _scope(node: Statement, row: Atom, place: Place) -> None:
    if row.lanes is Lanes.ONE and not place.elected:
        _fail(node, "one lane issues this: put it under elect")
    if row.lanes is Lanes.ALL and place.elected:
        _fail(node, "all lanes issue this together: not under elect")
    if row.scope is Scope.WARPGROUP:
        if place.role.first % 4 or place.role.warps % 4:
            _fail(node, f"needs whole warpgroups, role {place.role.name} has other warps")
        if place.conditional:
            _fail(node, "must not stand under a condition: all four warps run it together")
    if row.scope in (Scope.CTA, Scope.CLUSTER) and (place.role.name != "block" or place.elected):
        _fail(node, "every warp of the block must run this, outside any role")


def _budgets(kernel: Statement, device: Device) -> int:
    info: KernelInfo = kernel.arg
    plan = layout(info)
    roles = [s for s in kernel.src if s.op is Op.ROLE]
    limits = [
        ("architecture", info.arch == device.arch, f"{info.arch} is not {device.arch}"),
        (
            "shared memory",
            plan.smem_bytes <= device.smem_per_block,
            f"{plan.smem_bytes} bytes exceed the {device.smem_per_block} of a block",
        ),
        (
            "tensor memory",
            plan.tmem_columns <= device.tmem_columns,
            f"{plan.tmem_columns} columns exceed {device.tmem_columns}",
        ),
        (
            "threads",
            32 * info.warps <= device.threads_per_block,
            f"{32 * info.warps} exceed {device.threads_per_block}",
        ),
        (
            "cluster",
            info.cluster <= device.max_cluster,
            f"{info.cluster} CTAs exceed the portable {device.max_cluster}",
        ),
        (
            "a pair is a cluster of two",
            info.cta_group == 1 or (info.cluster == 2 and device.has_tmem),
            f"cta_group 2 in a cluster of {info.cluster} on {info.arch}",
        ),
    ]
    limits += _register_pool(info, [r.arg for r in roles])
    for name, holds, fact in limits:
        if not holds:
            raise SpecError(f"kernel {info.name} at {kernel.site}: {name}: {fact}")
    return len(limits)


def _register_pool(info: KernelInfo, roles: list[Role]) -> list[tuple[str, bool, str]]:
    """setmaxnreg moves registers between warpgroups: the sum must fit what was launched with."""
    if not any(r.regs for r in roles):
        return []
    largest = max(r.regs for r in roles)
    launched = registers_at_launch(info, largest)
    pool = launched * info.warps // 4
    asked = sum(r.regs * r.warps // 4 for r in roles)
    return [
        ("register split", all(r.regs for r in roles), "some role names no register count"),
        ("register split", sum(r.warps for r in roles) == info.warps, "some warps have no role"),
        ("register pool", asked <= pool, f"{asked} registers a lane asked of {pool} launched"),
    ]
