"""Gluon kernels (Triton's layout-explicit dialect); read by make_triton.py, never by the tests."""

# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

SPLIT_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]]))
SPLIT_COLUMNS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[0, 1]]))
A_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[1, 0]]))
B_SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2, cga_layout=[[0, 1]]))


@gluon.jit
def matmul_pair(
    a_ptr, b_ptr, c_ptr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
):  # fmt: skip
    """c[M, BN] = a[M, BK] @ b[BK, BN]: a pair of CTAs multiplies BM rows with cta_group::2."""
    m = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, SPLIT_ROWS))
    a_k = gl.arange(0, BK, gl.SliceLayout(0, SPLIT_ROWS))
    b_k = gl.arange(0, BK, gl.SliceLayout(1, SPLIT_COLUMNS))
    n = gl.arange(0, BN, gl.SliceLayout(0, SPLIT_COLUMNS))
    a_tile = gl.load(a_ptr + m[:, None] * BK + a_k[None, :])
    b_tile = gl.load(b_ptr + b_k[:, None] * BN + n[None, :])
    a = gl.allocate_shared_memory(gl.bfloat16, [BM, BK], A_SHARED, a_tile)
    b = gl.allocate_shared_memory(gl.bfloat16, [BK, BN], B_SHARED, b_tile)
    fence_async_shared(cluster=True)
    place: gl.constexpr = TensorMemoryLayout([BM // 2, BN], 1, cta_split_num=[2, 1], two_ctas=True)
    acc = allocate_tensor_memory(gl.float32, [BM, BN], place)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout(cga_layout=[[0]]))
    mbarrier.init(done, count=1)
    tcgen05_mma(a, b, acc, use_acc=False, mbarriers=[done])
    mbarrier.wait(done, 0)
    mbarrier.invalidate(done)
    held: gl.constexpr = get_tmem_reg_layout(
        gl.float32, (BM, BN), place, gl.num_warps(), cga_layout=((1, 0),)
    )
    out = gl.convert_layout(acc.load(held).to(gl.bfloat16), SPLIT_ROWS)
    out_n = gl.arange(0, BN, gl.SliceLayout(0, SPLIT_ROWS))
    gl.store(c_ptr + m[:, None] * BN + out_n[None, :], out)
