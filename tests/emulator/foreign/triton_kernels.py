"""Triton kernels whose PTX the emulator must run; read by make_triton.py, never by the tests.

All of them take one-dimensional grids. Tensors are row-major; a `desc` argument is a host-side
TensorDescriptor, which reaches the PTX as a 128-byte tensor map parameter.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def matmul_tma(
    a_desc, b_desc, c_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    A_ROWS_ARE_M: tl.constexpr, B_ROWS_ARE_N: tl.constexpr,
):  # fmt: skip
    """c[M, N] = a @ b; a is [M, K] or [K, M], b is [N, K] or [K, N]. One tile a program."""
    tiles_m = tl.cdiv(M, BM)
    m0 = tl.program_id(0) % tiles_m * BM
    n0 = tl.program_id(0) // tiles_m * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        a = a_desc.load([m0, k0]) if A_ROWS_ARE_M else a_desc.load([k0, m0]).T
        if B_ROWS_ARE_N:
            acc = tl.dot(a, b_desc.load([n0, k0]).T, acc)
        else:
            acc = tl.dot(a, b_desc.load([k0, n0]), acc)
    c_desc.store([m0, n0], acc.to(c_desc.dtype))


@triton.jit
def matmul_persistent(
    a_desc, b_desc, c_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c[M, N] = a[M, K] @ b[N, K].T, a loop over tiles split between specialised warps."""
    tiles_m = tl.cdiv(M, BM)
    tiles = tiles_m * tl.cdiv(N, BN)
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), flatten=True, warp_specialize=True
    ):
        m0 = tile % tiles_m * BM
        n0 = tile // tiles_m * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, K, BK):
            acc = tl.dot(a_desc.load([m0, k0]), b_desc.load([n0, k0]).T, acc)
        c_desc.store([m0, n0], acc.to(c_desc.dtype))


@triton.jit
def matmul_specialised(
    a_desc, b_desc, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c[M, N] = a[M, K] @ b[N, K].T, the loop over K split between specialised warps."""
    tiles_m = tl.cdiv(M, BM)
    m0 = tl.program_id(0) % tiles_m * BM
    n0 = tl.program_id(0) // tiles_m * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in tl.range(0, K, BK, warp_specialize=True):
        acc = tl.dot(a_desc.load([m0, k0]), b_desc.load([n0, k0]).T, acc)
    rows = m0 + tl.arange(0, BM)
    columns = n0 + tl.arange(0, BN)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(c_ptr.dtype.element_ty), mask)


@triton.jit
def matmul_pointers(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c[M, N] = a[M, K] @ b[K, N] with masked loads and stores, no TMA."""
    tiles_m = tl.cdiv(M, BM)
    rows = tl.program_id(0) % tiles_m * BM + tl.arange(0, BM)
    columns = tl.program_id(0) // tiles_m * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + inner
        a_mask = (rows[:, None] < M) & (k[None, :] < K)
        b_mask = (k[:, None] < K) & (columns[None, :] < N)
        a = tl.load(a_ptr + rows[:, None] * K + k[None, :], a_mask, 0.0)
        b = tl.load(b_ptr + k[:, None] * N + columns[None, :], b_mask, 0.0)
        acc = tl.dot(a, b, acc)
    c_mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(c_ptr.dtype.element_ty), c_mask)


@triton.jit
def attention(
    q_desc, k_desc, v_desc, o_desc, S,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, SCALE_LOG2: tl.constexpr,
):  # fmt: skip
    """o = softmax(q @ k.T / sqrt(D)) @ v for one head, online over blocks of keys."""
    m0 = tl.program_id(0) * BM
    q = q_desc.load([m0, 0])
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for s0 in range(0, S, BN):
        scores = tl.dot(q, k_desc.load([s0, 0]).T) * SCALE_LOG2
        scores = tl.where((s0 + tl.arange(0, BN))[None, :] < S, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v_desc.load([s0, 0]), acc * shrink[:, None])
        top = new_top
    o_desc.store([m0, 0], (acc / total[:, None]).to(o_desc.dtype))


@triton.jit
def softmax(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """y[r] = softmax(x[r]): one row of N a program."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * N + columns, columns < N, float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    y = e / tl.sum(e, 0)
    tl.store(y_ptr + row * N + columns, y.to(y_ptr.dtype.element_ty), columns < N)


@triton.jit
def reduction(x_ptr, rows_ptr, columns_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """rows[M] = max over N of x[M, N]; columns[N] += sum over M, atomically between programs."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.arange(0, BN)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    at = x_ptr + rows[:, None] * N + columns[None, :]
    largest = tl.max(tl.load(at, mask, float("-inf")), 1)
    tl.store(rows_ptr + rows, largest, rows < M)
    tl.atomic_add(columns_ptr + columns, tl.sum(tl.load(at, mask, 0.0), 0), columns < N)


@triton.jit
def vector_add(x_ptr, y_ptr, z_ptr, N, BLOCK: tl.constexpr):
    """z[N] = x + y."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x_ptr + at, at < N) + tl.load(y_ptr + at, at < N)
    tl.store(z_ptr + at, z, at < N)


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """y[r] = (x[r] - mean) / sqrt(variance + 1e-5) * w + b: one row of N a program, in steps."""
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for n0 in range(0, N, BLOCK):
        at = n0 + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, at < N, 0.0).to(tl.float32)
        total += x
        squares += x * x
    mean = tl.sum(total, 0) / N
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / N - mean * mean + 1e-5)
    for n0 in range(0, N, BLOCK):
        at = n0 + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + at, at < N, 0.0).to(tl.float32)
        w, b = tl.load(w_ptr + at, at < N), tl.load(b_ptr + at, at < N)
        y = (x - mean) * scale * w + b
        tl.store(y_ptr + row * N + at, y.to(y_ptr.dtype.element_ty), at < N)


@triton.jit
def dropout(x_ptr, y_ptr, N, SEED: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr):
    """y[N] = x / (1 - P) where a random number of its place (Philox) exceeds P, else 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N)
    tl.store(y_ptr + at, tl.where(tl.rand(SEED, at) > P, x / (1 - P), 0.0), at < N)
