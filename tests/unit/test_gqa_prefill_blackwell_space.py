"""The space of gqa_prefill kernels for tcgen05 is what tensor memory and registers can hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.ir import Op
from ptxflow.compiler.kernels.gqa_prefill.decisions import register_limit, resources, row_registers
from ptxflow.compiler.lower import layout
from ptxflow.env.cost import model_tflops
from tests.gqa_prefill_cases import B200, H200, PREFILL, TMEM_CASES, problem, space, strategy


@pytest.mark.parametrize("page", [0, 1, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_typical_space(page: int, dim: int) -> None:
    p = problem(page, dim=dim)
    found = space(p, B200)
    f = found.fields()
    assert len(found) >= 60
    assert (row_registers(f) <= register_limit(f, B200)).all()
    assert (resources(f, p, B200).tmem_columns <= 512).all()
    tflops = model_tflops(PREFILL, f, p, B200)
    assert np.isfinite(tflops).all() and (tflops > 0).all()
    assert tflops.max() <= p.roofline_tflops(B200)


@pytest.mark.parametrize(("page", "s"), TMEM_CASES)
def test_the_cases_of_tests_are_legal(page: int, s: Any) -> None:
    assert PREFILL.refusals(problem(page), s, B200) == []


@pytest.mark.parametrize(
    ("s", "changes", "message"),
    [
        (strategy(consumers=3), {}, "one or two tiles"),
        (strategy(tile_kv=176, consumers=1), {}, "keys by 32"),
        (strategy(tile_kv=128), {}, "exceed tensor memory"),
        (strategy(tile_kv=32), {"dim": 256}, "exceed tensor memory"),
        (strategy(tile_kv=160, consumers=1, stages=1), {}, "exceed the registers"),
        (strategy(pin=1), {}, "for wgmma"),
        (strategy(turns=1), {}, "for wgmma"),
        (strategy(tile_kv=160, consumers=1), {"page": 1}, "128 at most"),
    ],
)
def test_what_rules_refuse(s: Any, changes: dict[str, Any], message: str) -> None:
    refusals = PREFILL.refusals(problem(**changes), s, B200)
    assert any(message in r for r in refusals), refusals


def test_lazy_rescaling_is_for_tensor_memory() -> None:
    refusals = PREFILL.refusals(problem(), strategy(rescale="lazy"), H200)
    assert refusals == ["turns and pinning are for wgmma, lazy rescaling for tcgen05"]


@pytest.mark.parametrize(("page", "s"), TMEM_CASES)
def test_resources_are_those_of_the_kernel(page: int, s: Any) -> None:
    p = problem(page)
    kernel = PREFILL.build(p, s, B200)
    plan, told = layout(kernel.arg), resources(s.fields(), p, B200)
    assert plan.tmem_columns == told.tmem_columns
    assert plan.smem_bytes <= told.smem_bytes
    assert max(r.arg.regs for r in kernel.src if r.op is Op.ROLE) == told.registers


@pytest.mark.parametrize("code", range(3))
def test_sampled_kernels_assemble(code: int) -> None:
    """Without spills, and with the machine code that their instructions claim."""
    p = problem((0, 64, 1)[code], dim=(128, 64, 256)[code])
    found = space(p, B200)
    s = found.strategy(int(found.sample_uniform(1, np.random.default_rng(code))[0]))
    made = compile_kernel(p, s, B200)
    assert made.sass.counts["tcgen05.mma A from TMEM"] and made.sass.counts["tcgen05.st"]
    assert bool(made.sass.counts.get("TMA gather4")) == (code == 2)
