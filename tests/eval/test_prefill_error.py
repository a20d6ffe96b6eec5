"""Errors of chunked prefill stay within tolerances and do not grow with length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ptxflow.eval.study.prefill_error import FORMS, Form, chunked, head, main, recurrence, shares

TOKENS = 2048


def test_forms_of_kernels_are_within_tolerances_and_one_bfloat16_is_not() -> None:
    """On a head that remembers for thousands of tokens, the hardest."""
    found = shares(head(TOKENS, 0.01, 0), FORMS)
    for form, (spans, state) in found.items():
        if form.operands == "once":
            assert spans.max() > 1  # why there are pairs and float16
        else:
            assert spans.max() < 0.7 and state < 0.6, form
            assert spans[-1] < 1.5 * spans[0], form


@pytest.mark.parametrize("chunk", [16, 48])
def test_a_form_without_roundings_is_the_recurrence(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Form, "terms", lambda self, values, kind: [values])
    h = head(100, 0.5, 1)
    for ours, right in zip(chunked(h, Form(chunk, "once")), recurrence(h), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=2e-6)


def test_the_command_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "600", "--plot", str(tmp_path / "growth.png")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(FORMS)
    assert (tmp_path / "growth.png").stat().st_size > 10_000
