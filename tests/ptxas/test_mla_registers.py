"""Latent attention that the masks allow has registers for all it holds, at the widest shapes."""

from __future__ import annotations

from typing import Any

import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.backend.ptxas import assemble, check
from ptxflow.compiler.device import Device
from ptxflow.compiler.family import Strategy
from ptxflow.compiler.kernels import family
from tests.families.mla import B200, H200, decode, prefill, problem, wgmma

WIDE: dict[str, int | str] = {"tile": 64, "warps": 8, "scores": "dims"}


@pytest.mark.parametrize(
    ("dev", "s", "sizes"),
    [
        (H200, decode(chunk=0, **WIDE), {"heads": 64, "latent": 256}),
        (B200, decode(chunk=128, **WIDE), {"heads": 128, "latent": 256, "rope": 128}),
        (H200, prefill(stages=1, parts=2, **WIDE), {"heads": 128, "latent": 256, "rope": 128}),
        (
            H200,
            prefill(queries=3, warps=8, scores="dims", stages=1),
            {"heads": 32, "latent": 256},
        ),
    ],
    ids=["decode h200", "decode b200", "prefill", "three queries"],
)
def test_parts_of_scores_that_would_spill_are_refused(
    dev: Device, s: Strategy, sizes: dict[str, Any]
) -> None:
    p = problem(s.family == "mla_prefill", 1, 4, 2048, 40, **sizes)
    (refusal,) = family(s.family).refusals(p, s, dev)
    assert "sums and queries exceed the registers of a thread" in refusal
    text = write(family(s.family).build(p, s, dev), dev)
    assert any("registers spill" in line for line in check(assemble(text, dev.arch)))


@pytest.mark.parametrize(
    ("dev", "s", "sizes"),
    [
        (H200, decode(warps=8, chunk=0), {"heads": 64, "latent": 128, "rope": 128}),
        (B200, prefill(warps=8, queries=2), {"heads": 64, "latent": 128, "rope": 128}),
        (H200, decode(warps=8, scores="dims", dependent=1, sum_chunks=4), {"heads": 128}),
        (B200, decode(warps=8, chunk=0), {"heads": 128}),
        (B200, prefill(warps=8, parts=2, scores="dims"), {"heads": 128}),
        (H200, wgmma(queries=1, parts=4, sum_chunks=4), {"heads": 128}),
    ],
    ids=[
        "indices for two", "indices for two, prefill", "decode h200", "decode b200", "prefill",
        "wgmma",
    ],
)  # fmt: skip
def test_many_heads_do_not_spill(dev: Device, s: Strategy, sizes: dict[str, Any]) -> None:
    """Where a query's latent and rotary parts are of one length, indices serve both."""
    p = problem(s.family == "mla_prefill", 64, 4, 2048, 40, **sizes)
    assert not family(s.family).refusals(p, s, dev)
    assert check(assemble(write(family(s.family).build(p, s, dev), dev), dev.arch)) == []
