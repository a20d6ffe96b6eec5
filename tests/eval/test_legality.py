"""Policies never leave the rules, and the check would see it if one did."""

from __future__ import annotations

import pytest

from ptxflow.compiler.family import Family
from ptxflow.compiler.kernels import family
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.eval.sample import legality

ASKED = ("h200", "gdn_decode_qk16_v32_d128_k_last", {"batch_size": 3})


def test_what_a_policy_draws_is_legal() -> None:
    drawn, against = legality.refused(ASKED, 50)
    assert drawn == 50 and against == []


def test_a_rule_that_masks_do_not_know_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = family("gdn_decode")

    class Stricter(Family):
        def refusals(self, *args: object) -> list[str]:
            return ["nothing is allowed"]

    stricter = Stricter(**vars(own))
    monkeypatch.setattr(legality, "find_problem", lambda d, a: (stricter, find_problem(d, a)[1]))
    drawn, against = legality.refused(ASKED, 20)
    assert drawn == 20 and against and "nothing is allowed" in against[0]
