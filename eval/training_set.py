"""The workloads that a policy is trained on, and those that are held out: presets by definition.

A `Row` names definitions and the values of their variable axes. Rows whose family is not
registered are passed over. A definition that no row names takes the row of its family.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptxflow.compiler.families import family_for
from ptxflow.compiler.strategy import Family, Problem
from ptxflow.eval.arguments import product
from ptxflow.eval.definition import Definition, DefinitionError, load, names
from ptxflow.eval.sequences import axes_of

Values = Mapping[str, tuple[int, ...]]
KINDS = ("trained", "held_out", "unseen")


@dataclass(frozen=True)
class Row:
    """Definitions, values of their variable axes, and a typical workload.

    Instead of axes that depend on each other, values may be sizes: see `sequences.axes_of`.
    unseen: definitions with other constants, at the held-out values; they are never trained.
    """

    definitions: tuple[str, ...]
    trained: Values
    held_out: Values
    typical: Mapping[str, int]
    unseen: tuple[tuple[str, Mapping[str, int]], ...] = ()


@dataclass(frozen=True)
class Preset:
    """Defaults of a run; `train` are fields of `TrainConfig`."""

    rows: tuple[Row, ...]
    minutes: float
    measurements: int  # of exact distances during a run
    train: Mapping[str, Any] = field(default_factory=dict)


def octaves(last: int, parts: int, but: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Whole numbers from 1 to `last` in equal steps, `parts` of them an octave, without some."""
    fractions = ((1 << e) * (parts + i) / parts for e in range(last.bit_length()) for i in
                 range(parts))  # fmt: skip
    return tuple(int(v) for v in fractions if v <= last and v == int(v) and v not in but)


GEMM = Row(
    (
        "gemm_n128_k2048", "gemm_n256_k7168", "gemm_n2048_k4096", "gemm_n4096_k4096",
        "gemm_n4096_k14336", "gemm_n5120_k2048", "gemm_n6144_k4096", "gemm_n28672_k4096",
    ),
    trained={"M": (104, *octaves(8192, parts=4, but=(112, 3072)))},
    held_out={"M": (17, 112, 1000, 3072)},
    typical={"M": 1024},
    unseen=(("gemm_n4096_k4096", {"N": 3072}), ("gemm_n5120_k2048", {"K": 3072})),
)  # fmt: skip
RMSNORM = Row(
    (
        "rmsnorm_h512", "rmsnorm_h1536", "rmsnorm_h2048", "rmsnorm_h4096", "rmsnorm_h7168",
        "fused_add_rmsnorm_h2048", "fused_add_rmsnorm_h4096", "fused_add_rmsnorm_h7168",
    ),
    trained={"batch_size": octaves(16384, parts=4, but=(7,))},
    held_out={"batch_size": (7, 100, 700, 3000)},
    typical={"batch_size": 1024},
    unseen=(
        ("rmsnorm_h4096", {"hidden_size": 5120}),
        ("fused_add_rmsnorm_h4096", {"hidden_size": 3072}),
    ),
)  # fmt: skip
HEADS = Row(  # norms of attention heads: short rows, many of them
    ("rmsnorm_h128",),
    trained={"batch_size": octaves(524288, parts=2)},
    held_out={"batch_size": (7, 100, 700, 3000, 400000)},
    typical={"batch_size": 16384},
)  # fmt: skip
SAMPLING = Row(
    tuple(
        f"{kind}_sampling_from_probs_v{size}"
        for kind in ("top_k", "top_p", "top_k_top_p")
        for size in (128256, 129280, 151936)
    ),
    trained={"batch_size": octaves(512, parts=4, but=(7, 20))},
    held_out={"batch_size": (7, 20, 100)},
    typical={"batch_size": 64},
    unseen=(("top_p_sampling_from_probs_v128256", {"vocab_size": 32000}),),
)  # fmt: skip
GDN_DECODE = Row(
    ("gdn_decode_qk16_v32_d128_k_last",),
    trained={"batch_size": octaves(512, parts=8, but=(7, 20))},
    held_out={"batch_size": (7, 20, 100, 300)},
    typical={"batch_size": 64},
)  # fmt: skip
DECODE = Row(
    (
        "gqa_paged_decode_h32_kv4_d128_ps1", "gqa_paged_decode_h32_kv4_d128_ps64",
        "gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged_decode_h32_kv8_d128_ps64",
        "mla_paged_decode_h16_ckv512_kpe64_ps1", "mla_paged_decode_h16_ckv512_kpe64_ps64",
    ),
    trained={
        "sequences": (1, 2, 3, 5, 8, 12, 16, 28, 32, 64, 80, 128, 256),
        "length": (32, 64, 90, 128, 256, 400, 512, 900, 1024, 1536, 2500, 4096, 8192, 16384),
    },
    held_out={"sequences": (6, 20, 100), "length": (200, 3000)},
    typical={"sequences": 16, "length": 1024},
)  # fmt: skip
PREFILL = Row(
    (
        "gqa_paged_prefill_causal_h32_kv4_d128_ps1", "gqa_paged_prefill_causal_h32_kv4_d128_ps64",
        "gqa_paged_prefill_causal_h32_kv8_d128_ps1", "gqa_paged_prefill_causal_h32_kv8_d128_ps64",
        "gqa_ragged_prefill_causal_h32_kv4_d128", "gqa_ragged_prefill_causal_h32_kv8_d128",
        "mla_paged_prefill_causal_h16_ckv512_kpe64_ps1",
        "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
    ),
    trained={
        "sequences": (1, 2, 4, 7, 8, 16, 32),
        "queries": (
            16, 24, 40, 64, 96, 128, 200, 256, 300, 512, 900, 1024, 1500, 2048, 2500, 4096, 6000,
            8192, 16384,
        ),
        "prefix": (0, 300, 1024),
    },
    held_out={"sequences": (3,), "queries": (100, 700, 3000), "prefix": (512, 2048)},
    typical={"sequences": 4, "queries": 1024, "prefix": 0},
)  # fmt: skip
