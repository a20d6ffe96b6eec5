"""What a tile language gives without tuning by hand: a persistent product over TMA, a norm and
causal attention in Triton, each the fastest of a few configurations for a workload.

Importing this needs Triton 3.5 or newer, which PyTorch for CUDA brings.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

from ptxflow.eval.bench.baselines.baseline import Baseline, Given, Unsupported, computing

LOG2E = math.log2(math.e)
#: of configurations and a kernel: the fastest, found at the first call. A workload has its own
tuned = functools.partial(
    triton.autotune, key=[], do_bench=functools.partial(do_bench, warmup=5, rep=20)
)


def boxes(given: dict[str, Any]) -> None:
    """The boxes of the tensor maps, which follow from a configuration's tiles."""
    tiles = {"a": ("TILE_M", "TILE_K"), "b": ("TILE_N", "TILE_K"), "c": ("TILE_M", "TILE_N")}
    for name, sides in tiles.items():
        given[name].block_shape = [given[side] for side in sides]


PRODUCTS = [
    triton.Config(
        {"TILE_M": m, "TILE_N": n, "TILE_K": k}, num_warps=warps, num_stages=stages, pre_hook=boxes
    )
    for m, n, k, warps, stages in (
        (128, 256, 64, 8, 3),
        (256, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 4),
        (128, 64, 64, 4, 4),
        (64, 256, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 128, 4, 4),
        (32, 64, 128, 4, 5),
        (16, 64, 128, 4, 5),
        (16, 32, 256, 4, 4),
    )
]


@triton.jit
def product(
    a,
    b,
    c,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BAND: tl.constexpr,
):
    """c [M, N] = a [M, K] b [N, K]^T, summed in float32. A program takes every so manyth tile;
    these go BAND rows of tiles at a time, so that operands are found in L2."""
    rows, columns = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        top = tile // (BAND * columns) * BAND
        height = min(rows - top, BAND)
        place = tile % (BAND * columns)
        m, n = (top + place % height) * TILE_M, place // height * TILE_N
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in range(0, K, TILE_K):
            sums = tl.dot(a.load([m, k]), b.load([n, k]).T, sums)
        c.store([m, n], sums.to(c.dtype))


def matmul(given: Given) -> Baseline:
    """C = A B^T."""
    a, b = given.tensors["A"], given.tensors["B"]
    out = torch.empty_like(given.tensors["C"])
    (m, k), n = a.shape, len(b)
    if n % 8 or k % 8:
        raise Unsupported("its tensor maps take rows of whole 16 bytes")
    maps = [TensorDescriptor.from_tensor(t, [16, 16]) for t in (a, b, out)]
    processors = 1  # the interpreter's
    if a.is_cuda:
        processors = torch.cuda.get_device_properties(a.device).multi_processor_count

    fit = [c for c in PRODUCTS if min(64, m // 8) <= c.kwargs["TILE_M"] <= 4 * max(16, m)]
    kernel = tuned(fit)(product)

    def programs(config: dict[str, Any]) -> tuple[int]:
        tiles = triton.cdiv(m, config["TILE_M"]) * triton.cdiv(n, config["TILE_N"])
        return (min(processors, tiles),)

    def call() -> Tensor:
        kernel[programs](*maps, m, n, k, BAND=8)
        return out

    return computing(call)


ROWS = [
    triton.Config({"ROWS": rows}, num_warps=warps)
    for rows, warps in ((1, 1), (1, 4), (1, 8), (1, 16), (4, 4), (4, 8))
]


@triton.jit
def norm(
    x,
    residual,
    weight,
    out,
    rows,
    size,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out [rows, size] = x / rms(x) * weight, where ADD of x + residual; ROWS a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    place = row.to(tl.int64)[:, None] * size + column[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / size + eps)
    factor = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    made = values * scale[:, None] * factor[None, :]
    tl.store(out + place, made.to(out.dtype.element_ty), mask=inside)


def rms_norm(given: Given) -> Baseline:
    """RMSNorm, of a sum where there is a residual, which is not stored."""
    x, weight = given.tensors["hidden_states"], given.tensors["weight"]
    added = given.tensors.get("residual")
    out = torch.empty_like(given.tensors["output"])
    (rows, size), eps = x.shape, given.constants["eps"]
    width, kernel = triton.next_power_of_2(size), tuned(ROWS)(norm)

    def call() -> Tensor:
        kernel[lambda config: (triton.cdiv(rows, config["ROWS"]),)](
            x, added, weight, out, rows, size, eps, WIDTH=width, ADD=added is not None
        )
        return out

    return computing(call)


TILES = [
    triton.Config({"TILE_Q": q, "TILE_KV": kv}, num_warps=warps, num_stages=stages)
    for q, kv, warps, stages in (
        (128, 128, 8, 2),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (64, 32, 4, 4),
    )
]


@triton.jit
def attend(
    q,
    keys,
    values,
    out,
    lse,
    q_starts,
    kv_starts,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_KV: tl.constexpr,
):
    """A tile of a sequence's queries [total, HEADS, DIM] of one head, the last tiles first: they
    see most keys. GROUP heads share keys and values. `scale` and lse are of base 2."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    q_start, kv_start = tl.load(q_starts + sequence), tl.load(kv_starts + sequence)
    queries = tl.load(q_starts + sequence + 1) - q_start
    before = tl.load(kv_starts + sequence + 1) - kv_start - queries  # keys that the first sees
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_Q
    if first < queries:
        row, dim = first + tl.arange(0, TILE_Q), tl.arange(0, DIM)
        inside = row < queries
        place = (q_start + row).to(tl.int64) * HEADS + head
        asked = tl.load(q + place[:, None] * DIM + dim, mask=inside[:, None], other=0.0)
        width: tl.constexpr = HEADS // GROUP * DIM
        own = (kv_start.to(tl.int64) * HEADS // GROUP + head // GROUP) * DIM
        best = tl.full([TILE_Q], float("-inf"), tl.float32)
        total = tl.zeros([TILE_Q], tl.float32)
        sums = tl.zeros([TILE_Q, DIM], tl.float32)
        end = tl.minimum(first + TILE_Q, queries) + before  # keys that a row of the tile sees
        whole = tl.maximum(first + before + 1, 0) // TILE_KV * TILE_KV  # that all see
        for masked in tl.static_range(2):
            for kv in range(whole if masked else 0, end if masked else whole, TILE_KV):
                column = kv + tl.arange(0, TILE_KV)
                of = own + column[:, None] * width + dim[None, :]
                there = (column < end)[:, None] if masked else None
                k = tl.load(keys + of, mask=there)
                scores = tl.dot(asked, k.T) * scale
                if masked:
                    seen = column[None, :] <= (row + before)[:, None]
                    scores = tl.where(seen, scores, float("-inf"))
                higher = tl.maximum(best, tl.max(scores, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                weights, kept = tl.exp2(scores - base[:, None]), tl.exp2(best - base)
                v = tl.load(values + of, mask=there, other=0.0 if masked else None)
                sums = tl.dot(weights.to(v.dtype), v, sums * kept[:, None])
                total = total * kept + tl.sum(weights, 1)
                best = higher
        made = sums / tl.where(total == 0, 1.0, total)[:, None]
        made = made.to(out.dtype.element_ty)
        tl.store(out + place[:, None] * DIM + dim, made, mask=inside[:, None])
        tl.store(lse + place, best + tl.log2(total), mask=inside)


def attention(given: Given) -> Baseline:
    """Causal attention of packed queries over packed keys, both outputs."""
    q, k, v, q_starts, kv_starts = (
        given.tensors[n] for n in ("q", "k", "v", "qo_indptr", "kv_indptr")
    )
    out, lse = (torch.zeros_like(given.tensors[n]) for n in given.definition.outputs)
    (_, heads, dim), most = q.shape, int(q_starts.diff().max())
    group, scale, kernel = heads // k.shape[1], given.scalars["sm_scale"], tuned(TILES)(attend)
    assert scale is not None

    def tiles(config: dict[str, Any]) -> tuple[int, int, int]:
        return (triton.cdiv(most, config["TILE_Q"]), heads, len(q_starts) - 1)

    def call() -> tuple[Tensor, Tensor]:
        tables = q_starts, kv_starts, scale * LOG2E
        kernel[tiles](q, k, v, out, lse, *tables, HEADS=heads, GROUP=group, DIM=dim)
        return out, lse

    return computing(call)
