"""Tensor maps that a kernel makes by tensormap.replace, copies to global memory, and loads by."""

import re

import numpy as np
import pytest

from ptxflow.compiler.emulator import Fault
from ptxflow.compiler.emulator.fault import PtxSyntaxError
from tests.emulator.conftest import Execute

ROWS, COLUMNS = 9, 16  # of x, int32; a box is 8 by 8 of them, with rows of 32 bytes swizzled
FIELD = "tensormap.replace.tile.{}.shared::cta.b1024.b{} [%r11], {};"
FIELDS = (
    ("global_address", 64, "%rd1"), ("rank", 32, "1"), ("box_dim", 32, "0, 8"),
    ("box_dim", 32, "1, 8"), ("global_dim", 32, f"0, {COLUMNS}"), ("global_dim", 32, f"1, {ROWS}"),
    ("global_stride", 64, f"0, {4 * COLUMNS}"), ("element_stride", 32, "0, 1"),
    ("element_stride", 32, "1, 1"), ("elemtype", 32, "3"), ("interleave_layout", 32, "0"),
    ("swizzle_mode", 32, "1"), ("fill_mode", 32, "0"),
)  # fmt: skip
PUBLISH = """tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic\
.release.gpu.sync.aligned [%rd2], [%r11], 128;"""
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;"
#: the barrier and the map lie behind the box, which goes to the output as it lies there
TEXT = f"""
    add.u32 %r10, %s, 512;
    add.u32 %r11, %s, 1024;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [made];
    mad.lo.u32 %r2, %t, 4, %r11;
    st.shared.b32 [%r2], 0;
    bar.warp.sync 0xFFFFFFFF;
    setp.ne.u32 %p1, %t, 0;
    @%p1 bra MADE;
    {" ".join(FIELD.format(*field) for field in FIELDS)}
    mbarrier.init.shared::cta.b64 [%r10], 1;
    fence.mbarrier_init.release.cluster;
MADE:
    bar.warp.sync 0xFFFFFFFF;
    {PUBLISH}
    bar.warp.sync 0xFFFFFFFF;
    {ACQUIRE}
    bar.warp.sync 0xFFFFFFFF;
    @%p1 bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 256;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
[%s], [%rd2, {{12, 3}}], [%r10];
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
    mad.lo.u32 %r2, %t, 4, %s;
    ld.shared.b32 %r3, [%r2];
    st.global.b32 [%at], %r3;
    ld.shared.b32 %r3, [%r2+128];
    st.global.b32 [%at+128], %r3;
"""


def tensors() -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    x = np.arange(1, ROWS * COLUMNS + 1, dtype=np.int32).reshape(ROWS, COLUMNS)
    return {"x": x, "made": np.zeros(128, np.uint8)}


def test_a_box_by_a_map_that_was_made(execute: Execute) -> None:
    """Rows 3 to 10 and columns 12 to 19: what is outside is zeros. Of 8 rows of 32 bytes the upper
    four have their halves exchanged."""
    outcome = execute(TEXT, smem=2048, tensors=tensors(), pointers=("x", "made"))
    assert not outcome.report.hazards
    want = np.zeros((8, 8), np.int32)
    want[:6, :4] = tensors()["x"][3:, 12:]
    want[4:] = np.roll(want[4:], 4, axis=1)
    assert (outcome.out.reshape(8, 8) == want).all()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (ACQUIRE, "", r"no fence\.proxy\.tensormap"),
        ("bar.warp.sync 0xFFFFFFFF;\n    tensormap.cp", "tensormap.cp", "race"),
    ],
)
def test_what_is_not_ordered_is_a_hazard(execute: Execute, old: str, new: str, says: str) -> None:
    assert old in TEXT
    outcome = execute(TEXT.replace(old, new), smem=2048, tensors=tensors(), pointers=("x", "made"))
    assert re.search(says, " ".join(outcome.report.hazards))


@pytest.mark.parametrize(
    ("kind", "old", "new", "says"),
    [
        (Fault, "b64 [%r11], %rd1", "b64 [%r11], 4096", "outside every tensor"),
        (Fault, f"[%r11], 0, {4 * COLUMNS};", "[%r11], 0, 40;", "not multiples of 16"),
        (Fault, f"[%r11], 1, {ROWS};", "[%r11], 1, 600;", "it spans"),
        (Fault, "elemtype.shared::cta.b1024.b32 [%r11], 3",
         "elemtype.shared::cta.b1024.b32 [%r11], 8", "not modelled"),
        (Fault, "2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s], [%rd2, {12, 3}]",
         "1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%s], [%rd2, {12}]",
         "1d copy by a tensor map of 2"),
        (PtxSyntaxError, "b64 [%r11], %rd1", "b32 [%r11], %r2", "takes 64 bits"),
        (PtxSyntaxError, "[%r11], 1, 8;", "[%r11], 5, 8;", "places 0 to 4"),
        (PtxSyntaxError, "[%rd2], [%r11], 128;", "[%rd2], [%r11], 64;", "128 bytes"),
    ],
)  # fmt: skip
def test_faults(execute: Execute, kind: type[Fault], old: str, new: str, says: str) -> None:
    assert old in TEXT
    with pytest.raises(kind, match=says):
        execute(TEXT.replace(old, new), smem=2048, tensors=tensors(), pointers=("x", "made"))
