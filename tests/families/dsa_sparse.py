"""Sparse attention: MLA over lists of tokens."""

from typing import Any

import numpy as np

from ptxflow.compiler.family import Problem
from ptxflow.compiler.kernels import family
from ptxflow.compiler.kernels.mla.decisions import MAX_SUMS, register_limit, registers
from tests.given import B200, BOTH, H200, Json, altered, crossed, resized, strategies
from tests.row import Bad, Case, Planted, Reference, Refused, Row, Run, Same, Size

SPARSE = family("dsa_sparse")
strategy = strategies(
    SPARSE, chunk=64, tile=32, warps=4, stages=2, scores="columns", operand="shared", prefetch=0,
    dependent=0, sum_chunks=1,
)  # fmt: skip


def definition(
    page: int = 1,
    topk: int = 256,
    heads: int = 16,
    latent: int = 512,
    rope: int = 64,
    dtype: str = "",
) -> Json:
    name = f"dsa_sparse_attention_h16_ckv512_kpe64_topk256_ps{64 if page > 1 else 1}"
    sizes = {"num_qo_heads": heads, "head_dim_ckv": latent, "head_dim_kpe": rope}
    return resized(name, dtype, page_size=page, topk=topk, **sizes)


def problem(page: int = 1, tokens: int = 64, pages: int = 8462, **constants: Any) -> Problem:
    return SPARSE.problem(definition(page, **constants), {"num_tokens": tokens, "num_pages": pages})


#: one kernel for every path through the builder, and the entries of a list
PATHS = {
    "chunks": (strategy(), 256),
    "chunks, the last one short": (strategy(chunk=96, stages=3, dependent=1, sum_chunks=2), 250),
    "chunks, eight warps": (
        strategy(chunk=128, tile=64, warps=8, stages=1, dependent=1, prefetch=256),
        256,
    ),
    "chunks, dims in parts": (
        strategy(chunk=128, scores="dims", operand="registers", stages=4, sum_chunks=2),
        250,
    ),
    "whole lists": (strategy(chunk=0, stages=5), 256),
    "whole lists, eight warps": (
        strategy(chunk=0, tile=64, warps=8, scores="dims", operand="registers", prefetch=128),
        250,
    ),
}
_AXES = {"num_tokens": 3, "num_pages": 12}
_SMALL: dict[str, Any] = {"latent": 64, "rope": 32}
_FEW = problem(16, 6, 3, topk=70, **_SMALL)


def _lists() -> Any:
    """Nothing, one row in the first place or the last, one row everywhere, rows at the ends of the
    cache."""
    lists = np.full((6, 70), -1)
    lists[1, 0], lists[2, 69], lists[3], lists[4, ::7] = 5, 47, 11, 47
    lists[5] = np.arange(70) % 48
    return lists


def _bad(message: str, axes: dict[str, int] | None = None, **sizes: Any) -> Bad:
    return Bad(definition(**sizes), _AXES | (axes or {}), message)


def _runs() -> tuple[Run, ...]:
    """Lists of all kinds; of 128 heads, of which each CTA has 64; at all scales of scores."""
    shared = problem(16, 2, 5, topk=70, heads=128, latent=128, rope=64)
    steep = problem(16, 4, 3, topk=70, latent=128, rope=64)
    few = strategy(chunk=32, stages=1, dependent=1, sum_chunks=2)
    wide = strategy(warps=8, stages=1)
    return (
        Run("lists", _FEW, few, {"lists": _lists()}),
        Run(
            "128 heads in chunks",
            shared,
            wide.replace(chunk=32, sum_chunks=2),
            slow=True,
            legal=True,
        ),
        Run("128 heads", shared, wide.replace(chunk=0), device=B200, slow=True, legal=True),
        *(
            Run(f"scale {x}", steep, strategy(chunk=32), {"scale": x}, slow=x < 1)
            for x in (1e-3, 30.0)
        ),
    )


ROW = Row(
    SPARSE,
    cases=tuple(
        # each path runs once
        Case(n, d, s, problem(16, latent=128, topk=k),
             problem(1 if d is B200 else 64, topk=k) if i % 2 == (d is B200) else None,
             (int(d is H200),))
        for d in BOTH for i, (n, (s, k)) in enumerate(PATHS.items())
    ),
    quick={"emulator": ("sm_90a: chunks", "sm_90a: whole lists",
                        "sm_100a: chunks, the last one short")},
    slack=1024,
    largest_feature=20,
    sizes=(
        Size(problem(), 1000, holds=lambda f, p, dev:
             (registers(f, p, dev) <= register_limit(f, dev))
             & (f.sum_chunks * 2 <= MAX_SUMS) & (f.chunk < 256)),
        *(Size(problem(tokens=n), spread=0.7, devices=(H200,)) for n in (1, 64)),
        # many tokens are not cut, and many heads are summed in fewer loads
        Size(problem(tokens=4096), spread=0.7, holds=lambda f, p, dev: f.chunk == 0),
        Size(problem(heads=64, topk=2048), holds=lambda f, p, dev:
             f.sum_chunks.max() == MAX_SUMS // 8),
        *(Size(problem(64, n), devices=(H200,)) for n in (1, 4096)),
        *(Size(problem(heads=h, latent=n, topk=k), devices=(H200,), slow=slow)
          for h, n, k, slow in crossed(
              (8, 16, 24, 32, 64, 96, 128), (64, 256, 512), (1, 17, 250, 2048))),
    ),
    refused=tuple(
        Refused(problem(), s, sentence) for s, sentence in (
            (strategy(chunk=256), "a chunk has whole tiles, and is less than a list"),
            (strategy(chunk=96, tile=64), "a chunk has whole tiles, and is less than a list"),
            (strategy(chunk=64, stages=3), "no more stages than a CTA has tiles"),
            (strategy(chunk=0, dependent=1), "a second kernel is for lists in chunks"),
            (strategy(chunk=128, sum_chunks=4), "loads no more than there are"),
            (strategy(chunk=0, tile=64, warps=8, stages=3), "exceed the shared memory of a CTA"),
        )
    ),
    bad=(
        _bad("positive integer, not 0", {"num_tokens": 0}),
        _bad("12 query heads must be a multiple of 8, of 32", heads=12),
        _bad("head_dim_ckv = 192 must be one of", latent=192),
        _bad("topk = 4096 is more than 2048", topk=4096),
        _bad("more than 67108863 rows of queries", {"num_tokens": 2**24}),
        _bad("lists have more than", {"num_tokens": 2**21}, heads=8, topk=2048),
        _bad("the cache has more than 67108863 tokens", {"num_pages": 2**26}),
        *(Bad(altered(definition(), path, value), _AXES, message) for path, value, message in (
            ("inputs.sparse_indices.dtype", "int64", "sparse_indices must be int32"),
            ("inputs.ckv_cache.dtype", "float16", "must share one dtype"),
            ("outputs", {}, "sparse attention has the outputs"),
        )),
    ),
    runs=_runs(),
    planted=(
        Planted(
            "whole lists", problem(1, 2, 50, topk=75, **_SMALL), strategy(chunk=0),
            {
                "rows that no entry names": (", 16, %rb;", ", 16;"),
                "entries that name nothing": ("%score0_0, 0fFF800000", "%score0_0, 0f00000000"),
                "slot 0 for none": ("%entry0_0, 4294967295", "%entry0_0, 0"),
            },
        ),
    ),
    references=(
        Reference("lists in chunks", definition(16, topk=64, latent=128, rope=32),
                  problem(16, 9, 20, topk=64, latent=128, rope=32),
                  strategy(chunk=32, stages=1), 0.9),
    ),
    same=(Same(strategy(chunk=32, stages=1, dependent=1, sum_chunks=2),
               (_FEW, problem(16, 500, topk=70, **_SMALL))),),
)  # fmt: skip
