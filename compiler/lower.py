"""From roles to a whole kernel: prologue, register splits and teardown follow from declarations.

mbarrier.init and its fence, the barriers around it, TMEM allocation and release, setmaxnreg and
the layout of shared memory are derived here, as ordinary statements that the validator checks.
"""

from dataclasses import dataclass, replace

from ptxflow.compiler.atoms import at, atom
from ptxflow.compiler.ir import Body, Role, elect, flatten, kernel, program, role, slot, smem
from ptxflow.compiler.ir.nodes import WARP, Op, Statement, Storage, const
from ptxflow.compiler.ir.statements import KernelInfo, body_of, kernels_of, walk, when, with_body

TILE_ALIGN = 1024


@dataclass(frozen=True)
class Layout:
    """Where storage lies: byte offsets in shared memory, columns in TMEM; totals of both."""

    smem: dict[Storage, int]
    smem_bytes: int
    tmem: dict[Storage, int]
    tmem_columns: int


def layout(info: KernelInfo) -> Layout:
    """Barriers and small buffers share the first KiB; tiles follow, each on its alignment."""
    offsets: dict[Storage, int] = {}
    at_byte = 0
    shared = [s for s in info.storage if s.op in (Op.SMEM, Op.MBAR)]
    for storage in sorted(shared, key=lambda s: s.arg.align >= TILE_ALIGN):
        align = storage.arg.align
        at_byte = -(-at_byte // align) * align
        offsets[storage] = at_byte
        at_byte += storage.arg.size * storage.arg.stages
    columns: dict[Storage, int] = {}
    at_column = 0
    for storage in info.storage:
        if storage.op is Op.TMEM:
            columns[storage] = at_column
            at_column += storage.arg.size * storage.arg.stages
    allocated = 1 << max(5, (at_column - 1).bit_length()) if at_column else 0
    return Layout(offsets, at_byte, columns, allocated)


def launch_registers(threads: int) -> int:
    """Registers a thread starts with when so many, of all blocks at a time, share the file."""
    return 65536 // threads // 8 * 8


def finish(info: KernelInfo, *body: Body, drained: bool = False, meet: bool = True) -> Statement:
    """The kernel with its derived prologue and teardown; `body` is roles, and barriers between.

    `drained`: when its roles end, warp 0 has seen every access to TMEM complete, so that a single
    CTA needs no barrier before it frees TMEM. `meet`: the CTAs of a cluster end together; not
    needed where each has seen all that others do to it. The validator checks both.
    """
    meet = meet and info.cluster > 1
    plan = layout(info)
    if plan.tmem_columns:
        address = smem("tmem_slot", 16, align=16)
        info = KernelInfo(**{**info.__dict__, "storage": (*info.storage, address)})
        before = _prologue(info, _allocate(info, address, plan.tmem_columns))
        before.append(at.tmem_address(slot(address)))
        after = _release(info, plan.tmem_columns, drained, meet)
    else:
        before = _prologue(info, [])
        after = _cluster_sync(release=True) if meet else []
    threads = 32 * info.warps * info.resident
    return kernel(info, before, [_with_registers(s, threads) for s in flatten(body)], after)


def _cluster_sync(release: bool = False) -> list[Statement]:
    """Relaxed where it hands over initialised barriers, or lives, and no data: a release waits for
    every store of the block to reach the whole GPU."""
    return [at.cluster_arrive(order="release" if release else "relaxed"), at.cluster_wait()]


def _prologue(info: KernelInfo, allocate: list[Statement]) -> list[Statement]:
    bars = [slot(b, i) for b in info.storage if b.op is Op.MBAR for i in range(b.arg.stages)]
    if not bars and not allocate:
        return []  # CTAs of a cluster meet before they access each other: the validator checks it
    init = elect(WARP.eq(0), [at.mbar_init(b) for b in bars], at.fence_mbar_init())
    if info.cluster == 1:
        return [init, *allocate, at.cta_sync()]
    if info.cta_group == 1:
        return [init, *allocate, *_cluster_sync(release=bool(allocate))]
    # a pair allocates together: both CTAs must run before, and both have allocated after
    return [init, *_cluster_sync(), *allocate, *_cluster_sync(release=True)]


def _allocate(info: KernelInfo, address: Storage, columns: int) -> list[Statement]:
    group = info.cta_group
    return [
        when(
            WARP.eq(0),
            at.tmem_alloc(slot(address), columns=columns, cta_group=group),
            at.tmem_relinquish(cta_group=group),
        )
    ]


def _release(info: KernelInfo, columns: int, drained: bool, meet: bool) -> list[Statement]:
    sync = _cluster_sync(release=True) if meet else [] if drained else [at.cta_sync()]
    free = when(
        WARP.eq(0),
        at.tcgen05_fence_after(),
        at.tmem_dealloc(columns=columns, cta_group=info.cta_group),
    )
    return [*sync, free]


def _with_registers(node: Statement, threads: int) -> Statement:
    if node.op is not Op.ROLE or not node.arg.regs:
        return node
    spec: Role = node.arg
    direction = "dec" if spec.regs < launch_registers(threads) else "inc"
    change = at.set_max_registers(direction=direction, registers=spec.regs)
    return role(spec, change, *node.src)


def chained(lowered: Statement, constant: tuple[str, ...]) -> Statement:
    """A lowered kernel or program whose call may begin before what is in the stream has ended: its
    first kernel waits before it accesses tensors but the `constant` ones, and its last lets the
    next call begin. A kernel that is chained already is left alone."""
    kernels = list(kernels_of(lowered))
    if kernels[0].arg.chained is not None:
        return lowered
    body = body_of(kernels[0])
    ahead = next((i for i, s in enumerate(body) if _meets_memory(s)), len(body))
    first = with_body(kernels[0], (*body[:ahead], at.grid_wait(), *body[ahead:]))
    info = replace(first.arg, dependent=True, chained=constant)
    kernels[0] = Statement(first.op, first.src, info, first.site)
    kernels[-1] = with_body(kernels[-1], (at.grid_launch_dependents(), *body_of(kernels[-1])))
    return kernels[0] if lowered.op is Op.KERNEL else program(*kernels)


def _meets_memory(statement: Statement) -> bool:
    """Whether it, or one inside, has to do with global memory, or lets the next launch begin."""
    return any(
        {"map", "global"} & {kind for _, kind in atom(node.arg.atom).operands}
        or atom(node.arg.atom).effect == "let_dependents"
        for _, node in walk(statement)
        if node.op is Op.ATOM
    )


def single(*statements: Statement) -> Statement:
    """The statements, run by one elected lane of each warp."""
    return elect(const(1), *flatten(list(statements)))
