"""C = A B^T by cuBLASLt: the fastest of all that its heuristics propose, where torch.mm takes the
first. They are timed when the baseline is made. Numbers are those of cublasLt.h, 13.1."""

import ctypes
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ptxflow.eval.bench.baselines.baseline import Baseline, Call, Given, Unsupported, computing
from ptxflow.eval.bench.timing import L2Flush, time_interleaved

PROPOSALS = 16  # asked of the heuristics
ROUNDS = 7  # samples of each
WORKSPACE = 32 << 20  # bytes, as torch gives to cuBLAS on Hopper
TYPES = {torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F, R_32F, TRANSA, TRANSPOSED, MAX_WORKSPACE = 68, 0, 3, 1, 1


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


class CublasLt:
    """The library that torch has loaded; a call that fails raises RuntimeError."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").partition(".")[0]
        self._library = ctypes.CDLL(f"libcublasLt.so.{major}")

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name}: status {status}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """What a Create function makes; it lives as long as the process."""
        handle = ctypes.c_void_p()
        self(f"{name}Create", ctypes.byref(handle), *arguments)
        return handle


def cublas_lt(given: Given) -> Baseline:
    """Into an output of its own. Matrices are column-major there: C^T = B A^T, B transposed."""
    a, b = given.tensors["A"], given.tensors["B"]
    if not a.is_cuda:
        raise Unsupported("it takes tensors of a GPU")
    lt = CublasLt()
    (m, k), n, dtype = a.shape, b.shape[0], TYPES[a.dtype]
    out = torch.empty_like(given.tensors["C"])
    space = torch.empty(WORKSPACE, dtype=torch.uint8, device=a.device)
    product = lt.made("MatmulDesc", COMPUTE_32F, R_32F)
    lt("MatmulDescSetAttribute", product, TRANSA, ctypes.byref(ctypes.c_int(TRANSPOSED)),
       ctypes.c_size_t(4))  # fmt: skip
    layouts = [
        lt.made("MatrixLayout", dtype, *map(ctypes.c_uint64, (rows, columns, rows)))
        for rows, columns in ((k, n), (k, m), (n, m))
    ]
    found, count = (Proposal * PROPOSALS)(), ctypes.c_int()
    room = lt.made("MatmulPreference")
    lt("MatmulPreferenceSetAttribute", room, MAX_WORKSPACE,
       ctypes.byref(ctypes.c_size_t(WORKSPACE)), ctypes.c_size_t(8))  # fmt: skip
    handle, b_, a_, c_ = lt.made(""), *layouts
    lt("MatmulAlgoGetHeuristic", handle, product, b_, a_, c_, c_, room, PROPOSALS, found,
       ctypes.byref(count))  # fmt: skip
    one, zero = ctypes.c_float(1), ctypes.c_float(0)

    def by(proposal: Proposal) -> Call:
        def call() -> Tensor:
            lt("Matmul", handle, product, ctypes.byref(one), _of(b), b_, _of(a), a_,
               ctypes.byref(zero), _of(out), c_, _of(out), c_, ctypes.byref(proposal), _of(space),
               ctypes.c_size_t(WORKSPACE),
               ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))  # fmt: skip
            return out

        return call

    return computing(fastest([by(p) for p in found[: count.value] if not p.state]))


def fastest(calls: list[Call]) -> Call:
    """The call that takes least, L2 flushed; Unsupported where there is none."""
    if not calls:
        raise Unsupported("its heuristics propose nothing")
    names = {str(i): call for i, call in enumerate(calls)}
    times = time_interleaved(names, dict.fromkeys(names, ROUNDS), L2Flush())
    return names[min(times, key=lambda name: median(times[name]))]


def _of(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
