"""Atoms of both targets: barriers, fences, TMA, bulk groups, grids."""

from __future__ import annotations

from ptxflow.compiler.atoms.table import ASYNC, Lanes, Rule, Scope, accesses, define, signature
from ptxflow.compiler.ir import UOp


def _box_bytes(use: UOp) -> bool:
    columns, rows = use.arg.attr("box")
    return bool(use.src[0].arg == columns * rows * use.arg.attr("element"))


define(
    "mbar_init",
    signature("bar: mbar"),
    Scope.THREAD,
    Lanes.ONE,
    lambda use, t: f"mbarrier.init.shared::cta.b64 [{t['bar']}], {use.src[0].src[0].arg.count};",
    "9.7.13.15.9 mbarrier.init",
    accesses=accesses(w="bar"),
    sass=("mbarrier.init",),
    rules=(Rule("the count is 1..2^20-1", lambda u: 1 <= u.src[0].src[0].arg.count < 2**20),),
)
define(
    "fence_mbar_init",
    (),
    Scope.THREAD,
    Lanes.ONE,
    "fence.mbarrier_init.release.cluster;",
    "9.7.13.4 fence.mbarrier_init",
    effect="fence_mbar_init",
    orders=True,
)
define(
    "cta_sync",
    (),
    Scope.CTA,
    Lanes.ALL,
    "bar.sync 0;",
    "9.7.13.1 barrier.sync",
    effect="cta_sync",
    sass=("bar.sync",),
    orders=True,
)
_NAMED_RULES = (
    Rule("a named barrier is 1..15", lambda u: 1 <= u.arg.attr("id") <= 15),
    Rule("it counts whole warps", lambda u: u.arg.attr("threads") % 32 == 0),
)
define(
    "named_sync",
    (),
    Scope.WARP,
    Lanes.ALL,
    "bar.sync {id}, {threads};",
    "9.7.13.1 barrier.sync",
    effect="named_sync",
    orders=True,
    rules=_NAMED_RULES,
)
define(
    "named_arrive",
    (),
    Scope.WARP,
    Lanes.ALL,
    "bar.arrive {id}, {threads};",
    "9.7.13.1 barrier.arrive: hands over without waiting; others bar.sync on the same barrier",
    effect="named_arrive",
    sass=("bar.arrive",),
    orders=True,
    rules=_NAMED_RULES,
)
define(
    "warp_sync",
    (),
    Scope.WARP,
    Lanes.ALL,
    "bar.warp.sync 0xFFFFFFFF;",
    "9.7.13.2 bar.warp.sync: orders memory accesses among the lanes",
    effect="warp_sync",
    orders=True,
)
define(
    "cluster_arrive",
    (),
    Scope.CLUSTER,
    Lanes.ALL,
    "barrier.cluster.arrive.release.aligned;",
    "9.7.13.3 barrier.cluster",
    effect="cluster_arrive",
    orders=True,
)
define(
    "cluster_arrive_relaxed",
    (),
    Scope.CLUSTER,
    Lanes.ALL,
    "barrier.cluster.arrive.relaxed.aligned;",
    "9.7.13.3 barrier.cluster; relaxed: hands over initialised barriers and lives, no data",
    effect="cluster_arrive",
    orders=True,
    defaults=(("relaxed", True),),
)
define(
    "cluster_wait",
    (),
    Scope.CLUSTER,
    Lanes.ALL,
    "barrier.cluster.wait.acquire.aligned;",
    "9.7.13.3 barrier.cluster",
    effect="cluster_wait",
    orders=True,
)
define(
    "mbar_wait",
    signature("bar: mbar, parity: value"),
    Scope.THREAD,
    Lanes.ANY,
    "WAIT_{uid}:\nmbarrier.try_wait.parity.shared::cta.b64 %pw, [{bar}], {parity};\n"
    "@!%pw bra WAIT_{uid};",
    "9.7.13.15.16 mbarrier.try_wait (may return false: always loop)",
    effect="mbar_wait",
    sass=("mbarrier.try_wait",),
    label=True,
    orders=True,
)
define(
    "mbar_wait_cluster",
    signature("bar: mbar, parity: value"),
    Scope.THREAD,
    Lanes.ANY,
    "WAIT_{uid}:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %pw, [{bar}], "
    "{parity};\n@!%pw bra WAIT_{uid};",
    "9.7.13.15.16 mbarrier.try_wait; acquire.cluster: takes over what a peer released",
    effect="mbar_wait",
    sass=("mbarrier.try_wait",),
    label=True,
    orders=True,
    defaults=(("acquire", "cluster"),),
)
define(
    "mbar_arrive",
    signature("bar: mbar"),
    Scope.THREAD,
    Lanes.ANY,
    "mbarrier.arrive.shared::cta.b64 _, [{bar}];",
    "9.7.13.15.13 mbarrier.arrive",
    effect="mbar_arrive",
    orders=True,
)
define(
    "mbar_arrive_peer",
    signature("bar: mbar, rank: value"),
    Scope.THREAD,
    Lanes.ANY,
    "mapa.shared::cluster.u32 %ra, {bar_reg}, {rank};\n"
    "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%ra];",
    "9.7.13.15.13 mbarrier.arrive; relaxed: hands back completed asynchronous reads, no data",
    effect="mbar_arrive",
    orders=True,
)
define(
    "mbar_release_peer",
    signature("bar: mbar, rank: value"),
    Scope.THREAD,
    Lanes.ANY,
    "mapa.shared::cluster.u32 %ra, {bar_reg}, {rank};\n"
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%ra];",
    "9.7.13.15.13 mbarrier.arrive",
    effect="mbar_arrive",
    orders=True,
    defaults=(("release", True),),
)
define(
    "mbar_arrive_expect",
    signature("bar: mbar"),
    Scope.THREAD,
    Lanes.ONE,
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{bar}], {bytes};",
    "9.7.13.15.13 mbarrier.arrive.expect_tx",
    effect="mbar_arrive",
    sass=("mbarrier.arrive.expect_tx",),
    orders=True,
    rules=(Rule("tx bytes are below 2^20", lambda u: 0 < u.arg.attr("bytes") < 2**20),),
)

_TMA_RULES = (
    Rule("the box fills its shared-memory slot exactly", _box_bytes),
    Rule("a box has 1..256 rows", lambda u: 1 <= u.arg.attr("box")[1] <= 256),
    Rule("a shared-memory box is a multiple of 128 bytes", lambda u: u.src[0].arg % 128 == 0),
)
_TMA_LOAD = (("dst", "smem"), ("map", "map"), ("c0", "value"), ("c1", "value"), ("bar", "mbar"))
_LOADED = accesses(ASYNC, "mbar", w="dst")
_ISA_TMA = "9.7.9.27 cp.async.bulk.tensor"

define(
    "tma_load",
    _TMA_LOAD,
    Scope.THREAD,
    Lanes.ONE,
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[{dst}], [{map}, {{{c0}, {c1}}}], [{bar}];",
    _ISA_TMA,
    accesses=_LOADED,
    effect="tma_load",
    sass=("TMA tensor load",),
    rules=_TMA_RULES,
)
define(
    "prefetch_map",
    signature("map: map"),
    Scope.THREAD,
    Lanes.ONE,
    "prefetch.tensormap [{map}];",
    "9.7.9.15 prefetch.tensormap: brings a tensor map near, before a copy asks for it",
    sass=("prefetch.tensormap",),
)
define(
    "tma_load_multicast",
    _TMA_LOAD,
    Scope.THREAD,
    Lanes.ONE,
    "mov.b16 %rh, {mask};\n"
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [{dst}], [{map}, {{{c0}, {c1}}}], [{bar}], %rh;",
    _ISA_TMA + ", multicast: same offsets of data and barrier in every CTA of the mask",
    accesses=_LOADED,
    effect="tma_load",
    sass=("TMA tensor load multicast",),
    rules=_TMA_RULES,
)
define(
    "tma_store",
    signature("src: smem, map: map, c0 c1: value, tile: global"),
    Scope.THREAD,
    Lanes.ONE,
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [{map}, {{{c0}, {c1}}}], [{src}];",
    _ISA_TMA,
    accesses=accesses(ASYNC, "bulk", r="src", w="tile"),
    sass=("TMA tensor store",),
    rules=_TMA_RULES,
)
define(
    "bulk_commit",
    (),
    Scope.THREAD,
    Lanes.ONE,
    "cp.async.bulk.commit_group;",
    "9.7.9.28.1 cp.async.bulk.commit_group",
    effect="commit",
    defaults=(("pipe", "bulk"),),
    sass=("bulk commit_group",),
    orders=True,
)
define(
    "bulk_wait_read",
    (),
    Scope.THREAD,
    Lanes.ONE,
    "cp.async.bulk.wait_group.read {pending};",
    "9.7.9.28.2 cp.async.bulk.wait_group: the sources have been read",
    effect="wait_group",
    defaults=(("pending", 0), ("pipe", "bulk")),
    orders=True,
)
define(
    "fence_proxy_async",
    (),
    Scope.THREAD,
    Lanes.ANY,
    "fence.proxy.async.shared::cta;",
    "9.7.13.4 fence.proxy.async",
    effect="fence_proxy_async",
    sass=("fence.proxy.async smem",),
    orders=True,
)
define(
    "grid_wait",
    (),
    Scope.THREAD,
    Lanes.ANY,
    "griddepcontrol.wait;",
    "9.7.13.13 griddepcontrol: until the grids before have completed and are visible",
    effect="grid_wait",
    sass=("griddepcontrol.wait",),
    orders=True,
)
define(
    "grid_launch_dependents",
    (),
    Scope.THREAD,
    Lanes.ANY,
    "griddepcontrol.launch_dependents;",
    "9.7.13.13 griddepcontrol: a hint that the next grid may start",
    sass=("griddepcontrol.launch",),
)
