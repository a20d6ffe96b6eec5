"""The work of a gqa_prefill problem, and the resources of its kernels for tcgen05."""

from __future__ import annotations

import numpy as np
import pytest

from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.ir import Op
from ptxflow.env.features import describe_problem
from tests.families.gqa_prefill import B200, H200, PREFILL, TMEM_PATHS, problem
from tests.families.row import space


def test_work_is_counted() -> None:
    p = problem(sequences=4, queries=4096, keys=4096)
    pairs = 4 * 1024 * 1025 / 2
    assert p.flops == 4 * 32 * 128 * pairs
    assert p.bytes == 2 * 128 * 4096 * (2 * 32 + 2 * 8) + 4 * 4096 * 32
    behind = problem(page=64, sequences=1, queries=128, keys=1024)  # keys that were there before
    assert behind.flops == 4 * 32 * 128 * (128 * 896 + 128 * 129 / 2)
    blind = problem(page=64, sequences=1, queries=1024, keys=64)  # most see nothing
    assert blind.flops == 4 * 32 * 128 * (64 * 65 / 2)
    assert p.bound(H200) == "compute"


def test_features_tell_workloads_apart() -> None:
    seen = {
        tuple(describe_problem(problem(*of), H200).values())
        for of in ((0, 1, 6, 6), (0, 4, 4096, 4096), (64, 4, 4096, 4096), (1, 4, 64, 4096))
    }
    assert len(seen) == 4


@pytest.mark.parametrize("name", TMEM_PATHS)
def test_registers_are_those_of_the_widest_role(name: str) -> None:
    page, s = TMEM_PATHS[name]
    p = problem(page)
    kernel = PREFILL.build(p, s, B200)
    widest = max(r.arg.regs for r in kernel.src if r.op is Op.ROLE)
    assert widest == PREFILL.resources(s.fields(), p, B200).registers


@pytest.mark.slow
@pytest.mark.parametrize("code", range(3))
def test_sampled_kernels_assemble(code: int) -> None:
    """Without spills, and with the machine code that their instructions claim."""
    p = problem((0, 64, 1)[code], dim=(128, 64, 256)[code])
    found = space(p, B200)
    s = found.strategy(int(found.sample_uniform(1, np.random.default_rng(code))[0]))
    made = compile_kernel(p, s, B200)
    assert made.sass.counts["tcgen05.mma A from TMEM"] and made.sass.counts["tcgen05.st"]
    assert bool(made.sass.counts.get("TMA gather4")) == (code == 2)
