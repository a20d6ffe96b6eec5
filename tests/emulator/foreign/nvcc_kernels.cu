// CUDA C++ kernels whose PTX the emulator must run; make_nvcc.py compiles one at a time (-DKERNEL).
// Grids and blocks are one-dimensional, tensors row-major.

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>

namespace cg = cooperative_groups;

#ifdef matmul_tiled
// c[M, N] = a[M, K] @ b[K, N] in float32: 16 x 16 tiles in shared memory, one element a thread.
extern "C" __global__ void __launch_bounds__(256)
matmul_tiled(const float* a, const float* b, float* c, int M, int N, int K) {
  __shared__ float tile_a[16][16], tile_b[16][17];
  int columns = (N + 15) / 16;
  int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
  int row = blockIdx.x / columns * 16 + ty, column = blockIdx.x % columns * 16 + tx;
  float sum = 0;
  for (int k0 = 0; k0 < K; k0 += 16) {
    tile_a[ty][tx] = row < M && k0 + tx < K ? a[row * K + k0 + tx] : 0.f;
    tile_b[ty][tx] = column < N && k0 + ty < K ? b[(k0 + ty) * N + column] : 0.f;
    __syncthreads();
    for (int k = 0; k < 16; k++) sum += tile_a[ty][k] * tile_b[k][tx];
    __syncthreads();
  }
  if (row < M && column < N) c[row * N + column] = sum;
}
#endif

#ifdef matmul_wmma
// c[M, N] (float32) = a[M, K] @ b[K, N] in float16: a 32 x 32 tile, four warps of one fragment.
// M, N multiples of 32, K of 16.
extern "C" __global__ void __launch_bounds__(128)
matmul_wmma(const half* a, const half* b, float* c, int M, int N, int K) {
  using namespace nvcuda;
  __shared__ __align__(32) half tile_a[32 * 16], tile_b[16 * 32];
  int warp = threadIdx.x / 32, m = warp / 2 * 16, n = warp % 2 * 16;
  int m0 = blockIdx.x / (N / 32) * 32, n0 = blockIdx.x % (N / 32) * 32;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc;
  wmma::fill_fragment(acc, 0.f);
  for (int k0 = 0; k0 < K; k0 += 16) {
    for (int i = threadIdx.x; i < 512; i += 128) {
      tile_a[i] = a[(m0 + i / 16) * K + k0 + i % 16];
      tile_b[i] = b[(k0 + i / 32) * N + n0 + i % 32];
    }
    __syncthreads();
    wmma::load_matrix_sync(fa, tile_a + m * 16, 16);
    wmma::load_matrix_sync(fb, tile_b + n, 32);
    wmma::mma_sync(acc, fa, fb, acc);
    __syncthreads();
  }
  wmma::store_matrix_sync(c + (m0 + m) * N + n0 + n, acc, N, wmma::mem_row_major);
}
#endif

#ifdef matmul_mma
// c[M, N] = a[M, K] @ b[K, N] in bfloat16: 64 x 32 tile, cp.async into two stages, ldmatrix (b
// transposed), mma.sync m16n8k16. M a multiple of 64, N of 32, K of 32.
__device__ unsigned shared_at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

extern "C" __global__ void __launch_bounds__(128)
matmul_mma(const __nv_bfloat16* a, const __nv_bfloat16* b, __nv_bfloat16* c, int M, int N, int K) {
  __shared__ __align__(16) __nv_bfloat16 tile_a[2][64][40], tile_b[2][32][40];
  int t = threadIdx.x, warp = t / 32, lane = t % 32;
  int m0 = blockIdx.x / (N / 32) * 64, n0 = blockIdx.x % (N / 32) * 32;
  float acc[4][4] = {};
  auto fetch = [&](int stage, int k0) {
    for (int i = t; i < 256; i += 128)
      __pipeline_memcpy_async(&tile_a[stage][i / 4][i % 4 * 8],
                              &a[(m0 + i / 4) * K + k0 + i % 4 * 8], 16);
    __pipeline_memcpy_async(&tile_b[stage][t / 4][t % 4 * 8], &b[(k0 + t / 4) * N + n0 + t % 4 * 8],
                            16);
    __pipeline_commit();
  };
  fetch(0, 0);
  for (int k0 = 0; k0 < K; k0 += 32) {
    int stage = k0 / 32 % 2;
    if (k0 + 32 < K) {
      fetch(stage ^ 1, k0 + 32);
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    __syncthreads();
    for (int k = 0; k < 32; k += 16) {
      unsigned x[4], y[4][2];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                   : "r"(shared_at(&tile_a[stage][warp * 16 + lane % 16][k + lane / 16 * 8])));
      for (int n = 0; n < 4; n++) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(y[n][0]), "=r"(y[n][1])
                     : "r"(shared_at(&tile_b[stage][k + lane % 16][n * 8])));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(acc[n][0]), "+f"(acc[n][1]), "+f"(acc[n][2]), "+f"(acc[n][3])
                     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[n][0]), "r"(y[n][1]));
      }
    }
    __syncthreads();
  }
  for (int n = 0; n < 4; n++)
    for (int h = 0; h < 2; h++) {
      int row = m0 + warp * 16 + lane / 4 + h * 8, column = n0 + n * 8 + lane % 4 * 2;
      *(__nv_bfloat162*)&c[row * N + column] =
          __floats2bfloat162_rn(acc[n][2 * h], acc[n][2 * h + 1]);
    }
}
#endif

#ifdef reduction
// total[0] += sum of x[N] (float32) and counts[0] += how many are positive, counts[1] = largest.
extern "C" __global__ void __launch_bounds__(256)
reduction(const float* x, float* total, int* counts, int N) {
  __shared__ float sums[8];
  int i = blockIdx.x * 256 + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float value = i < N ? x[i] : 0.f;
  unsigned positive = __ballot_sync(~0u, value > 0.f);
  int largest = __reduce_max_sync(~0u, (int)value);
  float sum = value;
  for (int step = 16; step; step >>= 1) sum += __shfl_down_sync(~0u, sum, step);
  if (lane == 0) {
    sums[warp] = sum;
    atomicAdd(&counts[0], __popc(positive));
    atomicMax(&counts[1], largest);
  }
  __syncthreads();
  if (warp == 0) {
    sum = lane < 8 ? sums[lane] : 0.f;
    for (int step = 4; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step, 8);
    if (lane == 0) atomicAdd(total, sum);
  }
}
#endif

#ifdef softmax
// y[r] = softmax(x[r]) in float16, one block a row of N (a multiple of 8, at most 2048).
extern "C" __global__ void __launch_bounds__(256) softmax(const half* x, half* y, int N) {
  __shared__ float tops[8], totals[8];
  int t = threadIdx.x, warp = t / 32, lane = t % 32;
  bool inside = t * 8 < N;
  half2 held[4];
  float top = -INFINITY, e[8], total = 0;
  if (inside) {
    *(uint4*)held = *(const uint4*)(x + (size_t)blockIdx.x * N + t * 8);
    for (int i = 0; i < 4; i++) top = fmaxf(top, fmaxf(__low2float(held[i]), __high2float(held[i])));
  }
  for (int step = 16; step; step >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (int i = 0; i < 8; i++) top = fmaxf(top, tops[i]);
  if (inside)
    for (int i = 0; i < 8; i++) {
      e[i] = __expf(__half2float(i % 2 ? __high2half(held[i / 2]) : __low2half(held[i / 2])) - top);
      total += e[i];
    }
  for (int step = 16; step; step >>= 1) total += __shfl_xor_sync(~0u, total, step);
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  total = 0;
  for (int i = 0; i < 8; i++) total += totals[i];
  if (inside) {
    for (int i = 0; i < 4; i++) held[i] = __floats2half2_rn(e[2 * i] / total, e[2 * i + 1] / total);
    *(uint4*)(y + (size_t)blockIdx.x * N + t * 8) = *(uint4*)held;
  }
}
#endif

#ifdef bit_counts
// y[i] = eight bit manipulations of x[i], x[i + 1 mod N] and i.
extern "C" __global__ void __launch_bounds__(64) bit_counts(const int* x, int* y, int N) {
  int i = blockIdx.x * 64 + threadIdx.x, majority, permuted;
  if (i >= N) return;
  unsigned a = x[i], b = x[(i + 1) % N];
  asm("lop3.b32 %0, %1, %2, %3, 0xE8;" : "=r"(majority) : "r"(a), "r"(b), "r"(i));
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(permuted) : "r"(a), "r"(b), "r"(b >> 7));
  y[i * 8 + 0] = __brev(a);
  y[i * 8 + 1] = __clz(a >> (b & 31));
  y[i * 8 + 2] = permuted;
  y[i * 8 + 3] = __funnelshift_l(a, b, b);
  y[i * 8 + 4] = __funnelshift_rc(a, b, a & 63);
  y[i * 8 + 5] = __popcll((unsigned long long)a << 32 | b);
  y[i * 8 + 6] = abs((int)a);
  y[i * 8 + 7] = majority;
}
#endif

#ifdef copy_async
// y[N] = x[N] through two stages of shared memory: 512 int32 a stage, a block copies `parts` of them.
extern "C" __global__ void __launch_bounds__(128)
copy_async(const int4* x, int4* y, int N, int parts) {
  extern __shared__ int4 stage[];
  int t = threadIdx.x, last = N / 4;
  int first = blockIdx.x * parts * 128;
  auto fetch = [&](int part) {
    int i = first + part * 128 + t;
    if (part < parts && i < last) __pipeline_memcpy_async(&stage[part % 2 * 128 + t], &x[i], 16);
    __pipeline_commit();
  };
  fetch(0);
  for (int part = 0; part < parts; part++) {
    fetch(part + 1);
    __pipeline_wait_prior(1);
    __syncthreads();
    int i = first + part * 128 + (t ^ 1);
    if (i < last) y[i] = stage[part % 2 * 128 + (t ^ 1)];
    __syncthreads();
  }
}
#endif

#ifdef cluster_sum
// sums[c] = sum over rows of x[M, N]: the CTAs of a cluster of 4 split the rows, then each adds a
// quarter of the columns over distributed shared memory. N = 128.
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(128)
cluster_sum(const float* x, float* sums, int M, int N) {
  __shared__ float mine[128];
  cg::cluster_group cluster = cg::this_cluster();
  int rank = cluster.block_rank(), t = threadIdx.x;
  float sum = 0;
  for (int row = rank; row < M; row += 4) sum += x[row * N + t];
  mine[t] = sum;
  cluster.sync();
  if (t < 32) {
    float all = 0;
    for (int i = 0; i < 4; i++) all += cluster.map_shared_rank(mine, i)[rank * 32 + t];
    sums[rank * 32 + t] = all;
  }
  cluster.sync();
}
#endif
