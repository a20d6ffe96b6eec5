"""The indexer's work, its two kernels, and what the model says of long rows."""

from __future__ import annotations

import numpy as np
import pytest

from ptxflow.compiler.device import Device
from ptxflow.compiler.kernels.dsa_indexer.decisions import (
    digits,
    entries,
    select_registers,
    select_smem,
)
from ptxflow.compiler.kernels.dsa_indexer.select import Select
from ptxflow.env.cost import model_tflops
from ptxflow.env.tasks.definition import load
from tests.families.dsa_indexer import B200, H200, INDEXER, NAME, definition, problem
from tests.families.row import space

AXES = {"batch_size": 3, "max_num_pages": 10, "num_pages": 20}


def test_work_is_counted() -> None:
    given = load(NAME).to_json()
    p = INDEXER.problem(given, AXES)
    keys = 20 * 64  # fewer pages than the tables have room for
    assert p.flops == 2 * 64 * 128 * keys and p.bound(H200) == "memory"
    assert p.bytes == keys * 132 + 3 * 64 * 132 + 4 * (3 + 20 + 3 * 256)
    made = INDEXER.problem(definition(), AXES)
    assert (made.axes, made.bytes) == (p.axes, p.bytes)


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
@pytest.mark.parametrize("topk", [256, 2048])
def test_entries_and_digits_are_enough(dev: Device, topk: int) -> None:
    for pages in (64, 1024):
        p = problem(64, pages, topk=topk)
        found = space(p, dev)
        f = found.fields()
        assert (entries(f, p) >= p["topk"]).all() and (f.bits * digits(f.bits) >= 52).all()
        assert (f.bits * digits(f.bits) <= 64).all()  # of an entry, which has 64 bits
    for code in found.sample_uniform(20, np.random.default_rng(0)):
        s = found.strategy(int(code))
        assert Select(p, s, dev).smem_bytes <= select_smem(s.fields(), p) <= dev.smem_per_block


def test_long_rows_want_clusters() -> None:
    """One sequence alone: several CTAs choose sooner than one."""
    p = problem(1, 2048)
    found = space(p)
    f = found.fields()
    speed = model_tflops(INDEXER, f, p, H200)
    assert f.ctas[speed.argmax()] > 1 and speed[f.ctas == 1].max() < speed.max()


@pytest.mark.parametrize("dev", [H200, B200], ids=lambda d: d.name)
def test_the_second_kernel_fits_its_registers(dev: Device) -> None:
    for topk in (256, 2048):
        p = problem(64, 2048, topk=topk)
        f = space(p, dev).fields()
        assert (select_registers(f, p) * f.threads <= dev.registers_per_sm).all()
        assert select_registers(f, p).max() <= dev.registers_per_thread
