"""Sampling problems and strategies that the tests share."""

from __future__ import annotations

from typing import Any

from ptxflow.compiler.device import Device, device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.env.space import Space, enumerate_space

SAMPLING = family("sampling")
H200, B200 = device("h200"), device("b200")
K, P, BOTH = ("top_k",), ("top_p",), ("top_k", "top_p")
DTYPES = {"top_k": "int32", "top_p": "float32"}


def definition(vocab: int, filters: tuple[str, ...] = K) -> dict[str, Any]:
    row = {"shape": ["batch_size"]}
    inputs = {"probs": {"shape": ["batch_size", "vocab_size"], "dtype": "float32"}}
    return {
        "name": f"{'_'.join(filters)}_sampling_from_probs_v{vocab}",
        "axes": {"batch_size": {"type": "var"}, "vocab_size": {"type": "const", "value": vocab}},
        "inputs": inputs | {name: {**row, "dtype": DTYPES[name]} for name in filters},
        "outputs": {"samples": {**row, "dtype": "int64"}},
    }


def problem(vocab: int = 128256, batch: int = 64, filters: tuple[str, ...] = K) -> Problem:
    return SAMPLING.problem(definition(vocab, filters), {"batch_size": batch})


def space(p: Problem, dev: Device = H200) -> Space:
    return enumerate_space(SAMPLING, p, dev)


_BASE: dict[str, int | str] = {
    "ctas": 2, "threads": 256, "vector": 4, "residency": "registers", "unroll": 1, "bits": 10,
    "copies": 1, "candidates": 1024, "group": 1, "resident": 1, "load_cache": "default",
    "load_prefetch": 0,
}  # fmt: skip


def strategy(**changes: int | str) -> Strategy:
    return Strategy("sampling", tuple({**_BASE, **changes}.items()))


#: one kernel for every path through the builder; with the filters that it is for
PATHS = {
    "a cluster, k": (K, strategy()),
    "a cluster, p": (P, strategy(bits=11)),
    "a cluster, both": (BOTH, strategy()),
    "one CTA, both": (BOTH, strategy(ctas=1, bits=12, candidates=2048)),
    "copies": (P, strategy(copies=4, vector=2)),
    "copies, both": (BOTH, strategy(ctas=1, copies=2, vector=1)),
    "read again": (BOTH, strategy(residency="reread", unroll=4, load_cache="no_allocate")),
    "read again, alone": (K, strategy(ctas=1, residency="reread", resident=2, bits=11)),
    "shared": (P, strategy(residency="shared", unroll=4, group=2, load_prefetch=128)),
    "shared, narrow": (K, strategy(residency="shared", vector=1, unroll=4, candidates=2048)),
    "four CTAs, wide": (K, strategy(ctas=4, threads=512, bits=12, candidates=4096)),
}  # fmt: skip
CASES = [(dev, filters, s) for dev in (H200, B200) for filters, s in PATHS.values()]
IDS = [f"{dev.arch}: {name}" for dev in (H200, B200) for name in PATHS]
