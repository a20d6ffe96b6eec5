"""Three kernels of a fault each, and their launch: y[i] = 2 x[i], by bulk copies in and out."""

from typing import Any

RIGHT = """\
.version 8.8
.target sm_90a
.address_size 64
.visible .entry twice(.param .u64 x, .param .u64 y)
{
    .shared .align 128 .b8 tile[512];
    .shared .align 8 .b64 full;
    .reg .b32 %t, %s, %step, %parity;
    .reg .b64 %x, %y;
    .reg .f32 %v;
    .reg .pred %first, %done;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    mov.u32 %t, %tid.x;
    setp.eq.u32 %first, %t, 0;
    @!%first bra READY;
    mbarrier.init.shared::cta.b64 [full], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    mov.u32 %step, 0;
STEP:
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%x], 512, [full];
WAIT:
    and.b32 %parity, %step, 1;
TRY:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [full], %parity;
    @!%done bra TRY;
    mov.u32 %s, tile;
    mad.lo.u32 %s, %t, 4, %s;
    ld.shared.f32 %v, [%s];
    add.f32 %v, %v, %v;
    st.shared.f32 [%s], %v;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%first bra NEXT;
    cp.async.bulk.global.shared::cta.bulk_group [%y], [tile], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
NEXT:
    bar.sync 0;
    add.u64 %x, %x, 512;
    add.u64 %y, %y, 512;
    add.u32 %step, %step, 1;
    setp.lt.u32 %done, %step, 3;
    @%done bra STEP;
    ret;
}
"""
BROKEN = {
    "a missing fence": ("    fence.proxy.async.shared::cta;\n", ""),
    "a wrong parity": ("and.b32 %parity, %step, 1;", "mov.b32 %parity, %step;"),
    "a tx count": ("[full], 512;\n    cp", "[full], 1024;\n    cp"),
}


def broken(name: str) -> str:
    right, wrong = BROKEN[name]
    assert RIGHT.count(right) == 1
    return RIGHT.replace(right, wrong)


def launch() -> dict[str, Any]:
    buffer = {"dtype": "float32", "shape": [384]}
    return {
        "version": 1, "grid": [1], "block": [128],
        "buffers": {"x": {**buffer, "contents": {"random": "integers", "seed": 1}}, "y": buffer},
        "params": [{"buffer": "x"}, {"buffer": "y"}],
    }  # fmt: skip
