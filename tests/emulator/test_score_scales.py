"""Attention kernels are right at small and at large scales of scores, whatever queries see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.device import Device
from ptxflow.compiler.emulator import emulate
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import family
from ptxflow.eval.verify.cases import causal, dsa_sparse
from ptxflow.eval.verify.cases.case import Case, plain
from tests import dsa_cases as dsa
from tests import gqa_decode_cases as gqa_d
from tests import gqa_prefill_cases as gqa_p
from tests import mla_cases as mla
from tests.mla_cases import B200, H200

LATENT: dict[str, Any] = {"latent": 128, "rope": 64}
GROUP: dict[str, Any] = {"group": 4, "key_heads": 1, "size": 64}
ROWS = mla.problem(True, 1, 3, 40, 11, **LATENT)
PAGES = gqa_p.problem(16, 3, 60, 160, heads=4, kv_heads=2, dim=64)
PACKED = gqa_p.problem(0, 3, 60, 150, heads=4, kv_heads=2, dim=64)
ASYNC = gqa_d.GROUP_PATHS["copied rows"][1]
KERNELS: dict[str, tuple[Device, Problem, Strategy]] = {
    "mla_decode": (H200, mla.problem(False, 1, 2, 75, **LATENT), mla.decode(chunk=64)),
    "mla_prefill": (H200, ROWS, mla.prefill(queries=2, warps=8)),
    "mla_prefill in parts": (B200, ROWS, mla.prefill(queries=2, warps=8, parts=2)),
    "mla_prefill by wgmma": (H200, ROWS, mla.wgmma(tile=32)),
    "mla_prefill by wgmma, in parts, lazy": (
        H200,
        ROWS,
        mla.wgmma(tile=32, parts=4, rescale="lazy", pieces=2),
    ),
    "dsa_sparse": (H200, dsa.problem(16, 4, 3, topk=70, **LATENT), dsa.strategy(chunk=32)),
    "gqa_decode": (H200, gqa_d.problem(3, 50, **GROUP), gqa_d.strategy()),
    "gqa_decode by wgmma": (H200, gqa_d.problem(3, 50, **GROUP), ASYNC),
    "gqa_decode by tcgen05": (B200, gqa_d.problem(3, 50, **GROUP), ASYNC),
    "gqa_prefill of pages": (H200, PAGES, gqa_p.strategy()),
    "gqa_prefill": (H200, PACKED, gqa_p.strategy(tile_kv=32, consumers=1)),
    "gqa_prefill by tcgen05": (B200, PAGES, gqa_p.strategy(consumers=1, overlap=0)),
    "gqa_prefill by tcgen05, lazy": (B200, PACKED, gqa_p.strategy(rescale="lazy")),
}
CASES: dict[str, Callable[..., Case]] = {
    "mla_decode": causal.case,
    "mla_prefill": causal.case,
    "dsa_sparse": dsa_sparse.case,
    "gqa_decode": causal.case,
    "gqa_prefill": causal.case,
}


def wrong(p: Problem, s: Strategy, dev: Device, text: str, case: Case) -> dict[str, int]:
    """Elements of each output that are out of bounds; the kernel has no hazards."""
    tensors = {name: t.copy() for name, t in case.tensors.items()}
    launch = family(p.family).launch(p, s, dev)
    assert not emulate(text, launch, tensors, dict(p.axes), arguments=case.arguments).hazards
    found = {name: plain(tensors[name]) for name in case.expected}
    return {
        name: int((~((low <= found[name]) & (found[name] <= high))).sum())
        for name, (low, high) in case.expected.items()
    }


@pytest.mark.parametrize("name", KERNELS)
def test_scales_of_scores(name: str) -> None:
    """Queries are up to 16 times as long as usual, and some see no key."""
    dev, p, s = KERNELS[name]
    text = write(family(p.family).build(p, s, dev), dev)
    for scale in (1e-3, 30.0):
        case = CASES[p.family](p, scale=scale)
        assert wrong(p, s, dev, text, case) == {"output": 0, "lse": 0}, scale
