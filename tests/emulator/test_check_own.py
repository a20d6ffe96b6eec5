"""check-ptx finds nothing in our own kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.backend.ptx import write
from ptxflow.compiler.kernels import family
from ptxflow.compiler.launch import evaluate
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.foreign import check
from tests.emulator.described import described
from tests.golden.kernels import read

LONG = ("sampling", "gqa_prefill", "mla_prefill", "gdn_prefill")  # 20 to 40 s each
OWN = {(k.family, k.device): k for k in reversed(read()) if k.family not in LONG}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN, ids=" ".join)
def test_our_own_kernels_are_clean(name: tuple[str, str], tmp_path: Path) -> None:
    problem, strategy, device = OWN[name].bound()
    maker = family(strategy.family)
    small = maker.trial(problem, strategy, device)
    launch = maker.launch(small.problem, strategy, device)
    axes, case = dict(small.problem.axes), case_of(small.problem)
    if small.blocks:
        launch = replace(launch, grid=(str(small.blocks), *launch.grid[1:]))
    space = {w.name: np.full(evaluate(w.bytes, axes), 255, np.uint8) for w in launch.workspace}
    tensors = {**case.tensors, **space}
    given = described(tmp_path, launch, tensors, axes, arguments=case.arguments, blank=set(space))
    verdict = check(write(maker.build(small.problem, strategy, device), device), given, 2)
    assert not verdict.stopped and not verdict.findings
