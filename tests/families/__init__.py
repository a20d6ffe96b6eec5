"""The table of kernel families: a row a family, which every suite reads.

A new family is a module with a `ROW`, named here, and gets the suites of problems (tests/unit),
validator (tests/machine), emulator and golden machine code.
"""

from tests.families import (
    dsa_indexer,
    dsa_sparse,
    gdn_decode,
    gdn_prefill,
    gemm,
    gemm_epilogue,
    gemm_fp8,
    gqa_decode,
    gqa_prefill,
    mla,
    moe,
    rmsnorm,
    sampling,
)
from tests.row import Row

ROWS: tuple[Row, ...] = (
    gemm.ROW,
    gemm_epilogue.ROW,
    gemm_fp8.ROW,
    gqa_decode.ROW,
    gqa_prefill.ROW,
    mla.DECODE_ROW,
    mla.PREFILL_ROW,
    dsa_indexer.ROW,
    dsa_sparse.ROW,
    gdn_decode.ROW,
    gdn_prefill.ROW,
    moe.ROW,
    rmsnorm.ROW,
    sampling.ROW,
)
