"""Peers run on the tensors of a problem, and records compare with whichever they have."""

from __future__ import annotations

import pytest
import torch

from ptxflow.eval.peers import PEERS
from ptxflow.eval.records import peer_time


@pytest.mark.parametrize("names", [("hidden_states",), ("hidden_states", "residual")])
def test_rms_norm_takes_both_forms(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.ones(3, 64, dtype=torch.bfloat16) for name in names}
    given: list[tuple[torch.Tensor, tuple[int, ...]]] = []

    def watched(x: torch.Tensor, shape: tuple[int, ...], *rest: object) -> None:
        given.append((x, shape))

    monkeypatch.setattr(torch.nn.functional, "rms_norm", watched)
    call = PEERS["rmsnorm"]["torch.rms_norm"](tensors | {"weight": torch.ones(64).bfloat16()})
    call()
    ((x, shape),) = given
    assert shape == (64,) and (x == len(names)).all()


def test_the_first_peer_is_the_one_compared_with() -> None:
    assert peer_time({"torch.rms_norm": 3.0, "other": 1.0}) == 3.0
    assert peer_time({}) is None
