"""Atoms of both targets: barriers, fences, TMA, bulk groups, grids."""

from ptxflow.compiler.atoms.table import Rule, instruction
from ptxflow.compiler.ir import Statement


def _box_bytes(use: Statement) -> bool:
    columns, rows = use.arg.attr("box")
    return bool(use.src[0].arg == columns * rows * use.arg.attr("element"))


instruction(
    "mbar_init(bar: mbar w) one",
    lambda use, t: f"mbarrier.init.shared::cta.b64 [{t['bar']}], {use.src[0].src[0].arg.count};",
    "9.7.13.15.9 mbarrier.init",
    sass=("mbarrier.init",),
    rules=(Rule("the count is 1..2^20-1", lambda u: 1 <= u.src[0].src[0].arg.count < 2**20),),
)
instruction(
    "fence_mbar_init() one orders -> fence_mbar_init",
    "fence.mbarrier_init.release.cluster;",
    "9.7.13.4 fence.mbarrier_init",
)
instruction(
    "cta_sync() cta orders -> cta_sync", "bar.sync 0;", "9.7.13.1 barrier.sync", sass=("bar.sync",)
)
_NAMED_RULES = (
    Rule("a named barrier is 1..15", lambda u: 1 <= u.arg.attr("id") <= 15),
    Rule("it counts whole warps", lambda u: u.arg.attr("threads") % 32 == 0),
)
instruction(
    "named_sync(id threads: int) warp orders -> named_sync",
    "bar.sync {id}, {threads};",
    "9.7.13.1 barrier.sync",
    rules=_NAMED_RULES,
)
instruction(
    "named_arrive(id threads: int) warp orders -> named_arrive",
    "bar.arrive {id}, {threads};",
    "9.7.13.1 barrier.arrive: hands over without waiting; others bar.sync on the same barrier",
    sass=("bar.arrive",),
    rules=_NAMED_RULES,
)
instruction(
    "warp_sync(mask: value=0xFFFFFFFF) warp orders -> warp_sync",
    "bar.warp.sync {mask};",
    "9.7.13.2 bar.warp.sync: orders memory accesses among the lanes, which are all of the warp",
)
instruction(
    "cluster_arrive(order: str='release') cluster orders -> cluster_arrive",
    "barrier.cluster.arrive.{order}.aligned;",
    "9.7.13.3 barrier.cluster; relaxed: hands over initialised barriers and lives, no data",
)
instruction(
    "cluster_wait() cluster orders -> cluster_wait",
    "barrier.cluster.wait.acquire.aligned;",
    "9.7.13.3 barrier.cluster",
)
instruction(
    "mbar_wait(bar: mbar, parity: value, acquire: str='') any orders -> mbar_wait",
    "WAIT_{uid}:\nmbarrier.try_wait.parity{acquire}.shared::cta.b64 %pw, [{bar}], {parity};\n"
    "@!%pw bra WAIT_{uid};",
    "9.7.13.15.16 mbarrier.try_wait (may return false: always loop); acquire.cluster: takes over "
    "what a peer released",
    sass=("mbarrier.try_wait",),
    label=True,
)
instruction(
    "mbar_arrive(bar: mbar) any orders -> mbar_arrive",
    "mbarrier.arrive.shared::cta.b64 _, [{bar}];",
    "9.7.13.15.13 mbarrier.arrive",
)
instruction(
    "mbar_arrive_peer(bar: mbar, rank: value, order: str='relaxed') any orders -> mbar_arrive",
    "mapa.shared::cluster.u32 %ra, {bar_reg}, {rank};\n"
    "mbarrier.arrive.{order}.cluster.shared::cluster.b64 _, [%ra];",
    "9.7.13.15.13 mbarrier.arrive; relaxed: hands back completed asynchronous reads, no data",
)
instruction(
    "mbar_arrive_expect(bar: mbar, bytes: int) one orders -> mbar_arrive",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {bytes};",
    "9.7.13.15.13 mbarrier.arrive.expect_tx",
    sass=("mbarrier.arrive.expect_tx",),
    rules=(Rule("tx bytes are below 2^20", lambda u: 0 < u.arg.attr("bytes") < 2**20),),
)

_TMA_RULES = (
    Rule("the box fills its shared-memory slot exactly", _box_bytes),
    Rule("a box has 1..256 rows", lambda u: 1 <= u.arg.attr("box")[1] <= 256),
    Rule("a shared-memory box is a multiple of 128 bytes", lambda u: u.src[0].arg % 128 == 0),
)
_ISA_TMA = "9.7.9.27 cp.async.bulk.tensor"


def _load_text(use: Statement, text: dict[str, str]) -> str:
    head = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    where = f"[{text['dst']}], [{text['map']}, {{{text['c0']}, {text['c1']}}}]"
    if use.arg.attr("cta_group") == 2:
        return f"and.b32 %ra, {text['bar_reg']}, 0xFEFFFFFF;\n{head}.cta_group::2 {where}, [%ra];"
    where = f"{where}, [{text['bar']}]"
    if not (mask := use.arg.attr("mask")):
        return f"{head} {where};"
    return f"mov.b16 %rh, {mask};\n{head}.multicast::cluster {where}, %rh;"


def _load_sass(use: Statement) -> tuple[str, ...]:
    if use.arg.attr("cta_group") == 2:
        return ("TMA load cta_group::2",)
    return ("TMA tensor load" + " multicast" * bool(use.arg.attr("mask")),)


instruction(
    "tma_load(dst: smem w async mbar, map: map, c0 c1: value, bar: mbar, box: pair, element: int, "
    "cta_group: int?, apart leader: bool?, mask: int=0) one -> tma_load",
    _load_text,
    _ISA_TMA + "; with a mask to the same offsets of data and barrier in every CTA of it; of a "
    "pair, cta_group::2, the barrier is the even CTA's (rank bit 0 is cleared)",
    sass=_load_sass,
    rules=_TMA_RULES,
)
instruction(
    "prefetch_map(map: map) one",
    "prefetch.tensormap [{map}];",
    "9.7.9.15 prefetch.tensormap: brings a tensor map near, before a copy asks for it",
    sass=("prefetch.tensormap",),
)
instruction(
    "tma_store(src: smem r async bulk, map: map, c0 c1: value, tile: global w async bulk, box: "
    "pair, element: int) one",
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{map}, {{{c0}, {c1}}}], [{src}];",
    _ISA_TMA,
    sass=("TMA tensor store",),
    rules=_TMA_RULES,
)
instruction(
    "bulk_commit(pipe: str='bulk') one orders -> commit",
    "cp.async.bulk.commit_group;",
    "9.7.9.28.1 cp.async.bulk.commit_group",
    sass=("bulk commit_group",),
)
instruction(
    "bulk_wait_read(pending: int=0, pipe: str='bulk') one orders -> wait_group",
    "cp.async.bulk.wait_group.read {pending};",
    "9.7.9.28.2 cp.async.bulk.wait_group: the sources have been read",
)
instruction(
    "fence_proxy_async() any orders -> fence_proxy_async",
    "fence.proxy.async.shared::cta;",
    "9.7.13.4 fence.proxy.async",
    sass=("fence.proxy.async smem",),
)
instruction(
    "grid_wait() any orders -> grid_wait",
    "griddepcontrol.wait;",
    "9.7.13.13 griddepcontrol: until the grids before have completed and are visible",
    sass=("griddepcontrol.wait",),
)
instruction(
    "grid_launch_dependents() any -> let_dependents",
    "griddepcontrol.launch_dependents;",
    "9.7.13.13 griddepcontrol: a hint that the next grid may start",
    sass=("griddepcontrol.launch",),
)
